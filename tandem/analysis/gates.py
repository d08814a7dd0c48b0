"""How a network uses its memory of thoughts: gates over the run, what they let through, and whether it matters.

    gate            g of each block with cross-attention: as it was drawn, at every evaluation so far, and now
    increment       |g O(read)| / |h|, mean over positions that have a memory: a gate alone says little, for the matrix
                    behind it can be as large as it is small
    attention       share of a block's attention by age of the thought, 1 the newest, each over the queries that have a
                    thought of that age
    exchange        nats per token with the memories of other documents at the same sentence, less those with its own

A memory of zeros never occurs in training; one from another document has the right form and the wrong content. It is
what the other document remembers when it is read by itself. The seed of a sentence carries the newest thought, too,
made by a sentence that read another's memory, so memories are also exchanged with seeds off, and from the second newest
thought on. Up to eight documents are read together; only tokens of sentence steps at which more than one of them has a
sentence are counted.

Source: Thought Gestalt (arXiv 2512.25026) shows gates by block over training; the rest is ours.
Cost: the documents are scored eight times.
Shapes: R rows (sentences), F thoughts, M memory slots, P positions, H heads, D head width, L positions of a row.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from tandem.analysis.analysis import Analysis, Sums, chosen_documents
from tandem.corpus import ScoringBatch, StreamBatch
from tandem.networks.gestalt import Gestalt
from tandem.networks.gestalt_blocks import MemoryBlock, MemoryRead
from tandem.networks.gestalt_layout import PackedReader, keys_and_values
from tandem.recipe import Settings, UserError, register
from tandem.training.run import Run

TOGETHER = 8
"""At most so many documents are read together, and exchange their memories."""
MARKERS = "osD^v"

Seen = Callable[[int, MemoryRead, Tensor, PackedReader], object]
"""Called with a block's index (from 0), its cross-attention, the input of that, (1, P, C), and its reader."""


@contextlib.contextmanager
def watched(network: Gestalt, seen: Seen) -> Iterator[None]:
    """Calls `seen` before every cross-attention over thoughts."""
    with contextlib.ExitStack() as hooks:
        for layer in network.reads_memory(range(network.config.depth)):
            block = network.stack[layer]
            # A MemoryBlock calls parts of its memory; the others call it as a module, with the layer as an argument
            alone = isinstance(block, MemoryBlock)

            def tell(_: object, given: tuple, layer: int = layer, alone: bool = alone) -> None:
                memory, x, reader = network.stack[layer].memory, given[0], given[1 if alone else 2]
                if layer in reader.thoughts:
                    seen(layer, memory, x, reader)  # type: ignore[arg-type]

            hooks.enter_context((block if alone else block.memory).register_forward_pre_hook(tell))  # type: ignore[union-attr, operator]
        yield


class Use:
    """Adds up increments and attention by block."""

    def __init__(self, slots: int):
        self.slots = slots
        self.increments = Sums()
        self.mass: dict[int, np.ndarray] = {}
        self.queries: dict[int, np.ndarray] = {}

    def __call__(self, layer: int, memory: MemoryRead, x: Tensor, reader: PackedReader) -> None:
        q = memory.ask(x)
        increment = memory.increment(reader.remember(layer, q), reader.filled)
        self.increments.add(layer, (increment.norm(dim=-1) / x.norm(dim=-1))[0, reader.filled])
        attention, known = self.attention(layer, q, reader), reader.rows.filled
        mass = self.mass.setdefault(layer, np.zeros(self.slots))
        queries = self.queries.setdefault(layer, np.zeros(self.slots))
        for row, n in enumerate(known.tolist()):
            mass[:n] += attention[row, :n][::-1]
            queries[:n] += attention[row, :n].sum()

    @staticmethod
    def attention(layer: int, q: Tensor, reader: PackedReader) -> np.ndarray:
        """(R, F): the probability of each thought, oldest first, mean over heads, summed over the row's positions."""
        keys, _ = keys_and_values(*reader.thoughts[layer], heads=q.shape[1])
        score_RHLF = reader.rows.lay(q) @ keys.transpose(2, 3) / math.sqrt(q.shape[-1])
        known = torch.from_numpy(reader.rows.filled).to(q.device)[:, None, None, None]
        hidden = torch.arange(keys.shape[2], device=q.device) >= known
        attention = score_RHLF.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
        is_real = reader.rows.lay(torch.ones_like(q))[:, :1, :, :1]  # the rest of the rectangle is no query
        return (attention * is_real).mean(1).sum(1).double().cpu().numpy()


