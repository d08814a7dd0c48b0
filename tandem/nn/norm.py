"""The two normalisations of the papers, by name.

The residual stream that enters them is float32 also under mixed precision, so both compute in float32.
"""

from typing import Literal

from torch import nn

NormKind = Literal["rms", "layer"]


def norm(kind: NormKind, width: int, eps: float, *, bias: bool = False) -> nn.Module:
    """RMSNorm (weight only) or LayerNorm (weight, and bias if asked) over the last dimension of `width`."""
    if kind == "rms":
        return nn.RMSNorm(width, eps=eps)
    return nn.LayerNorm(width, eps=eps, bias=bias)
