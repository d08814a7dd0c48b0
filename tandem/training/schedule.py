"""Learning rates as multipliers of the peak, a pure function of the step.

    wsd       ／￣￣￣￣＼     warm-up, constant, linear decay at the end (warm-up, stable, decay)
    cosine    ／￣￣`-.._     warm-up, half a cosine
    linear    ／＼________     warm-up, straight line

`wsd_by_tokens` is wsd with its lengths in tokens, as in State-Prediction Separation (authors' code).

Step k of T, from 0; w warm-up steps, d decay steps, f floor as a share of the peak:

    warm-up   (k + 1) / w                                          so that the first update is not lost; or k / w
    wsd       f + (1 - f) min(1, (T - k) / d)
    cosine    f + (1 - f) (1 + cos(pi (k - w) / (T - w))) / 2      for k >= w
    linear    1 - (1 - f) (k - w) / (T - w)                        for k >= w

Where warm-up and decay overlap, in a run that is too short for both, the lower of the two counts. Past the end the
rate stays what it is at T.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from tandem.objectives.phases import Phases
from tandem.recipe import Recipe, Settings, register

Length = Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=1)]
"""In steps, or as a share of the run."""


class _Config(Settings):
    warmup: Length = 0.02
    """Warm-up: steps (an integer) or a share of the run (below 1)."""
    floor: float = Field(0.1, ge=0, le=1)
    """Rate at the end, as a share of the peak."""
    warmup_from_zero: bool = False
    """Step k of the warm-up has k / w of the peak: the first update has rate 0; a share w is not rounded to steps
    (linear rounds it down, to at least one step)."""


class Schedule:
    """Multiplier of the peak rate at a step, from the shape that the class defines and the length of the run.

    `read`: tokens of text before a step, used only by schedules that count in tokens.
    """

    Config: type[_Config] = _Config

    def __init__(self, config: _Config, steps: int, read: Callable[[int], int] | None = None):
        self.config, self.steps = config, steps
        is_share = config.warmup_from_zero and isinstance(config.warmup, float)
        self.warmup = self.share_from_zero(config.warmup * steps) if is_share else in_steps(config.warmup, steps)

    def __call__(self, step: int) -> float:
        risen = step if self.config.warmup_from_zero else step + 1
        return min(risen / self.warmup if self.warmup else 1.0, self.after_warmup(step))

    def share_from_zero(self, steps: float) -> float:
        """Length of a warm-up from zero that is a share of the run."""
        return steps

    def after_warmup(self, step: int) -> float:
        raise NotImplementedError

    def passed(self, step: int) -> float:
        """Share of the steps after the warm-up that have passed."""
        return min(1.0, max(0.0, (step - self.warmup) / max(1, self.steps - self.warmup)))


@register("schedule", "wsd", default=True)
class WSD(Schedule):
    """Warm-up, constant, linear decay over the last steps."""

    class Config(_Config):
        decay: Length = 0.1
        """Length of the decay: steps (an integer) or a share of the run (below 1)."""
        floor: float = Field(0.0, ge=0, le=1)
        """Rate at the end, as a share of the peak."""

    def after_warmup(self, step: int) -> float:
        decay = in_steps(self.config.decay, self.steps)  # type: ignore[attr-defined]
        floor = self.config.floor
        return floor + (1 - floor) * min(1.0, max(0, self.steps - step) / decay if decay else 1.0)


@register("schedule", "wsd_by_tokens")
class WSDByTokens:
    """Warm-up, constant, linear decay, by the tokens of text read before a step; the first step counts its own."""

    class Config(Settings):
        warmup: int = Field(50_000_000, ge=1)
        """Length of the warm-up in tokens."""
        tokens: int | None = Field(None, ge=1)
        """Tokens of the whole run; null: those of all its steps."""
        decay: float = Field(0.1, gt=0, le=1)
        """Length of the decay, a share of these tokens."""
        floor: float = Field(0.1, ge=0, le=1)
        """Rate after all tokens, as a share of the peak."""

    def __init__(self, config: Config, steps: int, read: Callable[[int], int]):
        self.config, self.read, self.tokens = config, read, config.tokens or read(steps)

    @classmethod
    def check(cls, recipe: Recipe):
        a_step, c, budget = recipe.batch.rows * recipe.batch.context, recipe.schedule, recipe.budget
        if c.tokens and (budget.unit != "tokens" or abs(budget.amount - c.tokens) >= a_step):
            yield "schedule.tokens", f"the budget is {budget}; null takes the tokens of the run"

    def __call__(self, step: int) -> float:
        c = self.config
        seen = self.read(max(step, 1))
        left = max(0.0, min(1.0, (self.tokens - seen) / (c.decay * self.tokens)))
        return min(1.0, seen / c.warmup) * (c.floor + (1 - c.floor) * left)


@register("schedule", "cosine")
class Cosine(Schedule):
    """Warm-up, then half a cosine down to the floor."""

    def after_warmup(self, step: int) -> float:
        floor = self.config.floor
        return floor + (1 - floor) * (1 + math.cos(math.pi * self.passed(step))) / 2


@register("schedule", "linear")
class Linear(Schedule):
    """Warm-up, then a straight line down to the floor."""

    def share_from_zero(self, steps: float) -> float:
        """Whole steps, as Block-Based Double Decoders counts them (authors' code)."""
        return max(1, math.floor(steps))

    def after_warmup(self, step: int) -> float:
        return 1 - (1 - self.config.floor) * self.passed(step)


def scheduled(recipe: Recipe, view: Phases, steps: int) -> Callable[[int], float]:
    """The multiplier of the learning rate by step, in a run of `steps` steps with these phases."""
    firsts = [0, *(phase.first for phase in view.phases[1:] if phase.restarts)]

    def part(first: int, last: int) -> Callable[[int], float]:
        before = view.tokens(first)
        return recipe.choice("schedule")(recipe.schedule, last - first, lambda step: view.tokens(first + step) - before)

    parts = [part(first, last) for first, last in pairwise([*firsts, steps])]

    def multiplier(step: int) -> float:
        place = bisect_right(firsts, step) - 1
        return parts[place](step - firsts[place])

    return multiplier


def in_steps(amount: int | float, steps: int) -> int:
    """An integer counts steps; a float below 1 is a share of `steps`, rounded."""
    return amount if isinstance(amount, int) else round(amount * steps)
