"""A method that reads more text a step against its baseline: three readings of one table of runs.

    equal FLOPs   difference of losses where both have spent the same
    equal loss    steps, FLOPs and time of the baseline where it reaches the method's loss, over those of the method
    equal data    difference of losses where both have read as much text

Between two lengths of run, the baseline's loss is a straight line in the logarithm of what is held equal; beyond its
shortest and longest run nothing is said, but for the hundredth by which whole steps miss a budget. Every run is a whole
one: a loss on the way, its learning rate not yet decayed, is another thing. Source: Token Superposition Training (arXiv
2605.06546), table 2 and figure 4.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

MISSED = 0.01
"""Share by which runs of one budget may differ in what they spend."""


class Finished(NamedTuple):
    """A run to its end: `tokens` of text read, `flops` and `seconds` of training, held-out (or final) nats a token."""

    steps: int
    tokens: int
    flops: float
    seconds: float
    nats_per_token: float


class Readings(NamedTuple):
    """Differences in nats per token, method less baseline; None where the baseline's runs do not reach."""

    equal_flops: float | None
    equal_data: float | None
    steps_at_equal_loss: float | None
    """Of the baseline, over those of the method; the next likewise."""
    flops_at_equal_loss: float | None
    seconds_at_equal_loss: float | None


def readings(method: Finished, baseline: Sequence[Finished]) -> Readings:
    """All three, from one run of the method and runs of the baseline of any lengths."""

    def against(spent: Callable[[Finished], float]) -> float | None:
        points = [(math.log(spent(run)), run.nats_per_token) for run in baseline]
        loss = _between(points, math.log(spent(method)), MISSED)
        return None if loss is None else method.nats_per_token - loss

    def until(spent: Callable[[Finished], float]) -> float | None:
        found = _between([(run.nats_per_token, math.log(spent(run))) for run in baseline], method.nats_per_token)
        return None if found is None else math.exp(found) / spent(method)

    return Readings(
        equal_flops=against(lambda run: run.flops),
        equal_data=against(lambda run: run.tokens),
        steps_at_equal_loss=until(lambda run: run.steps),
        flops_at_equal_loss=until(lambda run: run.flops),
        seconds_at_equal_loss=until(lambda run: run.seconds),
    )


def _between(points: Sequence[tuple[float, float]], x: float, missed: float = 1e-9) -> float | None:
    """y at x on the lines from point to point; None more than `missed` outside them, and as at the end within it."""
    xs, ys = zip(*sorted(points), strict=True)
    return float(np.interp(x, xs, ys)) if xs[0] - missed <= x <= xs[-1] + missed else None
