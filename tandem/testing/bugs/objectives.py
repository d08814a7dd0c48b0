"""Bugs of objectives."""

# fmt: off
BUGS = {
    "networks/network.py": [
        ("counts of one micro-batch", "accumulation",
         'max(1, counts["nll"]), {"nll"', 'max(1, int((batch.targets >= 0).sum())), {"nll"'),
        ("a mean over positions, asked or not", "accumulation",
         'loss / max(1, counts["nll"]), {"nll"', 'loss / batch.targets.numel(), {"nll"'),
    ],
}
# fmt: on
