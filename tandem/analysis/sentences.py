"""Likelihood by the number of the sentence in its document: what earlier sentences are worth to later ones.

    sentences          1      2      3      4-5    6-7    8-10   11-15  ...      two columns for each doubling
    nats per token     5.1    4.6    4.5    ...

Sentences are those that the run's corpus is configured to have, or the default ones, so every network that predicts
whole documents can be asked: one that reads sentence by sentence, whose memory holds so many of them, and a decoder,
whose context holds so many tokens. Sentence ends are not counted. Only long documents have later sentences, so the
columns differ in their documents, too; what memory does shows between two networks, of equal `corpus.sentences`.

Source: Thought Gestalt (arXiv 2512.25026) trains on streams of up to 30 sentences at first, and evaluates documents
whole; the question whether later sentences suffer is ours.
Cost: the documents are scored once.
Letters: N columns, D documents.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from pydantic import Field

from tandem.analysis.analysis import Analysis, chosen_documents, jackknife
from tandem.corpus import sentences_of
from tandem.recipe import Settings, UserError, register
from tandem.training.run import Run

FIRST = np.unique(np.round(2 ** np.arange(0, 40, 0.5)).astype(np.int64))
"""The first sentence of each column, counted from 1: 1 2 3 4 6 8 11 16 23 32 ..."""


@register("analysis", "sentences")
class SentenceNumbers(Analysis):
    """Nats per token by the number of the sentence in its document, for networks that predict whole documents."""

    class Config(Settings):
        documents: int | None = Field(None, ge=1)
        """Held-out documents that are scored; null: all."""

    @torch.no_grad()
    def measure(self, run: Run) -> dict[str, Any]:
        """By column: documents that have such sentences, their tokens, nats per token and its standard error."""
        network, store, recipe = run.network, run.corpus.validation, run.recipe
        if network.suffixes_only:
            told = "documents are predicted from their second token on, and this network writes after contexts"
            raise UserError(f"analyse sentences: {told}; give a run of another network")
        chosen, sentences = chosen_documents(store, self.config.documents, shortest=2), sentences_of(store)
        place, asked = {i: at for at, i in enumerate(chosen)}, int((store.lengths[chosen] - 1).sum())
        nats_ND, tokens_ND = np.zeros((2, len(FIRST), len(chosen)))
        for scoring in network.scoring(store, recipe.batch.context, recipe.evaluation.rows, chosen):
            nll = network.score(scoring.batch.to(run.device.value)).cpu().numpy()
            document, index = scoring.document.numpy(), scoring.index.numpy()
            for i in np.unique(document[index > 0]).tolist():
                scored = (document == i) & (index > 0)
                number = np.searchsorted(sentences.document(i), index[scored], "right")
                column = np.searchsorted(FIRST, number, "right") - 1
                np.add.at(nats_ND[:, place[i]], column, nll[scored])
                np.add.at(tokens_ND[:, place[i]], column, 1)
            self.told(int(tokens_ND.sum()), asked)
        columns = []
        for (first, following), nats_D, tokens_D in zip(pairwise(FIRST.tolist()), nats_ND, tokens_ND, strict=False):
            if total := int(tokens_D.sum()):
                nats, has = nats_D.sum(), tokens_D > 0
                others = (nats - nats_D[has]) / np.maximum(total - tokens_D[has], 1)
                columns.append(
                    {
                        "first": first,
                        "last": following - 1,
                        "documents": int(has.sum()),
                        "tokens": total,
                        "nats_per_token": float(nats / total),
                        "error": jackknife(others) if len(others) > 1 else None,
                    }
                )
        return {"nats_per_token": float(nats_ND.sum() / tokens_ND.sum()), "by_sentence": columns}

    def draw(self, record: dict[str, Any], axes: Any) -> None:
        """Nats per token by the first sentence of each column, with twice their standard error."""
        columns = record["by_sentence"]
        first, nats = ([column[key] for column in columns] for key in ("first", "nats_per_token"))
        axes.errorbar(first, nats, [2 * (column["error"] or 0.0) for column in columns], fmt="o-", capsize=2)
        axes.axhline(record["nats_per_token"], color="grey", linestyle=":", label="all sentences")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set(xlabel="number of the sentence in its document", ylabel="nats per token")
        axes.legend(frameon=False)
