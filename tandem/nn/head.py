"""The head: from hidden states to negative log-likelihoods, without ever holding all logits.

The logits are the largest tensor of a training step: 8,192 rows of 32,000 ids are a gigabyte in float32, and a
framework's cross-entropy keeps a few such tensors. But a row needs its logits only once. So `nll_sums` goes through
the rows in chunks, and while a chunk's logits exist it computes all that needs them, the gradient included:

    z = h W'        softmax p = exp(z - lse(z))        nll of target y = lse(z) - z_y

    loss = sum over rows and slots i of  c_i (lse(z) - z_(y_i))           c_i = 0 where nothing is asked
    dloss/dz = (sum_i c_i) p - sum_i c_i onehot(y_i)                      a token met twice counts twice

All S targets of a row share one log-sum-exp, so a bag of eight costs hardly more than one target (superposition,
arXiv 2605.06546). The coefficients carry the weights of slots and the counts to divide by, so losses of
micro-batches add up, and nothing here ever takes a mean.

Cost: three products of 2 N C V FLOPs, each done once (`token_nll` repeats the first in its backward). Memory: one
chunk of logits and the gradients. In `nll_sums`, a row without a target costs as much as any other: pass only rows
that have one. `token_nll` passes over the others itself.

Shapes: N rows (positions), C width, V vocabulary, S targets of a row (slots), n rows of a chunk.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tandem.corpus import IGNORE

HAS_TRITON = find_spec("triton") is not None


def nll_sums(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    targets_NS: Tensor,
    *,
    coefficients: Tensor | None = None,
    any_of: bool = False,
    chunk: int | None = None,
    fused: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted sum of the nll of all targets, with its gradient, and the plain sums by slot.

    Args:
        hidden_NC: bfloat16, float32 or float64. The products run in this dtype, autocast or not; logits, softmax
            and loss in float32 (float64 stays float64).
        weight_VC: the rows of the output matrix that take part; its gradient is summed in float32.
        targets_NS: ids, or IGNORE, of shape (N, S), or (N,) for S = 1.
        coefficients: weight of each target, of the shape of the targets or (S,); 1 if not given. No gradient.
        any_of: any one of a row's targets is right: its nll is -log of the sum of their probabilities, each target
            counted once. Its coefficient is the largest of its targets', repeats left out, and there is one sum.
        chunk: rows whose logits exist at once; by default 2^25 logits, at most 1,024 rows; if fused, 2^27 logits.
        fused: do the work between the products in one kernel (head_triton.py); None: on CUDA, where there is triton.
            Only where a gradient is needed, not for `any_of` and float64.
    Returns: (loss, differentiable once with respect to hidden and weight; sums_S in nats, detached).
    Raises: ValueError for shapes or dtypes that do not fit; RuntimeError for a second derivative.
    Source: superposition, arXiv 2605.06546, the loss over bags; derivation above.
    """
    _check(hidden_NC, weight_VC, targets_NS)
    slots = tuple(targets_NS.shape[1:]) or (1,)
    given = hidden_NC.new_ones(slots) if coefficients is None else coefficients
    if given.requires_grad or given.shape not in (targets_NS.shape, slots):
        allowed = f"{tuple(targets_NS.shape)} or {slots}"
        raise ValueError(f"coefficients {tuple(given.shape)}: they must be {allowed}, and take no gradient")
    shape = (len(hidden_NC), *slots)
    coefficients_NS = given.to(_exact(hidden_NC)).reshape(-1, *slots).expand(shape)
    wanted = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden_NC, weight_VC)]
    fused = hidden_NC.is_cuda and HAS_TRITON if fused is None else fused
    fused = fused and any(wanted) and not any_of and hidden_NC.dtype != torch.float64
    chunk = chunk or _rows_at_once(weight_VC, fused)
    return _Sums.apply(hidden_NC, weight_VC, targets_NS.reshape(shape), coefficients_NS, any_of, chunk, wanted, fused)


