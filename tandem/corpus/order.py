"""The house order, the same for every method: which document stands where in an endless stream.

A source yields its documents epoch after epoch; each epoch is a permutation keyed by (seed, epoch, source). Without
shares, a corpus is one source:

    epoch 0            epoch 1
    d2 | d0 | d1       d0 | d1 | d2       ...      position:  0 1 2 3 4 5 ...

In a mixture, each source has a clock set by its share w: the document that begins at token b of its source's own
stream is due at b / w. Documents come in the order in which they are due; on a tie, the earlier source comes first.

    w = 3/4   a0    a1    a2    a3 ...       documents of 6 tokens: due at 0 8 16 24
    w = 1/4   b0          b1                 documents of 4 tokens: due at 0 16
    stream    a0 b0 a1 a2 b1 a3 ...          a source that runs out begins its next epoch, the others go on

By time V, every source has given the documents due before V: w V tokens, plus less than one document. So n tokens of
the stream hold w n tokens of a source to within (1 - w) L + w (sum of the other L), where L is the length of a
source's longest document; and what stands at position p was due between p - (sum of all L) and p. Hence any slice of
the stream can be read without what comes before it: a batch needs no state, and a resumed run no replay.
Three things are fixed here for good, since results depend on them: the permutation, its key and the clock.
Cost: one sort of a source's documents per epoch, kept for two epochs; a read sorts the documents of its own slice
and of the (sum of all L) tokens before it, and gathers its tokens in one indexing operation.
Letters: D documents, N tokens.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from tandem.corpus.store import Store
from tandem.recipe import UserError


class Epoch(NamedTuple):
    documents: np.ndarray
    """(D,) the documents in order."""
    ends: np.ndarray
    """(D,) where in the epoch each of them ends, in tokens."""


SUBSET = 0
"""Seed of `fixed_order`."""


def shuffled(count: int, *key: int) -> np.ndarray:
    """A permutation of range(count), decided by the key."""
    # Sorts raw bits: numpy keeps the raw bits of a generator the same for ever, but not its permutation().
    bits = np.random.Philox(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(bits, kind="stable")


def fixed_order(store: Store) -> np.ndarray:
    """(D,) all documents, shuffled the same way everywhere: fewer of them to read, score or analyse are its first."""
    return shuffled(len(store), SUBSET, 0)


def documents_to_read(store: Store) -> np.ndarray:
    """(D,) the documents that runs read: all or, of at most `store.most` tokens, the first of the order above.

    Raises: UserError where the first of them has more.
    """
    if store.most is None:
        return np.arange(len(store))
    order = fixed_order(store)
    ends = store.lengths[order].cumsum()
    if ends[0] > store.most:
        raise UserError(
            f"corpus.train_tokens = {store.most}: the first document read has {ends[0]}; take at least these"
        )
    return np.sort(order[: np.searchsorted(ends, store.most, side="right")])


class Source:
    """The endless stream of some of a store's documents."""

    def __init__(self, store: Store, documents: np.ndarray, seed: int, number: int):
        self.store, self.documents, self.seed, self.number = store, documents, seed, number
        self.tokens, self.longest = int(store.lengths[documents].sum()), int(store.lengths[documents].max())
        self.epoch = functools.lru_cache(maxsize=2)(self._epoch)

    def _epoch(self, number: int) -> Epoch:
        # For source 0, this equals the key (seed, epoch), because numpy ignores a trailing zero: a mixture of one
        # source is the corpus without shares.
        documents = self.documents[shuffled(len(self.documents), self.seed, number, self.number)]
        return Epoch(documents, np.cumsum(self.store.lengths[documents]))

    def between(self, low: int, high: int) -> tuple[np.ndarray, np.ndarray, int]:
        """The documents that begin at low <= position < high, where each begins, and the tokens before the first."""
        documents, begins, before = [], [], []
        for number in range(low // self.tokens, high // self.tokens + 1):
            epoch, start = self.epoch(number), number * self.tokens
            one, other = (self._begun(epoch, position - start) for position in (low, high))
            documents.append(epoch.documents[one:other])
            begins.append(start + epoch.ends[one:other] - self.store.lengths[documents[-1]])
            before.append(start + int(epoch.ends[one - 1] if one else 0))
        return np.concatenate(documents), np.concatenate(begins), before[0]

    @staticmethod
    def _begun(epoch: Epoch, position: int) -> int:
        """How many documents of an epoch begin before a position: each begins where the one before it ends."""
        return min(1 + int(np.searchsorted(epoch.ends, position)), len(epoch.ends)) if position > 0 else 0


class Order:
    """The stream of a store's documents for one seed."""

    def __init__(self, store: Store, seed: int):
        self.store = store
        everything = [(1.0, documents_to_read(store))]
        mixed = [(share, np.flatnonzero(store.source_of == i)) for i, share in enumerate(store.shares)]
        present = [(i, share, documents) for i, (share, documents) in enumerate(mixed or everything) if len(documents)]
        self.sources = [Source(store, documents, seed, i) for i, _, documents in present]
        self.shares = [share / sum(share for _, share, _ in present) for _, share, _ in present]
        self._reach = 1 + sum(source.longest for source in self.sources)  # one more for the rounding of the clock

    def epoch(self, number: int) -> Epoch:
        """The documents of one epoch of the first source, in order; without shares, those are all that runs read."""
        return self.sources[0].epoch(number)

    @property
    def once(self) -> int:
        """Tokens of the stream until the first source is used up."""
        return min(math.floor(source.tokens / share) for source, share in zip(self.sources, self.shares, strict=True))

    def documents(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents that cover the stream positions start .. stop-1.

        Returns: documents (D,) in order, and the stream position (D,) int64 at which each begins.
        """
        low, high = max(0, start - self._reach), stop + 1
        parts = [
            source.between(math.ceil(share * low), math.ceil(share * high))
            for source, share in zip(self.sources, self.shares, strict=True)
        ]
        due = np.concatenate([begins / share for (_, begins, _), share in zip(parts, self.shares, strict=True)])
        documents = np.concatenate([documents for documents, _, _ in parts])[np.argsort(due, kind="stable")]
        lengths = self.store.lengths[documents]
        ends = sum(before for _, _, before in parts) + np.cumsum(lengths)
        first, last = np.searchsorted(ends, [start, stop - 1], side="right")
        held = slice(first, last + 1)
        return documents[held], (ends - lengths)[held]

    def read(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """A slice of the stream.

        Returns: tokens (N,) int64, and for each the stream position (N,) int64 at which its document begins.
        """
        stop = start + count
        documents, begins = self.documents(start, stop)
        ends, firsts = begins + self.store.lengths[documents], np.maximum(begins, start)
        counts = np.minimum(ends, stop) - firsts
        self.store.fetch(documents, firsts - begins, counts)
        places = np.arange(start, stop) + np.repeat(self.store.offsets[documents] - begins, counts)
        return self.store.tokens[places].astype(np.int64), np.repeat(begins, counts)
