"""What a network costs, in closed form, beside the code that incurs it.

One multiply-add is two FLOPs; training is three times the forward for matrix products. A query-key pair costs
4 H D FLOPs forward (scores, and values) and 10 H D backward (those two again, recomputed, and their gradients):
14 H D in training. What is linear in a number (norms, activations, embedding) is left out, as everywhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Cost:
    """Counts are for one token of text unless said otherwise.

    parameters: by role; a tied table counts once, as "embedding".
    linear: multiply-adds of all blocks.  head: multiply-adds of one position's logits.
    pair: channels H D of a query and its key, times the layers where all layers read alike; where they do not,
    pairs and keys are sums over layers.  pairs: keys read by all queries of one document of n tokens.
    keys: keys read by the queries at index n.  cache: numbers kept for decoding after n tokens.
    passes: how often training runs the blocks over a row, on the mean.  training_linear: multiply-adds of all
        blocks in training, all passes together, where these are not `linear`.
    """

    parameters: dict[str, int]
    linear: int
    head: int
    pair: int
    pairs: Callable[[int], int]
    keys: Callable[[int], int]
    cache: Callable[[int], int]
    passes: float = 1
    training_linear: float | None = None

    once: ClassVar[int | property] = 0

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    def training(self, context: int, documents: Sequence[int] | None = None) -> dict[str, int]:
        """FLOPs by part to train on one row of `context` tokens, cut into `documents` (lengths; None: one)."""
        pairs = sum(self.pairs(n) for n in documents or [context])
        return {
            "linear": round(6 * context * (self.linear if self.training_linear is None else self.training_linear)),
            "attention": round(14 * self.passes * self.pair * pairs),
            "head": 6 * context * self.head,
        }

    def prefill(self, n: int) -> int:
        """FLOPs to read a prompt of n tokens, logits left out."""
        return 2 * self.linear * n + 4 * self.pair * self.pairs(n)

    def decode(self, n: int) -> int:
        """FLOPs to read the token at index n and form its logits."""
        return 2 * (self.linear + self.head) + 4 * self.pair * self.keys(n)
