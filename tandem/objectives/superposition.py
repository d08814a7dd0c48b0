"""Token Superposition Training: first bags of neighbouring tokens, then tokens.

Early in training most of a step goes to what could be learned from much less detail. So in a first phase a position
reads the mean embedding of s neighbouring tokens and predicts the s tokens that follow, in any order: a step costs the
same and reads s times the text. Then the run switches to next-token prediction all at once; the finished model is an
ordinary one.

    e_k   = 1/s sum_j E[x_(ks + j)]                                  bag k, tokens ks ... ks + s - 1
    loss  = sum_i w_i m_i / sum_i w_i      m_i = mean over rows of  lse(z_k) - z_k[x_((k + 1) s + i)],  i = 0 ... s - 1

One log-sum-exp of a row serves all its targets (nn/head.py), so a bag costs hardly more than a token. Bags are made in
corpus/bags.py; networks never see them, only embeddings. With bags of 1 this is next_token, bit for bit.

Source: Peng, Gigant and Quesnelle, Efficient Pre-Training with Token Superposition, arXiv 2605.06546. Equal tokens in
place of equal FLOPs a step: Shao, Meng and Zhou, Patch-Level Training for Large Language Models, ICLR 2025.
Letters: B rows, l positions of a row, s tokens of a bag, S targets of a position (slots), C width.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from tandem.corpus import IGNORE, BagRows, Batch, FoldedRows, PackedRows, View
from tandem.networks.network import Network
from tandem.nn.spans import sent
from tandem.objectives.next_token import NextToken
from tandem.objectives.phases import Phase, require_reached, whole_steps
from tandem.recipe import Recipe, Settings, register

Weights = Literal["uniform", "power", "exponential", "first", "fitted"]
EXPONENT = -1.25
"""Of mutual information as a power of token distance, in the paper's fit to DCLM (analysis/mutual_information.py)."""

WEIGHTS = {
    "uniform": lambda i: 1.0,
    "power": lambda i: 1 / i,
    "exponential": lambda i: math.exp(-i),
    "first": lambda i: float(i == 1),
    "fitted": lambda i: i**EXPONENT,
}


