"""The folder of a study: what has been done so far, read from the folders of its runs.

    studies/shapes/
        study.yaml                  all that decides results
        runs/deep-lr0.002/          a trial        } folders of runs, as `tandem train` makes them
        runs/deep-lr0.002-seed1/    a run          }
        processes/                  by run: its lock, its recipe, what its process printed, why it failed
        judged.json                 the seeds, rates and arms that were first tested
        results.jsonl               one line a finished run
        table.txt, report.html

Apart from study.yaml and judged.json, the runs are the only record: all else is rebuilt from them.
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tandem.comparison.pretrain import prepared
from tandem.comparison.report import write_report
from tandem.comparison.results import Result, read_result
from tandem.comparison.study import Job, Study
from tandem.comparison.summary import Summary, best_rate
from tandem.disk import locked, made, replace_file
from tandem.recipe import Recipe, UserError
from tandem.recipe.catalogue import columns
from tandem.training.display import budget_in_words, clock
from tandem.training.folder import MAY_DIFFER, RunFolder, read_part
from tandem.training.run import Run
from tandem.training.sinks import as_line

FREE = ("title", "question", "margin", "together")
"""Keys of a study that do not affect its results; `together` does, but through the budget of a run alone."""
GROWING = ("seeds", "rates", "targets")
"""Keys of a study whose lists may grow."""


class StudyFolder:
    """What a study has done so far, read from its folder."""

    def __init__(self, study: Study, path: Path, trunk: "StudyFolder | None" = None):
        """`trunk`: the same study at a longer budget."""
        self.study, self.path, self.runs, self.processes = study, path, path / "runs", path / "processes"
        self.trunk = trunk
        self.judged = path / "judged.json"
        self._results: dict[Job, Result] = {}

    def open(self) -> None:
        """Creates the folder, or checks that it holds this study. Raises: UserError where it holds another one."""
        for folder in (self.path, self.runs, self.processes):
            made(folder, "a study")
        with self._alone():
            self.require_same_study()
            replace_file(self.path / "study.yaml", self.study.to_yaml().encode())

    def require_same_study(self) -> None:
        """Further arms, seeds, rates and targets change no existing run. Raises: UserError naming other differences."""
        if not (file := self.path / "study.yaml").exists():
            return

        def entries(study: dict[str, Any]) -> dict[str, Any]:
            arms = study.pop("arms")
            return study | {f"arms.{arm}": changes for arm, changes in arms.items()}

        held, wanted = entries(read_part(file, arms=dict)), entries(yaml.safe_load(self.study.to_yaml()))
        lines = []
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
                shared = key == "budget" and wanted["together"]
                cure = f"; write `budget: {value}` in place of together, which every run shares" if shared else ""
                lines.append(f"  {key}: {value} there, {new} asked{cure}")
        if lines:
            reason = "holds another study, to which only arms, seeds, rates and targets may be added; "
            raise UserError("\n".join([f"{self.path}: {reason}use another --studies folder. It differs in", *lines]))

    def _alone(self):
        """While this lock is held, no other command writes the files that all runs share."""
        return locked(self.processes / "study.lock")

    def finished(self, job: Job) -> bool:
        return RunFolder(self.runs / job.name).result.exists()

    def error(self, job: Job) -> dict[str, Any] | None:
        """Why and when the last attempt at an unfinished run failed."""
        file = self.processes / f"{job.name}.error.json"
        return read_part(file) if file.exists() and not self.finished(job) else None

    def recipe(self, job: Job) -> Recipe:
        """As the study has it, begun with the steps of the trunk's run where that is finished."""
        begun = self.trunk if self.trunk and self.trunk.finished(job) else None
        return self.study.recipe(job, begun.runs / job.name if begun else None)

    def settled(self, job: Job) -> bool:
        """Finished, or a trial that diverged: a rate at which the loss is not finite cannot be the best."""
        error = self.error(job)
        return self.finished(job) or (job.trial and error is not None and error["diverged"])

    def waits_for(self, job: Job) -> Path | None:
        """The run in this study's folder from whose weights or steps it starts, as long as that is not finished."""
        start = self.study.recipes[job.arm].start
        here = (run for run in (start.run, start.trunk) if run and run.resolve().parent == self.runs.resolve())
        return next((run for run in here if not RunFolder(run).result.exists()), None)

    def result(self, job: Job) -> Result:
        if job not in self._results:
            lr = job.rate or self.study.recipes[job.arm].optimiser.lr
            self._results[job] = read_result(self.runs / job.name, job.arm, job.seed, lr, job.trial)
        return self._results[job]

    def chosen(self) -> dict[str, float | None]:
        """The best learning rate of each arm whose trials are all settled; None: that of its recipe.

        Best by nats, those of sentence ends included where the arm is given them: no choice depends on another arm.
        """
        if not self.study.rates:
            return dict.fromkeys(self.study.layers)
        trials = self.study.trials()
        waiting = {job.arm for job in trials if not self.settled(job)}
        losses: dict[str, dict[float, float]] = {}
        for job in filter(self.finished, trials):
            if job.arm not in waiting and job.rate is not None:
                losses.setdefault(job.arm, {})[job.rate] = self.result(job).paid_per_token
        return {arm: rate for arm, tried in losses.items() if (rate := best_rate(tried)) is not None}

    def unchosen(self) -> dict[str, str]:
        """By arm, why no learning rate is chosen for it."""
        tried, none = "not all of its trials are finished", "the loss is finite at none of its rates"
        waiting, chosen = {job.arm for job in self.study.trials() if not self.settled(job)}, self.chosen()
        return {arm: tried if arm in waiting else none for arm in self.study.layers if arm not in chosen}

    @property
    def size(self) -> int:
        """Number of runs in the whole study, trials included."""
        return len(self.study.layers) * (len(self.study.seeds) + len(self.study.rates))

    @property
    def done(self) -> int:
        """Number of runs that are settled."""
        return sum(map(self.settled, self.jobs()))

    def newest_step(self, job: Job) -> dict[str, Any] | None:
        """The newest step record of a run; None where there is none."""
        return next(reversed(RunFolder(self.runs / job.name).records("step")), None)

    def seconds_left(self, begun: Mapping[Job, float]) -> float | None:
        """Time left, one run after another, estimated from finished runs of the same arm, or else of any arm.

        `begun`: runs in progress, with the fraction of each that is done. None where no run is finished yet.
        """
        took: dict[str, list[float]] = {arm: [] for arm in self.study.layers}
        for job in filter(self.finished, self.jobs()):
            result = self.result(job)
            trained = result.training_seconds * (1 - self.taken_over(job))
            took[job.arm].append((trained + result.evaluation_seconds) / self.study.part(job))
        known = [seconds for arm in took.values() for seconds in arm]
        if not known:
            return None
        mean = {arm: sum(times or known) / len(times or known) for arm, times in took.items()}
        settled = Counter((job.arm, job.trial) for job in self.jobs() if self.settled(job))
        planned = (False, len(self.study.seeds), 1.0), (True, len(self.study.rates), self.study.keys.trial_share)
        left = sum(mean[arm] * part * (n - settled[arm, trial]) for arm in mean for trial, n, part in planned)
        own = {job: (share - (taken := self.taken_over(job))) / (1 - taken) for job, share in begun.items()}
        return left - sum(mean[job.arm] * self.study.part(job) * share for job, share in own.items())

    def taken_over(self, job: Job) -> float:
        """The fraction of a run's steps that it took over from its trunk."""
        folder = RunFolder(self.runs / job.name)
        entries = read_part(folder.environment, list) if folder.environment.exists() else []
        step = max((entry.get("trunk_step", 0) for entry in entries), default=0)
        return step / folder.steps if step and folder.steps else 0.0

    def jobs(self) -> list[Job]:
        """All jobs known so far, in the order in which they run."""
        return [*self.study.trials(), *self.study.runs(self.chosen())]

    def results(self) -> list[Result]:
        return [self.result(job) for job in self.jobs() if self.finished(job)]

    def summary(self) -> Summary:
        """Raises: UserError where runs were scored on different documents."""
        trials = self.study.trials()
        diverged = {(job.arm, job.rate) for job in trials if job.rate and self.settled(job) and not self.finished(job)}
        errors = {job: self.error(job) for job in self.study.runs(self.chosen())}
        ended = {(job.arm, job.seed) for job, error in errors.items() if error and error["diverged"]}
        judged = read_part(self.judged, seeds=list) if self.judged.exists() else {}
        return Summary.of(self.study, self.results(), diverged, ended, judged)

    def write(self) -> Path:
        """Writes results.jsonl, table and report of the finished runs; returns the path of the report.

        Raises: UserError where another command has added to the study meanwhile: its report has more.
        """
        with self._alone():
            self.require_same_study()
            summary = self.summary()  # under the lock, or an older report could replace a newer one
            if summary.judgement.is_test and not self.judged.exists():
                looked = {key: [*getattr(self.study, key)] for key in ("seeds", "rates", "arms")}
                replace_file(self.judged, json.dumps(looked).encode())
            replace_file(self.path / "results.jsonl", b"".join(as_line(r.as_numbers()) for r in self.results()))
            return write_report(summary, self.path)

    def missing(self) -> list[str]:
        """The reasons why results are missing, one line each."""
        lines = []
        for job in (job for job in self.jobs() if not self.settled(job)):
            if error := self.error(job):
                lines.append(f"{job.name}: {error['message']}")
            elif run := self.waits_for(job):
                key = "start.run" if run == self.study.starts.get(job.arm) else "start.trunk"
                lines.append(f"{job.name}: {key} = {run}: is not finished, or no run of this study")
        return [*lines, *(f"{arm}: no learning rate is chosen, for {why}" for arm, why in self.unchosen().items())]

    def outcome(self, job: Job) -> str:
        """The result of a finished run in a line, sentence ends paid for as in the report."""
        result = self.result(job)
        took = clock(result.training_seconds + result.evaluation_seconds)
        return f"{result.paid_per_token:.4f} nats/token, {result.flops:.3g} FLOP, {took}"

    def status(self) -> str:
        """What is done, what is missing, and what it will cost. Raises: UserError where this is another study's."""
        self.require_same_study()
        rows: list[tuple[str, str]] = []
        for job in self.jobs():
            if self.finished(job):
                state = f"finished: {self.outcome(job)}"
            elif error := self.error(job):
                state = f"failed: {error['message']}"
            elif step := self.newest_step(job):
                state = f"begun: step {step['step']} of {step['steps']}"
            else:
                state = f"missing, waits for {run.name}" if (run := self.waits_for(job)) else "missing"
            rows.append((job.name, state))
        later = self.unchosen().items()
        rows += [(f"{arm}-lr...-seed{seed}", f"missing, for {why}") for seed in self.study.seeds for arm, why in later]
        missing, left = self.size - self.done, self.seconds_left({})
        cost = f"{missing} of {self.size} runs, {budget_in_words(str(self.study.budget))} each"
        if self.study.rates and self.study.keys.trial_share < 1:
            cost += f", trials {self.study.keys.trial_share:.0%} of it"
        if missing and self.study.budget.unit not in ("flops", "seconds"):
            cost += f" ({', '.join(f'{arm} {self._price(arm)}' for arm in self.study.layers)})"
        rows.append(("missing", cost + (f", about {clock(left)} one after another" if left else "")))
        return columns(rows)

    def _price(self, arm: str) -> str:
        """The cost of one run of an arm, in words."""
        recipe = self.study.recipes[arm]
        try:
            run = Run(recipe, prepared(recipe), weights=False)
            taken = run.flops(self._shared(run))
        except UserError as error:
            return str(error)
        return f"{run.flops(run.steps) - taken:.3g} FLOP{' beyond those of its trunk' if taken else ''}"

    def _shared(self, run: Run) -> int:
        """The first steps of a run that are its trunk's."""
        trunk = self.trunk and run.paid(self.trunk.study.budget)
        return min(run.shared(run.recipe, trunk), run.steps - 1) if trunk else 0
