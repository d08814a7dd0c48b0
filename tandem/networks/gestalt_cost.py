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

from tandem.networks.cost import Cost
from tandem.nn.block import mlp_work

if TYPE_CHECKING:
    from tandem.networks.gestalt import Gestalt

SENTENCE = 25
"""Tokens of a typical sentence: rows of text count as sentences of this length where nothing else is known."""


@dataclass(frozen=True)
class Layers:
    """Some blocks: multiply-adds of a position, and how many have self- and cross-attention."""

    work: int
    selfs: int
    crosses: int


@dataclass(frozen=True)
class GestaltCost(Cost):
    """Rows of text count as sentences of `sentence` tokens; sessions close theirs only at `cap`.

    `decode` does not count the closing of a sentence: that is `sentence_end`."""

    width: int = 0
    memory: int = 0
    cap: int = 0
    in_context: bool = False
    thinks: bool = True
    lower: Layers = Layers(0, 0, 0)
    upper: Layers = Layers(0, 0, 0)
    sentence: int = SENTENCE

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
            width=C,
            memory=c.memory,
            cap=c.cap,
            in_context=c.in_context,
            thinks=c.thinks,
            lower=lower,
            upper=upper,
            sentence=min(SENTENCE, c.cap),
        )
        return found

    @property
    def crosses(self) -> int:
        return self.lower.crosses + self.upper.crosses

    @property
    def once(self) -> int:
        """FLOPs of a batch, of any size, for the table of ranks."""
        return 4 * self.memory * self.crosses * self.width**2

    # ---- training -------------------------------------------------------------------------------------------------

    def training(
        self, context: int, documents: Sequence[int] | None = None, parts: tuple[int, int] | None = None
    ) -> dict[str, int]:
        """FLOPs of one row of `context` tokens, each document one stream; all of it is trained on."""
        assert parts is None, "sentences have no break points"
        total = {"linear": 0, "attention": 0, "head": 0}
        for n in documents or [context]:
            full, rest = divmod(n, self.sentence)
            found = self.stream([self.sentence] * full + ([rest] if rest else []))
            total = {part: total[part] + found[part] for part in total}
        return total

    def stream(self, lengths: Sequence[int]) -> dict[str, int]:
        """FLOPs by part of a stream whose sentences have these numbers of tokens."""
        C, S = self.width, len(lengths)
        slots = [min(t, self.memory) if self.in_context else 0 for t in range(S)]
        p = sum(n + 2 + slot for n, slot in zip(lengths, slots, strict=True))
        linear = p * self.lower.work + (p - S) * self.upper.work
        linear += (S * C**2 if self.thinks else 0) + max(0, S - 1) * 2 * self.crosses * C**2
        pairs = sum(
            self._pairs(self.lower, n + 2 + slot, t) + self._pairs(self.upper, n + 1 + slot, t)
            for t, (n, slot) in enumerate(zip(lengths, slots, strict=True))
        )
        q = sum(lengths) + S
        return {"linear": 6 * linear, "attention": 14 * C * pairs, "head": 6 * q * self.head}

    def multiply_adds(self, lengths: Sequence[int]) -> int:
        """A."""
        found = self.stream(lengths)
        return (found["linear"] + found["head"]) // 6

    def _pairs(self, layers: Layers, m: int, t: int) -> int:
        return layers.selfs * m * (m + 1) // 2 + layers.crosses * m * min(t, self.memory)

    # ---- generation -----------------------------------------------------------------------------------------------

    def prefill(self, n: int) -> int:
        """FLOPs of a prompt cut only at `cap`: closed sentences go no further than their thoughts."""
        closed, rest = divmod(n, self.cap)
        slots = [min(t, self.memory) if self.in_context else 0 for t in range(closed + 1)]
        work = sum(self.cap + 2 + slot for slot in slots[:-1]) * self.lower.work
        work += closed * (1 + 2 * self.crosses) * self.width**2
        work += (rest + 1 + slots[-1]) * self.linear
        return 2 * work + 4 * self.pair * self.pairs(n)

    def prompt_pairs(self, n: int) -> int:
        closed, rest = divmod(n, self.cap)
        slot = lambda t: min(t, self.memory) if self.in_context else 0
        pairs = sum(self._pairs(self.lower, self.cap + 2 + slot(t), t) for t in range(closed))
        m = rest + 1 + slot(closed)
        return pairs + self._pairs(self.lower, m, closed) + self._pairs(self.upper, m, closed)

    def keys_at(self, place: int, thoughts: int) -> int:
        """Keys read by position `place` of a sentence ([BOS] is 0) with so many thoughts before it, over all layers."""
        k = min(thoughts, self.memory)
        own = place + 1 + (k if self.in_context else 0)
        return (self.lower.selfs + self.upper.selfs) * own + self.crosses * k

    def position(self, place: int, thoughts: int) -> int:
        """FLOPs to read one position and form its logits."""
        return 2 * (self.linear + self.head) + 4 * self.pair * self.keys_at(place, thoughts)

    def sentence_end(self, place: int, thoughts: int) -> int:
        """FLOPs to read [EOS] at a position, and to make the thought and what memory keeps of it."""
        k, C = min(thoughts, self.memory), self.width
        own = place + 1 + (k if self.in_context else 0)
        keys = self.lower.selfs * own + self.lower.crosses * k
        return 2 * (self.lower.work + C**2 + 2 * self.crosses * C**2) + 4 * C * keys

    def held(self, thoughts: int, places: int) -> int:
        """Numbers that a session keeps for so many thoughts and open positions."""
        k, C, selfs = min(thoughts, self.memory), self.width, self.lower.selfs + self.upper.selfs
        if self.in_context:
            return C * k + 2 * selfs * C * (k + places)
        return 2 * self.crosses * C * k + 2 * selfs * C * places
