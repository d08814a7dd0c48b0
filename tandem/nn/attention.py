"""Attention, the one primitive of every network here: every mask is a set of spans.

In every network, the keys that a query may read from one source are contiguous, `lo[i] <= j < hi[i]` (spans.py).
Attention is one softmax over the union of the keys that its sources allow, so one function serves all networks:

                        source 1            source 2
                   ┌───────────────┐   ┌───────────────┐
    query i reads  . . # # # # # . .   . . . . # # . . .      y_i = softmax(scores of all #) . values of all #
                       lo      hi              lo  hi

    plan = plan_attention([span], [T])                     # once per batch, on the host: bounds, tiles, masks
    y = attend(q, [Source(k, v, span)], plan=plan)         # in every layer

Queries may come in groups that read the same keys through different spans (the two streams of State-Prediction
Separation): q and every span are then tuples, one entry per group, and so is y.

    dense   the definition, symbol by symbol: the oracle of the tests, and the code to read first (below)
    tiled   one SDPA call per tile of queries, over the slices it reads; any device, made for CPUs (tiled.py)
    flex    FlexAttention with a block mask straight from the spans; made for CUDA (flex.py)
    triton  a kernel of our own that reads the spans; made for CUDA (attention_triton.py)

Cost: 4 D sum(hi - lo) FLOPs per head forward, 2.5 times that backward; docs/attention.md derives the tiles.
Shapes: B rows, T queries, N keys of a source, H heads, G key heads, D head width.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from tandem.nn import measured, tiled
from tandem.nn.spans import Span, readable

if find_spec("triton"):  # it comes with PyTorch for CUDA; a FLOP counter knows only operators that were there before it
    from tandem.nn import attention_triton

FEW = 16
"""Most queries for which FlexAttention, made for tiles of 128, is not chosen."""

Backend = Literal["auto", "dense", "tiled", "flex", "triton"]
Groups = tuple[Span, ...]


@dataclass(frozen=True, eq=False)
class Source:
    """Keys and values (B, G, N, D), G dividing H, and who reads them: a span, or one per group of queries.

    G and D are the same for all sources of a call."""

    k: Tensor
    v: Tensor
    span: Span | Groups


# ---- the definition -------------------------------------------------------------------------------------------------


def attend_dense(q: Tensor | tuple[Tensor, ...], sources: Sequence[Source], *, return_lse: bool = False) -> Any:
    """The reference definition of `attend`, not optimised: same arguments and result, float64 kept throughout."""
    if isinstance(q, tuple):
        of_group = [[Source(s.k, s.v, _groups(s.span)[g]) for s in sources] for g in range(len(q))]
        results = [attend_dense(q[g], of_group[g], return_lse=return_lse) for g in range(len(q))]
        return tuple(zip(*results, strict=True)) if return_lse else tuple(results)
    score_BHTN, v_BHND = scores(q, sources)
    y_BHTD = score_BHTN.softmax(-1).nan_to_num(0.0) @ v_BHND  # an empty row is 0/0: defined as zero
    return (y_BHTD.to(q.dtype), score_BHTN.detach().logsumexp(-1)) if return_lse else y_BHTD.to(q.dtype)


def scores(q: Tensor, sources: Sequence[Source]) -> tuple[Tensor, Tensor]:
    """(scores (B, H, T, N) of all keys, source by source, -inf where one is not read; values (B, H, N, D))."""
    B, H, _, D = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    k_BHND = torch.cat([s.k.repeat_interleave(H // s.k.shape[1], dim=1) for s in sources], dim=2).to(dtype)
    v_BHND = torch.cat([s.v.repeat_interleave(H // s.v.shape[1], dim=1) for s in sources], dim=2).to(dtype)
    may_BTN = torch.cat([readable(_groups(s.span)[0], s.k.shape[2]).expand(B, -1, -1) for s in sources], dim=2)
    score_BHTN = q.to(dtype) @ k_BHND.mT * D**-0.5
    return score_BHTN.masked_fill(~may_BTN[:, None].to(q.device), -torch.inf), v_BHND


def _groups(span: Span | Groups) -> Groups:
    return span if isinstance(span, tuple) else (span,)


# ---- planning, once per batch ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Plan:
    """What all attention over the same spans shares: checked bounds and, built on first use, tiles or a block mask.

    lo, hi: (rows, sources, groups, queries); rows is 1 where all rows of the batch agree.
    """

    spans: tuple[Groups, ...]
    keys: tuple[int, ...]
    lo: np.ndarray
    hi: np.ndarray
    device: torch.device
    backend: Backend
    most: int | None = None

    @cached_property
    def tiles(self) -> tiled.Tiling:
        return tiled.plan(self.lo, self.hi, self.keys, self.device, self.most)

    @cached_property
    def blocks(self):
        from tandem.nn import flex  # slow to import, and useful on CUDA only

        return flex.plan(self.lo, self.hi, self.keys, self.device)

    @cached_property
    def fused(self):
        return attention_triton.Fused(self.lo, self.hi, self.keys, self.device)

    @property
    def tiled_pairs(self) -> int:
        """Query-key pairs per head that the tiled backend visits, summed over rows; (hi - lo).sum() are needed."""
        return sum(strip.pairs for strip in self.tiles.strips)

    def choose(self, q: Tensor, return_lse: bool = False, dropout: float = 0.0) -> tuple[Backend, str]:
        """The backend for these queries, and the reason; a backend given by name is never replaced."""
        if dropout and (return_lse or self.backend not in ("auto", "tiled")):
            raise ValueError(f"dropout of attention weights is the tiled backend's, without lse; not {self.backend}'s")
        if dropout:
            return "tiled", "the one that drops attention weights"
        if self.backend != "auto":
            return self.backend, "named by the network"
        T, D, is_plain = *q.shape[2:], q.dtype != torch.float64 and any(self.keys)
        if q.is_cuda and is_plain and T <= FEW and D <= measured.WIDEST and not torch.is_grad_enabled():
            return "triton", "made for the few queries of decoding; SDPA prepares anew for every number of keys"
        # FlexAttention has no float64 and no narrow heads, and for a few queries one plain call is cheaper.
        if q.is_cuda and is_plain and T > FEW and D >= 16:
            _, sources, groups, _ = self.lo.shape
            is_faster, reason = measured.choose(torch.cuda.get_device_name(q.device), sources, groups, D)
            return ("triton" if is_faster else "flex"), reason
        if q.device.type != "cpu" and return_lse:
            return "dense", "the only one that returns the log-sum-exp here"
        return "tiled", "one plain call a tile is the fastest " + ("here" if q.is_cuda else "without CUDA")


def plan_attention(
    spans: Sequence[Span | Groups],
    keys: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    backend: Backend = "auto",
    most: int | None = None,
) -> Plan:
    """Checks the spans of all sources and plans attention over them, once for all layers of a batch.

    Args:
        spans: for every source, a span or a tuple with one per group of queries.
        keys: N of every source.
        device: where the queries will be.
        backend: "auto" takes tiled on a CPU; on CUDA triton for decoding, tiled for a few queries with gradients, and
            else flex or, where it was measured to be faster (measured.py), triton; a named one never falls back.
            `Plan.choose` returns the choice and the reason.
        most: the most queries in a tile, where visiting fewer pairs is worth more calls; None: whatever is cheapest.
    Raises: ValueError where there are no queries, and naming source, row and position where a span leaves [0, N] or
        moves back.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend {backend!r}: no such backend; there are {', '.join(get_args(Backend))}")
    groups = tuple(map(_groups, spans))
    if not groups or len(groups) != len(keys):
        raise ValueError(
            f"attention over {len(groups)} spans and {len(keys)} numbers of keys; give one each per source"
        )
    shapes = [[tuple(span.lo.shape) for span in group] for group in groups]
    rows = max(shape[0] for group in shapes for shape in group)
    T = shapes[0][0][1]
    if any(len(group) != len(shapes[0]) or not {(1, T), (rows, T)}.issuperset(group) for group in shapes):
        raise ValueError(f"spans of shapes {shapes}: all sources need one per group of queries, (1 or {rows}, {T})")
    if not rows * T:
        raise ValueError(f"{rows} rows of {T} queries: attention needs at least one of each")
    bounds = [[torch.stack((span.lo, span.hi)).expand(2, rows, T) for span in group] for group in groups]
    lo, hi = torch.stack([torch.stack(group, dim=2) for group in bounds], dim=2).numpy()
    _check_spans(lo, hi, keys)
    return Plan(groups, tuple(keys), lo, hi, torch.device(device), backend, most)


