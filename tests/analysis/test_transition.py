"""The switch from bags to tokens, read from a record that was made up, and from a run's own."""

import json

import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure
from typed import tandem

from tandem.analysis.transition import Transition, trailing_mean
from tandem.recipe import UserError
from tandem.training.folder import RunFolder


def record(folder, losses, switch=None, first="bag_nll", flops=2.0, **terms):
    """Steps 10, 20, ... of these losses; those up to step `switch` are in bags, or asked for what `first` names."""
    lines = []
    for step, loss in enumerate(losses, 1):
        phase = 0 if switch is None or 10 * step <= switch else switch
        name = "nll" if phase or switch is None else first
        told = {"terms": {name: loss} | terms, "norm": float(step), "lr": 1.0, "flops": flops * step, "phase": phase}
        lines.append(json.dumps({"kind": "step", "step": 10 * step, **told}) + "\n")
    folder.mkdir()
    objective = "next_token" if switch is None else "superposition"
    (folder / "recipe.yaml").write_text(f"objective: {{name: {objective}}}\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    return RunFolder(folder)


def measured(folder, **options):
    analysis = Transition(Transition.Config(**options))
    analysis.folder = folder
    return analysis.measure(None)


def test_a_mean_over_the_last_values():
    assert trailing_mean(np.array([4.0, 2, 3, 7]), 2).tolist() == [4, 3, 2.5, 5]
    assert trailing_mean(np.array([4.0, 2, 3]), 9).tolist() == [4, 3, 3]


def test_the_jump_and_what_follows_by_hand(tmp_path):
    bags = record(tmp_path / "bags", [9, 6, 5, 8, 6, 5, 4, 4, 3], switch=25, load_max=2.0)
    found = measured(bags, smooth=1)
    assert (found["switch"], found["loss_before"], found["loss_after"], found["jump"]) == (25, 6, 5, -1)
    bags = record(tmp_path / "later", [9, 6, 5, 8, 6, 5, 4, 4, 3], switch=30, load_max=2.0)
    found = measured(bags, smooth=1)
    assert (found["switch"], found["loss_before"], found["loss_after"], found["jump"]) == (30, 5, 8, 3)
    assert found["steps_to_recover"] == 60 - 30
    assert (found["norm_before"], found["norm_after"]) == (3, 4)
    assert (found["load_max_before"], found["load_max_after"]) == (2, 2)
    assert "steps_until_below" not in found
    smooth = measured(bags, smooth=2)  # 5.5 before; 8, 7, 5.5 after
    assert (smooth["loss_before"], smooth["jump"], smooth["steps_to_recover"]) == (5.5, 2.5, 60 - 30)
    low = record(tmp_path / "low", [9, 5, 1, 8, 7, 6, 5, 4, 3], switch=30)  # 5 before; 8, 7.5, 7, 6, 5 after
    assert measured(low, smooth=3)["steps_to_recover"] == 80 - 30
    assert measured(record(tmp_path / "no", [3, 8, 7], switch=10), smooth=1)["steps_to_recover"] is None


@pytest.mark.parametrize(
    ("losses", "until"),
    [
        ([9, 7, 6, 6, 5.5, 4.5, 4.5, 4.5, 4.5], 40),  # ahead at 50, behind at 60, ahead from 70 on
        ([9, 7, 6, 9, 9, 9, 9, 9, 9], 10),
        ([9, 7, 6, 4, 4, 4, 4, 4, 3], None),  # level is not below
        ([9, 7, 6, 9, 9, 9, 9], 10),  # it ends before; nothing is compared there
        ([9, 7, 6], None),
    ],
)
def test_steps_until_it_stays_below_the_baseline(tmp_path, losses, until):
    bags = record(tmp_path / "bags", [9, 6, 5, 8, 5.4, 5, 4, 4, 3], switch=30)
    record(tmp_path / "tokens", losses)
    assert measured(bags, smooth=1, baseline=str(tmp_path / "tokens"))["steps_until_below"] == until


def test_the_baseline_is_met_where_it_has_spent_as_much(tmp_path):
    bags = record(tmp_path / "bags", [9, 8, 6, 5, 4.2], switch=10)
    record(tmp_path / "tokens", [9, 9, 9, 4, 4, 4.5, 4.5, 4, 3, 4.4], flops=1.0)  # half of the FLOPs in each step
    assert measured(bags, smooth=1, baseline=str(tmp_path / "tokens"))["steps_until_below"] == 50 - 10


def test_means_of_the_baseline_reach_no_further_back_than_those_of_the_run(tmp_path):
    bags = record(tmp_path / "bags", [9, 9, 9, 6.1, 5.1, 4.1, 2.8, 1.8, 0.8], switch=30)
    record(tmp_path / "tokens", [9, 8, 7, 6, 5, 4, 3, 2, 1])
    # Behind by 0.1, 0.1, 0.1, 0.1 / 4 and ahead by 0.1 / 5; a mean of 9, 8, 7 and 6 would be above the run's at once
    assert measured(bags, smooth=6, baseline=str(tmp_path / "tokens"))["steps_until_below"] == 80 - 30


def test_what_has_no_switch_says_so(tmp_path):
    for name, given in [
        ("tokens", {}),
        ("bags", {"switch": 99}),
        ("bags_before_the_first_record", {"switch": 9}),
        ("gaps", {"switch": 10, "first": "nll"}),
    ]:
        with pytest.raises(UserError, match="no step in bags is recorded before one in tokens"):
            measured(record(tmp_path / name, [3, 2], **given))
    bags = record(tmp_path / "both", [3, 2], switch=10)
    with pytest.raises(UserError, match=r"baseline = .*both: has objective superposition; give a run of next_token"):
        measured(bags, baseline=str(bags.path))
    with pytest.raises(UserError, match="no step is recorded"):
        measured(record(tmp_path / "new", [float("nan")]))


def test_a_run_is_read_and_drawn(tmp_path, small_corpus):
    small = ["budget=10 steps", "batch.rows=2", "batch.context=32", "network.depth=1", "network.width=16"]
    small += ["sampling.tokens=3", "evaluation.documents=2", "log.every=1", "training.compile=false"]
    for name in ("superposition", "decoder"):
        done = tandem("train", f"{name}/tiny", "--run", name, "--runs", tmp_path, *small, *small_corpus)
        assert done.exit_code == 0, done.output
    recipe = yaml.safe_load((tmp_path / "superposition/recipe.yaml").read_text())
    recipe["corpus"]["texts"] = [str(tmp_path / "gone.txt")]  # it reads the records alone
    (tmp_path / "superposition/recipe.yaml").write_text(yaml.safe_dump(recipe))
    options = ["smooth=2", f"baseline={tmp_path / 'decoder'}"]
    done = tandem("analyse", "transition", tmp_path / "superposition", *options)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "superposition/analysis/transition.json").read_text())
    steps = RunFolder(tmp_path / "superposition").records("step")
    losses = [step["terms"].get("bag_nll", step["terms"].get("nll")) for step in steps]
    assert found["switch"] == 3 and found["jump"] == pytest.approx(losses[3] - np.mean(losses[1:3]))
    assert [*found["curves"]] == ["in bags", "in tokens", "baseline"]
    points = [*found["curves"]["in bags"], *found["curves"]["in tokens"]]
    assert points == [[step["step"], step["flops"], loss] for step, loss in zip(steps, losses, strict=True)]
    said = [line.split() for line in done.stdout.splitlines()]
    assert ["switch", "3"] in said and "curves" not in done.stdout
    assert "steps_until_below" in {words[0] for words in said if words}  # also where it never is
    assert (tmp_path / "superposition/analysis/transition.png").stat().st_size > 5000
    axes = Figure().subplots()
    Transition(Transition.Config(smooth=2)).draw(found, axes)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [*found["curves"]]
    theirs = trailing_mean(np.array(found["curves"]["baseline"])[:, 2], 2)
    assert axes.lines[-1].get_ydata().tolist() == theirs.tolist()
    done = tandem("analyse", "transition", "superposition/tiny")
    told = "superposition/tiny: a recipe; transition reads the record of a run: give the folder of a run"
    assert done.exit_code == 2 and told in done.output
    plan = json.loads((tmp_path / "decoder/plan.json").read_text())
    plan["corpus"][0] = "another text"
    (tmp_path / "decoder/plan.json").write_text(json.dumps(plan))
    done = tandem("analyse", "transition", tmp_path / "superposition", *options)
    assert done.exit_code == 2 and "was trained on other tokens than" in done.output
