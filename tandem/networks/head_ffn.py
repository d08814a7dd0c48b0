"""The plain decoder with one more MLP before the final norm: the cost of a correction, spent at the other end.

    z = blocks(e)      logits = head(norm(z + F(norm(z))))      F: Linear(C, 4C), GELU, Linear(4C, C)

A context-ready network of D blocks decodes at the cost of D blocks and F. So does this one, in one pass and without a
recurrence: a difference between the two is not due to the parameters of F.

Cost: 8 C^2 multiply-adds for a token. Source: a baseline of The Context-Ready Transformer (arXiv 2606.27538); that F is
residual is our reading.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tandem.networks.cost import Cost
from tandem.networks.decoder import Decoder
from tandem.nn.dropout import Masks
from tandem.nn.init import initialise
from tandem.nn.mlp import MLP
from tandem.nn.norm import norm
from tandem.recipe import register


@register("network", "head_ffn")
class HeadFFN(Decoder):
    """The plain decoder with one more MLP before its final norm; a baseline of context_ready."""

    class Config(Decoder.Config):
        head_ffn: bool = True
        """The MLP before the final norm; false: the plain decoder."""

    def __init__(self, config: Config, vocabulary: int, context: int, generator: torch.Generator | None = None):
        super().__init__(config, vocabulary, context)
        c = config
        self.ffn_norm = norm("layer", c.width, c.norm_eps, bias=True) if c.head_ffn else None
        self.ffn = MLP("gelu", c.width, 4 * c.width, bias=True) if c.head_ffn else None
        initialise(self, c.init, c.depth, generator)

    @classmethod
    def tiny(cls) -> dict[str, Config]:
        return {"house": cls.Config.model_validate({"width": 32, "heads": 4, "depth": 1})}

    @classmethod
    def degenerate(cls, config: Config) -> tuple[Config, Decoder.Config, Callable[[str], str | None]]:
        plain = Decoder.Config(**config.shared_with(Decoder.Config))
        return config.model_copy(update={"head_ffn": False}), plain, lambda name: name

    def states(self, x: Tensor, reader: Any) -> Tensor:
        z = super().states(x, reader)
        if self.ffn is None or self.ffn_norm is None:
            return z
        return z + getattr(reader, "masks", Masks()).drop(self.ffn(self.ffn_norm(z)), "head")

    def cost(self) -> Cost:
        cost = super().cost()
        return cost if self.ffn is None else replace(cost, linear=cost.linear + 8 * self.config.width**2)
