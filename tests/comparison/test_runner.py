"""A study ends bit for bit where it would have ended, however often it was cut off and by whomever it was finished."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from forked import Forked, forked
from tiny import STUDY, TrainedHere, read, write
from typed import tandem

from tandem import cli
from tandem.comparison import runner
from tandem.comparison.folder import StudyFolder
from tandem.comparison.study import Job
from tandem.comparison.summary import Summary
from tandem.comparison.trained import open_trained
from tandem.evaluation.likelihood import documents_to_score
from tandem.recipe import UserError
from tandem.training.observers import CLOCK_KEYS

CLOCKS = {*CLOCK_KEYS, "evaluation_seconds", "prefill_seconds", "tokens_per_second"}
TRIED = STUDY + "rates: [1e-3, 4e-3]\n"
RUNS = 6


def command(*arguments: str) -> None:
    runner.subprocess = SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL)
    cli.main(["compare", *arguments])


class Command:
    """`tandem compare`, it and each of its runs a process of its own."""

    def __init__(self, study: Path, log: str, *options: str):
        self.log = study.with_name(log)
        self.process = forked(self.log, command, str(study), "--studies", str(study.parent), *options)

    def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            assert self.process.is_alive(), self.log.read_text()
            time.sleep(0.002)

    def end(self, number: int | None = None) -> str:
        """What it said until it ended, by the signal `number` or by itself."""
        if number is not None:
            os.kill(self.process.pid, number)
        self.process.join(120)
        return self.log.read_text()


def here(study: Path, studies: Path) -> str:
    done = tandem("compare", study, "--studies", studies)
    assert done.exit_code == 0, done.output
    return done.stdout


def without_clocks(value):
    if isinstance(value, dict):
        return {key: without_clocks(inner) for key, inner in value.items() if key not in CLOCKS}
    return [without_clocks(inner) for inner in value] if isinstance(value, list) else value


def lines(folder: Path):
    return [without_clocks(json.loads(line)) for line in (folder / "results.jsonl").read_text().splitlines()]


def steps_of(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b'"kind": "step"') if metrics.exists() else 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory, small_corpus):
    """The study, finished without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    out = Command(write(folder, small_corpus, TRIED), "log").end()
    assert "run 6 of 6" in out and "report" in out
    return folder / "tiny"


def test_runs_beside_each_other_are_dealt_to_the_gpus_that_are_visible():
    assert runner.visible_devices(3, None) == ["0", "1", "2"]
    assert runner.visible_devices(2, "5,GPU-7,9") == ["5", "GPU-7"]
    assert runner.visible_devices(0, "") == runner.visible_devices(0, None) == []
    taken: list[str | None] = []
    for _ in range(5):
        taken.append(runner.least_used(["4", "6"], taken))
    assert taken == ["4", "6", "4", "6", "4"]
    assert runner.least_used(["4", "6"], ["4", "4", "6"]) == "6"
    assert runner.least_used([], []) is None


@pytest.mark.parametrize(("device", "seen"), [("6", "6"), (None, "2,6")])
def test_a_run_sees_the_gpu_that_it_was_dealt_and_joins_no_group(tmp_path, monkeypatch, device, seen):
    given = {}
    monkeypatch.setenv(runner.VISIBLE, "2,6")
    for key in runner.GROUP:
        monkeypatch.setenv(key, "1")
    monkeypatch.setattr(runner.subprocess, "Popen", lambda command, **options: given.update(options["env"]))
    recipe = SimpleNamespace(to_yaml=lambda: "seed: 1\n")
    folder = SimpleNamespace(recipe=lambda job: recipe, processes=tmp_path, runs=tmp_path)
    job = Job("deep", 1, None, trial=False)
    runner.Training(cast(StudyFolder, folder), job, open(os.devnull), 2, device).errors.close()  # noqa: SIM115
    assert given[runner.VISIBLE] == seen and not given.keys() & set(runner.GROUP)


def test_runs_beside_each_other_have_a_line_each(monkeypatch, capsys):
    step = {"step": 30, "steps": 127, "terms": {"loss": 6.489}, "tokens_per_second": 6750.0, "seconds_left": 59.0}
    newest = {"deep": step, "wide": None}
    folder = SimpleNamespace(
        newest_step=lambda job: newest[job.arm],
        seconds_left=lambda begun: 240 - 120 * sum(begun.values()),
        done=0,
        size=2,
    )
    progress = runner.Progress(cast(StudyFolder, folder), processes=2)
    monkeypatch.setattr(progress, "shown_at", float("-inf"))
    progress.show([Job("deep", 1, None, trial=False), Job("wide", 1, None, trial=False)])
    assert capsys.readouterr().out.splitlines() == [
        "study       0 of 2 runs finished, about 1 min 46 s left; "
        "deep-seed1 step 30/127 23 % loss 6.489 6.75 k tok/s 59 s left; wide-seed1 starting"
    ]


