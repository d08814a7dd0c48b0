"""A run: everything a recipe names, built and ready to step.

    run = Run(recipe, corpus)         built from scratch, at step 0
    train(run, observers, save)       training/loop.py

Randomness comes from generators keyed by (seed, purpose), so that one part drawing more never moves another.
"""

import hashlib
from dataclasses import dataclass, replace

import torch
from pydantic import Field

from tandem.corpus import Corpus, PackedRows
from tandem.recipe import Recipe, Settings, UserError, register
from tandem.training.device import autocast, choose_compile, choose_device, choose_precision
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
        self.view = PackedRows(corpus.train, recipe.seed, batch.rows, batch.context)
        self.precision = choose_precision(recipe.training, self.device.value)
        self.cost = self.network.cost()
        self.tokens_per_step = batch.rows * batch.context
        self.flops_per_step = batch.rows * sum(self.cost.training(batch.context).values())
        paid = self._paid_steps()
        self.steps = steps or paid or 0
        self.compiled = choose_compile(recipe.training, self.device.value, paid)
        if self.compiled.value:
            self.network.compile()
        self.optimiser = recipe.choice("optimiser")(recipe.optimiser, self.network)
        self.speed: Speed | None = None
        if not self.steps:
            self.speed = self.measure()
            self.steps = max(1, int(recipe.budget.amount / self.speed.step_seconds))
        self.schedule = recipe.choice("schedule")(recipe.schedule, self.steps)
        self.progress = Progress()

    def _paid_steps(self) -> int | None:
        """Steps that the budget pays for; None where it is time, which has to be measured first."""
        budget = self.recipe.budget
        if budget.unit == "seconds":
            return None
        price = {"steps": 1, "tokens": self.tokens_per_step, "flops": self.flops_per_step}[budget.unit]
        if budget.amount < price:
            raise UserError(f"budget = {budget}: one step alone takes {price:,} {budget.unit}")
        return int(budget.amount // price)

    def measure(self) -> Speed:
        """Time and memory of a few steps, taken on copies."""
        return measure(self)

    def batches(self, step: int) -> list:
        """Micro-batches of a step on the host, a pure function of (seed, step)."""
        parts, key = self.recipe.batch.micro_batches, keyed(self.recipe.seed, f"step/{step}")
        return [replace(self.view.batch(step, part, parts), key=key) for part in range(parts)]

    def autocast(self):
        return autocast(self.device.value, self.precision.value)


def keyed(seed: int, purpose: str) -> int:
    """A seed of its own for every purpose."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=7).digest())
