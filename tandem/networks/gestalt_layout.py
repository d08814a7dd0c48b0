"""Where every position of a batch of sentence streams goes: rows are packed, so that no padding is ever computed.

    streams      a0 a1 a2 | b0 b1          step 0: a0 b0     step 1: a1 b1     step 2: a2

    a step       | s s | x x x x x x x | e e |       starts (thought or [BOS]), tokens row after row, ends ([EOS])
    a chunk      | s s | x x x x x x x | s s | x x x x x |      of later blocks: some steps, without their ends

Linears, norms, MLPs and head see these packed positions. Rows are laid out as a rectangle inside attention alone,
where causality keeps real positions from reading empty ones. The rows of a step have equally many thoughts before
them, so attention over memory needs no mask.

Everything here is made on the host from the lengths of the sentences, once per batch, and each tensor moves to the
device in one piece: nothing is read back inside the loop over sentences.

Letters: P packed positions, R rows (sentences), L columns of the rectangle, F thoughts that a row reads, M the most of
these, N tokens, q labels (N and one end a sentence), H heads, D head width, C width.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.nn.attention import Plan, Source, attend, plan_attention
from tandem.nn.rope import Rotation
from tandem.nn.spans import Span, causal, prefix, sent

CHUNK = 4096
"""Positions of a chunk of later blocks."""


@dataclass(eq=False)
class Rectangle:
    """Packed positions of some rows, and the rectangle of these: `cell` (P,) is where among R x L cells each goes."""

    rows: int
    columns: int
    cell: Tensor

    def lay(self, x: Tensor) -> Tensor:
        """(1, H, P, D), or more positions, to the rectangle (R, H, L, D), 0 where there is nothing."""
        own = x[0, :, : len(self.cell)].transpose(0, 1)
        return _laid(own, self.cell, self.rows * self.columns).unflatten(0, (self.rows, -1)).transpose(1, 2)

    def pick(self, y: Tensor, positions: int) -> Tensor:
        """The rectangle (R, H, L, D) to (1, H, positions, D), 0 after the first P."""
        picked: Tensor = _Pick.apply(y.transpose(1, 2).flatten(0, 1), self.cell, positions)
        return picked.transpose(0, 1)[None]

    def read(self, q: Tensor, k: Tensor, v: Tensor, way: tuple[Span, Plan], dropout: float = 0.0) -> Tensor:
        """What queries (1, H, P, D) read of their rows' keys and values (R, H, N, D), in a `planned` way; there may be
        more queries than P, which read nothing."""
        span, plan = way
        return self.pick(attend(self.lay(q), [Source(k, v, span)], plan=plan, dropout=dropout), q.shape[2])


@dataclass(eq=False)
class Rows(Rectangle):
    """The rectangle of some sentences, and what each position is and each row reads.

    places: (P,) positions in the sentence.
    filled: (R,) thoughts that each row reads, on the host; `remembers` (P,): whether there are any.
    windows: (R, F) which of all thoughts those are, oldest first; in a row with fewer, the last columns mean nothing.
    """

    places: Tensor
    filled: np.ndarray
    remembers: Tensor
    windows: Tensor
    ragged: tuple[Span, Plan] | None = None

    def own(self) -> tuple[Span, Plan]:
        """How the rows read their own positions."""
        return _shared(None, self.columns, self.columns, self.cell.device)

    def thoughts(self) -> tuple[Span, Plan]:
        """How the rows read their thoughts."""
        keys, device = self.windows.shape[1], self.cell.device
        if (self.filled == self.filled[0]).all():
            return _shared(int(self.filled[0]), self.columns, keys, device)
        if self.ragged is None:
            self.ragged = planned(prefix(torch.from_numpy(self.filled), self.columns), keys, device)
        return self.ragged


@lru_cache(maxsize=4096)
def _shared(filled: int | None, columns: int, keys: int, device: torch.device) -> tuple[Span, Plan]:
    """Plans that batches share, with gradients or without: causal rows, or rows that all read `filled` thoughts."""
    with torch.inference_mode(False):
        places = torch.zeros(1, columns, dtype=torch.long)
        span, plan = planned(causal(places) if filled is None else prefix(filled, columns), keys, device)
        assert plan.tiles  # made here, in this mode, not on first use
        return span, plan


def planned(span: Span, keys: int, device: torch.device) -> tuple[Span, Plan]:
    """A way to read a rectangle: tiled on every device, as short rows are one plain call."""
    return span, plan_attention([span], [keys], device=device, backend="tiled")


class _Pick(torch.autograd.Function):
    """The inverse of _laid, then zeros up to `length`; the backward of index_select would add rows up one by one."""

    @staticmethod
    def forward(ctx, y: Tensor, index: Tensor, length: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.cells, picked = len(y), y.new_empty(length, *y.shape[1:])
        torch.index_select(y, 0, index, out=picked[: len(index)])
        picked[len(index) :] = 0
        return picked

    @staticmethod
    def backward(ctx, grad: Tensor):
        (index,) = ctx.saved_tensors
        return _laid(grad[: len(index)], index, ctx.cells), None, None


def _laid(x: Tensor, index: Tensor, cells: int) -> Tensor:
    """Scatters the rows of x (P, ..) into zeros (cells, ..), by an index without repetitions."""
    return x.new_zeros(cells, *x.shape[1:]).index_copy_(0, index, x)


class Layout:
    """The layout of a batch of streams, given the lengths of their sentences.

    Args:
        lengths: tokens, by stream and by sentence.
        memory: M.
        in_context: thoughts are positions in front of the sentence, and are read like tokens.
        recurrent: sentence after sentence; else all sentences at once, as nothing passes from one to another: M is 0.

    steps, chunks: Rows of the earlier blocks, sentence step by sentence step, and of the later ones.
    sentences: the sentences of each step, numbered in batch order, (R,) int64 on the host.
    rest: (N + sentences,) token indices, step after step, tokens then ends; N stands for an end.
    order: (q,) which position of the chunks, concatenated, predicts each label.
    """

    def __init__(
        self,
        lengths: Sequence[Sequence[int]],
        *,
        memory: int,
        in_context: bool,
        recurrent: bool,
        device: torch.device | str,
    ):
        self.memory, self.in_context, self.device = memory, in_context, torch.device(device)
        self.lengths = np.array([n for stream in lengths for n in stream], dtype=np.int64)
        self.counts = np.array([len(stream) for stream in lengths], dtype=np.int64)
        self.begins = np.cumsum(self.lengths) - self.lengths
        self.first = np.cumsum(self.counts) - self.counts
        self.tokens = int(self.lengths.sum())
        self.step = np.arange(len(self.lengths)) - np.repeat(self.first, self.counts)
        """The sentence step of each sentence."""
        self.sentences = self._by_step() if recurrent else self._all_at_once()
        self._thoughts = np.cumsum([0, *(len(of) for of in self.sentences[1:])])
        """Thoughts made before each step, counting only those that a next sentence reads."""
        self.steps = [self._rows([t], ends=True) for t in range(len(self.sentences))]
        self.widths = [len(of) for of in self.sentences]
        """R of each step: the first rows of one step are those of the next."""
        self.groups = self._groups()
        self.chunks = [self._rows(group, ends=False) for group in self.groups]
        self.rest = self._tensor(self._rest())
        self.order = self._tensor(self._order())

    # ---- which sentences go together ------------------------------------------------------------------------------

    def _by_step(self) -> list[np.ndarray]:
        order = np.argsort(-self.counts, kind="stable")  # streams with more sentences come first
        steps = range(int(self.counts.max(initial=0)))
        return [self.first[order[self.counts[order] > t]] + t for t in steps]

    def _all_at_once(self) -> list[np.ndarray]:
        if not len(self.lengths):
            return []
        piece = (np.cumsum(self.lengths + 2) - 1) // CHUNK
        return np.split(np.arange(len(self.lengths)), np.flatnonzero(np.diff(piece)) + 1)

    def _groups(self) -> list[list[int]]:
        """Steps of every chunk: consecutive ones, of up to CHUNK positions together, or one that has more."""
        groups: list[list[int]] = []
        held = 0
        for t, rows in enumerate(self.steps):
            size = len(rows.cell) - rows.rows  # without ends
            if not groups or held + size > CHUNK:
                groups.append([])
                held = 0
            groups[-1].append(t)
            held += size
        return groups

    def filled(self, t: int) -> int:
        """How many thoughts each row of a step reads."""
        return min(t, self.memory)

    # ---- where positions go -----------------------------------------------------------------------------------------

    def _rows(self, group: list[int], ends: bool) -> Rows:
        slots = [self.filled(t) if self.in_context else 0 for t in group]
        of = [self.lengths[self.sentences[t]] for t in group]
        longest = max(slot + int(n.max()) for slot, n in zip(slots, of, strict=True))
        L = longest + (2 if ends else 1)
        cells, places, filled, row = [], [], [], 0
        for t, slot, n in zip(group, slots, of, strict=True):
            own = row + np.arange(len(n))
            column = slot + ranges(np.ones_like(n), n)
            base = self.memory - slot if self.in_context else 0
            parts = [(np.repeat(own, slot), np.tile(np.arange(slot), len(n)), 0), (own, np.full(len(n), slot), base)]
            parts += [(np.repeat(own, n), column, base)] + ([(own, slot + n + 1, base)] if ends else [])
            cells += [r * L + c for r, c, _ in parts]
            places += [c + shift for _, c, shift in parts]
            filled.append(np.full(len(n), self.filled(t)))
            row += len(n)
        sizes = [int(n.sum()) + len(n) * (slot + 1 + ends) for slot, n in zip(slots, of, strict=True)]
        held = np.concatenate(filled)
        return Rows(
            row,
            L,
            self._tensor(np.concatenate(cells)),
            self._tensor(np.concatenate(places)),
            held,
            self._tensor(np.repeat([self.filled(t) > 0 for t in group], sizes)),
            self._tensor(self._windows(group)),
        )

    def _windows(self, group: list[int]) -> np.ndarray:
        """Thoughts are numbered step by step."""
        most = max(self.filled(t) for t in group)
        found = []
        for t in group:
            R, n = len(self.sentences[t]), self.filled(t)
            window = np.zeros((R, most), dtype=np.int64)
            window[:, :n] = np.arange(R)[:, None] + self._thoughts[t - n : t]
            found.append(window)
        return np.concatenate(found)

    def _rest(self) -> np.ndarray:
        parts = [np.empty(0, np.int64)]
        for of in self.sentences:
            parts += [ranges(self.begins[of], self.lengths[of]), np.full(len(of), self.tokens)]
        return np.concatenate(parts)

    def _order(self) -> np.ndarray:
        order, at = np.empty(self.tokens + len(self.lengths), dtype=np.int64), 0
        for t, of in enumerate(self.sentences):
            R, n = len(of), self.lengths[of]
            at += R * self.filled(t) if self.in_context else 0
            label = self.begins[of] + of
            order[label] = at + np.arange(R)
            order[ranges(label + 1, n)] = at + R + np.arange(int(n.sum()))
            at += R + int(n.sum())
        return order

    def after_tokens(self) -> Tensor:
        """(N,) the label of what follows each token: the next token of its stream, or else the end of its sentence."""
        of = np.repeat(np.arange(len(self.lengths)), self.lengths)
        place = ranges(np.ones_like(self.lengths), self.lengths)
        last = np.zeros(len(self.lengths), bool)
        last[self.first + self.counts - 1] = True
        return self._tensor(self.begins[of] + of + place + ((place == self.lengths[of]) & ~last[of]))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return sent(np.ascontiguousarray(array), self.device)


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """start, start + 1, .., start + count - 1 of each, one after the other."""
    return np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))


class PackedReader:
    """Reads own positions and thoughts of the rows of a step or a chunk; the result for `more` positions is 0."""

    def __init__(self, rows: Rows, rotation: Rotation | None, dropout: float, more: int = 0):
        self.rows, self.dropout = rows, dropout
        self.filled = F.pad(rows.remembers, (0, more))
        self.rotation = copy.copy(rotation)
        if self.rotation is not None:
            r, places = self.rotation, F.pad(rows.places, (0, more))
            r.cos_TJ, r.sin_TJ = r.cos_TJ[places], r.sin_TJ[places]
        self.thoughts: dict[int, tuple[Tensor, Tensor]] = {}
        """By layer: projected thoughts (R, F, 2C), and what their ranks add to keys, (M, C)."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.rows.read(q, self.rows.lay(k), self.rows.lay(v), self.rows.own(), self.dropout)

    def remember(self, layer: int, q: Tensor) -> Tensor:
        if layer not in self.thoughts:  # an empty sum: q gets a gradient of zero; laid out as where there are thoughts
            return (torch.zeros_like(q[0].transpose(0, 1)) + q[:, :, :0].sum()).transpose(0, 1)[None]
        k, v = keys_and_values(*self.thoughts[layer], heads=q.shape[1])
        return self.rows.read(q, k, v, self.rows.thoughts(), self.dropout)


def keys_and_values(projected: Tensor, ranks: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Projected thoughts (R, F, 2C), oldest first, to keys and values (R, H, F, D); rank 0 is the oldest."""
    k, v = projected.chunk(2, dim=-1)
    k = k + ranks[: k.shape[1]]
    return tuple(x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (k, v))  # type: ignore[return-value]


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x by an index that may repeat them; the backward of an embedding adds them up in one go."""
    return F.embedding(index, x)
