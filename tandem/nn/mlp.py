"""The position-wise networks of a block: SwiGLU (Shazeer 2020) and the two-matrix GELU network of GPT-2.

    swiglu   down(silu(gate(x)) * up(x))      gate and up are one matrix of 2F rows, gate first
    gelu     down(gelu(up(x)))                erf form; `gelu_tanh` is the tanh form

Shapes: C model width, F inner width.
"""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from tandem.nn.dropout import dropped
from tandem.nn.init import Linear

MLPKind = Literal["swiglu", "gelu", "gelu_tanh"]


def inner_width(kind: MLPKind, width: int) -> int:
    """The default F: 8C/3 rounded up to a multiple of 64 for SwiGLU, 4C for GELU (equal parameters)."""
    return -(-8 * width // 3 // 64) * 64 if kind == "swiglu" else 4 * width


class MLP(nn.Module):
    """`inputs`: input channels, where they differ from the `width` of the output."""

    def __init__(self, kind: MLPKind, width: int, inner: int, *, bias: bool, inputs: int | None = None):
        super().__init__()
        self.kind: MLPKind = kind
        parts = (inner, inner) if kind == "swiglu" else (inner,)
        self.up = Linear(inputs or width, sum(parts), bias=bias, role="mlp", parts=parts)
        self.down = Linear(inner, width, bias=bias, role="mlp_out")

    def forward(self, x: Tensor, drop: float = 0.0) -> Tensor:
        """(..., C) to (..., C); `drop` is the dropout rate of the inner channels."""
        h = self.up(x)
        if self.kind == "swiglu":
            gate, h = h.chunk(2, dim=-1)
            return self.down(dropped(F.silu(gate) * h, drop))
        return self.down(dropped(F.gelu(h, approximate="tanh" if self.kind == "gelu_tanh" else "none"), drop))
