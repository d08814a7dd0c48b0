"""Rotary position embedding: each pair of channels is rotated by an angle that grows with the position.

    (a, b) at position i, pair j   ->   (a cos t - b sin t, a sin t + b cos t),   t = i * base^(-2j / D)

Scores then depend on distances only. Two pairings are in use, and weights trained with one fail with the other:
`adjacent` rotates channels (2j, 2j+1), the pairing of the paper (Su et al. 2021) and the default here; `halves`
rotates (j, j + D/2), the pairing of GPT-NeoX and of Llama as converted for Hugging Face.

Shapes: B rows, H heads, T tokens, D head width, J = D / 2 pairs.
"""

from typing import Any, Literal

import torch
from torch import Tensor

Pairing = Literal["adjacent", "halves"]


class Rotation:
    """Cosines and sines for given positions, ready to rotate queries and keys.

    Args:
        positions_T: integer positions, (T,).
        head_width: D, even.
        base: of the angles; 10,000 in the paper.
        pairing: which channels form a pair.
    The tables (T, J) are computed in float64 and kept in float32, or in float64 when `dtype` says so.
    """

    def __init__(
        self,
        positions_T: Tensor,
        head_width: int,
        *,
        base: float = 10_000.0,
        pairing: Pairing = "adjacent",
        dtype: torch.dtype = torch.float32,
    ):
        pairs = torch.arange(0, head_width, 2, dtype=torch.float64, device=positions_T.device)
        angle = positions_T.to(torch.float64)[:, None] * base ** (-pairs / head_width)
        self.cos_TJ = angle.cos().to(dtype)
        self.sin_TJ = angle.sin().to(dtype)
        self.pairing: Pairing = pairing

    @classmethod
    def of(cls, config: Any, positions_T: Tensor, like: Tensor) -> "Rotation":
        """The rotation by the settings of a block, on the device of `like`; the tables are float64 where `like` is."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        base, pairing = config.rope_base, config.positions
        return cls(positions_T.to(like.device), config.head_width, base=base, pairing=pairing, dtype=dtype)


def rotate(x_BTHD: Tensor, cos_TJ: Tensor, sin_TJ: Tensor, pairing: Pairing) -> Tensor:
    """Rotates every head of `x` (B, T, H, D); computes in the tables' precision, returns the dtype of `x`."""
    cos, sin = cos_TJ[:, None], sin_TJ[:, None]
    if pairing == "adjacent":
        a, b = x_BTHD.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    else:
        a, b = x_BTHD.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return turned.to(x_BTHD.dtype)
