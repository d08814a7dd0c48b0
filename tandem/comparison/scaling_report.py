"""What the cells of a grid show together: scaling laws and lines, multipliers, the frontier, as a page and as text.

    studies/<grid>/
        <size>-<budget>/                 a study each
        scaling.json                     every run, every fit with its interval
        scaling.txt, scaling.html

A line is fitted where a method has runs at three values of what varies. A law takes six cells, three sizes, three
numbers of tokens, and a size with two of these. Values less than 5 % apart count as one. Readings at equal FLOPs, data
and loss (readings.py) need two budgets of the baseline at a size. Anything that lacks its runs is left out, and named:
readings use the seeds that both arms have, multipliers wait for all runs of both arms, and an arm with a loss that is
not finite is left out of that cell. Tokens are tokens of text; parameters exclude the embedding table and the head.
"""

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tandem.comparison import charts
from tandem.comparison.page import html_table, rendered, side_by_side
from tandem.comparison.readings import Multiple, readings
from tandem.comparison.results import Result, require_same_documents
from tandem.comparison.scaling import Fitted, Interval, Law, Line, Measured, fitted, frontier, interval
from tandem.comparison.study import Study
from tandem.comparison.summary import fixed, non_embedding, signed
from tandem.comparison.table import NONE, PAID
from tandem.disk import replace_file
from tandem.recipe.catalogue import columns
from tandem.training.display import budget_in_words, scaled

AXES = {"tokens": "size", "parameters": "budget"}
"""What varies along a line, and what stays fixed on it."""


class Cell(NamedTuple):
    """Finished runs at one size and budget, and their study."""

    size: str
    budget: str
    results: list[Result]
    study: Study


class Run(NamedTuple):
    size: str
    budget: str
    seed: int
    measured: Measured


