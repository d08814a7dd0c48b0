"""What Thought Gestalt costs, in closed form.

A stream of S sentences of n tokens: p = sum(n + 2) positions go through the blocks up to the thought, q = sum(n + 1)
through the others, as nothing above needs [EOS].

    A = p lower + q upper + S C^2 (thoughts) + (S - 1) 2 N_C C^2 (their keys and values) + q V C (head)   multiply-adds
    pairs = sum over self-attention of m (m + 1) / 2, over cross-attention of m min(t, M)      m = n + 2, above n + 1
    training FLOPs = 6 A + 14 C pairs;  once a batch, the table of ranks: 4 M N_C C^2, as it takes no gradient itself

In context, the thoughts are min(t, M) positions of every row, read by self-attention.

Letters: C width, M memory slots, N_S and N_C blocks with self- and cross-attention, V rows of the softmax.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.networks.cost import SENTENCE, Cost, Parts
from tandem.nn.block import mlp_work

if TYPE_CHECKING:
    from tandem.networks.gestalt import Gestalt


@dataclass(frozen=True)
class Layers:
    """Some blocks: multiply-adds of a position, and how many have self- and cross-attention."""

    work: int
    selfs: int
    crosses: int


@dataclass(frozen=True, kw_only=True)
class GestaltCost(Cost):
    """Rows of text count as sentences of SENTENCE tokens; sessions close theirs only at `cap`.

    `decode` does not count the closing of a sentence: that is `sentence_end`."""

    config: "Gestalt.Config"
    lower: Layers
    upper: Layers

    @classmethod
    def of(cls, network: "Gestalt") -> "GestaltCost":
        c, C, depth = network.config, network.config.width, network.config.depth

        def layers(of: range) -> Layers:
            selfs = [layer for layer in of if hasattr(network.stack[layer], "qkv")]
            crosses = network.reads_memory(of)
            asking = len(of) if c.blocks in ("self_then_cross", "parallel") else len(crosses)
            return Layers((4 * len(selfs) + 2 * asking) * C**2 + len(of) * mlp_work(c), len(selfs), len(crosses))

        lower, upper = layers(range(network.depth_of_thought)), layers(range(network.depth_of_thought, depth))
        found = cls(
            parameters=network.parameters_by_role(),
            linear=lower.work + upper.work,
            head=len(network.head) * C,
            pair=C,
            pairs=lambda n: found.prompt_pairs(n),
            keys=lambda n: found.keys_at(n % c.cap + 1, n // c.cap),
            cache=lambda n: found.held(n // c.cap, n % c.cap + 1),
            config=c,
            lower=lower,
            upper=upper,
        )
        return found

    @property
    def selfs(self) -> int:
        return self.lower.selfs + self.upper.selfs

    @property
    def crosses(self) -> int:
        return self.lower.crosses + self.upper.crosses

    @property
    def once(self) -> int:
        """FLOPs of a batch, of any size, for the table of ranks."""
        return 4 * self.config.memory * self.crosses * self.config.width**2

    def slots(self, thoughts: int) -> int:
        """Thoughts that are positions of a sentence with so many thoughts before it."""
        return min(thoughts, self.config.memory) if self.config.in_context else 0

    def _pairs(self, layers: Layers, own: int, t: int) -> int:
        """Pairs of sentence t, of so many positions beside thoughts."""
        m = own + self.slots(t)
        return layers.selfs * m * (m + 1) // 2 + layers.crosses * m * min(t, self.config.memory)

    # ---- training -------------------------------------------------------------------------------------------------

    def training(
        self, context: int, documents: Sequence[int] | None = None, parts: Parts | None = None
    ) -> dict[str, int]:
        """FLOPs of one row of `context` tokens, each document one stream; all of it is trained on."""
        assert parts is None, "sentences have no break points"
        total, sentence = {"linear": 0, "attention": 0, "head": 0}, min(SENTENCE, self.config.cap)
        for n in documents or [context]:
            full, rest = divmod(n, sentence)
            found = self.stream([sentence] * full + ([rest] if rest else []))
            total = {part: total[part] + found[part] for part in total}
        return total

    def stream(self, lengths: Sequence[int]) -> dict[str, int]:
        """FLOPs by part of a stream whose sentences have these numbers of tokens."""
        C, S = self.config.width, len(lengths)
        p = sum(n + 2 + self.slots(t) for t, n in enumerate(lengths))
        linear = p * self.lower.work + (p - S) * self.upper.work
        linear += (S * C**2 if self.config.thinks else 0) + max(0, S - 1) * 2 * self.crosses * C**2
        pairs = sum(
            self._pairs(self.lower, n + 2, t) + self._pairs(self.upper, n + 1, t) for t, n in enumerate(lengths)
        )
        q = sum(lengths) + S
        return {"linear": 6 * linear, "attention": 14 * C * pairs, "head": 6 * q * self.head}

    # ---- generation -----------------------------------------------------------------------------------------------

    def prefill(self, n: int) -> int:
        """FLOPs of a prompt cut only at `cap`: closed sentences go no further than their thoughts."""
        closed, rest = divmod(n, self.config.cap)
        work = sum(self.config.cap + 2 + self.slots(t) for t in range(closed)) * self.lower.work
        work += closed * (1 + 2 * self.crosses) * self.config.width**2
        work += (rest + 1 + self.slots(closed)) * self.linear
        return 2 * work + 4 * self.pair * self.pairs(n)

    def prompt_pairs(self, n: int) -> int:
        closed, rest = divmod(n, self.config.cap)
        pairs = sum(self._pairs(self.lower, self.config.cap + 2, t) for t in range(closed))
        return pairs + self._pairs(self.lower, rest + 1, closed) + self._pairs(self.upper, rest + 1, closed)

    def keys_at(self, place: int, thoughts: int) -> int:
        """Keys read by position `place` of a sentence ([BOS] is 0) with so many thoughts before it, over all layers."""
        own, k = place + 1 + self.slots(thoughts), min(thoughts, self.config.memory)
        return self.selfs * own + self.crosses * k

    def sentence_end(self, place: int, thoughts: int) -> int:
        """FLOPs to read [EOS] at a position, and to make the thought and what memory keeps of it."""
        own, k, C = place + 1 + self.slots(thoughts), min(thoughts, self.config.memory), self.config.width
        keys = self.lower.selfs * own + self.lower.crosses * k
        return 2 * (self.lower.work + C**2 + 2 * self.crosses * C**2) + 4 * C * keys

    def held(self, thoughts: int, places: int) -> int:
        """Numbers that a session keeps for so many thoughts and open positions."""
        slots, k = self.slots(thoughts), min(thoughts, self.config.memory)
        return self.config.width * (slots + 2 * self.crosses * k + 2 * self.selfs * (slots + places))
