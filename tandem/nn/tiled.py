"""Attention over spans by tiles: one SDPA call per tile of queries, over the slices of keys it reads.

Along a row both ends of a span only move forward, so what the queries a .. b - 1 may read of a source lies in one
slice, from lo[a] to hi[b - 1], found without looking at a single pair:

    source 1           source 2
    # # # # . . .      . # # . . . .   ┐ one tile: a call over keys 0 .. 5 of source 1, side by side
    # # # # # . .      . . # # . . .   │ with keys 1 .. 4 of source 2; its mask is about
    # # # # # # .      . . . # # . .   ┘ the ragged edges only

A row is first cut where a span jumps (documents, blocks) and then every STEP queries. Neighbouring tiles are joined
again for as long as one call costs no more than the two, in query-key pairs:

    cost = CALL + COPY keys + queries keys              (the last term halved for a triangle)

So a plain causal document becomes one call with `is_causal`, queries that all read the same keys one call without a
mask, and two ragged streams tiles of 64 to 200 queries. Rows are cut one by one, since their documents differ; rows
with equal spans share their calls, and so do all rows with few queries (decoding) where that is cheaper.

Exact, and differentiated by autograd through split, cat and SDPA (bfloat16 calls on the CPU have a backward of
their own). Keys are split once, at all ends of slices, and tiles take runs of the pieces: the backward of a slice
fills a whole tensor with zeros, that of a piece does not.

Cost: docs/attention.md. A tile of several pieces copies its keys and keeps the copy for the backward.
Shapes: R rows that are planned, B rows, S sources, G groups, T queries, N keys of a source, H heads, D head width.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

STEP = 64
"""Queries between two cuts, 1.5 times as many with several groups; tiles are joined from these. SDPA on the CPU takes
queries in blocks of 32, and of 64 from 192 on, which in bfloat16 is a seventh faster (docs/attention.md)."""
CALL = 2048
"""The cost of a call apart from its pairs and keys, in query-key pairs (measured: docs/attention.md)."""
COPY = 16
"""The cost of each key of a call apart from its pairs, in query-key pairs (likewise)."""

PLAIN = 4
"""Most queries of a call, over all groups, for which plain products replace SDPA on the CPU, without gradients."""

FEW_PAIRS = 2**15
"""On the CPU, a bfloat16 call of fewer query-key pairs than this computes its backward in float32: up to seven times as
fast, with 40 queries. Larger calls compute it by plain products, which are faster, too (docs/attention.md)."""
AT_ONCE = 2**19
"""Most weights that these products hold at once, unless one head has more: about a MiB, which stays in a cache."""
BLOCK = 128
"""Keys of a block of a triangle in these products, counted from its end: the upper half of a block is for nothing."""
ROUND = 32
"""Triangles are lengthened to a multiple of this: oneDNN takes 0.3 ms to prepare each new shape of a product."""

Slice = tuple[int, int, int]  # (source, first key, end), or (source, first piece, end)


@dataclass(frozen=True, eq=False)
class Tile:
    """One call: `queries` consecutive queries of every group against slices of the sources, given as runs of pieces.

    mask: additive, (1 or B, 1, G * queries, keys); None where every query reads every key, and for a triangle.
    empty: the queries that read nothing, (1 or B, 1, G * queries, 1); None where all read.
    """

    queries: int
    slices: list[Slice]
    is_causal: bool
    mask: Tensor | None
    empty: Tensor | None
    masks: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def mask_in(self, dtype: torch.dtype) -> Tensor | None:
        # Never a float32 mask with float64 queries: SDPA on the CPU silently reads it wrongly (torch 2.13).
        if self.mask is not None and dtype not in self.masks:
            self.masks[dtype] = self.mask.to(dtype)
        return self.masks.get(dtype)


@dataclass(frozen=True, eq=False)
class Strip:
    """Neighbouring rows that share their tiles; pieces[s] are the lengths into which the keys of source s are split."""

    rows: int
    tiles: list[Tile]
    pieces: list[list[int]]
    pairs: int


@dataclass(frozen=True, eq=False)
class Tiling:
    """All strips of a batch; `idle` are the sources that no query reads."""

    strips: list[Strip]
    idle: list[int]

    def run(
        self,
        queries: Sequence[Tensor],
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        return_lse: bool,
        dropout: float = 0.0,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The output of every group of queries and, on request, its log-sum-exp."""
        if return_lse and queries[0].device.type != "cpu":
            raise ValueError("the tiled backend returns the log-sum-exp on the CPU only; use flex or dense")
        G, S, rows = len(queries), len(keys), [strip.rows for strip in self.strips]
        shares = zip(*(_split(x, rows, 0) for x in (*queries, *keys, *values)), strict=True)
        results = [
            _run_strip(strip, share[:G], share[G : G + S], share[G + S :], return_lse, dropout)
            for strip, share in zip(self.strips, shares, strict=True)
        ]
        # Stored as (B, T, H, D), as SDPA returns it, so that flattening the heads, the next step, copies nothing.
        outputs = [_cat(parts, 0).transpose(1, 2) for parts in zip(*results, strict=True)]
        for s in self.idle:  # empty sums: a source that no query reads gets a gradient of zero
            outputs[0] = outputs[0] + keys[s][:, :, :0].sum() + values[s][:, :, :0].sum()
        return tuple(outputs[:G]), tuple(outputs[G:])