def token_nll(hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, *, chunk: int | None = None) -> Tensor:
    """nll of every single token, (N,), exactly 0 at IGNORE: for scores and for losses of single tokens.

    Plain autograd, differentiable any number of times; each chunk's logits are recomputed in the backward. Rows without
    a target cost nothing, but on CUDA their number is waited for. Arguments as in `nll_sums`.
    """
    _check(hidden_NC, weight_VC, targets_N)
    chunk = chunk or _rows_at_once(weight_VC)
    asked = (targets_N != IGNORE).nonzero()[:, 0]
    with torch.autocast(hidden_NC.device.type, enabled=False):
        found = [
            checkpoint(_token_nll, hidden, weight_VC, targets, use_reentrant=False, preserve_rng_state=False)
            for hidden, targets in zip(hidden_NC[asked].split(chunk), targets_N[asked].split(chunk), strict=True)
        ]
    return hidden_NC.new_zeros(len(targets_N), dtype=_exact(hidden_NC)).index_put((asked,), torch.cat(found))


def _token_nll(hidden_nC: Tensor, weight_VC: Tensor, targets_n: Tensor) -> Tensor:
    logits_nV = F.linear(hidden_nC, weight_VC.to(hidden_nC.dtype)).to(_exact(hidden_nC))
    return F.cross_entropy(logits_nV, targets_n, reduction="none")


ALIGNED = {"cuda": 64}
"""By device type, the multiple to which the ids of the logits are padded. Where a row of logits does not begin at a
multiple of 16 bytes, as with GPT-2's 50,257 ids, cuBLAS is said to use slower kernels; not measured yet."""


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NC: Tensor,
        weight_VC: Tensor,
        targets_NS: Tensor,
        coefficients_NS: Tensor,
        any_of: bool,
        chunk: int,
        wanted: list[bool],
        fused: bool,
    ) -> tuple[Tensor, Tensor]:
        exact, compute = coefficients_NS.dtype, hidden_NC.dtype
        (N, S), V = targets_NS.shape, weight_VC.shape[0]
        asked_NS = targets_NS != IGNORE
        targets_NS = targets_NS.where(asked_NS, 0)
        if any_of:
            asked_NS = asked_NS & ~_repeated(targets_NS, asked_NS)
        coefficients_NS = coefficients_NS.masked_fill(~asked_NS, 0)
        spare = -V % ALIGNED.get(hidden_NC.device.type, 1)  # padding ids, of probability 0
        matrix_VC = F.pad(weight_VC.to(compute), (0, 0, 0, spare)) if spare else weight_VC.to(compute)

        loss = hidden_NC.new_zeros((), dtype=exact)
        sums_S = hidden_NC.new_zeros(1 if any_of else S, dtype=exact)
        grad_hidden = torch.empty_like(hidden_NC) if wanted[0] else None
        grad_weight = torch.zeros_like(matrix_VC, dtype=exact) if wanted[1] else None
        # Buffers serve all chunks: fresh pages for each would cost a tenth. Autocast leaves products with out= alone.
        compute_nV = hidden_NC.new_empty(min(chunk, N), V + spare)
        exact_nV = compute_nV if compute == exact or fused else torch.empty_like(compute_nV, dtype=exact)

        for first in range(0, N, chunk):
            rows = slice(first, first + chunk)
            hidden_nC, product_nV = hidden_NC[rows], compute_nV[: N - first]
            asked = targets_NS[rows], coefficients_NS[rows], asked_NS[rows]

            torch.mm(hidden_nC, matrix_VC.T, out=product_nV)
            if fused:
                from tandem.nn.head_triton import nll_and_gradient  # triton comes only with PyTorch for CUDA

                nll_nS = nll_and_gradient(product_nV, *asked, V)
            else:
                z_nV = product_nV if exact_nV is compute_nV else exact_nV[: N - first]
                nll_nS = _nll(product_nV, z_nV, *asked, V, any_of, any(wanted))
            weights_nS = coefficients_NS[rows].amax(1, keepdim=True) if any_of else coefficients_NS[rows]
            loss += (nll_nS * weights_nS).sum()
            sums_S += nll_nS.sum(0)
            if grad_hidden is not None:
                torch.mm(product_nV, matrix_VC, out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product(grad_weight, product_nV.T, hidden_nC)

        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight[:V].to(weight_VC.dtype))
        ctx.mark_non_differentiable(sums_S)
        return loss, sums_S

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph: the saved gradients would be taken for constants
            raise RuntimeError("nll_sums has no second derivative; use token_nll")
        grads = [None if grad is None else grad * grad_outputs[0] for grad in ctx.saved_tensors]
        return *grads, None, None, None, None, None, None


