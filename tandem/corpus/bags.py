"""Bags: each position reads a bag of neighbouring tokens, and predicts the next bag.

    s = 4     x = 0 1 2 ... 12     a chunk of L + 1 tokens, l = 3 positions, L = 12

    position   reads         asked                 without bags in     reads   asked
    0          0 1 2 3       4 5 6 7               0                   0       1 2 3 4
    1          4 5 6 7       8 9 10 11             1                   1       2 3 4 5
    2          8 9 10 11     12 . . .              ...                 11      12 . . .

Bag k predicts bag k + 1; the last bag of a row keeps its one target (arXiv 2605.06546). Documents are either ignored
(bags are cut every s tokens of the stream, and a row is one segment), or each document is folded by itself:

    A0 ... A10 | B0 ... B3 | C0 ... C4      A[0-3] -> 4 5 6 7, A[4-7] -> 8 9 10 ., C[0-3] -> 4 . . .

A document of n > s tokens gives n // s bags, which are packed into rows. Its leftover tokens are predicted but never
read. A shorter document has no targets and is skipped.

Letters: B rows, l positions of a row, s tokens of a bag, S targets of a position, L tokens of a row.
"""

import functools

import numpy as np

from tandem.corpus.order import Order
from tandem.corpus.views import IGNORE, Batch, equal_part
from tandem.recipe import UserError


class BagRows:
    """The stream, cut into rows of `context` positions, with or without document boundaries.

    Args:
        bag: s, tokens per position: 1, or the size of a bag.
        slots: S, targets per position.
        tail: whether the last position of a row keeps its one target within the chunk.
        documents: whether spans and targets end with the document; for s = 1 only, otherwise see FoldedRows.
    """

    def __init__(self, order: Order, rows: int, context: int, *, bag: int, slots: int, tail: bool, documents: bool):
        assert not documents or bag == 1
        self.order, self.rows, self.context = order, rows, context
        self.bag, self.slots, self.tail, self.documents = bag, slots, tail, documents

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """tokens (B, l, s), or (B, l) where s is 1; targets (B, l, S); starts (B, l)."""
        rows, s, L = equal_part(self.rows, parts), self.bag, self.context * self.bag
        begin = self.read(step) + part * rows * L
        stream, begins = self.order.read(begin, rows * L + 1)
        first = np.arange(rows)[:, None, None] * L  # where each row begins
        read = np.arange(self.context)[:, None] * s  # where each position begins
        asked = read + s + np.arange(self.slots)
        is_asked = np.broadcast_to(asked < L + self.tail, (rows, *asked.shape))
        asked = first + np.minimum(asked, L)
        starts = np.zeros((rows, self.context), np.int64)
        if self.documents:
            is_asked = is_asked & (begins[asked] == begins[first + read])
            starts = np.maximum(begins[(first + read)[..., 0]] - begin - first[..., 0], 0)
        tokens = stream[:-1].reshape(rows, -1, s)
        tokens = tokens[..., 0] if s == 1 else tokens
        return Batch.of(tokens=tokens, targets=np.where(is_asked, stream[asked], IGNORE), starts=starts)

    def read(self, step: int) -> int:
        return step * self.rows * self.context * self.bag


class FoldedRows:
    """Rows of `context` bags, each bag from one document.

    Raises: UserError if no document has a bag and a target, and for a mixture of sources, because a bag cannot be
        found by its number in their order.
    """

    def __init__(self, order: Order, rows: int, context: int, *, bag: int, slots: int):
        self.order, self.rows, self.context = order, rows, context
        self.bag, self.slots = bag, slots
        if len(order.sources) > 1:
            raise UserError("objective.boundary: fold takes a corpus without shares; take boundary: ignore")
        lengths = order.store.lengths
        self.bags = np.where(lengths > bag, lengths // bag, 0)
        """Bags of each document of the store."""
        self._ends = functools.lru_cache(maxsize=1)(lambda number: self.bags[order.epoch(number).documents].cumsum())
        """(D,) the number of bags up to the end of each document of an epoch."""
        epoch = order.epoch(0)
        self.tokens, self.total = int(epoch.ends[-1]), int(self.bags[epoch.documents].sum())
        """Tokens and bags of an epoch."""
        if not self.total:
            raise UserError(
                f"objective.bag: no document has more than {bag} tokens, so none gives a bag and a target; "
                "take a smaller bag, or boundary: ignore"
            )

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """tokens (B, l, s), targets (B, l, S), starts (B, l)."""
        rows, l, s = equal_part(self.rows, parts), self.context, self.bag
        documents, index, _ = self._locate((step * self.rows + part * rows) * l, rows * l)
        store = self.order.store
        read = store.offsets[documents] + index * s
        asked = (read + s)[:, None] + np.arange(self.slots)
        ends = store.offsets[documents + 1][:, None]
        first = np.flatnonzero(np.diff(documents, prepend=-1))  # bag of each document
        store.fetch(documents[first], index[first] * s, np.diff(first, append=len(index)) * s + s)
        targets = np.where(asked < ends, store.tokens[np.minimum(asked, ends - 1)].astype(np.int64), IGNORE)
        tokens = store.tokens[read[:, None] + np.arange(s)].astype(np.int64)
        starts = np.maximum(np.arange(l) - index.reshape(rows, l), 0)
        return Batch.of(tokens=tokens.reshape(rows, l, s), targets=targets.reshape(rows, l, -1), starts=starts)

    def read(self, step: int) -> int:
        if not step:  # documents before the first that gives a bag are not read yet
            return 0
        _, index, begins = self._locate(step * self.rows * self.context, 1)
        return int(begins[0] + index[0] * self.bag)

    def _locate(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For `count` bags from number `start`: document, index of the bag in it, where in the stream it begins."""
        documents, index, begins = [], [], []
        while count > 0:
            number, first = divmod(start, self.total)
            last = min(first + count, self.total)
            epoch, ends, bags = self.order.epoch(number), self._ends(number), np.arange(first, last)
            place = np.searchsorted(ends, bags, side="right")
            found = epoch.documents[place]
            documents.append(found)
            index.append(bags - (ends[place] - self.bags[found]))
            begins.append(epoch.ends[place] - self.order.store.lengths[found] + number * self.tokens)
            start, count = start + last - first, count - (last - first)
        return np.concatenate(documents), np.concatenate(index), np.concatenate(begins)
