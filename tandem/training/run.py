"""A run: everything a recipe names, built and ready to step.

    run = Run(recipe, corpus)         built from scratch, at step 0
    train(run, observers, save)       training/loop.py

Randomness comes from generators keyed by (seed, purpose), so that one part drawing more never moves another.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from pydantic import Field

from tandem.corpus import Corpus, PackedRows
from tandem.objectives.phases import Phases
from tandem.recipe import Recipe, Settings, UserError, register
from tandem.training.device import autocast, choose_compile, choose_device, choose_precision
from tandem.training.schedule import in_stretches
from tandem.training.speed import Speed, measure


@register("batch")
class BatchShape:
    """One optimisation step."""

    class Config(Settings):
        rows: int = Field(16, ge=1)
        """B, rows of a step, over all micro-batches."""
        context: int = Field(256, ge=2)
        """T, tokens of a row."""
        micro_batches: int = Field(1, ge=1)
        """Pieces that a step is cut into, one in memory at a time; changes nothing but rounding."""

    @classmethod
    def check(cls, recipe: Recipe):
        batch = recipe.batch
        if batch.rows % batch.micro_batches:
            yield "batch.micro_batches", f"must divide batch.rows ({batch.rows})"


@dataclass
class Progress:
    """Where a run stands; what a checkpoint needs beside weights and optimiser."""

    step: int = 0
    seconds: float = 0.0


class Run:
    """Network, objective, view, optimiser and schedule of one recipe, on one device."""

    def __init__(self, recipe: Recipe, corpus: Corpus, steps: int | None = None):
        self.recipe, self.corpus = recipe, corpus
        self.device = choose_device(recipe.training)
        torch.manual_seed(keyed(recipe.seed, "torch"))
        batch = recipe.batch
        network_class = recipe.choice("network")
        self.network = network_class(
            recipe.network,
            corpus.train.vocabulary,
            batch.context,
            generator=torch.Generator().manual_seed(keyed(recipe.seed, "init")),
        ).to(self.device.value)
        self.network.recompute = recipe.training.recompute
        self.objective = recipe.choice("objective")(recipe.objective)
        self.rows = PackedRows(corpus.train, recipe.seed, batch.rows, batch.context)
        self.precision = choose_precision(recipe.training, self.device.value)
        self.cost = self.network.cost()
        budget = recipe.budget
        spent = {"steps": lambda view, steps: steps, "tokens": Phases.tokens, "flops": self._flops}
        paid = None if budget.unit == "seconds" else self._paid_steps(budget.amount, spent[budget.unit])
        self.steps = steps or paid or 0
        self.view = self._phases(self.steps)
        self.compiled = choose_compile(recipe.training, self.device.value, paid)
        if self.compiled.value:
            self.network.compile()
        self.optimiser = recipe.choice("optimiser")(recipe.optimiser, self.network)
        self.speed: Speed | None = None
        if not self.steps:
            self.speed = self.measure()
            pace = self.speed.flops / self.speed.step_seconds
            self.steps = self._paid_steps(max(budget.amount, self.speed.step_seconds) * pace, self._flops)
            self.view = self._phases(self.steps)
        stretches = dict.fromkeys(self.view.stretch(step) for step in (phase.first for phase in self.view.phases))
        self.schedule = in_stretches(recipe.choice("schedule"), recipe.schedule, [*stretches], self.steps)
        self.progress = Progress()

    def _phases(self, steps: int) -> Phases:
        return Phases(self.objective.phases(self.rows, steps))

    def _flops(self, view: Phases, step: int) -> int:
        return view.flops(self.cost, step)

    def _paid_steps(self, amount: float, spent: Callable[[Phases, int], int]) -> int:
        """The longest run, its phases included, that spends at most `amount`; a longer run never spends less."""

        def price(steps: int) -> int:
            return spent(self._phases(steps), steps)

        if price(1) > amount:
            raise UserError(
                f"budget = {self.recipe.budget}: one step alone takes {price(1):,} {self.recipe.budget.unit}"
            )
        low, high = 1, 2  # low is paid for
        while price(high) <= amount:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if price(middle) <= amount else (low, middle)
        return low

    def enter(self, step: int) -> None:
        """What happens once, before the first step of a phase."""
        phase = self.view.at(step)
        if phase.redrawn and phase.first == step:
            generator = torch.Generator().manual_seed(keyed(self.recipe.seed, f"redrawn/{step}"))
            self.network.redraw(phase.redrawn, generator)

    def tokens(self, step: int) -> int:
        """Tokens of text read before `step`."""
        return self.view.tokens(step)

    def flops(self, step: int) -> int:
        """FLOPs spent on training before `step`."""
        return self._flops(self.view, step)

    def place(self, step: int) -> str:
        """What a step reads, in words."""
        return f"tokens {self.tokens(step):,} to {self.tokens(step + 1):,} of the text in its order"

    @property
    def note(self) -> str:
        """Why the network, as it stands, is no language model yet; empty: it is one."""
        return self.view.at(self.progress.step - 1).note if self.progress.step else ""

    def measure(self) -> Speed:
        """Time and memory of a few steps, taken on copies."""
        return measure(self)

    def batches(self, step: int) -> list:
        """Micro-batches of a step on the host, a pure function of (seed, step)."""
        parts = self.recipe.batch.micro_batches
        return [self.view.batch(step, part, parts) for part in range(parts)]

    def autocast(self):
        return autocast(self.device.value, self.precision.value)


def keyed(seed: int, purpose: str) -> int:
    """A seed of its own for every purpose."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=7).digest())