@pytest.mark.parametrize("message", ["Traceback:\n  somewhere\nno", "no\n  network: this\n  batch: that"])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_fails_says_so_at_once_in_a_line(tmp_path, small_corpus, capsys, processes, message):
    folder = StudyFolder(read(tmp_path, small_corpus), tmp_path / "tiny")
    folder.open()
    error = {"message": message, "diverged": False, "time": 0}
    (folder.processes / "deep-seed1.error.json").write_text(json.dumps(error))
    progress = runner.Progress(folder, processes)
    for job in folder.jobs():
        progress.say_end(job)
    assert capsys.readouterr().out == "failed      deep-seed1: no\n"


def test_what_the_report_needs_is_asked_for_before_anything_is_trained(tmp_path, monkeypatch, small_corpus):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setattr(runner, "_work", lambda *_: pytest.fail("it trains"))
    with pytest.raises(UserError, match=r"pip install 'tandem-lm\[statistics\]'"):
        runner.compare(read(tmp_path, small_corpus), tmp_path / "study")
    assert not (tmp_path / "study").exists()


@pytest.mark.slow
def test_cut_off_three_times_and_finished_by_two_commands_it_is_the_same_study(whole, tmp_path, small_corpus):
    study, folder = write(tmp_path, small_corpus, TRIED), tmp_path / "tiny"
    first, later = folder / "runs" / "deep-lr0.001", folder / "runs" / "deep-lr0.004"

    first_command = Command(study, "1.log")  # inside a run, both processes killed at once
    first_command.until(lambda: steps_of(first) >= 12)
    os.kill(first_command.process.pid, signal.SIGSTOP)
    os.kill(int((first / ".lock").read_text().split()[0]), signal.SIGKILL)
    first_command.end(signal.SIGKILL)
    assert not (first / "result.json").exists()

    between = Command(study, "2.log")  # between runs, the command alone
    between.until((first / "result.json").exists)
    between.end(signal.SIGKILL)

    asked = Command(study, "3.log")  # inside a run, as by Ctrl-C
    asked.until(lambda: steps_of(later) >= 7)
    assert "of 6 runs finished; the same command goes on" in asked.end(signal.SIGINT)
    assert asked.process.exitcode == 130

    both = [Command(study, "4.log"), Command(study, "5.log")]
    last_lines = [command.end().splitlines()[-1] for command in both]
    assert [command.process.exitcode for command in both] == [0, 0], last_lines
    assert any("report" in line for line in last_lines)
    assert lines(folder) == lines(whole) and len(lines(folder)) == RUNS
    assert (folder / "table.txt").exists() and (folder / "report.html").exists()
    processes = {r.name: len(json.loads((r / "environment.json").read_text())) for r in (folder / "runs").iterdir()}
    assert processes["deep-lr0.001"] > 1 and processes["deep-lr0.004"] > 1  # these were cut off
    assert all(processes[name] == 1 for name in processes if name.endswith("seed1"))  # nobody did the work of another


@pytest.mark.slow
def test_a_finished_study_shows_its_result_at_once_and_is_rebuilt_from_its_runs(whole, small_corpus, tmp_path):
    before, stamps = lines(whole), [path.stat().st_mtime_ns for path in sorted(whole.glob("runs/*/*"))]
    (whole / "results.jsonl").unlink()
    here(write(tmp_path, small_corpus, TRIED), whole.parent)
    assert lines(whole) == before
    assert stamps == [path.stat().st_mtime_ns for path in sorted(whole.glob("runs/*/*"))]


