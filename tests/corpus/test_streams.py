"""Sentence streams: every stream once per epoch, steps that read what a packed step reads, schedules in closed form."""

import math
from dataclasses import fields

import numpy as np
import pytest
import torch

from tandem.corpus import (
    Order,
    PackedRows,
    Segmentation,
    SentenceStreams,
    Streams,
    scoring_rows,
    scoring_streams,
    sentences_of,
)
from tandem.corpus.streams import streams_of
from tandem.recipe import UserError

LENGTHS = [3, 1, 50, 2, 61, 1, 90, 4, 200, 6, 14, 40, 33, 120]  # 625 tokens


@pytest.fixture
def store(store_of):
    made = store_of(LENGTHS)
    made.segmentation = Segmentation(splitter="every", every=4)
    return made


def view_of(store, steps=0, rows=2, context=32, **settings) -> SentenceStreams:
    return SentenceStreams(store, 5, rows, context, Streams(**settings)).of_run(steps)


SMALL = {"sentences": 3, "grow": 1, "every": 1}


@pytest.mark.parametrize(
    ("count", "most", "sizes"), [(31, 30, [16, 15]), (100, 42, [34, 33, 33]), (7, 7, [7]), (1, 5, [1])]
)
def test_a_document_becomes_nearly_equal_streams_longer_first(count, most, sizes):
    lengths = np.arange(1, count + 1)
    streams = list(streams_of(lengths, 4, most))
    assert [len(stream.lengths) for stream in streams] == sizes
    assert [n for stream in streams for n in stream.lengths] == lengths.tolist()
    assert [stream.offset for stream in streams] == [lengths[: sum(sizes[:i])].sum() for i in range(len(sizes))]


def test_streams_grow_every_five_epochs_without_end(store):
    view = view_of(store, rows=8, context=10)
    by_epoch = [view.most_sentences(epoch * view.per_epoch) for epoch in range(31)]
    assert by_epoch[:25] == [S for S in (30, 42, 54, 66, 78) for _ in range(5)] and by_epoch[30] == 102
    assert view.most_sentences(5 * view.per_epoch - 1) == 30


@pytest.mark.parametrize("settings", [SMALL, {"sentences": 4, "grow": 2, "every": 0.2}])
def test_every_token_comes_once_an_epoch_and_no_step_is_empty(store, settings):
    view = view_of(store, steps=30, **settings)
    for epoch in range(3):
        read = np.zeros(len(store.tokens), int)
        for step in range(epoch * view.per_epoch, (epoch + 1) * view.per_epoch):
            batch = view.batch(step)
            assert batch.lengths and len(batch.tokens) == view.read(step + 1) - view.read(step)
            for document, offset, lengths in zip(batch.documents, batch.offsets, batch.lengths, strict=True):
                begin = store.offsets[document] + offset
                read[begin : begin + sum(lengths)] += 1
                assert set(np.cumsum([offset, *lengths[:-1]])) <= set(sentences_of(store).document(document))
                assert len(lengths) <= view.most_sentences(step)
        assert (read == 1).all()


def test_a_step_reads_what_a_packed_step_reads_up_to_a_stream(store):
    view, packed = view_of(store, **SMALL), PackedRows(store, 5, 2, 32)
    longest = 20 * 5
    for step in range(view.per_epoch):
        nominal = step * len(store.tokens) / view.per_epoch
        assert nominal <= view.read(step) < nominal + longest
        assert abs(nominal - packed.read(step)) <= packed.rows * packed.context
    assert view.read(view.per_epoch) == len(store.tokens)


