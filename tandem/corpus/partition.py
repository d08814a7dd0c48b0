"""Partitions: where in a row the blocks begin that a double decoder generates token by token.

    row       a0 a1 a2 a3 a4 a5 a6 $  b0 b1 b2 $       $ ends a document, and with it a block
    splits          ^        ^              ^          drawn inside of documents, never where one starts
    blocks    0  0  2  2  2  5  5  5  8  8  10 10      index in the row at which each position's block begins

A batch may bring its own blocks (`Batch.blocks`); then nothing is drawn. A prompt and its continuation (in generation,
prefix LM and tasks) are a partition with one boundary per document, at the prompt's last token:

    batch = replace(batch, blocks=prompt_blocks(batch.starts, lengths))       lengths: tokens of the prompt

In training, blocks are drawn from (seed, step, row, document), so micro-batches and processes change nothing. For a
score, they must be fixed before the text is read: they are drawn for a whole row from the document's start, however
soon the document ends (blocks that depended on its length would reveal it), with a key set by its first token.

Source: Block-Based Double Decoders; the authors' sampler is `scope: row, shared: true`. Shapes: B rows, T tokens.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from tandem.recipe import Settings

FEWEST, MOST = 2, 7
"""Splits of a row or document: a uniform number from FEWEST to MOST."""
BOUNDS: dict[str, Callable[[Tensor], Tensor]] = {
    "every_token": lambda starts: torch.arange(starts.shape[1]).expand_as(starts),
    "single": lambda starts: starts,
}
"""Blocks (B, T) of documents that begin at `starts` (B, T): all context through latents, and none."""


class PartitionConfig(Settings):
    """Where blocks begin in training, and when whole texts are scored."""

    strategy: Literal["random_uniform", "every_token", "single"] = "random_uniform"
    """2 to 7 splits at random places; every token its own block; or one block per document: no context."""
    scope: Literal["document", "row"] = "document"
    """What is split: each document, or the row, whatever its documents."""
    shared: bool = False
    """All rows of a step have the same splits."""
    align: int = Field(default=1, ge=1)
    """Splits are at multiples of this in the row; 64 or 128 makes attention cheaper."""
    min_context: int | None = Field(default=None, ge=1)
    """Most tokens in the first block of a document, rounded up to `align`; null: as many as were drawn."""

    def derive(self):
        if self.shared and self.scope == "document":
            raise ValueError("shared = true: gives all rows the same splits, but documents differ; take scope: row")
        return {}


def drawing(*key: int) -> np.random.Generator:
    """A random generator seeded by the key."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def draw_splits(generator: np.random.Generator, places: range, most: int) -> np.ndarray:
    """Where all blocks but the first begin, sorted: 2 to 7 of `places`, at most `most`, without repetition."""
    count = min(int(generator.integers(FEWEST, MOST + 1)), most, len(places))
    return places.start + places.step * np.sort(generator.choice(len(places), size=count, replace=False))


def training_blocks(config: PartitionConfig, starts: Tensor, key: int, row: int = 0) -> Tensor:
    """Blocks (B, T) of one step's rows from `row` on, whose documents begin at `starts` (B, T)."""
    B, T = starts.shape
    if config.strategy != "random_uniform":
        return BOUNDS[config.strategy](starts)
    blocks = starts.clone()
    for b in range(B):
        if config.scope == "row":
            splits = draw_splits(drawing(key, 0 if config.shared else row + b), _places(2, T - 1, config.align), T)
            for start, end in documents(starts[b]):
                latest = _latest(config, start, end)
                if latest and not ((splits > start) & (splits <= latest[0])).any():
                    splits = np.sort(np.r_[splits, latest[0]])
        else:
            drawn = [_splits(config, key, row + b, start, end) for start, end in documents(starts[b])]
            splits = np.concatenate([np.empty(0, np.int64), *drawn])
        blocks[b] = _begins(splits, starts[b])
    return blocks


def scoring_blocks(config: PartitionConfig, starts: Tensor, tokens: Tensor, length: int, number: int) -> Tensor:
    """Blocks (B, T) of the partition `number` for scoring texts, in rows of `length` tokens."""
    if config.strategy != "random_uniform":
        return BOUNDS[config.strategy](starts)
    blocks = starts.clone()
    for b in range(len(starts)):
        for start, end in documents(starts[b]):
            opening = int(tokens[b, start].flatten()[0])
            splits = _splits(config, number, opening, 0, max(length, 2))
            blocks[b, start:end] = start + _begins(splits, torch.zeros(end - start, dtype=torch.long))
    return blocks


def prompt_blocks(starts: Tensor, lengths: Tensor | int) -> Tensor:
    """Blocks (B, T) with one boundary per document: at the last of its first `lengths` (B, T) or (B, 1) tokens, >= 1.

    So the context is the prompt without its last token, which opens the block that continues it.
    """
    boundary = starts + torch.as_tensor(lengths) - 1
    return torch.where(torch.arange(starts.shape[1]) >= boundary, boundary, starts)


def documents(starts_T: Tensor) -> Iterator[tuple[int, int]]:
    """(first, end) of the documents of a row that have more than one position."""
    starts = starts_T.numpy()
    edges = [0, *(np.flatnonzero(np.diff(starts)) + 1).tolist(), len(starts)]
    yield from ((a, b) for a, b in pairwise(edges) if b - a > 1)


def _splits(config: PartitionConfig, key: int, other: int, start: int, end: int) -> np.ndarray:
    """Splits of one document, at start < place < end."""
    places = _places(start + 1, end, config.align)
    splits = draw_splits(drawing(key, other, start), places, end - start - 2)
    latest = _latest(config, start, end)
    if latest and not (splits[:1] <= latest[0]).any():
        splits = np.r_[latest[0], splits[1:]]
    return splits


def _latest(config: PartitionConfig, start: int, end: int) -> range:
    """Places from the latest one where a document's first block may end; none: it may be the whole document."""
    return range(0) if config.min_context is None else _places(start + config.min_context, end, config.align)


def _places(first: int, end: int, align: int) -> range:
    return range(-(-first // align) * align, end, align)


def _begins(splits: np.ndarray, starts_T: Tensor) -> Tensor:
    """For every position, the last split at or before it, or its document's start if that is later."""
    at = np.searchsorted(splits, np.arange(len(starts_T)), side="right")
    return torch.maximum(torch.from_numpy(np.r_[0, splits].astype(np.int64)[at]), starts_T)
