"""Span corruption: pieces of a document are cut out of what the encoder reads, and the decoder writes them.

    encoder   a0 <0> a3 a4 <1> a6 $            decoder   <start> <0> a1 a2 <1> a5
                                               asked     <0> a1 a2 <1> a5 $

Sentinels are targets like words, so the softmax of this objective has rows for them; scoring never does. A network
trained on it alone is no language model: prefix LM (objectives/prefix_lm.py) makes it one, in this run or a later one.

Source: T5 (Raffel et al. 2020); pieces and documents: corpus/corruption.py.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from tandem.corpus import Batch, CorruptedRows, Corruption, PackedRows
from tandem.networks.cost import Parts
from tandem.networks.network import Network
from tandem.objectives.next_token import NextToken, asked_loss
from tandem.objectives.phases import Phase
from tandem.recipe import Recipe, register


@register("objective", "span_corruption")
class SpanCorruption(NextToken):
    """Restore the pieces that were cut out of a document, each after its sentinel."""

    class Config(Corruption):
        pass

    @classmethod
    def check(cls, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        asked = getattr(recipe.objective, "sentinels", cls.Config().sentinels)
        if (has := getattr(recipe.network, "sentinels", asked)) < asked:
            yield "objective.sentinels", f"asks for {asked} sentinels, network.sentinels is {has}; give it as many"

    @classmethod
    def tiny(cls) -> dict[str, Config]:
        return {"": cls.Config(sentinels=5)}

    @classmethod
    def refusal(cls, network: type[Network]) -> str:
        has_encoder = "sentinels" in network.Config.model_fields
        return "" if has_encoder else "has no encoder that could read a text with gaps; encoder_decoder has"

    def phases(self, rows: PackedRows, steps: int) -> list[Phase]:
        view = CorruptedRows(rows, self.config)
        return [Phase(0, view, note="texts with gaps alone", parts=Parts(*view.parts, continued=False))]

    def loss(self, network: Any, batch: Batch, counts: dict[str, int]) -> tuple[Tensor, dict[str, Tensor]]:
        return asked_loss(network, batch, counts, head=network.head_with_sentinels)
