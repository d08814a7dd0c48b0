"""Packed rows are slices of the stream; scoring rows ask every token once, with the context it is due."""

from collections import Counter

import numpy as np
import pytest
import torch

from tandem.corpus.order import Order
from tandem.corpus.views import IGNORE, PackedRows, scoring_rows
from tandem.recipe import UserError

LENGTHS = [3, 1, 5, 2, 1, 1, 9, 4, 2, 6, 14, 40]


def test_rows_are_slices_of_the_stream(store_of):
    store, rows, T = store_of(LENGTHS), 4, 7
    order, view = Order(store, seed=5), PackedRows(store, seed=5, rows=rows, context=T)
    for step in (0, 1, 2, 3, 50):
        batch = view.batch(step)
        assert batch.tokens.shape == batch.targets.shape == batch.starts.shape == (rows, T)
        assert batch.tokens.dtype == batch.targets.dtype == batch.starts.dtype == torch.int64
        for r in range(rows):
            begin = (step * rows + r) * T
            tokens, begins = order.read(begin, T + 1)
            assert batch.tokens[r].tolist() == tokens[:T].tolist()
            ended = tokens[:T] == store.eos
            assert batch.targets[r].tolist() == np.where(ended, IGNORE, tokens[1:]).tolist()
            assert batch.starts[r].tolist() == [max(0, b - begin) for b in begins[:T]]


def test_starts_mark_documents_that_begin_inside_a_row(store_of):
    batch = PackedRows(store_of([3, 3]), seed=0, rows=2, context=5).batch(0)
    assert batch.starts.tolist() == [[0, 0, 0, 3, 3], [0, 1, 1, 1, 4]]
    assert (batch.targets == IGNORE).tolist() == [[0, 0, 1, 0, 0], [1, 0, 0, 1, 0]]


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_the_parts_of_a_step_are_its_rows(store_of, parts):
    view = PackedRows(store_of(LENGTHS), seed=1, rows=6, context=8)
    whole = view.batch(9)
    together = [view.batch(9, part, parts) for part in range(parts)]
    for name in ("tokens", "targets", "starts"):
        assert torch.equal(torch.cat([getattr(b, name) for b in together]), getattr(whole, name))


def test_rows_that_can_not_be_split_evenly_are_refused(store_of):
    with pytest.raises(UserError, match="6 rows cannot be split into 4 equal parts"):
        PackedRows(store_of(LENGTHS), seed=1, rows=6, context=8).batch(0, 0, 4)


def test_a_batch_is_the_same_however_it_is_reached(store_of):
    store = store_of(LENGTHS)
    view = PackedRows(store, seed=1, rows=2, context=8)
    expected = [PackedRows(store, seed=1, rows=2, context=8).batch(step) for step in range(9)]
    for step in (8, 0, 3, 3, 7):
        assert torch.equal(view.batch(step).tokens, expected[step].tokens)
    assert not torch.equal(PackedRows(store, seed=2, rows=2, context=8).batch(0).tokens, expected[0].tokens)


@pytest.mark.parametrize("context", [1, 2, 7, 8, 64])
@pytest.mark.parametrize("rows", [1, 3, 1 << 62])
def test_every_token_but_the_first_is_asked_once_with_its_context(store_of, context, rows):
    store = store_of(LENGTHS)
    asked = Counter()
    for scoring in scoring_rows(store, context, rows):
        batch = scoring.batch
        assert batch.tokens.shape[1] == context and len(batch.tokens) <= rows
        assert torch.equal(batch.targets == IGNORE, scoring.document < 0)
        for r, t in zip(*np.nonzero(scoring.document.numpy() >= 0), strict=True):
            i, index, start = int(scoring.document[r, t]), int(scoring.index[r, t]), int(batch.starts[r, t])
            asked[i, index] += 1
            document = store.document(i)
            seen = t - start + 1  # tokens that the position may read, its own included
            assert batch.targets[r, t] == document[index]
            assert batch.tokens[r, start : t + 1].tolist() == document[index - seen : index].tolist()
            assert seen >= min(index, context / 2)
    assert asked == Counter({(i, j): 1 for i, n in enumerate(LENGTHS) for j in range(1, n)})


def test_what_is_left_of_a_row_stands_alone_and_asks_nothing(store_of):
    scoring = next(scoring_rows(store_of([3, 4]), context=8, rows=2))
    assert scoring.batch.starts.tolist() == [[0, 0, 2, 2, 2, 5, 6, 7]]
    assert scoring.batch.targets[0, 5:].tolist() == [IGNORE] * 3
    assert scoring.document.tolist() == [[0, 0, 1, 1, 1, -1, -1, -1]]
    assert scoring.index.tolist() == [[1, 2, 1, 2, 3, -1, -1, -1]]


def test_chosen_documents_come_in_the_order_chosen_and_rows_are_filled(store_of):
    store = store_of([5] * 30)
    batches = list(scoring_rows(store, context=16, rows=2, documents=[7, 3, 21, 4, 5, 6, 8, 9, 10]))
    found = [i for s in batches for i in dict.fromkeys(s.document[s.document >= 0].tolist())]
    assert found == [7, 3, 21, 4, 5, 6, 8, 9, 10]
    assert [tuple(s.batch.tokens.shape) for s in batches] == [(2, 16), (1, 16)]
    assert (batches[0].document >= 0).all()  # four documents of four inputs fill a row


def test_a_batch_moves_and_its_starts_stay_where_spans_are_planned(store_of):
    moved = PackedRows(store_of([9, 9]), seed=0, rows=1, context=4).batch(0).to("meta")
    assert moved.tokens.is_meta and moved.targets.is_meta and moved.starts.device.type == "cpu"
