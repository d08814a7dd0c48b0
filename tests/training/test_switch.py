"""A run that changes its view of the text goes on with everything else, is stopped and resumed anywhere, and is
refused as a language model before it is one."""

import copy
import json
from fractions import Fraction

import pytest
import torch

from tandem.comparison.pretrain import plan, pretrain
from tandem.comparison.results import read_result
from tandem.comparison.trained import continue_texts, evaluate, write_model
from tandem.corpus import prepare
from tandem.recipe import UserError, load
from tandem.training import checkpoint, speed
from tandem.training.health import Stopped
from tandem.training.loop import Taken, _event, take_step, train
from tandem.training.parallel import Ranks
from tandem.training.plan import page
from tandem.training.run import Run
from tandem.training.speed import Speed

SIZE = ["network.depth=1", "network.width=16", "network.heads=2", "batch.rows=4", "batch.context=16"]
BAGS = ["objective.name=superposition", "objective.bag=2", "training.compile=false", "sampling.tokens=5"]


@pytest.fixture
def recipe(small_corpus):
    def make(*overrides, budget="10 steps"):
        return load("decoder/tiny", [*SIZE, *BAGS, *small_corpus, f'budget="{budget}"', *overrides])

    return make


@pytest.fixture
def make_run(recipe):
    def make(*overrides, budget="10 steps"):
        made = recipe(*overrides, budget=budget)
        return Run(made, prepare(made.corpus))

    return make


def state(run):
    return copy.deepcopy((run.network.state_dict(), run.optimiser.state_dict()["state"]))


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("boundary", ["ignore", "fold"])
def test_resumed_in_either_phase_and_across_the_switch_it_is_bitwise_the_same(make_run, tmp_path, boundary):
    run = make_run(f"objective.boundary={boundary}", "objective.until=4")
    at = {}

    def save():
        step = run.progress.step
        at[step] = state(run)
        checkpoint.save(tmp_path, step, run.network, run.optimiser, vars(run.progress), keep=20)

    train(run, [], save, save_every=1)
    for step in (2, 3, 4, 5, 7):
        resumed = make_run(f"objective.boundary={boundary}", "objective.until=4")
        checkpoint.restore(tmp_path / f"step-{step:08d}", resumed.network, resumed.optimiser)
        resumed.progress.step = step
        train(resumed, [], lambda: None, save_every=99)
        assert same(state(resumed), at[10]), f"resumed at step {step}"


def test_at_the_switch_only_the_view_changes(make_run):
    run = make_run("objective.until=3")
    for step in range(3):
        assert "bag_nll" in take_step(run, step).means()
    before = state(run)
    run.enter(3)
    assert same(state(run), before)
    assert run.schedule(2) == run.schedule(3) == 1.0
    assert list(take_step(run, 3).means()) == ["nll"]
    assert {name: value.shape for name, value in run.network.state_dict().items()} == {
        name: value.shape for name, value in before[0].items()
    }


def test_losses_in_bags_are_no_measure_of_losses_in_tokens(make_run):
    """What is usual in one phase is forgotten at the switch, and only there: the loss jumps, and is no spike."""
    run = make_run("objective.until=3")
    for step in range(5):
        run.enter(step)
        take_step(run, step)
        assert {seen for seen, _, _ in run.progress.usual.values()} == {step + 1 if step < 3 else step - 2}


@pytest.mark.parametrize("network", ["sps", "context_ready", "context_ready_sps"])
def test_every_network_that_reads_embeddings_trains_in_bags_switches_and_is_scored(recipe, tmp_path, network):
    every = ["log.every=1", "evaluation.every=1", "evaluation.documents=3", "evaluation.final_documents=5"]
    made = recipe(f"network.name={network}", "objective.until=2", *every, budget="4 steps")
    result = pretrain(made, tmp_path / "run")
    curve = read_result(tmp_path / "run", network, 1, 1e-3, trial=False).curve
    assert [point.tokens for point in curve] == [128, 256, 320, 384]  # bags of 2 read twice the text
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    steps = [record for record in records if "terms" in record]
    assert [next(iter(step["terms"])) for step in steps] == ["bag_nll", "bag_nll", "nll", "nll"]
    assert [step["tokens"] for step in steps] == [128, 256, 320, 384] and result["positions"] == 256
    assert steps[0]["flops"] == result["flops"] / 4
    assert 0 < result["likelihood"]["nats_per_token"] < 10
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("network", ["positions=adjacent", "positions=learned", "name=sps", "name=context_ready"])
def test_embeddings_drawn_anew_at_the_switch_are_all_that_changes(make_run, network):
    run = make_run(
        "objective.until=3", "objective.reinit_at_switch=embeddings", "network.tied=false", f"network.{network}"
    )
    for step in range(4):
        before = copy.deepcopy(run.network.state_dict())
        run.enter(step)
        changed = {name for name, value in run.network.state_dict().items() if not torch.equal(value, before[name])}
        assert {name.removeprefix("wrapped.") for name in changed} == (
            {"table.weight", "output.weight"} if step == 3 else set()
        )


