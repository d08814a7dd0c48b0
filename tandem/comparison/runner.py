"""Runs what a study still lacks, with any number of processes and machines.

All state is in the folders of the runs. Each `tandem compare shapes` looks at them, locks a run that is neither
finished nor locked, and trains it in a separate process with `tandem train`, which resumes where an earlier one
stopped. So an interrupted study can be continued, and several commands on one folder (those of a Slurm array, say)
share the work; when a process dies, its lock is released. The runs of an arm wait for its trials.

A separate process for every run costs a few seconds and isolates runs: none inherits another's compiled code, memory or
crash, and the number of threads can be set before torch is loaded.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.live import Live

import tandem
from tandem.comparison.folder import StudyFolder
from tandem.comparison.pretrain import require_splitter
from tandem.comparison.study import Job, Study
from tandem.disk import lock, replace_file
from tandem.machine import cores, end_with_parent
from tandem.recipe import UserError, require
from tandem.training.display import TERMINAL, brief_line, clock, say
from tandem.training.folder import LOCK
from tandem.training.health import NotFinite, Stopped, StopRequest

PAUSE = 0.2
"""Seconds between checks of the processes."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""What torchrun tells a process of its group: commands under it divide the runs, and each of these trains alone."""
GRACE = 10.0
"""Seconds within which a process whose command was killed has saved its state and released its run."""


class Failed(UserError):
    """Some runs of a study have failed; all else is done."""


def compare(study: Study, path: Path, processes: int = 1, trunk: StudyFolder | None = None) -> None:
    """Runs what `study` lacks in the folder `path`, `processes` runs at a time; writes its report and shows its table.

    `trunk`: the same study at a longer budget; runs begin with the steps that they share with those there.

    Raises: UserError where the folder holds another study; Failed, after all else is done; Stopped.
    """
    require("scipy", "statistics")  # for the report; fail before training, not after it
    folder = StudyFolder(study, path, trunk)
    folder.open()
    for arm in dict.fromkeys(job.arm for job in folder.jobs() if not folder.settled(job)):
        require_splitter(study.recipes[arm])  # before the first of them is trained
    if elsewhere := _work(folder, processes):
        names = ", ".join(job.name for job in elsewhere)
        say(f"{names}: in training by other commands; the last one writes the report", "elsewhere")
        return
    page = folder.write()
    say(page.with_name("table.txt").read_text("utf-8"))
    say(f"{folder.runs}: in a folder each, with record, checkpoints and model", "runs")
    say(page, "report")
    if missing := folder.missing():
        raise Failed("\n".join([*missing, "the report is without these; the same command tries them again"]))


def _work(folder: StudyFolder, processes: int) -> list[Job]:
    """Trains until nothing is left to train here; returns the runs that other commands are training."""
    worked = time.monotonic()
    running: list[Training] = []
    tried: set[Job] = set()
    before: dict[Job, dict[str, Any] | None] = {}
    devices = visible_devices(torch.cuda.device_count(), os.environ.get(VISIBLE)) if processes > 1 else []
    with StopRequest() as stop, closing(Progress(folder, processes)) as progress:
        try:
            while True:
                for training in [t for t in running if t.process.poll() is not None]:
                    training.close()
                    running.remove(training)
                    progress.say_end(training.job)
                if stop.signal_number is not None:
                    raise Stopped(f"with {folder.done} of {folder.size} runs finished", stop.signal_number)
                elsewhere: list[Job] = []
                for job in _left(folder, before, tried):
                    if len(running) == processes:
                        break
                    if claimed := _claim(folder, job):
                        tried.add(job)
                        progress.say_start(job, len(running))
                        device = least_used(devices, [training.device for training in running])
                        running.append(Training(folder, job, claimed, processes, device))
                    else:
                        elsewhere.append(job)
                now = time.monotonic()
                worked = now if running or any(job.trial for job in elsewhere) else worked
                if not running and (not elsewhere or now - worked > GRACE):
                    return elsewhere
                progress.show([training.job for training in running])
                time.sleep(PAUSE)
        finally:
            for training in running:
                training.process.send_signal(signal.SIGTERM)
            for training in running:
                training.process.wait()


def _left(folder: StudyFolder, before: dict[Job, dict[str, Any] | None], tried: set[Job]) -> list[Job]:
    """Runs that are not finished, wait for no other, were not `tried` here, and have not failed elsewhere since this
    command first looked (`before`: their errors then)."""
    missing = [job for job in folder.jobs() if not folder.settled(job) and job not in tried]
    errors = {job: folder.error(job) for job in missing if not folder.waits_for(job)}
    return [job for job, error in errors.items() if error in (None, before.setdefault(job, error))]


