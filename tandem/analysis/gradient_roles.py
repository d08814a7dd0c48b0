"""Where the gradient of future losses lands: in the states that persist, or in those that predict.

Imagine that every slot (one stream at one position p) has its own copy of the parameters. The loss at p + k reaches
the copy of slot p only through what later tokens read from it, the loss at p through its own prediction:

    r(p, k) = | grad of slot p, loss at p + k | / | grad of slot p, loss at p |        k = 1 .. horizon

No copy is made. In a linear layer the gradient of slot p is g a^T (g: gradient at the output, a: the input, both of
that slot), with squared norm |g|^2 |a|^2; for a norm's weight it is |g * normalised input|^2; for the embedding |g|^2.
So one backward pass from one loss gives the norms of all earlier slots of all streams. Of `targets` loss positions
drawn in a document every pair (p, j), p before j, gives a ratio: per backward 16 times more than one slot at a time.

Counted are all parameters in the blocks and the slot's embedding; head and final norm are left out. A stream that its
own prediction does not use (the predictions of Reverse SPS) has no present loss, and so no ratio.

Cost: a forward and `targets` backward passes for every row of documents.
Source: State-Prediction Separation (arXiv 2607.01218), eq. 6 and figure 5a.
Shapes: B documents, S streams, T tokens, J targets, K horizon.
"""

import contextlib
import copy
from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from tandem.analysis.analysis import Analysis, chosen_documents, first_tokens, smoothed
from tandem.corpus import Batch
from tandem.nn.init import roles
from tandem.recipe import Settings, UserError, register
from tandem.training.run import Run

KINDS = {"attention": "attention", "attention_out": "attention", "mlp": "mlp", "mlp_out": "mlp", "norm": "norm"}
"""Kinds of parameters in a block, by role; biases count with their matrices."""