@dataclass(frozen=True)
class Scaling:
    """Runs by arm, all fits that they allow, and multipliers against the baseline."""

    study: Study
    """That of the first cell."""
    runs: dict[str, list[Run]]
    """By arm, over all cells; those of a cell only if all are finite."""
    pays_for_ends: bool
    """Whether an arm is told where sentences end; losses include the nats of these ends."""
    warnings: list[str]
    """Runs that are missing or not finite."""
    lacking: set[str]
    """Arms of such runs: fits to unlike seeds or cells are not compared."""
    laws: dict[str, Fitted]
    lines: dict[tuple[str, str], dict[str, Fitted]]
    """By axis and the value of what stays fixed, then by arm."""

    @classmethod
    def of(cls, cells: Sequence[Cell]) -> "Scaling":
        """Raises: UserError where runs were scored on different documents."""
        results = [result for cell in cells for result in cell.results if not result.trial]
        level = cells[0].study.level
        require_same_documents(results)
        runs: dict[str, list[Run]] = {arm: [] for cell in cells for arm in cell.study.arms}
        missing, broken, lacking = [], [], set[str]()
        for cell in cells:
            for arm in cell.study.arms:
                own = [result for result in cell.results if result.arm == arm and not result.trial]
                where, seeds = f"{arm}, {cell.size}, {budget_in_words(cell.budget)}", {result.seed for result in own}
                absent = [f"{where}, seed {seed}" for seed in cell.study.seeds if seed not in seeds]
                odd = [f"{where}, seed {r.seed}" for r in own if not math.isfinite(r.paid_per_token)]
                missing, broken = missing + absent, broken + odd
                lacking |= {arm} if absent or odd else set()
                if not odd:
                    runs[arm] += [Run(cell.size, cell.budget, result.seed, _measured(result)) for result in own]
        warnings = [f"Missing: {'; '.join(missing)}."] if missing else []
        if broken:
            warnings.append(f"Not finite: the likelihood of {'; '.join(broken)}. The arm is left out there.")
        if any("trunk" in process for result in results for process in result.environment):
            warnings.append("Runs of equal size, arm, rate and seed share steps (grid.trunk): their losses err alike.")
        laws, lines = _fits(runs, Law.to, _tells_law, level), {}
        for axis, same in AXES.items():
            for value in dict.fromkeys(getattr(run, same) for own in runs.values() for run in own):
                of = {arm: [run for run in own if getattr(run, same) == value] for arm, own in runs.items()}
                if found := _fits(of, Line.along(axis), functools.partial(_tells_line, axis), level):
                    lines[axis, value] = found
        pays_for_ends = any(result.end_nats.any() for result in results)
        return cls(cells[0].study, runs, pays_for_ends, warnings, lacking, laws, lines)

    def cells(self, arm: str) -> dict[tuple[str, str], dict[int, Measured]]:
        """By size and budget, an arm's runs by seed."""
        cells: dict[tuple[str, str], dict[int, Measured]] = {}
        for run in self.runs[arm]:
            cells.setdefault((run.size, run.budget), {})[run.seed] = run.measured
        return cells

    def means(self, arm: str) -> dict[tuple[str, str], Measured]:
        """By size and budget, means over the seeds of an arm."""
        return {cell: _mean(of.values()) for cell, of in self.cells(arm).items()}

    @functools.cached_property
    def readings(self) -> list[dict[str, Any]]:
        """For each cell of every arm but the baseline, the three readings against the baseline's runs at its size: of
        the means over the seeds that all these cells have, and by seed.

        Only where the baseline has two or more budgets.
        """
        records, baseline = [], self.cells(self.study.baseline)
        for arm in (arm for arm in self.runs if arm != self.study.baseline):
            for (size, budget), own in self.cells(arm).items():
                lengths = [runs for (other, _), runs in baseline.items() if other == size]
                seeds = [seed for seed in own if all(seed in runs for runs in lengths)]
                if len(lengths) < 2 or not seeds:
                    continue
                mean = readings(_mean(own[s] for s in seeds), [_mean(runs[s] for s in seeds) for runs in lengths])
                by_seed = [readings(own[s], [runs[s] for runs in lengths])._asdict() for s in seeds]
                record = {"arm": arm, "size": size, "budget": budget, **mean._asdict()}
                records.append(record | {"by_seed": dict(zip(map(str, seeds), by_seed, strict=True))})
        return records

    def multipliers(self, axis: str) -> list[dict[str, Any]]:
        """For each cell of every arm but the baseline: how much more of `axis` the baseline needs for the same loss.

        From the lines of both along it, from the measured loss and the baseline's line, and from the laws of both; None
        where these are missing. What lies beyond the baseline's runs has no interval: a line may not hold there.
        """
        found, level, baseline = [], self.study.level, self.study.baseline
        for arm in (arm for arm in self.runs if arm != baseline and not self.lacking & {arm, baseline}):
            for (size, budget), cell in self.means(arm).items():
                x, same = getattr(cell, axis), size if AXES[axis] == "size" else budget
                lines = self.lines.get((axis, same), {})
                record: dict[str, Any] = {"arm": arm, "size": size, "budget": budget}
                record["lines"] = _ratio(lines, baseline, arm, lambda b, a, x=x: b.multiplier(a.at(x), x), level)
                if record["lines"] and not self._has(baseline, axis, same, record["lines"].value * x):
                    record["lines"] = record["lines"].value
                record["measured"] = lines[baseline].fit.multiplier(cell.nats, x) if baseline in lines else None
                more = functools.partial(_more_by_law, cell, axis)
                record["laws"] = _ratio(self.laws, baseline, arm, more, level)
                found.append(record)
        return found

    def _has(self, arm: str, axis: str, same: str, x: float) -> bool:
        """Whether an arm's runs along `axis`, at the size or budget `same`, reach from below x to above it."""
        xs = [getattr(run.measured, axis) for run in self.runs[arm] if getattr(run, AXES[axis]) == same]
        return min(xs) <= x <= max(xs)


