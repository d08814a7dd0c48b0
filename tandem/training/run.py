"""A run: everything a recipe names, built and ready to step.

    run = Run(recipe, corpus)         built from scratch, at step 0
    train(run, observers, save, 500)  training/loop.py: a checkpoint every 500 steps

Randomness comes from generators keyed by (seed, purpose), so that more draws in one part never change another part.
"""

import copy
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from pydantic import Field

from tandem.corpus import Corpus, Tokenizer
from tandem.networks.network import Network
from tandem.nn.init import roles
from tandem.objectives.phases import Phases
from tandem.recipe import Budget, Recipe, Settings, UserError, register
from tandem.training.device import CPU_FLOPS, autocast, choose_compile, choose_device, choose_precision
from tandem.training.folder import PLACES
from tandem.training.parallel import (
    ALONE,
    Ranks,
    StepLoss,
    choose_parallel,
    cut_like,
    require_divisible,
    whole,
    wrapped,
)
from tandem.training.progress import Progress
from tandem.training.schedule import scheduled
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
        """Pieces that a step is cut into, one in memory at a time; changes nothing but rounding,
        which masks are drawn for dropout, and the balance loss of experts."""

    @classmethod
    def check(cls, recipe: Recipe):
        batch = recipe.batch
        if batch.rows % batch.micro_batches:
            yield "batch.micro_batches", f"must divide batch.rows ({batch.rows})"


