"""The networks and texts that the contract is checked on.

Networks are tiny. Their parameters are drawn far from zero, because at N(0, 0.02) attention hardly affects a tiny
network, and are float64, so that tolerances can be tight enough to catch any bug.

Shapes: B rows, T tokens, C width, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import tandem.networks
import tandem.objectives  # noqa: F401 - importing both registers all there are
from tandem.corpus import IGNORE, Batch, Order, PackedRows, divided, prompt_blocks
from tandem.corpus.order import Epoch
from tandem.networks.context_ready import ContextReady
from tandem.networks.network import Network
from tandem.objectives.phases import Phase
from tandem.recipe import registered

VOCABULARY, CONTEXT, EOS = 61, 40, 0
ROWS = [[1, 6, 11, 6], [2, 19, 3]]  # lengths of the documents of two rows, the document end included


@dataclass(frozen=True)
class Case:
    """A network at one of its tiny settings, the `turn[0]`-th of `turn[1]`."""

    name: str
    network: type[Network]
    config: Any
    vocabulary: int = VOCABULARY
    turn: tuple[int, int] = (0, 1)

    def __str__(self) -> str:
        return self.name

    def fresh(self, seed: int = 0) -> Network:
        """The network as training builds it."""
        generator = torch.Generator().manual_seed(seed)
        return self.network(self.config, self.vocabulary, CONTEXT, generator)  # type: ignore[call-arg]

    def build(self, seed: int = 0) -> Network:
        """The network in float64, every parameter moved far from its initial value."""
        network, generator = self.fresh(seed).double(), torch.Generator().manual_seed(seed)
        for parameter in network.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            if parameter.ndim > 1:
                parameter.data = noise / parameter.shape[-1] ** 0.5
            else:
                parameter.data += 0.3 * noise
        return network

    def pack(self, rows: list[list[list[int]]]) -> Batch:
        """Rows of documents with all the targets that this network can have: all, or the end of each document."""
        batch = pack(rows)
        if not self.network.suffixes_only:
            return batch
        lengths = torch.tensor([[row.count(start) for start in row] for row in batch.starts.tolist()])
        return divided(batch, batch.starts + lengths // 3)


def cases() -> list[Case]:
    """Every registered network at each of its tiny settings."""
    return [
        Case(f"{name}-{setting}", network, config, turn=(i, len(network.tiny())))
        for name, network in registered("network").items()
        for i, (setting, config) in enumerate(network.tiny().items())
    ]


def shipped() -> dict[str, type[Network]]:
    """Tandem's own networks: those of other packages are not exported, nor are their bugs known here."""
    return {name: cls for name, cls in registered("network").items() if cls.__module__.startswith("tandem.")}


def first_cases() -> list[Case]:
    """Every registered network at the first of its tiny settings."""
    return [*{case.network: case for case in reversed(cases())}.values()]


class _Half(nn.Module):
    def forward(self, h: Tensor, e: Tensor, first: Tensor, last_mlp: nn.Module) -> Tensor:
        return (h.masked_fill(first, 0) + e) / 2


def halving() -> ContextReady:
    """A network to work out by hand: blocks are the identity, F(norm(u)) = u / 2, every embedding is 1."""
    network = Case("", ContextReady, ContextReady.Config(width=16, heads=2, depth=1)).build()
    assert isinstance(network, ContextReady)
    network.correction = _Half()  # type: ignore[assignment]
    block: Any = network.blocks[0]
    for linear in (block.output, block.mlp.down):
        nn.init.zeros_(linear.weight)
    nn.init.ones_(network.wrapped.table.weight)
    return network


@dataclass(frozen=True)
class Task:
    """An objective at one of its tiny settings, and how its first phase reads given texts."""

    name: str
    objective: Any

    def __str__(self) -> str:
        return self.name

    def phase(self, rows: list[list[list[int]]]) -> Phase:
        """The first phase of a run over rows of equal length, given as documents."""
        return self.objective.phases(packed(rows), steps=2)[0]

    def batches(self, rows: list[list[list[int]]], parts: int = 1) -> list[Batch]:
        """The first step of it, in `parts` micro-batches."""
        view = self.phase(rows).view
        return [view.batch(0, part, parts) for part in range(parts)]


