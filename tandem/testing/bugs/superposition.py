"""Bugs of Token Superposition Training: bags, phases, mixtures of experts, readings."""

BAGS = "tests/corpus/test_bags.py"
MOE = "tests/nn/test_moe.py"
PHASES = "tests/objectives/test_phases.py"
SUPERPOSITION = "tests/objectives/test_superposition.py"
SWITCH = "tests/training/test_switch.py"
TRANSITION = "tests/analysis/test_transition.py"

# fmt: off
BUGS = {
    "nn/head.py": [
        ("a token met twice is likely twice", SUPERPOSITION,
         "asked_NS & ~_repeated(targets_NS, asked_NS)", "asked_NS"),
    ],
    "nn/moe.py": [
        ("gate and up of an expert are one matrix to Muon", "tests/training/test_muon.py",
         'role="experts", parts=(inner, inner))', 'role="experts")'),
        ("weights of the chosen do not add up to one", MOE,
         "p_Nk / p_Nk.sum(-1, keepdim=True)", "p_Nk"),
        ("experts answer other tokens", MOE,
         "y_MC[by_expert.argsort()]", "y_MC[by_expert]"),
        ("the router in mixed precision", MOE,
         "enabled=False", "enabled=torch.is_autocast_enabled(x.device.type)"),
        ("the balance loss moves nothing", MOE,
         "p_NE.mean(0)))", "p_NE.detach().mean(0)))"),
    ],
    "networks/network.py": [
        ("extra terms are recorded and not learned", MOE,
         "loss = loss + weight / max(1, counts[name]) * extra[name]", "pass"),
        ("routings pile up from pass to pass", MOE,
         "routings, self.routings = self.routings, []", "routings = self.routings"),
    ],
    "objectives/phases.py": [
        ("a share in binary", PHASES,
         "Fraction(str(amount))", "Fraction(amount)"),
        ("positions pass for tokens of text", PHASES,
         "return phase.view.read(step - phase.first)", "return self.positions(step)"),
        ("every phase starts its view at the run's step", PHASES,
         "phase.view.batch(step - phase.first,", "phase.view.batch(step,"),
    ],
    "objectives/superposition.py": [
        ("the stream starts anew at the switch", PHASES,
         "rows.from_token(bags.read(last))", "rows.from_token(0)"),
        ("counts of one micro-batch in bags", "accumulation",
         "[counts[slot] for slot in slots]", "[self.count(network, batch)[slot] for slot in slots]"),
        ("weights are not divided by their sum", SUPERPOSITION,
         "weight / (count * mass)", "weight / count"),
        ("part of a bag has the entropy of all of it", SUPERPOSITION,
         "per_slot * (batch.targets != IGNORE)", "per_slot.expand(batch.targets.shape)"),
        ("a mean over all targets", SUPERPOSITION,
         'if reduce == "tokens":', "if True:"),
        ("the mean of embeddings in bfloat16", SUPERPOSITION,
         "embedded.to(torch.promote_types(embedded.dtype, torch.float32))", "embedded"),
        ("the sum of a bag's embeddings", SUPERPOSITION,
         " / tokens.shape[2])", ")"),
        ("tables are drawn anew unasked", SWITCH,
         'redraws=c.reinit_at_switch != "none"', "redraws=True"),
    ],
    "training/run.py": [
        ("learned positions are drawn anew with the tables", SWITCH,
         'role[name] == "head" or name.endswith("table.weight")', 'role[name] in ("head", "embedding")'),
    ],
    "corpus/bags.py": [
        ("a bag is asked for itself", BAGS,
         "asked = read + s + np.arange(self.slots)", "asked = read + 1 + np.arange(self.slots)"),
        ("the last bag is dropped", BAGS,
         "asked < L + self.tail", "asked < L"),
        ("bags know documents by their tokens", BAGS,
         "if self.documents:", "if True:"),
        ("short documents are folded", BAGS,
         "np.where(lengths > bag, lengths // bag, 0)", "lengths // bag"),
        ("a folded document is asked for the next one", BAGS,
         "np.where(asked < ends, store", "np.where(asked < ends + 1, store"),
        ("folded bags forget where their document starts", BAGS,
         "np.maximum(np.arange(l) - index.reshape(rows, l), 0)", "np.zeros((rows, l), np.int64)"),
    ],
    "comparison/trained.py": [
        ("a model of bags passes for a language model", SWITCH,
         "if run.note and not unfinished:", "if False:"),
    ],
    "comparison/readings.py": [
        ("losses on a line in the steps", "tests/comparison/test_readings.py",
         "shorter * (longer / shorter) ** share", "(shorter + (longer - shorter) * share)"),
        ("a loss before the shortest run is the loss of that run", "tests/comparison/test_readings.py",
         "if runs[0][1] < method.nats:", "if False:"),
    ],
    "analysis/transition.py": [
        ("the jump is to the lowest loss", TRANSITION,
         '"jump": _loss(first) - low', '"jump": float(loss.min()) - low'),
        ("steps are counted from the start of the run", TRANSITION,
         'step - first["phase"]', "step"),
        ("the first record below the baseline is enough", TRANSITION,
         "since = 1 + np.flatnonzero(above & met).max(initial=-1)", "since = int((~above & met).argmax())"),
        ("the baseline is met after as many records", TRANSITION,
         "np.interp(flops, spent,", "np.interp(np.arange(len(flops)), np.arange(len(spent)),"),
        ("means of the baseline reach further back", TRANSITION,
         "trailing_mean(np.interp(flops, spent, reached), n)", "np.interp(flops, spent, trailing_mean(reached, n))"),
        ("a baseline that ended stays level", TRANSITION,
         "met = flops <= spent[-1]", "met = flops > 0"),
        ("whatever a run asked for first was bags", TRANSITION,
         'if not before or BAGS not in before[-1]["terms"]:', "if not before:"),
        ("means reach back into the bags", TRANSITION,
         "trailing_mean(loss, n)\n", "trailing_mean(course([*before, *after])[2], n)[len(before) :]\n"),
    ],
    "analysis/mutual_information.py": [
        ("no correction for the sample", "tests/analysis/test_mutual_information.py",
         ".sum() - bias)", ".sum())"),
        ("an interval of one document", "tests/analysis/test_mutual_information.py",
         "range(groups if groups > 1 else 0)", "range(groups)"),
        ("a mixture is measured by its documents, not by its shares", "tests/analysis/test_mutual_information.py",
         "order.documents(0, order.once)", "(np.arange(len(order.store)), 0)"),
        ("an interval as of independent estimates", "tests/analysis/test_mutual_information.py",
         "* jackknife(estimates)", "* jackknife(estimates) / (n - 1)"),
        ("weights of a bag rise", "tests/analysis/test_mutual_information.py",
         "slot**law.exponent", "slot**-law.exponent"),
        ("rare ids are the classes", "tests/analysis/test_mutual_information.py",
         "np.argsort(-counts", "np.argsort(counts"),
        ("pairs across documents", "tests/analysis/test_mutual_information.py",
         "document[:-distance] == document[distance:]", "document[:-distance] >= 0"),
    ],
}
# fmt: on
