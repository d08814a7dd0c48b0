"""Spikes: what is one, that a skipped one changes nothing, and that a run judges alike however it was interrupted."""

import json
import random
from dataclasses import asdict

import pytest
import torch

from tandem.corpus import prepare
from tandem.recipe import load
from tandem.training.loop import take_step
from tandem.training.progress import WINDOW, Progress
from tandem.training.run import Run


def losses(count, level=3.0, spread=0.1, seed=0):
    draw = random.Random(seed)
    return [draw.gauss(level, spread) for _ in range(count)]


def judged(progress, values, deviations=6.0):
    return [progress.is_spike({"loss": value, "norm": 1.0}, deviations, skip=False) for value in values]


def test_mean_and_variance_are_those_of_the_steps_so_far():
    progress, values = Progress(), losses(WINDOW)
    judged(progress, values)
    seen, mean, variance = progress.usual["loss"]
    assert (seen, mean) == (WINDOW, pytest.approx(sum(values) / WINDOW))
    assert variance == pytest.approx(sum((v - mean) ** 2 for v in values) / WINDOW)


def test_a_spike_is_far_above_and_only_above():
    progress = Progress()
    assert not any(judged(progress, losses(3 * WINDOW)))
    assert judged(progress, [4.5, 1.0, 3.1]) == [True, False, False]
    assert progress.spikes == 1 and progress.skipped == 0
    assert progress.is_spike({"loss": 3.0, "norm": 5.0}, 6.0, skip=True)  # by its norm
    assert progress.spikes == 2 and progress.skipped == 1


def test_nothing_is_a_spike_at_the_start_or_where_nothing_moves():
    assert not any(judged(Progress(), [11.0, 30.0, *losses(WINDOW - 2, spread=5.0)]))
    assert not any(judged(Progress(), [3.0] * 2 * WINDOW + [3.1]))


def test_one_spike_does_not_hide_the_next_and_a_level_that_lasts_becomes_usual():
    progress = Progress()
    judged(progress, losses(2 * WINDOW))
    assert judged(progress, [300.0, 3.0, 4.5]) == [True, False, True]
    found = judged(progress, losses(60, level=6.0))
    assert found[0] and not any(found[20:])


def test_it_goes_on_from_its_json_bit_for_bit():
    whole, cut = Progress(), Progress()
    values = [*losses(150), 9.0, *losses(50, seed=1), 9.0]
    expected = judged(whole, values)
    found = judged(cut, values[:151])
    again = Progress(**json.loads(json.dumps(vars(cut))))
    assert found + judged(again, values[151:]) == expected and sum(expected) == 2
    assert asdict(again) == asdict(whole)


@pytest.fixture
def make_run(small_corpus):
    def make(*overrides):
        size = ["network.depth=1", "network.width=16", "batch.rows=2", "batch.context=16", "training.compile=false"]
        recipe = load("decoder/tiny", [*size, *small_corpus, *overrides])
        run = Run(recipe, prepare(recipe.corpus))
        take_step(run, 0)
        run.progress.usual = {"loss": [WINDOW, 0.1, 1e-4], "norm": [WINDOW, 1e9, 0.0]}  # the next loss is a spike
        return run

    return make


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_a_skipped_step_leaves_weights_and_moments_as_they_were(make_run, optimiser):
    run = make_run("optimiser.skip_spikes=true", f"optimiser.name={optimiser}")
    weights = {name: p.clone() for name, p in run.network.named_parameters()}
    state = json.dumps(run.optimiser.state_dict(), default=lambda tensor: tensor.tolist())
    taken = take_step(run, 1)
    assert (run.progress.spikes, run.progress.skipped) == (1, 1)
    assert taken.lr == run.recipe.optimiser.lr * run.schedule(1)
    assert all(torch.equal(weights[name], p) and p.grad is None for name, p in run.network.named_parameters())
    assert json.dumps(run.optimiser.state_dict(), default=lambda tensor: tensor.tolist()) == state


def test_a_spike_is_counted_and_trained_on_unless_it_is_to_be_skipped(make_run):
    run = make_run()
    before = run.network.table.weight.clone()
    take_step(run, 1)
    assert (run.progress.spikes, run.progress.skipped) == (1, 0)
    assert not torch.equal(before, run.network.table.weight)


def test_measuring_counts_no_spike(make_run):
    run = make_run()
    run.measure()
    assert run.progress.spikes == 0 and run.progress.usual["loss"][0] == WINDOW
