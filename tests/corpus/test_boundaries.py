"""From pieces of text to sentences of tokens: they tile the document, none is too long, no token is lost."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.corpus.boundaries import aligned, cap_lengths, mark, merge_lengths, token_starts
from tandem.corpus.tokenizer import Tokenizer

TRAINED = Tokenizer.train(["He said: the cat sat on the mat. They are here.\n\nIs it so? No, no; yes."] * 20, 330)
TELLING = st.sampled_from([" ", "\n", "\u3000", "a", "Zed", ". ", "☃", "é", "\U0001f600", "...", "☉"])
PIECES = st.lists(st.lists(TELLING, min_size=1, max_size=6).map("".join), min_size=1, max_size=8).filter(
    lambda pieces: not "".join(pieces).isspace()
)


def words(*pieces):
    """Sizes of tokens that end where a `|` stands, and the pieces without it."""
    text = "".join(pieces)
    return [piece.replace("|", "") for piece in pieces], np.array([len(part.encode()) for part in text.split("|")])


@pytest.mark.parametrize(
    ("pieces", "starts"),
    [
        (("One| two|.", " Three|."), [0, 3]),  # a token begins with the space before it
        (("One| two|. |", "Three|."), [0, 3]),
        (("One| two|.|\n", "|\n| |Three|."), [0, 6]),  # white space stays with the sentence before
        (("\n|One|.|", " Two"), [0, 3]),  # or opens the document
        (("One| two", ".Th|ree|."), [0, 2]),  # a token of two belongs to the earlier one
        (("One| two", ".", " Three"), [0]),  # a sentence left without a token vanishes
        (("One| two", "Th| |", " Three"), [0, 3]),  # and its white space stays with what is there
        (("é", "é|", "b"), [0, 1]),
    ],
)
def test_a_sentence_starts_at_its_first_visible_character(pieces, starts):
    assert token_starts(*words(*pieces)).tolist() == starts


@pytest.mark.parametrize("pieces", [[], [" "], ["\n", " \n"]])
def test_a_text_of_nothing_visible_is_one_sentence(pieces):
    assert token_starts(pieces, np.ones(len("".join(pieces)), np.int64)).tolist() == [0]


def test_half_a_character_belongs_to_the_sentence_of_the_whole():
    starts, shared = aligned(["A.", "☃", "b☃"], np.array([1, 2, 2, 4]))  # the second token: . and a third of ☃
    assert starts.tolist() == [0, 2, 3] and shared == 1


@settings(max_examples=200, deadline=None)
@given(pieces=PIECES, trained=st.booleans())
def test_each_token_belongs_to_the_sentence_of_its_first_visible_character(pieces, trained):
    """The definition, character by character."""
    tokenizer = TRAINED if trained else Tokenizer.of_bytes()
    text = "".join(pieces)
    _, (sizes,) = tokenizer.encode_batch([text])
    owner = [number for number, piece in enumerate(pieces) for character in piece for _ in character.encode()]
    visible = [not character.isspace() for character in text for _ in character.encode()]
    sentences, position, current = [], 0, next(o for o, v in zip(owner, visible, strict=True) if v)
    for size in sizes:
        held = range(position, position + int(size))
        current = next((owner[b] for b in held if visible[b]), current)
        sentences.append(current)
        position += int(size)
    expected = [i for i, s in enumerate(sentences) if i == 0 or s != sentences[i - 1]]
    assert token_starts(pieces, sizes).tolist() == expected


# Cap ------------------------------------------------------------------------------------------------------------

LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, cap=st.sampled_from([1, 2, 7, 64]), seed=st.integers(0, 99))
def test_pieces_tile_the_sentences_and_none_is_long_or_needlessly_short(lengths, cap, seed):
    strength = lambda tokens: (tokens * 2654435761 + seed) % 7
    pieces = cap_lengths(lengths, cap, strength)
    assert sum(pieces) == sum(lengths) and max(pieces) <= cap
    ends = set(itertools.accumulate(pieces))
    assert set(itertools.accumulate(lengths)) <= ends
    rest = iter(pieces)
    for length in lengths:
        of_one = [next(rest)]
        while sum(of_one) < length:
            of_one.append(next(rest))
        assert of_one == [length] or min(of_one) >= -(-(cap + 1) // 4)


def strengths(marks):
    return lambda tokens: marks.get(tokens, 0)


def test_the_strongest_mark_of_the_middle_half_wins_then_the_nearest_then_the_earlier():
    assert cap_lengths([100], 64, strengths({})) == [50, 50]
    assert cap_lengths([101], 64, strengths({})) == [50, 51]  # a tie: 50 and 51 are as near
    assert cap_lengths([100], 64, strengths({40: 1, 60: 1})) == [40, 60]
    assert cap_lengths([100], 64, strengths({41: 1, 60: 1})) == [41, 59]
    assert cap_lengths([100], 64, strengths({42: 1, 75: 2})) == [42, 33, 25]  # and then its parts
    assert cap_lengths([100], 64, strengths({24: 5, 76: 5})) == [50, 50]  # outside the middle half
    assert cap_lengths([10, 100], 64, strengths({50: 3, 60: 1})) == [10, 40, 60]  # counted from the document's start


TEXT_MARKS = [
    ("One line\n", 5, "Next"),
    ("One line\n ", 5, "Next"),
    ("He left. ", 4, "She"),
    ('He "left!"', 4, " She"),
    ("Left…)", 4, " She"),
    ("first; ", 3, "then"),
    ("as follows:", 3, " then"),
    ("red,", 2, " blue"),
    ("(red)", 2, " blue"),
    ("red —", 2, " blue"),
    ("red—", 2, "blue"),
    ("red--", 2, "blue"),
    ("red", 1, " blue"),
    ("red ", 1, "blue"),
    ("well-", 0, "known"),
    ("3.", 0, "5"),
    ("wo", 0, "rd"),
    ("He left.", 0, "\n"),  # the white space would open a sentence
]


@pytest.mark.parametrize(("before", "strength", "after"), TEXT_MARKS)
def test_one_example_of_each_mark(before, strength, after):
    sizes = [len(part.encode()) for part in (before, after, "end")]
    assert mark((before + after + "end").encode(), np.cumsum(sizes), 1) == strength


def test_no_character_is_cut_where_another_place_is():
    assert mark("a ☃".encode(), np.array([3, 5]), 1) == 0


# Merge ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "merged"),
    [
        ([10, 2, 10], [12, 10]),  # the previous
        ([2, 10], [12]),  # the next, where there is none before
        ([63, 2, 10], [63, 12]),  # or where it does not fit
        ([63, 2, 62], [63, 64]),  # a sum of the cap fits
        ([63, 2, 63], [63, 2, 63]),  # stays
        ([62, 2, 63], [64, 63]),
        ([1, 1, 10], [12]),
        ([1], [1]),
        ([3, 3], [3, 3]),
        ([10, 2, 1], [13]),
    ],
)
def test_short_sentences_join_the_previous_else_the_next_else_stay(lengths, merged):
    assert merge_lengths(lengths, 64) == merged


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=30))
def test_merging_drops_nothing_and_keeps_the_cap(lengths):
    merged = merge_lengths(lengths, 64)
    assert sum(merged) == sum(lengths) and max(merged) <= 64
    assert set(itertools.accumulate(merged)) <= set(itertools.accumulate(lengths))
    for before, length, after in zip([64, *merged], merged, [*merged[1:], 64], strict=False):
        assert length >= 3 or min(before, after) + length > 64
