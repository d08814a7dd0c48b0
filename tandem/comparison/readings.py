"""Compares a method that reads more text per step with its baseline: three readings of one table of runs.

    equal FLOPs   difference of losses where both have spent the same
    equal loss    steps, FLOPs and time of the baseline where it reaches the method's loss, over those of the method
    equal data    difference of losses where both have read as much text

Between two run lengths, the baseline's loss is interpolated linearly in the logarithm of what is held equal. Nothing is
extrapolated beyond its shortest and longest run, except over the hundredth by which whole steps miss a budget. All runs
are complete: a loss during training, before the learning rate has decayed, is not comparable. Source: Token
Superposition Training (arXiv 2605.06546), table 2.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tandem.comparison.scaling import Measured

MISSED = 0.01
"""Fraction by which runs of one budget may differ in what they spend."""


class Readings(NamedTuple):
    """Differences in nats per token, method less baseline; None where the baseline's runs do not reach."""

    equal_flops: float | None
    equal_data: float | None
    steps_at_equal_loss: float | None
    """Steps of the baseline over those of the method; the next two likewise."""
    flops_at_equal_loss: float | None
    seconds_at_equal_loss: float | None


def readings(method: Measured, baseline: Sequence[Measured]) -> Readings:
    """All three readings, from one run of the method and runs of the baseline of any lengths."""

    def against(spent: Callable[[Measured], float]) -> float | None:
        points = [(math.log(spent(run)), run.nats) for run in baseline]
        loss = _between(points, math.log(spent(method)), MISSED)
        return None if loss is None else method.nats - loss

    def until(spent: Callable[[Measured], float]) -> float | None:
        found = _between([(run.nats, math.log(spent(run))) for run in baseline], method.nats)
        return None if found is None else math.exp(found) / spent(method)

    return Readings(
        equal_flops=against(lambda run: run.flops),
        equal_data=against(lambda run: run.tokens),
        steps_at_equal_loss=until(lambda run: run.steps),
        flops_at_equal_loss=until(lambda run: run.flops),
        seconds_at_equal_loss=until(lambda run: run.seconds),
    )


def _between(points: Sequence[tuple[float, float]], x: float, missed: float = 1e-9) -> float | None:
    """y at x, interpolated between points; the end point's y up to `missed` outside them, and None beyond that."""
    xs, ys = zip(*sorted(points), strict=True)
    return float(np.interp(x, xs, ys)) if xs[0] - missed <= x <= xs[-1] + missed else None
