"""Where a run switches, what it has read by then, and what that costs: closed forms of the step."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tandem.corpus import IGNORE, PackedRows
from tandem.objectives import superposition as module
from tandem.objectives.next_token import NextToken
from tandem.objectives.phases import Phases, whole_steps
from tandem.objectives.superposition import Superposition
from tandem.recipe import load
from tandem.testing.cases import AsWritten, document

ONE = [document(50, 1)]


def phases(rows, context, steps, texts=ONE, **settings):
    packed = PackedRows.__new__(PackedRows)
    packed.order, packed.begin, packed.rows, packed.context = AsWritten(texts), 0, rows, context
    return Phases(Superposition(Superposition.Config(**settings)).phases(packed, steps))


def shapes(view, *steps):
    return [(phase.view.rows, phase.view.context) for phase in map(view.at, steps)]


@pytest.mark.parametrize(
    ("until", "steps", "last"), [(0.29, 100, 29), (0.3, 20_000, 6000), (0.3, 10, 3), (7, 100, 7), (1.0, 9, 9)]
)
def test_a_share_is_rounded_down_in_exact_decimals(until, steps, last):
    assert whole_steps(until, steps) == last
    view = phases(1, 4, steps, bag=2, until=until)
    assert view.at(last - 1).note and not view.at(last).note
    assert view.batch(last - 1).tokens.ndim == 3 and view.batch(last).tokens.ndim == 2


def test_tokens_read_before_each_step():
    view = phases(2, 4, 10, bag=4, until=3)
    assert [view.tokens(step) for step in range(6)] == [0, 32, 64, 96, 104, 112]
    assert [view.positions(step) for step in range(6)] == [8 * step for step in range(6)]


@pytest.mark.parametrize(
    ("rows", "steps", "until", "bag", "bags", "total"),
    [
        (1024, 20_000, 6_000, 6, 75_497_472_000, 104_857_600_000),
        (1024, 100_000, 30_000, 6, 377_487_360_000, 524_288_000_000),
        (4096, 49_983, 12_483, 16, 1_675_439_898_624, 1_990_012_698_624),
    ],
)
def test_tokens_of_the_runs_of_the_paper(rows, steps, until, bag, bags, total):
    view = phases(rows, 2048, steps, bag=bag, until=until)
    assert (view.tokens(until), view.tokens(steps)) == (bags, total)
    assert view.positions(steps) == steps * rows * 2048


@pytest.mark.parametrize(
    ("name", "lr", "steps", "switch", "tokens", "positions"),
    [
        ("270m", 2e-3, 20_000, 6_000, 104_857_600_000, 41_943_040_000),
        ("600m", 1e-3, 20_000, 6_000, 104_857_600_000, 41_943_040_000),
        ("3b", 2e-4, 20_000, 6_000, 104_857_600_000, 41_943_040_000),
        ("patchtrain", 3e-4, 135_000, 90_000, 283_115_520_000, 141_557_760_000),
    ],
)
def test_recipes_are_the_published_runs(name, lr, steps, switch, tokens, positions):
    recipe = load(f"superposition/{name}")
    view = phases(recipe.batch.rows, recipe.batch.context, steps, **recipe.objective.model_dump())
    assert (str(recipe.budget), recipe.optimiser.lr, recipe.schedule.warmup) == (f"{steps} steps", lr, 2_000)
    assert (view.tokens(steps), view.positions(steps)) == (tokens, positions)
    assert [phase.first for phase in view.phases] == [0, switch]
    patches = name == "patchtrain"  # each phase has a schedule of its own, and the last patch no target
    assert view.at(switch).restarts == patches and recipe.objective.tail == ("drop" if patches else "one")


def test_less_work_reads_as_much_text_with_fewer_rows():
    """The example of patch-level training: 135,000 steps of 2^21 tokens in patches of 4 cost half."""
    view = phases(1024, 2048, 135_000, bag=4, until=90_000, bag_step="less_work")
    assert shapes(view, 0, 90_000) == [(256, 2048), (1024, 2048)]
    assert (view.tokens(135_000), view.positions(135_000)) == (283_115_520_000, 141_557_760_000)
    assert view.tokens(1) == view.tokens(90_001) - view.tokens(90_000) == 2**21


def test_more_text_comes_in_longer_rows_or_in_more():
    assert shapes(phases(8, 12, 10, bag=4, until=5), 0, 5) == [(8, 12), (8, 12)]
    assert shapes(phases(8, 12, 10, bag=4, until=5, grow="rows"), 0, 5) == [(32, 3), (8, 12)]
    assert phases(8, 12, 10, bag=4, until=5, grow="rows").tokens(5) == 5 * 8 * 12 * 4
    assert shapes(phases(8, 12, 10, bag=4, until=5, grow="rows", bag_step="less_work"), 0, 5) == [(8, 3), (8, 12)]


TEXTS = [list(range(11)), list(range(20, 23)), list(range(30, 41))]
"""Two documents of 11 tokens with one of 3 between them."""


def first_batch(**settings):
    """Tokens, targets and starts of the first row, of 6 positions, in bags of 2 unless told otherwise."""
    batch = phases(2, 6, 9, TEXTS, **{"bag": 2, "until": 5} | settings).batch(0)
    return batch.tokens[0].tolist(), batch.targets[0].tolist(), batch.starts[0].tolist()


X = IGNORE


@pytest.mark.parametrize(
    ("settings", "tokens", "targets", "starts"),
    [
        ({}, "bags", [[2, 3], [4, 5], [6, 7], [8, 9], [10, 20], [21, X]], [0] * 6),
        ({"tail": "drop"}, "bags", [[2, 3], [4, 5], [6, 7], [8, 9], [10, 20], [X, X]], [0] * 6),
        ({"bag_out": False}, "bags", [[2], [4], [6], [8], [10], [21]], [0] * 6),
        (
            {"boundary": "fold"},
            [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [20, 21]],
            [[2, 3], [4, 5], [6, 7], [8, 9], [10, X], [22, X]],
            [0, 0, 0, 0, 0, 5],
        ),
        (
            {"boundary": "fold", "bag_out": False},
            [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [20, 21]],
            [[2], [4], [6], [8], [10], [22]],
            [0, 0, 0, 0, 0, 5],
        ),
        ({"bag_in": False}, [*range(6)], [[1, 2], [2, 3], [3, 4], [4, 5], [5, 6], [6, X]], [0] * 6),
    ],
)
def test_settings_decide_what_a_row_reads_and_is_asked(settings, tokens, targets, starts):
    if tokens == "bags":
        tokens = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 20]]
    assert first_batch(**settings) == (tokens, targets, starts)


def test_single_tokens_keep_to_their_documents_only_where_bags_would():
    """A row of 16 tokens: all of the first document, the one of 3, and the beginning of the next."""
    found = {}
    for boundary in ("ignore", "fold"):
        found[boundary] = phases(1, 16, 9, TEXTS, bag=3, until=5, bag_in=False, boundary=boundary).batch(0)
    assert found["ignore"].starts[0].tolist() == [0] * 16
    assert found["ignore"].targets[0, 9].tolist() == [10, 20, 21]
    assert found["fold"].starts[0].tolist() == [0] * 11 + [11] * 3 + [14] * 2
    assert found["fold"].targets[0, 9:12].tolist() == [[10, X, X], [X, X, X], [21, 22, X]]


def test_the_stream_goes_on_where_the_bags_end():
    view = phases(1, 4, 10, bag=4, until=0.2)
    assert [phase.first for phase in view.phases] == [0, 2]
    assert [view.tokens(step) for step in range(5)] == [0, 16, 32, 36, 40]
    text = torch.tensor(document(50, 1))
    for step in range(10):
        first = view.batch(step).tokens.flatten()[0]
        assert first == text[view.tokens(step) % 50], step


def test_the_stream_goes_on_after_folding():
    """The token phase starts where the next bag would: what is left of a document counts as read, and so does one
    that is passed over."""
    texts = [document(11, 1), document(4, 2), document(5, 3)]
    view = phases(1, 5, 3, texts, bag=4, until=1, boundary="fold")
    stream = [token for text in texts for token in text] * 3
    assert view.tokens(1) == 20 + 15  # two bags of the first document, for the second time
    assert view.batch(1).tokens[0].tolist() == stream[35:40]


def test_bags_of_folded_documents_are_counted_once_for_runs_of_all_lengths(monkeypatch):
    """A budget tries dozens of lengths, and a corpus may have many millions of documents."""
    monkeypatch.setattr(module, "FoldedRows", made := Mock(wraps=module.FoldedRows))
    objective, packed = Superposition(Superposition.Config(bag=4, boundary="fold")), PackedRows.__new__(PackedRows)
    packed.order, packed.begin, packed.rows, packed.context = AsWritten(ONE), 0, 1, 5
    ends = [objective.phases(packed, steps)[1].first for steps in (10, 20)]
    assert ends == [3, 6] and made.call_count == 1


def test_next_token_is_one_phase():
    packed = SimpleNamespace(rows=2, context=4, read=lambda step: 8 * step)
    view = Phases(NextToken(NextToken.Config()).phases(packed, 5))
    assert len(view.phases) == 1 and view.tokens(5) == view.positions(5) == 40