def _measured(result: Result) -> Measured:
    return Measured(
        parameters=float(non_embedding(result.parameters)),
        tokens=float(result.tokens),
        flops=result.flops,
        nats=result.paid_per_token,
        steps=result.steps,
        seconds=result.training_seconds,
        positions=result.positions,
    )


def _mean(runs: Iterable[Measured]) -> Measured:
    return Measured(*np.mean([*runs], 0).tolist())


def _more_by_law(cell: Measured, axis: str, base: Law, own: Law) -> float:
    nats = float(own.loss([cell])[0])
    if axis == "tokens":
        return base.tokens(nats, cell.parameters) / cell.tokens
    return base.size(nats, cell.tokens) / cell.parameters


def _ratio(
    fits: Mapping[str, Fitted], baseline: str, arm: str, number: Callable[[Any, Any], float], level: float
) -> Interval | None:
    """A number computed from two fits, with its interval over their paired draws."""
    if baseline not in fits or arm not in fits:
        return None
    base, own = fits[baseline], fits[arm]
    draws = [number(b, a) for b, a in zip(base.draws, own.draws, strict=True)]
    return interval(number(base.fit, own.fit), draws, level)


def _fits(
    runs: Mapping[str, list[Run]],
    fit: Callable[..., Any],
    tells: Callable[[list[Run]], bool],
    level: float,
) -> dict[str, Fitted]:
    told = {arm: own for arm, own in runs.items() if tells(own)}
    cells = {arm: [(run.size, run.budget) for run in own] for arm, own in told.items()}
    return fitted({arm: [run.measured for run in own] for arm, own in told.items()}, fit, level, cells=cells)


def _values(runs: Sequence[Run], axis: str) -> int:
    """Number of values, of which each is 5 % above the last: seeds that share a budget in seconds differ by less."""
    found = [0.0]
    for value in sorted(getattr(run.measured, axis) for run in runs):
        found += [value] if value >= 1.05 * found[-1] else []
    return len(found) - 1


def _tells_line(axis: str, runs: list[Run]) -> bool:
    """Whether `axis` varies and the other stays fixed: with budgets in FLOPs, larger networks read less data."""
    (other,) = AXES.keys() - {axis}
    return _values(runs, axis) > 2 and _values(runs, other) == 1


def _tells_law(runs: list[Run]) -> bool:
    """Whether both vary, and not only together: one budget in FLOPs or seconds gives every size its own tokens. A law
    goes through five cells, of any number of seeds, and leaves no residual: its interval would have no width."""
    alike = ([other for other in runs if other.size == run.size] for run in runs)
    return (
        min(_values(runs, "parameters"), _values(runs, "tokens")) > 2
        and len({(run.size, run.budget) for run in runs}) > 5
        and any(_values(same, "tokens") > 1 for same in alike)
    )


def write_scaling(cells: Sequence[Cell], folder: Path) -> tuple[Path, str]:
    """Writes scaling.json, .txt and .html into `folder`; returns the path of the page, and the text."""
    scaling = Scaling.of(cells)
    tables = {title: rows for title, rows in _tables(scaling).items() if len(rows) > 1}
    told = [scaling.study.title, *scaling.warnings, *_notes(scaling), *([PAID] if scaling.pays_for_ends else [])]
    text = "\n\n".join([*told, *(f"{title}\n{columns(rows, right=True)}" for title, rows in tables.items())]) + "\n"
    replace_file(folder / "scaling.json", json.dumps(_record(scaling), indent=1).encode())
    replace_file(folder / "scaling.txt", text.encode())
    page = folder / "scaling.html"
    replace_file(page, _page(scaling, tables).encode())
    return page, text


