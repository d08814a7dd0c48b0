"""What a study found, as numbers: what its page (report.py) and its table show, computed once.

Means are over the seeds of an arm, spreads are standard deviations between seeds. Only runs that the study plans count;
trials are kept apart. What a run spent before it reached a loss is interpolated linearly between two points of its
held-out curve, and unknown before the first.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from tandem.comparison.results import Point, Result, require_same_documents, require_same_text
from tandem.comparison.statistics import POWER, Judgement, Sample, holm, judge
from tandem.comparison.study import Study
from tandem.recipe import counted
from tandem.recipe.options import substituted
from tandem.training.display import scaled
from tandem.training.folder import RunFolder, read_part

MOVE_LOSSES = ("tandem", "commit", "plugins", "torch", "numpy", "device", "precision", "cpu", "gpus")
"""Entries of a process's environment that may change losses, if only by rounding, and timings."""
KEEP_APART = (*MOVE_LOSSES, "python", "platform", "cores", "threads")
"""Entries that may change any number. Only these are shown, not paths or commands."""


class Spent(NamedTuple):
    """What a run spent until it reached a loss."""

    tokens: float
    flops: float
    seconds: float


@dataclass(frozen=True)
class Summary:
    """A study and its results; `runs` and `trials` hold an entry for every arm."""

    study: Study
    runs: dict[str, list[Result]]
    """By arm, in the order of the seeds."""
    trials: dict[str, list[Result]]
    diverged: Set[tuple[str, float]]
    """(arm, learning rate) of trials that ended because their loss was not finite: they have no result."""
    ended: Set[tuple[str, int]] = frozenset()
    """(arm, seed) of runs that ended for the same reason."""
    judged: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """The seeds, rates and arms of this study when it was first tested, before these runs or now."""

    @classmethod
    def of(
        cls,
        study: Study,
        results: Sequence[Result],
        diverged: Set[tuple[str, float]] = frozenset(),
        ended: Set[tuple[str, int]] = frozenset(),
        judged: Mapping[str, Sequence[Any]] = {},
    ) -> "Summary":
        """Raises: UserError where runs were scored on different documents, or the text changed between them."""
        order = {seed: place for place, seed in enumerate(study.seeds)}
        runs = {arm: [r for r in results if r.arm == arm and r.seed in order and not r.trial] for arm in study.arms}
        trials = {arm: [r for r in results if r.arm == arm and r.trial] for arm in study.arms}
        for found in runs.values():
            found.sort(key=lambda result: order[result.seed])
        require_same_documents([result for found in runs.values() for result in found])
        require_same_text(result for found in (*trials.values(), *runs.values()) for result in found)
        return cls(study, runs, trials, diverged, ended, judged)

    @property
    def flat(self) -> list[Result]:
        """All runs that are compared."""
        return [result for found in self.runs.values() for result in found]

    @cached_property
    def pays_for_ends(self) -> bool:
        """Whether a network is told where sentences end, which says something about the text to come."""
        return any(result.end_nats.any() for result in self.flat)

    @cached_property
    def judgement(self) -> Judgement:
        return self._judged(lambda result: result.paid_nats)

    @cached_property
    def free_ends(self) -> Judgement:
        """The judgement without the nats of sentence ends."""
        return self._judged(lambda result: result.nats)

    def _judged(self, nats: Callable[[Result], np.ndarray]) -> Judgement:
        by_arm = {arm: {result.seed: nats(result) for result in found} for arm, found in self.runs.items()}
        tokens = self.flat[0].document_tokens if self.flat else np.zeros(0)
        return judge(by_arm, tokens, self.study.baseline, self.study.seeds, self.study.level)

    @cached_property
    def p_within(self) -> dict[str, float]:
        """p-values of tests that arms are within the margin of the baseline, Holm-corrected over the arms."""
        found, margin = self.judgement.to_baseline, self.study.keys.margin
        if not margin or self.judgement.missing:
            return {}
        return dict(zip(found, holm([difference.p_within(margin) for difference in found.values()]), strict=True))

    @property
    def documents(self) -> int:
        return len(self.flat[0].documents) if self.flat else 0

    def sample(self, arm: str, of: Callable[[Result], float]) -> Sample:
        """Mean, spread and number of the values of `of` over an arm's runs; there must be at least one."""
        return Sample.of([of(result) for result in self.runs[arm]])

    # Spent until a loss was reached -------------------------------------------------------------------------------

    @cached_property
    def targets(self) -> list[float]:
        """Losses, highest first: those of the study; else the lowest that every run reaches, and up to two above, where
        no run is there at its first point."""
        if self.study.targets:
            return sorted(self.study.targets, reverse=True)
        curves = [result.curve for result in self.flat if result.curve]
        if not curves:
            return []
        reached = _rounded_up(max(min(point.nats_per_token for point in curve) for curve in curves), 2)
        start = min(curve[0].nats_per_token for curve in curves)
        run = next((r.curve for r in self.runs[self.study.baseline] if r.curve), curves[0])
        tokens, nats = [point.tokens for point in run], [point.nats_per_token for point in run]
        early = (_rounded_up(float(np.interp(share * run[-1].tokens, tokens, nats)), 1) for share in (0.25, 0.5))
        return sorted({loss for loss in (reached, *early) if reached <= loss < start}, reverse=True)

    def spent(self, arm: str, loss: float) -> Spent | str:
        """What an arm's runs spent on average until they reached `loss`; in words, why there is no such mean: one of
        them never did, or was there by its first evaluation.
        """
        found = [spent_until(result.curve, loss) for result in self.runs[arm]]
        reached = [spent for spent in found if spent is not None]
        if len(reached) < len(found) or not found:
            return f"not reached ({len(reached)} of {len(found)} seeds did)" if reached else "not reached"
        if before := sum(math.isnan(spent.tokens) for spent in reached):
            some = f" ({before} of {len(found)} seeds)" if before < len(found) else ""
            return f"before the first evaluation{some}"
        return Spent(*np.mean(reached, 0).tolist())

    # Trials -------------------------------------------------------------------------------------------------------

    def trial_losses(self, arm: str) -> dict[float, float]:
        """Learning rate -> nats per token of the trials so far, sentence ends included where the arm is given them;
        nan where the loss was not finite."""
        made = {trial.lr: trial.paid_per_token for trial in self.trials[arm] if trial.lr in self.study.rates}
        return made | {rate: math.nan for rate in self.study.rates if (arm, rate) in self.diverged}

    # What a reader must know --------------------------------------------------------------------------------------

    @property
    def missing(self) -> list[str]:
        runs = [f"{arm}, seed {seed}" for arm, seed in self.judgement.missing]
        return [
            f"{arm}, trial at {rate:g}"
            for arm in self.study.arms
            for rate in self.study.rates
            if rate not in self.trial_losses(arm)
        ] + runs

    @property
    def _never(self) -> str:
        """Why waiting will not produce some of the missing runs, and what to do."""
        why = ""
        for arm in self.study.arms:
            losses = self.trial_losses(arm)
            if losses and len(losses) == len(self.study.rates) and best_rate(losses) is None:
                why += (
                    f" {arm} has no run, as its loss was finite at none of the rates: add lower ones, or drop the arm."
                )
            if seeds := [str(seed) for seed in self.study.seeds if (arm, seed) in self.ended]:
                why += (
                    f" {arm}, seed {', '.join(seeds)}, broke off with a loss that is not finite: drop the arm or seed."
                )
        return f"{why} A study without it takes another --studies folder; copy runs/ there." if why else ""

    @cached_property
    def environments(self) -> dict[str, list[str]]:
        """Entry of the environment that may change numbers -> every value that it had in some run."""
        return _environments(self.flat)

    @property
    def warnings(self) -> list[str]:
        found = []
        for arm in self.study.arms:
            losses = self.trial_losses(arm)
            best = best_rate(losses)
            if len(losses) > 1 and best in (min(self.study.rates), max(self.study.rates)):
                side = "lower" if best == min(self.study.rates) else "higher"
                found.append(f"{arm} did best at {best:g}, the edge of the learning rates tried: try {side} ones, too.")
        for key, values in self.environments.items():
            if len(values) > 1:
                moved = "That alone may change their losses and" if key in MOVE_LOSSES else "Do not compare"
                found.append(f"Runs differ in {key}: {'; '.join(values)}. {moved} their seconds.")
        tried = _environments(result for trials in self.trials.values() for result in trials)
        for key in MOVE_LOSSES:
            if len(tried[key]) > 1:
                taken = "The learning rates that arms took may depend on it."
                found.append(f"Trials differ in {key}: {'; '.join(tried[key])}. {taken}")
        if added := [key for key, before in self.judged.items() if before and {*before} < {*getattr(self.study, key)}]:
            there = (f"{key} {', '.join(map(str, self.judged[key]))}" for key in dict.fromkeys(["seeds", *added]))
            told = f"Judged before with {' and '.join(there)}; {' and '.join(added)} added after a look name a winner"
            found.append(f"{told} more often than the level says: start a new study with none of these seeds.")
        found += _of_starts(self.study)
        if any(entry.get("dirty") for result in self.flat for entry in result.environment):
            found.append("Some runs were made with uncommitted code (a dirty tree).")
        if broken := [f"{r.arm}, seed {r.seed}" for r in self.flat if not np.isfinite(r.nats).all()]:
            found.append(f"Not finite: the likelihood of {'; '.join(broken)}.")
        if notes := [f"{r.arm}, seed {r.seed}, after {r.note}" for r in self.flat if r.note]:
            found.append(f"Scored one token at a time, though not a language model yet: {'; '.join(notes)}.")
        for lost in dict.fromkeys(r.lost for r in self.flat if r.lost):
            found.append(f"Bits per byte count text as predicted that is not read: {lost}.")
        curves = ((r, [(point.nats_per_token, point.step) for point in r.curve]) for r in self.flat if r.curve)
        ends = [(f"{r.arm}, seed {r.seed}", *min(curve), curve[-1][0]) for r, curve in curves]
        if past := [
            f"{run} ({fixed(low)} after {step:,} steps, then {fixed(end)})" for run, low, step, end in ends if low < end
        ]:
            found.append(f"Lower before the end than at it, on the curve: {'; '.join(past)}.")
        return found

    # The verdict --------------------------------------------------------------------------------------------------

    @property
    def verdict(self) -> tuple[str, str]:
        """A headline, and the reason for it."""
        judged, level = self.judgement, self.study.level
        if not self.flat:
            return "No result yet", f"No run of the study is finished.{self._never}"
        if judged.missing:
            done = f"{len(self.flat)} of {len(self.study.seeds) * len(self.study.arms)} runs are finished"
            return (
                "No verdict yet",
                f"{done}. A winner is named when all are: repeated looks would find one by chance.{self._never}",
            )
        rival = max(
            judged.to_best, key=lambda arm: (np.nan_to_num(judged.p_to_best[arm], nan=2), judged.to_best[arm].mean)
        )
        difference = judged.to_best[rival]
        by = f"{fixed(-difference.mean)} nats per token"
        over = f"over {counted(difference.seeds, 'seeds')} and {counted(self.documents, 'held-out documents')}"
        if difference.is_nothing:
            return "No winner", f"{judged.best} and {rival} are equal on every document, {over}."
        bounds, confidence = difference.interval(level), f"{100 * (1 - level):g} % interval"
        low, high = (fixed(-bound) for bound in reversed(bounds))
        closest = ", which it is least certain to beat" if len(judged.to_best) > 1 else ""
        if judged.winner:
            others = f"every other arm; against {rival}{closest}" if closest else rival
            p = chance(judged.p_to_best[rival], level)
            margin = self.study.keys.margin
            small = (
                f" Less than {margin:g} was called too small to matter." if margin and -difference.mean < margin else ""
            )
            return f"{judged.best} wins", (
                f"It is better than {others}, by {by} ({confidence} {low} to {high}; p {p}), {over}.{small}"
            )
        if len(self.study.seeds) == 1 and math.isfinite(sum(bounds)):
            return "No winner: one seed", (
                f"These two networks differ by {by} on such documents ({judged.best} lower than {rival}; {confidence} "
                f"over documents alone {low} to {high}). What other seeds would give cannot be known from one; "
                "give every arm at least two."
            )
        if not difference.is_testable:
            return "No winner", f"{judged.best} and {rival} cannot be told apart: too few documents, or not finite."
        needed = difference.seeds_needed(level)
        more = (
            f"A new study of roughly {needed} seeds, none of these, would detect a difference of this size with "
            f"probability {POWER:g}."
            if needed
            else "More seeds alone would hardly show a difference this small; more held-out documents might."
        )
        return "No winner", (
            f"{judged.best} is lowest, {by} below {rival}{closest}, but other seeds and documents alone could make "
            f"such a difference (p {chance(judged.p_to_best[rival], level)}, {over}). {more}"
        )

    @property
    def test(self) -> str:
        """The test, in words."""
        arms = len(self.judgement.p_to_baseline)
        rates = " It takes the learning rates as given, which one trial of each chose." if self.study.rates else ""
        holm = f"; a winner is told from every other arm by it; p in the table is corrected over {arms} arms (Holm)"
        return (
            "Two-sided test of the difference in nats per token, paired by seed and document, against the sum of two "
            "Student variables, one for the variation over seeds and one for that over documents, "
            f"at level {self.study.level:g}{holm if arms > 1 else ''}.{rates}"
        )