def test_the_learning_rate_restarts_where_it_is_asked_to(make_run):
    run = make_run("objective.until=0.5", "objective.lr_restart=true", "schedule.warmup=2", "schedule.decay=2")
    assert [run.schedule(step) for step in range(10)] == [0.5, 1, 1, 1, 0.5] * 2


def test_the_schedule_by_tokens_restarts_too(recipe, make_run):
    given = ["objective.until=0.5", "objective.lr_restart=true", "objective.bag_step=less_work"]
    given += ["schedule={name: wsd_by_tokens, warmup: 128, decay: 0.4, floor: 0}"]
    run = make_run(*given)
    assert [run.schedule(step) for step in range(10)] == pytest.approx([0.5, 0.5, 1, 1, 0.5] * 2)
    with pytest.raises(UserError, match=r"schedule.tokens = 640: objective.lr_restart gives each phase a schedule"):
        recipe(*given, "schedule.tokens=640", budget="640 tokens")


def test_a_schedule_that_restarts_counts_the_text_of_its_own_phase(make_run):
    """5 steps of 128 tokens, then 5 of 64: the second schedule knows nothing of the first phase."""
    given = ["objective.until=0.5", "objective.lr_restart=true", "schedule.name=wsd_by_tokens"]
    run = make_run(*given, "schedule.warmup=128", "schedule.decay=0.4", "schedule.floor=0")
    found = [run.schedule(step) for step in range(10)]
    assert found == pytest.approx([1, 1, 1, 1, 0.5, 0.5, 0.5, 1, 1, 0.5])


@pytest.mark.parametrize("tokens", ["null", "1920"])
def test_the_schedule_by_tokens_counts_the_text_of_bags(make_run, tokens):
    """10 steps of 128 tokens and 10 of 64; the last 768 tokens are the decay."""
    given = ["objective.until=0.5", f"schedule.tokens={tokens}", "schedule.warmup=256", "schedule.decay=0.4"]
    run = make_run("schedule.name=wsd_by_tokens", "schedule.floor=0", *given, budget="1920 tokens")
    at = {0: 0.5, 1: 0.5, 2: 1, 9: 1, 10: 640 / 768, 11: 576 / 768, 19: 64 / 768}
    assert {step: run.schedule(step) for step in at} == pytest.approx(at)


def test_bags_that_would_end_after_the_run_are_refused(recipe, tmp_path):
    for until in (10, 4000):
        made = recipe(f"objective.until={until}")
        for begin in (plan, lambda made: pretrain(made, tmp_path / "run")):
            with pytest.raises(UserError, match=f"objective.until = {until}: the run has 10 steps.*or 1.0 for bags"):
                begin(made)
        assert not (tmp_path / "run").exists()
    assert "(bags of 2 until step 9)" in plan(recipe("objective.until=9"))
    assert "(bags of 2 until step 10)" in plan(recipe("objective.until=1.0"))


@pytest.mark.parametrize("budget", ["10 steps", "1 seconds"])
def test_rows_of_bags_that_can_not_be_dealt_out_are_refused_before_the_first_step(recipe, monkeypatch, budget):
    monkeypatch.setattr("torch.distributed.all_gather_object", lambda found, mine: None)  # all others are like this one
    monkeypatch.setattr("tandem.training.run.wrapped", lambda loss, how: loss)
    monkeypatch.setattr(Run, "measure", lambda run: Speed(0.1, 0.0, 0, run.flops(1)))
    made = recipe("objective.bag_step=less_work", "objective.until=0.5", budget=budget)
    corpus = prepare(made.corpus)
    assert Run(made, corpus, ranks=Ranks(0, 2)).steps
    said = "batch.rows = 4: must be a multiple of 8 = 4 processes x batch.micro_batches 1 x 2, by which a phase divides"
    with pytest.raises(UserError, match=f"{said} its rows; write batch.rows=8, or start 2 processes"):
        Run(made, corpus, ranks=Ranks(0, 4))


