"""Prefix and suffix: a document is read up to a break point, and predicted from there on.

    row       a0 a1 a2 a3 a4 $  b0 b1 b2 $      $ ends a document; break points: 3 in a, 1 in b
    blocks    0  0  2  2  2  2  6  6  6  6      the last block of a document generates: it opens with the prefix's
    targets   .  .  a3 a4 $  .  b1 b2 $  .      last token, a2, and all before it, a0 a1, is context

This is a partition with one boundary (double decoder), a context and its continuation (encoder-decoder), or only a mask
on the loss (decoder). All three read the same batch, so rows, labels and break points are the same.

At a break point n, tokens n, n + 1, ... of a document are predicted from those before; n is uniform over all values
that leave a target. In training, (seed, step, row, document) decide it; in a score, the document and its piece do.
Letters: B rows, T tokens of a row.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tandem.corpus.partition import drawing
from tandem.corpus.store import Store
from tandem.corpus.views import IGNORE, Batch, PackedRows, Window, equal_part

Scope = Literal["document", "row"]
TRAINED, SCORED = 1, 2
"""Random keys of break points: those of a training run, and those that are the same in every score."""


def break_points(generator: np.random.Generator, most: int | np.ndarray) -> np.ndarray:
    """n for texts with `most` places for it: uniform on 1 .. most, in the shape of `most`."""
    return generator.integers(1, np.asarray(most) + 1)


class PrefixRows:
    """The packed rows with a break point for each document, or one per row for all its documents.

    Args:
        scope: "row": documents before the row's break point have no targets, those after it have all of theirs.
        shared: all rows of a step use the same random numbers.
    """

    def __init__(self, rows: PackedRows, scope: Scope = "document", shared: bool = False):
        self.packed, self.rows, self.context = rows, rows.rows, rows.context
        self.scope, self.shared = scope, shared

    def read(self, step: int) -> int:
        return self.packed.read(step)

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """tokens, targets, starts and blocks, (B, T) each."""
        batch = self.packed.batch(step, part, parts)
        first, T = part * equal_part(self.rows, parts), self.context
        index, begins = np.arange(T), []
        for row, (starts, targets) in enumerate(zip(batch.starts.numpy(), batch.targets.numpy(), strict=True), first):
            generator = drawing(TRAINED, self.packed.seed, step, 0 if self.shared else 1 + row)
            if self.scope == "row":
                begins.append(np.full(T, break_points(generator, max(1, T - 2)) - 1))
                continue
            document = np.cumsum(index == starts) - 1
            asks = np.bincount(document, weights=targets != IGNORE).astype(np.int64)
            begins.append(starts + break_points(generator, np.maximum(asks, 1))[document] - 1)
        return divided(batch, torch.from_numpy(np.stack(begins)))


def divided(batch: Batch, begins: Tensor) -> Batch:
    """The batch with targets only from `begins` (B, T) on, the index in the row from which its document generates.

    A document that lies entirely before it is one block. A document that starts after it generates from its own start
    where documents are masked; otherwise it continues the block.
    """
    index = torch.arange(batch.starts.shape[1])
    asked = index >= begins
    blocks = begins.where(asked, batch.starts)
    return replace(batch, targets=batch.targets.where(asked, IGNORE), blocks=blocks)


def generated_from(starts: Tensor, blocks: Tensor) -> Tensor:
    """(B, T) index in the row at which the last block of each position's document begins: the one that generates."""
    document = (torch.arange(starts.shape[1]) == starts).flatten().cumsum(0) - 1
    last = torch.zeros(document.numel() and int(document[-1]) + 1, dtype=torch.long)
    return last.scatter_reduce(0, document, torch.maximum(blocks, starts).flatten(), "amax")[document].view_as(starts)


def suffix_windows(store: Store, context: int, documents: Iterable[int] | None = None) -> Iterator[Window]:
    """Windows of documents, each with a break point from which on it is scored.

    A document longer than the context is read in pieces that do not overlap, each without context.
    """
    for i in range(len(store)) if documents is None else documents:
        end = int(store.lengths[i]) - 1  # the document end is predicted, never read
        for piece, first in enumerate(range(0, end, context)):
            last = min(first + context, end)
            yield i, first, last, first + int(break_points(drawing(SCORED, i, piece), last - first)) - 1
