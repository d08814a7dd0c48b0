"""`attend` on the CPU against the definition: values and gradients, for all patterns, at lengths off the tile."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo.testing as dynamo_testing
from hypothesis import given, settings
from hypothesis import strategies as st
from patterns import PATTERNS, B, D, H, assert_close, draw, everything, flattened, starts_of

from tandem.networks.sps import SPS, stream_spans
from tandem.nn import tiled
from tandem.nn.attention import Source, attend, attend_dense, plan_attention
from tandem.nn.spans import Span, causal, prefix, readable


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiled, "STEP", 8)
    monkeypatch.setattr(tiled, "CALL", 32)
    monkeypatch.setattr(tiled, "COPY", 0)


# ---- tiled against the definition -----------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 7, 63, 129, 200])
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


@pytest.mark.parametrize("name", PATTERNS)
def test_tiled_in_float32(name):
    spans = PATTERNS[name](200)
    found = everything(attend, *draw(spans, [200] * len(spans), 200, torch.float32), backend="tiled")
    assert {x.dtype for x in found} == {torch.float32}
    exact = everything(attend_dense, *draw(spans, [200] * len(spans), 200, torch.float64))
    assert_close([x.double() for x in found], exact, 1e-5)


@pytest.mark.parametrize("name", ["causal", "sps_3", "double_decoder", "left_padded"])
def test_tiled_in_bfloat16(name):
    spans = PATTERNS[name](200)
    q, sources, _ = draw(spans, [200] * len(spans), 200, torch.bfloat16)
    exact_q, exact, _ = draw(spans, [200] * len(spans), 200, torch.float64)
    y, exact_y = attend(q, sources), attend_dense(exact_q, exact)
    pairs = zip(y, exact_y, strict=True) if isinstance(q, tuple) else [(y, exact_y)]
    for a, e in pairs:
        assert a.dtype == torch.bfloat16
        # Inputs were rounded to 8 bits: scores of order 3 move by 0.4 %, outputs of order one likewise.
        torch.testing.assert_close(a.double(), e, rtol=0.03, atol=0.03)


@pytest.mark.parametrize(("few_pairs", "worse"), [(tiled.FEW_PAIRS, 1.05), (0, 1.6)], ids=["float32", "products"])
@pytest.mark.parametrize("name", ["causal", "sps_3", "double_decoder", "encoder", "left_padded"])
def test_gradients_in_bfloat16_are_little_further_off_than_those_of_sdpa(name, few_pairs, worse, monkeypatch):
    monkeypatch.setattr("patterns.G", H)  # not those of grouped keys
    monkeypatch.setattr(tiled, "FEW_PAIRS", few_pairs)
    monkeypatch.setattr(tiled, "BLOCK", 48)  # a triangle of 120 becomes one of 128: blocks of 32, 48 and 48 keys

    def gradients(dtype, function=attend):
        q, sources, leaves = draw(PATTERNS[name](120), [120] * len(PATTERNS[name](120)), 120, dtype)
        loss = sum(y.double().square().sum() for y in flattened(function(q, sources)))
        found = torch.autograd.grad(loss, leaves)
        assert {x.dtype for x in found} == {dtype}
        return torch.cat([x.double().flatten() for x in found])

    exact, own = gradients(torch.float64, attend_dense), gradients(torch.bfloat16)
    monkeypatch.setattr(tiled, "_has_own_backward", lambda *_: False)
    sdpa = gradients(torch.bfloat16)
    errors = [((x - exact).norm() / exact.norm()).item() for x in (own, sdpa)]
    assert 0 < errors[0] < min(0.01, worse * errors[1]) and (own != sdpa).any(), errors


def test_keys_of_other_documents_do_not_disturb_gradients_by_products(monkeypatch):
    monkeypatch.setattr(tiled, "FEW_PAIRS", 0)
    monkeypatch.setattr(tiled, "STEP", 96)  # one tile for all documents
    monkeypatch.setattr(tiled, "CALL", 10**6)
    starts = torch.arange(96)[None] // 32 * 32
    span = Span(starts, torch.arange(1, 97)[None])

    def gradients(size):
        q, k, v = (torch.randn(1, 2, 96, 8, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
        k[:, :, :32], v[:, :, :32] = size * k[:, :, :32], size * v[:, :, :32]
        leaves = [x.requires_grad_() for x in (q, k, v)]
        plan = plan_attention([span], [96])
        assert len(plan.tiles.strips[0].tiles) == 1
        return torch.autograd.grad(attend(q, [Source(k, v, span)], plan=plan)[:, :, 32:].float().sum(), leaves)

    for usual, beside_large in zip(gradients(1.0), gradients(1e4), strict=True):
        assert usual[:, :, 32:].any() and not beside_large[:, :, :32].any()
        assert torch.equal(usual[:, :, 32:], beside_large[:, :, 32:])


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
    """At the query where a span leaves keys behind, and at the one before; of many such queries, at some."""
    T = 129
    spans = PATTERNS[name](T)
    q, sources, leaves = draw(spans, [T] * len(spans), T, torch.float32)
    kv = leaves[-2 * len(spans) :]
    by_group = list(zip(*(s.span if isinstance(s.span, tuple) else (s.span,) for s in sources), strict=True))
    for g, own in enumerate(by_group):
        may = [readable(span, T).expand(B, -1, -1) for span in own]
        left = sum((m[:, :-1] & ~m[:, 1:]).any((0, 2)) for m in may).nonzero().flatten().tolist()
        for i in {i for first in left[:: max(1, len(left) // 8)] for i in (first, first + 1)} or {100}:
            mine = [m[:, i, None, :, None] for m in may for _ in "kv"]

            def read(sources, g=g, i=i):
                y = attend(q, sources)
                return (y[g] if len(by_group) > 1 else y)[:, :, i]

            grads = torch.autograd.grad(read(sources).sum(), kv)
            for grad, m in zip(grads, mine, strict=True):
                assert not grad[~m.expand_as(grad)].any()
            assert any(grad.any() for grad in grads) or not any(m.any() for m in mine)
            poisoned = [torch.where(m, x, 1e4 * x) for x, m in zip(kv, mine, strict=True)]
            changed = [Source(poisoned[2 * s], poisoned[2 * s + 1], spans[s]) for s in range(len(spans))]
            assert torch.equal(read(changed), read(sources))


def test_what_is_no_number_stays_in_its_document():
    """Where a tile ends with a document, the keys of others are not even loaded."""
    starts = torch.tensor([[0] * 70 + [70] * 59])
    for spans in ([causal(starts)], stream_spans(SPS.Config(window=3), starts)):
        q, sources, _ = draw(spans, [129] * len(spans), 129)
        sources = [Source(*(x.clone().index_fill_(2, torch.arange(70), torch.nan) for x in (s.k, s.v)), s.span)
                   for s in sources]  # fmt: skip
        for y in attend(q, sources) if isinstance(q, tuple) else [attend(q, sources)]:
            assert y[:, :, :70].isnan().all() and y[:, :, 70:].isfinite().all()


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
        ([prefix(torch.tensor([1, 2]), 0)], [3], "2 rows of 0 queries"),
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
        (lambda: attend(q, [source, Source(k[:, :1], v[:, :1], span)]), "source 1: keys .* the same for every source"),
        (lambda: attend(q, [Source(k.float(), v.float(), span)], plan=plan), "float32.*float64"),
        (lambda: attend(q, [Source(k, v, Span(span.lo, span.hi))], plan=plan), "not the one that was planned"),
        (lambda: attend(q, [source], plan=plan, backend="tiled"), "name it in plan_attention"),
        (lambda: attend(q, [source], backend="fast"), "fast"),
        (lambda: attend(q, [source], plan=plan_attention([span], [7], device="meta")), "a plan for meta"),
    ):
        with pytest.raises(ValueError, match=says):
            wrong()


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


def test_the_page_runs():
    page = (Path(__file__).parents[2] / "docs" / "attention.md").read_text()
    names = {}
    for block in page.split("```python\n")[1:]:
        exec(block.split("```")[0], names)
    assert names["y_p"].shape == (2, 4, 12, 16) and names["y"].shape == (2, 4, 1, 16)


# ---- decoding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("name", ["sps_3", "delayed_state_0", "double_decoder", "own_and_encoder", "gist"])
def test_pieces_of_keys_that_are_read_where_they_lie_are_the_definition(name, queries, monkeypatch):
    monkeypatch.setattr(tiled, "PLAIN", 10)
    T = 129
    for first in (0, 64, T - queries):
        spans = [
            tuple(Span(span.lo[:, first : first + queries], span.hi[:, first : first + queries]) for span in groups)
            for groups in (group if isinstance(group, tuple) else (group,) for group in PATTERNS[name](T))
        ]
        q, sources, _ = draw(spans, [T] * len(spans), queries)
        with torch.no_grad():
            assert_close(attend(q, sources), attend_dense(q, sources), 1e-12)
            for found, expected in zip(
                attend(q, sources, return_lse=True), attend_dense(q, sources, return_lse=True), strict=True
            ):
                assert_close(found, expected, 1e-12)
