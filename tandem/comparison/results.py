"""What a study keeps of each of its runs: the one thing that running, judging and reporting share.

A run's result is told by its folder alone, so a study that was interrupted, moved or run by several machines is read
back from what lies there. Clocks and memory aside, the result of a run is a function of its recipe.

Shapes: D held-out documents.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Point(NamedTuple):
    """Held-out likelihood on the way: after `step` steps, `seconds` of them training."""

    step: int
    tokens: int
    flops: float
    seconds: float
    nats_per_token: float


@dataclass(frozen=True)
class Decoding:
    """What generation costs with the trained network: one text at a time, after `prompt` tokens of held-out text."""

    prompt: int
    prefill_seconds: float
    tokens_per_second: float
    cache_bytes: int
    """Held after the prompt."""


@dataclass(frozen=True)
class Result:
    """One finished run of a study. Arrays are by held-out document, the same documents in every run of a study."""

    arm: str
    seed: int
    lr: float
    """Peak learning rate."""
    trial: bool
    """Made to choose a learning rate: scored on the tuning split, never compared."""
    folder: Path
    steps: int
    tokens: int
    flops: float
    training_seconds: float
    evaluation_seconds: float
    parameters: dict[str, int]
    """By role."""
    documents: np.ndarray
    """(D,) numbers in the store."""
    nats: np.ndarray
    """(D,) float64."""
    document_tokens: np.ndarray
    """(D,) scored tokens."""
    document_bytes: np.ndarray
    """(D,) bytes of the scored tokens' text."""
    curve: list[Point]
    """By step, the end included; on the way over part of the documents (`evaluation.documents`)."""
    decoding: Decoding
    samples: list[tuple[str, str]]
    """(prompt, what followed)."""
    environment: list[dict[str, Any]]
    """Versions and machine of every process that trained it, oldest first."""

    @property
    def nats_per_token(self) -> float:
        return float(self.nats.sum() / self.document_tokens.sum())

    @property
    def bits_per_byte(self) -> float:
        return float(self.nats.sum() / np.log(2) / self.document_bytes.sum())
