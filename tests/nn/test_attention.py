"""All patterns of spans, all backends, against the definition: values and gradients, at lengths off the tile."""

import numpy as np
import pytest
import torch
import torch._dynamo.testing as dynamo_testing
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as torch_flex

from tandem.nn import flex, tiled
from tandem.nn.attention import Source, attend, attend_dense, plan_attention
from tandem.nn.spans import Span, causal, prefix, readable

B, H, G, D = 3, 4, 2, 8
LENGTHS = [1, 7, 63, 129, 200]


# ---- patterns -------------------------------------------------------------------------------------------------------


def starts_of(T, share, seed):
    """(B, T): where the segment of each position starts; every row is cut by itself, the last one not at all."""
    cut = torch.rand(B, T, generator=torch.Generator().manual_seed(seed)) < share
    cut[-1] = False
    return torch.where(cut, torch.arange(T), 0).cummax(1).values


def sps(T, window, persistent="inputs", cut=None):
    """(inputs, predictions), each for the queries (input, prediction); `cut` restricts the persistent stream."""
    s, i = starts_of(T, 0.02, 1), torch.arange(T)
    recent = s if window is None else torch.maximum(s, i - window)
    if cut is not None:
        s = torch.maximum(s, i - cut)
    if persistent == "inputs":
        return [(Span(s, i + 1), Span(s, i + 1)), (Span(recent, i), Span(recent, i + 1))]
    return [(Span(recent, i + 1), Span(recent, i + 1)), (Span(s, i), Span(s, i + 1))]


def double_decoder(T):
    s, b = starts_of(T, 0.02, 1), starts_of(T, 0.03, 2)
    own = torch.maximum(b, s)
    return [causal(own), Span(s, own)]


def gist(T):
    """Own sentence, and the ends of the earlier sentences of the document, gathered."""
    begins = torch.rand(B, T, generator=torch.Generator().manual_seed(3)) < 0.1
    begins[:, 0] = True
    opens = begins & (torch.rand(B, T, generator=torch.Generator().manual_seed(4)) < 0.2)
    opens[:, 0] = True
    number = begins.long().cumsum(1) - 1
    first = torch.where(opens, number, 0).cummax(1).values
    return [causal(torch.where(begins, torch.arange(T), 0).cummax(1).values), Span(first, number)]


def bidirectional_prefix(T):
    s, i = starts_of(T, 0.02, 1), torch.arange(T)
    last = torch.stack([torch.where(row == row[j], i, 0).max() for row in s for j in range(T)]).view(B, T)
    middle = (s + last) // 2
    return [Span(s, torch.where(i < middle, middle, i + 1))]