def best_rate(losses: Mapping[float, float]) -> float | None:
    """The learning rate with the lowest finite loss, of equal ones the lowest; None where no loss is finite."""
    finite = [rate for rate in losses if math.isfinite(losses[rate])]
    return min(finite, key=lambda rate: (losses[rate], rate), default=None)


def spent_until(curve: Sequence[Point], loss: float) -> Spent | None:
    """What was spent when the held-out curve first reached `loss`; nan if by its first point, None if never."""
    if curve and curve[0].nats_per_token <= loss:
        return Spent(math.nan, math.nan, math.nan)
    for before, after in pairwise(curve):
        if after.nats_per_token <= loss:
            share = (before.nats_per_token - loss) / (before.nats_per_token - after.nats_per_token)
            ends = zip(before[1:4], after[1:4], strict=True)
            return Spent(*(start + share * (end - start) for start, end in ends))
    return None


def mean_curve(curves: Sequence[Sequence[Point]], x: Callable[[Point], float]) -> list[tuple[float, float]]:
    """(x, nats per token), the mean over the curves of an arm's runs, within the range that all of them cover.

    Taken at the steps of the shortest curve, where all of them have these. Runs that end by the clock have different
    steps, so their curves are interpolated at the points of the shortest.
    """
    shortest = min(curves, key=len, default=[])
    by_step = [{point.step: point for point in curve} for curve in curves]
    if all(point.step in points for point in shortest for points in by_step):
        at_steps = ([points[point.step] for points in by_step] for point in shortest)
        return [(fmean(map(x, at)), fmean(point.nats_per_token for point in at)) for at in at_steps]
    lines = [np.array([(math.log(x(point)), point.nats_per_token) for point in curve]).T for curve in curves]
    first, last = max(places[0] for places, _ in lines), min(places[-1] for places, _ in lines)
    if first > last:
        return []
    shared = np.unique(np.clip([math.log(x(point)) for point in shortest], first, last))
    means = np.mean([np.interp(shared, *line) for line in lines], 0)
    return list(zip(np.exp(shared).tolist(), means.tolist(), strict=True))