def exchange(youngest: int, batch: StreamBatch, memories: Iterator[Tensor]) -> Seen:
    """Gives each sentence of a batch the memory of the next document that has a sentence at this step; thoughts younger
    than `youngest` stay its own. `memories`: what is read where nothing is exchanged, in order."""
    reading = np.repeat(np.arange(1, len(batch.rows_at)), batch.rows_at[1:])
    """For each thought that is read at all, in order, the sentence step at which it is the newest."""

    def swap(layer: int, memory: MemoryRead, x: Tensor, reader: PackedReader) -> None:
        thoughts, ranks = next(memories), reader.thoughts[layer][1]
        filled, windows = reader.rows.filled, reader.rows.windows.cpu().numpy()
        step = np.where(filled > 0, reading[windows[np.arange(len(filled)), filled - 1]], 0)
        other = np.arange(len(filled))
        for t in np.unique(step):
            (same,) = np.nonzero(step == t)
            other[same] = np.roll(same, -1)
        age = torch.from_numpy(filled)[:, None] - torch.arange(thoughts.shape[1])
        kept = (age < youngest).to(thoughts.device)[..., None]
        reader.thoughts[layer] = torch.where(kept, thoughts, thoughts[torch.from_numpy(other)]), ranks

    return swap


def _memories(network: Gestalt, batch: StreamBatch) -> Iterator[Tensor]:
    """What is read where nothing is exchanged, in order."""
    found: list[Tensor] = []
    with watched(network, lambda layer, memory, x, reader: found.append(reader.thoughts[layer][0])):
        network.score(batch)  # type: ignore[arg-type]
    return iter(found)


@torch.no_grad()
def nats_per_token(
    network: Gestalt, scorings: list[ScoringBatch], youngest: int | None = None, use: Seen | None = None
) -> float:
    """Nats per token at sentence steps, except the first, at which more than one document has a sentence.

    Args:
        youngest: memories are exchanged from this age on; None: they are not.
        use: called before every cross-attention, where memories are not exchanged.
    """
    nats = tokens = 0.0
    for scoring in scorings:
        batch: StreamBatch = scoring.batch
        seen = use if youngest is None else exchange(youngest, batch, _memories(network, batch))
        with watched(network, seen) if seen else contextlib.nullcontext():
            nll = network.score(batch).double().cpu()  # type: ignore[arg-type]
        step = network.steps_of_labels(batch)
        counted = (scoring.index > 0) & (torch.tensor(batch.rows_at)[step] > 1) & (step > 0)
        nats, tokens = nats + float(nll[counted].sum()), tokens + int(counted.sum())
    if not tokens:
        raise UserError(
            "analysis.documents: of those read together, no two have a second sentence; ask for more of them"
        )
    return nats / tokens


@register("analysis", "gates")
class Gates(Analysis):
    """Gates of a memory of thoughts over the run, what they let through, and what wrong memories cost."""

    asks = "gates"
    numbered = "block"

    class Config(Settings):
        documents: int = Field(50, ge=2)
        """Held-out documents that are read."""

    def measure(self, run: Run) -> dict[str, Any]:
        """Gates, increments and attention by block, counted from 1; gates over the run; cost of exchanged memories."""
        network, store, recipe = run.network, run.corpus.validation, run.recipe
        assert isinstance(network, Gestalt)
        if not network.gates:
            raise UserError("analyse gates: no block of this network reads thoughts by cross-attention")
        chosen = chosen_documents(store, self.config.documents, shortest=2)
        scorings = [
            ScoringBatch(s.batch.to(run.device.value), s.document, s.index)
            for group in np.array_split(chosen, -(-len(chosen) // TOGETHER))
            for s in network.scoring(store, int(store.lengths[group].sum()), 1, group)
        ]
        use, unseeded = Use(network.config.memory), network.unseeded()
        own = nats_per_token(network, scorings, use=use)
        own_unseeded = nats_per_token(unseeded, scorings) if network.config.seed else own
        cost = {"all": nats_per_token(network, scorings, 1) - own}
        for name, youngest in (("all, seeds off", 1), ("from the second newest on, seeds off", 2)):
            cost[name] = nats_per_token(unseeded, scorings, youngest) - own_unseeded
        points = self.folder.records("likelihood") if self.folder else []
        now = run.progress.step
        course = {p["step"]: p["gates"] for p in points if "gates" in p and p["step"] <= now} | {now: network.gates}
        if recipe.start.run is None:  # otherwise they began as another run left them
            course = {0: dict.fromkeys(network.gates, 1.0)} | course
        return {
            "gates": network.gates,
            "on_the_way": [{"step": step, "gates": gates} for step, gates in course.items()],
            "increment": {str(layer + 1): mean for layer, mean in use.increments.means().items()},
            "attention_by_age": {
                str(layer + 1): (mass / np.maximum(use.queries[layer], 1)).tolist() for layer, mass in use.mass.items()
            },
            "nats_per_token": own,
            "cost_of_exchange": cost,
        }

    def draw(self, record: dict[str, Any], axes: Any) -> None:
        """Gates by step, a line for each block; each is wider than the next, so that none hides one that is alike."""
        points, blocks = record["on_the_way"], record["gates"]
        steps = [point["step"] for point in points]
        for number, block in enumerate(blocks):
            values = [point["gates"][block] for point in points]
            width = 1.5 + 3 * (1 - (number + 1) / len(blocks))
            shape, colour = MARKERS[number % len(MARKERS)], f"C{number % 10}"
            axes.plot(steps, values, f"{colour}{shape}-", linewidth=width, markersize=width + 4, label=f"block {block}")
        axes.set(xlabel="step", ylabel="gate of the memory")
        axes.legend(frameon=False)
