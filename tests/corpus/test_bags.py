"""Bags are cut from the stream, or from each document, and asked for what follows them."""

import numpy as np
import pytest
import torch

from tandem.corpus.bags import BagRows, FoldedRows
from tandem.corpus.order import Order
from tandem.corpus.views import IGNORE
from tandem.recipe import UserError
from tandem.testing.cases import AsWritten

X = IGNORE
LENGTHS = [3, 1, 5, 2, 9, 4, 2, 6, 14, 40]


def counting(*lengths):
    """Documents of these lengths in the order given; token i of the stream is i."""
    ends = np.cumsum(lengths)
    return AsWritten([list(range(end - n, end)) for n, end in zip(lengths, ends, strict=True)])


def cut(order, rows, context, *, bag=4, slots=4, tail=True, documents=False):
    return BagRows(order, rows, context, bag=bag, slots=slots, tail=tail, documents=documents)


def test_a_bag_is_asked_for_the_bag_that_follows():
    batch = cut(counting(100), rows=1, context=3).batch(0)
    assert batch.tokens[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert batch.targets[0].tolist() == [[4, 5, 6, 7], [8, 9, 10, 11], [12, X, X, X]]
    assert batch.starts.tolist() == [[0, 0, 0]]


def test_cut_from_the_stream_bags_know_no_documents():
    batch = cut(counting(6, 3, 11), rows=1, context=3).batch(0)
    assert batch.targets[0].tolist() == [[4, 5, 6, 7], [8, 9, 10, 11], [12, X, X, X]]
    assert batch.starts.tolist() == [[0, 0, 0]]


@pytest.mark.parametrize(("tail", "counts"), [(True, [3, 2, 2, 2]), (False, [2, 2, 2, 2])])
def test_the_last_bag_keeps_one_target_or_none(tail, counts):
    batch = cut(counting(100), rows=1, context=3, tail=tail).batch(0)
    assert (batch.targets != IGNORE).sum((0, 1)).tolist() == counts


def test_single_tokens_are_asked_for_the_next_s_within_their_row():
    batch = cut(counting(100), rows=2, context=6, bag=1).batch(0)
    assert batch.tokens.tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert (batch.targets[0] != IGNORE).sum(0).tolist() == [6, 5, 4, 3]
    assert batch.targets[1, 0].tolist() == [7, 8, 9, 10] and batch.targets[1, 5].tolist() == [12, X, X, X]


def test_at_the_end_of_a_bag_a_single_token_is_asked_what_the_bag_is():
    order = counting(100)
    bags, tokens = cut(order, 2, 5).batch(3), cut(order, 2, 20, bag=1).batch(3)
    assert torch.equal(bags.targets, tokens.targets[:, 3::4])


def test_documents_folded_each_by_itself():
    order = counting(11, 4, 5)
    view = FoldedRows(order, rows=1, context=3, bag=4, slots=4)
    batch = view.batch(0)
    assert batch.tokens[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [15, 16, 17, 18]]
    assert batch.targets[0].tolist() == [[4, 5, 6, 7], [8, 9, 10, X], [19, X, X, X]]
    assert batch.starts[0].tolist() == [0, 0, 2]
    assert (batch.targets != IGNORE).sum((0, 1)).tolist() == [3, 2, 2, 1]
    assert [view.read(step) for step in range(3)] == [0, 20, 40]


def test_without_bags_in_documents_keep_their_targets_to_themselves():
    batch = cut(counting(3, 5), rows=1, context=6, bag=1, slots=2, documents=True).batch(0)
    assert batch.targets[0].tolist() == [[1, 2], [2, X], [X, X], [4, 5], [5, 6], [6, X]]
    assert batch.starts[0].tolist() == [0, 0, 0, 3, 3, 3]


def folded_by_hand(store, documents, s):
    for d in documents:
        text = store.document(d).tolist()
        for k in range(len(text) // s if len(text) > s else 0):
            targets = text[(k + 1) * s : (k + 2) * s]
            yield text[k * s : (k + 1) * s], targets + [X] * (s - len(targets)), k


@pytest.mark.parametrize("s", [2, 3, 8])
def test_folded_rows_are_what_folding_by_hand_gives(store_of, s):
    store, rows, context = store_of(LENGTHS), 2, 5
    order = Order(store, seed=3)
    view = FoldedRows(order, rows, context, bag=s, slots=s)
    documents = [d for epoch in range(4) for d in order.epoch(epoch).documents]
    expected = list(folded_by_hand(store, documents, s))
    for step in range(len(expected) // (rows * context)):
        batch = view.batch(step)
        for r in range(rows):
            for column in range(context):
                tokens, targets, k = expected[(step * rows + r) * context + column]
                assert batch.tokens[r, column].tolist() == tokens and batch.targets[r, column].tolist() == targets
                assert batch.starts[r, column] == max(0, column - k)


@pytest.mark.parametrize("kind", ["cut", "folded", "tokens"])
def test_the_parts_of_a_step_are_its_rows(store_of, kind):
    order = Order(store_of(LENGTHS), seed=1)
    view = {
        "cut": lambda: cut(order, 6, 4),
        "tokens": lambda: cut(order, 6, 4, bag=1, documents=True),
        "folded": lambda: FoldedRows(order, 6, 4, bag=2, slots=2),
    }[kind]()
    whole = view.batch(9)
    for parts in (1, 2, 3, 6):
        together = [view.batch(9, part, parts) for part in range(parts)]
        for name in ("tokens", "targets", "starts"):
            assert torch.equal(torch.cat([getattr(b, name) for b in together]), getattr(whole, name))
    with pytest.raises(UserError, match="6 rows"):
        view.batch(0, 0, 4)


def test_documents_that_are_all_too_short_are_refused():
    with pytest.raises(UserError, match="no document has more than 5 tokens"):
        FoldedRows(counting(5, 2), 1, 1, bag=5, slots=5)