@register("analysis", "gradient_roles")
class GradientRoles(Analysis):
    """Gradient of future losses against that of the present loss, by offset, for every stream."""

    asks = "streams"
    needs_scipy = True

    class Config(Settings):
        documents: int = Field(1000, ge=1)
        """Held-out documents, at most; only those that are long enough for the largest offset."""
        tokens: int | None = Field(None, ge=32)
        """Tokens of each document, at most; null: 1024, or the run's context if shorter. Slots lie in the first half,
        except in the first sixteenth; offsets go up to half."""
        targets: int = Field(64, ge=2)
        """Loss positions drawn in each document, one backward pass each."""
        rows: int = Field(4, ge=1)
        """Documents at a time; changes nothing but speed and memory."""

    def measure(self, run: Run) -> dict[str, Any]:
        c, store = self.config, run.corpus.validation
        network: Any = run.network  # has the attribute that `asks` names
        if getattr(network.config, "moe", None):
            raise UserError(
                "analyse gradient_roles: a mixture of experts gives a slot no gradient of its own in one product; "
                "ask a run with network.moe: null"
            )
        tokens = c.tokens or min(1024, run.recipe.batch.context)
        first, horizon = slots(tokens, tokens).start, tokens // 2
        if c.targets > horizon:
            raise UserError(f"analysis.targets = {c.targets}: at most {horizon} with {tokens} tokens; ask for fewer")
        documents = chosen_documents(store, c.documents, shortest=first + horizon + 2)
        draw = np.random.default_rng(0)
        found: list[np.ndarray] = []
        for begin in self.each(range(0, len(documents), c.rows)):
            batch = first_tokens(network, store, documents[begin : begin + c.rows], tokens)
            ends = (batch.starts == 0).sum(1).tolist()
            chosen = [np.sort(draw.choice(np.arange(first, end), c.targets, replace=False)) for end in ends]
            targets = torch.from_numpy(np.stack(chosen))
            norms = [
                torch.stack(list(parts.values())).sum(0).sqrt().cpu()
                for parts in squared_norms(network, batch.to(run.device.value), targets)
            ]
            end_of_slots = [slots(end, tokens).stop for end in ends]
            found.append(_ratios(torch.stack(norms).numpy(), targets.numpy(), end_of_slots, horizon, begin))
        ratios = np.concatenate(found)
        if not len(ratios):
            raise UserError(
                f"analysis.targets = {c.targets}: no slot's own loss was drawn with one up to {horizon} tokens later; "
                "ask for more targets, or for more documents"
            )
        return {
            "tokens": tokens,
            "documents": len(documents),
            "slots": [first, horizon],
            "horizon": horizon,
            "pairs": len(ratios),
            "streams": {
                name: _by_offset(ratios[ratios["stream"] == s], horizon, len(documents))
                for s, name in enumerate(network.streams)
            },
        }

    def draw(self, record: dict[str, Any], axes: Any) -> None:
        for colour, (name, curve) in enumerate(record["streams"].items()):
            points = zip(count(1), curve["mean"], curve["mean_interval"], strict=False)
            found = [(k, mean, interval) for k, mean, interval in points if mean]
            if not found:
                continue  # nothing reads this stream later
            offsets, means, intervals = zip(*found, strict=True)
            low, high = zip(*(interval or (np.nan, np.nan) for interval in intervals), strict=True)
            axes.fill_between(offsets, low, high, color=f"C{colour}", linewidth=0, alpha=0.2)
            line = 10 ** smoothed(np.log10(means), min(21, record["horizon"] // 20 | 1))  # the paper's 21 of 512
            axes.plot(offsets, line, f"C{colour}", linewidth=1.6, label=name)
        axes.axhline(1, color="0.6", linewidth=0.8, zorder=0)
        axes.set_yscale("log")
        axes.set_xlabel("offset k of the future loss (tokens)")
        axes.set_ylabel("gradient of the loss k ahead / of the present loss")
        band = ", and 95 % interval of the mean" if record["documents"] > 1 else ""
        axes.legend(frameon=False, title=f"smoothed mean{band}")


# ---- norms, without a copy of anything ------------------------------------------------------------------------------


class _Use(NamedTuple):
    """One module applied to all slots: `module` None stands for the embeddings, which enter the first block."""

    layer: int
    kind: str
    module: nn.Module | None
    given: Tensor
    result: Tensor

    def squares(self, g: Tensor) -> Tensor:
        """Squared norm of the gradient of each slot's copy of the parameters, (S B, T), from that at the output."""
        if self.module is None:
            return g.square().sum(-1)
        has_bias = getattr(self.module, "bias", None) is not None
        if isinstance(self.module, nn.Linear):
            return g.square().sum(-1) * (self.given.square().sum(-1) + has_bias)
        normalise = F.rms_norm if isinstance(self.module, nn.RMSNorm) else F.layer_norm
        weight = g * normalise(self.given, self.given.shape[-1:], eps=self.module.eps)  # type: ignore[arg-type]
        parts = [weight, g] if has_bias else [weight]
        parts = [x.sum(2) if x.ndim == 4 else x for x in parts]  # heads share a norm: (S B, T, H, D) to (S B, T, D)
        return sum((x.square().sum(-1) for x in parts), torch.zeros((), device=g.device))


def squared_norms(network: Any, batch: Batch, targets: Tensor) -> Iterator[dict[tuple[int, str], Tensor]]:
    """For each column of `targets`, (B, J) positions of losses: squared norms of the loss's gradient in all slots.

    Yields: {(layer, attention, mlp, norm or embedding): (S, B, T)}; a slot after the target has zero.
    """
    probe, rows = copy.copy(network), torch.arange(len(targets))
    probe.whole = True  # every slot of every block, also those that no loss needs
    with torch.enable_grad():
        uses, nll = _recorded(probe, batch)
        for column in targets.T:
            results = [use.result for use in uses]
            grads = torch.autograd.grad(nll[rows, column].sum(), results, retain_graph=True, materialize_grads=True)
            found: dict[tuple[int, str], Tensor] = {}
            for use, g in zip(uses, grads, strict=True):
                squares = use.squares(g).unflatten(0, (-1, len(targets)))
                key = use.layer, use.kind
                found[key] = found[key] + squares if key in found else squares
            yield found


def _recorded(network: Any, batch: Batch) -> tuple[list[_Use], Tensor]:
    """Every use of a parameter in the blocks, in one forward pass, and the losses (B, T)."""
    uses: list[_Use] = []

    def enter(block: nn.Module, args: tuple) -> None:
        uses.append(_Use(0, "embedding", None, args[0], args[0]))

    with contextlib.ExitStack() as hooks:
        hooks.enter_context(network.blocks[0].register_forward_pre_hook(enter))
        for layer, block in enumerate(network.blocks):
            role = roles(block)
            hooks.callback(setattr, block, "kernels", block.kernels)
            block.kernels = None  # compiled graphs call no hooks
            for name, module in block.named_modules():
                if f"{name}.weight" in role:

                    def note(module, args, result, layer=layer, kind=KINDS[role[f"{name}.weight"]]):
                        uses.append(_Use(layer, kind, module, args[0].detach(), result))

                    hooks.enter_context(module.register_forward_hook(note))
        return uses, network.score(batch)


def slots(losses: int, tokens: int) -> range:
    """Positions to be analysed in a document with `losses` losses, of which at most `tokens` are used.

    With 1,024: from 64 to 512, as far as the largest offset still has a loss.
    """
    return range(tokens // 16, min(tokens // 2, losses - tokens // 2))


# ---- ratios ---------------------------------------------------------------------------------------------------------

RESAMPLES = 1000
"""Of the documents, for the intervals."""
RATIO = np.dtype([("document", int), ("stream", int), ("offset", int), ("ratio", float)])


def _ratios(
    norms_JSBT: np.ndarray, targets_BJ: np.ndarray, end_of_slots: list[int], horizon: int, first_document: int
) -> np.ndarray:
    """Ratios of all pairs of targets (p, j) of a document, with p an analysed slot and j at most `horizon` ahead.

    Pairs whose slot has no gradient from its own loss are left out.
    """
    found = []
    for row, positions in enumerate(targets_BJ):
        offset = positions[None] - positions[:, None]
        a, c = np.nonzero((positions[:, None] < end_of_slots[row]) & (offset >= 1) & (offset <= horizon))
        for stream in range(norms_JSBT.shape[1]):
            norms = norms_JSBT[:, stream, row].astype(np.float64)
            present, future = norms[a, positions[a]], norms[c, positions[a]]
            has = present > 0
            part = np.zeros(has.sum(), RATIO)
            part["document"], part["stream"], part["offset"] = first_document + row, stream, offset[a, c][has]
            part["ratio"] = future[has] / present[has]
            found.append(part)
    return np.concatenate(found)


def _by_offset(ratios: np.ndarray, horizon: int, documents: int) -> dict[str, list]:
    """Pairs, median, and arithmetic and geometric mean with 95 % intervals over documents, by offset 1 .. horizon.

    An offset that only one document has gets no intervals.
    """
    cells = np.zeros((3, documents, horizon))  # pairs, ratios, logarithms of ratios
    place = ratios["document"], ratios["offset"] - 1
    logs = np.log(np.maximum(ratios["ratio"], np.finfo(float).tiny))  # a slot that nothing reads has ratio 0
    for cell, value in zip(cells, (1.0, ratios["ratio"], logs), strict=True):
        np.add.at(cell, place, value)
    having = (cells[0] > 0).sum(0)  # documents, by offset
    seen = having > 0
    weights = np.random.default_rng(0).multinomial(documents, [1 / documents] * documents, RESAMPLES)
    n, total, logs = cells[:, :, seen].sum(1)
    drawn_n, drawn_total, drawn_logs = (weights @ cell for cell in cells[:, :, seen])
    with np.errstate(invalid="ignore"):  # a resample may miss every document that has some offset
        drawn_mean, drawn_log = drawn_total / drawn_n, drawn_logs / drawn_n
    curves = {
        "mean": total / n,
        "mean_interval": np.nanquantile(drawn_mean, (0.025, 0.975), axis=0).T,
        "median": np.array([np.median(ratios["ratio"][ratios["offset"] == k + 1]) for k in np.flatnonzero(seen)]),
        "geometric_mean": np.exp(logs / n),
        "geometric_interval": np.exp(np.nanquantile(drawn_log, (0.025, 0.975), axis=0)).T,
    }
    listed: dict[str, list] = {"pairs": cells[0].sum(0).astype(int).tolist()}
    place = dict(zip(np.flatnonzero(seen).tolist(), range(seen.sum()), strict=True))
    for name, curve in curves.items():
        fewest = 2 if name.endswith("interval") else 1
        listed[name] = [curve[place[k]].tolist() if n >= fewest else None for k, n in enumerate(having)]
    return listed
