"""The plain decoder that reads its prompt in both directions: the true prefix LM.

    prompt a0 a1 a2, then a3 a4        a0 .. a2 read a0 a1 a2       [s, n)
                                       a3 reads a0 .. a3            [s, i+1)

Nothing is added to the plain decoder, so it can start from a trained one (`start: {run: ...}`); objective prefix_lm
trains it on prompts. A text without a prompt (`Batch.blocks`) is read causally. A prompt cannot grow once it is read.

Cost: n (n - 1) / 2 pairs more a layer for a prompt of n tokens.
Shapes: B rows, T tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tandem.corpus import Batch, generated_from
from tandem.networks.cost import Cost, Parts
from tandem.networks.decoder import Decoder, DecoderSession, SpanReader
from tandem.networks.network import Ids, Network
from tandem.nn.spans import Span, causal
from tandem.recipe import register


@register("network", "prefix_decoder")
class PrefixDecoder(Decoder):
    """The plain decoder, its prompt read in both directions."""

    divides = True

    class Config(Decoder.Config):
        window: None = None
        """Every token may read all of its document."""

    @classmethod
    def tiny(cls) -> dict[str, Any]:
        learned: dict[str, Any] = {"positions": "learned", "key_heads": 2, "tied": False}
        shared: dict[str, Any] = {"width": 32, "heads": 4, "depth": 2}
        return {"house": cls.Config(**shared), "learned": cls.Config(**shared, **learned)}

    def reader(self, x: Tensor, batch: Batch) -> SpanReader:
        span = self.span(batch.starts)
        if batch.blocks is not None:
            span = read_prompts(span, generated_from(batch.starts, batch.blocks) + 1)
        return SpanReader(self, [span], x)

    @classmethod
    def drawing(cls, config: Any, starts: list[int]) -> list[tuple[str, Span, int]]:
        begins = torch.tensor([starts])
        own = causal(begins)
        halves = begins + torch.tensor([[starts.count(start) // 2 for start in starts]])
        return [("tokens, the first half of a document in both directions", read_prompts(own, halves), len(starts))]

    def start_from(self, other: Network) -> None:
        """Also starts from a trained plain decoder, and computes its function as long as there is no prompt."""
        if type(other) is Decoder and other.config.window is None:
            same = PrefixDecoder.unwritten(self.Config(**other.config.model_dump()), other.vocabulary, other.context)
            same.load_state_dict(other.state_dict(), assign=True)
            other = same
        super().start_from(other)

    def session(self, rows: int) -> "PrefixDecoderSession":
        return PrefixDecoderSession(self, rows)

    def cost(self) -> Cost:
        plain = super().cost()

        def divided(parts: Parts) -> tuple[int, int]:
            m, n = parts.context, parts.context + parts.generated
            return plain.linear * n, plain.pairs(n) + m * (m + 1) // 2

        return replace(plain, prefill_pairs=lambda n: n * n, divided=divided)


def read_prompts(span: Span, ends: Tensor) -> Span:
    """The causal span, extended so that every query reads up to `ends` (B, T), exclusive."""
    return Span(span.lo, torch.maximum(span.hi, ends))


class PrefixDecoderSession(DecoderSession):
    """A decoder's session whose prompt is read in both directions."""

    reads_prompt = False

    def prefill(self, prompts: Sequence[Ids]) -> Tensor:
        tokens, self.reads_prompt = self.align(prompts), True
        logits = self.step(tokens)
        self.reads_prompt = False
        return logits

    def _spans(self, queries: int, end: int) -> Sequence[Span]:
        (span,) = super()._spans(queries, end)
        return [Span(span.lo, torch.full_like(span.hi, end)) if self.reads_prompt else span]
