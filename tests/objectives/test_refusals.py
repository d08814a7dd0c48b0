"""What a recipe of bags can get wrong is told when it is read, with the reason."""

import pytest

from tandem.networks.decoder import Decoder
from tandem.recipe import UserError, load


def refused(*overrides):
    with pytest.raises(UserError) as error:
        load("superposition/tiny", [o if o.startswith("batch.") else f"objective.{o}" for o in overrides])
    return str(error.value)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("bag_in=false", "bag_out=false"), "which is objective next_token"),
        (("bag=[4, 2]",), "objective.bag = [4, 2]: must be"),
        (("until=1.5",), "objective.until = 1.5: must be"),
        (("bag=0",), "objective.bag = 0: must be"),
        (("weights=[1, 2]",), "2 numbers, bag: 4; one for each target"),
        (("weights=[0, 1, 1, 1]",), "the first must be > 0"),
        (("bag_out=false", "weights=power"), "nothing to weigh"),
        (("loss=mce_alt", "weights=power"), "any one of a set"),
        (("loss=hinge",), "must be one of mce, mce_alt"),
        (("tail=drop", "boundary=fold"), "tail: drop"),
        (("bag_in=false", "grow=rows"), "nothing to trade"),
        (("bag_step=less_work", "batch.rows=6"), "bags of 4 with bag_step: less_work need a multiple of 4"),
        (("bag_step=less_work", "batch.micro_batches=4"), "must divide the 2 rows of a step in bags of 4"),
        (("grow=rows", "batch.context=30"), "bags of 4 with grow: rows need a multiple of 4"),
        (("grow=rows", "tail=drop", "batch.context=4"), "drop asks nothing of rows of one bag; take batch.context=8"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides, reason):
    assert reason in refused(*overrides)


def test_rows_that_are_only_cut_shorter_need_no_multiple():
    assert load("superposition/tiny", ["objective.bag_step=less_work", "objective.grow=rows", "batch.rows=6"])


def test_a_network_that_reads_more_than_tokens_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(Decoder, "tokens_only", "reads sentences, which bags would straddle")
    assert "network decoder reads sentences, which bags would straddle" in refused("bag=4")
    load("superposition/tiny", ["objective.bag=1"])


def test_bags_of_one_token_are_next_tokens_of_any_view():
    """Sentence streams have no place for bags."""
    recipe, view = load("gestalt/tiny", ["objective={name: superposition, bag: 1}"]), object()
    (phase,) = recipe.choice("objective")(recipe.objective).phases(view, steps=10)
    assert (phase.first, phase.view, phase.restarts) == (0, view, False)
