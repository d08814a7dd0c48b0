"""What the cells of a grid show together: scaling laws and lines, multipliers, the frontier, as a page and as text.

    studies/<grid>/
        <size>-<budget>/                 a study each
        scaling.json                     every run, every fit with its interval
        scaling.txt, scaling.html

A line is fitted where a method has runs at three values of what varies. A law takes six runs, three sizes, three
numbers of tokens, and a size with two of these. Values less than 5 % apart count as one. Readings at equal FLOPs, data
and loss (readings.py) need two budgets of the baseline at a size. Anything that lacks its runs is left out. Tokens are
tokens of text; parameters exclude the embedding table and the head.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tandem.comparison import charts
from tandem.comparison.readings import readings
from tandem.comparison.report import html_table, rendered, side_by_side
from tandem.comparison.results import Result, require_same_documents
from tandem.comparison.scaling import Fitted, Interval, Law, Line, Measured, fitted, frontier, interval
from tandem.comparison.study import Study
from tandem.comparison.summary import fixed, non_embedding, signed
from tandem.comparison.table import NONE, PAID
from tandem.recipe.catalogue import columns
from tandem.training.display import scaled
from tandem.training.folder import replace_file

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
    """By arm, over all cells."""
    pays_for_ends: bool
    """Whether an arm is told where sentences end; losses include the nats of these ends."""
    laws: dict[str, Fitted] = field(default_factory=dict)
    lines: dict[tuple[str, str], dict[str, Fitted]] = field(default_factory=dict)
    """By axis and the value of what stays fixed, then by arm."""

    @classmethod
    def of(cls, cells: Sequence[Cell]) -> "Scaling":
        """Raises: UserError where runs were scored on different documents."""
        runs: dict[str, list[Run]] = {arm: [] for cell in cells for arm in cell.study.arms}
        flat = [(cell, result) for cell in cells for result in cell.results if not result.trial]
        results = [result for _, result in flat]
        require_same_documents(results)
        paid = any(result.end_nats.any() for result in results)
        for cell, result in flat:
            measured = Measured(
                parameters=float(non_embedding(result.parameters)),
                tokens=float(result.tokens),
                flops=result.flops,
                nats=result.paid_per_token,
                steps=result.steps,
                seconds=result.training_seconds,
            )
            if math.isfinite(measured.nats):
                runs[result.arm].append(Run(cell.size, cell.budget, result.seed, measured))
        found = cls(cells[0].study, runs, paid)
        found.laws.update(_fits({arm: [r.measured for r in own] for arm, own in runs.items()}, Law.to, _tells_law))
        for axis, same in AXES.items():
            for value in dict.fromkeys(getattr(run, same) for own in runs.values() for run in own):
                of = {arm: [r.measured for r in own if getattr(r, same) == value] for arm, own in runs.items()}
                if lines := _fits(of, Line.along(axis), functools.partial(_tells_line, axis)):
                    found.lines[axis, value] = lines
        return found

    def means(self, arm: str) -> dict[tuple[str, str], Measured]:
        """By size and budget, means over the seeds of an arm."""
        cells: dict[tuple[str, str], list[Measured]] = {}
        for run in self.runs[arm]:
            cells.setdefault((run.size, run.budget), []).append(run.measured)
        return {cell: Measured(*np.mean(of, 0).tolist()) for cell, of in cells.items()}

    def readings(self) -> list[dict[str, Any]]:
        """For each cell of every arm but the baseline, the three readings against the baseline's runs at its size.

        Only where these have two or more budgets, and at least one of the readings lies between them.
        """
        found, baseline = [], self.means(self.study.baseline)
        for arm in (arm for arm in self.runs if arm != self.study.baseline):
            for (size, budget), cell in self.means(arm).items():
                lengths = [mean for (other, _), mean in baseline.items() if other == size]
                read = readings(cell, lengths) if len(lengths) > 1 else None
                if read and any(number is not None for number in read):
                    found.append({"arm": arm, "size": size, "budget": budget, **read._asdict()})
        return found

    def multipliers(self, axis: str) -> list[dict[str, Any]]:
        """For each cell of every arm but the baseline: how much more of `axis` the baseline needs for the same loss.

        From the lines of both along it, from the measured loss and the baseline's line, and from the laws of both; None
        where these are missing.
        """
        found, level, baseline = [], self.study.level, self.study.baseline
        for arm in (arm for arm in self.runs if arm != baseline):
            for (size, budget), cell in self.means(arm).items():
                x = getattr(cell, axis)
                lines = self.lines.get((axis, size if AXES[axis] == "size" else budget), {})
                record: dict[str, Any] = {"arm": arm, "size": size, "budget": budget}
                record["lines"] = _ratio(lines, baseline, arm, lambda b, a, x=x: b.multiplier(a.at(x), x), level)
                record["measured"] = lines[baseline].fit.multiplier(cell.nats, x) if baseline in lines else None
                more = functools.partial(_more_by_law, cell, axis)
                record["laws"] = _ratio(self.laws, baseline, arm, more, level)
                found.append(record)
        return found


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
    runs: Mapping[str, list[Measured]], fit: Callable[..., Any], tells: Callable[[list[Measured]], bool]
) -> dict[str, Fitted]:
    return fitted({arm: own for arm, own in runs.items() if tells(own)}, fit)


def _values(runs: Sequence[Measured], axis: str) -> int:
    """Number of values, of which each is 5 % above the last: seeds that share a budget in seconds differ by less."""
    found = [0.0]
    for value in sorted(getattr(run, axis) for run in runs):
        found += [value] if value >= 1.05 * found[-1] else []
    return len(found) - 1


def _tells_line(axis: str, runs: list[Measured]) -> bool:
    """Whether `axis` varies and the other stays fixed: with budgets in FLOPs, larger networks read less data."""
    (other,) = AXES.keys() - {axis}
    return _values(runs, axis) > 2 and _values(runs, other) == 1


def _tells_law(runs: list[Measured]) -> bool:
    """Whether both vary, and not only together: one budget in FLOPs or seconds gives every size its own tokens."""
    alike = ([other for other in runs if other.parameters == run.parameters] for run in runs)
    return (
        min(_values(runs, "parameters"), _values(runs, "tokens")) > 2
        and len(runs) > 5
        and any(_values(same, "tokens") > 1 for same in alike)
    )


def write_scaling(cells: Sequence[Cell], folder: Path) -> tuple[Path, str]:
    """Writes scaling.json, .txt and .html into `folder`; returns the path of the page, and the text."""
    scaling = Scaling.of(cells)
    tables = {title: rows for title, rows in _tables(scaling).items() if len(rows) > 1}
    told = [scaling.study.title, *([PAID] if scaling.pays_for_ends else [])]
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
        "readings": scaling.readings(),
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
    losses = [["arm, size", "parameters", *budgets]]
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
        lines += [[arm, axis, value, _shown(_numbers(fit, level)["b"])] for arm, fit in by_arm.items()]
    read = [["arm", "size", "budget", "at equal FLOPs", "at equal data", "steps", "FLOPs", "time"]]
    for found in scaling.readings():
        arm, size, budget, flops, data, *multiples = found.values()
        differences = [NONE if number is None else signed(number) for number in (flops, data)]
        read.append([arm, size, budget, *differences, *map(_shown, multiples)])
    against = f"Nats per token less those of {baseline}, and what {baseline} needs for the same loss, as a multiple"
    tables = {"Nats per token": losses, against: read}
    tables |= {"L = E + A N^-alpha + B D^-beta": laws, "L = a x^-b": lines}
    for axis, what in (("tokens", "data"), ("parameters", "parameters")):
        rows = [["arm", "size", "budget", "from lines", "from measured losses", "from laws"]]
        for found in scaling.multipliers(axis):
            cells = [found["lines"], found["measured"], found["laws"]]
            if any(cell is not None for cell in cells):
                rows.append([found["arm"], found["size"], found["budget"], *map(_shown, cells)])
        tables[f"Effective {what}, as a multiple of what {baseline} needs for the same loss"] = rows
    return tables


def _shown(number: Interval | float | None) -> str:
    if isinstance(number, Interval):
        return f"{number.value:.4g} ({number.low:.4g} to {number.high:.4g})"
    return NONE if number is None else f"{number:.4g}"


def _page(scaling: Scaling, tables: Mapping[str, list[list[str]]]) -> str:
    study = scaling.study
    order = list(scaling.runs)

    def place(label: str) -> int:
        return order.index(label.partition(",")[0]) % 8

    html = {title: html_table(rows, place) for title, rows in tables.items()}
    drawn = {f"loss against {a}": charts.line_chart(_lines(scaling, a, place), a, "nats") for a in AXES}
    pareto = "loss against training FLOPs; thick: what no cheaper run of the arm beats"
    drawn[pareto] = charts.line_chart(_frontiers(scaling, place), "training FLOPs", "nats")
    html["Curves"] = side_by_side(drawn, order, place)
    runs = [run for own in scaling.runs.values() for run in own]
    reason = f"{len(runs)} runs of {len(order)} arms. Read off it what a method saves of either."
    told = {
        "headline": "How loss falls with size and data",
        "reason": f"{reason} {PAID}" if scaling.pays_for_ends else reason,
        "test": f"Intervals of {100 * (1 - study.level):g} %: bootstrap over residuals, methods together.",
    }
    seeds = ", ".join(map(str, sorted({run.seed for run in runs})))
    facts = [("arms", str(len(order))), ("seeds", seeds), ("runs", str(len(runs)))]
    return rendered(study, told, facts, "", html)


def _lines(scaling: Scaling, axis: str, place: Callable[[str], int]) -> list[charts.Line]:
    """For each arm, a line for each value of what stays fixed along `axis`: means over seeds."""
    lines = []
    for arm, own in scaling.runs.items():
        means = scaling.means(arm).items()
        for value in dict.fromkeys(getattr(run, AXES[axis]) for run in own):
            points = sorted((getattr(mean, axis), mean.nats) for cell, mean in means if value in cell)
            lines.append(charts.Line(f"{arm}, {value}", place(arm), points, []))
    return lines


def _frontiers(scaling: Scaling, place: Callable[[str], int]) -> list[charts.Line]:
    """For each arm its frontier, and as thin lines the runs of each size."""
    lines = []
    for arm, own in scaling.runs.items():
        thin = [
            sorted((run.measured.flops, run.measured.nats) for run in own if run.size == size)
            for size in dict.fromkeys(run.size for run in own)
        ]
        best = [(run.flops, run.nats) for run in frontier([run.measured for run in own])]
        lines.append(charts.Line(arm, place(arm), best, thin))
    return lines