def _check_spans(lo: np.ndarray, hi: np.ndarray, keys: Sequence[int]) -> None:
    N = np.array(keys)[:, None, None]
    outside = (lo < 0) | (hi > N)
    back = np.zeros_like(outside)
    back[..., 1:] = (lo[..., 1:] < lo[..., :-1]) | (hi[..., 1:] < hi[..., :-1])
    for wrong, what in ((outside, "leaves"), (back, "moves back among")):
        if wrong.any():
            r, s, g, i = np.argwhere(wrong)[0].tolist()
            before = f", after [{lo[r, s, g, i - 1]}, {hi[r, s, g, i - 1]})," if wrong is back else ""
            raise ValueError(
                f"source {s}, row {r}, position {i}{f', group {g}' if lo.shape[2] > 1 else ''}: "
                f"the span [{lo[r, s, g, i]}, {hi[r, s, g, i]}){before} {what} the keys [0, {keys[s]})"
            )


# ---- attending, in every layer --------------------------------------------------------------------------------------

_listening: list[dict[Backend, str]] = []


@contextmanager
def backends_taken() -> Iterator[dict[Backend, str]]:
    """The backends that `attend` takes while this is open, each with the reason."""
    _listening.append(found := {})
    try:
        yield found
    finally:
        _listening.pop()


