"""Attention over spans by tiles: one SDPA call per tile of queries, over the slices of keys it reads.

Along a row both ends of every span only move forward, so the union of what the queries a .. b may read of a source
is one slice, from lo[a] to hi[b - 1], found without looking at a single pair:

    source 1            source 2
    # # # # . . . .     . # # . . . . .   ┐
    # # # # # . . .     . . # # . . . .   │ one tile: a call over keys 0..6 of source 1, side by side with
    # # # # # # . .     . . . # # . . .   ┘ keys 1..4 of source 2; the mask is about the ragged edges only

A row is first cut where a span jumps (documents, blocks) and then every STEP queries. Then neighbours are joined for
as long as one call over both costs less than two, in query-key pairs:

    cost = CALL + COPY * keys + queries * keys        half of the last term for a triangle

so a document that is plainly causal ends as one call with `is_causal`, queries that read the same keys as one call
without a mask, and two ragged streams as tiles of about a hundred queries. Rows are cut one by one, since documents
differ; rows that agree share their calls, and so do all rows of a few queries (decoding) where that is cheaper.

Exact, and differentiable by autograd alone: split, cat and SDPA. Keys are split once at all slice ends and tiles take
runs of the pieces, because the backward of a slice fills a whole tensor with zeros and that of a piece does not.

Cost: tests/nn/test_attention.py bounds the pairs visited, benchmarks/attention.py measures the time, and
docs/attention.md derives both. Where a tile has several pieces its keys are copied, and kept for the backward.
Shapes: B rows, S sources, T queries, N keys of a source, H heads, D head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

STEP = 64
"""Queries between two cuts; tiles are joined from these."""
CALL = 2048
"""What one more call costs, in query-key pairs (measured: docs/attention.md)."""
COPY = 16
"""What one more key in a call costs, its query-key pairs apart."""


@dataclass(frozen=True, eq=False)
class Tile:
    """One call: `queries` neighbours of every group against runs of pieces `(source, first, end)` of the keys.

    mask: None where every query reads every key, or additive (1 or rows, 1, groups * queries, keys).
    empty: which of these queries read nothing, (1 or rows, 1, groups * queries, 1); None: they all read.
    """

    queries: int
    pieces: tuple[tuple[int, int, int], ...]
    causal: bool
    mask: Tensor | None
    empty: Tensor | None
    masks: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def mask_for(self, dtype: torch.dtype) -> Tensor | None:
        """The mask in the dtype of the queries: beside float64, the CPU reads a float32 mask wrongly (torch 2.13)."""
        if self.mask is not None and dtype not in self.masks:
            self.masks[dtype] = self.mask.to(dtype)
        return self.masks.get(dtype)


@dataclass(frozen=True)
class Strip:
    """Neighbouring rows that share their tiles; sizes[s] are the pieces of source s, in keys."""

    rows: int
    sizes: list[list[int]]
    tiles: list[Tile]
    pairs: int


# ---- planning, on the host --------------------------------------------------------------------------------------------


def plan(lo: np.ndarray, hi: np.ndarray, keys: Sequence[int], device) -> list[Strip]:
    """Cuts spans (rows, sources, groups, queries) into strips of tiles, with masks on `device`."""
    R, T = lo.shape[0], lo.shape[-1]
    differs = ((lo[1:] != lo[:-1]) | (hi[1:] != hi[:-1])).any((1, 2, 3))
    edges = [0, *(np.flatnonzero(differs) + 1).tolist(), R]
    strips = [_Cutter(lo[a : a + 1], hi[a : a + 1], b - a) for a, b in zip(edges, edges[1:])]
    if len(strips) > 1 and T <= STEP:  # with more queries, tiles shared by rows that differ cost more than they save
        together = _Cutter(lo, hi, R)
        if together.total <= sum(strip.total for strip in strips):
            strips = [together]
    return [strip.build(keys, device) for strip in strips]


class _Cutter:
    """Where to cut the queries of `rows` rows with the same spans, or of all rows together; and the tiles then."""

    def __init__(self, lo: np.ndarray, hi: np.ndarray, rows: int):
        self.lo, self.hi, self.rows = lo, hi, rows
        R, self.sources, self.groups, self.T = lo.shape
        # Lists per source, since single numbers are looked up by the thousand; `outer` bounds hold the reads of all
        # rows and groups, `inner` ones are read by all of them.
        self.outer = list(zip(lo.min((0, 2)).tolist(), hi.max((0, 2)).tolist()))
        self.inner = list(zip(lo.max((0, 2)).tolist(), hi.min((0, 2)).tolist()))
        self.readers = [0, *np.cumsum((lo < hi).any((0, 1, 2))).tolist()]
        ramp = np.cumsum(np.diff(hi[0, :, 0], prepend=0) != 1, axis=-1)
        self.ramp = ramp.tolist() if R == self.groups == 1 else None
        jumps = np.flatnonzero((np.diff(lo) > 1).any((0, 1, 2))) + 1
        starts = [0, *jumps.tolist(), self.T]
        atoms = [(a, min(a + STEP, end)) for first, end in zip(starts, starts[1:]) for a in range(first, end, STEP)]
        self.tiles, self.total = self._join(atoms)

    def _join(self, atoms: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], float]:
        tiles, costs = [], []
        for a, b in atoms:
            cost = self._cost(a, b)
            if tiles:
                joined = self._cost(tiles[-1][0], b)
                if joined <= costs[-1] + cost:
                    a, cost = tiles.pop()[0], joined
                    costs.pop()
            tiles.append((a, b))
            costs.append(cost)
        return tiles, sum(costs)

    def _slices(self, a: int, b: int) -> list[tuple[int, int, int]]:
        """(source, first key, end) of what the queries a .. b read."""
        if self.readers[a] == self.readers[b]:
            return []
        slices = [(s, lo[a], hi[b - 1]) for s, (lo, hi) in enumerate(self.outer)]
        return [(s, first, end) for s, first, end in slices if first < end]

    def _is_triangle(self, a: int, b: int, slices) -> bool:
        """Whether the queries read 1, 2, 3 .. keys of the only slice."""
        if self.ramp is None or len(slices) != 1:
            return False
        ((s, first, end),) = slices
        lo, hi = self.outer[s]
        return lo[b - 1] == first and hi[a] == first + 1 and end - first == b - a and self.ramp[s][a] == self.ramp[s][b - 1]

    def _is_open(self, a: int, b: int, slices) -> bool:
        """Whether every query reads every key."""
        return all(self.inner[s][0][b - 1] == first and self.inner[s][1][a] == end for s, first, end in slices)

    def _pairs(self, a: int, b: int, slices) -> int:
        n = b - a
        if self._is_triangle(a, b, slices):
            return n * (n + 1) // 2
        return n * self.groups * sum(end - first for _, first, end in slices)

    def _cost(self, a: int, b: int) -> float:
        slices = self._slices(a, b)
        keys = sum(end - first for _, first, end in slices)
        return CALL + self.rows * (self._pairs(a, b, slices) + COPY * keys) if slices else 0

    def build(self, keys: Sequence[int], device) -> Strip:
        slices = [self._slices(a, b) for a, b in self.tiles]
        edges = [{0, n} for n in keys]
        for tile in slices:
            for s, first, end in tile:
                edges[s] |= {first, end}
        order = [sorted(e) for e in edges]
        place = [{edge: piece for piece, edge in enumerate(e)} for e in order]
        tiles = []
        for (a, b), tile in zip(self.tiles, slices):
            causal = self._is_triangle(a, b, tile)
            mask = empty = None
            if not causal and not self._is_open(a, b, tile):
                mask, empty = self._mask(a, b, tile, device)
            pieces = tuple((s, place[s][first], place[s][end]) for s, first, end in tile)
            tiles.append(Tile(b - a, pieces, causal, mask, empty))
        pairs = self.rows * sum(self._pairs(a, b, tile) for (a, b), tile in zip(self.tiles, slices))
        return Strip(self.rows, [np.diff(e).tolist() for e in order], tiles, pairs)

    def _mask(self, a: int, b: int, slices, device) -> tuple[Tensor, Tensor | None]:
        lo, hi = self.lo[..., a:b, None], self.hi[..., a:b, None]
        parts = [(lo[:, s] <= j) & (j < hi[:, s]) for s, first, end in slices for j in [np.arange(first, end)]]
        may = np.concatenate(parts, axis=-1).reshape(len(self.lo), 1, -1, sum(p.shape[-1] for p in parts))
        empty = ~may.any(-1, keepdims=True)
        # A row that reads nothing is computed over all keys and then set to zero: 0/0 is never formed, on any device.
        mask = torch.from_numpy(np.where(may | empty, np.float32(0), np.float32(-np.inf))).to(device)
        return mask, torch.from_numpy(empty).to(device) if empty.any() else None


# ---- running, on the device -------------------------------------------------------------------------------------------


def run(
    strips: list[Strip],
    queries: tuple[Tensor, ...],
    keys: list[Tensor],
    values: list[Tensor],
    scale: float | None,
    return_lse: bool,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The output of every group of queries and, where asked, its log-sum-exp."""
    if return_lse and queries[0].device.type != "cpu":
        raise ValueError("the tiled backend returns the log-sum-exp on the CPU only; use flex or dense")
    G, S, rows = len(queries), len(keys), [strip.rows for strip in strips]
    columns = []
    for strip, *x in zip(strips, *(_split(x, rows, 0) for x in (*queries, *keys, *values))):
        columns.append(_run_strip(strip, x[:G], x[G : G + S], x[G + S :], scale, return_lse))
    ys, lses = zip(*columns)
    return tuple(_cat(y, 0) for y in zip(*ys)), tuple(_cat(lse, 0) for lse in zip(*lses))


