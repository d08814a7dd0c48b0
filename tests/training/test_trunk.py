"""A run that begins with the steps it shares with another is, bit for bit, the run that it is alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from typed import tandem

from tandem.comparison.pretrain import built
from tandem.comparison.results import read_result
from tandem.recipe import load
from tandem.training.checkpoint import latest, restore, standing, step_of
from tandem.training.folder import RunFolder
from tandem.training.observers import CLOCK_KEYS
from tandem.training.parallel import ALONE
from tandem.training.trunk import branched

SMALL = ["batch.rows=2", "batch.context=32", "network.depth=1", "network.width=16", "network.heads=2"]
SMALL += ["sampling.tokens=3", "evaluation.documents=2", "log.every=1", "training.compile=false", "optimiser.lr=1e-2"]
SMALL += ["schedule.warmup=2", "schedule.decay=4", "checkpoint.every=3"]


@pytest.fixture(scope="module")
def train(tmp_path_factory, small_corpus):
    folder = tmp_path_factory.mktemp("runs")

    def trained(name, steps, *options, recipe="decoder/tiny", code=0):
        given = [*SMALL, *small_corpus, f"budget={steps} steps", *options]
        done = tandem("train", recipe, "--run", name, "--runs", folder, *given)
        assert done.exit_code == code, done.output
        return folder / name, " ".join(done.output.split())

    return trained


@pytest.fixture(scope="module")
def trunk(train) -> Path:
    return train("trunk", 18, "checkpoint.branches=[11 steps, 832 tokens, 30 steps]")[0]


def state(folder: Path) -> dict[str, torch.Tensor]:
    """Weights at the end of a run."""
    recipe = load(str(folder / "recipe.yaml"))
    network = built(recipe, 1, ALONE).network
    restore(latest(folder / "checkpoints"), network)
    return network.state_dict()


def told(record):
    """What a record says apart from clocks."""
    return {key: value for key, value in record.items() if key not in CLOCK_KEYS}


def same(one: Path, other: Path) -> None:
    first, second = state(one), state(other)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    steps = [[told(record) for record in RunFolder(folder).records("step")] for folder in (one, other)]
    assert steps[0] == steps[1] and [record["step"] for record in steps[0]] == [*range(1, len(steps[0]) + 1)]
    ends = [json.loads((folder / "result.json").read_text()) for folder in (one, other)]
    for key in ("step", "tokens", "flops", "samples"):
        assert ends[0][key] == ends[1][key]
    assert told(ends[0]["likelihood"]) == told(ends[1]["likelihood"])
    assert (one / "documents.npz").read_bytes() == (other / "documents.npz").read_bytes()


@pytest.mark.parametrize(("steps", "common"), [(11, 8), (13, 10), (30, 15)])
def test_a_branch_is_the_run_that_it_is_alone(train, trunk, steps, common):
    """Until the decay of the shorter one, whose rate at its first step, 4 of 4 to go, is still the peak."""
    alone, _ = train(f"alone{steps}", steps)
    branch, said = train(f"branch{steps}", steps, f"start.trunk={trunk}")
    assert f"of {common} steps in common {common} are taken over" in said and f"going on at step {common}" in said
    same(branch, alone)
    (entry,) = json.loads((branch / "environment.json").read_text())
    assert entry["trunk"] == f"{trunk}, step {common}"
    (before,) = json.loads((trunk / "environment.json").read_text())
    assert read_result(branch, "arm", 0, 1e-2, False).environment == [before, entry]
    # The steps taken over were not trained again: their clocks are the trunk's
    clocks = [[record["seconds"] for record in RunFolder(folder).records("step")] for folder in (branch, trunk)]
    assert clocks[0][:common] == clocks[1][:common] and clocks[0][common] != clocks[1][common]
    again, _ = train(f"branch{steps}", steps)  # the finished run needs its trunk no more
    assert again == branch


def test_what_is_taken_over_says_when_the_bags_of_the_branch_end(train):
    given = ["objective.until=0.4", "evaluation.every=2", "objective.bag=2"]
    options = {"recipe": "superposition/tiny"}
    trunk, _ = train("bags", 18, *given, "checkpoint.branches=[11 steps]", **options)
    branch, said = train("bags11", 11, *given, f"start.trunk={trunk}", **options)
    assert "of 4 steps in common 4 are taken over" in said
    records = [RunFolder(run).records() for run in (branch, train("bags11alone", 11, *given, **options)[0])]
    assert [told(record) for record in records[0]] == [told(record) for record in records[1]]
    assert {record.get("note") for record in records[0][:6]} == {None, "bags of 2 until step 4"}


def test_a_plan_tells_the_steps_in_common(trunk, small_corpus):
    asked = ["decoder/tiny", *SMALL, *small_corpus, "budget=11 steps", f"start.trunk={trunk}"]
    for options, told in (([], "8 steps in common"), (["schedule.warmup=3"], "0 steps in common")):
        done = tandem("plan", *asked, *options)
        assert f"trunk       {told} with {trunk}; " in done.output, done.output


def test_a_trunk_keeps_the_checkpoints_at_which_runs_part(trunk, train):
    assert [step_of(path) for path in standing(trunk / "checkpoints")] == [8, 10, 15, 18]
    assert [step_of(path) for path in standing(train("alone11", 11)[0] / "checkpoints")] == [11]
    _, said = train("told", 18, "checkpoint.branches=[11 steps, 1 steps, 9 tokens]", "checkpoint.keep=2")
    assert "11 steps, step 8: checkpoints are kept there" in said and "1 steps, step" not in said.replace("11 s", "")
    assert [step_of(path) for path in standing(trunk.parent / "told/checkpoints")] == [8, 15, 18]
    later = "checkpoint.branches=[11 steps, 23 steps]"  # of which the first parts before this run begins
    _, said = train("begun", 30, later, f"start.trunk={trunk}")
    assert "branches 23 steps, step 20: checkpoints are kept there" in said
    assert [step_of(path) for path in standing(trunk.parent / "begun/checkpoints")] == [20, 30]
    assert "not known before it" in train("timed", 18, "checkpoint.branches=[3 seconds]", code=2)[1]


@pytest.mark.parametrize("before", ["_announced", "train"])
def test_interrupted_before_it_has_saved_a_branch_begins_again(train, trunk, monkeypatch, before):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(f"tandem.comparison.pretrain.{before}", killed)
        train(f"killed{before}", 11, f"start.trunk={trunk}", code=130)
    branch, said = train(f"killed{before}", 11, f"start.trunk={trunk}")
    assert "8 are taken over" in said
    same(branch, train("alone11", 11)[0])


def test_a_checkpoint_that_its_trunk_drops_meanwhile_is_told(train, trunk, monkeypatch):
    dropping = Path(shutil.copytree(trunk, trunk.parent / "dropping"))

    def dropped(run, folder):
        last = branched(run, folder)
        last.rename(last.with_name(f".{last.name}"))
        return last

    with monkeypatch.context() as patched:
        patched.setattr("tandem.comparison.pretrain.branched", dropped)
        _, said = train("late", 11, f"start.trunk={dropping}", code=2)
    assert "step-00000008: dropped while it was read, for its run trains on; start the same command again" in said
    (dropping / "checkpoints/.step-00000008").rename(dropping / "checkpoints/step-00000008")
    branch, _ = train("late", 11, f"start.trunk={dropping}")
    same(branch, train("alone11", 11)[0])
    (dropping / "checkpoints/step-00000008/manifest.json").unlink()  # damaged, and still there
    assert "this checkpoint is damaged" in train("damaged", 11, f"start.trunk={dropping}", code=2)[1]


def test_without_a_checkpoint_in_common_it_says_so_and_trains_all_steps(train, trunk):
    end = train("alone11", 11)[0]  # of which the last is kept
    branch, said = train("all", 13, f"start.trunk={end}")
    assert "8 steps in common, and no checkpoint of them (checkpoint.branches" in said and "new, seed" in said
    same(branch, train("alone13", 13)[0])
    _, said = train("warmer", 11, f"start.trunk={end}", "schedule.warmup=3")
    assert "no steps in common (runs that have some have the same schedule.warmup, in steps, and no" in said
    new = trunk.parent / "new"
    new.mkdir()
    shutil.copy(trunk / "recipe.yaml", new)
    assert f"{new}: not trained yet; all are trained" in train("begun_before_it", 11, f"start.trunk={new}")[1]


def test_another_recipe_or_no_run_is_refused(train, trunk, tmp_path):
    _, said = train("other", 11, f"start.trunk={trunk}", "optimiser.lr=2e-2", "seed=5", code=2)
    assert "only budget, schedule, objective.until may be others" in said
    assert "optimiser.lr: 0.01 there, 0.02 asked" in said and "seed: " in said and "keep: " not in said
    _, said = train("cut", 11, f"start.trunk={trunk}", "batch.micro_batches=2", code=2)  # other masks, other balance
    assert "batch.micro_batches: 1 there, 2 asked" in said
    _, said = train("nowhere", 11, f"start.trunk={tmp_path / 'none'}", code=2)
    assert "start.trunk = " in said and "no run here" in said
    assert not any((trunk.parent / name).exists() for name in ("other", "cut", "nowhere"))


@pytest.mark.parametrize(
    ("recipe", "options", "common"),
    [
        ("decoder/tiny", ["schedule.decay=4"], 17),  # at its first step the decay still has the peak
        ("decoder/tiny", ["schedule.decay=0.5"], 11),
        ("decoder/tiny", ["schedule.decay=4", "schedule.warmup=0.2"], 0),
        ("decoder/tiny", ["schedule.name=cosine", "schedule.warmup=2"], 3),  # warm-up, and the top
        ("superposition/tiny", ["schedule.decay=4", "objective.until=0.2"], 4),
        ("superposition/tiny", ["schedule.decay=4", "objective.until=6"], 17),
        ("superposition/tiny", ["schedule.decay=0.5", "objective.until=6", "objective.lr_restart=true"], 14),
        ("superposition/tiny", ["schedule.decay=4", "objective.until=10", "objective.lr_restart=true"], 17),
        ("gestalt/tiny", [], 0),  # its streams grow with the length of the run
    ],
)
def test_steps_in_common(small_corpus, recipe, options, common):
    rows = SMALL[:2] if recipe != "gestalt/tiny" else []
    given = [*rows, "schedule.warmup=2", *options, *small_corpus]
    run = built(load(recipe, [*given, "budget=20 steps"]), 20, ALONE)
    assert run.shared(run.recipe, 40) == common
    assert run.shared(run.recipe, 20) == (0 if recipe == "gestalt/tiny" else 20)


@pytest.mark.parametrize(
    ("trunk", "common"),
    [
        ({"schedule.decay": 8}, 13),
        ({"schedule.warmup": 3}, 0),
        ({"objective.until": 9}, 6),
        ({"objective.until": 4}, 4),
        ({"objective.until": 0}, 0),  # no step of it is in bags
    ],
)
def test_runs_of_one_length_share_the_steps_before_they_part(small_corpus, trunk, common):
    given = [*SMALL[:2], "schedule.warmup=2", "schedule.decay=4", "objective.until=6", *small_corpus, "budget=20 steps"]
    other = load("superposition/tiny", [*given, *(f"{key}={value}" for key, value in trunk.items())])
    assert built(load("superposition/tiny", given), 20, ALONE).shared(other, 20) == common