@pytest.mark.slow
def test_what_a_run_tells_is_what_its_folder_holds(whole, tmp_path, small_corpus):
    folder = StudyFolder(read(tmp_path, small_corpus, text=TRIED), whole)
    trials, runs = ([r for r in folder.results() if r.trial is kind] for kind in (True, False))
    for kind in trials, runs:
        assert all((result.documents == kind[0].documents).all() for result in kind)
    assert not set(trials[0].documents) & set(runs[0].documents)
    few = documents_to_score(open_trained(runs[0].folder).corpus.validation, 5, "comparison")
    for result in runs:
        assert len(result.curve) == 15 and result.curve[-1].step == result.steps == 30  # every second step of 30
        kept = np.isin(result.documents, few)
        assert 0 < kept.sum() < len(kept)
        ended = result.nats[kept].sum() / result.document_tokens[kept].sum()
        assert result.curve[-1].nats_per_token == pytest.approx(ended, abs=0)
        assert result.training_seconds == result.curve[-1].seconds > result.curve[0].seconds
        tried = {trial.lr: trial.nats_per_token for trial in trials if trial.arm == result.arm}
        assert result.lr == min(tried, key=tried.__getitem__)


def test_an_arm_waits_for_the_run_of_its_study_whose_steps_it_takes_over(tmp_path, small_corpus, monkeypatch):
    trunk = tmp_path / "tiny/runs/wide-seed1"
    text = STUDY.replace("{network.depth: 3, network.width: 32}", f"{{start.trunk: {trunk}, schedule.decay: 10}}")
    text = text.replace("{network.depth: 1}", "{schedule.decay: 3}").replace(
        "checkpoint.every: 5", "checkpoint: {every: 5, keep: 6}"
    )
    study = read(tmp_path, small_corpus, text=text)
    monkeypatch.setattr(runner, "Training", TrainedHere)
    runner.compare(study, tmp_path / "tiny", processes=4)
    (entry,) = json.loads((tmp_path / "tiny/runs/deep-seed1/environment.json").read_text())
    assert entry["trunk"] == f"{trunk}, step 20"


@pytest.mark.slow
def test_an_arm_waits_for_the_run_of_its_study_from_which_it_starts(tmp_path, small_corpus, monkeypatch):
    from_deep = f"{{start.run: {tmp_path / 'tiny/runs/deep-seed1'}, optimiser.lr: 1e-9}}"
    text = STUDY.replace("deep: {network.depth: 3, network.width: 32}", "deep: {}").replace(
        "{network.depth: 1}", from_deep
    )
    study = read(tmp_path, small_corpus, text=text.replace("seeds: [1]", "seeds: [2, 1]"))
    monkeypatch.setattr(runner, "Training", TrainedHere)
    runner.compare(study, tmp_path / "tiny", processes=4)
    (began,), (ended,) = (
        [r for r in results if r.seed == 1] for results in StudyFolder(study, tmp_path / "tiny").summary().runs.values()
    )
    assert ended.nats.sum() == pytest.approx(began.nats.sum(), rel=1e-4)


@pytest.mark.parametrize(
    ("key", "also"), [("start.run", []), ("start.trunk", []), ("start.trunk", ["arms.wide.start.run=elsewhere"])]
)
def test_an_arm_that_waits_for_a_run_which_no_one_makes_says_so(tmp_path, small_corpus, monkeypatch, key, also):
    other = tmp_path / "tiny/runs/deep-lr0.004-seed1"
    study = read(tmp_path, small_corpus, f"arms.wide.{key}={other}", *also)
    monkeypatch.setattr(runner, "_work", lambda *_: [])
    with pytest.raises(runner.Failed, match=f"wide-seed1: {key} = {other}: is not finished, or no run of this"):
        runner.compare(study, tmp_path / "tiny")
    listed = StudyFolder(study, tmp_path / "tiny").status()
    assert "wide-seed1  missing, waits for deep-lr0.004-seed1" in listed


@pytest.mark.slow
def test_a_failed_run_is_told_at_the_end_and_does_not_stop_the_others(tmp_path, small_corpus):
    text = STUDY.replace("budget: 30 steps", "budget: 100 tokens").replace("{network.depth: 1}", "{batch: {rows: 8}}")
    failing = Command(write(tmp_path, small_corpus, text), "log", "--processes", "2")
    said = failing.end()
    assert failing.process.exitcode == 2 and "Traceback" not in said
    refused = "wide-seed1: budget = 100 tokens: one step alone takes 256 tokens"
    assert f"\nfailed      {refused}" in said and f"\n{refused}" in said.partition("\nreport ")[2]
    assert said.count("deep-seed1:") == 1
    assert "\nfinished    deep-seed1: 5." in said and "\nsample      The" in said
    assert f"\nruns        {tmp_path / 'tiny/runs'}: in a folder each" in said
    assert [line["arm"] for line in lines(tmp_path / "tiny")] == ["deep"]
    listed = tandem("compare", tmp_path / "tiny.yaml", "--studies", tmp_path, "--list").stdout.splitlines()
    assert "finished" in listed[0] and "failed: budget" in listed[1]


