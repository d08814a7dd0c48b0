"""Phases of a run: how text is read and what is predicted may change at a step, while the run continues.

    step     0 ............ T1 ............ T       switch at T1: weights, optimiser and schedule go on
    view     bags of 6      | packed rows           the second reads on where in the stream the first stopped

An objective defines the phases of a run of T steps; most have one. What a step reads and costs is then a closed form
of the step number, so a batch is still a pure function of (seed, step), and resuming replays nothing.
"""

import bisect
import math
from dataclasses import dataclass
from fractions import Fraction

from tandem.corpus import Batch, View
from tandem.networks.cost import Cost, Parts
from tandem.recipe import UserError


@dataclass(frozen=True)
class Phase:
    """From step `first` on, batches come from `view`, which counts its steps from there."""

    first: int
    view: View
    note: str = ""
    """What the network reads instead of plain text; while a phase has a note, the network is no language model."""
    restarts: bool = False
    """True if the learning-rate schedule restarts."""
    redraws: bool = False
    """True if the token table and the head are reinitialised."""
    parts: Parts | None = None
    """Where only the end of a text has targets: mean tokens of a row."""

    def flops(self, cost: Cost, steps: int) -> int:
        """Training FLOPs of `steps` of its steps."""
        return steps * self.view.rows * sum(cost.training(self.view.context, parts=self.parts).values())


class Phases:
    """The phases of a run as one view of the text, with its cost; steps beyond the run belong to the last phase."""

    def __init__(self, phases: list[Phase]):
        assert phases[0].first == 0, "a run starts with a phase"
        self.phases = phases

    def at(self, step: int) -> Phase:
        return self.phases[bisect.bisect_right(self.phases, step, key=lambda phase: phase.first) - 1]

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """The rows of a step, or only part `part` of `parts` equal parts."""
        phase = self.at(step)
        return phase.view.batch(step - phase.first, part, parts)

    def tokens(self, step: int) -> int:
        """Tokens of text read before `step`, including those that a phase skips."""
        phase = self.at(step)
        return phase.view.read(step - phase.first)

    def positions(self, step: int) -> int:
        """Positions computed before `step`: what the network counts as tokens."""
        return sum(steps * phase.view.rows * phase.view.context for phase, steps in self.before(step))

    def flops(self, cost: Cost, step: int) -> int:
        """Training FLOPs spent before `step`."""
        return sum(phase.flops(cost, steps) for phase, steps in self.before(step))

    def before(self, step: int) -> list[tuple[Phase, int]]:
        """The phases that begin before `step`, each with the number of its steps before that."""
        lasts = [*(phase.first for phase in self.phases[1:]), step]
        return [(p, min(last, step) - p.first) for p, last in zip(self.phases, lasts, strict=True) if p.first < step]


def whole_steps(amount: int | float, steps: int) -> int:
    """An integer counts steps; a float is a share of `steps`, rounded down in exact decimals: 0.29 of 100 is 29."""
    return min(steps, amount if isinstance(amount, int) else math.floor(Fraction(str(amount)) * steps))


def require_reached(key: str, amount: int | float, steps: int, never: str, always: str) -> None:
    """Raises: UserError where a run of `steps` steps never reaches the step `amount`; a share of the run is allowed.

    The message says what the run would `never` do, and that a share of 1.0 means `always`.
    """
    if isinstance(amount, int) and amount >= steps:
        raise UserError(
            f"{key} = {amount}: the run has {steps:,} steps, so it would never {never}; write an earlier step, a share "
            f"of the run such as 0.3, or 1.0 for {always}"
        )
