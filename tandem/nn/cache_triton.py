"""Entries of one step written into fixed caches on CUDA, all stores of a layer in one launch.

Copies and index arithmetic of PyTorch's own take five launches for two stores, of a step that has some twenty a layer.
"""

# What Triton's compiler treats as a constexpr, a range or a tuple is not one to a type checker.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def append_kernel(
    ks, vs, stores, rings, clock, k_strides, v_strides, store_strides, G,
    STORES: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Key and value of one row and key head, in one store; grid (B G, STORES). `rings`: entries until a place comes
    again, 0 for a store that keeps all; in a ring, each entry stands twice."""
    b, g, d = tl.program_id(0).to(tl.int64) // G, tl.program_id(0) % G, tl.arange(0, BLOCK_D)
    number, there = tl.load(clock), d < D
    for s in tl.static_range(STORES):
        if tl.program_id(1) == s:
            ring = rings[s]
            place = number % ring if ring > 0 else number
            to_values, to_entry = store_strides[4 * s], store_strides[4 * s + 3]
            at = stores[s] + b * store_strides[4 * s + 1] + g * store_strides[4 * s + 2] + place * to_entry + d
            k = tl.load(ks[s] + b * k_strides[2 * s] + g * k_strides[2 * s + 1] + d, mask=there)
            v = tl.load(vs[s] + b * v_strides[2 * s] + g * v_strides[2 * s + 1] + d, mask=there)
            tl.store(at, k, mask=there)
            tl.store(at + to_values, v, mask=there)
            if ring > 0:
                tl.store(at + ring * to_entry, k, mask=there)
                tl.store(at + ring * to_entry + to_values, v, mask=there)


def append(caches: Sequence[Any], ks: Sequence[Tensor], vs: Sequence[Tensor]) -> None:
    """Writes k and v (B, G, 1, D) into each FixedCache, where its clock says; all have the same clock and shape."""
    stores = [cache.kv for cache in caches]
    B, G, _, D = ks[0].shape
    ks, vs = ([x if x.stride(3) == 1 else x.contiguous() for x in xs] for xs in (ks, vs))
    kernel: Any = append_kernel
    with torch.cuda.device_of(stores[0]):
        kernel[(B * G, len(stores))](
            tuple(ks), tuple(vs), tuple(stores), tuple(0 if c.window is None else c.window + 1 for c in caches),
            caches[0].clock, *(tuple(n for x in xs for n in x.stride()[:2]) for xs in (ks, vs)),
            tuple(n for x in stores for n in x.stride()[:4]), G,
            STORES=len(stores), D=D, BLOCK_D=triton.next_power_of_2(D), num_warps=1,
        )  # fmt: skip