@register("objective", "superposition")
class Superposition(NextToken):
    """Bags of tokens first, then tokens (Token Superposition Training); the defaults are the paper's."""

    class Config(Settings):
        bag: int = Field(6, ge=1)
        """s, tokens per bag; 1 is next_token."""
        until: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, le=1)] = 0.3
        """Where the bags end: a step, or a share of the run's steps, rounded down."""
        bag_in: bool = True
        """A position reads the mean embedding of a bag; else one token."""
        bag_out: bool = True
        """A position predicts the s tokens after those it reads; else only the next one."""
        weights: Weights | list[Annotated[float, Field(ge=0)]] = "uniform"
        """Weights of the targets, nearest first: 1, 1/i, exp(-i), the first alone, i^-1.25, or a list of s numbers."""
        loss: Literal["mce", "mce_alt"] = "mce"
        """mce: predict every target; mce_alt: predict any one of the set of targets, weights uniform."""
        reduce: Literal["slots", "tokens"] = "slots"
        """Take the weighted mean over the means of the s slots, or over all targets."""
        tail: Literal["one", "drop"] = "one"
        """one: the last bag of a row keeps its one target; drop: it has none."""
        bag_step: Literal["more_text", "less_work"] = "more_text"
        """A step in bags reads s times the text at equal FLOPs, or the same amount of text with rows / s rows."""
        grow: Literal["length", "rows"] = "length"
        """A row in bags has `context` positions, or context / s positions in s times the rows."""
        boundary: Literal["ignore", "fold"] = "ignore"
        """Bags are cut from the stream and a row is one segment, or each document is folded by itself."""
        lr_restart: bool = False
        """The learning rate warms up and decays separately in each phase."""
        reinit_at_switch: Literal["none", "embeddings"] = "none"
        """At the switch to tokens reinitialise nothing, or the token table and the head (a control that must fail)."""

        def derive(self) -> dict[str, Any]:
            if not (self.bag_in or self.bag_out) and self.bag > 1:
                raise ValueError("bag_in and bag_out are both false, which is objective next_token; set one, or bag: 1")
            if isinstance(self.weights, list):
                if len(self.weights) != self.bag:
                    raise ValueError(f"weights: {len(self.weights)} numbers, bag: {self.bag}; one for each target")
                if not self.weights[0] > 0:
                    raise ValueError("weights: the first must be > 0; it is the only one that every position is asked")
            if not self.bag_out and self.weights != "uniform":
                raise ValueError("bag_out: false asks each position for one token, so there is nothing to weigh")
            if self.loss == "mce_alt" and (self.weights, self.reduce) != ("uniform", "slots"):
                raise ValueError(
                    "loss: mce_alt asks for any one of a set, which has no slots; leave weights and reduce"
                )
            if self.tail == "drop" and (not self.bag_in or self.boundary == "fold"):
                raise ValueError("tail: drop is for rows of bags with boundary: ignore; other rows have no such bag")
            if not self.bag_in and (self.bag_step, self.grow) != ("more_text", "length"):
                raise ValueError("bag_in: false reads single tokens, so bag_step and grow have nothing to trade")
            return {}

    def __init__(self, config: Any):
        super().__init__(config)
        # A budget tries runs of dozens of lengths, and FoldedRows counts the bags of all documents.
        self._bags = functools.lru_cache(maxsize=1)(self._bag_rows)

    @classmethod
    def check(cls, recipe: Recipe) -> Iterator[tuple[str, str]]:
        config, batch, network = recipe.objective, recipe.batch, recipe.choice("network")
        bag = config.bag
        if reason := network.suffixes_only or (bag > 1 and network.tokens_only):
            yield "objective.name", f"network {recipe.value('network.name')} {reason}"
        if bag == 1:
            return
        rows, positions = cls._shape(config, batch.rows, batch.context)
        if (config.bag_step, config.grow) == ("less_work", "length") and batch.rows % bag:
            yield "batch.rows", f"bags of {bag} with bag_step: less_work need a multiple of {bag}"
        elif rows % batch.micro_batches:
            yield "batch.micro_batches", f"must divide the {rows} rows of a step in bags of {bag}"
        if config.grow == "rows" and batch.context % bag:
            yield "batch.context", f"bags of {bag} with grow: rows need a multiple of {bag}"
        elif config.tail == "drop" and positions < 2:
            yield "objective.tail", f"drop asks nothing of rows of one bag; take batch.context={2 * bag}, or tail: one"
        yield from cls._refused_in_bags(recipe, positions)
        if config.lr_restart and getattr(recipe.schedule, "tokens", None):
            yield "schedule.tokens", "objective.lr_restart gives each phase a schedule of its own length; write null"

    @classmethod
    def _refused_in_bags(cls, recipe: Recipe, positions: int) -> Iterator[tuple[str, str]]:
        """What the network refuses of rows of so many positions, but not of rows of `batch.context`."""
        check = getattr(recipe.choice("network"), "check", None)
        if check and positions < recipe.batch.context:
            short = recipe.batch.model_copy(update={"context": positions})
            refused = check(replace(recipe, settings=recipe.settings | {"batch": short}))
            for key, reason in sorted({*refused} - {*check(recipe)}):
                bags = f"bags of {recipe.objective.bag} with objective.grow: rows"
                yield key, f"{reason}, as {bags} have; take grow: length"

    @classmethod
    def tiny(cls) -> dict[str, Config]:
        return {
            "bags": cls.Config(bag=3, until=0.5, boundary="fold", weights="power"),
            "inputs": cls.Config(bag=3, until=0.5, bag_out=False),
            "outputs": cls.Config(bag=2, until=0.5, bag_in=False, weights=[0.9, 0.1]),
        }

    @classmethod
    def refusal(cls, network: type[Network]) -> str:
        return network.suffixes_only or network.tokens_only

    @property
    def crosses_documents(self) -> bool:
        return self.config.bag > 1 and self.config.boundary == "ignore"

    # ---- what is read -----------------------------------------------------------------------------------------------

    def phases(self, rows: PackedRows, steps: int) -> list[Phase]:
        c, last = self.config, whole_steps(self.config.until, steps)
        if c.bag == 1 or not last:  # next_token, on any view
            return super().phases(rows, steps)
        bags, read = self._bags(rows), f"bags of {c.bag}" if c.bag_in else f"single tokens to predict bags of {c.bag}"
        return [
            Phase(0, bags, f"{read} until step {last:,}", restarts=c.lr_restart),
            Phase(last, rows.from_token(bags.read(last)), restarts=c.lr_restart, redraws=c.reinit_at_switch != "none"),
        ]

    def require(self, steps: int) -> None:
        """Raises: UserError where a run of `steps` steps would end before its bags do."""
        if self.config.bag > 1:
            require_reached("objective.until", self.config.until, steps, "switch to tokens", "bags to its end")

    def _bag_rows(self, rows: PackedRows) -> View:
        c = self.config
        bag, slots = c.bag if c.bag_in else 1, c.bag if c.bag_out else 1
        shape, fold = self._shape(c, rows.rows, rows.context), c.boundary == "fold"
        if fold and c.bag_in:
            return FoldedRows(rows.order, *shape, bag=bag, slots=slots)
        return BagRows(rows.order, *shape, bag=bag, slots=slots, tail=c.tail == "one", documents=fold)

    @staticmethod
    def _shape(config: Config, rows: int, context: int) -> tuple[int, int]:
        """Rows and positions of a step in bags."""
        if config.grow == "rows":
            rows, context = rows * config.bag, context // config.bag
        return rows // config.bag if config.bag_step == "less_work" else rows, context

    # ---- what is predicted ------------------------------------------------------------------------------------------

    def count(self, network: Network, batch: Batch) -> dict[str, int]:
        """Targets by slot, nearest first, and positions that have any."""
        if batch.targets.ndim == 2:
            return super().count(network, batch)
        asked = batch.targets != IGNORE
        slots = dict(zip(_slots(batch), asked.sum((0, 1)).tolist(), strict=True))
        return dict.fromkeys(("bag_nll", "bag_kl"), int(asked.any(-1).sum())) | slots | network.count(batch)

    def floor(self, batch: Batch) -> float:
        """The least mean loss for bags without repetitions, nats: the entropy of the weights."""
        if batch.targets.ndim == 2 or self.config.loss == "mce_alt":
            return 0.0
        return entropy(slot_weights(self.config.weights, batch.targets.shape[-1]))

    def loss(self, network: Network, batch: Batch, counts: dict[str, int]) -> tuple[Tensor, dict[str, Tensor]]:
        """(share of the step's mean, with its gradient; sums in nats by name, detached).

        Recorded are the loss itself, its excess over the least loss that its weights allow (the KL divergence from the
        bag, for bags without repetitions), and the plain nll of each slot.
        """
        if batch.targets.ndim == 2:
            return super().loss(network, batch, counts)
        hidden, extra = network(mean_embedding(network, batch.tokens), batch)
        slots, asked = _slots(batch), counts["bag_nll"]
        if self.config.loss == "mce_alt":
            coefficients = [1 / max(1, asked)] * len(slots)
        else:
            weights = slot_weights(self.config.weights, len(slots))
            coefficients = _coefficients(weights, [counts[slot] for slot in slots], self.config.reduce)
        exact = torch.promote_types(hidden.dtype, torch.float32)
        per_slot = sent(np.array(coefficients), hidden.device).to(exact)
        loss, sums = network.nll(hidden, batch.targets, per_slot, any_of=self.config.loss == "mce_alt")
        by_slot = dict(zip(slots, sums, strict=True)) if len(sums) == len(slots) else {}
        kl = nll = loss.detach()
        if self.config.loss == "mce":  # a row of weights w, W in sum, loses at least sum w log(W / w)
            shares = per_slot * (batch.targets != IGNORE)
            kl = nll - torch.special.entr(shares).sum() + torch.special.entr(shares.sum(-1)).sum()
        return network.add_extra(loss, {"bag_nll": nll * asked, "bag_kl": kl * asked} | by_slot, extra, counts)