class Run:
    """Network, objective, view, optimiser and schedule of one recipe, on one device per process."""

    def __init__(
        self,
        recipe: Recipe,
        corpus: Corpus,
        steps: int | None = None,
        ranks: Ranks = ALONE,
        fresh: bool = False,
        weights: bool = True,
    ):
        """`fresh`: the run begins here, with the weights that the recipe starts from, and not at a checkpoint.
        `weights`: without, its network has shapes alone, of any size, and takes no step."""
        self.recipe, self.corpus, self.ranks = recipe, corpus, ranks
        batch = recipe.batch
        told = {key: value for key, value, _ in recipe.table() if not key.startswith(PLACES)}
        with ranks.together():  # before the processes exchange anything else
            ranks.require_alike(told)
            require_divisible(batch.rows, batch.micro_batches, ranks)
            self.device = choose_device(recipe.training, ranks.local if ranks.count > 1 else None)
            if self.device.value.type == "cuda":
                torch.set_num_threads(1)  # targets and spans are few numbers, for which to wake a team costs more
            self.network = self._drawn(weights=weights)
            if fresh:
                start(self.network, recipe, corpus)
            self.objective = recipe.choice("objective")(recipe.objective)
            self.rows = self.network.view(corpus.train, recipe.seed, batch.rows, batch.context)
            self.precision = choose_precision(recipe.training, self.device.value)
            self.cost = self.network.cost()
            budget = recipe.budget
            paid = self.paid(budget)
        self.steps = steps or paid or 0
        self.view = self._phases(self.steps)
        with ranks.together():
            work = budget.amount if budget.unit == "seconds" else self.flops(self.steps) / CPU_FLOPS
            self.compiled = choose_compile(recipe.training, self.device.value, paid, work)
            self.parallel = choose_parallel(recipe.training, ranks, self.device.value, self.cost.total_parameters)
        chosen = {"device": self.device.value.type, "precision": self.precision.value}
        chosen |= {"compile": self.compiled.value, "parallel": self.parallel.value}
        with ranks.together():
            ranks.require_alike({f"training.{key}": v for key, v in chosen.items()} | {"corpus": corpus.fingerprints})
        self._equip()
        self.speed: Speed | None = None
        if not self.steps:
            speed = self.speed = self.measure()
            with ranks.together():
                seconds = lambda view, steps: speed.seconds(self._flops(view, steps))
                self.steps = self._paid_steps(budget.amount, seconds)
            self.view = self._phases(self.steps)
        with ranks.together():
            self.rows.of_run(self.steps).require()
            for phase in self.view.phases:
                require_divisible(batch.rows, batch.micro_batches, ranks, max(1, batch.rows // phase.view.rows))
            if fresh and hasattr(self.objective, "require"):  # the recipe may name a step that this run does not reach
                self.objective.require(self.steps)
        self.schedule = scheduled(recipe, self.view, self.steps)
        self.progress = Progress(steps=self.steps)

    def _drawn(self, purpose: str = "init", weights: bool = True) -> Network:
        """The network initialised from the seed for a purpose, the same in every process; or its shapes alone."""
        recipe, kind = self.recipe, self.recipe.choice("network")
        shape = recipe.network, self.corpus.train.vocabulary, recipe.batch.context
        if weights:
            generator = torch.Generator().manual_seed(keyed(recipe.seed, purpose))
            with torch.random.fork_rng(devices=[]):  # who opens a run keeps the state of PyTorch's own generator
                torch.default_generator.manual_seed(keyed(recipe.seed, "torch"))
                network = kind(*shape, generator=generator).to(self.device.value)
        else:
            network = kind.outlined(*shape)
        network.recompute = recipe.training.recompute
        network.segmentation = recipe.corpus.sentences
        return network

    def _equip(self) -> None:
        """Makes the network ready to be trained."""
        if self.compiled.value:
            self.network.compile()
        self.model = wrapped(StepLoss(self.network, self.objective), self.parallel.value)
        self.optimiser = self.recipe.choice("optimiser")(self.recipe.optimiser, self.network)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.corpus.tokenizer

    def whole_network(self) -> Network:
        """The network with all its weights in this process, to be read only; every process has to call this."""
        if self.parallel.value != "fsdp":
            return self.network
        network = self._drawn()
        network.load_state_dict({name: whole(tensor) for name, tensor in self.network.state_dict().items()})
        return network

    def _phases(self, steps: int) -> Phases:
        return Phases(self.objective.phases(self.rows.of_run(steps), steps))

    def shared(self, recipe: Recipe, steps: int) -> int:
        """How many of its first steps a run of `steps` steps takes exactly as this one, where its recipe has another
        schedule, or phases that begin at other steps, and is the same in all else."""
        if self.rows.of_run(steps) is not self.rows.of_run(self.steps):
            return 0  # what a step reads depends on the length of the run
        view = Phases(recipe.choice("objective")(recipe.objective).phases(self.rows.of_run(steps), steps))
        # With whether they read bags: where these end at once, the phase that begins at 0 is another
        ours, theirs = ({(phase.first, bool(phase.note)) for phase in v.phases} for v in (self.view, view))
        switches = [first for first, _ in ours ^ theirs]
        most, schedule = min(steps, self.steps, *switches), scheduled(recipe, view, steps)
        return next((step for step in range(most) if schedule(step) != self.schedule(step)), most)

    def _flops(self, view: Phases, step: int) -> int:
        return view.flops(self.cost, step)

    def paid(self, budget: Budget) -> int | None:
        """Steps that a run of this recipe takes with this budget; None: it is in seconds, which have to be measured."""
        spent = {"steps": lambda view, steps: steps, "tokens": Phases.tokens, "flops": self._flops}
        return self._paid_steps(budget.amount, spent[budget.unit]) if budget.unit in spent else None

    def _paid_steps(self, amount: float, spent: Callable[[Phases, int], float]) -> int:
        """Steps of the longest run, phases included, that spends at most `amount`; a longer run never spends less."""

        def price(steps: int) -> float:
            return spent(self._phases(steps), steps)

        if price(1) > amount:
            one = f"{price(1):,}" if isinstance(price(1), int) else f"{price(1):.3g}"
            raise UserError(f"budget = {self.recipe.budget}: one step alone takes {one} {self.recipe.budget.unit}")
        low, high = 1, 2  # `low` is affordable
        while price(high) <= amount:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if price(middle) <= amount else (low, middle)
        return low

    def enter(self, step: int) -> None:
        """What happens once, before the first step of a phase."""
        phase = self.view.at(step)
        if phase.first != step or not step:
            return
        self.progress.usual.clear()  # losses of one phase say nothing about those of the next
        if phase.redraws:
            fresh, role = dict(self._drawn(f"redrawn/{step}").named_parameters()), roles(self.network)
            with torch.no_grad():
                for name, parameter in self.network.named_parameters():
                    # Learned positions and SPS's first prediction are embeddings, too, but stay
                    if role[name] == "head" or name.endswith("table.weight"):
                        parameter.copy_(cut_like(fresh[name], parameter))

    def tokens(self, step: int) -> int:
        """Tokens of text read before `step`."""
        return self.view.tokens(step)

    def flops(self, step: int) -> int:
        """FLOPs spent on training before `step`."""
        return self._flops(self.view, step)

    def share(self, step: int) -> float:
        """FLOPs of a step over those of the mean step of its phase: some networks draw how much a step computes."""
        phase, drawn = self.view.at(step), self.network.cost_of(self._key(step))
        return phase.flops(drawn, 1) / phase.flops(self.cost, 1)

    def place(self, step: int) -> str:
        """What a step reads, in words."""
        return f"tokens {self.tokens(step):,} to {self.tokens(step + 1):,} of the text in its order"

    @property
    def note(self) -> str:
        """Why the network is not a language model yet; empty if it is one."""
        return self.view.at(self.progress.step - 1).note if self.progress.step else ""

    def measure(self) -> Speed:
        """Time and memory of a few steps, taken on a freshly initialised copy."""
        scratch = copy.copy(self)
        scratch.network = self._drawn()
        scratch._equip()
        scratch.progress = Progress()
        scratch.schedule = lambda step: 0.0
        return measure(scratch)

    def batches(self, step: int) -> list[Any]:
        """Micro-batches of a step for this process, on the host: a pure function of (seed, step, rank)."""
        pieces = self.recipe.batch.micro_batches
        first, parts = self.ranks.rank * pieces, self.ranks.count * pieces
        key = self._key(step)
        return [self.view.batch(step, part, parts).keyed(key, part) for part in range(first, first + pieces)]

    def _key(self, step: int) -> int:
        return keyed(self.recipe.seed, f"step/{step}")

    def autocast(self) -> AbstractContextManager:
        return autocast(self.device.value, self.precision.value)


def keyed(seed: int, purpose: str) -> int:
    """A separate seed for every purpose."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=7).digest())
