"""Attention over spans on CUDA with fused kernels (attention_kernels.py): forward, backward and decoding.

The spans go to the device as they are, two integers per query. Where gradients are needed, their transpose goes with
them: for every key, the contiguous queries that read it. No list of blocks and no mask is built.

    bounds   (2, R, S, G, T)   lo and hi of every query
    readers  (2, R, G, N)      of a source: key j is read by queries first .. end - 1

`attend` and its backward are PyTorch operators (`OPERATORS`), with output shapes for tracing, a derivative and a FLOP
count. Results have the same bits in every run.

Cost: 4 D FLOPs forward and 14 D backward for every pair of a visited tile; FLOP counters are told only the needed
pairs, and 10 D for the backward, as in the networks' own cost. Kept for the backward: inputs, output, log-sum-exp.
Shapes: R planned rows (1 or B), B rows, S sources, G groups, T queries, N keys of a source, H heads, D head width.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tandem.corpus.views import pinned
from tandem.nn import attention_kernels as kernels
from tandem.nn.measured import WIDEST
from tandem.nn.spans import sent


class Shape(NamedTuple):
    """A kernel's tile sizes in queries and in keys, its warps per program, and its pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int

    @property
    def blocks(self) -> dict[str, int]:
        return {"BLOCK_M": self.queries, "BLOCK_N": self.keys}

    @property
    def options(self) -> dict[str, int]:  # triton 3.10 will no longer fuse multiplications and additions by default
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


# By head width, rounded up: forward, gradient of queries, gradient of keys; of 64 and 128 channels the fastest on an
# H200 (docs/attention.md), of 32 those of 64.
HALF = {
    32: (Shape(64, 64, 4, 3), Shape(64, 64, 4, 3), Shape(64, 64, 4, 3)),
    64: (Shape(64, 64, 4, 3), Shape(64, 64, 4, 3), Shape(64, 64, 4, 3)),
    128: (Shape(64, 64, 4, 3), Shape(64, 64, 4, 2), Shape(64, 64, 4, 2)),
}
PAIRED = {64: Shape(128, 64, 4, 3)}
"""The tile of the gradient of queries where two groups share it, if that is another."""
_SMALL = Shape(32, 32, 4, 1)
SINGLE = {width: (_SMALL, _SMALL, _SMALL) for width in HALF}  # float32 does not use the matrix units


