"""The house order: which document stands where in an endless stream, for every method alike.

Each epoch is a permutation of the documents keyed by (seed, epoch), and the epochs follow each other:

    epoch 0            epoch 1
    d2 | d0 | d1       d0 | d1 | d2       ...      position:  0 1 2 3 4 5 ...

Any slice of the stream can be read without what comes before it, so a batch needs no state and a resumed run no
replay. Two things are fixed here for good, since results depend on them: the permutation and its key.
Cost: one sort of the documents per epoch, kept for two epochs; a read gathers its tokens in one indexing.
Letters: D documents, N tokens.
"""

from typing import NamedTuple

import numpy as np

from tandem.corpus.store import Store


class Epoch(NamedTuple):
    documents: np.ndarray
    """(D,) the documents in order."""
    ends: np.ndarray
    """(D,) where in the epoch each of them ends, in tokens."""


class Order:
    """The stream of a store's documents for one seed."""

    def __init__(self, store: Store, seed: int):
        self.store, self.seed = store, seed
        self._epochs: dict[int, Epoch] = {}

    def epoch(self, number: int) -> Epoch:
        """The documents of one epoch in the house order."""
        if number not in self._epochs:
            # Sorted raw bits: numpy keeps the bits of a generator the same for ever, but not its permutation().
            bits = np.random.Philox(np.random.SeedSequence([self.seed, number])).random_raw(len(self.store))
            documents = np.argsort(bits, kind="stable")
            while len(self._epochs) > 1:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[number] = Epoch(documents, np.cumsum(self.store.lengths[documents]))
        return self._epochs[number]

    def read(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """A slice of the stream.

        Returns: tokens (N,) int64, and for each the stream position (N,) int64 at which its document begins.
        """
        total = len(self.store.tokens)
        tokens, begins = [], []
        while count > 0:
            number, first = divmod(start, total)
            last = min(first + count, total)
            indices, begins_in_epoch = self._locate(self.epoch(number), first, last)
            tokens.append(self.store.tokens[indices])
            begins.append(begins_in_epoch + number * total)
            start, count = start + last - first, count - (last - first)
        return np.concatenate(tokens).astype(np.int64), np.concatenate(begins)

    def _locate(self, epoch: Epoch, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """For positions first .. last-1 of an epoch: where in the store, and where their document begins."""
        one, other = np.searchsorted(epoch.ends, [first, last - 1], side="right")
        touched = slice(one, other + 1)
        documents, ends = epoch.documents[touched], epoch.ends[touched]
        begins = ends - self.store.lengths[documents]
        counts = np.minimum(ends, last) - np.maximum(begins, first)
        shifts = np.repeat(self.store.offsets[documents] - begins, counts)
        return np.arange(first, last) + shifts, np.repeat(begins, counts)
