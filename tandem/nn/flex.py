"""Attention over spans on CUDA: FlexAttention with a block mask taken straight from the spans.

FlexAttention visits blocks of BLOCK x BLOCK pairs: those listed as partial, where it evaluates the mask for every
pair, and those listed as full, where it does not. The lists are usually found by evaluating the T x N mask. Here each
query adds one to the blocks from its first to its last key and, in a second count, to the blocks that it covers whole.
After a running sum of either count along the keys, a block is

    partial or full   if any query touches it           spans   # # # # # . . .        touched  1 1 1 .
    full              if all BLOCK queries cover it     block   └─┘ └─┘ └─┘ └─┘        covered  1 1 . .

Sources are concatenated along the keys, each padded to whole blocks; groups of queries are concatenated unpadded.

Cost: T + (T / BLOCK) (N / BLOCK) on the host, once per batch; nothing of size T x N is ever made.
Shapes: B rows, S sources, G groups, Q = G T queries of all groups, N keys of all sources, padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from tandem.nn.spans import sent

BLOCK = 128
VARIANTS = 256
"""Graphs of a process, by dtype, heads, length, gradients. Past PyTorch's limit of 8, FlexAttention would silently hold
all T x N scores; past this one it is an error."""

MAIN_KERNEL: Any = {"BACKEND": "TRITON"}
"""Below 128 queries PyTorch (2.11, 2.13) would take its decoding kernel, which has no tiles for, say, 100 queries and
two heads to a key head: an error, where the main kernel has none."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """The flex backend of `attend`: the block mask, and by how many keys each source is padded."""

    mask: BlockMask
    padding: tuple[int, ...]

    def run(
        self,
        queries: Sequence[Tensor],
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        return_lse: bool,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The output of every group of queries and, on request, its log-sum-exp."""
        q, k, v = torch.cat(tuple(queries), 2), self._in_line(keys), self._in_line(values)
        _refuse(q)
        with torch._dynamo.config.patch(recompile_limit=VARIANTS):
            y, aux = _compiled()(
                q,
                k,
                v,
                block_mask=self.mask,
                enable_gqa=q.shape[1] != k.shape[1],
                return_aux=AuxRequest(lse=return_lse),
                kernel_options=MAIN_KERNEL,
            )
        T = queries[0].shape[2]
        return y.split(T, 2), () if aux.lse is None else aux.lse.detach().split(T, 2)

    def _in_line(self, parts: Sequence[Tensor]) -> Tensor:
        padded = [F.pad(x, (0, 0, 0, n)) if n else x for x, n in zip(parts, self.padding, strict=True)]
        return torch.cat(padded, 2) if len(padded) > 1 else padded[0]


def plan(lo: np.ndarray, hi: np.ndarray, keys: Sequence[int], device: torch.device) -> Blocks:
    """The block mask of spans (B, S, G, T)."""
    padding = [-n % BLOCK for n in keys]
    offsets = np.cumsum([0, *(n + pad for n, pad in zip(keys, padding, strict=True))])
    B, S = lo.shape[:2]
    lo, hi = ((bound + offsets[:-1, None, None]).reshape(B, S, -1).astype(np.int32) for bound in (lo, hi))
    N, Q = int(offsets[-1]), lo.shape[-1]
    touched = _blocks_of(lo // BLOCK, -(-hi // BLOCK), lo < hi, Q, N) > 0
    full = _blocks_of(-(-lo // BLOCK), hi // BLOCK, lo < hi, Q, N) == BLOCK
    pair_mask = _pair_mask(sent(lo, device), sent(hi, device))
    kinds = touched & ~full, full
    # Queries by keys, too: BlockMask.from_kv_blocks would find them in dozens of small kernels.
    listed = [_listed(blocks) for blocks in (*kinds, *(kind.swapaxes(1, 2) for kind in kinds))]
    sparse = (sent(x, device) for pair in listed for x in pair)
    return Blocks(BlockMask((Q, N), *sparse, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=pair_mask), tuple(padding))


def _blocks_of(first: np.ndarray, end: np.ndarray, reads: np.ndarray, Q: int, N: int) -> np.ndarray:
    """How many queries of each query block have a key block in first .. end: (B, query blocks, key blocks)."""
    rows, of_queries, of_keys = len(first), -(-Q // BLOCK), N // BLOCK + 1
    line = (np.arange(rows)[:, None] * of_queries + np.arange(Q) // BLOCK)[:, None] * of_keys
    cells, may = rows * of_queries * of_keys, reads & (first < end)
    begun, ended = (np.bincount((line + edge)[may], minlength=cells) for edge in (first, end))
    return (begun - ended).reshape(rows, of_queries, of_keys).cumsum(-1)[..., :-1]


def _listed(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(how many, which) of the last axis, for blocks (B, Q', N') or (B, N', Q'), with an axis for heads: (B, 1, Q') and
    (B, 1, Q', N'), or (B, 1, N') and (B, 1, N', Q').

    FlexAttention steps from row to row by the stride of the heads, which indexing with None would make 0: every row
    would read the blocks of the first.
    """
    numbers, order = blocks.sum(-1, dtype=np.int32), np.argsort(~blocks, axis=-1, kind="stable").astype(np.int32)
    return np.expand_dims(numbers, 1), np.expand_dims(order, 1)


def _pair_mask(lo: Tensor, hi: Tensor):
    shared, sources = lo.shape[0] == 1, lo.shape[1]

    def readable(b, h, i, j):
        row = 0 if shared else b
        may = [(lo[row, s, i] <= j) & (j < hi[row, s, i]) for s in range(sources)]
        return reduce(or_, may)

    return readable


@cache
def _compiled():
    return torch.compile(flex_attention, fullgraph=True)


def _refuse(q: Tensor) -> None:
    if not q.is_cuda:
        raise ValueError("flex runs on CUDA only (on a CPU, FlexAttention has no backward); use the tiled backend")
    if q.dtype == torch.float64:
        raise ValueError("flex has no float64; use the tiled or the dense backend")
