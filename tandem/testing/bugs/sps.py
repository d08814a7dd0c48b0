"""Bugs of State-Prediction Separation, the traps of its masks first."""

SPS = "tests/networks/test_two_streams.py"
PARITY = "tests/parity/test_sps.py"
ROLES = "tests/analysis/test_gradient_roles.py"
ANALYSE = "tests/analysis/test_analyse.py"
VIEWS = "tests/corpus/test_views.py"

# fmt: off
BUGS = {
    "networks/sps.py": [
        ("sessions that are joined forget what they predicted", "join",
         "self.rings = [Cache.joined(", "_ = [Cache.joined("),
        ("predictions stay readable one token too long", SPS,
         "torch.maximum(starts, i - reach)", "torch.maximum(starts, i - reach - 1)"),
        ("predictions stay readable for ever", PARITY,
         "for reach in (state_window, config.window)", "for reach in (state_window, None)"),
        ("a window that crosses documents", "documents",
         "else torch.maximum(starts, i - reach)", "else (i - reach).clamp_min(0) + 0 * starts"),
        ("pairs of the other kind by default", PARITY,
         'Pairing = "adjacent"', 'Pairing = "halves"'),
        ("an input reads its own prediction", PARITY,
         "(Span(p_lo, i), Span(p_lo, i + 1))", "(Span(p_lo, i + 1), Span(p_lo, i + 1))"),
        ("streams change places", PARITY,
         "x = torch.cat((x, self.first_predictions(x)))",
         "x = torch.cat((self.first_predictions(x), x))"),
        ("the window cuts the stream that persists", "decoding",
         '(kept, recent) if config.persistent == "inputs" else (recent, kept)',
         '(recent, kept) if config.persistent == "inputs" else (kept, recent)'),
        ("the ring is one too short", "decoding",
         "[Cache(network.config.window) for", "[Cache(network.config.window and network.config.window - 1) for"),
        ("pads are read by both streams", "unequal_prompts",
         "(self.pads[:, None] - first)", "(0 * self.pads[:, None] - first)"),
        ("a fork shares its rings", "fork",
         "[ring.fork(rows) for ring in self.rings]", "self.rings"),
        ("the spans of all blocks but the last are never renewed", "fixed",
         "return plan.both, plan.one", "return (plan.one,)"),
        ("the restricted state is not", PARITY,
         "other.state_window = window", "other.state_window = None"),
        ("a block reads one key too few", "flops",
         "return c.depth * (inputs + predictions) - (", "return c.depth * (inputs + predictions) - 1 - ("),
        ("the last block is counted whole", "flops",
         "linear=2 * plain.linear - unread", "linear=2 * plain.linear"),
        ("the ring is not counted", "cache",
         "2 * c.depth * G * D * (n + recent(n))", "2 * c.depth * G * D * n"),
    ],
    "analysis/gradient_roles.py": [
        ("norms of inputs are forgotten", ROLES,
         "* (self.given.square().sum(-1) + has_bias)", "* (1 + has_bias)"),
        ("heads share no norm", ROLES,
         "x.sum(2) if x.ndim == 4", "x.flatten(2) if x.ndim == 4"),
        ("ratios of squares", ANALYSE,
         ".sum(0).sqrt().cpu()", ".sum(0).cpu()"),
        ("all rows are of the first documents", ANALYSE,
         "horizon, begin)", "horizon, 0)"),
        ("ratios are smoothed, not their logarithms", ANALYSE,
         "10 ** smoothed(np.log10(means),", "smoothed(np.array(means),"),
    ],
    "analysis/state_window.py": [
        ("a cut beyond the window of a decoder", "tests/analysis/test_analyse.py",
         "min(tokens - 1, tokens if network.config.reach is None else network.config.reach)", "tokens - 1"),
        ("a deviation in place of an error", ANALYSE,
         "ddof=1) / D**0.5", "ddof=1)"),
        ("the last loss is the first", ANALYSE,
         "_smoothing(tokens))[-1]", "_smoothing(tokens))[0]"),
    ],
    "nn/norm.py": [
        ("eps ten times too large", PARITY,
         "nn.RMSNorm(width, eps=eps)", "nn.RMSNorm(width, eps=10 * eps)"),
    ],
    "nn/block.py": [
        ("queries of rows that only are read", SPS,
         "parts = ((qkv.weight[:rows], asking),", "parts = ((qkv.weight[:rows], everything[: len(asking)]),"),
    ],
    "corpus/views.py": [
        ("the document end opens the next document", VIEWS,
         "starts = np.maximum(begins[:-1].reshape(rows, T)", "starts = np.maximum(begins[1:].reshape(rows, T)"),
    ],
}
# fmt: on
