"""The one ruler: the negative log-likelihood of text under a method, in nats, token by token from left to right.

Only this number is compared between methods. It covers tokens 2 to last of every document, its end included:

    document     The cat sat $          $ ends it; it starts with no context
    scored           cat sat $          nll = nats / 3 tokens
    bytes             4   4  0          bits per byte = nats / ln 2 / 8 bytes; those of "The" are not asked

A document longer than the context is read in windows that overlap by half, each token scored once. A network whose
state has no such bound reads it whole, and once more in windows for comparison. With `prefix`, only what follows a
break point is scored, given what comes before it. Break points are fixed, one for each document (or each piece of a
long one), so that every network, even one that reads its context in both directions, is scored on the same tokens of
the same rows (corpus/prefixes.py). Scores are float32, with or without autocast; sums are float64 and by document, so
that two methods can be compared document by document.

A network that is told where sentences end knows more than the text up to a token. So its sentence ends are counted
separately, and three numbers describe what the text costs it:

    nll                   the tokens above; knowing the sentence ends costs nothing
    nll_with_boundaries   these tokens and every sentence end but the last of a document (certain after the document
                          end), per token as in nll: an upper bound of -log p(text), as any other network's nll is
    nll_paper             tokens 1 to last without the document end, per token, as Thought Gestalt counts

A gain over a network without boundaries counts only if it also holds in nll_with_boundaries.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from tandem.corpus import Store, fixed_order, rows_of, suffix_windows
from tandem.networks.network import Network
from tandem.recipe import Recipe, Settings, UserError, counted, register
from tandem.training.display import Told

SPLITS = {"all": slice(None), "comparison": slice(0, None, 2), "tuning": slice(1, None, 2)}
"""Slices of the shuffled order: what is chosen on the tuning half is compared on documents that had no say in it."""


@register("evaluation")
class Evaluation:
    """Likelihood of held-out text, during training and at its end."""

    class Config(Settings):
        every: int | None = Field(None, ge=1)
        """Steps between evaluations; null: as `points` says."""
        points: int | None = Field(None, ge=1)
        """Most evaluations in a run, evenly spaced, its end one of them; null: only that, unless `every` is given."""
        split: Literal["all", "comparison", "tuning"] = "all"
        """Held-out documents to score: all, or one of two disjoint halves."""
        documents: int | None = Field(50, ge=1)
        """Documents scored during training, the first of those of the end; null: all of those."""
        final_documents: int | None = Field(None, ge=1)
        """Documents scored at the end of training; null: all."""
        prefix: bool = False
        """Score only what follows a break point in each document (prefix LM)."""
        rows: int = Field(16, ge=1)
        """Rows scored at a time, for speed and memory; scores move by rounding, or within a network's own tolerance."""
        texts: dict[str, str | list[str]] = {}
        """Further texts scored at the end, by name: paths as in corpus.texts; read with the run's tokenizer."""

        @property
        def documents_of_curve(self) -> int | None:
            """Documents that are scored both during training and at its end."""
            return min((n for n in (self.documents, self.final_documents) if n is not None), default=None)

    @classmethod
    def check(cls, recipe: Recipe) -> Iterator[tuple[str, str]]:
        network, name = recipe.choice("network"), recipe.value("network.name")
        if (reason := network.suffixes_only) and not recipe.evaluation.prefix:
            yield "evaluation.prefix", f"network {name} {reason}"
        if recipe.evaluation.prefix and network.reads_sentences:
            yield "evaluation.prefix", f"network {name} reads sentences, and break points lie anywhere; leave it false"


