"""The loop against a step written by hand, and what stops it."""

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tandem.comparison.pretrain import Evaluations
from tandem.corpus import Batch, prepare
from tandem.networks.context_ready import ContextReady
from tandem.recipe import UserError, load
from tandem.training import loop, speed
from tandem.training.device import Choice
from tandem.training.health import NotFinite, Stopped
from tandem.training.loop import Taken, take_step, train
from tandem.training.run import Run
from tandem.training.speed import Speed

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from minimal import Minimal, Stepper, copy_weights

SIZE = ["network.depth=2", "network.width=32", "batch.rows=4", "batch.context=32", "training.precision=float32"]


@pytest.fixture
def make_run(small_corpus):
    def make(*overrides, budget="200 steps"):
        recipe = load("decoder/tiny", [*SIZE, *small_corpus, f'budget="{budget}"', *overrides])
        return Run(recipe, prepare(recipe.corpus))

    return make


def whole(batch):
    """Rows that each are one document, as the step by hand reads them."""
    return Batch(batch.tokens, batch.targets, torch.zeros_like(batch.starts))


def test_losses_are_those_of_a_step_by_hand(make_run):
    run = make_run("network.mlp_width=64")
    batches = run.batches
    run.batches = lambda step: [whole(batch) for batch in batches(step)]
    model = Minimal(run.network.vocabulary, depth=2, C=32, heads=2, inner=64, T=32)
    copy_weights(model, run.network)
    by_hand = Stepper(model, lr=run.recipe.optimiser.lr)
    for step in range(200):
        (batch,) = run.batches(step)
        expected = by_hand(batch.tokens, batch.targets, run.schedule(step))
        assert take_step(run, step).means()["nll"] == pytest.approx(expected, abs=1e-3), step


def test_micro_batches_change_nothing(make_run):
    whole, cut = make_run(), make_run("batch.micro_batches=4")
    for step in range(5):
        (once, parts) = take_step(whole, step), take_step(cut, step)
        assert parts.counts == once.counts
        assert parts.means()["nll"] == pytest.approx(once.means()["nll"], abs=1e-5)
        assert float(parts.norm) == pytest.approx(float(once.norm), rel=1e-4)


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_matrix_products_of_a_step_are_of_the_precision_asked_for(make_run, precision):
    run, seen = make_run(f"training.precision={precision}"), set()
    for module in run.network.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _, __, y: seen.add(y.dtype))
    take_step(run, 0)
    assert seen == {getattr(torch, precision)}
    assert {parameter.dtype for parameter in run.network.parameters()} == {torch.float32}


def test_a_loss_that_is_not_finite_stops_before_the_update(make_run):
    run = make_run()
    with torch.no_grad():
        run.network.norm.weight[0] = float("nan")
    before = {name: p.clone() for name, p in run.network.named_parameters()}
    with pytest.raises(NotFinite, match=r"step 8: nll and gradient norm not finite.*tokens 896 to 1,024 of the text"):
        take_step(run, 7)
    assert all(torch.equal(before[n], p) or n == "norm.weight" for n, p in run.network.named_parameters())


def test_the_peak_on_record_is_that_of_training_alone(make_run, monkeypatch):
    run, held = make_run(budget="2 steps"), [1000]
    run.device = Choice(torch.device("cuda"), "")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: held.append(7))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: held[-1])
    monkeypatch.setattr(loop, "take_step", lambda run, step, *_: Taken({}, {}, torch.tensor(1.0), 1e-3, None))
    monkeypatch.setattr(loop, "finish", lambda device: None)
    seen = []
    train(run, [SimpleNamespace(every=1, after_step=seen.append)], lambda: None, save_every=99)
    assert [step.memory_bytes for step in seen] == [7, 7]


def test_the_next_batches_are_made_before_the_loss_of_a_step_is_read(make_run, monkeypatch):
    """While a device works, that is; each once, and none beyond the run."""
    run, seen = make_run(budget="4 steps"), []
    batches, clip, check = run.batches, run.optimiser.clip, loop.require_finite
    run.batches = lambda step: (seen.append(("made", step)), batches(step))[1]
    run.optimiser.clip = lambda: (seen.append("backward"), clip())[1]
    monkeypatch.setattr(loop, "require_finite", lambda *of, **more: (seen.append("read"), check(*of, **more)))
    train(run, [], lambda: None, save_every=99)
    middle = [part for step in (1, 2, 3) for part in ("backward", ("made", step), "read")]
    assert seen == [("made", 0), *middle, "backward", "read"]


def test_measuring_leaves_the_run_as_it_was(make_run):
    measured, fresh = make_run(), make_run()
    found = measured.measure()
    assert found.step_seconds > 0 and found.memory > 0
    for step in range(2):
        assert take_step(measured, step).means() == take_step(fresh, step).means()


@pytest.mark.parametrize(
    ("durations", "step", "start"),
    [
        ([9, 1, 1.2, 1.4], 1.2, 9),
        ([9, 8, 7, 2, 1, 1.1, 1], 1, 26),  # compiled again, and again
        ([1, 2] * 6, 2, 13),  # never steady
    ],
)
def test_steps_are_timed_when_they_are_steady(make_run, monkeypatch, durations, step, start):
    run, clock, left = make_run(), [0.0], list(durations)
    monkeypatch.setattr(speed, "take_step", lambda run, step: clock.append(clock[-1] + left.pop(0)))
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: clock[-1]))
    found = speed.measure(run)
    assert (found.step_seconds, found.start_seconds) == pytest.approx((step, start)) and not left


