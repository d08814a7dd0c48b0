"""What a network costs, in closed form, beside the code that incurs it.

One multiply-add is two FLOPs; training is three times the forward for matrix products. A query-key pair costs
4 H D FLOPs forward (scores, and values) and 10 H D backward (those two again, recomputed, and their gradients):
14 H D in training. Elementwise work and lookups (norms, activations, embedding) are left out, as everywhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

SENTENCE = 25
"""Tokens of a typical sentence: rows of text count as sentences of this length where nothing else is known."""


class Parts(NamedTuple):
    """A row of which only the end is trained on: tokens before it, and in it."""

    context: int
    generated: int
    continued: bool = True
    """False where that end restores what was cut out of the tokens before it."""


@dataclass(frozen=True)
class Cost:
    """Counts are for one token of text unless said otherwise.

    parameters: by role; a tied table counts once, as "embedding".
    linear: multiply-adds of all blocks.  head: multiply-adds of one position's logits.
    pair: channels H D of a query and its key, times the layers where all layers read alike; where they do not,
    pairs and keys are sums over layers.  pairs: keys read by all queries of one document of n tokens.
    keys: keys read by the queries at index n.  cache: numbers kept for decoding after n tokens.
    passes: how often training runs the blocks over a row, on average.  training_linear: multiply-adds of all
        blocks in training, all passes together, where these differ from `linear`.
    prefill_linear, prefill_pairs: those of a prompt, where they differ from `linear` and `pairs`.
    held_back: tokens at the end of a prompt that a session leaves out of its prefill, because the first logits come
        from a decoded token: the prompt's last (1) or one of the network's own (0); None: the prefill gives logits.
    divided: multiply-adds of all blocks and pairs of all queries in training on a document of such `Parts`, where
        context is read differently from the rest.
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
    prefill_linear: int | None = None
    prefill_pairs: Callable[[int], int] | None = None
    held_back: int | None = None
    divided: Callable[[Parts], tuple[int, int]] | None = None

    once: ClassVar[int | property] = 0
    """FLOPs of a training batch, of any size."""

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    def training(
        self, context: int, documents: Sequence[int] | None = None, parts: Parts | None = None
    ) -> dict[str, int]:
        """FLOPs by part to train on one row of `context` tokens, cut into `documents` (lengths; None: one).

        parts: where only the end of a row is trained on; None: all of it.
        """
        linear = context * (self.linear if self.training_linear is None else self.training_linear)
        pairs = sum(self.pairs(n) for n in documents or [context])
        if parts and self.divided is not None:
            linear, pairs = self.divided(parts)
        return {
            "linear": round(6 * linear),
            "attention": round(14 * self.passes * self.pair * pairs),
            "head": 6 * self.head * (parts.generated if parts else context),
        }

    def prefill(self, n: int) -> int:
        """FLOPs to read a prompt of n tokens, without logits."""
        linear = self.linear if self.prefill_linear is None else self.prefill_linear
        return 2 * linear * n + 4 * self.pair * (self.prefill_pairs or self.pairs)(n)

    def first_logits(self, n: int) -> int:
        """FLOPs from a prompt of n tokens to the logits of what follows it."""
        if self.held_back is None:
            return self.prefill(n) + 2 * self.head
        return self.prefill(n - self.held_back) + self.decode(n - 1)

    def decode(self, n: int) -> int:
        """FLOPs to read the token at index n and form its logits."""
        return 2 * (self.linear + self.head) + 4 * self.pair * self.keys(n)