@dataclass(frozen=True)
class Likelihood:
    """Scores by document: `order` (D,) are the documents' numbers in the store, all else their sums.

    Those by position are (D, P): column p holds the tokens 2^p to 2^(p+1) - 1 of a document, its first token being 0.
    """

    order: np.ndarray
    nats_by_position: np.ndarray
    tokens_by_position: np.ndarray
    bytes_by_document: np.ndarray
    end_nats_by_document: np.ndarray
    """Nats of sentence ends; 0 for a network without them."""
    text_nats_by_document: np.ndarray
    """Nats of the whole text, first token included, document end not; NaN if the first is not predicted."""

    @property
    def nats_by_document(self) -> np.ndarray:
        return self.nats_by_position.sum(1)

    @property
    def tokens_by_document(self) -> np.ndarray:
        return self.tokens_by_position.sum(1)

    @property
    def nats(self) -> float:
        return float(self.nats_by_position.sum())

    @property
    def tokens(self) -> int:
        return int(self.tokens_by_position.sum())

    @property
    def bytes(self) -> int:
        """Bytes of the text of the scored tokens, UTF-8."""
        return int(self.bytes_by_document.sum())

    @property
    def documents(self) -> int:
        return len(self.order)

    def of(self, documents: np.ndarray) -> "Likelihood":
        """The scores of these documents alone."""
        kept = np.isin(self.order, documents)
        return Likelihood(*(getattr(self, field.name)[kept] for field in fields(self)))

    @property
    def nll(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def nll_by_position(self) -> dict[int, float]:
        """Nats per token by the first position of each column that has any."""
        nats, tokens = self.nats_by_position.sum(0), self.tokens_by_position.sum(0)
        return {2**p: float(nats[p] / tokens[p]) for p in np.flatnonzero(tokens).tolist()}

    @property
    def nll_with_boundaries(self) -> float:
        """Nats of text and sentence ends, per token."""
        return (self.nats + float(self.end_nats_by_document.sum())) / self.tokens

    @property
    def nll_paper(self) -> float | None:
        """Nats per token of the text, which has as many tokens as are scored; None if the first is not predicted."""
        nats = float(self.text_nats_by_document.sum())
        return None if math.isnan(nats) else nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


def ratio_error(above: np.ndarray, below: np.ndarray) -> float:
    """Standard error of sum(above) / sum(below) over random documents, to first order: both sums vary; NaN with one."""
    n, rest = len(above), above - above.sum() / below.sum() * below
    return math.sqrt(n / (n - 1) * (rest**2).sum()) / float(below.sum()) if n > 1 else math.nan


def documents_to_score(store: Store, documents: int | None, split: str) -> np.ndarray:
    """(D,) numbers of the documents, chosen as `likelihood` describes.

    Raises: ValueError for another split, or for fewer than one document; UserError if there is none to score.
    """
    if split not in SPLITS or (documents is not None and documents < 1):
        raise ValueError(f"split {split!r}, {documents} documents: splits: {', '.join(SPLITS)}; documents: from 1")
    order = fixed_order(store)[SPLITS[split]]
    order = np.sort(order) if documents is None else order[:documents]
    order = order[store.lengths[order] > 1]  # a document that is its end alone has no token 2
    if not len(order):
        half = "" if split == "all" else f", of which one half is for {split} (evaluation.split)"
        there = f"{store.folder}: {counted(len(store), 'documents')}{half}"
        raise UserError(f"{there}: none is left to score; hold out more text")
    return order


def require_bytes(store: Store, context: int, documents: int | None, split: str, prefix: bool) -> None:
    """Raises: UserError if the tokens that `likelihood` scores with these arguments cover no text."""
    order = documents_to_score(store, documents, split).tolist()
    windows = suffix_windows(store, context, order) if prefix else ((i, 0, store.lengths[i] - 1, 0) for i in order)
    if not any(store.token_bytes[store.offsets[i] :][asked + 1 : last + 1].any() for i, _, last, asked in windows):
        raise UserError(
            f"{store.manifest.sources[0]} ({store.folder}): of {counted(len(order), 'documents')} to score only the "
            "ends are asked, which are no text, so there are no bits per byte; give longer documents, or more of them"
        )


def likelihood(
    network: Network,
    store: Store,
    *,
    context: int,
    rows: int,
    documents: int | None = None,
    split: str = "all",
    prefix: bool = False,
    whole: bool = True,
    blocks: Callable[[Tensor], Tensor] | None = None,
    share: tuple[int, int] = (0, 1),
    progress: Told = lambda done, total: None,
) -> Likelihood:
    """Scores documents of `store` with `network`, on the device of its weights.

    Args:
        context: tokens of a row.
        rows: rows scored at a time.
        documents: how many; None: all. Fewer are the first of one fixed shuffled order, the same for every method and
            seed, so a smaller choice is part of a larger one. (The first of the store would be those of one source.)
        split: those to choose from: "all", or every second one of that order, "comparison" or "tuning".
        prefix: scores only what follows the documents' break points.
        whole: reads documents as the network does; else in windows, whatever the network could read.
        blocks: `Batch.blocks` from `Batch.starts`, for a network that reads in blocks; None: those of its own score.
        share: (i, n) scores the i-th of n parts of these documents; `joined` puts the parts together.
        progress: called with tokens scored so far and tokens in all.
    """
    order = documents_to_score(store, documents, split)[share[0] :: share[1]]
    size, place = np.zeros(len(order), np.int64), np.zeros(len(store), np.int64)
    ends, firsts, lasts = np.zeros((3, len(order)))
    nats = np.zeros((len(order), int(store.lengths.max()).bit_length()))
    tokens = np.zeros(nats.shape, np.int64)
    place[order] = np.arange(len(order))
    if prefix:
        suffixes = list(suffix_windows(store, context, order.tolist()))
        asked_for = sum(last - asked for _, _, last, asked in suffixes)
        batches = rows_of(suffixes, store, context, rows, divided=True)
    else:
        asked_for = int((store.lengths[order] - 1).sum())
        batches = network.scoring(store, context, rows, order.tolist(), whole)
    device, done, starts_anywhere = network.head.device, 0, False
    for scoring in batches:
        batch = scoring.batch if blocks is None else replace(scoring.batch, blocks=blocks(scoring.batch.starts))
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            nll = network.score(batch.to(device)).cpu().numpy()
        asked = scoring.document.numpy() >= 0
        document, index, nll = scoring.document.numpy()[asked], scoring.index.numpy()[asked], nll[asked]
        last = store.lengths[document] - 1
        for sums, chosen in ((ends, index < 0), (firsts, index == 0), (lasts, index == last)):
            np.add.at(sums, place[document[chosen]], nll[chosen])
        scored = index > 0
        at = place[document[scored]], np.frexp(index[scored])[1] - 1
        np.add.at(nats, at, nll[scored])
        np.add.at(tokens, at, 1)
        np.add.at(size, at[0], store.token_bytes[store.offsets[document] + index][scored])
        starts_anywhere |= bool((index == 0).any())
        done += int(scored.sum())
        progress(done, asked_for)
    assert done == asked_for, "every token is scored once"
    text = nats.sum(1) + firsts - lasts if starts_anywhere else np.full(len(order), np.nan)
    return Likelihood(order, nats, tokens, size, ends, text)


def joined(parts: Sequence[Likelihood]) -> Likelihood:
    """Puts together all parts (i, n) of a score, given in the order of i, as if it had been computed at once."""
    whole = sum(part.documents for part in parts)
    columns = []
    for field in fields(Likelihood):
        first = getattr(parts[0], field.name)
        column = np.empty((whole, *first.shape[1:]), first.dtype)
        for i, part in enumerate(parts):
            column[i :: len(parts)] = getattr(part, field.name)
        columns.append(column)
    return Likelihood(*columns)