def tasks(*networks: type[Network], settings: int | None = None) -> list[Task]:
    """Every registered objective that all `networks` accept, at its tiny settings, or the first `settings` of them."""
    return [
        Task("-".join(filter(None, (name, setting))), cls(config))
        for name, cls in registered("objective").items()
        if not any(cls.refusal(network) for network in networks)
        for setting, config in [*cls.tiny().items()][:settings]
    ]


def shared_tasks(case: Case, settings: int | None = None) -> list[Task]:
    """Those of a network's tasks whose turn it is at this setting: one at least, and at all settings together all."""
    found, (i, count) = tasks(case.network, settings=settings), case.turn
    assert found, f"no objective accepts {case}"
    return found[i::count] or [found[i % len(found)]]


def packed(rows: list[list[list[int]]]) -> PackedRows:
    """Rows of equal length, given as documents, repeated forever."""
    view = PackedRows.__new__(PackedRows)
    view.order, view.begin = AsWritten([text for row in rows for text in row]), 0
    view.rows, view.context, view.seed = len(rows), sum(map(len, rows[0])), 0
    return view


class AsWritten(Order):
    """These documents, repeated forever in the given order."""

    sources = ()

    def __init__(self, documents: list[list[int]]):
        lengths = np.array([len(text) for text in documents])
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        tokens = np.concatenate(documents)
        known = {"vocabulary": VOCABULARY, "eos": EOS, "fetch": lambda *_: None}
        self.store = SimpleNamespace(tokens=tokens, lengths=lengths, offsets=offsets, **known)  # type: ignore[assignment]

    def epoch(self, number: int) -> Epoch:
        return Epoch(np.arange(len(self.store.lengths)), np.cumsum(self.store.lengths))

    def read(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        positions = np.arange(start, start + count)
        within = positions % self.store.offsets[-1]
        place = np.searchsorted(self.store.offsets, within, side="right") - 1
        return self.store.tokens[within], positions - within + self.store.offsets[place]


# ---- texts ----------------------------------------------------------------------------------------------------------


def document(length: int, seed: int) -> list[int]:
    """Random ids, the document end last."""
    generator = torch.Generator().manual_seed(seed)
    return [*torch.randint(1, VOCABULARY, (length - 1,), generator=generator).tolist(), EOS]


def pack(rows: list[list[list[int]]]) -> Batch:
    """Rows of documents side by side; shorter rows are padded with a document that has no targets."""
    width = max(sum(map(len, row)) for row in rows)
    tokens, targets, starts = [], [], []
    for row in rows:
        ids, asked, begin = [], [], []
        for text in row:
            begin += [len(ids)] * len(text)
            ids += text
            asked += [*text[1:], IGNORE]
        rest = width - len(ids)
        tokens.append(ids + [EOS] * rest)
        targets.append(asked + [IGNORE] * rest)
        starts.append(begin + [len(ids)] * rest)
    return Batch(torch.tensor(tokens), torch.tensor(targets), torch.tensor(starts))


def texts() -> list[list[list[int]]]:
    return [[document(n, 10 * r + d) for d, n in enumerate(row)] for r, row in enumerate(ROWS)]


def log_probabilities(network: Network, text: list[int], prompt: int | None = None) -> Tensor:
    """log p (T, V) of every id after every token of one text, from `score` with one row for each id.

    `prompt`: tokens that a session would get at once; a network that reads in blocks has one boundary there.
    """
    V = len(network.head)
    tokens = torch.tensor([text]).expand(V, -1)
    targets, starts = torch.arange(V)[:, None].expand_as(tokens), torch.zeros_like(tokens)
    blocks = None if prompt is None else prompt_blocks(starts, prompt)
    with torch.no_grad():
        return -network.score(Batch(tokens, targets, starts, blocks=blocks)).T


def refused(ask: Callable[[], object]) -> str:
    """What a ValueError says; empty where there is none."""
    try:
        ask()
    except ValueError as error:
        return str(error)
    return ""


def asked(batch: Batch) -> Iterator[tuple[int, int]]:
    """(row, position) of every target."""
    yield from map(tuple, (batch.targets != IGNORE).nonzero().tolist())