def _run_strip(strip: Strip, queries, keys, values, scale, return_lse):
    k_pieces = [_split(k, sizes, 2) for k, sizes in zip(keys, strip.sizes)]
    v_pieces = [_split(v, sizes, 2) for v, sizes in zip(values, strip.sizes)]
    lengths = [tile.queries for tile in strip.tiles]
    ys, lses = [], []
    for tile, *q in zip(strip.tiles, *(_split(q, lengths, 2) for q in queries)):
        k, v = ([x for s, a, b in tile.pieces for x in pieces[s][a:b]] for pieces in (k_pieces, v_pieces))
        y, lse = _call(tile, _cat(q, 2), _cat(k, 2), _cat(v, 2), scale, return_lse) if k else _nothing(_cat(q, 2))
        groups = [tile.queries] * len(q)
        ys.append(_split(y.transpose(1, 2), groups, 1))
        lses.append(_split(lse, groups, 2) if return_lse else ())
    # In memory (B, T, H, D), as SDPA leaves it: the block flattens the heads next, which then copies nothing.
    return [_cat(y, 1).transpose(1, 2) for y in zip(*ys)], [_cat(lse, 2) for lse in zip(*lses)]


def _call(tile: Tile, q: Tensor, k: Tensor, v: Tensor, scale: float | None, return_lse: bool):
    mask, lse = tile.mask_for(q.dtype), None
    if return_lse:
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=tile.causal, attn_mask=mask, scale=scale
        )
    else:
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=tile.causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    if tile.empty is not None:
        y = y.masked_fill(tile.empty, 0.0)
        lse = None if lse is None else lse.masked_fill(tile.empty[..., 0], -torch.inf)
    return y, lse


def _nothing(q: Tensor) -> tuple[Tensor, Tensor]:
    # Filled, not new: q stays part of the graph, with a gradient of zero.
    y = q.masked_fill(torch.ones((), dtype=torch.bool, device=q.device), 0.0)
    return y, torch.full(q.shape[:3], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))


def _split(x: Tensor, sizes: list[int], dim: int) -> Sequence[Tensor]:
    return x.split(sizes, dim) if len(sizes) > 1 else (x,)


def _cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]