# Bounds are host integers of one batch: a graph that held them would be recompiled for every batch.
# torch.compiler.disable says the same, but imports the compiler at once, for commands that never attend, too.
_outside_graphs = torch._disable_dynamo


@_outside_graphs
def attend(
    q: Tensor | tuple[Tensor, ...],
    sources: Sequence[Source],
    *,
    plan: Plan | None = None,
    backend: Backend = "auto",
    return_lse: bool = False,
    dropout: float = 0.0,
) -> Any:
    """One softmax over the union of what each source lets each query read.

        y_i = sum of softmax(q_i . k_sj / sqrt(D)) v_sj  over all s and all j with lo_s[i] <= j < hi_s[i]

    Args:
        q: queries (B, H, T, D) of any float dtype, or a tuple of them, one per group; scores and softmax are
            float32 (float64 stays float64).
        sources: keys, values and spans; with groups, every source has a span per group.
        plan: made by `plan_attention` from these same span objects; None: made here, for this call alone.
        backend: see `plan_attention`; with a plan, the plan's.
        return_lse: also return the log-sum-exp of the scores, without gradient; -inf where nothing is read.
        dropout: rate at which weights are set to 0, the others scaled up; tiled only.
    Returns: y like q, and with `return_lse` (y, lse), lse (B, H, T) per group. A query that may read nothing gets
        exactly zero, forward and backward.
    Raises: ValueError for shapes that do not fit, and where a named backend does not support the call.
    Source: eq. 5 of State-Prediction Separation (arXiv 2607.01218) is the case of two sources; docs/attention.md.
    """
    queries = q if isinstance(q, tuple) else (q,)
    if plan is None:
        spans, keys = [s.span for s in sources], [s.k.shape[2] for s in sources]
        plan = plan_attention(spans, keys, device=queries[0].device, backend=backend)
    elif backend not in ("auto", plan.backend):
        raise ValueError(f"backend {backend!r} with a plan for {plan.backend!r}; name it in plan_attention")
    _check_tensors(queries, sources, plan)
    chosen, reason = plan.choose(queries[0], return_lse, dropout)
    for found in _listening:
        found[chosen] = reason
    if chosen == "dense":
        return attend_dense(q, sources, return_lse=return_lse)
    keys, values = [s.k for s in sources], [s.v for s in sources]
    if chosen == "tiled":
        ys, lses = plan.tiles.run(queries, keys, values, return_lse, dropout)
    else:
        calls: Any = plan.blocks if chosen == "flex" else plan.fused
        ys, lses = calls.run(queries, keys, values, return_lse)
    if not isinstance(q, tuple):
        return (ys[0], lses[0]) if return_lse else ys[0]
    return (ys, lses) if return_lse else ys