def _nll(
    product_nV: Tensor,
    z_nV: Tensor,
    targets_nS: Tensor,
    weights_nS: Tensor,
    asked_nS: Tensor,
    V: int,
    any_of: bool,
    gradient: bool,
) -> Tensor:
    """nll (n, S), or (n, 1) with `any_of`. With `gradient`, the gradient overwrites the logits in `product_nV`.

    `z_nV`: a buffer for exact logits; the products themselves, where those are exact. Ids from V on are padding.
    """
    if z_nV is not product_nV:
        z_nV.copy_(product_nV)
    z_nV[:, V:].fill_(-torch.inf)
    z_nV.sub_(z_nV.amax(1, keepdim=True))
    z_y_nS = z_nV.gather(1, targets_nS)
    mass_n1 = z_nV.exp_().sum(1, keepdim=True)
    if any_of:
        z_y_nS = z_y_nS.masked_fill(~asked_nS, -torch.inf)
        nll_nS = (mass_n1.log() - z_y_nS.logsumexp(1, keepdim=True)).masked_fill_(~asked_nS.any(1, True), 0)
        shares_nS = z_y_nS.softmax(1).nan_to_num()  # each target's share of their probability
        weights_nS = weights_nS.amax(1, keepdim=True) * shares_nS
    else:
        nll_nS = (mass_n1.log() - z_y_nS).masked_fill_(~asked_nS, 0)
    if gradient:
        # The row's gradient, subtracted before rounding: near p = 1 the difference is all there is.
        z_nV.mul_(weights_nS.sum(1, keepdim=True) / mass_n1).scatter_add_(1, targets_nS, -weights_nS)
        if z_nV is not product_nV:
            product_nV.copy_(z_nV)
    return nll_nS


def _repeated(targets_NS: Tensor, asked_NS: Tensor) -> Tensor:
    """Which targets already occur earlier in their row."""
    same_NSS = (targets_NS[:, :, None] == targets_NS[:, None]) & asked_NS[:, None]
    return same_NSS.tril(-1).any(-1)


def _add_product(total_VC: Tensor, left_Vn: Tensor, right_nC: Tensor) -> None:
    """total += left @ right; a total of higher precision is summed in that precision."""
    if total_VC.dtype == left_Vn.dtype:
        torch.addmm(total_VC, left_Vn, right_nC, out=total_VC)
    elif total_VC.is_cuda:
        torch.addmm(total_VC, left_Vn, right_nC, out_dtype=total_VC.dtype, out=total_VC)
    else:
        total_VC += torch.mm(left_Vn, right_nC, out=left_Vn.new_empty(total_VC.shape))


def _exact(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _rows_at_once(weight_VC: Tensor, fused: bool = False) -> int:
    # On 2 cores, 512 to 2,048 rows are equally fast at V 32,000 and V 4,096, and 128 rows slower. On an H200, chunks of
    # 2^28 logits would save 8 % of the head's time and take 0.27 GB more.
    most, logits = (2**27, 2**27) if fused else (1024, 2**25)
    return max(1, min(most, logits // weight_VC.shape[0]))


def _check(hidden_NC: Tensor, weight_VC: Tensor, targets: Tensor) -> None:
    if hidden_NC.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        # float16: a coefficient of one over a million targets underflows before a loss scale could save it
        raise ValueError(f"hidden states in {hidden_NC.dtype}: the head takes bfloat16, float32 or float64")
    if hidden_NC.ndim != 2 or hidden_NC.shape[1:] != weight_VC.shape[1:] or len(targets) != len(hidden_NC):
        raise ValueError(
            f"hidden {tuple(hidden_NC.shape)}, weight {tuple(weight_VC.shape)}, targets {tuple(targets.shape)}: "
            "they must be (N, C), (V, C) and (N,) or (N, S)"
        )