def _record(scaling: Scaling) -> dict[str, Any]:
    level = scaling.study.level
    return {
        "pays_for_ends": scaling.pays_for_ends,
        "warnings": scaling.warnings,
        "runs": [
            {"arm": arm, "size": run.size, "budget": run.budget, "seed": run.seed, **run.measured._asdict()}
            for arm, own in scaling.runs.items()
            for run in own
        ],
        "laws": {arm: _numbers(fit, level) for arm, fit in scaling.laws.items()},
        "lines": [
            {"along": axis, "at": value, "arm": arm, **_numbers(fit, level)}
            for (axis, value), lines in scaling.lines.items()
            for arm, fit in lines.items()
        ],
        "readings": scaling.readings,
        "multipliers": {axis: scaling.multipliers(axis) for axis in AXES},  # Infinity: no amount would do
    }


def _numbers(fit: Fitted, level: float) -> dict[str, Interval]:
    names = [name for name, value in asdict(fit.fit).items() if isinstance(value, float)]
    return {name: fit.interval(lambda of, name=name: getattr(of, name), level) for name in names}


# Tables and page ----------------------------------------------------------------------------------------------------


def _tables(scaling: Scaling) -> dict[str, list[list[str]]]:
    """Tables by title; the first row is the header."""
    level, baseline = scaling.study.level, scaling.study.baseline
    budgets = list(dict.fromkeys(run.budget for own in scaling.runs.values() for run in own))
    sizes = list(dict.fromkeys(run.size for own in scaling.runs.values() for run in own))
    losses = [["arm, size", "parameters", *map(budget_in_words, budgets)]]
    for size in sizes:
        for arm in scaling.runs:
            of = {budget: mean for (other, budget), mean in scaling.means(arm).items() if other == size}
            if of:
                cells = [fixed(of[budget].nats) if budget in of else NONE for budget in budgets]
                losses.append([f"{arm}, {size}", scaled(next(iter(of.values())).parameters), *cells])
    laws = [["arm", "E", "A", "alpha", "B", "beta"]]
    laws += [[arm, *map(_shown, _numbers(fit, level).values())] for arm, fit in scaling.laws.items()]
    lines = [["arm", "along", "at", "exponent"]]
    for (axis, value), by_arm in scaling.lines.items():
        lines += [[arm, axis, _at(axis, value), _shown(_numbers(fit, level)["b"])] for arm, fit in by_arm.items()]
    read = [["arm", "size", "budget", "at equal FLOPs", "at equal data", "steps", "FLOPs", "time"]]
    for found in scaling.readings:
        seeds = [*found["by_seed"].values()]
        cells = [_read(number, [of_seed[key] for of_seed in seeds]) for key, number in found.items() if key in seeds[0]]
        read.append([found["arm"], found["size"], budget_in_words(found["budget"]), *cells])
    against = f"Nats per token less those of {baseline}, and what {baseline} needs for the same loss, as a multiple"
    tables = {"Nats per token": losses, against: read}
    tables |= {"L = E + A N^-alpha + B D^-beta": laws, "L = a x^-b": lines}
    for axis, what in (("tokens", "data"), ("parameters", "parameters")):
        rows = [["arm", "size", "budget", "from lines", "from measured losses", "from laws"]]
        for found in scaling.multipliers(axis):
            cells = [found["lines"], found["measured"], found["laws"]]
            if any(cell is not None for cell in cells):
                rows.append([found["arm"], found["size"], budget_in_words(found["budget"]), *map(_shown, cells)])
        tables[f"Effective {what}, as a multiple of what {baseline} needs for the same loss"] = rows
    return tables


def _at(axis: str, value: str) -> str:
    """What stays fixed along `axis`, as people read it."""
    return value if AXES[axis] == "size" else budget_in_words(value)


def _shown(number: Interval | float | None) -> str:
    if isinstance(number, Interval):
        return f"{number.value:.4g} ({number.low:.4g} to {number.high:.4g})"
    return NONE if number is None else f"{number:.4g}"


