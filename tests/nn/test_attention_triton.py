"""The fused kernels against the definition: in Triton's interpreter on a CPU, compiled on CUDA."""

import importlib.util

import patterns
import pytest
import torch
from patterns import PATTERNS, B, draw, everything, starts_of
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tandem.networks.decoder import Decoder, SpanReader
from tandem.nn import attention, measured
from tandem.nn.attention import Source, attend, attend_dense, attend_rows, plan_attention
from tandem.nn.spans import Span, causal, prefix, readable

fused = pytest.importorskip("tandem.nn.attention_triton", reason="needs triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = (fused.Shape(64, 32, 4, 1), fused.Shape(64, 32, 4, 1), fused.Shape(32, 32, 4, 1))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small tiles and two heads over one key head: the interpreter takes milliseconds for every tile."""
    for table in (fused.HALF, fused.SINGLE):
        for width in table:
            monkeypatch.setitem(table, width, SMALL)
            monkeypatch.setitem(fused.PAIRED, width, SMALL[1])
    monkeypatch.setattr(patterns, "H", 2)
    monkeypatch.setattr(patterns, "G", 1)


def case_of(spans, keys, T, dtype=torch.float32, rows=B):
    """As `draw`, on the device of these tests."""
    return moved(*draw(spans, keys, T, dtype, rows), device=DEVICE)


def moved(q, sources, leaves, **where):
    of = {id(x): x.detach().to(**where).requires_grad_() for x in leaves}
    q = tuple(of[id(x)] for x in q) if isinstance(q, tuple) else of[id(q)]
    return q, [Source(of[id(s.k)], of[id(s.v)], s.span) for s in sources], list(of.values())


def assert_is_the_definition(case, tolerance, of_gradients=None):
    """Outputs, log-sum-exps and gradients: the largest error of each against its largest value, at least one."""
    actual = everything(attend, *case, alone=False, backend="triton")  # a kernel gives both
    expected = everything(attend_dense, *moved(*case, dtype=torch.float64))
    assert torch.equal(*(torch.cat([x.isfinite().flatten() for x in xs]) for xs in (actual, expected)))
    for n, (a, e) in enumerate(zip(actual, expected, strict=True)):
        is_gradient = n >= len(actual) - len(case[2])
        a, e = (x.double().nan_to_num(neginf=0) for x in (a, e))
        limit = of_gradients if is_gradient and of_gradients else tolerance
        if a.numel():
            error, size = (a - e).abs().max(), e.abs().max().clamp_min(1)
            assert error <= limit * size, f"result {n} of {len(actual)}: {error:.1e} of {size:.1e}"


# ---- the definition -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PATTERNS)
def test_triton_is_the_definition(name, monkeypatch):
    # 75 queries and keys: whole tiles and a ragged one. 1e-5: float32 sums of at most 150 terms in another order.
    spans = PATTERNS[name](75)
    if isinstance(spans[0], tuple):
        monkeypatch.setattr(patterns, "H", 1)  # groups of one head: of several, in the next test
    assert_is_the_definition(case_of(spans, [75] * len(spans), 75), 1e-5)


@pytest.mark.parametrize("name", ["causal", "sps_3"])
def test_triton_in_half_precision(name):
    # 3e-3: weights and their gradients are rounded to 11 bits before they meet values, queries and keys.
    spans = PATTERNS[name](65)
    assert_is_the_definition(case_of(spans, [65] * len(spans), 65, torch.float16), 3e-3)


@pytest.mark.parametrize(("T", "N", "D"), [(1, 1, 8), (7, 33, 40), (33, 7, 24), (64, 32, 32)])
def test_odd_shapes(T, N, D, monkeypatch):
    monkeypatch.setattr(patterns, "D", D)
    i = torch.arange(T)
    span = Span((i - 20).clamp(0, N), (i + 1).clamp_max(N)[None])
    assert_is_the_definition(case_of([span], [N], T, rows=1), 1e-5)


def test_three_groups_over_three_sources_of_other_lengths():
    T, keys = 21, [40, 0, 9]
    generator = torch.Generator().manual_seed(0)

    def bound(n):
        return torch.randint(0, n + 1, (2, T), generator=generator).sort(dim=1).values

    spans = [tuple(Span(torch.minimum(lo, hi), hi) for lo, hi in [(bound(n), bound(n))] * 3) for n in keys]
    spans[2] = tuple(Span(torch.zeros_like(bound(9)), bound(9)) for _ in range(3))
    assert_is_the_definition(case_of(spans, keys, T, rows=2), 1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, about the NaN
def test_what_lies_behind_a_boundary_on_a_tile_edge_is_not_even_loaded():
    starts = torch.where(torch.arange(96) < 64, 0, 64)[None]
    case = case_of([causal(starts)], [96], 96, rows=1)
    q, (source,), leaves = case
    with torch.no_grad():
        for x in leaves[1:]:
            x[:, :, :64] = torch.nan
    y = attend(q, [source], backend="triton")
    grads = torch.autograd.grad(y[:, :, 64:].sum(), leaves)
    assert y[:, :, 64:].isfinite().all() and y[:, :, :64].isnan().all()
    assert all(grad[:, :, 64:].isfinite().all() for grad in grads)


@pytest.mark.parametrize("backend", ["tiled", "triton"])
@pytest.mark.parametrize("T", [75, 3])  # 3: without gradients, by the kernel of decoding
def test_groups_and_sources_as_rows_of_one_tensor_are_the_definition(T, backend, monkeypatch):
    monkeypatch.setattr(patterns, "H", 1)
    spans = PATTERNS["sps_3"](T)
    q, sources, leaves = case_of(spans, [T] * 2, T)
    expected = attend_dense(q, sources)
    rows = [torch.cat(xs).detach().requires_grad_() for xs in (q, *zip(*((s.k, s.v) for s in sources), strict=True))]
    plan = plan_attention(spans, [T] * 2, device=DEVICE, backend=backend)
    y = attend_rows(*rows, plan=plan)
    torch.testing.assert_close(y, torch.cat(expected), rtol=1e-5, atol=1e-5)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    actual = torch.autograd.grad((y * weights).sum(), rows)
    grads = torch.autograd.grad((torch.cat(expected) * weights).sum(), leaves)  # q, q, k, v, k, v
    for x, of in zip(actual, (grads[:2], grads[2::2], grads[3::2]), strict=True):
        torch.testing.assert_close(x, torch.cat(of), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        apart = attend_rows(rows[0], *(x.chunk(2) for x in rows[1:]), plan=plan)  # a tensor for each source
        torch.testing.assert_close(attend_rows(*rows, plan=plan), apart, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(apart, y, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="planned: 2 of"):
        attend_rows(rows[0][:-1], *rows[1:], plan=plan)


def test_readers_of_every_key_are_the_transposed_mask():
    for name in ("sps_3", "double_decoder", "gist", "left_padded"):
        spans = PATTERNS[name](40)
        plan = plan_attention(spans, [40] * len(spans))
        for s, groups in enumerate(plan.spans):
            first, end = fused.transposed(plan.lo[:, s], plan.hi[:, s], 40)
            for g, span in enumerate(groups):
                ours = readable(Span(*map(torch.from_numpy, (first[:, g], end[:, g]))), 40)
                assert torch.equal(ours.mT, readable(span, 40).expand_as(ours)), (name, s, g)


# ---- decoding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["causal", "sps_3", "double_decoder", "left_padded"])
def test_decoding_in_shares_is_the_definition(name, monkeypatch):
    T, N = 3, 300  # the last three queries of a text of 300
    spans = PATTERNS[name](N)
    groups = [s if isinstance(s, tuple) else (s,) for s in spans]
    last = [tuple(Span(span.lo[:, -T:], span.hi[:, -T:]) for span in group) for group in groups]
    q, sources, _ = case_of(last, [N] * len(last), T)
    shares = []
    monkeypatch.setattr(fused.kernels, "combine_kernel", _spied(fused.kernels.combine_kernel, shares))
    with torch.no_grad():
        actual = attend(q, sources, backend="triton", return_lse=True)
    for a, e in zip(actual, attend_dense(q, sources, return_lse=True), strict=True):
        for of_group in zip(a, e, strict=True):
            torch.testing.assert_close(*of_group, rtol=1e-5, atol=1e-5)
    assert [made["SHARES"] for made in shares] == [4]  # the control: 300 keys are shared out, 75 or so to each


def _spied(kernel, seen):
    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: (
                seen.append(constants),
                kernel[grid](*arguments, **constants),
            )

    return Kernel()


# ---- as an operator -------------------------------------------------------------------------------------------------


def operands(T=24, documents=0.1):
    span = causal(starts_of(T, documents, 1))
    plan = plan_attention([span], [T], device=DEVICE, backend="triton")
    bounds, readers = plan.fused.bounds, plan.fused.readers
    run = lambda q, k, v: fused.OPERATORS.attend([q], [k], [v], bounds, readers, 0.3)[0][0]
    return plan, case_of([span], [T], T)[2], run


def test_compiled_whole_and_recomputed_it_gives_the_same_gradients():
    _, leaves, run = operands()
    traced = torch.compile(lambda *x: 2 * run(*x), backend="aot_eager", fullgraph=True)
    ways = (lambda *x: 2 * run(*x), traced, lambda *x: checkpoint(lambda *y: 2 * run(*y), *x, use_reentrant=False))
    expected, *others = [torch.autograd.grad(way(*leaves).square().sum(), leaves) for way in ways]
    for grads in others:
        assert all(torch.equal(a, e) for a, e in zip(grads, expected, strict=True))


def test_gradients_need_the_readers_of_every_source():
    plan, (q, k, v), _ = operands()
    with pytest.raises(ValueError, match="0 readers for 1 sources"):
        fused.OPERATORS.attend([q], [k], [v], plan.fused.bounds, [], 0.3)[0][0].sum().backward()


def test_offsets_beyond_32_bits_are_refused():
    far = torch.empty_strided((1, 1, 8, 16), (0, 0, 2**28, 1), device="meta")
    with pytest.raises(ValueError, match="use the flex backend"):
        fused._strides([far])


def test_operators_are_known_before_their_first_use_as_flop_counters_need_them():
    assert attention.attention_triton is fused


def test_a_copy_has_operators_of_its_own():
    """As exported models have. Of one name, those of the copy that was loaded last would run for all."""
    spec = importlib.util.spec_from_file_location("exported.attention_triton", fused.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    assert copy.OPERATORS.decode is not fused.OPERATORS.decode


def test_flops_are_those_of_the_needed_pairs():
    plan, leaves, run = operands()
    with FlopCounterMode(display=False) as counter:
        run(*leaves).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    pairs = int((plan.hi - plan.lo).sum())
    assert counts[fused.OPERATORS.attend] == 4 * 2 * 8 * pairs
    assert counts[fused.OPERATORS.attend_backward] == 10 * 2 * 8 * pairs


def test_gradients_have_the_same_bits_in_every_run():
    # In the interpreter, programs always run in the same order; compiled, they run in any.
    _, leaves, run = operands(T=100)  # several tiles of keys for every query
    first, second = (torch.autograd.grad(run(*leaves).square().sum(), leaves) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_are_laid_out_like_their_tensors():
    # Any other layout would be copied by compiled graphs.
    heads = torch.randn(2, 24, 6, 8, device=DEVICE).transpose(1, 2)  # queries, keys and values, as projected at once
    q, k, v = (x.detach().requires_grad_() for x in (heads[:, :2], heads[:, 2:4], heads[:, 4:]))
    repeated = torch.randn(2, 2, 1, 8, device=DEVICE).expand(-1, -1, 24, -1).detach().requires_grad_()
    for given in ((q, k, v), (q, k, repeated)):
        _, _, run = operands()
        for x, grad in zip(given, torch.autograd.grad(run(*given).square().sum(), given), strict=True):
            assert x is repeated or grad.stride() == x.stride()
            if x is repeated:
                assert grad.stride() == (24 * 2 * 8, 8, 2 * 8, 1)


def test_a_compiled_block_takes_gradients_as_they_are():
    with torch._functorch.config.patch(guess_tangent_strides_as_outputs=False):  # as in torch 2.11, which copies them
        network = Decoder(Decoder.Config(width=32, heads=2, depth=1), 50, 24).to(DEVICE).compile("aot_eager")
        x = torch.randn(2, 24, 32, device=DEVICE, requires_grad=True)
        span = causal(torch.zeros(1, 24, dtype=torch.long))
        reader = SpanReader(network, [span], x)
        reader.plan = plan_attention([span], [24], device=DEVICE, backend="triton")
        out = network.states(x, reader)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
            out.sum().backward()
    heads = [2, 2, 24, 16]
    assert not [e for e in found.events() if e.name == "aten::copy_" and heads in e.input_shapes]


# ---- what is refused and chosen -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "width", "says"),
    [(torch.float64, 8, "no torch.float64"), (torch.bfloat16, 8, "bfloat16 wrong"), (torch.float32, 136, "136")],
)
def test_what_the_kernels_can_not_do_is_refused(dtype, width, says, monkeypatch):
    if dtype == torch.bfloat16 and DEVICE.type == "cuda":
        pytest.skip("compiled, they have bfloat16")
    monkeypatch.setattr(patterns, "D", width)
    q, sources, _ = case_of([prefix(3, 3)], [3], 3, dtype)
    with pytest.raises(ValueError, match=says):
        attend(q, sources, backend="triton")


def test_without_cuda_and_interpreter_it_is_refused(monkeypatch):
    class Compiled:
        pass

    monkeypatch.setattr(fused.triton.runtime, "JITFunction", Compiled)
    monkeypatch.setattr(fused.kernels, "forward_kernel", Compiled())
    q, sources, _ = draw([prefix(3, 3)], [3], 3, torch.float32)
    with pytest.raises(ValueError, match="triton runs on CUDA only"):
        attend(q, sources, backend="triton")


def test_auto_takes_triton_where_it_was_measured_to_be_faster(monkeypatch):
    assert measured.choose("a GPU", 2, 2, 64) == (
        False,
        "triton has not been measured against flex on a GPU for 2 sources, 2 groups of queries and heads of 64",
    )
    lines = [measured.Speed("a GPU", 2, 2, 64, 1.4, "gpu.jsonl"), measured.Speed("a GPU", 1, 1, 64, 0.9, "gpu.jsonl")]
    monkeypatch.setattr(measured, "SPEEDS", lines)
    assert measured.choose("a GPU", 2, 2, 64) == (True, "triton is 1.40 x flex on a GPU (gpu.jsonl)")
    assert measured.choose("a GPU", 1, 1, 64)[0] is False
    assert measured.choose("another", 2, 2, 64)[0] is False


# ---- on CUDA --------------------------------------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
OF_DTYPE = {torch.float32: (1e-4, 1e-4), torch.float16: (3e-3, 6e-3), torch.bfloat16: (2e-2, 4e-2)}


@needs_cuda
@pytest.mark.parametrize("dtype", OF_DTYPE, ids=str)
@pytest.mark.parametrize("name", PATTERNS)
def test_cuda_kernels_are_the_definition(name, dtype, monkeypatch):
    monkeypatch.undo()  # the tiles and heads that are shipped
    monkeypatch.setattr(patterns, "D", 64)
    spans = PATTERNS[name](300)
    assert_is_the_definition(case_of(spans, [300] * len(spans), 300, dtype), *OF_DTYPE[dtype])


@needs_cuda
@pytest.mark.parametrize("dtype", OF_DTYPE, ids=str)
@pytest.mark.parametrize("width", [32, 48, 96, 128])
def test_cuda_kernels_of_every_width(width, dtype, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(patterns, "D", width)
    spans = PATTERNS["sps_64"](300)
    assert_is_the_definition(case_of(spans, [300, 300], 300, dtype), *OF_DTYPE[dtype])


@needs_cuda
@pytest.mark.parametrize("name", ["causal", "left_padded", "double_decoder"])
def test_cuda_kernels_of_wide_heads(name, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(patterns, "D", 128)
    spans, dtype = PATTERNS[name](300), torch.bfloat16
    assert_is_the_definition(case_of(spans, [300] * len(spans), 300, dtype), *OF_DTYPE[dtype])


@needs_cuda
@pytest.mark.parametrize("rows", [1, 200])
def test_cuda_decoding_also_above_one_wave(rows, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(patterns, "D", 64)
    span = Span(torch.zeros(1, 1, dtype=torch.long), torch.tensor([[3001]]))
    q, sources, _ = case_of([span], [4096], 1, torch.bfloat16, rows)
    with torch.no_grad():
        actual, expected = attend(q, sources, backend="triton"), attend_dense(q.double(), _doubled(sources))
    assert (actual - expected).abs().max() <= 2e-2 * expected.abs().max()


def _doubled(sources):
    return [Source(s.k.double(), s.v.double(), s.span) for s in sources]