@pytest.mark.slow
def test_an_arm_made_after_the_text_has_changed_is_not_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "Training", TrainedHere)
    texts, held_out = tmp_path / "text.txt", tmp_path / "held_out.txt"
    given = [f"corpus.texts=[{texts}]", f"corpus.validation=[{held_out}]", "corpus.tokenizer=bytes"]
    text = "\n".join(f"Number {n} of the sheep went over the hill, and {n % 7} came back." for n in range(400))
    texts.write_text(text)
    held_out.write_text(text[:500])
    study, folder = read(tmp_path, [*given, f"corpus.folder={tmp_path}"], "budget=2 steps"), tmp_path / "study"
    runner.compare(study, folder)
    shutil.rmtree(folder / "runs" / "wide-seed1")
    texts.write_text(text.replace("sheep", "goats"))
    with pytest.raises(UserError, match=r"not of one text(.|\n)*deep-seed1(.|\n)*wide-seed1"):
        runner.compare(study, folder)


def test_a_run_whose_loss_was_not_finite_is_known_to_the_report(tmp_path, small_corpus):
    study = read(tmp_path, small_corpus)
    folder = StudyFolder(study, tmp_path / "tiny")
    folder.open()
    for name, diverged in {"deep-seed1": False, "wide-seed1": True}.items():
        error = {"message": "no", "diverged": diverged, "time": 0}
        (folder.processes / f"{name}.error.json").write_text(json.dumps(error))
    assert folder.summary().ended == {("wide", 1)}


def test_what_was_added_after_a_look_is_told(tmp_path, small_corpus, run, monkeypatch):
    drawn = {"deep": "decoder", "wide": "sps", "third": "memory <2x>"}

    def page(seeds: list[int], *arms: str) -> str:
        study = read(tmp_path, small_corpus, f"seeds={seeds}", *(f"arms.{arm}.network.depth=2" for arm in arms))
        folder = StudyFolder(study, tmp_path / "tiny")
        folder.open()
        results = [replace(run(drawn[arm], seed), arm=arm) for seed in seeds for arm in study.arms]
        monkeypatch.setattr(folder, "results", lambda: results)
        return folder.write().read_text()

    assert "Judged before" not in page([1]) + page([1, 2])  # with one seed nothing is tested
    told = "Judged before with seeds 1, 2 and arms deep, wide; {} added after a look"
    assert told.format("arms") in page([1, 2], "third")
    both = told.format("seeds and arms")
    assert both in page([1, 2, 3], "third") and both in page([1, 2, 3, 4], "third")


def test_rates_added_after_a_look_are_told(make_study, run):
    looked = {"seeds": [1, 2], "rates": [1e-3, 2e-3], "arms": ["decoder", "sps", "memory <2x>"]}
    study = make_study(rates=[1e-3, 2e-3, 4e-3], seeds=[1, 2])
    told = "Judged before with seeds 1, 2 and rates 0.001, 0.002; rates added after a look name a winner more often"
    assert any(warning.startswith(told) for warning in Summary.of(study, [run("sps", 1)], judged=looked).warnings)


def test_a_splitter_that_is_missing_is_told_before_the_first_run(tmp_path, small_corpus, monkeypatch):
    study = read(tmp_path, small_corpus, text=STUDY.replace("{network.depth: 1}", "{recipe: gestalt/tiny}"))
    monkeypatch.setitem(sys.modules, "pysbd", None)
    with pytest.raises(UserError, match=r"network gestalt reads sentences, .* rules: .*'tandem-lm\[sentences\]'"):
        runner.compare(study, tmp_path / "tiny")
    assert not list((tmp_path / "tiny" / "runs").iterdir())


def test_a_rate_is_chosen_with_sentence_ends_paid_for(tmp_path, small_corpus, monkeypatch):
    folder = StudyFolder(read(tmp_path, small_corpus, "rates=[1e-3, 4e-3]"), tmp_path / "tiny")
    free, paid = {1e-3: 3.3, 4e-3: 3.29}, {1e-3: 3.4, 4e-3: 3.44}
    monkeypatch.setattr(folder, "finished", lambda job: job.arm == "deep" and job.trial)  # and no other arm
    result = lambda job: SimpleNamespace(nats_per_token=free[job.rate], paid_per_token=paid[job.rate])
    monkeypatch.setattr(folder, "result", result)
    assert folder.chosen() == {"deep": 1e-3}


