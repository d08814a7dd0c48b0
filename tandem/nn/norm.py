"""The two normalisations of the papers, by name.

The residual stream that enters them is float32 even under mixed precision, so both compute in float32.
"""

from typing import Any, Literal

from torch import Tensor, nn

NormKind = Literal["rms", "layer"]


class ScaledRMSNorm(nn.RMSNorm):
    """RMSNorm times `scale`, which is not a parameter."""

    scale: float

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class ScaledLayerNorm(nn.LayerNorm):
    """LayerNorm times `scale`, which is not a parameter."""

    scale: float

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


def norm(kind: NormKind, width: int, eps: float, *, bias: bool = False, scale: float = 1.0) -> nn.Module:
    """RMSNorm (weight only) or LayerNorm (weight, and bias if asked) over the last dimension of `width`.

    `scale` multiplies the output; in the final norm it thereby scales the logits, wherever they are computed.
    """
    if scale == 1.0:
        return nn.RMSNorm(width, eps=eps) if kind == "rms" else nn.LayerNorm(width, eps=eps, bias=bias)
    made = ScaledRMSNorm(width, eps=eps) if kind == "rms" else ScaledLayerNorm(width, eps=eps, bias=bias)
    made.scale = scale
    return made


def final_norm(config: Any, scale: float = 1.0) -> nn.Module:
    """The norm after the last block: `config.final_norm`, with bias and eps 1e-5 for layer; null: as in blocks."""
    c = config
    eps, bias = (1e-5, True) if c.final_norm == "layer" else (c.norm_eps, c.bias)
    return norm(c.final_norm or c.norm, c.width, eps, bias=bias, scale=scale)