def left_padded(T):
    pads, i = torch.tensor([[0], [T // 2], [T - 1]]), torch.arange(T)
    return [Span(torch.minimum(pads, i), torch.where(i < pads, 0, i + 1))]


PATTERNS = {
    "causal": lambda T: [causal(starts_of(T, 0.02, 1))],
    "causal_tiny_documents": lambda T: [causal(starts_of(T, 0.4, 1))],
    "causal_shared_by_rows": lambda T: [causal(starts_of(T, 0.02, 1)[:1])],
    "windowed": lambda T: [causal(starts_of(T, 0.02, 1), window=9)],
    "sps_0": lambda T: sps(T, 0),
    "sps_3": lambda T: sps(T, 3),
    "sps_64": lambda T: sps(T, 64),
    "two_x_memory": lambda T: sps(T, None),
    "delayed_state_and_reverse": lambda T: sps(T, 5, persistent="predictions"),
    "delayed_state_0": lambda T: sps(T, 0, persistent="predictions"),
    "restricted_state": lambda T: sps(T, 3, cut=20),
    "double_decoder": double_decoder,
    "encoder": lambda T: [prefix(torch.tensor([0, T // 2, T]), T)],
    "own_and_encoder": lambda T: [causal(torch.zeros(1, T, dtype=torch.long)), prefix(torch.tensor([T, 0, T // 2]), T)],
    "prefix_lm": bidirectional_prefix,
    "gist": gist,
    "memory": lambda T: [prefix(torch.tensor([0, min(5, T), min(40, T)]), T)],
    "empty_memory": lambda T: [prefix(0, T)],
    "left_padded": left_padded,
}


def draw(spans, keys, T, dtype=torch.float64, rows=B):
    """Queries (one, or a tuple of groups), sources and all leaves, the same for the same shapes."""
    generator = torch.Generator().manual_seed(0)

    def leaf(heads, length):
        x = torch.randn(rows, length, heads, D, generator=generator, dtype=torch.float64)
        return x.to(dtype).transpose(1, 2).requires_grad_()

    groups = spans[0] if isinstance(spans[0], tuple) else (spans[0],)
    q = tuple(leaf(H, T) for _ in groups)
    kv = [(leaf(G, n), leaf(G, n)) for n in keys]
    sources = [Source(k, v, span) for (k, v), span in zip(kv, spans, strict=True)]
    return q if isinstance(spans[0], tuple) else q[0], sources, [*q, *(x for pair in kv for x in pair)]


def everything(function, q, sources, leaves, **options):
    """Outputs, log-sum-exps, and the gradients of a random projection of the outputs, flattened into one list."""
    y, lse = function(q, sources, return_lse=True, **options)
    ys, lses = (y, lse) if isinstance(q, tuple) else ((y,), (lse,))
    assert not any(x.requires_grad for x in lses)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in ys]
    loss = sum((x * w).sum() for x, w in zip(ys, weights, strict=True))
    return [*ys, *lses, *torch.autograd.grad(loss, leaves)]


def assert_close(actual, expected, tolerance):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiled, "STEP", 8)
    monkeypatch.setattr(tiled, "CALL", 32)
    monkeypatch.setattr(tiled, "COPY", 0)


# ---- tiled against the definition -----------------------------------------------------------------------------------


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("name", PATTERNS)
def test_tiled_is_the_definition(name, T):
    spans = PATTERNS[name](T)
    case = draw(spans, [T] * len(spans), T)
    # 1e-12: sums of at most 400 float64 terms of order one, in another order.
    assert_close(everything(attend, *case, backend="tiled"), everything(attend_dense, *case), 1e-12)


@pytest.mark.parametrize("name", PATTERNS)
def test_small_tiles_are_the_definition(name, small_tiles):
    spans = PATTERNS[name](129)
    case = draw(spans, [129] * len(spans), 129)
    assert_close(everything(attend, *case, backend="tiled"), everything(attend_dense, *case), 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("name", ["causal", "sps_3", "double_decoder", "left_padded"])
def test_tiled_in_working_precision(name, dtype, tolerance):
    spans = PATTERNS[name](200)
    q, sources, _ = draw(spans, [200] * len(spans), 200, dtype)
    exact_q, exact, _ = draw(spans, [200] * len(spans), 200, torch.float64)
    y, exact_y = attend(q, sources), attend_dense(exact_q, exact)
    pairs = zip(y, exact_y, strict=True) if isinstance(q, tuple) else [(y, exact_y)]
    for a, e in pairs:
        assert a.dtype == dtype
        # Inputs were rounded to 8 bits in bfloat16: scores of order 3 move by 0.4 %, outputs of order one likewise.
        torch.testing.assert_close(a.double(), e, rtol=tolerance, atol=tolerance)


@st.composite
def forward_spans(draw):
    """Spans of every shape the primitive allows, empty and crossing ones included, over 1 or 2 sources and groups."""
    sources, groups, T = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 40))
    keys = [draw(st.integers(0, 30)) for _ in range(sources)]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def bound(n):
        steps = rng.choice([0, 0, 1, 1, 2, 9], size=(int(rng.choice([1, B])), T), p=rng.dirichlet(np.ones(6)))
        return torch.from_numpy(np.minimum(steps.cumsum(1), n))

    def span(n):
        lo, hi = bound(n), bound(n)
        return Span(torch.minimum(lo, hi), hi)

    return [tuple(span(n) for _ in range(groups)) for n in keys], keys, T


@settings(max_examples=80, deadline=None)
@given(forward_spans(), st.sampled_from([4, 64]))
def test_any_spans_that_move_forward(case, step):
    spans, keys, T = case
    tensors = draw(spans, keys, T)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "STEP", step)
        patch.setattr(tiled, "CALL", 4 * step)
        assert_close(everything(attend, *tensors, backend="tiled"), everything(attend_dense, *tensors), 1e-12)


# ---- what may not be read leaves no trace ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", PATTERNS)
def test_a_query_that_reads_nothing_is_zero_forward_and_backward(name, small_tiles):
    T = 63
    spans = PATTERNS[name](T)
    q, sources, leaves = draw(spans, [T] * len(spans), T, torch.float32)
    y, lse = attend(q, sources, return_lse=True)
    queries, ys, lses = (q, y, lse) if isinstance(q, tuple) else ((q,), (y,), (lse,))
    for g in range(len(queries)):
        of_group = [s.span[g] if isinstance(s.span, tuple) else s.span for s in sources]
        empty = torch.stack([(span.hi <= span.lo).expand(B, T) for span in of_group]).all(0)
        at = empty[:, None].expand(B, H, T)
        assert not ys[g][at].any()
        assert (lses[g].isneginf() == at).all()
        grads = torch.autograd.grad(
            ys[g][at].sum() + 0 * ys[g].sum(), leaves, retain_graph=True, materialize_grads=True
        )
        assert not any(grad.any() for grad in grads)
        assert ys[g][~at].all()  # the control: the others read something


@pytest.mark.parametrize("name", [name for name in PATTERNS if name != "empty_memory"])
def test_foreign_keys_change_nothing_and_get_no_gradient(name):
    T, i = 129, 100
    spans = PATTERNS[name](T)
    q, sources, leaves = draw(spans, [T] * len(spans), T, torch.float32)
    kv = leaves[-2 * len(spans) :]
    groups = len(q) if isinstance(q, tuple) else 1
    for g in range(groups):
        may = [
            readable(s.span[g] if isinstance(s.span, tuple) else s.span, T)[:, i].expand(B, T)[:, None, :, None]
            for s in sources
        ]
        may = [m for m in may for _ in "kv"]

        def read(sources, g=g):
            y = attend(q, sources)
            return (y[g] if groups > 1 else y)[:, :, i]

        grads = torch.autograd.grad(read(sources).sum(), kv)
        for grad, m in zip(grads, may, strict=True):
            assert not grad[~m.expand_as(grad)].any()
        assert any(grad.any() for grad in grads)
        poisoned = [torch.where(m, x, 1e4 * x) for x, m in zip(kv, may, strict=True)]
        changed = [Source(poisoned[2 * s], poisoned[2 * s + 1], spans[s]) for s in range(len(spans))]
        assert torch.equal(read(changed), read(sources))


# ---- the plan -------------------------------------------------------------------------------------------------------


def shapes_of(plan):
    return [[(t.queries, t.is_causal, t.mask is not None) for t in strip.tiles] for strip in plan.tiles.strips]


def test_a_document_is_one_causal_call_without_a_mask():
    starts = torch.tensor([[0] * 300 + [300] * 500 + [800] * 224])
    plan = plan_attention([causal(starts)], [1024])
    assert shapes_of(plan) == [[(300, True, False), (500, True, False), (224, True, False)]]
    assert plan.tiled_pairs == (plan.hi - plan.lo).sum()


def test_queries_that_read_the_same_keys_are_one_call_without_a_mask():
    assert shapes_of(plan_attention([prefix(90, 1000)], [100])) == [[(1000, False, False)]]


def test_rows_that_agree_share_their_calls_and_shared_spans_fit_any_number_of_rows():
    starts = torch.zeros(4, 200, dtype=torch.long)
    starts[3, 150:] = 150
    plan = plan_attention([causal(starts)], [200])
    assert [strip.rows for strip in plan.tiles.strips] == [3, 1]
    shared = causal(starts[:1])
    plan = plan_attention([shared], [200])
    for rows in (1, 2, 5):
        q, sources, _ = draw([shared], [200], 200, rows=rows)
        assert_close([attend(q, sources, plan=plan)], [attend_dense(q, sources)], 1e-12)


def test_tiny_documents_are_joined():
    starts = torch.arange(512)[None] // 8 * 8
    tiles = plan_attention([causal(starts)], [512]).tiles.strips[0].tiles
    assert len(tiles) < 32 and all(t.queries <= 64 for t in tiles)


def test_a_decoding_step_is_one_call_and_needs_no_mask_where_all_rows_are_open():
    pads = torch.arange(16)[:, None] % 3
    assert shapes_of(plan_attention([Span(pads, torch.tensor([[500]]))], [500])) == [[(1, False, True)]]
    assert shapes_of(plan_attention([prefix(torch.full((16,), 500), 1)], [512])) == [[(1, False, False)]]


@pytest.mark.parametrize("span", [prefix(0, 70), Span(torch.arange(70)[None], torch.arange(70))])
def test_queries_that_read_nothing_need_no_call(span, monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", None)
    q, sources, leaves = draw([span], [70], 70)
    y = attend(q, sources)
    assert not y.any()
    assert not any(grad.any() for grad in torch.autograd.grad(y.sum(), leaves))


@pytest.mark.parametrize(
    ("lo", "hi", "is_causal"),
    [
        ([2, 2, 2, 2], [3, 4, 5, 6], True),
        ([2, 2, 2, 2], [3, 3, 5, 6], False),  # waits, then reads two more
        ([2, 2, 2, 2], [4, 5, 6, 7], False),  # begins with two
        ([2, 2, 2, 2], [2, 3, 4, 5], False),  # begins with none
        ([2, 2, 3, 3], [3, 4, 5, 6], False),  # loses its first
    ],
)
def test_only_an_exact_triangle_is_a_causal_call(lo, hi, is_causal):
    span = Span(torch.tensor([lo]), torch.tensor([hi]))
    ((tile,),) = [strip.tiles for strip in plan_attention([span], [7]).tiles.strips]
    assert tile.is_causal == is_causal
    assert (tile.mask is None) == is_causal
    q, sources, leaves = draw([span], [7], 4)
    assert_close(everything(attend, q, sources, leaves), everything(attend_dense, q, sources, leaves), 1e-12)


@pytest.mark.parametrize("name", PATTERNS)
def test_no_query_is_handed_to_sdpa_with_nothing_to_read(name):
    # On the CPU its zeros would do, but what a kernel makes of a row without keys differs between devices.
    spans = PATTERNS[name](129)
    for strip in plan_attention(spans, [129] * len(spans)).tiles.strips:
        assert all(tile.mask.isfinite().any(-1).all() for tile in strip.tiles if tile.mask is not None)


@pytest.mark.parametrize(
    ("spans", "most"),
    [
        (lambda T: sps(T, 64)[0][:1] + sps(T, 64)[1][1:], 1.4),
        (lambda T: sps(T, 64), 1.4),
        (lambda T: [causal(starts_of(T, 0.002, 1), window=64)], 2.1),
    ],
)
def test_tiles_visit_few_pairs_more_than_are_read(spans, most):
    T = 1024
    plan = plan_attention(spans(T), [T] * len(spans(T)))
    assert 1 <= plan.tiled_pairs / (plan.hi - plan.lo).sum() < most


def test_a_double_decoder_visits_0_59_of_the_square_on_average():
    T, visited = 2048, 0
    for seed in range(10):
        splits = np.sort(np.random.default_rng(seed).choice(np.arange(2, T - 1), size=4, replace=False))
        blocks = torch.from_numpy(np.r_[0, splits][np.searchsorted(splits, np.arange(T), side="right")])[None]
        visited += plan_attention([causal(blocks), Span(torch.zeros_like(blocks), blocks)], [T, T]).tiled_pairs
    assert 0.5 * T * (T + 1) <= visited / 10 <= 0.59 * T * T


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_spans_that_leave_the_keys_or_move_back_are_named():
    lo = torch.zeros(2, 6, dtype=torch.long)
    long, back = torch.arange(1, 7).repeat(2, 1), torch.arange(1, 7).repeat(2, 1)
    long[1, 5], back[1, 3] = 7, 2
    good = causal(lo)
    with pytest.raises(ValueError, match=r"source 1, row 1, position 5: .*\[0, 7\) leaves the keys \[0, 6\)"):
        plan_attention([good, Span(lo, long)], [6, 6])
    with pytest.raises(ValueError, match=r"source 0, row 1, position 3: .*\[0, 2\), after \[0, 3\), moves back"):
        plan_attention([Span(lo, back), good], [6, 6])
    with pytest.raises(ValueError, match=r"source 0, row 0, position 0, group 1: .*\[-1, 1\) leaves"):
        plan_attention([(good, Span(lo - 1, lo + 1))], [6])


@pytest.mark.parametrize(
    ("spans", "keys", "says"),
    [
        ([], [], "0 spans"),
        ([prefix(3, 5)], [3, 3], "1 spans and 2 numbers"),
        ([prefix(3, 5), prefix(3, 4)], [3, 3], "all sources need"),
        ([prefix(3, 5), (prefix(3, 5), prefix(3, 5))], [3, 3], "all sources need"),
        ([prefix(torch.tensor([1, 2]), 5), prefix(torch.tensor([1, 2, 3]), 5)], [3, 3], "all sources need"),
    ],
)
def test_spans_that_do_not_fit_each_other_are_refused(spans, keys, says):
    with pytest.raises(ValueError, match=says):
        plan_attention(spans, keys)


def test_tensors_that_do_not_fit_the_plan_are_refused():
    span = causal(torch.zeros(B, 7, dtype=torch.long))
    plan = plan_attention([span], [7])
    q, (source,), _ = draw([span], [7], 7)
    k, v = source.k, source.v
    for wrong, says in (
        (lambda: attend(q[:, :, :6], [source], plan=plan), "planned: 1 of 7 queries"),
        (lambda: attend((q, q), [source], plan=plan), "planned: 1 of 7 queries"),
        (lambda: attend(q[:2], [Source(k[:2], v[:2], span)], plan=plan), "3 rows"),
        (lambda: attend(q, [source, source], plan=plan), "2 sources"),
        (lambda: attend(q, [Source(k, v[:, :1], span)], plan=plan), "source 0: keys"),
        (lambda: attend(q[:, :3], [source], plan=plan), "G dividing 3"),
        (lambda: attend(q, [Source(k.float(), v.float(), span)], plan=plan), "float32.*float64"),
        (lambda: attend(q, [Source(k, v, Span(span.lo, span.hi))], plan=plan), "not the one that was planned"),
        (lambda: attend(q, [source], plan=plan, backend="tiled"), "name it in plan_attention"),
        (lambda: attend(q, [source], backend="fast"), "fast"),
        (lambda: attend(q, [source], plan=plan_attention([span], [7], device="meta")), "a plan for meta"),
    ):
        with pytest.raises(ValueError, match=says):
            wrong()


# ---- flex: on a CPU, only its eager forward -------------------------------------------------------------------------


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
        a, e = (getattr(mask, f"{part}_num_blocks") for mask in (ours, theirs))
        assert torch.equal(a, e), part
        used = torch.arange(getattr(theirs, f"{part}_indices").shape[-1]) < e[..., None]
        a, e = (getattr(mask, f"{part}_indices")[used] for mask in (ours, theirs))
        assert torch.equal(a, e), part


def test_flex_refuses_what_it_cannot_do_and_never_falls_back():
    span = causal(torch.zeros(B, 7, dtype=torch.long))
    q, sources, _ = draw([span], [7], 7)
    with pytest.raises(ValueError, match="flex runs on CUDA only"):
        attend(q, sources, backend="flex")


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
    results = []
    for function, options in ((attend, {"backend": backend}), (attend_dense, {})):
        y = function(q, sources, **options)
        y = torch.stack(y) if isinstance(y, tuple) else y
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).cuda()
        results.append([y, *torch.autograd.grad((y * weights).sum(), list(move.values()))])
    assert_close(*results, 1e-2)  # tensor cores round float32 products to TF32


# ---- around the primitive -------------------------------------------------------------------------------------------


def test_a_new_plan_compiles_nothing_again():
    counter = dynamo_testing.CompileCounter()
    weight = torch.randn(H * D, H * D)

    @torch.compile(backend=counter)
    def layer(x, span, plan):
        q = (x @ weight).unflatten(-1, (H, D)).transpose(1, 2)
        return attend(q, [Source(q, q, span)], plan=plan).transpose(1, 2).flatten(2) @ weight

    frames = []
    for seed in range(3):
        span = causal(starts_of(40, 0.1, seed))
        x = torch.randn(B, 40, H * D)
        y = layer(x, span, plan_attention([span], [40]))
        frames.append(counter.frame_count)
        q = (x @ weight).unflatten(-1, (H, D)).transpose(1, 2)
        expected = attend_dense(q, [Source(q, q, span)]).transpose(1, 2).flatten(2) @ weight
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)
    assert frames[0] > 0 and len(set(frames)) == 1


def test_scale_replaces_the_root_of_the_width():
    span = causal(starts_of(63, 0.1, 1))
    q, sources, leaves = draw([span], [63], 63)
    case = (q, sources, leaves)
    assert_close(everything(attend, *case, scale=0.7), everything(attend_dense, *case, scale=0.7), 1e-12)
    assert not torch.allclose(attend(q, sources, scale=0.7), attend(q, sources))
