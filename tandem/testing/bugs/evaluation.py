"""Bugs of the ruler."""

LIKELIHOOD = "tests/evaluation/test_likelihood.py"

# fmt: off
BUGS = {
    "evaluation/likelihood.py": [
        ("bytes of all tokens", LIKELIHOOD,
         "store.offsets[document] + index][scored]", "store.offsets[document] + index - 1][scored]"),
        ("scores in mixed precision", LIKELIHOOD,
         "enabled=False", "enabled=torch.is_autocast_enabled(device.type)"),
        ("sums in float32", LIKELIHOOD,
         "bit_length()))", "bit_length()), np.float32)"),
        ("positions are counted from 1", LIKELIHOOD,
         "np.frexp(index[scored])", "np.frexp(index[scored] + 1)"),
        ("bits without ln 2", LIKELIHOOD,
         "self.nats / math.log(2)", "self.nats"),
        ("a rate is chosen by the documents it is compared on", LIKELIHOOD,
         "slice(1, None, 2)", "slice(0, None, 2)"),
    ],
    "comparison/pretrain.py": [
        ("the source is exported as it is after training", "tests/export/test_weights.py",
         "can_export = not refusal(type(run.network))", "can_export = True"),
        ("the end is judged twice", "tests/training/test_loop.py",
         "if step.step < self.run.steps:", "if True:"),
    ],
}
# fmt: on