@_outside_graphs
def attend_rows(q: Tensor, k: Tensor | Sequence[Tensor], v: Tensor | Sequence[Tensor], *, plan: Plan) -> Tensor:
    """`attend` where one tensor holds all groups of queries, as rows, one group after the other.

    Args:
        q: (G B, H, T, D) for the G groups of the plan.
        k, v: of each source, or (S B, ..) likewise for all its sources.
    Returns: y like q. The triton backend takes nothing apart and puts nothing together.
    """
    chosen, reason = plan.choose(q)
    if chosen != "triton":
        ys = attend(*_apart(q, k, v, plan), plan=plan)
        return torch.cat(ys) if len(ys) > 1 else ys[0]
    with torch.no_grad():  # views for the checks alone
        _check_tensors(*_apart(q, k, v, plan), plan)
    for found in _listening:
        found[chosen] = reason
    keys, values = ([x] if isinstance(x, Tensor) else x for x in (k, v))
    return plan.fused.run((q,), keys, values)[0][0]


def _apart(
    q: Tensor, k: Tensor | Sequence[Tensor], v: Tensor | Sequence[Tensor], plan: Plan
) -> tuple[tuple[Tensor, ...], list[Source]]:
    _, S, groups, _ = plan.lo.shape
    keys, values = (x.chunk(S) if isinstance(x, Tensor) else x for x in (k, v))
    return q.chunk(groups), [Source(*of) for of in zip(keys, values, plan.spans, strict=True)]


def _check_tensors(queries: tuple[Tensor, ...], sources: Sequence[Source], plan: Plan) -> None:
    B, H, T, D = queries[0].shape
    rows, _, groups, planned_T = plan.lo.shape
    if len(queries) != groups or planned_T != T or rows not in (1, B) or any(q.shape != (B, H, T, D) for q in queries):
        shapes = [tuple(q.shape) for q in queries]
        raise ValueError(f"queries of shapes {shapes}; planned: {groups} of {planned_T} queries, {rows} rows")
    if queries[0].device.type != plan.device.type:
        raise ValueError(f"queries on {queries[0].device} and a plan for {plan.device}; give plan_attention the device")
    if len(sources) != len(plan.keys):
        raise ValueError(f"{len(sources)} sources, but the plan has {len(plan.keys)}")
    G = sources[0].k.shape[1]
    for i, (source, planned, N) in enumerate(zip(sources, plan.spans, plan.keys, strict=True)):
        k, v = source.k, source.v
        if k.shape != (B, G, N, D) or v.shape != k.shape or H % G:
            raise ValueError(
                f"source {i}: keys {tuple(k.shape)} and values {tuple(v.shape)} beside queries {(B, H, T, D)}; "
                f"both should be {(B, 'G', N, D)} with G dividing {H}, the same for every source"
            )
        if k.dtype != queries[0].dtype or v.dtype != k.dtype:
            raise ValueError(f"source {i}: keys {k.dtype}, values {v.dtype} and queries {queries[0].dtype}; use one")
        spans = _groups(source.span)
        if len(spans) != len(planned) or any(a is not b for a, b in zip(spans, planned, strict=True)):
            raise ValueError(f"source {i}: its span is not the one that was planned; make a plan of the spans you use")
