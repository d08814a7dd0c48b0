"""Compares a method that reads more text per step with its baseline: three readings of one table of runs.

    equal FLOPs   difference of losses where both have spent the same
    equal loss    steps, FLOPs and time of the baseline where it reaches the method's loss, over those of the method
    equal data    difference of losses where both have read as much text

Between two run lengths, the baseline's loss is interpolated linearly in the logarithm of what is held equal; of several
places with the method's loss, the cheapest counts. Nothing is extrapolated beyond its shortest and longest run, except
over the hundredth by which whole steps miss a budget: a loss that lies before or beyond them gives a bound. All runs
are complete: a loss during training, before the learning rate has decayed, is not comparable. Source: Token
Superposition Training (arXiv 2605.06546), table 2.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tandem.comparison.scaling import Measured

MISSED = 0.01
"""Fraction by which runs of one budget may differ in what they spend."""


class Multiple(NamedTuple):
    """What the baseline spends until it has the method's loss, over what the method spent."""

    value: float
    bound: str = ""
    """">": its longest run is still above that loss; "<": its shortest one is below it. The multiple of that run then
    is the value."""


class Readings(NamedTuple):
    """Differences in nats per token, method less baseline; None where the baseline's runs do not reach."""

    equal_flops: float | None
    equal_data: float | None
    steps_at_equal_loss: Multiple
    flops_at_equal_loss: Multiple
    seconds_at_equal_loss: Multiple


def readings(method: Measured, baseline: Sequence[Measured]) -> Readings:
    """All three readings, from one run of the method and runs of the baseline of any lengths."""

    def against(spent: Callable[[Measured], float]) -> float | None:
        xs, losses = zip(*sorted((math.log(spent(run)), run.nats) for run in baseline), strict=True)
        x = math.log(spent(method))
        is_between = xs[0] - MISSED <= x <= xs[-1] + MISSED
        return method.nats - float(np.interp(x, xs, losses)) if is_between else None

    def until(spent: Callable[[Measured], float]) -> Multiple:
        runs, own = sorted((spent(run), run.nats) for run in baseline), spent(method)
        if runs[0][1] < method.nats:
            return Multiple(runs[0][0] / own, "<")
        for (shorter, above), (longer, below) in pairwise([runs[0], *runs]):
            if below <= method.nats:
                share = (above - method.nats) / (above - below) if above > below else 0.0
                return Multiple(shorter * (longer / shorter) ** share / own)
        return Multiple(runs[-1][0] / own, ">")

    return Readings(
        equal_flops=against(lambda run: run.flops),
        equal_data=against(lambda run: run.tokens),
        steps_at_equal_loss=until(lambda run: run.steps),
        flops_at_equal_loss=until(lambda run: run.flops),
        seconds_at_equal_loss=until(lambda run: run.seconds),
    )