def test_wsd_over_the_whole_run(make_run):
    run = make_run("schedule.warmup=2000", "optimiser.lr=2e-3", budget="20000 steps")
    rates = {0: 1e-6, 1999: 2e-3, 5999: 2e-3, 6000: 2e-3, 18_000: 2e-3, 19_000: 1e-3, 19_999: 1e-6}
    for step, rate in rates.items():
        assert 2e-3 * run.schedule(step) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize("extra", [[], ["objective.bag_step=less_work"], ["objective.boundary=fold"]])
@pytest.mark.parametrize("unit", ["tokens", "flops"])
def test_a_budget_is_spent_over_both_phases_and_not_exceeded(make_run, unit, extra):
    one = make_run(*extra)
    amount = 23 * getattr(one, unit)(1)
    run = make_run(*extra, budget=f"{amount} {unit}")
    spent = getattr(run, unit)
    assert spent(run.steps) <= amount < getattr(make_run(*extra, budget=f"{run.steps + 1} steps"), unit)(run.steps + 1)
    first = next(phase.first for phase in run.view.phases if not phase.note)
    assert first == int(Fraction("0.3") * run.steps)


@pytest.mark.parametrize(("bag_step", "left"), [("more_text", [18, 14, 12]), ("less_work", [34, 14, 12])])
def test_the_time_left_is_that_of_the_flops_left(make_run, bag_step, left):
    """Two seconds a step: a step in bags reads twice the text, or costs half."""
    run, found = make_run("objective.until=2", f"objective.bag_step={bag_step}"), []
    taken = Taken({"nll": torch.tensor(1.0)}, {"nll": 1}, torch.tensor(1.0), 1e-3, None)
    for step in (1, 3, 4):
        run.progress.step = step
        found.append(_event(run, taken, seconds=2.0).seconds_left)
    assert found == pytest.approx(left)


def test_the_time_left_does_not_follow_what_a_step_draws(small_corpus):
    """Steps of two to five passes, each as slow as its FLOPs say."""
    recipe = load("context_ready/tiny", [*SIZE, *small_corpus, "network.passes=5", "budget=10 steps"])
    run = Run(recipe, prepare(recipe.corpus))
    taken = Taken({"nll": torch.tensor(1.0)}, {"nll": 1}, torch.tensor(1.0), 1e-3, None)
    shares = [run.share(step) for step in range(8)]
    assert max(shares) > 1.2 > 0.8 > min(shares)
    for step, share in enumerate(shares):
        run.progress.step = step + 1
        assert _event(run, taken, seconds=2.0 * share).seconds_left == pytest.approx(2.0 * (9 - step))


def test_the_speed_of_a_plan_is_the_mean_over_its_phases(make_run):
    """A budget in seconds is measured on the last one: there a step of 64 tokens takes half a second, in bags half."""
    run = make_run("objective.until=2", "objective.bag_step=less_work")
    told = page(run, Speed(step_seconds=0.5, start_seconds=0.0, memory=1, flops=run.view.phases[-1].flops(run.cost, 1)))
    assert f"at {round(64 * run.steps / (2 * 0.25 + (run.steps - 2) * 0.5))} tokens/s" in told["time"]


@pytest.mark.parametrize("parts", [2, 4])
def test_micro_batches_change_nothing(make_run, parts):
    settings = ["objective.boundary=fold", "objective.weights=power", "training.precision=float32"]
    whole, cut = make_run(*settings), make_run(*settings, f"batch.micro_batches={parts}")
    for step in (0, 1, 2, 3):
        once, pieces = take_step(whole, step), take_step(cut, step)
        assert pieces.counts == once.counts
        assert pieces.means() == pytest.approx(once.means(), abs=1e-5)
        assert float(pieces.norm) == pytest.approx(float(once.norm), rel=1e-4)


