"""How fast the passes of a context-ready network approach streaming.

    delta_k = max over rows, positions and channels of |c(k) - c(k-1)|          c(0) = 0
    rho = delta_K / delta_(K-1)              the last ratio above the tolerance, averaged over batches, of fewer passes
                                             than a document has tokens: its last pass moves its last position alone

    delta 1, 0.5, 0.25, ...  ->  rho 0.5: each pass halves what is left

rho follows one trajectory and is no Lipschitz constant. If q were one, of the whole map from corrections to
corrections, the distance left after K passes, |c* - c(K)|, would be at most q^K |c*|, at most q^K / (1 - q) delta_1,
and at most q / (1 - q) delta_K. The last bound, solved for q, bounds q from below on this text; so does every ratio
delta_k / delta_(k-1), which can be larger:

    q >= left_K / (left_K + delta_K)         the largest of all passes that move anything, and of all batches

As corrections reach forward only, nothing moves after T passes, whatever rho is.

It also reports what passes are worth: perplexity of held-out text at K = 1, 2, 3, 5, 10 and streaming. The nats that
streaming gains over K = 1 are the share of the correction.

Cost: the table scores the documents six times, in 21 passes and streaming; q streams the measured batches once.
Source: The Context-Ready Transformer (arXiv 2606.27538), tables 6 to 8 and the section on contraction.
Shapes: B rows, T tokens, K passes.
"""

import math
from itertools import islice
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from tandem.analysis.analysis import Analysis, chosen_documents
from tandem.corpus import IGNORE, Batch, scoring_rows
from tandem.networks.context_ready import ContextReady, movement
from tandem.networks.correction import Passes
from tandem.recipe import Settings, register
from tandem.training.run import Run

COLUMNS: tuple[Passes, ...] = (1, 2, 3, 5, 10, "stream")


@torch.no_grad()
def movements(network: ContextReady, batch: Batch, passes: int) -> Tensor:
    """(K, T): max over rows and channels of |c(k) - c(k-1)|, k = 1 .. K, in the dtype of the weights; of a row whose
    movement is no more than rounding: 0."""
    e = network.wrapped.placed(network.embed(batch.tokens), batch)
    moved, before = [], torch.zeros_like(e)
    for c in islice(network.corrections(e, network.wrapped.reader(e, batch), batch.starts), passes):
        moved.append(movement(e, c, before).amax(0))
        before = c
    return torch.stack(moved).cpu()


@torch.no_grad()
def distances(network: ContextReady, batch: Batch, passes: int) -> np.ndarray:
    """(K,): max over rows, positions and channels of |c* - c(k)|, k = 1 .. K; c* is what streaming adds."""
    e = network.wrapped.placed(network.embed(batch.tokens), batch)
    reader = network.wrapped.reader(e, batch)
    end, _ = network.corrected(e, reader, batch.starts, "stream")
    assert end is not None
    found = [movement(e, end, c).amax() for c in islice(network.corrections(e, reader, batch.starts), passes)]
    return torch.stack(found).cpu().numpy()


def least_constant(delta_K: np.ndarray, left_K: np.ndarray, tolerance: float = 0.0) -> float:
    """The least q with left <= q / (1 - q) delta after each pass that moves anything by more than `tolerance`; 0 if
    none does."""
    moving = delta_K > tolerance
    return float((left_K[moving] / (left_K[moving] + delta_K[moving])).max(initial=0.0))


def last_ratio(delta_K: np.ndarray, tolerance: float = 0.0) -> float:
    """rho at the last pass that moves anything by more than `tolerance`; 0 if none."""
    moving = np.flatnonzero(delta_K[1:] > tolerance)
    return float(delta_K[moving[-1] + 1] / delta_K[moving[-1]]) if len(moving) else 0.0


def before_end(delta_K: np.ndarray, batch: Batch) -> np.ndarray:
    """delta of those passes that are fewer than the tokens of the longest document."""
    T = batch.starts.shape[1]
    return delta_K[: int((torch.arange(T) - batch.starts.cpu()).max())]


