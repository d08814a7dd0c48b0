"""Doing what a study still lacks, by as many processes and machines as there are.

    studies/shapes/
        study.yaml                  all that decides results
        runs/deep-lr0.002/          a trial        } folders of runs, as `tandem train` makes them
        runs/deep-lr0.002-seed1/    a run          }
        processes/                  by run: its lock, its recipe, what its process printed, why it failed
        results.jsonl               one line a finished run, read from the folders of the runs
        table.txt, report.html

Nothing is remembered but by the folders of the runs. Whoever types `tandem compare shapes` looks at them, locks a run
that is neither finished nor locked, and trains it in a process of its own: `tandem train`, which goes on where an
earlier one stopped. So a study that was interrupted goes on, and several commands on one folder, those of a Slurm array
say, share the work; the lock of a process that dies dies with it. The runs of an arm wait for its trials.

A process of its own for every run costs a few seconds and keeps runs apart: no run inherits another's compiled code,
memory or crash, and the number of threads can be set before torch is loaded.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import yaml
from rich.console import Console
from rich.live import Live

import tandem
from tandem.comparison.report import table, write_report
from tandem.comparison.results import Result, read_result
from tandem.comparison.study import Job, Study
from tandem.corpus.prepare import locked
from tandem.recipe import UserError
from tandem.training.display import clock
from tandem.training.folder import LOCK, MAY_DIFFER, RunFolder, lock, replace_file
from tandem.training.health import NotFinite, Stopped, StopRequest

PAUSE = 0.2
"""Seconds between looks at the processes."""
FREE = ("title", "question")
"""Keys of a study that decide nothing."""
GROWING = ("seeds", "rates", "targets")
"""Keys of a study to whose lists more may be added."""


class Failed(UserError):
    """Some runs of a study have failed; all else is done."""


class StudyStopped(Stopped):
    """The study was asked to stop, and every run has saved itself."""

    def __init__(self, finished: int, runs: int, signal_number: int):
        super().__init__(0, signal_number)
        self.args = (f"stopped with {finished} of {runs} runs finished",)


class StudyFolder:
    """What has been done of a study, read off its folder."""

    def __init__(self, study: Study, path: Path):
        self.study, self.path, self.runs, self.processes = study, path, path / "runs", path / "processes"
        self._results: dict[Job, Result] = {}

    def open(self) -> None:
        """Makes the folder, or finds this study in it. Raises: UserError where it holds another one."""
        file, asked = self.path / "study.yaml", self.study.to_yaml()
        try:
            self.runs.mkdir(parents=True, exist_ok=True)
            self.processes.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be the folder of a study ({error.strerror})") from None
        with self._alone():
            if file.exists():
                _require_same_study(self.path, yaml.safe_load(file.read_text("utf-8")), yaml.safe_load(asked))
            replace_file(file, asked.encode())

    def _alone(self):
        """While this is held no other command writes what belongs to all runs."""
        return locked(self.processes / "study.lock")

    def finished(self, job: Job) -> bool:
        return (self.runs / job.name / "result.json").exists()

    def error(self, job: Job) -> dict[str, Any] | None:
        """Why and when the last attempt at an unfinished run failed."""
        file = self.processes / f"{job.name}.error.json"
        return json.loads(file.read_bytes()) if file.exists() and not self.finished(job) else None

    def settled(self, job: Job) -> bool:
        """Finished, or a trial that has told enough: a rate at which the loss is not finite is not the best one."""
        error = self.error(job)
        return self.finished(job) or (job.trial and error is not None and error["diverged"])

    def result(self, job: Job) -> Result:
        if job not in self._results:
            lr = job.rate or self.study.recipe(job).optimiser.lr
            self._results[job] = read_result(self.runs / job.name, job.arm, job.seed, lr, job.trial)
        return self._results[job]

    def chosen(self) -> dict[str, float | None]:
        """The learning rate of each arm whose trials have all been made; None: that of its recipe."""
        if not self.study.rates:
            return dict.fromkeys(self.study.layers)
        trials = self.study.trials()
        waiting = {job.arm for job in trials if not self.settled(job)}
        best: dict[str, tuple[float, float]] = {}
        for job in trials:
            if job.arm not in waiting and self.finished(job) and job.rate is not None:
                tried = self.result(job).nats_per_token, job.rate
                best[job.arm] = min(best.get(job.arm, tried), tried)
        return {arm: rate for arm, (_, rate) in best.items()}

    def jobs(self) -> list[Job]:
        """All that are known by now, in the order in which they are done."""
        return [*self.study.trials(), *self.study.runs(self.chosen())]

    def results(self) -> list[Result]:
        return [self.result(job) for job in self.jobs() if self.finished(job)]

    def write(self) -> Path:
        """Writes what is finished in all forms; returns the path of the report."""
        results = self.results()
        lines = (json.dumps(result.as_numbers()) + "\n" for result in results)
        with self._alone():
            replace_file(self.path / "results.jsonl", "".join(lines).encode())
            return write_report(self.study, results, self.path)

    def missing(self) -> list[str]:
        """Why what is not finished is not, a line each."""
        lines = []
        for job in self.jobs():
            error = self.error(job)
            if error and not self.settled(job):
                lines.append(f"{job.name}: {error['message']}")
        waiting = {job.arm for job in self.study.trials() if not self.settled(job)}
        for arm in (arm for arm in self.study.layers if arm not in self.chosen()):
            reason = (
                "not all of its trials are finished" if arm in waiting else "the loss is finite at none of its rates"
            )
            lines.append(f"{arm}: no learning rate is chosen, for {reason}")
        return lines


def compare(study: Study, path: Path, processes: int = 1, console: Console | None = None) -> None:
    """Does what `study` lacks in the folder `path`, `processes` runs at a time; writes its report and shows its table.

    Raises: UserError where the folder holds another study; Failed, after all else is done; StudyStopped.
    """
    folder, terminal = StudyFolder(study, path), console or Console(highlight=False)
    folder.open()
    elsewhere = _work(folder, processes, terminal)
    if elsewhere:
        names = ", ".join(job.name for job in elsewhere)
        _say(terminal, "elsewhere", f"{names}: in training by other processes; the last one writes the report")
        return
    page = folder.write()
    terminal.print(table(study, folder.results()), markup=False, soft_wrap=True)
    _say(terminal, "report", page)
    if missing := folder.missing():
        raise Failed("\n".join([*missing, "the report is without these; the same command tries them again"]))


def _work(folder: StudyFolder, processes: int, terminal: Console) -> list[Job]:
    """Trains until nothing is left to train here; returns the runs that other commands are training."""
    began, running = time.time(), list[Training]()
    with StopRequest() as stop, Progress(folder, processes, terminal) as progress:
        try:
            while True:
                for training in [t for t in running if t.process.poll() is not None]:
                    training.close()
                    running.remove(training)
                jobs = folder.jobs()
                if stop.signal_number is not None:
                    raise StudyStopped(sum(map(folder.finished, jobs)), progress.runs, stop.signal_number)
                here, elsewhere = [training.job for training in running], []
                for job in jobs:
                    if len(running) == processes:
                        break
                    error = folder.error(job)
                    if folder.settled(job) or job in here or (error and error["time"] >= began):
                        continue
                    if claimed := _claim(folder, job):
                        progress.say_start(job, len(running))
                        running.append(Training(folder, job, claimed, processes))
                    else:
                        elsewhere.append(job)
                if not running and not any(job.trial for job in elsewhere):
                    return elsewhere
                progress.show([training.job for training in running])
                time.sleep(PAUSE)
        finally:
            for training in running:
                training.process.send_signal(signal.SIGTERM)
            for training in running:
                training.process.wait()


def _claim(folder: StudyFolder, job: Job) -> TextIO | None:
    """The lock of a run, held before its process has started; None where somebody else trains it."""
    claimed = lock(folder.processes / f"{job.name}.lock")
    if claimed and (folder.runs / job.name).exists():
        training = lock(folder.runs / job.name / LOCK)  # a process that outlived its command may hold this one alone
        if training is None:
            claimed.close()
            return None
        training.close()
    return claimed


class Training:
    """A process that trains one run, as `tandem train` on its recipe does."""

    def __init__(self, folder: StudyFolder, job: Job, claimed: TextIO, processes: int):
        self.job, self.claimed = job, claimed
        self.error_file = folder.processes / f"{job.name}.error.json"
        recipe = folder.processes / f"{job.name}.yaml"
        replace_file(recipe, folder.study.recipe(job).to_yaml().encode())
        code = [str(Path(tandem.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]  # this one, installed or not
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, code))}
        if processes > 1:
            environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // processes))
        self.errors = open(folder.processes / f"{job.name}.err", "w+")  # noqa: SIM115
        with open(folder.processes / f"{job.name}.out", "w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tandem", "train", recipe, "--run", job.name, "--runs", folder.runs],
                stdin=subprocess.DEVNULL,
                stdout=output if processes > 1 else None,
                stderr=self.errors,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the command alone, which passes it on once
                preexec_fn=_end_with_parent,
            )

    def close(self) -> None:
        """Lets go of a run whose process has ended, and keeps why, where it failed."""
        code = self.process.returncode
        if code:
            self.errors.seek(0)
            said = self.errors.read().strip() or f"its process ended with {signal_name(code)}"
            error = {"message": said, "diverged": code == NotFinite.exit_code, "time": time.time()}
            replace_file(self.error_file, json.dumps(error, indent=1).encode())
        self.errors.close()
        self.claimed.close()


def signal_name(code: int) -> str:
    """The exit code of a process, in words."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _end_with_parent() -> None:
    """In a new process: asks Linux to stop it as a signal would when the command that started it dies."""
    parent_death_signal = 1  # PR_SET_PDEATHSIG, linux/prctl.h
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGTERM)


