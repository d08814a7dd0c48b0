"""From logits to the next token: the likeliest, or one drawn from all, from the k likeliest, or from a nucleus.

    temperature 0       the likeliest token; of equals the lowest id
    temperature t       p = softmax(logits / t)
    top_k               only the k likeliest stay
    top_p               of these, only the smallest set whose probabilities reach top_p (nucleus, arXiv 1904.09751)

Ties at the edge of a set are broken by the lowest id, so that sets are as small as asked and the same everywhere.

Each row draws one uniform number per step from its own generator, on the CPU, and reads its token off the cumulative
probabilities: a row's text depends on its own stream and logits, not on its neighbours, the batch or the device.

Cost: a softmax over V; top_p without top_k sorts V logits. Shapes: B rows, V vocabulary, K likeliest.
"""

from collections.abc import Sequence
from hashlib import blake2b

import torch
from pydantic import Field
from torch import Generator, Tensor

from tandem.recipe import Settings, UserError, register


@register("sampling")
class Sampler:
    """How tokens are chosen from a network's logits."""

    class Config(Settings):
        """Sampling. The defaults draw from the network's own distribution."""

        temperature: float = Field(1.0, ge=0)
        """Divides the logits; below 1 sharpens, 0 always takes the likeliest token."""
        top_k: int | None = Field(None, ge=1)
        """Draw from this many of the likeliest tokens; null: all."""
        top_p: float | None = Field(None, gt=0, le=1)
        """Draw from the fewest tokens that together have this probability (after top_k); null: all."""

        prompts: list[str] = ["The", "This function returns", "If the file"]
        """Prompts of the texts that a run writes during training and at its end."""
        tokens: int = Field(40, ge=1)
        """Length of the texts that a run writes, in tokens."""
        every: int | None = Field(None, ge=1)
        """Steps between these texts; null: only at the end."""

    def __init__(self, config: Config):
        self.config = config

    def choose(self, logits_BV: Tensor, generators: Sequence[Generator]) -> Tensor:
        """One token for each row, (B,) int64; each row draws once from its generator, at temperature 0 not at all.

        Raises: UserError if the largest logit of a row is not finite.
        """
        c = self.config
        largest_B1 = logits_BV.amax(-1, keepdim=True)
        if not (finite_B := largest_B1.isfinite().flatten()).all():
            raise UserError(
                f"a text has no probabilities: its largest logit is {largest_B1.flatten()[~finite_B][0].item()}; "
                "the network's weights have diverged: take an earlier checkpoint"
            )
        if c.temperature == 0:
            return logits_BV.argmax(-1)
        z_BV = (logits_BV - largest_B1).double() / c.temperature  # shifted first, so no temperature overflows
        if c.top_k is not None or c.top_p is not None:
            z_BV = z_BV.masked_fill(~likeliest(z_BV, c.top_k, c.top_p), -torch.inf)
        return draw(z_BV, generators)


def likeliest(logits_BV: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Bool mask (B, V) of the top_k largest logits and, of these, the smallest set that has top_p of their mass."""
    V = logits_BV.shape[-1]
    largest_BK = logits_BV.topk(min(top_k or V, V)).values
    count_B1 = torch.full_like(largest_BK[:, :1], largest_BK.shape[-1], dtype=torch.long)
    if top_p is not None:
        p_BK = largest_BK.softmax(-1, dtype=torch.float64)
        reached_before_BK = p_BK.cumsum(-1) - p_BK >= top_p
        count_B1 = reached_before_BK.logical_not().sum(-1, keepdim=True)
    last_B1 = largest_BK.gather(-1, count_B1 - 1)
    above_BV, tied_BV = logits_BV > last_B1, logits_BV == last_B1
    return above_BV | (tied_BV & (tied_BV.cumsum(-1) <= count_B1 - above_BV.sum(-1, keepdim=True)))


def draw(logits_BV: Tensor, generators: Sequence[Generator]) -> Tensor:
    """Tokens (B,) from softmax(logits), one uniform number from each row's generator; probability 0 is never drawn."""
    if len(generators) != len(logits_BV):
        raise ValueError(f"{len(logits_BV)} rows, {len(generators)} generators: give each row its own")
    mass_BV = logits_BV.softmax(-1, dtype=torch.float64).cumsum(-1)
    uniform_B1 = torch.stack([torch.rand(1, generator=g, dtype=torch.float64) for g in generators])
    # The first token whose cumulative mass exceeds u times the total mass, which is 1 up to rounding.
    return torch.searchsorted(mass_BV, uniform_B1.to(mass_BV.device) * mass_BV[:, -1:], right=True).flatten()


def row_generators(seed: int, rows: int) -> list[Generator]:
    """A stream for each row, keyed by (seed, row): those of neighbouring rows and seeds are unrelated."""
    keys = [blake2b(f"{seed}/{row}".encode(), digest_size=7).digest() for row in range(rows)]
    return [Generator().manual_seed(int.from_bytes(key)) for key in keys]
