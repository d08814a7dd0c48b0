"""Phases of a run: how text is read and asked may change at a step, and nothing else does.

    step     0 ............ T1 ............ T       switch at T1: weights, optimiser and schedule go on
    view     bags of 6      | packed rows           the second reads on where in the stream the first stopped

An objective tells the phases of a run of T steps; for most it is one. What a step reads and costs is then a closed
form of its number, so a batch is still a pure function of (seed, step), and resuming replays nothing.
"""

import bisect
import math
from dataclasses import dataclass
from fractions import Fraction

from tandem.corpus import Batch, View
from tandem.networks.cost import Cost
from tandem.recipe import UserError


@dataclass(frozen=True)
class Phase:
    """From step `first` on, batches come from `view`, which counts its steps from there."""

    first: int
    view: View
    note: str = ""
    """What the network does in place of reading tokens; as long as it stands, this is no language model."""
    restarts: bool = False
    """Whether the learning rate starts anew."""
    redraws: bool = False
    """Whether the table of tokens and the head are drawn anew."""
    parts: tuple[int, int] | None = None
    """Where only the end of a text is asked for: tokens of a row before that, and from there on, on the mean."""

    def flops(self, cost: Cost, steps: int) -> int:
        """Training FLOPs of so many of its steps."""
        return steps * self.view.rows * sum(cost.training(self.view.context, parts=self.parts).values())


class Phases:
    """The phases of a run as one view of the text, with what it costs; steps beyond the run are of the last phase."""

    def __init__(self, phases: list[Phase]):
        assert phases[0].first == 0, "a run starts with a phase"
        self.phases = phases

    def at(self, step: int) -> Phase:
        return self.phases[bisect.bisect_right(self.phases, step, key=lambda phase: phase.first) - 1]

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """The rows of a step, or one of `parts` equal runs of them."""
        phase = self.at(step)
        return phase.view.batch(step - phase.first, part, parts)

    def tokens(self, step: int) -> int:
        """Tokens of text read before `step`, those included that a phase passes over."""
        phase = self.at(step)
        return phase.view.read(step - phase.first)

    def positions(self, step: int) -> int:
        """Positions computed before `step`: what the network counts as tokens."""
        return sum(steps * phase.view.rows * phase.view.context for phase, steps in self._before(step))

    def flops(self, cost: Cost, step: int) -> int:
        """Training FLOPs spent before `step`."""
        return sum(phase.flops(cost, steps) for phase, steps in self._before(step))

    def stretch(self, step: int) -> tuple[int, int | None]:
        """First and last step, exclusive, of the learning rate's course at `step`; None: the end of the run."""
        firsts = [0, *(phase.first for phase in self.phases[1:] if phase.restarts)]
        place = bisect.bisect_right(firsts, step)
        return firsts[place - 1], firsts[place] if place < len(firsts) else None

    def _before(self, step: int) -> list[tuple[Phase, int]]:
        lasts = [*(phase.first for phase in self.phases[1:]), step]
        return [(p, min(last, step) - p.first) for p, last in zip(self.phases, lasts, strict=True) if p.first < step]


def whole_steps(amount: int | float, steps: int) -> int:
    """An integer counts steps; a float is a share of `steps`, rounded down in exact decimals: 0.29 of 100 is 29."""
    return min(steps, amount if isinstance(amount, int) else math.floor(Fraction(str(amount)) * steps))


def require_reached(key: str, amount: int | float, steps: int, never: str, always: str) -> None:
    """Raises: UserError where a run of `steps` steps ends before the step `amount`; a share of it never does.

    What it would `never` do is told, and the share 1.0 by which that is `always` meant.
    """
    if isinstance(amount, int) and amount >= steps:
        raise UserError(
            f"{key} = {amount}: the run has {steps:,} steps, so it would never {never}; write an earlier step, a share "
            f"of the run such as 0.3, or 1.0 for {always}"
        )
