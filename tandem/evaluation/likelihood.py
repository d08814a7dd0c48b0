"""The one ruler: the nats that a method gives to text, token by token, from left to right.

Only this number is compared between methods. Scored are tokens 2 to last of every document, its end included:

    document     The cat sat $          $ ends it; it starts with no context
    scored           cat sat $          nll = nats / 3 tokens
    bytes             4   4  0          bits per byte = nats / ln 2 / 8 bytes; those of "The" are not asked

A document longer than the context is read in windows that overlap by half, each token scored once. Scores are float32,
autocast or not; sums are float64 and by document, so that two methods can be compared document by document.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import Field

from tandem.corpus import Store, scoring_rows, shuffled
from tandem.networks.network import Network
from tandem.recipe import Settings, register

SUBSET = 0
"""Key of the order of documents from which a part is taken."""


@register("evaluation")
class Evaluation:
    """Likelihood of held-out text, on the way and at the end."""

    class Config(Settings):
        every: int | None = Field(None, ge=1)
        """Steps between evaluations; null: only at the end."""
        documents: int | None = Field(50, ge=1)
        """Documents scored on the way; null: all, as always at the end."""
        rows: int = Field(16, ge=1)
        """Rows scored at a time; changes nothing but speed and memory."""


@dataclass(frozen=True)
class Likelihood:
    """What was scored, by document: `order` (D,) are their numbers in the store, the others their sums."""

    order: np.ndarray
    nats_by_document: np.ndarray
    tokens_by_document: np.ndarray
    bytes_by_document: np.ndarray

    @property
    def nats(self) -> float:
        return float(self.nats_by_document.sum())

    @property
    def tokens(self) -> int:
        return int(self.tokens_by_document.sum())

    @property
    def bytes(self) -> int:
        """Of the text of the scored tokens, UTF-8."""
        return int(self.bytes_by_document.sum())

    @property
    def documents(self) -> int:
        return len(self.order)

    @property
    def nll(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


def likelihood(
    network: Network,
    store: Store,
    *,
    context: int,
    rows: int,
    documents: int | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Likelihood:
    """Scores documents of `store` with `network`, where its weights are.

    Args:
        context: tokens of a row.
        rows: rows scored at a time.
        documents: how many; None: all. A part is the first of one fixed shuffled order, the same for every method and
            seed, and part of every larger part. (The first of the store would be those of one source.)
        progress: called with tokens scored so far and tokens in all.
    """
    order = np.arange(len(store)) if documents is None else shuffled(len(store), SUBSET, 0)[:documents]
    order = order[store.lengths[order] > 1]  # a document that is its end alone has no token 2
    tokens = store.lengths[order] - 1
    nats, size, place = np.zeros(len(order)), np.zeros(len(order), np.int64), np.zeros(len(store), np.int64)
    place[order] = np.arange(len(order))
    device, done = network.head.device, 0
    for scoring in scoring_rows(store, context, rows, order.tolist()):
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            nll = network.score(scoring.batch.to(device)).cpu().numpy()
        asked = scoring.document.numpy() >= 0
        document = scoring.document.numpy()[asked]
        np.add.at(nats, place[document], nll[asked])
        np.add.at(size, place[document], store.token_bytes[store.offsets[document] + scoring.index.numpy()[asked]])
        done += len(document)
        progress(done, int(tokens.sum()))
    assert done == tokens.sum(), "every token is scored once"
    return Likelihood(order, nats, tokens, size)