def test_steps_of_an_epoch_do_not_depend_on_the_streams(store):
    assert {view_of(store, sentences=S).per_epoch for S in (1, 7, 30)} == {10}  # 625 tokens in steps of 64
    assert view_of(store, rows=100, context=100).per_epoch == 1
    assert [view_of(store, rows=rows, context=10).per_epoch for rows in (10, 5)] == [6, 13]  # of 6.25 and 12.5


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_batch_is_the_same_however_it_is_reached(store, parts):
    view = view_of(store, **SMALL)
    for step in (11, 0, 11, 3):
        whole, other = view.batch(step), view_of(store, **SMALL)
        dealt = [other.batch(step, part, parts) for part in range(parts)]
        for i, stream in enumerate(zip(whole.documents, whole.offsets, whole.lengths, strict=True)):
            part = dealt[i % parts]
            assert stream == (part.documents[i // parts], part.offsets[i // parts], part.lengths[i // parts])
        assert sum(len(part.tokens) for part in dealt) == len(whole.tokens)
        for part in dealt:
            counts = [len(lengths) for lengths in part.lengths]
            assert counts == sorted(counts, reverse=True)
            assert (part.rows_at, part.tokens_at) == (whole.rows_at, whole.tokens_at)


def test_a_step_is_cut_into_streams_once_for_all_its_micro_batches(store, monkeypatch):
    cut = []
    monkeypatch.setattr("tandem.corpus.streams.streams_of", lambda *how: cut.append(how[1]) or streams_of(*how))
    view = view_of(store, sentences=1, grow=2, every=0.5)
    found = [view.batch(4, part, 8) for part in range(8)]
    assert cut and len(cut) == len(set(cut))
    longer = view.of_run(6)  # in which streams have grown by then
    assert longer.batch(4).lengths == view_of(store, 6, sentences=1, grow=2, every=0.5).batch(4).lengths
    assert len(longer.batch(4).lengths) < sum(len(part.lengths) for part in found)


def test_documents_come_in_the_house_order_of_each_epoch_and_as_they_come_within_a_step(store):
    """Streams with more sentences first, among equals the earlier one."""
    view, orders = view_of(store, **SMALL), []
    for epoch in range(3):
        documents, latest = Order(store, 5).epoch(epoch)[0].tolist(), 0
        for step in range(epoch * view.per_epoch, (epoch + 1) * view.per_epoch):
            batch = view.batch(step)
            places = [documents.index(i) for i in batch.documents]
            keys = [(-len(n), *at) for n, *at in zip(batch.lengths, places, batch.offsets, strict=True)]
            assert keys == sorted(keys) and min(places) >= latest
            latest = max(places)
        orders.append(documents)
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("settings", [SMALL, {"sentences": 4, "grow": 2, "every": 0.2}])
def test_a_document_is_cut_by_the_length_of_streams_when_it_begins(store, settings):
    view, most = view_of(store, steps=30, **settings), set()
    for epoch in range(3):
        found, begin = [], 0
        for step in range(epoch * view.per_epoch, (epoch + 1) * view.per_epoch):
            found += view.batch(step).documents
        for document in Order(store, 5).epoch(epoch)[0].tolist():
            most.add(S := view.most_sentences(epoch * 10 + begin * 10 // 625))
            assert found.count(document) == math.ceil(len(sentences_of(store).document(document)) / S)
            begin += LENGTHS[document]
    assert len(most) > 2


def test_totals_are_of_the_sentence_steps_of_the_whole_step(store):
    batch = view_of(store, **SMALL).batch(2)
    for t, (rows, tokens) in enumerate(zip(batch.rows_at, batch.tokens_at, strict=True)):
        alive = [lengths[t] for lengths in batch.lengths if len(lengths) > t]
        assert (rows, tokens) == (len(alive), sum(alive))
    assert sum(batch.tokens_at) == len(batch.tokens)


def test_targets_are_the_tokens_of_each_sentence_and_its_end(store):
    batch, at = view_of(store, **SMALL).batch(1), 0
    expected = []
    for document, offset, lengths in zip(batch.documents, batch.offsets, batch.lengths, strict=True):
        for length in lengths:
            assert (
                batch.tokens[at : at + length].tolist() == store.document(document)[offset : offset + length].tolist()
            )
            expected += [*batch.tokens[at : at + length].tolist(), store.vocabulary]
            at, offset = at + length, offset + length
    assert batch.document_end == store.document(0)[-1]
    assert batch.targets[0].tolist() == expected and batch.tokens.dtype == batch.targets.dtype == torch.int64


def test_streams_that_might_leave_a_step_empty_are_refused(store):
    view_of(store, **SMALL, steps=10).require()  # 3 sentences of at most 5 tokens, 625 tokens in 10 steps
    with pytest.raises(UserError, match=r"of 14 sentences of up to 5 tokens do not fit the 62 .* a smaller budget"):
        view_of(store, **SMALL, steps=120).require()
    with pytest.raises(UserError, match=r"fewer sentences, or a smaller corpus"):
        view_of(store, **SMALL | {"sentences": 14, "grow": 0}, steps=120).require()
    of_one_step = {"rows": 100, "context": 100, "grow": 0}  # streams of as many tokens as a step just fit
    view_of(store, **of_one_step, sentences=125).require()
    with pytest.raises(UserError, match=r"of 126 sentences of up to 5 tokens do not fit the 625 "):
        view_of(store, **of_one_step, sentences=126).require()


# ---- what changes on the way ----------------------------------------------------------------------------------------


def test_dropout_switches_by_sentence_steps_of_the_run(store):
    view = view_of(store, rows=1, context=1)  # an epoch of 625 steps: S = 30 throughout
    rates = [view.dropout(step) for step in range(300)]
    assert rates == [0.0] * 67 + [0.5] * (234 - 67) + [1.0] * (300 - 234)


def test_sentence_steps_are_the_sum_over_the_steps_before(store):
    view = view_of(store, sentences=3, grow=2, every=2, half_dropout_from=70, full_dropout_from=100)
    total = 0
    for step in range(8 * view.per_epoch):
        assert view.sentence_steps(step) == total
        assert view.dropout(step) == ((total >= 70) + (total >= 100)) / 2  # in the third epoch, and so for ever
        total += view.most_sentences(step)


def test_moments_are_given_in_steps_or_as_shares_of_the_run(store):
    view = view_of(store, half_dropout_from="2000 steps", full_dropout_from="7000 steps")
    assert [view.dropout(step) for step in (1999, 2000, 6999, 7000)] == [0, 0.5, 0.5, 1]
    view = view_of(store, 1000, half_dropout_from=0.05, full_dropout_from=0.15, end_weight_from=0.1, every=0.2)
    assert [view.dropout(step) for step in (49, 50, 149, 150)] == [0, 0.5, 0.5, 1]
    assert [view.end_weight(step) for step in (99, 100)] == [1.0, 0.05]
    assert [view.most_sentences(step) for step in (0, 199, 200, 999)] == [30, 30, 42, 78]
    assert view_of(store, 781, every=0.2).most_sentences(780) == 78  # five stages, and no sixth of one step


def test_sentence_ends_weigh_one_in_the_first_epoch(store):
    view = view_of(store)
    assert [view.end_weight(step) for step in (0, view.per_epoch - 1, view.per_epoch)] == [1.0, 1.0, 0.05]
    assert view_of(store, end_weight=1.0).end_weight(10**6) == 1.0
    assert view.batch(view.per_epoch).end_weight == 0.05 and view.batch(0).dropout == 0


# ---- scoring --------------------------------------------------------------------------------------------------------


def test_the_tokens_that_are_scored_are_those_of_the_packed_view(store):
    def scored(batches):
        return {
            (int(i), int(index), int(target))
            for scoring in batches
            for i, index, target in zip(
                *(column.flatten().tolist() for column in (scoring.document, scoring.index, scoring.batch.targets)),
                strict=True,
            )
            if index > 0
        }

    streams = list(scoring_streams(store, 16, 3))
    assert scored(streams) == scored(scoring_rows(store, 16, 3))
    asked = torch.cat([torch.stack((s.document[0], s.index[0]))[:, s.document[0] >= 0] for s in streams], 1)
    ends = asked[1] < 0
    assert ends.sum() == sentences_of(store).manifest.sentences - len(store)  # all but the last of each document
    assert (asked[1] == 0).sum() == len(store) and (~ends).sum() == len(store.tokens)
    for s in streams:
        assert ((s.document[0] >= 0) & (s.index[0] < 0) <= (s.batch.targets[0] == store.vocabulary)).all()


@pytest.mark.parametrize(("rows", "context"), [(2, 32), (10, 24), (10, 40), (20, 30), (100, 100)])
def test_rows_of_the_mean_length_are_what_an_epoch_holds(store, rows, context):
    """Of one to ten steps, which share the text evenly, whatever the tokens of a step were meant to be."""
    view = view_of(store, rows=rows, context=context)
    read = sum(len(view.batch(step).tokens) for step in range(view.per_epoch))
    assert read == len(store.tokens)
    assert abs(view.per_epoch * rows * view.context - read) <= view.per_epoch * rows / 2


@pytest.mark.parametrize("context", [2, 7, 16, 100])
def test_in_windows_the_same_is_asked_given_what_the_packed_view_would_have_read(store, context):
    asked = []
    for scoring in scoring_streams(store, context, 3, whole=False):
        batch, at = scoring.batch, 0
        for i, offset, lengths in zip(batch.documents, batch.offsets, batch.lengths, strict=True):
            size, starts = sum(lengths), sentences_of(store).document(i)
            assert size <= context + 1  # the last one is asked, never read
            begins = offset + np.cumsum([0, *lengths[:-1]])
            assert begins.tolist() == [offset, *starts[(starts > offset) & (starts < offset + size)]]
            own = slice(at, at := at + size + len(lengths))
            document, index = scoring.document[0, own].numpy(), scoring.index[0, own].numpy()
            place = np.insert(np.arange(offset, offset + size), np.cumsum(lengths), -1)
            assert (index == place).all() and {*document} <= {i, -1}
            assert batch.targets[0, own].tolist() == [
                store.vocabulary if p < 0 else int(store.document(i)[p]) for p in place
            ]
            told = index[document >= 0]
            assert all(p - offset >= min(p, context / 2) for p in told[told >= 0])
            asked += [(i, int(p)) for p in told[told >= 0]]
            closed = [int(index[j - 1]) + 1 for j in np.flatnonzero((document >= 0) & (index < 0))]
            assert {*closed} <= {*starts}
            asked += [(i, -end) for end in closed]
    of_two_or_more = len(store.tokens) - LENGTHS.count(1)
    assert len(asked) == len({*asked}) == of_two_or_more + sentences_of(store).manifest.sentences - len(store)


def test_scoring_reads_whole_documents_in_batches_of_about_as_many_tokens(store):
    batches = [scoring.batch for scoring in scoring_streams(store, 16, 8, [8, 0, 4, 9])]
    assert [batch.documents for batch in batches] == [[8], [4, 9, 0]]
    assert all(batch.offsets == [0] * len(batch.documents) for batch in batches)
    assert {field.name for field in fields(batches[0])} >= {"tokens", "lengths", "documents", "offsets"}
