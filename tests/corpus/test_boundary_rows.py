"""Boundary rows: the packed rows with [EOS] and [BOS] where sentences end and begin, every token asked once."""

from collections import Counter

import numpy as np
import pytest
import torch

from tandem.corpus import (
    IGNORE,
    BoundaryRows,
    PackedRows,
    Segmentation,
    scoring_boundary_rows,
    scoring_rows,
    sentences_of,
    widest_row,
)

LENGTHS = [3, 1, 50, 2, 61, 1, 9, 4, 20, 6, 14]
END, BEGIN = 257, 258


@pytest.fixture
def store(store_of):
    made = store_of(LENGTHS)
    made.segmentation = Segmentation(splitter="every", every=4)
    return made


def written(store, document: int) -> list[int]:
    """A whole document with its boundaries."""
    starts = {*sentences_of(store).document(document).tolist()} - {0}
    made = [BEGIN]
    for i, token in enumerate(store.document(document).tolist()):
        made += [END, BEGIN, token] if i in starts else [token]
    return made


def test_a_short_corpus_by_hand(store_of):
    store = store_of([6, 3])
    store.segmentation = Segmentation(splitter="every", every=3)
    batch = BoundaryRows(store, seed=0, rows=1, context=9).batch(0)
    documents, begins = PackedRows(store, 0, 1, 9).order.documents(0, 9)
    a, b = (store.document(int(i)).tolist() for i in documents)
    expected = {
        6: lambda t: [BEGIN, *t[:3], END, BEGIN, *t[3:]],
        3: lambda t: [BEGIN, *t],
    }
    one, two = expected[len(a)](a), expected[len(b)](b)
    n = len(one) + len(two)
    assert batch.tokens[0, :n].tolist() == one + two
    assert batch.targets[0, :n].tolist() == [*one[1:], IGNORE, *two[1:], IGNORE]
    assert batch.starts[0, :n].tolist() == [0] * len(one) + [len(one)] * len(two)
    at = one.index(BEGIN, 1) if len(a) == 6 else len(one) + two.index(BEGIN, 1)
    begun = [0, at, len(one)] if len(a) == 6 else [0, len(one), at]
    assert sorted(set(batch.sentences[0, :n].tolist())) == sorted(begun)
    assert begins.tolist() == [0, len(a)]


@pytest.mark.parametrize(("rows", "context"), [(1, 7), (3, 16), (2, 200)])
def test_an_epoch_asks_every_token_and_boundary_once(store, rows, context):
    view, packed = BoundaryRows(store, 2, rows, context), PackedRows(store, 2, rows, context)
    steps = -(-len(store.tokens) // (rows * context))
    asked, plain = Counter(), Counter()
    for step in range(steps):
        batch, other = view.batch(step), packed.batch(step)
        assert view.read(step) == packed.read(step)
        for row in range(rows):
            kept = batch.tokens[row] < END
            inputs = batch.tokens[row][kept][:context]
            assert inputs.tolist() == other.tokens[row].tolist()
        asked.update(batch.targets.flatten().tolist())
        plain.update(other.targets.flatten().tolist())
    boundaries = {id: asked.pop(id) for id in (END, BEGIN)}
    assert boundaries[END] == boundaries[BEGIN] > 0
    asked.pop(IGNORE), plain.pop(IGNORE)
    first = asked.total() - plain.total()  # behind [BOS] the first token of a document is asked, too
    passes = steps * rows * context / len(store.tokens)
    assert len(store) * (passes - 1) <= first <= len(store) * (passes + 1)


def test_a_row_is_as_long_as_what_its_sources_give_it(store_of):
    """Nine tenths of a mixture come in documents of one sentence, which are the smallest part of the text."""
    store = store_of([4] * 10 + [400] * 3, {"short": 0.9, "long": 0.1}, [0] * 10 + [1] * 3)
    store.segmentation = Segmentation(splitter="every", every=20)
    view = BoundaryRows(store, seed=1, rows=1, context=100)
    read = [sum(len(piece.tokens) for piece in view._pieces(100 * row)) for row in range(200)]
    assert view.context == pytest.approx(np.mean(read), abs=1)


@pytest.mark.parametrize("context", [1, 7, 32])
def test_the_widest_row_is_of_tokens_that_are_sentences(store_of, context):
    """At the beginning of a document that does not end in the row; nothing is scored in a wider window either."""
    store = store_of([200, 3])
    store.segmentation = Segmentation(splitter="every", every=1)
    view = BoundaryRows(store, 0, 1, context)
    found = [sum(len(piece.tokens) for piece in view._pieces(context * row)) for row in range(400)]
    assert max(found) == widest_row(context)
    places = [
        int((torch.arange(scoring.batch.tokens.shape[1]) - scoring.batch.starts).max())
        for scoring in scoring_boundary_rows(store, context, 2)
    ]
    assert max(places) == widest_row(context) - 1


def test_parts_are_runs_of_the_rows(store):
    view = BoundaryRows(store, 2, 4, 16)
    whole, parts = view.batch(1), [view.batch(1, part, 2) for part in range(2)]
    rows = [row for part in parts for row in part.tokens]
    for row, expected in zip(rows, whole.tokens, strict=True):
        n = min(len(row), len(expected))
        assert row[:n].tolist() == expected[:n].tolist() and (expected[n:] == store.eos).all()


@pytest.mark.parametrize("context", [2, 7, 16, 100])
def test_every_token_and_every_end_but_the_last_is_scored_once(store, context):
    found = Counter()
    for scoring in scoring_boundary_rows(store, context, 3):
        batch = scoring.batch
        for row, column in (scoring.document >= 0).nonzero().tolist():
            i, index = int(scoring.document[row, column]), int(scoring.index[row, column])
            found[i, index] += 1
            start, target = int(batch.starts[row, column]), int(batch.targets[row, column])
            assert target == (END if index < 0 else store.document(i)[index])
            read = [*batch.tokens[row, start : column + 1].tolist(), target]
            text = written(store, i)
            assert any(text[at : at + len(read)] == read for at in range(len(text)))
            if index > 0:
                assert sum(token < END for token in read[:-1]) >= min(index, context / 2)
    plain = {
        (int(i), int(index))
        for scoring in scoring_rows(store, context, 3)
        for i, index in zip(scoring.document.flatten(), scoring.index.flatten(), strict=True)
        if index > 0
    }
    tokens = {key: n for key, n in found.items() if key[1] > 0}
    assert tokens == dict.fromkeys(plain, 1)
    assert {i: n for (i, index), n in found.items() if index == 0} == {i: 1 for i, n in enumerate(LENGTHS) if n > 1}
    ends = np.array([found[i, -1] for i in range(len(store))])
    assert ends.tolist() == [len(sentences_of(store).document(i)) - 1 for i in range(len(store))]


def test_a_row_costs_its_tokens_and_boundaries(store):
    view = BoundaryRows(store, 2, 4, 16)
    batches = [view.batch(step) for step in range(40)]
    held = [(batch.tokens != store.eos) | (batch.starts != torch.arange(batch.tokens.shape[1])) for batch in batches]
    mean = np.mean([int(places.sum()) / 4 for places in held])
    assert view.context == pytest.approx(mean, abs=0.6) and view.row_tokens == 16
    assert torch.equal(view.batch(3).tokens, BoundaryRows(store, 2, 4, 16).batch(3).tokens)
