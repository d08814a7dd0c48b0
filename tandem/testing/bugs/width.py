"""Bugs of width transfer: rates, draws and logits that do not follow the width, and a check that would not see it."""

OPTIMISER = "tests/training/test_optimiser.py"
CHECK = "tests/analysis/test_coordinate_check.py"

# fmt: off
BUGS = {
    "training/optimiser.py": [
        ("width transfer speeds hidden matrices up", OPTIMISER,
         "scale /= width_ratio(network)", "scale *= width_ratio(network)"),
        ("width transfer slows tables, too", OPTIMISER,
         "if role[name] in HIDDEN:", "if role[name] in DECAYED:"),
        ("every group moves at the same rate", OPTIMISER,
         'group["lr"] = rate * group["scale"]', 'group["lr"] = rate'),
        ("parts are not told apart", OPTIMISER,
         'config.lr_scale.get(name.partition(".")[0], 1.0)', '1.0'),
        ("a part that is not there is passed over", OPTIMISER,
         "for part in config.lr_scale.keys() - set(parts):", "for part in ():"),
    ],
    "training/muon.py": [
        ("muon takes no notice of width transfer", OPTIMISER,
         "(recipe.network.base_width or recipe.network.width) != recipe.network.width", "False"),
    ],
    "nn/init.py": [
        ("a wider network is drawn as wide as ever", "tests/nn/test_init.py",
         "shrink = width_ratio(network) ** -0.5", "shrink = 1.0"),
        ("tables shrink with the width", "tests/nn/test_init.py",
         "if role in HIDDEN else 1.0", "if True else 1.0"),
    ],
    "nn/norm.py": [
        ("logits are not scaled", "tests/nn/test_norm.py",
         "made.scale = scale", "made.scale = 1.0"),
    ],
    "networks/decoder.py": [
        ("logits are divided by the ratio, not its root", "tests/networks/test_width.py",
         "final_norm(c, c.width_ratio**-0.5)", "final_norm(c, c.width_ratio**-1)"),
    ],
    "training/schedule.py": [
        ("a warm-up from zero is one like any other", "tests/training/test_schedule.py",
         "step if self.config.warmup_from_zero else step + 1", "step + 1"),
    ],
    "analysis/coordinate_check.py": [
        ("a wider network has no more heads", CHECK,
         '"heads": c.heads * width / c.width,', '"heads": c.heads,'),
        ("both are measured with width transfer", CHECK,
         '("untransferred", None)', '("untransferred", base)'),
        ("scales are taken within the warm-up", CHECK,
         "other.schedule = lambda step: 1.0", "pass"),
        ("scales are those of a batch that was learned", CHECK,
         "coordinates(other, self.config.steps)", "coordinates(other, 0)"),
    ],
    "analysis/analysis.py": [
        ("what a block put out last stands for all its passes", CHECK,
         "total, count = self.get(name, (0.0, 0))", "total, count = 0.0, 0"),
    ],
}
# fmt: on
