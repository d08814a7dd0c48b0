"""Bugs of the Context-Ready Transformer, of conversion and of pointer chasing."""

CONTEXT_READY = "tests/networks/test_context_ready.py"

# fmt: off
BUGS = {
    "networks/context_ready.py": [
        ("the first position streams uncorrected", "decoding",
         "e + self.network.correct(h, e, first)", "e + self.network.correct(h, e, first).masked_fill(first, 0)"),
        ("a document hears from the one before", "documents",
         "h = h.masked_fill(first, 0)", "h = h.masked_fill(torch.zeros_like(first), 0)"),
        ("a fork forgets what is carried", "fork",
         "self.inner.fork(rows), carry, self.passes", "self.inner.fork(rows), None, self.passes"),
        ("training pays for a correction too many", "flops",
         "(K - 1 if c.unroll", "(K if c.unroll"),
        ("the carried vector costs nothing", "cache",
         "inner.cache(n) + c.width", "inner.cache(n)"),
        ("the first pass is corrected already", CONTEXT_READY,
         "passes - 1):", "passes):"),
        ("what is carried comes after the final norm", CONTEXT_READY,
         "h = self.carry(x, self.wrapped.states(x, reader))", "h = self.carry(x, self.wrapped.run(x, reader))"),
        ("corrections add up over passes", CONTEXT_READY,
         "self.correct(h.roll(1, dims=1), e, first)", "plus(self.correct(h.roll(1, dims=1), e, first), c)"),
        ("a conversion zeroes both matrices", CONTEXT_READY,
         "nn.init.zeros_(self.F.down.weight)", "nn.init.zeros_(self.F.up.weight), nn.init.zeros_(self.F.down.weight)"),
        ("the most passes are never drawn", CONTEXT_READY,
         "c.passes + 1, ()", "c.passes, ()"),
        ("other rows decide when a score has converged", CONTEXT_READY,
         "c = torch.where(moving[..., None], new, c)", "c = new"),
        ("documents before decide when a score has converged", CONTEXT_READY,
         "(count - moved.long()).gather(1, begins)", "0"),
        ("a session carries on from an earlier position", CONTEXT_READY,
         "network.carry(x, z)[:, -1:]", "network.carry(x, z)[:, -2:-1]"),
        ("a prediction carries what its token brought", CONTEXT_READY,
         "else self.wrapped.first_prediction, z", "else x, z"),
        ("experts of recomputed passes are told of again", CONTEXT_READY,
         "self.wrapped.routings = []", "pass"),
        ("many rows are streamed whatever passes are asked", CONTEXT_READY,
         'walks = asked == "stream" and e.device', "walks = e.device"),
        ("nothing is recomputed", CONTEXT_READY,
         "if self.recompute and torch.is_grad_enabled():  # of", "if not torch.is_grad_enabled():  # of"),
        ("a blind correction speaks at the first position", CONTEXT_READY,
         "return F(self.norm(h)).masked_fill(first, 0)", "return F(self.norm(h))"),
    ],
    "networks/head_ffn.py": [
        ("the MLP at the end is free", "flops",
         "cost.linear + 8 *", "cost.linear + 0 *"),
    ],
    "nn/cache.py": [
        ("training through time sees one key too few", CONTEXT_READY,
         "self.k.shape[2] - self.window)", "self.k.shape[2] - self.window + 1)"),
    ],
    "training/run.py": [
        ("every micro-batch draws for itself", CONTEXT_READY,
         ".keyed(key, part)", ".keyed(key + part, part)"),
    ],
    "evaluation/pointer_chasing.py": [
        ("the answers stand in the input", "tests/evaluation/test_pointer_chasing.py",
         "[answers] if c.answers_in_input else []", "[answers]"),
        ("a later level asks its own keys", "tests/evaluation/test_pointer_chasing.py",
         "keys[level - 1][order], answers.gather(1, order)", "keys[level - 1][order], answers"),
    ],
}
