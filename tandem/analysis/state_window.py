"""How much of the persistent state is used: the loss when every token may read only the newest part of it.

    delta_i = nll_i with the state cut to [max(s, i - omega), ..)  -  nll_i          nats, over the position i

In every block the persistent source of keys is cut; a query still reads itself, and the window of a two-stream network
is unchanged. A network that keeps much in its state loses much. For the plain decoder the state is all its keys.

Cost: two forward passes over the first `tokens` tokens of every document.
Source: State-Prediction Separation (arXiv 2607.01218), figure 5b. Shapes: D documents, T tokens.
"""

from typing import Any

import numpy as np
import torch
from pydantic import Field

from tandem.analysis.analysis import Analysis, chosen_documents, first_tokens, smoothed
from tandem.recipe import Settings, UserError, register
from tandem.training.run import Run


@register("analysis", "state_window")
class StateWindow(Analysis):
    """Loss by position when the persistent state is cut to a window, against the loss with the full state."""

    asks = "restricted"
    needs_scipy = True

    class Config(Settings):
        window: int = Field(64, ge=0)
        """Tokens of the state before a query's own that stay readable (omega)."""
        documents: int = Field(8000, ge=1)
        """Held-out documents, at most; only those with more than `tokens` tokens."""
        tokens: int | None = Field(None, ge=2)
        """Tokens of each document; null: 2048, or the context of the run where it is shorter."""
        rows: int = Field(8, ge=1)
        """Documents at a time; changes nothing but speed and memory."""

    def measure(self, run: Run) -> dict[str, Any]:
        c, store = self.config, run.corpus.validation
        network: Any = run.network  # has the attribute that `asks` names
        tokens = c.tokens or min(2048, run.recipe.batch.context)
        if c.window >= min(tokens - 1, tokens if network.config.reach is None else network.config.reach):
            raise UserError(
                f"analysis.window = {c.window}: it cuts nothing of what this network reads of {tokens} tokens; ask for "
                "a smaller one"
            )
        documents = chosen_documents(store, c.documents, shortest=tokens + 1)
        cut, whole = [], []
        for first in self.each(range(0, len(documents), c.rows)):
            batch = first_tokens(network, store, documents[first : first + c.rows], tokens).to(run.device.value)
            with torch.no_grad():
                cut.append(network.restricted(c.window).score(batch).cpu().numpy())
                whole.append(network.score(batch).cpu().numpy())
        cut_DT, whole_DT = (np.concatenate(parts).astype(np.float64) for parts in (cut, whole))
        delta_DT = cut_DT - whole_DT
        D = len(documents)
        error = (delta_DT.std(0, ddof=1) / D**0.5).tolist() if D > 1 else None
        return {
            "window": c.window,
            "tokens": tokens,
            "documents": D,
            "nats_per_token": whole_DT.mean(),
            "nats_per_token_cut": cut_DT.mean(),
            "last_delta": smoothed(delta_DT.mean(0)[c.window + 1 :], _smoothing(tokens))[-1],
            "nll": whole_DT.mean(0).tolist(),
            "delta": delta_DT.mean(0).tolist(),
            "delta_standard_error": error,
        }

    def draw(self, record: dict[str, Any], axes: Any) -> None:
        first = record["window"] + 1  # before, nothing is cut
        delta = np.array(record["delta"])[first:]
        position = np.arange(first, first + len(delta))
        axes.axhline(0, color="0.6", linewidth=0.8, zorder=0)
        if record["delta_standard_error"]:
            error = np.array(record["delta_standard_error"])[first:]
            means = f"mean of {record['documents']:,} documents, one standard error either side"
            axes.fill_between(position, delta - error, delta + error, color="C0", linewidth=0, alpha=0.2, label=means)
        axes.plot(position, smoothed(delta, _smoothing(record["tokens"])), "C0", linewidth=1.6, label="smoothed")
        axes.legend(frameon=False)
        axes.set_xlabel("position in the document (tokens)")
        axes.set_ylabel(f"loss added when only {record['window']} tokens of state are read (nats)")


def _smoothing(tokens: int) -> int:
    """Neighbours of a parabola: a tenth of the tokens; for the paper's 2,048 its 201."""
    return min(201, tokens // 10 | 1)
