"""Views: how a network sees the corpus. Packed rows for training, windows of documents for scoring.

    stream   a0 a1 a2 $  b0 b1 $  c0 ...          $ ends a document; rows of context 4:
    tokens   a0 a1 a2 $ | b0 b1 $  c0             starts   0  0  0  0 |  0  0  0  3
    targets  a1 a2 $  . | b1 $  .  c1             . is IGNORE: across documents nothing is asked

A view's batch is a pure function of (seed, step). All views read the one stream of `Order`, so methods with
different views see the same documents in the same order.
Letters: B rows, T tokens of a row.
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from tandem.corpus.order import Order
from tandem.corpus.store import Store
from tandem.recipe import UserError

IGNORE = -100
"""Marks positions without a target."""


@dataclass(frozen=True)
class Batch:
    """Rows of tokens with their targets.

    Attributes:
        tokens: (B, T) int64; where a position reads a bag of s tokens (corpus/bags.py), (B, T, s).
        targets: (B, T) int64, the token after each, IGNORE where there is no target; (B, T, S) with S targets each.
        starts: (B, T) int64, index in the row of the first position that each position may see: where its
            document starts, 0 if that was in an earlier row.
        key: random key of this step, the same for all its micro-batches and processes; None: nothing is drawn at
            random, as in every evaluation.
        row: place of the batch's first row among the rows of the step.
        blocks: (B, T) int64, index in the row at which the block of each position begins, for networks that read in
            blocks (corpus/partition.py); None: they draw their own.
    """

    tokens: Tensor
    targets: Tensor
    starts: Tensor
    key: int | None = None
    row: int = 0
    blocks: Tensor | None = None

    @classmethod
    def of(cls, **arrays: np.ndarray) -> Self:
        """The batch of these arrays, by the names of its attributes."""
        return cls(**{name: torch.from_numpy(array) for name, array in arrays.items()})  # type: ignore[arg-type]

    def keyed(self, key: int, part: int) -> Self:
        """This batch as part number `part` of a step whose parts have equally many rows."""
        return replace(self, key=key, row=part * len(self.tokens))

    def to(self, device: torch.device | str) -> Self:
        """Moves tokens and targets; `starts` and `blocks` stay on the host, where spans are planned."""
        return replace(self, tokens=moved(self.tokens, device), targets=moved(self.targets, device))


def pinned(x: Tensor, device: torch.device | str) -> Tensor:
    """A host tensor from which a copy to `device` does not block: from memory that is not pinned, a copy to CUDA would
    make the host wait for all pending work of the device."""
    return x.pin_memory() if torch.device(device).type == "cuda" and x.device.type == "cpu" else x


def moved(x: Tensor, device: torch.device | str) -> Tensor:
    """`x` on `device`, to which it is copied without waiting for what that has to do first."""
    return pinned(x, device).to(device, non_blocking=torch.device(device).type == "cuda")


class View(Protocol):
    """Batches of `rows` rows of `context` positions, a pure function of (seed, step)."""

    rows: int
    context: int

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """The rows of one step, or one of `parts` equal parts of them: together they are the same for any `parts`.

        Raises: UserError if the rows cannot be split into `parts`.
        """
        ...

    def read(self, step: int) -> int:
        """The position in the stream before `step`: everything before it has been read, or skipped."""
        ...


class PackedRows:
    """Documents one after the other, cut into rows of equal length. Row r of step s is the stream's slice
    [(s * rows + r) * context, ... + context], shifted by `begin`: its first `context` tokens are the inputs, its last
    `context` the targets."""

    def __init__(self, store: Store, seed: int, rows: int, context: int):
        self.order, self.rows, self.context, self.begin = Order(store, seed), rows, context, 0
        self.seed = seed

    def from_token(self, begin: int) -> "PackedRows":
        """The same rows, cut from this token of the stream on."""
        other = copy.copy(self)
        other.begin = begin
        return other

    def of_run(self, steps: int) -> "PackedRows":
        """The view for a run of this many steps; packed rows do not depend on it."""
        return self

    def require(self) -> None:
        """Raises: UserError if this view cannot serve the run; packed rows always can."""

    @property
    def words(self) -> str:
        return f"packed rows of {self.context}"

    def read(self, step: int) -> int:
        return self.begin + step * self.rows * self.context

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        rows, T = equal_part(self.rows, parts), self.context
        begin = self.read(step) + part * rows * T
        tokens, begins = self.order.read(begin, rows * T + 1)
        is_first = begins == np.arange(begin, begin + rows * T + 1)
        targets = np.where(is_first, IGNORE, tokens)
        row_begins = begin + np.arange(0, rows * T, T)
        starts = np.maximum(begins[:-1].reshape(rows, T) - row_begins[:, None], 0)
        return Batch.of(tokens=tokens[:-1].reshape(rows, T), targets=targets[1:].reshape(rows, T), starts=starts)


def equal_part(rows: int, parts: int) -> int:
    """Rows of each of `parts` equal parts. Raises: UserError if the rows cannot be split equally."""
    if rows % parts:
        raise UserError(f"batch: {rows} rows cannot be split into {parts} equal parts")
    return rows // parts


@dataclass(frozen=True)
class ScoringBatch:
    """A batch, with the document of each target and its index there: both (B, T) int64, -1 where nothing is scored.

    A network that is told where sentences end is also scored on these ends (`document` is that of the sentence, `index`
    is -1) and on the first token of a document (`index` is 0).
    """

    batch: Any
    """A Batch, or what the network reads instead."""
    document: Tensor
    index: Tensor


Window = tuple[int, int, int, int]
"""(document, first, last, asked): inputs first .. last-1 of a document, of which those from `asked` on have targets."""


def scoring_rows(
    store: Store, context: int, rows: int, documents: Iterable[int] | None = None
) -> Iterator[ScoringBatch]:
    """Tokens 2 to last of every document, document end included, each scored once, in batches of at most `rows` rows.

    A document starts with no context. One longer than a row is read in windows that overlap by half, so a token
    has at least min(index, context / 2) tokens before it.
    """
    return rows_of(windows(store, context, documents), store, context, rows)


def rows_of(
    windows: Iterable[Window], store: Store, context: int, rows: int, divided: bool = False
) -> Iterator[ScoringBatch]:
    """Windows as batches of at most `rows` rows; if `divided`, the scored part of each is a block of its own.

    Windows go into the first row of the batch with room for them, each with its own `starts`; the rest of a row
    holds document ends, which have no target and see only themselves.
    """
    for placed in placed_windows(windows, context, rows):
        height = 1 + max(row for row, *_ in placed)
        tokens, targets = np.full((height, context), store.eos), np.full((height, context), IGNORE)
        starts = np.tile(np.arange(context), (height, 1))
        blocks = starts.copy()
        document, index = np.full((height, context), -1), np.full((height, context), -1)
        for row, column, (i, first, last, asked) in placed:
            text = store.document(i)
            tokens[row, column : column + last - first] = text[first:last]
            starts[row, column : column + last - first] = column
            fresh = slice(column + asked - first, column + last - first)
            blocks[row, column : fresh.start], blocks[row, fresh] = column, fresh.start
            targets[row, fresh] = text[asked + 1 : last + 1]
            document[row, fresh], index[row, fresh] = i, np.arange(asked + 1, last + 1)
        batch = Batch.of(tokens=tokens, targets=targets, starts=starts, **({"blocks": blocks} if divided else {}))
        yield ScoringBatch(batch, torch.from_numpy(document), torch.from_numpy(index))


def windows(store: Store, context: int, documents: Iterable[int] | None = None) -> Iterator[Window]:
    """Windows of all documents, or of some, that overlap by half."""
    for i in range(len(store)) if documents is None else documents:
        end, first, last = int(store.lengths[i]) - 1, 0, 0  # the document end is predicted, never read
        while last < end:
            asked, last = last, min(first + context, end)
            yield i, first, last, asked
            first += max(1, context // 2)


def placed_windows(windows: Iterable[Window], context: int, rows: int) -> Iterator[list[tuple[int, int, Window]]]:
    """Yields, for each batch, its windows with their places: (row, column, window)."""
    placed, used = [], []
    for window in windows:
        length = window[2] - window[1]
        row = next((row for row, held in enumerate(used) if held + length <= context), len(used))
        if row == rows:
            yield placed
            placed, used, row = [], [], 0
        if row == len(used):
            used.append(0)
        placed.append((row, used[row], window))
        used[row] += length
    if placed:
        yield placed