def _read(mean: Multiple | float | None, by_seed: Sequence[Multiple | float | None]) -> str:
    """A reading of means and, of several seeds, the lowest and the highest."""

    def shown(number: Multiple | float | None) -> str:
        if isinstance(number, Multiple):
            return f"{number.bound} {number.value:.3g}".strip()
        return NONE if number is None else signed(number)

    found = sorted((x for x in by_seed if x is not None), key=lambda x: x.value if isinstance(x, Multiple) else x)
    return f"{shown(mean)} ({shown(found[0])} to {shown(found[-1])})" if len(found) > 1 else shown(mean)


def _page(scaling: Scaling, tables: Mapping[str, list[list[str]]]) -> str:
    study = scaling.study
    html = {title: html_table(rows, scaling.runs) for title, rows in tables.items()}
    nats = "nats per token"
    drawn = {f"{nats} against {a}": charts.line_chart(_lines(scaling, a), a, nats) for a in AXES}
    pareto = f"{nats} against training FLOPs; thick: what no cheaper run of the arm beats"
    drawn[pareto] = charts.line_chart(_frontiers(scaling), "training FLOPs", nats)
    html["Curves"] = side_by_side(drawn, scaling.runs)
    runs = [run for own in scaling.runs.values() for run in own]
    reason = f"{len(runs)} runs of {len(scaling.runs)} arms, and what a method saves of either."
    told = {
        "headline": "How loss falls with size and data",
        "reason": f"{reason} {PAID}" if scaling.pays_for_ends else reason,
        "test": " ".join(_notes(scaling)),
    }
    seeds = ", ".join(map(str, sorted({run.seed for run in runs})))
    facts = [("arms", str(len(scaling.runs))), ("seeds", seeds), ("runs", str(len(runs)))]
    return rendered(study, told, facts, scaling.warnings, html)


def _notes(scaling: Scaling) -> list[str]:
    """What a reader of the tables must know."""
    notes = ["Parameters are those outside the embedding table and the head."]
    if scaling.readings:
        notes.append(
            "Readings in brackets: the lowest and the highest seed. > and <: the baseline's longest run is still above "
            "the method's loss, its shortest is below it."
        )
    if scaling.lines or scaling.laws:
        confidence = f"{100 * (1 - scaling.study.level):g} %"
        notes.append(f"Intervals of {confidence}: bootstrap over residuals of cells, methods together.")
    if scaling.lines:
        notes.append(
            "Lines suppose that loss falls as a power, without a floor. Where it levels off, multipliers from lines "
            "exaggerate at small sizes and budgets and understate at large ones. Those beyond the baseline's runs have "
            "no interval."
        )
    return notes


def _lines(scaling: Scaling, axis: str) -> list[charts.Line]:
    """For each arm, a line for each value of what stays fixed along `axis`: means over seeds."""
    lines = []
    for arm, own in scaling.runs.items():
        means = scaling.means(arm).items()
        for value in dict.fromkeys(getattr(run, AXES[axis]) for run in own):
            points = sorted((getattr(mean, axis), mean.nats) for cell, mean in means if value in cell)
            at = _at(axis, value)
            label = at if arm == scaling.study.baseline else ""  # the labels of other arms would lie upon these
            lines.append(charts.Line(f"{arm}, {at}", charts.look(scaling.runs, arm), points, [], label))
    return lines


def _frontiers(scaling: Scaling) -> list[charts.Line]:
    """For each arm its frontier, and as thin lines the runs of each size."""
    lines = []
    for arm, own in scaling.runs.items():
        thin = [
            sorted((run.measured.flops, run.measured.nats) for run in own if run.size == size)
            for size in dict.fromkeys(run.size for run in own)
        ]
        best = [(run.flops, run.nats) for run in frontier([run.measured for run in own])]
        lines.append(charts.Line(arm, charts.look(scaling.runs, arm), best, thin))
    return lines
