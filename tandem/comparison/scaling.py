"""How loss falls with size and data, and how much of either a method saves.

    line   L = a x^-b                          ln L by least squares on ln x: one thing grows, the other is fixed
    law    L = E + A N^-alpha + B D^-beta      least squares in nats; N parameters, D tokens, E what no size removes

    line of a baseline   x  100    200    400       A method with 4.0 nats at x = 100 does there what the baseline does
                         L  4.15   4.0    3.86      at 200: its effective multiplier is 2.

With alpha and beta fixed, a law is linear in E, A and B, none of which is negative. So two numbers are searched for and
three are solved for (variable projection). Lines and laws are fitted to complete runs: a loss during training, before
the learning rate has decayed, is not comparable.

Intervals come from a bootstrap over the residuals of cells, which are means over the seeds of one size and budget: each
draw adds resampled residuals to the fitted losses, widened by sqrt(n / (n - numbers)) for n cells and from normal to
Student's, because few cells say little about their spread. A residual holds the errors of seeds and formula together;
more seeds lessen only the former. Methods with matching cells share their draws, cell by cell, so that what one cell
adds to all of them cancels in multipliers. What a formula gets wrong everywhere alike, no residual shows: a line has no
floor E, so where loss levels off its multipliers are off, and most of all beyond the runs.

Source: Hoffmann et al. 2022 (arXiv 2203.15556), eq. 2; multipliers: Thought Gestalt (arXiv 2512.25026), on scaling.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tandem.recipe import require


class Measured(NamedTuple):
    """A complete run, or the mean of several: non-embedding parameters, tokens of text, training FLOPs, held-out nats
    per token; for readings.py also steps and seconds of training, for the record latent positions."""

    parameters: float
    tokens: float
    flops: float
    nats: float
    steps: float = math.nan
    seconds: float = math.nan
    positions: float = math.nan


@dataclass(frozen=True)
class Line:
    """L = a x^-b, x being tokens or parameters."""

    axis: str
    a: float
    b: float
    """The exponent."""

    numbers = 2

    @classmethod
    def along(cls, axis: str) -> Callable[..., "Line"]:
        """A function that fits a line to runs of at least two numbers of "tokens" or "parameters"."""

        def fit(runs: Sequence[Measured], start: object = None) -> "Line":
            x, y = np.log([getattr(run, axis) for run in runs]), np.log([run.nats for run in runs])
            b, a = np.polyfit(x, y, 1)
            return cls(axis, float(np.exp(a)), -float(b))

        return fit

    def loss(self, runs: Sequence[Measured]) -> np.ndarray:
        return self.a * np.array([getattr(run, self.axis) for run in runs], float) ** -self.b

    def at(self, x: float) -> float:
        return self.a * x**-self.b

    def size(self, nats: float) -> float:
        """The x at which the line has this loss."""
        return _root(nats / self.a, -self.b)

    def multiplier(self, nats: float, x: float) -> float:
        """For a method with this loss at `x`: the x at which this line has the same loss, over `x`."""
        return self.size(nats) / x


@dataclass(frozen=True)
class Law:
    """L = E + A N^-alpha + B D^-beta."""

    E: float
    A: float
    alpha: float
    B: float
    beta: float

    numbers = 5

    @classmethod
    def to(cls, runs: Sequence[Measured], start: "Law | None" = None) -> "Law":
        """Five numbers take at least six runs, over three sizes and three numbers of tokens."""
        N, D, L = np.array([(run.parameters, run.tokens, run.nats) for run in runs], float).T
        n, d = N / N.min(), D / D.min()  # so that columns have similar magnitudes

        def solved(exponents: np.ndarray) -> tuple[np.ndarray, float]:
            columns = np.stack([np.ones_like(n), n ** -exponents[0], d ** -exponents[1]], axis=1)
            return require("scipy.optimize", "statistics").nnls(columns, L)

        def off(logs: np.ndarray) -> float:
            return solved(np.exp(logs))[1]

        grid = np.log([0.05, 0.1, 0.2, 0.35, 0.6, 1.0])
        starts = [np.log([start.alpha, start.beta])] if start else [np.array([x, y]) for x in grid for y in grid]
        first = min(starts, key=off)
        bounds = [(math.log(0.01), math.log(5.0))] * 2  # beyond these a power is a constant, or a step
        options = {"xatol": 1e-7, "fatol": 1e-12, "maxfev": 400, "initial_simplex": first + 0.3 * np.eye(3, 2, -1)}
        optimize = require("scipy.optimize", "statistics")
        found = optimize.minimize(off, first, method="Nelder-Mead", bounds=bounds, options=options)
        exponents = alpha, beta = np.exp(found.x)
        (E, A, B), _ = solved(exponents)
        return cls(*(float(v) for v in (E, A * N.min() ** alpha, alpha, B * D.min() ** beta, beta)))

    def loss(self, runs: Sequence[Measured]) -> np.ndarray:
        N, D = np.array([(run.parameters, run.tokens) for run in runs], float).T
        return self.E + self.A * N**-self.alpha + self.B * D**-self.beta

    def tokens(self, nats: float, parameters: float) -> float:
        """Tokens after which a network of this size has this loss; inf where no number of them is enough."""
        left = nats - self.E - self.A * parameters**-self.alpha
        return _root(self.B / left, self.beta) if left > 0 else math.inf

    def size(self, nats: float, tokens: float) -> float:
        """Parameters with which a network has this loss after so many tokens; inf where no number is enough."""
        left = nats - self.E - self.B * tokens**-self.beta
        return _root(self.A / left, self.alpha) if left > 0 else math.inf


def _root(x: float, degree: float) -> float:
    """x^(1 / degree); inf where it overflows, as for a line that is almost flat."""
    with np.errstate(divide="ignore", over="ignore"):
        return float(np.power(x, np.divide(1.0, degree)))


class Interval(NamedTuple):
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Fitted:
    """A fit to the runs of one method, and the same fit to every bootstrap draw."""

    fit: Any
    draws: list[Any]

    def interval(self, number: Callable[[Any], float], level: float = 0.05) -> Interval:
        """A number of the fit, and the interval that holds it in all but `level` of the draws."""
        return interval(number(self.fit), [number(draw) for draw in self.draws], level)


def interval(value: float, draws: Sequence[float], level: float = 0.05) -> Interval:
    low, high = np.quantile(draws, [level / 2, 1 - level / 2], method="inverted_cdf")  # inf stays inf
    return Interval(value, float(low), float(high))


def fitted(
    methods: Mapping[str, Sequence[Measured]],
    fit: Callable[..., Any],
    level: float = 0.05,
    draws: int | None = None,
    seed: int = 0,
    cells: Mapping[str, Sequence[Hashable]] | None = None,
) -> dict[str, Fitted]:
    """Fits every method, with bootstrap draws; methods with equally many cells in one order share draws.

    Args:
        fit: `Law.to` or `Line.along(axis)`, a function of runs and of a fit to start from.
        level: that of intervals to come.
        draws: their number; None: 200, and more where so few say nothing about so low a level.
        cells: what the runs of one cell have in common, for every run; None: every run is a cell.
    """
    special, found = require("scipy.special", "statistics"), {}
    draws, tail = draws or max(200, math.ceil(10 / level)), 1 - level / 2
    for name, runs in methods.items():
        whole = fit(runs)
        says, is_line = whole.loss(runs), isinstance(whole, Line)
        nats = np.array([run.nats for run in runs])
        of_runs = np.log(nats / says) if is_line else nats - says
        held = list(range(len(runs)) if cells is None else cells[name])
        numbers = {cell: number for number, cell in enumerate(dict.fromkeys(held))}
        cell_of, n = np.array([numbers[cell] for cell in held]), len(numbers)
        off = np.bincount(cell_of, of_runs) / np.bincount(cell_of)
        freedom = max(1, n - whole.numbers)
        wider = math.sqrt(n / freedom) * float(special.stdtrit(freedom, tail) / special.ndtri(tail))
        rng, drawn = np.random.default_rng(seed), []
        for _ in range(draws):
            error = wider * off[rng.integers(n, size=n)][cell_of]
            losses = says * np.exp(error) if is_line else says + error
            drawn.append(fit([r._replace(nats=float(x)) for r, x in zip(runs, losses, strict=True)], whole))
        found[name] = Fitted(whole, drawn)
    return found


def frontier(runs: Sequence[Measured]) -> list[Measured]:
    """The Pareto frontier: the runs that no other one beats at as many FLOPs or fewer, from the cheapest."""
    best: list[Measured] = []
    for run in sorted(runs, key=lambda run: (run.flops, run.nats)):
        if not best or run.nats < best[-1].nats:
            best.append(run)
    return best