def _run_strip(strip: Strip, queries, keys, values, return_lse, dropout) -> list[Tensor]:
    """Outputs of all groups, then log-sum-exps, each (B, T, H, ..)."""
    k_pieces, v_pieces = ([_split(x, strip.pieces[s], 2) for s, x in enumerate(xs)] for xs in (keys, values))
    lengths = [tile.queries for tile in strip.tiles]
    results = []
    for tile, *q in zip(strip.tiles, *(_split(q, lengths, 2) for q in queries), strict=True):
        k, v = ([x for s, a, b in tile.slices for x in pieces[s][a:b]] for pieces in (k_pieces, v_pieces))
        outputs = _call(tile, _cat(q, 2), k, v, return_lse, dropout) if k else _nothing(_cat(q, 2))
        groups = [tile.queries] * len(q)
        results.append([x for y in outputs[: 1 + return_lse] for x in _split(y.transpose(1, 2), groups, 1)])
    return [_cat(parts, 1) for parts in zip(*results, strict=True)]


def _call(tile: Tile, q: Tensor, ks: Sequence[Tensor], vs: Sequence[Tensor], return_lse, dropout) -> list[Tensor]:
    few = q.shape[2] <= PLAIN and not tile.is_causal and q.device.type == "cpu" and q.dtype.itemsize >= 4
    if few and not (torch.is_grad_enabled() or return_lse or dropout):
        return [_products(tile, q, ks, vs)]
    k, v, mask = _cat(ks, 2), _cat(vs, 2), tile.mask_in(q.dtype)
    if return_lse:
        outputs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=tile.is_causal, attn_mask=mask
        )
    elif _has_own_backward(q, k, v, dropout):
        outputs = [_OwnBackward.apply(q, k, v, mask, tile.mask, tile.is_causal)]
    else:
        grouped = q.shape[1] != k.shape[1]
        outputs = [F.scaled_dot_product_attention(q, k, v, mask, dropout, tile.is_causal, enable_gqa=grouped)]
    if tile.empty is None:
        return outputs
    y, *lse = outputs
    return [y.masked_fill(tile.empty, 0.0), *(x.masked_fill(tile.empty[..., 0], -torch.inf) for x in lse)]