def _claim(folder: StudyFolder, job: Job) -> TextIO | None:
    """The lock of a run, taken before its process starts; None where another command trains it or has just done so."""
    claimed = lock(folder.processes / f"{job.name}.lock")
    if claimed is None or not (folder.runs / job.name).exists():
        return claimed
    training = lock(folder.runs / job.name / LOCK)  # a process that outlived its command holds only this lock
    if training is None or folder.settled(job):
        claimed.close()
        claimed = None
    if training is not None:
        training.close()
    return claimed


class Training:
    """A process that trains one run, as `tandem train` on its recipe does."""

    def __init__(self, folder: StudyFolder, job: Job, claimed: TextIO, processes: int, device: str | None = None):
        """`device`: the one GPU that it sees; None: all that this process sees."""
        self.job, self.claimed, self.device = job, claimed, device
        self.error_file = folder.processes / f"{job.name}.error.json"
        recipe = folder.processes / f"{job.name}.yaml"
        replace_file(recipe, folder.recipe(job).to_yaml().encode())
        code = [str(Path(tandem.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]  # this one, installed or not
        mine = {key: value for key, value in os.environ.items() if key not in GROUP}
        environment = {**mine, "PYTHONPATH": os.pathsep.join(filter(None, code))}
        if processes > 1:
            environment["OMP_NUM_THREADS"] = str(max(1, cores() // processes))
        if device is not None:
            environment[VISIBLE] = device
        self.errors = open(folder.processes / f"{job.name}.err", "w+")  # noqa: SIM115
        with open(folder.processes / f"{job.name}.out", "w") as output:
            self.process = subprocess.Popen(
                # -P: a random.py in the folder of the command is no module of Python
                [sys.executable, "-P", "-m", "tandem", "train", recipe, "--run", job.name, "--runs", folder.runs],
                stdin=subprocess.DEVNULL,
                stdout=output if processes > 1 else None,
                stderr=self.errors,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches only the command, which passes it on once
                preexec_fn=partial(end_with_parent, signal.SIGTERM, os.getpid()),
            )

    def close(self) -> None:
        """Releases a run whose process has ended, and stores the error if it failed."""
        code = self.process.returncode
        if code:
            self.errors.seek(0)
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            said = self.errors.read().strip() or f"its process ended with {how}"
            error = {"message": said, "diverged": code == NotFinite.exit_code, "time": time.time()}
            replace_file(self.error_file, json.dumps(error, indent=1).encode())
        self.errors.close()
        self.claimed.close()


def visible_devices(count: int, named: str | None) -> list[str]:
    """The `count` GPUs of this machine, by their names in CUDA_VISIBLE_DEVICES (`named`) where it is set."""
    return named.split(",")[:count] if named else [str(number) for number in range(count)]


def least_used(devices: Sequence[str], taken: Sequence[str | None]) -> str | None:
    """The first of the devices that occur least often in `taken`; None where there are no devices."""
    return min(devices, key=taken.count, default=None)


class Progress:
    """Which runs are in progress, how many are finished, and how long the rest will take."""

    def __init__(self, folder: StudyFolder, processes: int):
        self.folder, self.processes = folder, processes
        watched = processes > 1 and TERMINAL.is_terminal
        self.live = Live(console=TERMINAL, auto_refresh=False, transient=True) if watched else None
        self.shown_at = time.monotonic()

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()

    def say_start(self, job: Job, running: int) -> None:
        number = self.folder.done + running + 1
        say(f"{job.name}, run {number} of {self.folder.size}{self._time_left({})}", "study")

    def say_end(self, job: Job) -> None:
        """What a run has come to, with a sample of its text, which a single process has printed; or how it failed."""
        if error := self.folder.error(job):  # the last line that is no detail; the end of the study has all lines
            last = next((line for line in reversed(error["message"].splitlines()) if line[:1].strip()), "")
            say(f"{job.name}: {last}", "failed")
        elif self.processes > 1 and self.folder.finished(job):
            say(f"{job.name}: {self.folder.outcome(job)}", "finished")
            for prompt, text in self.folder.result(job).samples[:1]:
                say(" ".join((prompt + text).split()), "sample")

    def show(self, running: list[Job]) -> None:
        """A single process prints its own output; several get a line each, updated in place or printed now and then."""
        if self.processes == 1 or time.monotonic() - self.shown_at < (1 if self.live else 30):
            return
        self.shown_at = time.monotonic()
        lines, begun = [], {}
        for job in running:
            if step := self.folder.newest_step(job):
                begun[job] = step["step"] / step["steps"]
                lines.append(f"{job.name:<24} {brief_line(step)}")
            else:
                lines.append(f"{job.name:<24} starting")
        lines.insert(0, f"{self.folder.done} of {self.folder.size} runs finished{self._time_left(begun)}")
        if self.live:
            self.live.start()
            self.live.update("\n".join(lines), refresh=True)
        else:
            say("; ".join(" ".join(line.split()) for line in lines), "study")

    def _time_left(self, begun: dict[Job, float]) -> str:
        left = self.folder.seconds_left(begun)
        return f", about {clock(left / self.processes)} left" if left and left > 0 else ""
