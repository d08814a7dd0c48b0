import pytest
import torch

from tandem.nn.spans import Span, causal, prefix, readable

STARTS = torch.tensor([[0, 0, 0, 3, 3, 3, 3], [0, 1, 2, 3, 4, 4, 6]])


def as_sets(span, keys):
    """[row][query] -> the keys it reads."""
    return [[set(may.nonzero().flatten().tolist()) for may in row] for row in readable(span, keys)]


def test_causal_reads_the_document_up_to_the_query():
    assert as_sets(causal(STARTS), 7) == [[set(range(s, i + 1)) for i, s in enumerate(row)] for row in STARTS.tolist()]


@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_a_window_counts_the_query_itself(window):
    expected = [[{j for j in range(s, i + 1) if i - j < window} for i, s in enumerate(row)] for row in STARTS.tolist()]
    assert as_sets(causal(STARTS, window), 7) == expected


def test_positions_place_the_queries_of_a_decoding_step():
    late = causal(torch.tensor([[0], [2]]), 3, positions=torch.tensor([6]))
    assert as_sets(late, 7) == [[{4, 5, 6}], [{4, 5, 6}]]
    assert as_sets(causal(torch.tensor([[0], [5]]), positions=torch.tensor([6])), 7) == [[set(range(7))], [{5, 6}]]


def test_prefix_is_the_same_for_all_queries():
    assert as_sets(prefix(3, queries=2), 4) == [[{0, 1, 2}] * 2]
    assert as_sets(prefix(torch.tensor([0, 4]), queries=2), 4) == [[set()] * 2, [{0, 1, 2, 3}] * 2]


def test_bounds_broadcast_and_crossed_bounds_read_nothing():
    span = Span(torch.tensor([[0], [3]]), torch.arange(1, 5))
    assert span.lo.tolist() == [[0] * 4, [3] * 4]
    assert span.hi.tolist() == [[1, 2, 3, 4], [3, 3, 3, 4]]
    assert as_sets(span, 4)[1] == [set(), set(), set(), {3}]


@pytest.mark.parametrize(
    ("lo", "says"),
    [
        (torch.zeros(1, 3), "float32"),
        (torch.zeros(1, 3, dtype=torch.long, device="meta"), "on meta"),
        (torch.zeros(3, dtype=torch.long), r"shape \(3,\)"),
        (torch.zeros(1, 3).long().numpy(), "is ndarray"),
    ],
)
def test_bounds_are_host_integers_by_row_and_query(lo, says):
    with pytest.raises(ValueError, match=says):
        Span(lo, torch.tensor(3))


def test_bounds_that_do_not_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"shapes \(1, 3\), \(1, 4\)"):
        Span(torch.zeros(1, 3).long(), torch.zeros(1, 4).long())
