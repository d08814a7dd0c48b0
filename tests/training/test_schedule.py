"""Rates at named steps, worked out by hand from the papers' formulas."""

import re

import pytest

from tandem.recipe import UserError, load
from tandem.training.schedule import WSD, Cosine, Linear, WSDByTokens


def rates(schedule, config, steps, peak, at):
    made = schedule(schedule.Config(**config), steps, lambda step: step * 393_216)
    return [peak * made(step) for step in at]


def test_wsd_warms_up_holds_and_falls_to_zero():
    got = rates(WSD, {"warmup": 2000, "decay": 0.1}, 20_000, 2e-3, [0, 1999, 18_000, 19_000, 19_999])
    assert got == pytest.approx([1e-6, 2e-3, 2e-3, 1e-3, 1e-6], rel=1e-12)


def test_in_a_run_too_short_for_both_the_lower_of_warm_up_and_decay_counts():
    got = rates(WSD, {"warmup": 60, "decay": 60}, 100, 1.0, [39, 45, 50, 60])
    assert got == pytest.approx([40 / 60, 46 / 60, 50 / 60, 40 / 60], rel=1e-12)


def test_wsd_ends_at_its_floor():
    got = rates(WSD, {"warmup": 0, "decay": 10, "floor": 0.1}, 100, 1.0, [89, 90, 95, 99])
    assert got == pytest.approx([1.0, 1.0, 0.55, 0.19], rel=1e-12)


def test_wsd_by_tokens_is_that_of_state_prediction_separation():
    """20 billion tokens in steps of 393,216, from 6e-4 to 6e-5."""
    at = [0, 1, 64, 128, 45_776, 45_777, 48_320, 50_862]
    got = rates(WSDByTokens, {"tokens": 20_000_000_000}, 50_863, 6e-4, at)
    expected = [4.718592e-6, 4.718592e-6, 3.01989888e-4, 6e-4, 6e-4, 5.9993281536e-4, 3.299467776e-4, 6.006690816e-5]
    assert got == pytest.approx(expected, rel=0, abs=1e-12)
    assert rates(WSDByTokens, {}, 50_863, 6e-4, at) == pytest.approx(expected, rel=1e-3)


def test_wsd_by_tokens_falls_at_the_end_of_any_budget():
    steps = load("sps/s", ["budget=1e10 tokens"]).budget.amount // 393_216
    got = rates(WSDByTokens, {}, int(steps), 1.0, [int(0.89 * steps), int(0.95 * steps), int(steps)])
    assert got == pytest.approx([1.0, 0.55, 0.1], abs=1e-3)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "budget=1e10 tokens",
            "schedule.tokens = 20000000000: the budget is 10000000000 tokens; null takes the tokens of the run",
        ),
        ("budget=100 seconds", "schedule.tokens = 20000000000: the budget is 100 seconds; null"),
    ],
)
def test_wsd_by_tokens_refuses_tokens_that_are_not_those_of_the_run(override, said):
    load("sps/s", ["schedule.tokens=20000000000"])
    with pytest.raises(UserError, match=re.escape(said)):
        load("sps/s", ["schedule.tokens=20000000000", override])


def test_cosine_is_half_way_in_the_middle():
    got = rates(Cosine, {"warmup": 0.02, "floor": 0.1}, 75_000, 2.5e-4, [0, 1499, 1500, 38_250, 74_999])
    assert got == pytest.approx([2.5e-4 / 1500, 2.5e-4, 2.5e-4, 1.375e-4, 2.5e-5], rel=1e-6)


def test_both_cosines_of_patch_level_training_end_at_zero():
    recipe = load("superposition/patchtrain")
    for steps in (90_000, 45_000):
        made = Cosine(recipe.schedule, steps)
        assert [recipe.optimiser.lr * made(step) for step in (1999, steps)] == pytest.approx([3e-4, 0.0], abs=1e-18)


def test_linear_falls_evenly_after_the_warm_up():
    got = rates(Linear, {"warmup": 2, "floor": 0.1}, 40, 1.0, [0, 1, 2, 3, 4, 5])
    assert got == pytest.approx([0.5, 1.0, 1.0, 0.97631579, 0.95263158, 0.92894737], rel=1e-7)


def test_a_warm_up_from_zero_spends_its_first_step_on_nothing():
    config = {"warmup": 0.05, "floor": 0.1, "warmup_from_zero": True}
    got = rates(Linear, config, 40, 1.0, [0, 1, 2, 3, 4, 5, 39])
    assert got == pytest.approx([0.0, 0.5, 1.0, 0.97631579, 0.95263158, 0.92894737, 0.12368421], rel=1e-7)


@pytest.mark.parametrize("recipe", ["decoder/paper", "double_decoder/paper", "encoder_decoder/paper_tuning"])
@pytest.mark.parametrize(("steps", "w"), [(1526, 76), (39, 1), (19, 1), (40, 2)])
def test_the_warm_up_of_double_decoders_is_a_twentieth_in_whole_steps(recipe, steps, w):
    given = load(recipe)
    rates = given.choice("schedule")(given.schedule, steps)
    for k in (0, 1, w - 1, w, w + 1, steps - 1):
        expected = k / w if k < w else 1 - 0.9 * (k - w) / (steps - w)
        assert rates(k) == pytest.approx(expected, rel=1e-12), k


def test_a_share_of_the_steps_in_a_cosine_from_zero_is_not_rounded():
    assert rates(Cosine, {"warmup": 0.05, "warmup_from_zero": True}, 30, 1.0, [0, 1]) == pytest.approx([0, 1 / 1.5])


def test_no_warm_up_starts_at_the_peak():
    assert Cosine(Cosine.Config(warmup=0), 10)(0) == 1.0


@pytest.mark.parametrize("key", ["warmup", "decay"])
def test_a_length_is_whole_steps_or_a_share_below_one(key):
    with pytest.raises(
        UserError, match=f"schedule.{key} = 2000.0: must be a whole number >= 0 or a number >= 0 and < 1"
    ):
        load("decoder/tiny", ["schedule.name=wsd", f"schedule.{key}=2000.0"])
    made = [load("decoder/tiny", ["schedule.name=wsd", f"schedule.{key}={length}"]).schedule for length in (2000, 0.5)]
    assert [getattr(schedule, key) for schedule in made] == [2000, 0.5]


@pytest.mark.parametrize(("schedule", "end"), [(WSD, 0.0), (Cosine, 0.1), (Linear, 0.1), (WSDByTokens, 0.1)])
def test_past_the_end_the_rate_stays(schedule, end):
    config = {} if schedule is WSDByTokens else {"warmup": 10}
    assert rates(schedule, config, 1000, 1.0, [1000, 1001, 1500]) == pytest.approx([end] * 3)