def non_embedding(parameters: Mapping[str, int]) -> int:
    """Number of parameters without the embedding table and the head."""
    return sum(count for role, count in parameters.items() if role not in ("embedding", "head"))


# Numbers as they are printed ----------------------------------------------------------------------------------------


def fixed(number: float) -> str:
    """With four decimals, or two digits where these would all be 0."""
    return f"{number:{'z.4f' if _has_decimals(number) else '.1e'}}".replace("-", "\N{MINUS SIGN}")


def signed(number: float) -> str:
    return f"{number:{'+.4f' if _has_decimals(number) else '+.1e'}}".replace("-", "\N{MINUS SIGN}")


def _has_decimals(number: float) -> bool:
    return number == 0 or abs(number) >= 5e-5


def chance(p: float, level: float) -> str:
    """A probability, formatted to follow the letter p, with as many digits as show on which side of the level it is."""
    if p < 1e-4:
        return "< 0.0001"
    shown = (f"{p:.3g}" if p < 0.095 else f"{p:.2f}", *(f"{p:.{digits}g}" for digits in range(4, 18)))
    return "= " + next(text for text in shown if (float(text) <= level) == (p <= level))


def _of_starts(study: Study) -> Iterable[str]:
    """What a reader must know about arms that start from the weights of other runs."""
    starts = study.starts
    if starts and (len(starts) < len(study.arms) or len(set(starts.values())) > 1):
        told = (f"{arm} from {run.name} ({_spent_before(RunFolder(run))})" for arm, run in starts.items())
        alike = "What that run spent is not counted here, so arms were not trained alike."
        yield f"Start from a run: {'; '.join(told)}. {alike}"
    if starts and len(study.seeds) > 1:
        yield (
            f"Seeds of {', '.join(starts)} share the weights that they start from, so they differ less than runs from "
            "scratch would."
        )


def _spent_before(run: RunFolder) -> str:
    """What a run had spent in training, as far as its folder, read now, records it."""
    if not run.result.is_file():
        return "no result of it is found, so what it had spent is unknown"
    result = read_part(run.result, tokens=int, flops=int | float)
    spent = f"{scaled(result['tokens'])} tokens, {result['flops']:.3g} FLOP"
    recipe = read_part(run.recipe) if run.recipe.is_file() else {}
    before = substituted(recipe.get("start", {}).get("run") or "")
    return f"{spent}, after {Path(before).name}: {_spent_before(RunFolder(Path(before)))}" if before else spent


def _environments(results: Iterable[Result]) -> dict[str, list[str]]:
    entries = [entry for result in results for entry in result.environment]
    said = {key: [_shown(entry[key]) for entry in entries if key in entry] for key in KEEP_APART}
    return {key: list(dict.fromkeys(values)) or ["unknown"] for key, values in said.items()}


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "unknown" if value is None else str(value)


def _rounded_up(number: float, digits: int) -> float:
    return math.ceil(number * 10**digits) / 10**digits
