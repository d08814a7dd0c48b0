"""Break points: where they may be, what decides them, and what is asked behind them."""

import numpy as np
import pytest
import torch

from tandem.corpus import IGNORE, PrefixRows, Store, Tokenizer, rows_of, suffix_windows
from tandem.corpus.store import StoreWriter
from tandem.testing.cases import document
from tandem.testing.cases import packed as packed_rows

ROWS = [
    [document(9, 1), document(1, 2), document(14, 3), document(8, 4)],
    [document(2, 5), document(27, 6), document(3, 7)],
]


def views(**options):
    return PrefixRows(packed_rows(ROWS), **options)


def by_document(batch):
    """(row, start, end, first asked or None) of every document of a batch."""
    for row, starts in enumerate(batch.starts.tolist()):
        for start in sorted(set(starts)):
            end = start + starts.count(start)
            asked = [i for i in range(start, end) if batch.targets[row, i] != IGNORE]
            yield row, start, end, asked


def test_a_document_is_asked_from_its_break_point_on_and_generates_from_the_token_before():
    plain = packed_rows(ROWS).batch(0)
    seen = set()
    for step in range(200):
        batch = views().batch(step)
        assert torch.equal(batch.tokens, packed_rows(ROWS).batch(step).tokens)
        for row, start, end, asked in by_document(batch):
            could = [i for i in range(start, end) if plain.targets[row, i] != IGNORE]
            if not could:
                assert not asked and (batch.blocks[row, start:end] == start).all()
                continue
            assert asked == could[could.index(asked[0]) :]
            assert torch.equal(batch.targets[row, asked], packed_rows(ROWS).batch(step).targets[row, asked])
            assert batch.blocks[row, start:end].tolist() == [start] * (asked[0] - start) + [asked[0]] * (end - asked[0])
            seen.add((row, start, asked[0] - start))
    assert {n for row, start, n in seen if (row, start) == (0, 10)} == set(range(13))  # every place, ends included


def test_break_points_are_decided_by_seed_step_row_and_document():
    view = views()
    assert torch.equal(view.batch(3).blocks, view.batch(3).blocks)
    parts = [view.batch(3, part, 2).blocks for part in range(2)]
    assert torch.equal(torch.cat(parts), view.batch(3).blocks)
    assert not torch.equal(view.batch(3).blocks, view.batch(4).blocks)
    twins = PrefixRows(packed_rows([[document(40, 1)]] * 2))
    assert any(not torch.equal(*twins.batch(step).blocks) for step in range(3))
    other = views()
    other.packed.seed = 1
    assert not torch.equal(view.batch(3).blocks, other.batch(3).blocks)


def test_one_break_point_for_a_row_asks_all_of_what_lies_behind_it():
    for step in range(50):
        batch, plain = views(scope="row").batch(step), packed_rows(ROWS).batch(step)
        for row in range(2):
            asked = (batch.targets[row] != IGNORE).nonzero()[:, 0]
            first = int(asked[0])
            assert torch.equal(batch.targets[row, first:], plain.targets[row, first:])
            (begin,) = batch.blocks[row, first:].unique().tolist()
            assert begin <= first and (plain.targets[row, begin:first] == IGNORE).all()
            assert torch.equal(batch.blocks[row, :begin], batch.starts[row, :begin])
    last = [views(scope="row").batch(step).blocks[:, -1].tolist() for step in range(200)]
    assert {begin + 1 for rows in last for begin in rows} == set(range(1, packed_rows(ROWS).context - 1))
    alike = [views(scope="row", shared=True).batch(step) for step in range(20)]
    first = [[int((batch.targets[row] != IGNORE).nonzero()[0]) for row in range(2)] for batch in alike]
    assert sum(one == other for one, other in first) > 10  # but where that place asks nothing in one of them


@pytest.fixture
def store(tmp_path):
    writer = StoreWriter(tmp_path / "store", Tokenizer.of_bytes())
    writer.append(*writer.tokenizer.encode_batch(["a short one", "", "x", "The cat sat on the mat. " * 9, "end"]))
    writer.close(["made up"])
    return Store(tmp_path / "store")


def test_scores_ask_the_same_of_a_document_whatever_is_scored_beside_it(store):
    every = list(suffix_windows(store, 24))
    for i in range(len(store)):
        assert list(suffix_windows(store, 24, [i])) == [window for window in every if window[0] == i]
    for i, first, last, asked in every:
        assert first <= asked < last <= store.lengths[i] - 1
    pieces = [(first, last) for i, first, last, _ in every if i == 3]
    assert [last for _, last in pieces[:-1]] == [first for first, _ in pieces[1:]] and pieces[-1][1] == store.lengths[
        3
    ] - 1
    whole = [asked - first for i, first, last, asked in every if i == 3 and last - first == 24]
    assert len(whole) > 5 and len(set(whole)) > 2  # every piece has its own
    asked_of = {}
    for scoring in rows_of(every, store, 24, 2, divided=True):
        batch, is_asked = scoring.batch, scoring.batch.targets != IGNORE
        assert torch.equal(is_asked, scoring.document >= 0)
        index = torch.arange(24)
        assert (batch.blocks[is_asked] <= index.expand_as(is_asked)[is_asked]).all()
        for row, column in is_asked.nonzero().tolist():
            i, at = int(scoring.document[row, column]), int(scoring.index[row, column])
            assert batch.targets[row, column] == int(store.document(i)[at])
            asked_of.setdefault(i, []).append(at)
    expected = {}
    for i, _, last, asked in every:
        expected.setdefault(i, []).extend(range(asked + 1, last + 1))
    assert {i: sorted(v) for i, v in asked_of.items()} == expected and 1 not in expected
    assert np.sum([len(v) for v in expected.values()]) == sum(last - asked for *_, last, asked in every)
