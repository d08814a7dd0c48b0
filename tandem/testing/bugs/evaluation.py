"""Bugs of the ruler."""

LIKELIHOOD = "tests/evaluation/test_likelihood.py"

# fmt: off
BUGS = {
    "evaluation/likelihood.py": [
        ("bytes of all tokens", LIKELIHOOD,
         "scoring.index.numpy()[asked]]", "scoring.index.numpy()[asked] - 1]"),
        ("scores in mixed precision", LIKELIHOOD,
         "enabled=False", "enabled=torch.is_autocast_enabled(device.type)"),
        ("sums in float32", LIKELIHOOD,
         "np.zeros(len(order)), np.zeros", "np.zeros(len(order), np.float32), np.zeros"),
        ("bits without ln 2", LIKELIHOOD,
         "self.nats / math.log(2)", "self.nats"),
        ("a rate is chosen by the documents it is compared on", LIKELIHOOD,
         "slice(1, None, 2)", "slice(0, None, 2)"),
    ],
}
# fmt: on
