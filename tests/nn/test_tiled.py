"""What the tiles of a plan are: few, tight, without masks where none is needed. Their results: test_attention.py."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from patterns import PATTERNS, assert_close, draw, everything, sps, starts_of

from tandem.nn.attention import Source, attend, attend_dense, plan_attention
from tandem.nn.spans import Span, causal, prefix


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
    spans = PATTERNS[name](200)
    for strip in plan_attention(spans, [200] * len(spans)).tiles.strips:
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


def test_tiles_hold_at_most_so_many_queries_unless_they_are_triangles():
    T = 1024
    blocks = starts_of(T, 0.003, 2)[:1]
    spans = [causal(blocks), Span(torch.zeros_like(blocks), blocks)]
    few, many = (plan_attention(spans, [T, T], most=most) for most in (128, None))
    tiles = [tile for strip in few.tiles.strips for tile in strip.tiles]
    assert all(tile.queries <= 128 or tile.is_causal for tile in tiles)
    assert max(tile.queries for strip in many.tiles.strips for tile in strip.tiles if not tile.is_causal) > 128
    assert few.tiled_pairs < many.tiled_pairs
    generator = torch.Generator().manual_seed(0)
    q, *kv = (torch.randn(1, 2, T, 8, dtype=torch.float64, generator=generator) for _ in range(5))
    sources = [Source(*kv[:2], spans[0]), Source(*kv[2:], spans[1])]
    torch.testing.assert_close(attend(q, sources, plan=few), attend(q, sources, backend="dense"))