def passes_needed(delta_K: np.ndarray, tolerance: float, T: int) -> int | None:
    """Passes of a session over T tokens: those that move corrections by more than `tolerance`, the first that does not,
    and one over what that gave, at most T + 1; None: more than `delta_K` tells."""
    settled = np.flatnonzero((delta_K <= tolerance) | (np.arange(len(delta_K)) == T - 1))
    return int(settled[0]) + 2 if len(settled) else None


@torch.no_grad()
def nats_per_token(network: ContextReady, batches: list[Batch], passes: Passes) -> float:
    tokens = sum(int((batch.targets != IGNORE).sum()) for batch in batches)
    return sum(network.score(batch, passes=passes).double().sum().item() for batch in batches) / tokens


@register("analysis", "contraction")
class Contraction(Analysis):
    """How much the corrections still move after each pass, and what passes are worth in nats."""

    asks = "corrections"

    class Config(Settings):
        passes: int = Field(20, ge=2)
        """K, passes whose movement is measured."""
        batches: int = Field(4, ge=1)
        """Batches of held-out text over which it is averaged."""
        documents: int | None = Field(50, ge=1)
        """Held-out documents that are scored; null: all."""

    def measure(self, run: Run) -> dict[str, Any]:
        """Movement by pass, and by pass and position, rho, q, passes to the tolerance, and perplexity by passes."""
        c, network, store = self.config, run.network, run.corpus.validation
        assert isinstance(network, ContextReady)
        chosen = chosen_documents(store, c.documents, shortest=2)
        rows = scoring_rows(store, run.recipe.batch.context, run.recipe.evaluation.rows, chosen)
        batches = [scoring.batch.to(run.device.value) for scoring in rows]
        moved_BKT = np.stack([movements(network, batch, c.passes).numpy() for batch in batches[: c.batches]])
        delta_BK = moved_BKT.max(-1)
        delta_K = delta_BK.mean(0)
        nll = {str(passes): nats_per_token(network, batches, passes) for passes in self.each(COLUMNS)}
        measured = [before_end(*pair) for pair in zip(delta_BK, batches, strict=False)]
        left_BK = [distances(network, batch, c.passes) for batch in batches[: c.batches]]
        tolerance = network.config.tolerance
        return {
            "rho": float(np.mean([last_ratio(delta_K, tolerance) for delta_K in measured])),
            "q_at_least": max(least_constant(*pair, tolerance) for pair in zip(delta_BK, left_BK, strict=True)),
            "passes_to_tolerance": passes_needed(delta_BK.max(0), tolerance, moved_BKT.shape[-1]),
            "correction_share": nll["1"] - nll["stream"],
            **{f"perplexity_{K}": math.exp(nats) for K, nats in nll.items()},
            "delta": delta_K.tolist(),
            "delta_by_position": moved_BKT.mean(0).tolist(),
            "nats_per_token": nll,
        }

    def draw(self, record: dict[str, Any], axes: Any) -> None:
        """Movement by pass, logarithmic, with the line that rho would give; to the right, perplexity."""
        delta = np.array(record["delta"])
        k = 1 + np.arange(len(delta))
        axes.semilogy(k, delta, "C0o-", markersize=4, label="largest movement")
        axes.semilogy(k, delta[0] * record["rho"] ** (k - 1.0), "C1--", label=f"rho = {record['rho']:.2f}")
        axes.set(xlabel="pass", ylabel="movement of the corrections, |c(k) - c(k-1)|")
        right, numbers = axes.twinx(), [K for K in COLUMNS if K != "stream"]
        right.plot(numbers, [record[f"perplexity_{K}"] for K in numbers], "C2s-", label="perplexity in k passes")
        right.axhline(record["perplexity_stream"], color="C2", linestyle=":", label="streaming")
        right.set_ylabel("perplexity")
        lines = [*axes.get_lines(), *right.get_lines()]
        axes.legend(lines, [line.get_label() for line in lines], frameon=False)
