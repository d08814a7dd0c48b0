"""A run: everything a recipe names, built and ready to step.

    run = Run(recipe, corpus)         built from scratch, at step 0
    train(run, observers, save)       training/loop.py

Randomness comes from generators keyed by (seed, purpose), so that one part drawing more never moves another.
"""

import copy
import hashlib
from dataclasses import replace

import torch
from pydantic import Field

from tandem.corpus import Corpus, PackedRows
from tandem.networks.network import Network
from tandem.recipe import Recipe, Settings, UserError, register
from tandem.training.device import autocast, choose_compile, choose_device, choose_precision
from tandem.training.parallel import ALONE, Ranks, StepLoss, choose_parallel, require_divisible, whole, wrapped
from tandem.training.progress import Progress
from tandem.training.speed import Speed, measure
from tandem.training.start import start


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


class Run:
    """Network, objective, view, optimiser and schedule of one recipe, on one device of each of its processes."""

    def __init__(
        self, recipe: Recipe, corpus: Corpus, steps: int | None = None, ranks: Ranks = ALONE, fresh: bool = False
    ):
        """`fresh`: it begins here, with the weights that the recipe starts from, and not at a checkpoint."""
        self.recipe, self.corpus, self.ranks = recipe, corpus, ranks
        batch = recipe.batch
        with ranks.together():  # before the processes have anything else to say to each other
            require_divisible(batch.rows, batch.micro_batches, ranks)
            self.device = choose_device(recipe.training, ranks.local if ranks.count > 1 else None)
            self.network = self._drawn()
            if fresh:
                start(self.network, recipe)
            self.objective = recipe.choice("objective")(recipe.objective)
            self.view = PackedRows(corpus.train, recipe.seed, batch.rows, batch.context)
            self.precision = choose_precision(recipe.training, self.device.value)
            self.cost = self.network.cost()
            self.tokens_per_step = batch.rows * batch.context
            self.flops_per_step = batch.rows * sum(self.cost.training(batch.context).values())
            paid = self._paid_steps()
        self.steps = steps or paid or 0
        self.compiled = choose_compile(recipe.training, self.device.value, paid)
        self.parallel = choose_parallel(recipe.training, ranks, self.device.value, self.cost.total_parameters)
        self._equip()
        self.speed: Speed | None = None
        if not self.steps:
            self.speed = self.measure()
            self.steps = max(1, int(recipe.budget.amount / self.speed.step_seconds))
        self.schedule = recipe.choice("schedule")(recipe.schedule, self.steps)
        self.progress = Progress()

    def _drawn(self) -> Network:
        """The network as the seed draws it, the same in every process."""
        recipe = self.recipe
        torch.manual_seed(keyed(recipe.seed, "torch"))
        network = recipe.choice("network")(
            recipe.network,
            self.corpus.train.vocabulary,
            recipe.batch.context,
            generator=torch.Generator().manual_seed(keyed(recipe.seed, "init")),
        ).to(self.device.value)
        network.recompute = recipe.training.recompute
        return network

    def _equip(self) -> None:
        """Makes the network ready to be trained."""
        if self.compiled.value:
            self.network.compile()
        self.model = wrapped(StepLoss(self.network, self.objective), self.parallel.value)
        self.optimiser = self.recipe.choice("optimiser")(self.recipe.optimiser, self.network)

    def whole_network(self) -> Network:
        """The network with all its weights in this process, to be read only; every process has to ask for it."""
        if self.parallel.value != "fsdp":
            return self.network
        network = self._drawn()
        network.load_state_dict({name: whole(tensor) for name, tensor in self.network.state_dict().items()})
        return network

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
        """Time and memory of a few steps, taken on a copy that starts anew."""
        scratch = copy.copy(self)
        scratch.network = self._drawn()
        scratch._equip()
        scratch.progress = Progress()
        scratch.schedule = lambda step: 0.0  # type: ignore[assignment]
        return measure(scratch)

    def batches(self, step: int) -> list:
        """Micro-batches of a step for this process, on the host: a pure function of (seed, step, rank)."""
        pieces = self.recipe.batch.micro_batches
        first, parts = self.ranks.rank * pieces, self.ranks.count * pieces
        key = keyed(self.recipe.seed, f"step/{step}")
        return [replace(self.view.batch(step, first + piece, parts), key=key) for piece in range(pieces)]

    def autocast(self):
        return autocast(self.device.value, self.precision.value)


def keyed(seed: int, purpose: str) -> int:
    """A seed of its own for every purpose."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=7).digest())