def test_trials_count_for_their_part_of_a_run_in_what_is_left(tmp_path, small_corpus, monkeypatch):
    study = read(tmp_path, small_corpus, "rates=[1e-3, 4e-3]", "trial_share=0.25", "seeds=[1, 2]")
    folder = StudyFolder(study, tmp_path / "tiny")
    folder.open()
    told = SimpleNamespace(training_seconds=9.0, evaluation_seconds=1.0, paid_per_token=3.0)
    first, *_ = study.trials()
    monkeypatch.setattr(folder, "finished", lambda job: job == first)
    monkeypatch.setattr(folder, "result", lambda job: told)
    assert folder.seconds_left({}) == 40 * 2 * 2.5 - 10  # a run takes 40 s, and an arm 2 runs and 2 quarters
    assert folder.seconds_left({study.trials()[1]: 0.5}) == 190 - 5
    for job, step in ((first, 3), (study.trials()[1], 2)):  # of 6 steps, the others are their trunks'
        run = folder.runs / job.name
        run.mkdir()
        (run / "plan.json").write_text('{"steps": 6}')
        (run / "environment.json").write_text(json.dumps([{"trunk_step": step}, {}]))
    assert folder.seconds_left({}) == (9 / 2 + 1) * 4 * 2 * 2.5 - 5.5
    assert folder.seconds_left({study.trials()[1]: 4 / 6}) == 104.5 - 5.5 / 2
    monkeypatch.setattr(folder, "finished", lambda job: False)
    assert "8 of 8 runs, 30 steps each, trials 25% of it" in folder.status()


def test_runs_that_no_rate_is_left_for_are_not_listed_as_waiting(tmp_path, small_corpus):
    folder = StudyFolder(read(tmp_path, small_corpus, "rates=[1e-3, 4e-3]"), tmp_path / "tiny")
    folder.open()
    for rate in "0.001", "0.004":
        (folder.processes / f"deep-lr{rate}.error.json").write_text(json.dumps({"message": "no", "diverged": True}))
    listed = folder.status()
    assert "deep-lr...-seed1  missing, for the loss is finite at none of its rates" in listed
    assert "wide-lr...-seed1  missing, for not all of its trials are finished" in listed


def test_a_rate_at_which_the_loss_is_not_finite_is_out_of_the_race(tmp_path, small_corpus, monkeypatch):
    folder = StudyFolder(read(tmp_path, small_corpus, "rates=[1e-3, 4e-3, 8e-3]"), tmp_path / "tiny")
    folder.open()
    nats = {1e-3: math.nan, 4e-3: 3.0, 8e-3: 4.0}  # by likelihood, too
    monkeypatch.setattr(folder, "result", lambda job: SimpleNamespace(paid_per_token=nats[job.rate]))

    def end(name: str, code: int | None = None):
        (folder.runs / name).mkdir()
        if code is None:
            (folder.runs / name / "result.json").write_text("{}")
        else:
            error = {"message": "no", "diverged": code == 3, "time": 0}
            (folder.processes / f"{name}.error.json").write_text(json.dumps(error))

    for arm in "deep", "wide":
        end(f"{arm}-lr0.001")
        end(f"{arm}-lr0.004")
    assert folder.chosen() == {}
    end("deep-lr0.008", code=3)
    end("wide-lr0.008", code=2)
    assert folder.chosen() == {"deep": 4e-3}  # wide waits: its trial may succeed when it is made again
    assert (folder.done, folder.size) == (5, 8)  # nothing more is to come from the trial that diverged
    assert [job.name for job in folder.jobs() if not job.trial] == ["deep-lr0.004-seed1"]
    assert folder.missing() == [
        "wide-lr0.008: no",
        "wide: no learning rate is chosen, for not all of its trials are finished",
    ]
    before = {}
    left = [job.name for job in runner._left(folder, before, set())]
    assert left == ["wide-lr0.008", "deep-lr0.004-seed1"]  # it failed before this command began
    tried = {job for job in folder.jobs() if job.name == left[0]}
    assert [job.name for job in runner._left(folder, before, tried)] == left[1:]
    (folder.processes / "wide-lr0.008.error.json").write_text(json.dumps({"message": "no", "diverged": False}))
    assert [job.name for job in runner._left(folder, before, set())] == left[1:]  # it has failed again, elsewhere
