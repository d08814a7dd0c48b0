"""Dropout whose masks are a function of a key, so that recomputation draws the same masks.

    with drawn(batch.key, device, "lower", t):       everything drawn inside comes from (key, "lower", t) alone
        x = dropped(x, 0.1)

Dropout masks of attention are drawn inside PyTorch's kernels, which use only the device's own generator: `drawn` seeds
that generator and then restores its state.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

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
