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
from torch import Tensor


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
    """Vectors x (N, C), those that `text` (N,) marks set to 0 at `rate`; nothing is scaled up."""
    if not rate:
        return x
    out = text & (torch.rand(text.shape, device=text.device) < rate)
    return x.masked_fill(out[:, None], 0.0)


@dataclass
class Masks:
    """Dropout at one rate in a pass over a batch: every block, and what else is dropped, has masks of its own.

    `turn` numbers passes over the same batch; None for `key`: nothing is dropped.
    """

    rate: float = 0.0
    key: object | None = None
    turn: int = 0

    @classmethod
    def of(cls, rate: float | None, batch: Any) -> "Masks":
        """In training, the masks of the rows of this batch; else none."""
        training = batch.key is not None and torch.is_grad_enabled()
        return cls(rate, (batch.key, batch.row)) if rate and training else cls()

    def drop(self, x: Tensor, *place: object) -> Tensor:
        """x with entries dropped."""
        with drawn(self.key, x.device, *place):
            return dropped(x, self.rate)

    def run(self, block: Any, turn: int, x: Tensor, *given: Any, **told: Any) -> Tensor:
        """block(x, ...), what it adds to x dropped; in a backward that recomputes it, `turn` has moved on."""
        with drawn(self.key, x.device, "block", block.layer, turn):
            return block(x, *given, drop=self.rate, **told)