def test_a_step_counts_by_what_it_has_drawn(make_run, monkeypatch):
    run, clock, drawn = make_run("network.name=context_ready"), [0.0], []

    def take_step(run, step):
        drawn.append(run.network._drawn(run.batches(step)[0].key))
        one = run.network.config.model_copy(update={"passes": drawn[-1], "passes_min": None})
        cost = ContextReady(one, run.corpus.train.vocabulary, run.recipe.batch.context).cost()
        clock.append(clock[-1] + 1e-9 * run.view.flops(cost, 1))

    monkeypatch.setattr(speed, "take_step", take_step)
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: clock[-1]))
    found = speed.measure(run)
    assert found.step_seconds == pytest.approx(1e-9 * found.flops, rel=1e-6)
    assert len(drawn) == 4 and max(drawn[1:]) > 1.5 * min(drawn[1:])  # of which no more are taken for it


@pytest.mark.parametrize(
    ("budget", "steps"),
    [("30 steps", 30), ("1280 tokens", 10), ("1300 tokens", 10), ("1e9 flops", None), ("1e30 steps", int(1e30))],
)
def test_a_budget_is_spent_and_not_exceeded(make_run, budget, steps):
    run = make_run(budget=budget)
    if steps is None:
        steps = int(1e9 // run.flops(1))
    assert run.steps == steps


def test_a_budget_in_seconds_is_measured(make_run):
    run = make_run("training.compile=false", budget="2 seconds")
    assert run.steps == int(2 / run.speed.step_seconds)


def test_seconds_pay_for_one_step_or_are_refused(make_run, monkeypatch):
    monkeypatch.setattr(Run, "measure", lambda run: Speed(0.7, 0.0, 0, run.flops(1)))
    assert make_run(budget="0.7 seconds").steps == 1 and make_run(budget="2.8 seconds").steps == 4
    with pytest.raises(UserError, match=r"budget = 0\.69 seconds: one step alone takes 0.7 seconds"):
        make_run(budget="0.69 seconds")


@pytest.mark.parametrize("when", ["before the last step", "in its observers", "in its save"])
def test_a_signal_that_comes_late_stops_all_the_same(make_run, when):
    run, saved, step = make_run(budget="4 steps"), [], 3 if when == "before the last step" else 4
    ask = lambda at: os.kill(os.getpid(), signal.SIGTERM) if at == step else None

    def save():
        saved.append(run.progress.step)
        if when == "in its save":
            ask(run.progress.step)

    watcher = SimpleNamespace(every=1, after_step=lambda event: when != "in its save" and ask(event.step))
    with pytest.raises(Stopped, match="stopped after step 4") as stopped:
        train(run, [watcher], save, save_every=99)
    assert stopped.value.exit_code == 128 + signal.SIGTERM and saved == [4]
    train(run, [], save, save_every=99)  # what is left to be done
    assert saved == [4]


def test_observers_are_called_when_due_and_after_the_last_step(make_run):
    class Watcher:
        def __init__(self, every):
            self.every, self.seen = every, []

        def after_step(self, step):
            self.seen.append((step.step, step.tokens))

    run, saved = make_run(budget="10 steps"), []
    watchers = [Watcher(4), Watcher(1)]
    train(run, watchers, lambda: saved.append(run.progress.step), save_every=3)
    assert watchers[0].seen == [(4, 512), (8, 1024), (10, 1280)]
    assert [step for step, _ in watchers[1].seen] == list(range(1, 11))
    assert saved == [3, 6, 9, 10]


def test_a_step_tells_its_speed_and_the_time_left_by_the_work_left(make_run, monkeypatch):
    """Steps of half a second in bags, whose tokens are twice those of the steps after them."""
    run, seen = make_run("objective={name: superposition, bag: 2, until: 0.5}", budget="8 steps"), []
    take, clock = loop.take_step, [0.0]

    def timed(*given):
        clock[0] += 0.5
        return take(*given)

    monkeypatch.setattr(loop, "take_step", timed)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    train(run, [SimpleNamespace(every=1, after_step=seen.append)], lambda: None, save_every=100)
    assert [step.tokens_per_second for step in seen] == [512.0] * 4 + [256.0] * 4
    assert [step.seconds for step in seen] == [0.5 * n for n in range(1, 9)]
    work = [run.flops(n) - run.flops(n - 1) for n in range(1, 9)]
    for done, step in enumerate(seen, 1):
        assert step.flops_per_second == 2 * work[done - 1]
        assert step.seconds_left == pytest.approx(0.5 * sum(work[done:]) / work[done - 1])


@pytest.mark.parametrize(
    ("asked", "judged"), [("points=4", [3, 6, 9]), ("points=5", [2, 4, 6, 8]), ("every=5", [5]), ("points=1", [])]
)
def test_evaluations_are_at_most_so_many_and_the_end_is_judged_by_itself(make_run, asked, judged):
    run, records = make_run(f"evaluation.{asked}", "evaluation.documents=1", budget="10 steps"), []
    log = SimpleNamespace(write=lambda record, words: records.append(record))
    train(run, [Evaluations(run, log)], lambda: None, save_every=99)
    assert [record["step"] for record in records] == judged
    assert all(record["documents"] == 1 for record in records)