class Progress:
    """Which runs are at work, how many are finished, and how long the rest will take."""

    def __init__(self, folder: StudyFolder, processes: int, terminal: Console):
        self.folder, self.processes, self.terminal = folder, processes, terminal
        study = folder.study
        self.runs_of_an_arm = len(study.seeds) + len(study.rates)
        self.runs = len(study.layers) * self.runs_of_an_arm
        watched = processes > 1 and terminal.is_terminal
        self.live = Live(console=terminal, auto_refresh=False, transient=True) if watched else None
        self.shown_at = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        if self.live is not None:
            self.live.stop()

    def say_start(self, job: Job, running: int) -> None:
        number = 1 + running + sum(map(self.folder.finished, self.folder.jobs()))
        _say(self.terminal, "study", f"{job.name}, {number} of {self.runs} runs{self._left([])}")

    def show(self, running: list[Job]) -> None:
        """One process shows itself; of several, a line each stands and changes, or is printed now and then."""
        if self.processes == 1 or time.monotonic() - self.shown_at < (1 if self.live else 30):
            return
        self.shown_at = time.monotonic()
        finished = sum(map(self.folder.finished, self.folder.jobs()))
        lines = [f"{finished} of {self.runs} runs finished{self._left(running)}"]
        for job in running:
            step, steps, loss = self._step(job)
            lines.append(f"  {job.name:<24} step {step}/{steps or '?'}  loss {loss}")
        if self.live:
            self.live.start()
            self.live.update("\n".join(lines), refresh=True)
        else:
            _say(self.terminal, "study", "; ".join(" ".join(line.split()) for line in lines))

    def _step(self, job: Job) -> tuple[int, int, str]:
        records = RunFolder(self.folder.runs / job.name).records("step")
        if not records:
            return 0, 0, "-"
        return records[-1]["step"], records[-1]["steps"], f"{next(iter(records[-1]['terms'].values())):.3f}"

    def _left(self, running: list[Job]) -> str:
        """By what finished runs of the same arm, or else of any, took."""
        took: dict[str, list[float]] = {arm: [] for arm in self.folder.study.layers}
        for result in self.folder.results():
            took[result.arm].append(result.training_seconds + result.evaluation_seconds)
        known = [seconds for arm in took.values() for seconds in arm]
        if not known:
            return ""
        mean = {arm: sum(times or known) / len(times or known) for arm, times in took.items()}
        left = sum(mean[arm] * (self.runs_of_an_arm - len(times)) for arm, times in took.items())
        for job in running:
            step, steps, _ = self._step(job)
            left -= mean[job.arm] * step / max(1, steps)
        return f", about {clock(left / self.processes)} left" if left > 0 else ""


