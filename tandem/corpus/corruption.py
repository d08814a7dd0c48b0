"""Span corruption: pieces of a document are cut out, and the network generates them.

    document   a0 a1 a2 a3 a4 a5 a6 $      cut a1 a2 and a5
    context    a0 <0> a3 a4 <1> a6 $       one sentinel <i> for each piece, in order
    generated  <start> <0> a1 a2 <1> a5    and asked: <0> a1 a2 <1> a5 $

Context and generated tokens together restore the document. In a batch, they follow each other as two blocks of one
document (corpus/prefixes.py). All documents of a step form one row of exactly as many tokens as they have, without
padding. A document that is its end alone has nothing to cut, and is left out.

Ids beyond the tokenizer's V are the same for every network: V and V + 1 are the boundaries of sentences (V + 1 also
starts generation), and the sentinels follow. No text contains them, so no score counts them.

Source: `exact` is the rule of T5 (Raffel et al. 2020) except at the ends; `poisson` is the rule of the authors' code
for Block-Based Double Decoders.
Letters: n ordinary tokens of a document, m of them cut out, in k pieces; T tokens of a row.
"""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from tandem.corpus.partition import drawing
from tandem.corpus.views import IGNORE, Batch, PackedRows, equal_part
from tandem.recipe import Settings

CORRUPTED = 3
"""Random key of the pieces that are cut out; those of break points are in prefixes.py."""


def start_of_generation(vocabulary: int) -> int:
    """The id with which generation starts where it does not start with a token of the text."""
    return vocabulary + 1


def first_sentinel(vocabulary: int) -> int:
    """The id of sentinel 0; the others follow."""
    return vocabulary + 2


class Corruption(Settings):
    """What is cut out of a text."""

    density: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the tokens that is cut out."""
    span: Annotated[float, Field(ge=1)] = 4.0
    """Mean tokens per piece."""
    sentinels: Annotated[int, Field(ge=1)] = 100
    """Most pieces per document."""
    sampler: Literal["exact", "poisson"] = "exact"
    """exact: that share, in separate pieces; poisson: less, in pieces that may touch, as in the authors' code."""

    def amounts(self, n: int) -> tuple[int, int]:
        """(m, k) for n ordinary tokens."""
        m = max(1, round(self.density * n))
        return m, min(n, self.sentinels, max(1, round(m / self.span)))

    def cut(self, ordinary: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Which of T tokens are cut out, (T,) bool: only `ordinary` ones (T,), of which there must be at least one."""
        m, k = self.amounts(int(ordinary.sum()))
        if self.sampler == "exact":
            return _exact(ordinary, m, k, generator)
        return _poisson(ordinary, m, k, self.span, generator)


def _exact(ordinary: np.ndarray, m: int, k: int, generator: np.random.Generator) -> np.ndarray:
    """Cuts m tokens in k pieces that do not touch.

    T5 splits the rest into k gaps, one before each piece, so a text always ends in a piece, and a short text has only
    that one. Here there are k + 1 gaps, and the first and the last may be empty.
    """
    left = int(ordinary.sum()) - m
    k = min(k, m, left + 1)
    pieces, gaps = _parts(m, k, generator), _parts(left + 2, k + 1, generator) - np.eye(k + 1, dtype=int)[[0, k]].sum(0)
    is_cut = np.repeat(np.arange(2 * k + 1) % 2 == 1, np.r_[np.stack((gaps[:k], pieces), axis=1).ravel(), gaps[k]])
    found = np.zeros(len(ordinary), bool)
    found[ordinary] = is_cut
    return found


def _parts(total: int, parts: int, generator: np.random.Generator) -> np.ndarray:
    """`total` as a random sum of `parts` positive integers."""
    ends = 1 + np.sort(generator.choice(total - 1, size=parts - 1, replace=False)) if parts > 1 else []
    return np.diff(np.r_[0, ends, total]).astype(np.int64)


def _poisson(ordinary: np.ndarray, m: int, k: int, span: float, generator: np.random.Generator) -> np.ndarray:
    """Cuts pieces of Poisson lengths from k places, at most m tokens in all; tokens where two overlap count twice."""
    found, spent = np.zeros(len(ordinary), bool), 0
    for start in np.sort(generator.choice(np.flatnonzero(ordinary), size=k, replace=False)):
        for place in range(start, start + max(1, generator.poisson(span))):
            if place == len(ordinary) or not ordinary[place] or spent == m:
                break
            found[place], spent = True, spent + 1
    return found


def corrupt(text: np.ndarray, is_cut: np.ndarray, sentinel: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """(context, asked) of one text: every cut run becomes one sentinel, with ids from `sentinel` on."""
    opens = is_cut & ~np.r_[False, is_cut[:-1]]
    names = sentinel + np.cumsum(opens) - 1
    context = np.where(opens, names, text)[~is_cut | opens]
    asked = np.insert(text[is_cut], np.flatnonzero(opens[is_cut]), names[opens])
    return context, np.r_[asked, end]


class CorruptedRows:
    """The documents of packed rows, each corrupted separately; a batch is one row of all of them."""

    def __init__(self, rows: PackedRows, corruption: Corruption):
        self.packed, self.rows, self.context, self.corruption = rows, rows.rows, rows.context, corruption

    def read(self, step: int) -> int:
        return self.packed.read(step)

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """tokens, targets, starts and blocks, (1, N) each."""
        batch, store = self.packed.batch(step, part, parts), self.packed.order.store
        first, texts = part * equal_part(self.rows, parts), []
        for row, (tokens, starts) in enumerate(zip(batch.tokens.numpy(), batch.starts.numpy(), strict=True), first):
            generator = drawing(CORRUPTED, self.packed.seed, step, row)
            for text in np.split(tokens, np.flatnonzero(np.diff(starts)) + 1):
                if (ordinary := text != store.eos).any():
                    is_cut = self.corruption.cut(ordinary, generator)
                    texts.append(corrupt(text, is_cut, first_sentinel(store.vocabulary), store.eos))
        # If all documents are their ends alone, the batch has no targets, but still uses all weights
        return in_one_row(texts or [(np.array([store.eos]), np.array([IGNORE]))], start_of_generation(store.vocabulary))

    @property
    def parts(self) -> tuple[int, int]:
        """Numbers of context tokens and of generated tokens in a row that is one document."""
        m, k = self.corruption.amounts(self.context)
        return self.context - m + k, m + k + 1


def in_one_row(texts: list[tuple[np.ndarray, np.ndarray]], start: int) -> Batch:
    """Texts of (context, asked), one after the other; `asked` is generated from the token `start`."""
    tokens, targets, starts, blocks, begin = [], [], [], [], 0
    for context, asked in texts:
        tokens += [context, [start], asked[:-1]]
        targets += [np.full(len(context), IGNORE), asked]
        starts.append(np.full(len(context) + len(asked), begin))
        blocks += [np.full(len(context), begin), np.full(len(asked), begin + len(context))]
        begin += len(context) + len(asked)
    rows = {"tokens": tokens, "targets": targets, "starts": starts, "blocks": blocks}
    return Batch.of(**{name: np.concatenate(parts).astype(np.int64)[None] for name, parts in rows.items()})