@pytest.mark.parametrize(("bag_step", "rows"), [("less_work", {2, 4}), ("more_text", {4})])
def test_the_memory_of_a_run_is_that_of_its_largest_phase(make_run, monkeypatch, bag_step, rows):
    run, seen = make_run(f"objective.bag_step={bag_step}", "objective.until=6"), []
    monkeypatch.setattr(speed, "take_step", lambda run, step: seen.append(len(run.batches(step)[0].tokens)))
    speed.measure(run)
    assert set(seen) == rows


def test_a_plan_tells_latent_positions_from_tokens(recipe):
    page = plan(recipe())
    assert "FLOP per position = " in page and "per token of text" not in page
    assert (
        "3 steps of 128 tokens (bags of 2 until step 3) + 7 steps of 64 tokens (the optimiser keeps its state)" in page
    )
    assert "its state) = 640 positions = 832 tokens" in page


def test_single_tokens_that_predict_bags_are_not_called_bags(make_run):
    first, _ = make_run("objective.bag_in=false", "objective.until=4").view.phases
    assert first.note == "single tokens to predict bags of 2 until step 4"


def test_what_is_no_language_model_yet_is_refused_and_told(recipe, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    overrides = "objective.until=6", "checkpoint.every=3", "evaluation.every=3", "evaluation.documents=3", "log.every=1"

    def stop(run, *how):
        run.steps, steps = 6, run.steps
        train(run, *how)
        run.steps = steps
        raise Stopped("after step 6", 2)

    with monkeypatch.context() as patched, pytest.raises(Stopped):
        patched.setattr("tandem.comparison.pretrain.train", stop)
        pretrain(recipe(*overrides), folder)
    assert "one token at a time, after bags of 2 until step 6" in capsys.readouterr().out
    refused = "step 6 of 10 is no language model yet.*bags of 2 until step 6.*--unfinished"
    uses = (
        lambda **more: list(evaluate(folder, 3, **more)),
        lambda **more: continue_texts(folder, [{"prompt": "The"}], 2, {}, 0, **more),
        lambda **more: write_model(folder, tmp_path / "model", **more),
    )
    for use in uses:
        with pytest.raises(UserError, match=refused):
            use()
        use(unfinished=True)
    pretrain(recipe(*overrides), folder)
    assert "after bags" not in "".join(evaluate(folder, 3))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert {next(iter(record["terms"])) for record in records if "terms" in record} == {"bag_nll", "nll"}
    judged = [(record["step"], record.get("note")) for record in records if record["kind"] == "likelihood"]
    assert judged == [(step, "bags of 2 until step 6" if step <= 6 else None) for step in (3, 9, 10)]
    points = read_result(folder, "bags", 1, 1e-3, trial=False).curve
    assert [point.note for point in points] == [note or "" for _, note in judged]
    assert (folder / "model" / "model.safetensors").exists()


def test_a_run_that_never_switches_leaves_no_model_and_says_so(recipe, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("The river was wide, and nobody crossed it.")
    texts = f"evaluation.texts={{river: {tmp_path / 'text.txt'}}}"
    result = pretrain(recipe("objective.until=1.0", texts, budget="3 steps"), tmp_path / "run")
    assert result["tokens"] == 2 * result["positions"] == 2 * 3 * 64
    assert not (tmp_path / "run" / "model").exists()
    read = read_result(tmp_path / "run", "bags", 1, 1e-3, trial=False)
    assert read.note == result["note"] == "bags of 2 until step 3" and read.positions == result["positions"]
    said = capsys.readouterr().out
    noted = [line for line in said.splitlines() if "after bags of 2 until step 3" in line]
    judged = [line for line in said.splitlines() if "bits/byte" in line]
    assert len(judged) == 2 and set(judged) < set(noted) and any(line.startswith("sample") for line in noted)
    assert "tandem generate" not in said
    scored = [*evaluate(tmp_path / "run", 3, unfinished=True)][::2]  # without the lines of positions
    assert len(scored) == 2 and all("after bags of 2 until step 3" in line for line in scored)
    pretrain(recipe("objective.until=2", budget="3 steps"), tmp_path / "switched")
    assert "tandem generate" in capsys.readouterr().out
