"""Spans: which keys a query may read, as two integers per query.

A mask of T x N bits says far more than attention in this library needs. Here every query reads one contiguous
run of keys per source, and the runs only move forward as the query position grows:

    key      0 1 2 3 4 5                      lo  hi
    query 0  # . . . . .    document one       0   1
    query 1  # # . . . .                       0   2      lo is where the document starts,
    query 2  # # # . . .                       0   3      hi is one past the query itself
    query 3  . . . # . .    document two       3   4
    query 4  . . . # # .                       3   5

Two columns replace the matrix, and what a tile of queries may read is the run from its first `lo` to its last
`hi`: no mask bit is ever inspected. A pattern over several sources is several spans. A network with a pattern of
its own builds it by arithmetic on lo and hi; the double decoder's two sources, with block starts b, are

    own, context = causal(torch.maximum(b, s)), Span(s, torch.maximum(b, s))

Shapes: B rows (or 1, shared by all rows), T queries, N keys of one source.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.corpus.views import moved


@dataclass(frozen=True, eq=False)
class Span:
    """Query i of row b reads the keys `lo[b, i] <= j < hi[b, i]` of a source; none where `lo >= hi`.

    Args:
        lo, hi: integers on the host whose shapes broadcast to (B, T), or to (1, T) where all rows agree.
            Neither may decrease along T; `plan_attention`, which knows the keys, checks that.
    Once built, both have the full shape, int64, and `hi >= lo`.
    Raises: ValueError for bounds of another type, device or shape.
    """

    lo: Tensor
    hi: Tensor

    def __post_init__(self):
        for name, bound in (("lo", self.lo), ("hi", self.hi)):
            if not isinstance(bound, Tensor):
                raise ValueError(
                    f"Span.{name} is {type(bound).__name__}, but spans are tensors: torch.as_tensor makes one"
                )
            if bound.is_floating_point() or bound.device.type != "cpu":
                raise ValueError(
                    f"Span.{name} is {bound.dtype} on {bound.device}, but spans are integers on the host: "
                    "build them from the batch before it moves to a device"
                )
        try:
            lo, hi = torch.broadcast_tensors(self.lo.long(), self.hi.long())
        except RuntimeError as error:
            raise ValueError(
                f"Span has bounds of shapes {tuple(self.lo.shape)}, {tuple(self.hi.shape)}: {error}"
            ) from error
        if lo.dim() != 2:
            raise ValueError(f"Span has bounds of shape {tuple(lo.shape)}; write them as (rows, queries)")
        object.__setattr__(self, "lo", lo)
        object.__setattr__(self, "hi", torch.maximum(lo, hi))


def causal(starts: Tensor, window: int | None = None, positions: Tensor | None = None) -> Span:
    """The query at position i reads its document up to and including itself, `[starts, i + 1)`.

    Args:
        starts: (B, T) or (1, T), first position of the document (or block) that holds each query.
        window: the most keys that a query reads, itself included: `[max(starts, i + 1 - window), i + 1)`.
        positions: i of the queries, (T,) or (B, T), where they are not 0 .. T - 1 (decoding).
    """
    i = torch.arange(starts.shape[-1]) if positions is None else positions
    return Span(starts if window is None else torch.maximum(starts, i + 1 - window), i + 1)


def prefix(lengths: int | Tensor, queries: int) -> Span:
    """Every query reads the first keys, `[0, length)`: an encoder's output, a prompt, the filled memory slots.

    Args:
        lengths: one number for all rows, or a tensor (B,); 0 reads nothing.
        queries: T.
    """
    hi = torch.as_tensor(lengths).reshape(-1, 1).expand(-1, queries)
    return Span(torch.zeros_like(hi), hi)


def readable(span: Span, keys: int, device: torch.device | None = None) -> Tensor:
    """The bool mask (B, T, N) that the span stands for, on `device`: for reference code and tests, not for speed."""
    j = torch.arange(keys, device=device)
    return (span.lo.to(j.device)[..., None] <= j) & (j < span.hi.to(j.device)[..., None])


def sent(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Numbers of the host on `device`, as `moved` brings them there."""
    return moved(torch.from_numpy(numbers), device)