def _has_own_backward(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> bool:
    is_bfloat16 = q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[1] == k.shape[1]
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return is_bfloat16 and needs_grad and not dropout


class _OwnBackward(torch.autograd.Function):
    """SDPA in bfloat16 on the CPU with another backward than its own: in float32 or, where it is large, by products."""

    @staticmethod
    def forward(ctx, q, k, v, mask, float_mask, is_causal):
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=is_causal, attn_mask=mask
        )
        ctx.save_for_backward(q, k, v, y, lse, mask, float_mask)
        ctx.is_causal = is_causal
        return y

    @staticmethod
    def backward(ctx, dy):
        q, k, v, y, lse, mask, float_mask = ctx.saved_tensors
        if q.shape[2] * k.shape[2] >= FEW_PAIRS and (mask is None or len(mask) == 1):
            gradients = _gradients(dy, q, k, v, y, lse, mask, ctx.is_causal)
        else:
            gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(x.float() for x in (dy, q, k, v, y)), lse, 0.0, ctx.is_causal, attn_mask=float_mask
            )
        return *(x.to(dy.dtype) for x in gradients), None, None, None


def _gradients(dy, q, k, v, y, lse, mask, is_causal) -> list[Tensor]:
    """The gradients of a call by plain products, for as many heads at once as stay in a cache; mask (1, 1, T, N).

    A triangle is cut into blocks of keys, each with the queries from its first key on; another call is one block.
    Products are rounded as they are written. So they subtract what belongs to a query before that, in two more
    channels: from its scores the log-sum-exp, which leaves logarithms of weights, and from the gradient of its weights
    their mean by these weights, which leaves what the softmax passes on.
    """
    (T, D), N = q.shape[2:], k.shape[2]
    scale = D**-0.5
    means = torch.linalg.vecdot(dy.float(), y.float())
    wide = [_less(q, lse / scale), F.pad(k, (0, 2), value=-1.0), F.pad(v, (0, 2), value=-1.0), _less(dy, means)]
    if is_causal:
        wide = [F.pad(x, (0, 0, 0, -T % ROUND)) for x in wide]  # zeros after the end, which no query before it reads
        mask = q.new_full((wide[0].shape[2], BLOCK), -torch.inf).triu(1)
    else:
        mask = q.new_zeros(1, 1) if mask is None else mask[0, 0]
    gradients = [x.new_empty(*x.shape[:3], D) for x in wide[:3]]
    if is_causal:
        gradients[0] = torch.zeros(gradients[0].shape)  # float32, since every block adds to it
    rows, end, block = wide[0].shape[2], wide[1].shape[2], BLOCK if is_causal else N
    at_once = max(1, AT_ONCE * (1 + is_causal) // (rows * block))  # a triangle has half of them
    cuts = [0, *range(end % block or block, end + 1, block)]
    heads = [x.flatten(0, 1).split(at_once) for x in (*wide, *gradients)]
    for q, k, v, dy, dq, dk, dv in zip(*heads, strict=True):
        for a, b in pairwise(cuts):
            of_block = q.new_empty(len(q), rows - a, D) if is_causal else dq
            weights = torch.baddbmm(mask[: rows - a, : b - a], q[:, a:], k[:, a:b].mT, alpha=scale).exp_()
            torch.bmm(weights.mT, dy[:, a:, :D], out=dv[:, a:b])
            dscores = torch.bmm(dy[:, a:], v[:, a:b].mT).mul_(weights)
            torch.baddbmm(of_block, dscores, k[:, a:b, :D], beta=0, alpha=scale, out=of_block)
            torch.baddbmm(dk[:, a:b], dscores.mT, q[:, a:, :D], beta=0, alpha=scale, out=dk[:, a:b])
            if is_causal:
                dq[:, a:] += of_block
    return [x[:, :, :m] for x, m in zip(gradients, (T, N, N), strict=True)]


def _less(x: Tensor, number: Tensor) -> Tensor:
    """x with two more channels, which in a product with channels of -1 subtract the number of each row."""
    high = number.to(x.dtype)
    return torch.cat([x, torch.stack([high, (number - high).to(x.dtype)], 3)], 3)


def _products(tile: Tile, q: Tensor, ks: Sequence[Tensor], vs: Sequence[Tensor]) -> Tensor:
    """Scores, softmax, values, step by step: pieces of keys are read in place, in a cache, and not copied."""
    B, H, T, D = q.shape
    ks, vs = ([x.flatten(0, 1) for x in xs] for xs in (ks, vs))
    q = (q * D**-0.5).reshape(len(ks[0]), -1, D)  # heads that share keys are rows
    scores = _cat([torch.bmm(q, k.mT) for k in ks], 2)
    mask = tile.mask_in(q.dtype)
    if mask is not None:
        scores.view(B, H, T, -1).add_(mask)
    weights = _split(scores.softmax(2), [k.shape[1] for k in ks], 2)
    y = torch.bmm(weights[0], vs[0])
    for w, v in zip(weights[1:], vs[1:], strict=True):
        y = torch.baddbmm(y, w, v)
    y = y.view(B, H, T, D)
    return y if tile.empty is None else y.masked_fill(tile.empty, 0.0)


def _nothing(q: Tensor) -> list[Tensor]:
    y = torch.zeros_like(q) + q[:, :, :0].sum()  # an empty sum: q gets a gradient of zero
    return [y, y.new_full(y.shape[:3], -torch.inf, dtype=torch.promote_types(y.dtype, torch.float32))]


def _split(x: Tensor, lengths: list[int], dim: int) -> Sequence[Tensor]:
    return x.split(lengths, dim) if len(lengths) > 1 else (x,)


def _cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(list(parts), dim) if len(parts) > 1 else parts[0]


# ---- planning, on the host ------------------------------------------------------------------------------------------


def plan(lo: np.ndarray, hi: np.ndarray, keys: Sequence[int], device: torch.device, most: int | None = None) -> Tiling:
    """Tiles for spans (R, S, G, T) over `keys` keys of each source, with masks on `device`.

    `most`: the most queries of a tile that is not a triangle; None: whatever is cheapest.
    """
    R, T = lo.shape[0], lo.shape[-1]
    differs = ((lo[1:] != lo[:-1]) | (hi[1:] != hi[:-1])).any((1, 2, 3))
    edges = [0, *(np.flatnonzero(differs) + 1).tolist(), R]
    strips = [_Cutter(lo[a : a + 1], hi[a : a + 1], rows=b - a, most=most or T) for a, b in pairwise(edges)]
    if len(strips) > 1 and T <= STEP:  # more queries in rows that differ never pay for a shared mask
        together = _Cutter(lo, hi, rows=R, most=T)
        if together.cost <= sum(strip.cost for strip in strips):
            strips = [together]
    idle = np.flatnonzero(~(lo < hi).any((0, 2, 3))).tolist()
    return Tiling([strip.build(keys, device) for strip in strips], idle)


class _Cutter:
    """Where to cut the queries of one strip. Spans are (1, S, G, T), shared by `rows` rows, or (rows, S, G, T)."""

    def __init__(self, lo: np.ndarray, hi: np.ndarray, rows: int, most: int):
        self.lo, self.hi, self.rows, self.most = lo, hi, rows, most
        self.groups, T = lo.shape[2:]
        self.step = STEP if self.groups == 1 else 3 * STEP // 2
        # Per source, the bounds of the keys that any row and group reads, and of those that all of them read;
        # lists, because single numbers are looked up thousands of times.
        self.any = list(zip(lo.min((0, 2)).tolist(), hi.max((0, 2)).tolist(), strict=True))
        self.all = list(zip(lo.max((0, 2)).tolist(), hi.min((0, 2)).tolist(), strict=True))
        self.readers = [0, *(lo < hi).any((0, 1, 2)).cumsum().tolist()]
        self.unsteady = (np.diff(hi[0, :, 0], prepend=0) != 1).cumsum(-1).tolist()
        jumps = np.flatnonzero((np.diff(lo) > 1).any((0, 1, 2))) + 1
        tiles = self._join(pairwise([0, *jumps.tolist(), T]))
        self.tiles, self.cost = [(a, b) for _, a, b in tiles], sum(cost for cost, _, _ in tiles)

    def _join(self, segments: Iterable[tuple[int, int]]) -> list[tuple[float, int, int]]:
        """(cost, first query, end) of every tile."""
        tiles: list[tuple[float, int, int]] = []
        for start, end in segments:
            for a in range(start, end, self.step):
                b = min(a + self.step, end)
                tile = (self._cost(a, b), a, b)
                # Across a jump, only into a tile of at most one step: one more small document always looks cheap.
                if tiles and (a > start or b - tiles[-1][1] <= self.step):
                    cost, first, _ = tiles[-1]
                    joined = self._cost(first, b)
                    fits = b - first <= self.most or self._is_triangle(first, b, self._slices(first, b))
                    if joined <= cost + tile[0] and fits:
                        tile = (joined, first, b)
                        tiles.pop()
                tiles.append(tile)
        return tiles

    def _cost(self, a: int, b: int) -> float:
        slices = self._slices(a, b)
        keys = sum(end - first for _, first, end in slices)
        return CALL + self.rows * (COPY * keys + self._pairs(a, b, slices)) if slices else 0

    def _slices(self, a: int, b: int) -> list[Slice]:
        """What the queries a .. b - 1 read."""
        if self.readers[a] == self.readers[b]:
            return []
        bounds = ((s, lo[a], hi[b - 1]) for s, (lo, hi) in enumerate(self.any))
        return [(s, first, end) for s, first, end in bounds if first < end]

    def _pairs(self, a: int, b: int, slices: list[Slice]) -> int:
        if self._is_triangle(a, b, slices):
            return (b - a) * (b - a + 1) // 2
        return (b - a) * self.groups * sum(end - first for _, first, end in slices)

    def _is_triangle(self, a: int, b: int, slices: list[Slice]) -> bool:
        """Whether the queries read 1, 2, 3 .. keys of the only slice."""
        if len(slices) != 1 or len(self.lo) * self.groups != 1:
            return False
        s, first, _ = slices[0]
        lo, hi = self.any[s]
        return lo[b - 1] == first and hi[a] == first + 1 and self.unsteady[s][a] == self.unsteady[s][b - 1]

    def _is_open(self, a: int, b: int, slices: list[Slice]) -> bool:
        """Whether every query reads every key."""
        return all(self.all[s][0][b - 1] == first and self.all[s][1][a] == end for s, first, end in slices)

    def build(self, keys: Sequence[int], device: torch.device) -> Strip:
        edges = [{0, n} for n in keys]
        for a, b in self.tiles:
            for s, first, end in self._slices(a, b):
                edges[s] |= {first, end}
        place = [{edge: piece for piece, edge in enumerate(sorted(ends))} for ends in edges]
        tiles, pairs = [], 0
        for a, b in self.tiles:
            slices = self._slices(a, b)
            is_causal, mask, empty = self._is_triangle(a, b, slices), None, None
            if not is_causal and not self._is_open(a, b, slices):
                mask, empty = self._mask(a, b, slices, device)
            pieces = [(s, place[s][first], place[s][end]) for s, first, end in slices]
            tiles.append(Tile(b - a, pieces, is_causal, mask, empty))
            pairs += self.rows * self._pairs(a, b, slices)
        return Strip(self.rows, tiles, [np.diff(list(ends)).tolist() for ends in place], pairs)

    def _mask(self, a: int, b: int, slices: list[Slice], device: torch.device) -> tuple[Tensor, Tensor | None]:
        lo, hi = self.lo[..., a:b, None], self.hi[..., a:b, None]
        runs = [(s, np.arange(first, end)) for s, first, end in slices]
        may = np.concatenate([(lo[:, s] <= j) & (j < hi[:, s]) for s, j in runs], axis=-1)
        may = may.reshape(len(may), 1, -1, may.shape[-1])
        empty = ~may.any(-1, keepdims=True)
        # A query that reads nothing is computed over all keys and then set to zero: 0/0 never arises, on any device.
        mask = torch.from_numpy(np.where(may | empty, np.float32(0), np.float32(-np.inf))).to(device)
        return mask, torch.from_numpy(empty).to(device) if empty.any() else None
