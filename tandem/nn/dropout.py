"""Dropout whose masks are a function of a key, so that recomputation draws the same masks.

    with drawn(batch.key, device, "lower", t):       everything drawn inside comes from (key, "lower", t) alone
        x = dropped(x, 0.1)

Dropout masks of attention are drawn inside PyTorch's kernels, which use only the device's own generator: `drawn` seeds
that generator and then restores its state.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from tandem.recipe import Settings


@contextmanager
def drawn(key: object | None, device: torch.device, *place: object) -> Iterator[None]:
    """Seeds the device's generator from `key` and `place` for the block; None: leaves it alone, as nothing is drawn."""
    if key is None:
        yield
        return
    seed = int.from_bytes(hashlib.blake2b(repr((key, *place)).encode(), digest_size=7).digest())
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def dropped(x: Tensor, rate: float) -> Tensor:
    """x with entries set to 0 at `rate`, the others scaled up by 1 / (1 - rate)."""
    return F.dropout(x, rate) if rate else x


def tokens_dropped(x: Tensor, rate: float, text: Tensor) -> Tensor:
    """Vectors x (..., C), those that `text` (...) marks set to 0 at `rate`; nothing is scaled up."""
    if not rate:
        return x
    out = text & (torch.rand(text.shape, device=text.device) < rate)
    return x.masked_fill(out[..., None], 0.0)


class Rates(Settings):
    """Dropout rates by what is dropped."""

    residual: float = Field(0.0, ge=0, lt=1)
    """Rate for embeddings, and for what attention and MLP add."""
    attention: float = Field(0.0, ge=0, lt=1)
    """Rate for attention weights."""
    token: float = Field(0.0, ge=0, lt=1)
    """Rate for whole tokens of text: the vector, a learned position included, is set to 0."""


NONE = Rates()


@dataclass
class Masks:
    """Dropout in a pass over a batch: every block, and what else is dropped, has masks of its own.

    `turn` numbers passes over the same batch; None for `key`: nothing is dropped.
    """

    rates: Rates = NONE
    key: object | None = None
    turn: int = 0

    @classmethod
    def of(cls, rates: float | Rates | None, batch: Any) -> "Masks":
        """In training, the masks of the rows of this batch; else none. A number is the rate of all but tokens."""
        if rates is None or batch.key is None or not torch.is_grad_enabled():
            return cls()
        rates = rates if isinstance(rates, Rates) else Rates(residual=rates, attention=rates)
        return cls(rates, (batch.key, batch.row))

    def enter(self, x: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
        """The input x (B, T, C) of the first block with tokens, and then entries, dropped.

        tokens: (B, T), or bags (B, T, s); of ids from `vocabulary` on none is dropped.
        """
        with drawn(self.key, x.device, "embedding"):
            if self.rates.token:
                text = (tokens < vocabulary).reshape(*x.shape[:2], -1).all(-1)
                x = tokens_dropped(x, self.rates.token, text)
            return dropped(x, self.rates.residual)

    def drop(self, x: Tensor, *place: object) -> Tensor:
        """x with entries dropped."""
        with drawn(self.key, x.device, *place):
            return dropped(x, self.rates.residual)

    def run(self, block: Any, turn: int, x: Tensor, *given: Any, **told: Any) -> Tensor:
        """block(x, ...), what it adds to x dropped; in a backward that recomputes it, `turn` has moved on."""
        with drawn(self.key, x.device, "block", block.layer, turn):
            return block(x, *given, drop=self.rates.residual, **told)
