"""Attention, the house's one primitive: every mask is a set of spans.

In every network here, what a query may read of a source of keys is one run of neighbours, `lo[i] <= j < hi[i]`
(spans.py). Attention is one softmax over the union of what its sources allow, so one function serves them all:

                        source 1            source 2
                   ┌───────────────┐   ┌───────────────┐
    query i reads  . . # # # # # . .   . . . . # # . . .      y_i = softmax(scores of all #) . values of all #
                       lo      hi              lo  hi

    plan = plan_attention([span], [T])                     # once per batch, on the host: bounds, tiles, masks
    y = attend(q, [Source(k, v, span)], plan=plan)         # in every layer

Queries may come in groups that read the same keys by different spans (the two streams of State-Prediction
Separation): q and every span are then tuples, one entry per group, and so is y.

    dense   the definition, symbol by symbol: the oracle of the tests, and the code to read first (below)
    tiled   one SDPA call per tile of queries, over the slices it reads; any device, made for CPUs (tiled.py)
    flex    FlexAttention with a block mask straight from the spans; made for CUDA (flex.py)

Cost: 4 D sum(hi - lo) FLOPs per head forward, 2.5 times that backward; docs/attention.md derives the tiles.
Shapes: B rows, T queries, N keys of a source, H heads, G key heads, D head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tandem.nn import tiled
from tandem.nn.spans import Span, readable

Backend = Literal["auto", "dense", "tiled", "flex"]
Groups = tuple[Span, ...]


@dataclass(frozen=True, eq=False)
class Source:
    """Keys and values (B, G, N, D), G dividing H, and who reads them: a span, or one per group of queries."""

    k: Tensor
    v: Tensor
    span: Span | Groups


# ---- the definition ---------------------------------------------------------------------------------------------------


def attend_dense(q, sources: Sequence[Source], *, scale: float | None = None, return_lse: bool = False):
    """The definition of `attend`, never sped up: arguments and result are the same, float64 is kept throughout."""
    if isinstance(q, tuple):
        of_group = [[Source(s.k, s.v, s.span[g]) for s in sources] for g in range(len(q))]
        results = [attend_dense(*one, scale=scale, return_lse=return_lse) for one in zip(q, of_group)]
        return tuple(zip(*results)) if return_lse else tuple(results)
    B, H, _, D = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    k_BHND = torch.cat([s.k.repeat_interleave(H // s.k.shape[1], dim=1) for s in sources], dim=2).to(dtype)
    v_BHND = torch.cat([s.v.repeat_interleave(H // s.v.shape[1], dim=1) for s in sources], dim=2).to(dtype)
    may_BTN = torch.cat([readable(s.span, s.k.shape[2]).expand(B, -1, -1) for s in sources], dim=-1).to(q.device)
    score_BHTN = q.to(dtype) @ k_BHND.mT * (D**-0.5 if scale is None else scale)
    score_BHTN = score_BHTN.masked_fill(~may_BTN[:, None], -torch.inf)
    y_BHTD = score_BHTN.softmax(-1).nan_to_num(0.0) @ v_BHND  # an empty row is 0/0: defined as zero
    return (y_BHTD.to(q.dtype), score_BHTN.detach().logsumexp(-1)) if return_lse else y_BHTD.to(q.dtype)


# ---- planning, once per batch -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Plan:
    """What all attention over the same spans shares: checked bounds and, made on first use, tiles or block mask.

    lo, hi: (rows, sources, groups, queries); rows is 1 where all rows of the batch agree.
    """

    spans: tuple[Groups, ...]
    keys: tuple[int, ...]
    lo: np.ndarray
    hi: np.ndarray
    device: torch.device
    backend: Backend

    @cached_property
    def strips(self) -> list[tiled.Strip]:
        return tiled.plan(self.lo, self.hi, self.keys, self.device)

    @cached_property
    def blocks(self):
        from tandem.nn import flex  # loads slowly, and only CUDA needs it

        return flex.plan(self.lo, self.hi, self.keys, self.device)

    @property
    def tiled_pairs(self) -> int:
        """Query-key pairs per head that the tiled backend visits, summed over rows; needed are (hi - lo).sum()."""
        return sum(strip.pairs for strip in self.strips)

    def choose(self, q: Tensor) -> Backend:
        """The backend for these queries; a named one is never replaced."""
        if self.backend != "auto":
            return self.backend
        # FlexAttention has no float64 and no narrow heads, and for a few queries one plain call is cheaper.
        suits_flex = q.is_cuda and q.dtype != torch.float64 and q.shape[2] > 16 and q.shape[3] >= 16
        return "flex" if suits_flex else "tiled"


def plan_attention(
    spans: Sequence[Span | Groups],
    keys: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    backend: Backend = "auto",
) -> Plan:
    """Checks the spans of all sources and plans attention over them, once for all layers of a batch.

    Args:
        spans: of every source, a span or a tuple with one per group of queries.
        keys: N of every source.
        device: where the queries will be.
        backend: "auto" takes flex for long queries on CUDA and tiled otherwise; a named one never falls back.
    Raises: ValueError naming source, row and position where a span leaves [0, N] or moves back.
    """
    groups = tuple(span if isinstance(span, tuple) else (span,) for span in spans)
    if not groups or len(groups) != len(keys):
        raise ValueError(f"attention over {len(groups)} spans and {len(keys)} numbers of keys; give both per source")
    flat = [span for group in groups for span in group]
    rows = max(span.lo.shape[0] for span in flat)
    shapes = {(span.lo.shape[1], span.lo.shape[0] in (1, rows), len(group)) for group in groups for span in group}
    if len(shapes) > 1 or not all(fits for _, fits, _ in shapes):
        shapes = [[tuple(span.lo.shape) for span in group] for group in groups]
        raise ValueError(f"spans of shapes {shapes}: all need the same groups and queries, and 1 or {rows} rows")
    shape = (len(groups), len(groups[0]), rows, flat[0].lo.shape[1])
    lo, hi = (
        np.stack([np.broadcast_to(bound(span).numpy(), shape[2:]) for span in flat]).reshape(shape).transpose(2, 0, 1, 3)
        for bound in (lambda span: span.lo, lambda span: span.hi)
    )
    _check_spans(lo, hi, keys)
    return Plan(groups, tuple(keys), lo, hi, torch.device(device), backend)


def _check_spans(lo: np.ndarray, hi: np.ndarray, keys: Sequence[int]) -> None:
    N = np.array(keys)[:, None, None]
    outside = (lo < 0) | (hi > N)
    back = np.zeros_like(outside)
    back[..., 1:] = (lo[..., 1:] < lo[..., :-1]) | (hi[..., 1:] < hi[..., :-1])
    for wrong, what in ((outside, "leaves"), (back, "moves back among")):
        if wrong.any():
            r, s, g, i = np.argwhere(wrong)[0].tolist()
            before = f", after [{lo[r, s, g, i - 1]}, {hi[r, s, g, i - 1]})" if wrong is back else ""
            raise ValueError(
                f"source {s}, row {r}, position {i}{f', group {g}' if lo.shape[2] > 1 else ''}: "
                f"the span [{lo[r, s, g, i]}, {hi[r, s, g, i]}){before} {what} the keys [0, {keys[s]})"
            )


# ---- attending, in every layer ----------------------------------------------------------------------------------------


@torch.compiler.disable  # the bounds are host integers of one batch: a graph that held them would be compiled per batch
def attend(
    q: Tensor | tuple[Tensor, ...],
    sources: Sequence[Source],
    *,
    plan: Plan | None = None,
    backend: Backend = "auto",
    scale: float | None = None,
    return_lse: bool = False,
) -> Any:
    """One softmax over the union of what each source lets each query read.

        y_i = sum of softmax(q_i . k_sj / sqrt(D)) v_sj  over all s and all j with lo_s[i] <= j < hi_s[i]

    Args:
        q: queries (B, H, T, D) of any float dtype, or a tuple of such, one per group; scores and softmax are
            float32 (float64 stays float64).
        sources: keys, values and spans; with groups, every source has a span per group.
        plan: what `plan_attention` made of these very spans; None: made here, for this call alone.
        backend: see `plan_attention`; with a plan, the plan's.
        scale: in place of 1/sqrt(D).
        return_lse: also return the log-sum-exp of the scores, without gradient; -inf where nothing is read.
    Returns: y like q, and with `return_lse` (y, lse), lse (B, H, T) per group. A query that may read nothing gets
        exactly zero, forward and backward.
    Raises: ValueError for shapes that do not fit, and where a named backend cannot do what is asked of it.
    Source: sps.md eq. 5 and the generation layer of the double decoder are two-source cases; docs/attention.md.
    """
    queries = q if isinstance(q, tuple) else (q,)
    if plan is None:
        spans, keys = [s.span for s in sources], [s.k.shape[2] for s in sources]
        plan = plan_attention(spans, keys, device=queries[0].device, backend=backend)
    elif backend not in ("auto", plan.backend):
        raise ValueError(f"backend {backend!r} with a plan for {plan.backend!r}; name it in plan_attention")
    _check_tensors(queries, sources, plan)
    chosen = plan.choose(queries[0])
    if chosen == "dense":
        return attend_dense(q, sources, scale=scale, return_lse=return_lse)
    keys, values = [s.k for s in sources], [s.v for s in sources]
    if chosen == "tiled":
        ys, lses = tiled.run(plan.strips, queries, keys, values, scale, return_lse)
    else:
        ys, lses = plan.blocks.run(queries, keys, values, scale, return_lse)
    if not isinstance(q, tuple):
        return (ys[0], lses[0]) if return_lse else ys[0]
    return (ys, lses) if return_lse else ys


def _check_tensors(queries: tuple[Tensor, ...], sources: Sequence[Source], plan: Plan) -> None:
    B, H, T, D = queries[0].shape
    rows, _, groups, planned = plan.lo.shape
    if len(queries) != groups or planned != T or rows not in (1, B) or any(q.shape != (B, H, T, D) for q in queries):
        shapes = [tuple(q.shape) for q in queries]
        raise ValueError(f"queries of shapes {shapes}; planned were {groups} groups of {planned} queries, {rows} rows")
    if len(sources) != len(plan.keys):
        raise ValueError(f"{len(sources)} sources, but the plan has {len(plan.keys)}")
    for i, (source, groups, N) in enumerate(zip(sources, plan.spans, plan.keys)):
        G, k, v = source.k.shape[1], source.k, source.v
        if k.shape != (B, G, N, D) or v.shape != k.shape or H % G:
            raise ValueError(
                f"source {i}: keys {tuple(k.shape)} and values {tuple(v.shape)} beside queries {(B, H, T, D)}; "
                f"both should be {(B, 'G', N, D)} with G dividing {H}"
            )
        if k.dtype != queries[0].dtype or v.dtype != k.dtype:
            raise ValueError(f"source {i}: keys {k.dtype}, values {v.dtype} and queries {queries[0].dtype}; use one")
        span = source.span if isinstance(source.span, tuple) else (source.span,)
        if len(span) != len(groups) or any(a is not b for a, b in zip(span, groups)):
            raise ValueError(f"source {i}: its span is not the one that was planned; make a plan of the spans you use")
