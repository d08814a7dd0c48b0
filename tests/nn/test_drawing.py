"""The picture of a span shows what the span says."""

import pytest

from tandem.nn.drawing import STARTS, draw_span


def test_a_span_is_drawn_query_by_key():
    ends = range(1, 13)
    starts = [max(start, end - 3) for start, end in zip(STARTS, ends, strict=True)]
    lines = draw_span(starts, list(ends), 12).splitlines()
    assert lines[:2] == ["    aaaaaaabbbbb", "    012345601234"]
    assert lines[2] == "a0  #..........."
    assert lines[8] == "a6  ....###....."
    assert lines[9] == "b0  .......#...."
    assert len(lines) == 14


def test_keys_that_are_not_the_tokens_are_numbered_and_an_empty_span_is_empty():
    assert draw_span([0, 1], [0, 10], 11).splitlines() == [
        "             1",
        "   01234567890",
        "0  ...........",
        "1  .#########.",
    ]


@pytest.mark.parametrize(("bounds", "keys", "told"), [([0, 0], 0, "2 queries, 0 keys"), ([], 3, "0 queries, 3 keys")])
def test_where_there_is_nothing_to_draw_a_line_says_so(bounds, keys, told):
    assert told in draw_span(bounds, bounds, keys)
