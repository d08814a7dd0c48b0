"""What the head does between its products, on CUDA in one kernel: softmax, nll of all targets, gradient.

A program holds one row. It goes over the logits twice, first for the log-sum-exp, then to overwrite them with the
gradient; a row is short enough to be in the L2 cache still the second time. The few logits of targets come last.

Shapes: n rows, V vocabulary, S targets of a row.
"""

# What Triton's compiler treats as a constexpr, a range or a tuple is not one to a type checker.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8


@triton.jit
def nll_kernel(
    logits, targets, weights, asked, nll, to_row, V, filled, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """nll (n, S) of one row, and its gradient in place of its `filled` logits, of which those from V on are padding."""
    LOG2_E: tl.constexpr = 1.4426950408889634  # type: ignore
    row, id = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    z, slots = logits + row * to_row, row * SLOTS
    top, mass = -float("inf"), 0.0
    for first in range(0, V, BLOCK):
        part = tl.load(z + first + id, mask=first + id < V, other=-float("inf")).to(tl.float32) * LOG2_E
        largest = tl.maximum(top, tl.max(part, 0))
        mass = mass * tl.exp2(top - largest) + tl.sum(tl.exp2(part - largest), 0)
        top = largest
    log_mass = top + tl.log2(mass)
    total, scores = 0.0, ()
    for s in tl.static_range(SLOTS):
        target = tl.load(targets + slots + s)
        is_id = (target >= 0) & (target < V)  # of any other, the nll is NaN
        scores += (tl.load(z + target, mask=is_id, other=float("nan")).to(tl.float32),)
        is_asked = tl.load(asked + slots + s)
        tl.store(nll + slots + s, tl.where(is_asked, log_mass / LOG2_E - scores[s], 0.0))
        total += tl.load(weights + slots + s)
    tl.debug_barrier()  # all warps have read the targets' logits before one overwrites them
    for first in range(0, filled, BLOCK):
        part = tl.load(z + first + id, mask=first + id < V, other=-float("inf")).to(tl.float32) * LOG2_E
        gradient = tl.exp2(part - log_mass) * total
        tl.store(z + first + id, gradient.to(logits.dtype.element_ty), mask=first + id < filled)
    tl.debug_barrier()  # and all have overwritten them before one corrects them
    for s in tl.static_range(SLOTS):
        target = tl.load(targets + slots + s)
        gradient = tl.exp2(scores[s] * LOG2_E - log_mass) * total
        for other in tl.static_range(SLOTS):
            gradient -= tl.where(target == tl.load(targets + slots + other), tl.load(weights + slots + other), 0.0)
        tl.store(z + target, gradient.to(logits.dtype.element_ty), mask=(target >= 0) & (target < V))


def nll_and_gradient(product_nV: Tensor, targets_nS: Tensor, weights_nS: Tensor, asked_nS: Tensor, V: int) -> Tensor:
    """nll (n, S), float32, exactly 0 where nothing is asked; the gradient overwrites the logits in `product_nV`.

    Args:
        product_nV: logits, float32 or bfloat16; ids from V on are padding, of probability 0.
        targets_nS: ids; those that are not asked may be any.
        weights_nS: float32, 0 where nothing is asked.
    """
    n, S = targets_nS.shape
    nll_nS = torch.empty_like(weights_nS, memory_format=torch.contiguous_format)
    kernel: Any = nll_kernel
    with torch.cuda.device_of(product_nV):
        kernel[(n,)](
            product_nV, *(x.contiguous() for x in (targets_nS, weights_nS, asked_nS)), nll_nS, product_nV.stride(0), V,
            product_nV.shape[1], SLOTS=S, BLOCK=min(BLOCK, triton.next_power_of_2(V)), num_warps=WARPS,
        )  # fmt: skip
    return nll_nS
