"""Bugs of the fused kernels, which go along spans, and of sessions in memory that stays."""

KERNELS = "tests/nn/test_attention_triton.py::test_triton_is_the_definition"
DECODING = "tests/nn/test_attention_triton.py::test_decoding_in_shares_is_the_definition"
LAID_OUT = "tests/nn/test_attention_triton.py::test_gradients_are_laid_out_like_their_tensors"
HEAD = "tests/nn/test_head.py::test_in_one_kernel_it_says_the_same"
IN_ONE = "tests/nn/test_cache.py::test_one_launch_writes_what_each_fixed_cache_would"
BLOCKS = "tests/nn/test_flex.py::test_blocks_from_spans_are_those_of_the_evaluated_mask"
COMPILED = "tests/networks/test_captured.py::test_compiled_blocks_serve_no_session_but_a_fixed_one"
AS_THEY_ARE = "tests/nn/test_attention_triton.py::test_a_compiled_block_takes_gradients_as_they_are"

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
        ("keys are not told the gradient of the sum of weights", KERNELS,
         'ds = (p * (tl.dot(v, tl.trans(gradient), input_precision="ieee") - dot[None, :]))',
         'ds = (p * tl.dot(v, tl.trans(gradient), input_precision="ieee"))'),
        ("the log-sum-exp goes on to base e", KERNELS,
         "sums = tl.load(lse + line, mask=here, other=0.0) * LOG2_E",
         "sums = tl.load(lse + line, mask=here, other=0.0)"),
        ("the gradient of queries is not scaled", KERNELS,
         "i, acc * scale, here & (group == g)", "i, acc, here & (group == g)"),
        ("a source's first block is read in the source before", DECODING,
         "is_past = n >= firsts[s]", "is_past = n > firsts[s]"),
        ("shares overlap", DECODING,
         "end = tl.minimum(start + keys_per_share, end)", "end = end"),
    ],
    "nn/attention_triton.py": [
        ("operators of a copy take the place of these",
         "tests/nn/test_attention_triton.py::test_a_copy_has_operators_of_its_own",
         'NAMESPACE = re.sub(r"\\W", "_", __name__, flags=re.ASCII)', 'NAMESPACE = "tandem"'),
        ("gradients are dense", LAID_OUT, "x.new_empty_strided(x.shape, x.stride())", "_empty_like(x)"),
        ("gradients of repeated keys share memory", LAID_OUT, "if size > 1 and stride < extent:", "if False:"),
        ("a key is read by a query that ends before it", KERNELS,
         "np.searchsorted(of_group, j, \"right\")", "np.searchsorted(of_group, j, \"left\")"),
        ("all rows have the documents of the first", KERNELS,
         "bounds.stride(1) if bounds.shape[1] > 1 else 0", "0"),
    ],
    "nn/head_triton.py": [
        ("the last ids have no part in the sum", HEAD,
         "for first in range(0, V, BLOCK)", "for first in range(0, V - 15, BLOCK)"),
        ("the gradient of the targets is left out", HEAD, "gradient -= ", "gradient -= 0 * "),
        ("only the first target is asked", HEAD,
         "total += tl.load(weights + slots + s)", "total += tl.load(weights + slots)"),
        ("a target met twice is subtracted once", HEAD,
         "tl.where(target == tl.load(targets + slots + other)", "tl.where(s == other"),
    ],
    "nn/cache_triton.py": [
        ("in one launch, a ring's entry stands once", IN_ONE,
         "tl.store(at + ring * to_entry, k, mask=there)", "tl.store(at, k, mask=there)"),
        ("in one launch, only the first store is written", IN_ONE,
         "kernel[(B * G, len(stores))]", "kernel[(B * G, 1)]"),
        ("in one launch, a ring is entered a place late", IN_ONE,
         "number % ring if ring > 0 else number", "(number + 1) % ring if ring > 0 else number"),
    ],
    "nn/block.py": [
        ("gradients are copied before a graph takes them", AS_THEY_ARE,
         "torch._functorch.config.guess_tangent_strides_as_outputs = True\n", "pass\n"),
        ("a fixed session's blocks are not compiled", COMPILED,
         "torch.is_grad_enabled() or getattr(reader, \"clock\", None) is not None", "torch.is_grad_enabled()"),
        ("every session's blocks are compiled", COMPILED,
         "torch.is_grad_enabled() or getattr(reader, \"clock\", None) is not None", "True"),
    ],
    "nn/flex.py": [
        ("all rows read the blocks of the first", BLOCKS,
         "np.expand_dims(numbers, 1), np.expand_dims(order, 1)", "numbers[:, None], order[:, None]"),
    ],
    "nn/cache.py": [
        ("a ring in fixed memory stands once", "fixed",
         "(2, -1)).index_copy_(4, numbers % (self.window + 1), twice)",
         "(2, -1))[:, :, :, :1].index_copy_(4, numbers % (self.window + 1), twice[:, :, :, :1])"),
    ],
    "networks/captured.py": [
        ("the device reads the column before", "fixed",
         "self.clock.fill_(self.columns)\n", "self.clock.fill_(self.columns - 1)\n"),
        ("a graph keeps its first spans", "fixed",
         "plan.fused.take_over(new.fused)", "pass"),
    ],
    "networks/double_decoder_session.py": [
        ("a fixed block does not read its newest token", "fixed",
         "torch.tensor([self.columns - 1])", "torch.tensor([self.columns - 2])"),
        ("a fixed block stays at position 0", "fixed",
         "self.network.rotation(self.clock, x.shape[1], x)", "self.network.rotation(0, x.shape[1], x)"),
    ],
}
