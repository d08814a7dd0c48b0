"""FlexAttention: its blocks, and on a CPU its eager forward; the rest needs CUDA."""

from functools import partial

import patterns
import pytest
import torch
import torch.nn.functional as F
from patterns import PATTERNS, B, D, assert_close, draw, flattened, starts_of
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as torch_flex

from tandem.nn import flex
from tandem.nn.attention import Source, attend, attend_dense, plan_attention
from tandem.nn.spans import causal, readable


@pytest.fixture
def eager_flex(monkeypatch):
    monkeypatch.setattr(flex, "_compiled", lambda: torch_flex.flex_attention)  # compiled, it has no lse on a CPU
    monkeypatch.setattr(flex, "_refuse", lambda *_: None)
    monkeypatch.setattr(flex, "BLOCK", 16)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("T", [7, 63, 129])
@pytest.mark.parametrize("name", PATTERNS)
def test_flex_is_the_definition(name, T, eager_flex):
    spans = PATTERNS[name](T)
    q, sources, _ = draw(spans, [T] * len(spans), T)
    with torch.no_grad():
        actual = attend(q, sources, backend="flex", return_lse=True)
    assert_close(actual, attend_dense(q, sources, return_lse=True), 1e-12)


@pytest.mark.parametrize("T", [63, 128, 200])
@pytest.mark.parametrize("name", PATTERNS)
def test_blocks_from_spans_are_those_of_the_evaluated_mask(name, T, monkeypatch):
    monkeypatch.setattr(flex, "BLOCK", 16)
    spans = PATTERNS[name](T)
    plan = plan_attention(spans, [T] * len(spans))
    ours = plan.blocks.mask
    rows, _, groups, _ = plan.lo.shape
    padded = T + -T % 16
    may = torch.zeros(rows, groups, T, len(spans), padded, dtype=torch.bool)
    for s, of_source in enumerate(plan.spans):
        for g, span in enumerate(of_source):
            may[:, g, :, s, :T] = readable(span, T)
    may = may.view(rows, groups * T, len(spans) * padded)
    theirs = torch_flex.create_block_mask(
        lambda b, h, i, j: may[b, i, j], rows, None, *may.shape[1:], device="cpu", BLOCK_SIZE=16
    )
    for part in ("kv", "full_kv", "q", "full_q"):
        for x in (getattr(ours, f"{part}_num_blocks"), getattr(ours, f"{part}_indices")):
            assert x.stride() == torch.empty(x.shape).stride()  # the kernels step over rows by the stride of heads
        a, e = (getattr(mask, f"{part}_num_blocks") for mask in (ours, theirs))
        assert torch.equal(a, e), part
        used = torch.arange(getattr(theirs, f"{part}_indices").shape[-1]) < e[..., None]
        a, e = (getattr(mask, f"{part}_indices")[used] for mask in (ours, theirs))
        assert torch.equal(a, e), part


@pytest.fixture
def counter(monkeypatch):
    """Counts what is compiled, and runs it as it is."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr(flex, "_refuse", lambda *_: None)
    flex._compiled.cache_clear()
    yield counter
    flex._compiled.cache_clear()
    torch._dynamo.reset()


def test_no_shape_of_a_process_falls_back_to_all_scores(counter):
    span = causal(torch.zeros(1, 20, dtype=torch.long))
    for heads in range(1, 13):  # PyTorch's own limit is 8
        x = torch.randn(1, heads, 20, 16)
        with torch.no_grad():
            attend(x, [Source(x, x, span)], backend="flex")
        assert counter.frame_count == heads


@pytest.mark.parametrize("name", ["sps_3", "double_decoder"])
def test_a_new_batch_compiles_nothing_again(name, monkeypatch, counter):
    for share in (0.02, 0.1, 0.3):  # other documents, so other blocks, partial and full
        monkeypatch.setattr(patterns, "starts_of", lambda T, _, seed, share=share: starts_of(T, share, seed))
        spans = PATTERNS[name](200)
        q, sources, _ = draw(spans, [200] * len(spans), 200, torch.float32)
        with torch.no_grad():
            assert_close(*(flattened(x) for x in (attend(q, sources, backend="flex"), attend_dense(q, sources))), 1e-5)
    assert counter.frame_count == 1


def test_flex_refuses_what_it_cannot_do_and_never_falls_back():
    span = causal(torch.zeros(B, 7, dtype=torch.long))
    q, sources, _ = draw([span], [7], 7)
    with pytest.raises(ValueError, match="flex runs on CUDA only"):
        attend(q, sources, backend="flex")


def test_flex_takes_the_kernel_that_serves_few_queries_of_grouped_heads(eager_flex, monkeypatch):
    given = []
    seen = lambda *of, **how: given.append(how) or torch_flex.flex_attention(*of, **how)
    monkeypatch.setattr(flex, "_compiled", lambda: seen)
    q, k, v = torch.randn(1, 4, 100, D), torch.randn(1, 2, 100, D), torch.randn(1, 2, 100, D)
    source = Source(k, v, causal(torch.zeros(1, 100, dtype=torch.long)))
    assert_close(attend(q, [source], backend="flex"), attend_dense(q, [source]), 1e-5)
    assert given[0]["kernel_options"] == {"BACKEND": "TRITON"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("T", [17, 65, 100, 127])
def test_cuda_reads_few_queries_of_grouped_heads(T):
    q, k, v = (torch.randn(1, heads, T, 64, device="cuda") for heads in (16, 8, 8))
    source = Source(k, v, causal(torch.zeros(1, T, dtype=torch.long)))
    assert_close(attend(q, [source], backend="flex"), attend_dense(q, [source]), 1e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("backend", ["flex", "tiled"])
@pytest.mark.parametrize("name", PATTERNS)
def test_cuda_is_the_definition(name, backend):
    T, wide = 200, 32
    spans = PATTERNS[name](T)
    q, sources, leaves = draw(spans, [T] * len(spans), T, torch.float32)
    move = {id(x): F.pad(x.detach(), (0, wide - D)).cuda().requires_grad_() for x in leaves}
    q = tuple(move[id(x)] for x in q) if isinstance(q, tuple) else move[id(q)]
    sources = [Source(move[id(s.k)], move[id(s.v)], s.span) for s in sources]
    results, lse = [], backend == "flex"
    for function, options in ((attend, {"backend": backend}), (attend_dense, {})):
        result = function(q, sources, return_lse=lse, **options)
        ys = [x for x in flattened(result) if x.requires_grad]
        weights = torch.randn(ys[0].shape, generator=torch.Generator().manual_seed(1)).cuda()
        grads = torch.autograd.grad(sum((y * weights).sum() for y in ys), list(move.values()))
        results.append([*flattened(result), *grads])
        assert len(flattened(result)) == len(ys) * (1 + lse)  # the log-sum-exps have no gradient
    assert_close(*results, 1e-2)  # tensor cores round float32 products to TF32