def status(study: Study, path: Path) -> str:
    """What is done, what is missing, and what it would cost."""
    folder = StudyFolder(study, path)
    waiting = [arm for arm in study.layers if arm not in folder.chosen()]
    rows = []
    for job in folder.jobs():
        if folder.finished(job):
            result = folder.result(job)
            seconds = clock(result.training_seconds + result.evaluation_seconds)
            state = f"finished: {result.nats_per_token:.4f} nats/token, {result.flops:.2e} FLOP, {seconds}"
        elif error := folder.error(job):
            state = f"failed: {error['message']}"
        else:
            records = RunFolder(folder.runs / job.name).records("step")
            state = f"stopped or in training, at step {records[-1]['step']}" if records else "missing"
        rows.append(f"{job.name:<28} {state}")
    rows += [f"{arm + '-...':<28} missing: {len(study.seeds)} runs, once its trials are finished" for arm in waiting]
    return "\n".join(rows)


def _require_same_study(path: Path, there: dict[str, Any], asked: dict[str, Any]) -> None:
    """More arms, seeds, rates or targets only add runs. Raises: UserError naming everything else that differs."""

    def entries(study: dict[str, Any]) -> dict[str, Any]:
        return {key: study[key] for key in study if key != "arms"} | {
            f"arms.{a}": study["arms"][a] for a in study["arms"]
        }

    held, wanted, lines = entries(there), entries(asked), []
    for key, value in held.items():
        new = wanted.get(key)
        if new is None and key.startswith("arms."):
            lines.append(f"  {key}: an arm there, absent asked")
        elif isinstance(value, dict) and isinstance(new, dict):
            lines += [
                f"  {key}.{part}: {value.get(part, 'absent')} there, {new.get(part, 'absent')} asked"
                for part in value | new
                if value.get(part) != new.get(part) and not part.startswith(MAY_DIFFER)
            ]
        elif value != new and key not in FREE and not (key in GROWING and set(value) <= set(new or [])):
            lines.append(f"  {key}: {value} there, {new} asked")
    if lines:
        reason = "holds another study, to which only arms, seeds, rates and targets may be added; "
        raise UserError("\n".join([f"{path}: {reason}use another --studies folder. It differs in", *lines]))


def _say(terminal: Console, title: str, text: Any) -> None:
    terminal.print(f"{title:<11} {text}", markup=False, soft_wrap=True)
