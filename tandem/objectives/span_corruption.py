"""Span corruption: pieces of a document are cut out of what the encoder reads, and the decoder writes them.

    encoder   a0 <0> a3 a4 <1> a6 $            decoder   <start> <0> a1 a2 <1> a5
                                               asked     <0> a1 a2 <1> a5 $

Sentinels are asked for like words, so the softmax of this objective has their rows as well; a score never has. A run of
it alone is no language model: prefix LM makes it one (objectives/prefix_lm.py), after it or started from its weights.

Source: T5 (Raffel et al. 2020); pieces and documents: corpus/corruption.py.
"""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from tandem.corpus import Batch, CorruptedRows, Corruption, PackedRows
from tandem.corpus.corruption import Sampler
from tandem.networks.network import Network
from tandem.objectives.next_token import OneTarget, asked_loss
from tandem.objectives.phases import Phase
from tandem.recipe import Recipe, Settings, register


@register("objective", "span_corruption")
class SpanCorruption(OneTarget):
    """Restore pieces that were cut out of a document, each behind its sentinel."""

    class Config(Settings):
        density: Annotated[float, Field(gt=0, lt=1)] = 0.15
        """Share of the tokens that is cut out."""
        span: Annotated[float, Field(ge=1)] = 4.0
        """Mean tokens of a piece."""
        sentinels: int = Field(100, ge=1)
        """Most pieces of a document."""
        sampler: Sampler = "exact"
        """exact: that share, in pieces apart; poisson: less, in pieces that may touch, as in the authors' code."""

    @classmethod
    def check(cls, recipe: Recipe, config: Config | None = None) -> Iterator[tuple[str, str]]:
        """`config`: its own in place of the recipe's objective, which asks it first."""
        asked: Any = config or recipe.objective
        if reason := cls.refusal(recipe.choice("network")):
            yield "objective.name", f"network {recipe.values['network']['name']} {reason}"
        elif recipe.network.sentinels < asked.sentinels:
            reason = f"asks for {asked.sentinels} sentinels, network.sentinels is {recipe.network.sentinels}"
            yield "objective.sentinels", f"{reason}; give it as many"

    def __init__(self, config: Config):
        self.config = config

    @classmethod
    def tiny(cls) -> dict[str, Config]:
        """Settings by name at which the contract is tested."""
        return {"": cls.Config(sentinels=5)}

    @classmethod
    def refusal(cls, network: type[Network]) -> str:
        """Why a network can not be asked so; empty: it can."""
        has_encoder = "sentinels" in network.Config.model_fields
        return "" if has_encoder else "has no encoder that could read a text with gaps; encoder_decoder has"

    def phases(self, rows: PackedRows, steps: int) -> list[Phase]:
        """Of a run of `steps` steps: one."""
        c = self.config
        view = CorruptedRows(rows, Corruption(c.density, c.span, c.sentinels, c.sampler))
        return [Phase(0, view, note="texts with gaps alone", parts=view.parts)]

    def loss(self, network: Any, batch: Batch, counts: dict[str, int]) -> tuple[Tensor, dict[str, Tensor]]:
        """(share of the step's mean, with its gradient; sums in nats by name, detached)."""
        return asked_loss(network, batch, counts, head=network.head_with_sentinels)