def mean_embedding(network: Network, tokens: Tensor) -> Tensor:
    """Ids (B, l, s) to the mean embeddings of their bags (B, l, C); ids (B, T) to their embeddings.

    The mean is taken in float32 at least, in the order of the tokens: a mean in bfloat16 would round s times.
    """
    if tokens.ndim == 2:
        return network.embed(tokens)
    embedded = network.embed(tokens.flatten(1)).unflatten(1, tokens.shape[1:])
    exact = embedded.to(torch.promote_types(embedded.dtype, torch.float32))
    return (functools.reduce(torch.add, exact.unbind(2)) / tokens.shape[2]).to(embedded.dtype)


def slot_weights(weights: str | list[float], slots: int) -> list[float]:
    """w_i of the slots i = 1 ... S, not normalised: the loss divides by their sum."""
    return weights if isinstance(weights, list) else [WEIGHTS[weights](i) for i in range(1, slots + 1)]


def entropy(weights: list[float]) -> float:
    """Entropy of the normalised weights, nats."""
    shares = [weight / sum(weights) for weight in weights if weight]
    return -sum(share * math.log(share) for share in shares)


def _coefficients(weights: list[float], counts: list[int], reduce: str) -> list[float]:
    """The weight of one target of each slot in the step's mean; a slot without targets is left out of both sums."""
    if reduce == "tokens":
        mass = sum(weight * count for weight, count in zip(weights, counts, strict=True))
        return [weight / mass if mass else 0.0 for weight in weights]
    mass = sum(weight for weight, count in zip(weights, counts, strict=True) if count)
    return [weight / (count * mass) if count else 0.0 for weight, count in zip(weights, counts, strict=True)]


def _slots(batch: Batch) -> list[str]:
    return [f"slot_{i}" for i in range(1, batch.targets.shape[-1] + 1)]
