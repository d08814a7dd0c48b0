"""Likelihood by the number of the sentence: told by hand from scores, for networks that read sentences or do not."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from typed import tandem

from tandem.analysis.analysis import chosen_documents
from tandem.analysis.sentences import FIRST, SentenceNumbers
from tandem.comparison.trained import open_trained
from tandem.corpus import sentences_of
from tandem.corpus.given import GivenTexts
from tandem.networks.decoder import Decoder
from tandem.networks.encoder_decoder import EncoderDecoder
from tandem.networks.gestalt import Gestalt
from tandem.recipe import UserError
from tandem.testing.cases import VOCABULARY, Case

LENGTHS = [[3, 4, 2, 5, 2, 3, 2], [4, 3], [2, 2, 2, 2]]


def measured(network, given, documents=None):
    recipe = SimpleNamespace(batch=SimpleNamespace(context=16), evaluation=SimpleNamespace(rows=2))
    run = SimpleNamespace(
        network=network, corpus=SimpleNamespace(validation=given), recipe=recipe, device=SimpleNamespace(value="cpu")
    )
    analysis, told = SentenceNumbers(SentenceNumbers.Config(documents=documents)), []
    analysis.told = lambda done, total: told.append((done, total))
    record = analysis.measure(run)
    assert told[-1][0] == told[-1][1]
    return record


def test_there_are_two_columns_for_each_doubling():
    assert FIRST[:12].tolist() == [1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64] and (np.diff(FIRST) > 0).all()


@pytest.mark.parametrize("kind", [Decoder, Gestalt])
def test_nats_of_each_sentence_by_hand(kind):
    """Whatever the order in which documents are scored, whole or in windows of 16 tokens, of which one has 21."""
    generator = torch.Generator().manual_seed(0)
    texts = [[torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in text] for text in LENGTHS]
    network, given = Case("", kind, next(iter(kind.tiny().values()))).build(), GivenTexts(texts, VOCABULARY)
    nats, tokens = np.zeros((2, 7, 3))
    with torch.no_grad():
        for scoring in network.scoring(given, 16, 2):
            nll = network.score(scoring.batch)
            for document, index, value in zip(*map(torch.ravel, (scoring.document, scoring.index, nll)), strict=True):
                if index > 0:
                    number = int((np.cumsum(LENGTHS[document]) <= int(index)).sum())
                    nats[number, document] += value
                    tokens[number, document] += 1
    record = measured(network, given)
    columns = record["by_sentence"]
    assert [(c["first"], c["last"], c["documents"], c["tokens"]) for c in columns] == [
        (1, 1, 3, 2 + 3 + 1),  # nobody asks for the first token
        (2, 2, 3, 4 + 3 + 2),
        (3, 3, 2, 2 + 2),
        (4, 5, 2, 5 + 2 + 2),
        (6, 7, 1, 3 + 2),
    ]
    expected = [nats[0], nats[1], nats[2], nats[3:5].sum(0), nats[5:].sum(0)]
    sizes = [tokens[0], tokens[1], tokens[2], tokens[3:5].sum(0), tokens[5:].sum(0)]
    assert [c["nats_per_token"] for c in columns] == pytest.approx(
        [n.sum() / t.sum() for n, t in zip(expected, sizes, strict=True)]
    )
    # Of two documents, each is what is left without the other
    apart = [n / t for n, t in zip(expected[3][[0, 2]], sizes[3][[0, 2]], strict=True)]
    assert columns[3]["error"] == pytest.approx(abs(apart[0] - apart[1]) / 2) and columns[4]["error"] is None
    assert record["nats_per_token"] == pytest.approx(nats.sum() / tokens.sum())


def test_a_run_is_asked_in_the_sentences_of_its_corpus(trained):
    pytest.importorskip("pysbd")
    done = tandem("analyse", "sentences", trained, "documents=3")
    assert done.exit_code == 0, done.output
    record = json.loads((trained / "analysis/sentences.json").read_text())
    first = record["by_sentence"][0]
    store = open_trained(trained).corpus.validation
    chosen = chosen_documents(store, 3, shortest=2)
    assert first["documents"] == 3
    assert first["tokens"] == sum(int(sentences_of(store).document(i)[1]) - 1 for i in chosen)
    assert "by_sentence" in done.stdout and f"{first['nats_per_token']:#.4g}" in done.stdout
    axes = Figure().subplots()
    SentenceNumbers(SentenceNumbers.Config()).draw(record, axes)
    assert axes.containers[0].lines[0].get_ydata().tolist() == [c["nats_per_token"] for c in record["by_sentence"]]


def test_a_network_that_reads_ahead_says_so():
    network = Case("", EncoderDecoder, EncoderDecoder.tiny()["house"]).build()
    with pytest.raises(UserError, match="this network writes after contexts; give a run of another network"):
        measured(network, GivenTexts([[[1, 2, 3]]], VOCABULARY))
