"""Bugs of the fused kernels, which go along spans, and of sessions in memory that stays."""

KERNELS = "tests/nn/test_attention_triton.py::test_triton_is_the_definition"
DECODING = "tests/nn/test_attention_triton.py::test_decoding_in_shares_is_the_definition"
SAME_BITS = "tests/nn/test_attention_triton.py::test_gradients_have_the_same_bits_in_every_run_where_that_is_asked_for"
CAPTURED = "tests/networks/test_captured.py::test_a_fixed_session_says_what_a_session_says"

# fmt: off
BUGS = {
    "nn/attention_kernels.py": [
        ("the walk ends with the first query", KERNELS,
         "start, end = tl.load(lo + first), tl.load(hi + last)",
         "start, end = tl.load(lo + first), tl.load(hi + first)"),
        ("the walk begins with the last query", KERNELS,
         "start, end = tl.load(lo + first), tl.load(hi + last)", "start, end = tl.load(lo + last), tl.load(hi + last)"),
        ("full tiles begin a block early", KERNELS,
         "tl.minimum(tl.cdiv(tl.maximum(every_from - start, 0), BLOCK), blocks)",
         "tl.minimum(tl.maximum(every_from - start, 0) // BLOCK, blocks)"),
        ("full tiles end a block late", KERNELS,
         "tl.maximum(every_to - start, 0) // BLOCK - before", "tl.cdiv(every_to - start, BLOCK) - before"),
        ("blocks behind the full ones are left out", KERNELS,
         "n + tl.where(n < before, 0, full) if MASKED", "n if MASKED"),
        ("the walk is the first group's", KERNELS,
         "end = tl.maximum(end, tl.load(hi + g * to_group + last))",
         "end = tl.minimum(end, tl.load(hi + g * to_group + last))"),
        ("what everybody reads is what somebody reads", KERNELS,
         "every_to = tl.minimum(every_to, tl.load(hi + g * to_group + first))",
         "every_to = tl.maximum(every_to, tl.load(hi + g * to_group + last))"),
        ("keys ask the first group for its readers", KERNELS,
         "at = readers + b * to_row + g * N", "at = readers + b * to_row"),
        ("the gradient of the sum of weights is left out", KERNELS,
         "ds = p * (tl.dot(dy, tl.trans(values), input_precision=\"ieee\") - delta[:, None])",
         "ds = p * tl.dot(dy, tl.trans(values), input_precision=\"ieee\")"),
        ("in one walk, the gradient of the sum of weights is left out", KERNELS,
         'ds = (p * (tl.dot(v, tl.trans(gradient), input_precision="ieee") - dot[None, :]))',
         'ds = (p * tl.dot(v, tl.trans(gradient), input_precision="ieee"))'),
        ("in one walk, a tile's last query is not added", KERNELS,
         "there = (i[None, :] < end)", "there = (i[None, :] + 1 < end)"),
        ("in one walk, the last sum replaces the others", KERNELS,
         'tl.atomic_add(dq + i[None, :] * dq_stride + d, part, mask=there, sem="relaxed")',
         "tl.store(dq + i[None, :] * dq_stride + d, part, mask=there)"),
        ("the log-sum-exp goes on to base e", KERNELS,
         "tl.load(lse + line, mask=here, other=0.0) * LOG2_E, mask=here)",
         "tl.load(lse + line, mask=here, other=0.0), mask=here)"),
        ("shares overlap", DECODING,
         "end = tl.minimum(start + keys_per_share, end)", "end = end"),
    ],
    "nn/attention_triton.py": [
        ("in one walk, the gradient of queries begins with ones", KERNELS,
         "torch.zeros_like(x, dtype=torch.float32)", "torch.ones_like(x, dtype=torch.float32)"),
        ("in one walk, the gradient of queries is not scaled", KERNELS,
         "torch.mul(total, scale, out=x)", "torch.mul(total, 1, out=x)"),
        ("it walks once though the same bits are asked for", SAME_BITS,
         "not torch.are_deterministic_algorithms_enabled()", "True"),
        ("a key is read by a query that ends before it", KERNELS,
         "np.searchsorted(of_group, j, \"right\")", "np.searchsorted(of_group, j, \"left\")"),
        ("all rows have the documents of the first", KERNELS,
         "bounds.stride(1) if bounds.shape[1] > 1 else 0", "0"),
    ],
    "nn/cache.py": [
        ("a ring in fixed memory stands once", CAPTURED,
         "(2, -1)).index_copy_(4, numbers % (self.window + 1), twice)",
         "(2, -1))[:, :, :, :1].index_copy_(4, numbers % (self.window + 1), twice[:, :, :, :1])"),
    ],
    "networks/captured.py": [
        ("the device reads the column before", CAPTURED,
         "self.clock.fill_(self.columns)\n", "self.clock.fill_(self.columns - 1)\n"),
        ("a graph keeps its first spans", CAPTURED,
         "plan.fused.take_over(new.fused)", "pass"),
    ],
    "networks/double_decoder_session.py": [
        ("a fixed block does not read its newest token", CAPTURED,
         "torch.tensor([self.columns - 1])", "torch.tensor([self.columns - 2])"),
        ("a fixed block stays at position 0", CAPTURED,
         "self.network.rotation(self.clock, x.shape[1], x)", "self.network.rotation(0, x.shape[1], x)"),
    ],
}
