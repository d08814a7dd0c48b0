"""Bugs of objectives."""

# fmt: off
BUGS = {
    "objectives/next_token.py": [
        ("counts of one micro-batch", "accumulation",
         "counts[\"nll\"])", "self.count(network, batch)[\"nll\"])"),
        ("a mean over positions, asked or not", "accumulation",
         'loss / max(1, counts["nll"])', "loss / batch.targets.numel()"),
    ],
}
# fmt: on
