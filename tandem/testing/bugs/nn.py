"""Bugs of what all networks share: spans, attention, block, cache, head."""

DECODER = "tests/networks/test_decoder.py"
CACHE = "tests/nn/test_cache.py"
FLEX = "tests/nn/test_flex.py"

# fmt: off
BUGS = {
    "nn/spans.py": [
        ("a token reads the next", "causality",
         "i + 1 - window), i + 1)\n\n", "i + 1 - window), (i + 2).clamp_max(int(i.max()) + 1))\n\n"),
        ("a window too long", DECODER,
         "torch.maximum(starts, i + 1 - window)", "torch.maximum(starts, i - window)"),
        ("documents are ignored", "causality",
         "Span(starts if window is None", "Span(0 * starts if window is None"),
    ],
    "nn/tiled.py": [
        ("a mask one key too wide", "tests/nn/test_attention.py",
         "[(lo[:, s] <= j) & (j < hi[:, s])", "[(lo[:, s] <= j) & (j <= hi[:, s])"),
        ("a decoding step reads what is hidden", "tests/nn/test_attention.py",
         ".add_(mask)", ".add(mask)"),
        ("gradients by products without the mean of a softmax", "tests/nn/test_attention.py",
         "_less(dy, means)", "_less(dy, 0 * means)"),
        ("the last block of a triangle alone moves its queries", "tests/nn/test_attention.py",
         "dq[:, a:] += of_block", "dq[:, a:] = of_block"),
    ],
    "nn/flex.py": [
        ("blocks of keys by queries are listed the other way", FLEX,
         "kind.swapaxes(1, 2) for kind", "kind for kind"),
        ("a block is full where a span begins or ends in it", FLEX,
         "hi // BLOCK, lo < hi, Q, N) == BLOCK", "-(-hi // BLOCK), lo < hi, Q, N) == BLOCK"),
        ("a span of nothing touches a block", FLEX,
         "reads & (first < end)", "first < end"),
        ("all rows have the blocks of the first", FLEX,
         "np.arange(rows)[:, None] * of_queries", "np.zeros_like(np.arange(rows))[:, None]"),
    ],
    "nn/block.py": [
        ("an adapter in place of a matrix adds nothing", "tests/export/test_modelling.py",
         "self.key_heads, itself(self.qkv)", "self.key_heads, next(self.qkv.modules())"),
        ("no norm before attention", "tests/nn/test_block.py",
         "self.qkv(self.attention_norm(x))", "self.qkv(x)"),
        ("keys are not normed", "tests/nn/test_block.py",
         "(self.q_norm(q), self.k_norm(k))", "(self.q_norm(q), k)"),
        ("the rotation's float32 reaches the reader", "tests/nn/test_block.py",
         "heads.transpose(1, 2).to(dtype)", "heads.transpose(1, 2)"),
        ("no residual of attention", "tests/nn/test_block.py",
         "return x + dropped(self.output(", "return dropped(self.output("),
        ("only the first block is compiled", "tests/nn/test_block.py",
         "for block in blocks:", "for block in blocks[:1]:"),
    ],
    "nn/rope.py": [
        ("positions stay on the host", "device",
         "cls(positions_T.to(like.device)", "cls(positions_T"),
        ("pairs of the other kind", "tests/nn/test_rope.py",
         "x_BTHD.unflatten(-1, (-1, 2)).unbind(-1)", "x_BTHD.chunk(2, dim=-1)"),
        ("angles of half the width", "tests/nn/test_rope.py",
         "-pairs / head_width", "-2 * pairs / head_width"),
        ("angles in float32", "tests/nn/test_rope.py",
         "dtype=torch.float64, device=positions_T.device",
         "dtype=torch.float32, device=positions_T.device"),
    ],
    "nn/norm.py": [
        ("eps is ignored", "tests/nn/test_norm.py",
         "nn.RMSNorm(width, eps=eps)", "nn.RMSNorm(width)"),
        ("LayerNorm keeps its bias", "tests/nn/test_norm.py",
         "nn.LayerNorm(width, eps=eps, bias=bias)", "nn.LayerNorm(width, eps=eps, bias=True)"),
    ],
    "nn/mlp.py": [
        ("gate and value exchanged", "tests/nn/test_mlp.py",
         "gate, h = h.chunk", "h, gate = h.chunk"),
        ("the wrong form of GELU", "tests/nn/test_mlp.py",
         "\"tanh\" if", "\"none\" if"),
    ],
    "nn/init.py": [
        ("depth does not scale the outputs", "tests/nn/test_init.py",
         "deviation = 0.02 / math.sqrt(2 * depth) if role", "deviation = 0.02 if role"),
        ("embeddings are left to PyTorch", "initialisation",
         "draw(module.weight, module.role, (len(module.weight),), rows=module.like)", "pass"),
        ("a row apart from its table goes by its own shape", "tests/nn/test_init.py",
         "rows=module.like", "rows=None"),
        ("norms decay", "tests/training/test_optimiser.py",
         "\"thought\"} | EXPERTS", "\"thought\", \"norm\"} | EXPERTS"),
    ],
    "nn/cache.py": [
        ("a fork writes where its origin writes", CACHE,
         "Cache(self.window, held, 0, held.shape[3])", "Cache(self.window, self.kv, self.start, self.end)"),
        ("a ring one too short", CACHE,
         "self.end - self.window)", "self.end - self.window + 1)"),
        ("growing loses the oldest", CACHE,
         "self.kv[:, :, :, self.start : self.end]\n        self.kv,",
         "self.kv[:, :, :, self.start + 1 : self.end + 1]\n        self.kv,"),
    ],
    "nn/head.py": [
        ("IGNORE is asked", "loss",
         "coefficients_NS.masked_fill(~asked_NS, 0)", "coefficients_NS"),
        ("a score of what is not asked", "rows",
         "new_zeros(len(targets_N)", "new_ones(len(targets_N)"),
    ],
}
# fmt: on