@dataclass(frozen=True, eq=False)
class Fused:
    """The triton backend of `attend`: the spans of a batch, copied to the device on first use."""

    lo: np.ndarray
    hi: np.ndarray
    keys: tuple[int, ...]
    device: torch.device

    @cached_property
    def bounds(self) -> Tensor:
        return self._on_host().to(self.device, non_blocking=True)

    def take_over(self, other: "Fused") -> None:
        """Overwrites the spans on the device, where a captured graph reads, with those of `other` (same shape)."""
        self.bounds.copy_(other._on_host(), non_blocking=True)

    def _on_host(self) -> Tensor:
        return pinned(torch.from_numpy(np.stack((self.lo, self.hi)).astype(np.int32)), self.device)

    @cached_property
    def readers(self) -> list[Tensor]:
        return [sent(transposed(self.lo[:, s], self.hi[:, s], n), self.device) for s, n in enumerate(self.keys)]

    def run(
        self,
        queries: Sequence[Tensor],
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        return_lse: bool = False,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The output of every tensor of queries and, on request, every group's log-sum-exp.

        A tensor may hold several groups or sources as rows, one after the other.
        """
        refuse(queries[0])
        tensors = list(queries), list(keys), list(values)
        has_backward = torch.is_grad_enabled() and any(x.requires_grad for xs in tensors for x in xs)
        scale = queries[0].shape[3] ** -0.5
        if not has_backward and _rows_of_key_head(queries[0], keys[0], self.lo.shape[2]) <= FEW:
            ys, lse = decode(*tensors, self.bounds, scale)
        else:
            ys, lse = attend(*tensors, self.bounds, self.readers if has_backward else [], scale)
        return tuple(ys), lse.detach().unbind() if return_lse else ()


def transposed(lo: np.ndarray, hi: np.ndarray, keys: int) -> np.ndarray:
    """Spans (R, G, T) of queries over keys as spans (2, R, G, N) of keys over queries.

    lo and hi never decrease, so lo[i] <= j holds for the queries before some end, and j < hi[i] from some query on.
    """
    j = np.arange(keys)
    ends = [[[np.searchsorted(of_group, j, "right") for of_group in row] for row in bound] for bound in (hi, lo)]
    return np.array(ends, dtype=np.int32).reshape(2, *lo.shape[:2], keys)


def refuse(q: Tensor) -> None:
    """Raises: ValueError where the kernels cannot run on these queries."""
    is_interpreted = not isinstance(kernels.forward_kernel, triton.runtime.JITFunction)
    if not q.is_cuda and not is_interpreted:
        raise ValueError("triton runs on CUDA only (on a CPU in its interpreter, for tests: TRITON_INTERPRET=1)")
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"triton has no {q.dtype}; use the tiled or the dense backend")
    if q.dtype == torch.bfloat16 and is_interpreted:
        raise ValueError("Triton's interpreter gets bfloat16 wrong without an error; test in float16 or float32")
    if q.shape[3] > WIDEST:
        raise ValueError(f"triton has heads of at most {WIDEST} channels, not {q.shape[3]}; use the flex backend")


# ---- the operators --------------------------------------------------------------------------------------------------


NAMESPACE = re.sub(r"\W", "_", __name__, flags=re.ASCII)  # an exported model has operators of its own, beside these
OPERATORS = getattr(torch.ops, NAMESPACE)


@torch.library.custom_op(f"{NAMESPACE}::attend", mutates_args=())
def attend(
    q: list[Tensor], k: list[Tensor], v: list[Tensor], bounds: Tensor, readers: list[Tensor], scale: float
) -> tuple[list[Tensor], Tensor]:
    """(y like q, log-sum-exp (G, B, H, T)); only the backward uses `readers`.

    A tensor holds one group of queries, or one source of keys or values, or several as rows, one after the other.
    """
    given, (q, k, v) = q, _taken_apart(bounds, q, k, v)
    ys, lse = _empty_outputs(given, bounds)
    (y,) = _taken_apart(bounds, ys)
    (B, H, T, D), shape = q[0].shape, _shapes(q)[0]
    _launch(
        kernels.forward_kernel, _tiles_of_queries(q, shape), shape, q[0],
        tuple(q), tuple(k), tuple(v), tuple(y), lse, *_located(bounds), T, B, H, H // k[0].shape[1], scale * _LOG2_E,
        *map(_strides, (q, k, v, y)), GROUPS=len(q), SOURCES=len(k), D=D, **shape.blocks,
    )  # fmt: skip
    return ys, lse


@attend.register_fake
def _(q, k, v, bounds, readers, scale):
    return _empty_outputs(q, bounds)


@torch.library.custom_op(f"{NAMESPACE}::attend_backward", mutates_args=())
def attend_backward(
    dy: list[Tensor],
    q: list[Tensor],
    k: list[Tensor],
    v: list[Tensor],
    y: list[Tensor],
    lse: Tensor,
    bounds: Tensor,
    readers: list[Tensor],
    scale: float,
) -> list[Tensor]:
    """The gradients of q, then of k, then of v."""
    gradients = [[_laid_out_like(x) for x in xs] for xs in (q, k, v)]
    q, k, v, y, dy, dq, dk, dv = _taken_apart(bounds, q, k, v, y, dy, *gradients)
    if len(readers) != len(k):
        raise ValueError(f"{len(readers)} readers for {len(k)} sources: who reads their keys is needed for a gradient")
    (B, H, T, D), (_, for_queries, for_keys) = q[0].shape, _shapes(q)
    G, terms = k[0].shape[1], lse.new_empty(*lse.shape, 2)
    numbers = (B, H, H // G, scale * _LOG2_E, scale)
    _launch(
        kernels.query_gradient_kernel, _tiles_of_queries(q, for_queries), for_queries, q[0],
        tuple(q), tuple(k), tuple(v), tuple(y), tuple(dy), tuple(dq), lse, terms, *_located(bounds), T, *numbers,
        *map(_strides, (q, k, v, y, dy, dq)), GROUPS=len(q), SOURCES=len(k), D=D, **for_queries.blocks,
    )  # fmt: skip
    for s, of_source in enumerate(readers):
        N = k[s].shape[2]
        if N:
            _launch(
                kernels.key_gradient_kernel, (-(-N // for_keys.keys), G, B), for_keys, q[0],
                tuple(q), k[s], v[s], tuple(dy), dk[s], dv[s], terms, *_located(of_source), T, N, *numbers,
                *map(_strides, (q, [k[s]], [v[s]], dy, [dk[s]], [dv[s]])),
                GROUPS=len(q), D=D, **for_keys.blocks,
            )  # fmt: skip
    return [x for xs in gradients for x in xs]


@attend_backward.register_fake
def _(dy, q, k, v, y, lse, bounds, readers, scale):
    return [_laid_out_like(x) for x in (*q, *k, *v)]


def _keep(ctx, inputs, output):
    q, k, v, bounds, readers, scale = inputs
    ys, lse = output
    ctx.groups, ctx.sources, ctx.scale = len(q), len(k), scale
    ctx.save_for_backward(*q, *k, *v, *ys, lse, bounds, *readers)


def _derive(ctx, grads, _):
    G, S, saved = ctx.groups, ctx.sources, list(ctx.saved_tensors)
    q, k, v, y = (_take(saved, n) for n in (G, S, S, G))
    lse, bounds, *readers = saved
    dy = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(y, grads, strict=True)]
    found = attend_backward(dy, q, k, v, y, lse, bounds, readers, ctx.scale)
    return _take(found, G), _take(found, S), found, None, [None] * len(readers), None


attend.register_autograd(_derive, setup_context=_keep)


# ---- decoding -------------------------------------------------------------------------------------------------------

FEW = 64
"""Most queries, over all heads and groups that read one key head, for which `decode` is used."""
DECODE_BLOCK = 64
"""Keys that a program loads at a time."""
PROGRAMS = 264
"""Programs to aim for over all rows and key heads: two for every multiprocessor of an H100."""


@torch.library.custom_op(f"{NAMESPACE}::decode", mutates_args=())
def decode(
    q: list[Tensor], k: list[Tensor], v: list[Tensor], bounds: Tensor, scale: float
) -> tuple[list[Tensor], Tensor]:
    """Like `attend`, for few queries and without a backward: programs divide the keys of every key head among them.

    The number of shares depends on shapes alone, their length on the spans, so a captured graph serves any number of
    keys.
    """
    given, (q, k, v) = q, _taken_apart(bounds, q, k, v)
    ys, lse = _empty_outputs(given, bounds)
    (y,) = _taken_apart(bounds, ys)
    (B, H, T, D), G, rows = q[0].shape, k[0].shape[1], _rows_of_key_head(q[0], k[0], len(q))
    longest = max(1, *(x.shape[2] for x in k))
    shares = _power_of_2(min(-(-PROGRAMS // (B * G)), -(-longest // (2 * DECODE_BLOCK))))
    # Half the keys in float32, or heads of 128 would not fit in the 99 KiB of shared memory of smaller devices.
    keys, stages = (DECODE_BLOCK // 2, 2) if q[0].dtype == torch.float32 else (DECODE_BLOCK, 3)
    shape = Shape(max(16, _power_of_2(rows)), keys, 4, stages)
    parts = lse.new_empty(B, G, shares, shape.queries, _block_width(D))
    largest, totals = lse.new_empty(2, *parts.shape[:4])
    _launch(
        kernels.decode_kernel, (shares, G, B), shape, q[0],
        tuple(q), tuple(k), tuple(v), parts, largest, totals, *_located(bounds), T, H // G, scale * _LOG2_E,
        *map(_strides, (q, k, v)), GROUPS=len(q), SOURCES=len(k), D=D, **shape.blocks,
    )  # fmt: skip
    _launch(
        kernels.combine_kernel, (rows, G, B), shape, q[0],
        parts, largest, totals, tuple(y), lse, T, H, H // G, _strides(y),
        GROUPS=len(q), D=D, BLOCK_M=shape.queries, SHARES=shares,
    )  # fmt: skip
    return ys, lse


@decode.register_fake
def _(q, k, v, bounds, scale):
    return _empty_outputs(q, bounds)


def _rows_of_key_head(q: Tensor, k: Tensor, groups: int) -> int:
    return groups * q.shape[2] * (q.shape[1] // k.shape[1])


# ---- FLOPs ----------------------------------------------------------------------------------------------------------


@register_flop_formula([OPERATORS.attend, OPERATORS.decode], get_raw=True)
def _flops(q, k, v, bounds, *_, **__):
    return 4 * _channel_pairs(q, bounds)


@register_flop_formula(OPERATORS.attend_backward, get_raw=True)
def _backward_flops(dy, q, k, v, y, lse, bounds, *_, **__):
    return 10 * _channel_pairs(q, bounds)


def _channel_pairs(q: list[Tensor], bounds: Tensor) -> int:
    """Query-key pairs that are needed, over all rows, times channels of all heads."""
    _, H, _, D = q[0].shape
    return H * D * int((bounds[1] - bounds[0]).sum()) * (_rows(q, bounds) // bounds.shape[1])


# ---- launching ------------------------------------------------------------------------------------------------------

_LOG2_E = kernels.LOG2_E.value


def _launch(kernel, grid: tuple[int, int, int], shape: Shape, like: Tensor, *arguments, **constants) -> None:
    with torch.cuda.device_of(like):
        kernel[grid](*arguments, **constants, BLOCK_D=_block_width(like.shape[3]), **shape.options)


def _power_of_2(n: int) -> int:
    """The smallest that is at least n >= 1."""
    return 1 << (n - 1).bit_length()


def _block_width(D: int) -> int:
    return max(16, _power_of_2(D))  # tl.dot needs at least 16


def _shapes(q: list[Tensor]) -> tuple[Shape, Shape, Shape]:
    width, is_single = max(32, _power_of_2(q[0].shape[3])), q[0].dtype == torch.float32
    forward, of_queries, of_keys = (SINGLE if is_single else HALF)[width]
    return forward, of_queries if is_single or len(q) == 1 else PAIRED.get(width, of_queries), of_keys


def _tiles_of_queries(q: list[Tensor], shape: Shape) -> tuple[int, int, int]:
    B, H, T, _ = q[0].shape
    return -(-T // (shape.queries // _power_of_2(len(q)))), H, B


def _located(bounds: Tensor) -> tuple[Tensor, int, int]:
    """(spans, entries from lo to hi, entries from one row to the next: 0 where all rows share their spans)."""
    return bounds, bounds.stride(0), bounds.stride(1) if bounds.shape[1] > 1 else 0


def _strides(xs: Sequence[Tensor]) -> tuple[int, ...]:
    if any(x.shape[2] * x.stride(2) >= 2**31 for x in xs):  # offsets within a head have 32 bits in the kernels
        raise ValueError("triton reads rows of less than 2^31 numbers; use the flex backend")
    return tuple(stride for x in xs for stride in x.stride()[:3])


def _with_near_channels(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _empty_like(x: Tensor) -> Tensor:
    """(B, H, T, D), stored as (B, T, H, D), so that flattening the heads, a block's next step, copies nothing."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


def _laid_out_like(x: Tensor) -> Tensor:
    """A gradient with the strides of its tensor, which is how compiled graphs expect it: any other they copy first."""
    extent = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride < extent:  # elements share memory, as in an expanded tensor
            return _empty_like(x)
        extent += stride * (size - 1)
    return x.new_empty_strided(x.shape, x.stride()) if x.stride(3) == 1 else _empty_like(x)


def _empty_outputs(q: Sequence[Tensor], bounds: Tensor) -> tuple[list[Tensor], Tensor]:
    lse = q[0].new_empty(bounds.shape[3], _rows(q, bounds), *q[0].shape[1:3], dtype=torch.float32)
    return [_empty_like(x) for x in q], lse


def _rows(q: Sequence[Tensor], bounds: Tensor) -> int:
    return sum(len(x) for x in q) // bounds.shape[3]


def _taken_apart(bounds: Tensor, q: Sequence[Tensor], *others: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Every group's or source's tensor by itself, with its channels beside each other."""
    rows = _rows(q, bounds)
    for xs in (q, *others):
        yield [_with_near_channels(part) for x in xs for part in ((x,) if len(x) == rows else x.split(rows))]


def _take(xs: list[Tensor], n: int) -> list[Tensor]:
    taken = xs[:n]
    del xs[:n]
    return taken
