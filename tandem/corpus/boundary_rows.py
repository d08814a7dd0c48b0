"""Packed rows in which special tokens mark where sentences begin and end.

    packed row      a0 a1 a2 | a3 $ | b0 b1          sentences of the documents a and b
    inputs      [ ] a0 a1 a2 ] [ a3 $ [ b0 b1        [ is [BOS], id V + 1;  ] is [EOS], id V
    targets        a0 a1 a2 ] [ a3 $ . b0 b1 ...     every token is asked where the packed row asks it, and the
                                                     boundaries; the first of a document, too, behind its [BOS]

A row holds the tokens of the packed row, and once each the boundaries between its first token and the one after its
last. After a document end, no sentence end is a target: it is certain, and nothing reads it.
Letters: B rows, T positions of a row, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.corpus.sentences import sentences_of
from tandem.corpus.store import Store
from tandem.corpus.views import IGNORE, Batch, PackedRows, ScoringBatch, equal_part, placed_windows, windows

ROUNDED = 32
"""Row lengths are multiples of this, to keep shapes few: each shape is compiled separately."""
END, BEGIN = -1, -2
"""Stand-ins for the index of a token, at boundaries."""


@dataclass(frozen=True)
class BoundaryBatch(Batch):
    """A batch with `sentences`, (B, T) int64 on the host: where in the row the sentence of each position starts."""

    sentences: Tensor | None = None


def widest_row(tokens: int) -> int:
    """Most positions of a row of `tokens` tokens, before it is padded: [BOS], and each token with [EOS] and [BOS]."""
    return 3 * tokens + 1


class Piece(NamedTuple):
    """Consecutive tokens of one document with their boundaries, (T,) each."""

    tokens: np.ndarray
    targets: np.ndarray
    index: np.ndarray
    """Index of each target in its document; END or BEGIN for a boundary; IGNORE where there is no target."""
    sentences: np.ndarray


def piece(store: Store, document: int, first: int, last: int) -> Piece:
    """The tokens first .. last - 1 of a document as inputs, each with the next one as its target."""
    starts = sentences_of(store).document(document)
    starts = starts[(starts > first) & (starts <= last)]
    index = np.arange(first, min(last + 1, int(store.lengths[document])))
    tokens, end = store.document(document)[index].astype(np.int64), store.vocabulary
    between = np.repeat(starts - first, 2)
    tokens = np.insert(tokens, between, np.tile([end, end + 1], len(starts)))
    index = np.insert(index, between, np.tile([END, BEGIN], len(starts)))
    if first == 0:
        tokens, index = np.insert(tokens, 0, end + 1), np.insert(index, 0, BEGIN)
    if last == store.lengths[document]:  # it is read to its end, after which there is no target
        tokens, index = np.append(tokens, IGNORE), np.append(index, IGNORE)
    sentences = np.maximum.accumulate(np.where(tokens == end + 1, np.arange(len(tokens)), 0))
    return Piece(tokens[:-1], tokens[1:], index[1:], sentences[:-1])


class BoundaryRows(PackedRows):
    """The packed rows of a store with the boundaries of their sentences."""

    def __init__(self, store: Store, seed: int, rows: int, context: int):
        super().__init__(store, seed, rows, context)
        self.store, self.row_tokens = store, context
        boundaries = 2 * np.diff(sentences_of(store).firsts) - 1  # of each document
        per_token = (
            share * boundaries[source.documents].sum() / source.tokens
            for share, source in zip(self.order.shares, self.order.sources, strict=True)
        )
        self.context = round(context * (1 + sum(per_token)))
        """Mean of T, which is what a row costs. A row reads `row_tokens` tokens of text."""

    @property
    def words(self) -> str:
        return f"packed rows of {self.row_tokens} tokens and their sentence boundaries"

    def read(self, step: int) -> int:
        return self.begin + step * self.rows * self.row_tokens

    def batch(self, step: int, part: int = 0, parts: int = 1) -> BoundaryBatch:
        """The rows of a step, or one of `parts` equal parts of them; each part is as wide as its longest row."""
        count = equal_part(self.rows, parts)
        begin = self.read(step) + part * count * self.row_tokens
        return _laid_out([self._pieces(begin + row * self.row_tokens) for row in range(count)], self.store.eos)

    def _pieces(self, begin: int) -> list[Piece]:
        """The pieces of the packed row that starts at token `begin` of the stream."""
        documents, at = self.order.documents(begin, begin + self.row_tokens)
        firsts = np.maximum(0, begin - at)
        lasts = np.minimum(begin + self.row_tokens - at, self.store.lengths[documents])
        self.store.fetch(documents, firsts, lasts - firsts)
        return [piece(self.store, *of) for of in zip(*(a.tolist() for a in (documents, firsts, lasts)), strict=True)]


def scoring_boundary_rows(
    store: Store, context: int, rows: int, documents: Iterable[int] | None = None
) -> Iterator[ScoringBatch]:
    """The windows of `scoring_rows` with their boundaries: every token is scored once, and so is every sentence end but
    the last of a document."""
    for placed in placed_windows(windows(store, context, documents), context, rows):
        height = 1 + max(row for row, *_ in placed)
        pieces: list[list[Piece]] = [[] for _ in range(height)]
        document: list[list[np.ndarray]] = [[] for _ in range(height)]
        for row, _, (i, first, last, asked) in placed:
            made = piece(store, i, first, last)
            is_asked = _fresh(made.index, asked)
            pieces[row].append(made._replace(targets=np.where(is_asked, made.targets, IGNORE)))
            document[row].append(np.where(is_asked & (made.index != BEGIN), i, -1))
        batch = _laid_out(pieces, store.eos)
        shape = tuple(batch.tokens.shape)
        whose, index = (torch.from_numpy(_padded(rows, -1, shape[1])) for rows in (document, _of(pieces, "index")))
        yield ScoringBatch(batch, whose, torch.where(whose < 0, -1, index))


def _fresh(index: np.ndarray, asked: int) -> np.ndarray:
    """Which targets come after the token `asked`. The previous window scored those up to it; a boundary counts with the
    token that follows it."""
    following = np.minimum.accumulate(np.where(index < 0, np.iinfo(np.int64).max, index)[::-1])[::-1]
    return following > asked if asked else np.ones(len(index), bool)


def _laid_out(rows: list[list[Piece]], eos: int) -> BoundaryBatch:
    """Rows of pieces side by side, padded with document ends that have no target and see only themselves."""
    lengths = [np.array([len(p.tokens) for p in row]) for row in rows]
    width = -(-max(n.sum() for n in lengths) // ROUNDED) * ROUNDED
    starts = _padded([[np.repeat(np.cumsum(n) - n, n)] for n in lengths], np.arange(width), width)
    return BoundaryBatch.of(
        tokens=_padded(_of(rows, "tokens"), eos, width),
        targets=_padded(_of(rows, "targets"), IGNORE, width),
        starts=starts,
        sentences=starts + _padded(_of(rows, "sentences"), 0, width),
    )


def _of(rows: list[list[Piece]], name: str) -> list[list[np.ndarray]]:
    return [[getattr(p, name) for p in row] for row in rows]


def _padded(rows: Sequence[Sequence[np.ndarray]], rest: int | np.ndarray, width: int) -> np.ndarray:
    """(B, width): each row's arrays one after the other, then `rest`."""
    made = np.tile(np.broadcast_to(rest, width), (len(rows), 1))
    for row, parts in zip(made, rows, strict=True):
        joined = np.concatenate(parts)
        row[: len(joined)] = joined
    return made
