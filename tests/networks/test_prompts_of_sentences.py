"""The prompt of a session is what the network's view makes of the text."""

import sys

import pytest
import torch

from tandem.corpus import Segmentation, Tokenizer, segment
from tandem.corpus.store import Store, StoreWriter
from tandem.generation.generate import stream_text
from tandem.generation.sampling import Sampler
from tandem.networks.boundary_decoder import BoundaryDecoder
from tandem.networks.gestalt import Gestalt
from tandem.testing.cases import Case

pytest.importorskip("pysbd")

TEXT = (
    "The old cat sat on the mat and watched the rain, which had fallen all morning, run down the window; nobody came. "
    "No. Yes! It rained.\n\nOh. The dog slept by the door of the house until the bell rang (twice) and the cat ran. "
    "He went home"
)
TOKENIZER = Tokenizer.train([TEXT * 20], 330)


def network_of(cls, segmentation, **settings):
    network = Case("", cls, next(iter(cls.tiny().values())), TOKENIZER.vocabulary).build()
    network.config = network.config.model_copy(update=settings)
    network.segmentation = segmentation
    return network


def store_of(folder, segmentation) -> Store:
    writer = StoreWriter(folder, TOKENIZER)
    writer.append(*TOKENIZER.encode_batch([TEXT]))
    writer.close([])
    return Store(folder, segmentation)


def read_by(network, store) -> list[int]:
    """The document as the network reads it to score it, sentence ends included, the document end left out."""
    (scoring,) = network.scoring(store, 1000, 1)
    if isinstance(network, BoundaryDecoder):
        tokens = scoring.batch.tokens[0].tolist()
        return tokens[: tokens.index(store.eos)]
    (lengths,), made = scoring.batch.lengths, []
    for part in scoring.batch.tokens.split(lengths):
        made += part.tolist() if len(part) == network.config.cap else [*part.tolist(), network.end]
    return made[: made.index(store.eos)]


@pytest.mark.parametrize("cls", [Gestalt, BoundaryDecoder])
@pytest.mark.parametrize("given", [{"cap": 16}, {}, {"splitter": "every", "every": 5}], ids=str)
def test_a_prompt_is_what_the_view_makes_of_its_text(cls, given, tmp_path, monkeypatch):
    segmentation = Segmentation(**given)
    network, store = network_of(cls, segmentation, cap=64), store_of(tmp_path / "store", segmentation)
    expected = read_by(network, store)
    if segmentation.splitter == "every":
        monkeypatch.setitem(sys.modules, "pysbd", None)  # spans are counted, not found
    elif given:
        counts = segment(store, segmentation).manifest.counts
        assert counts["cut"] and counts["merged"]
    assert network.prompt(TOKENIZER, TEXT) == expected


@pytest.mark.parametrize("cls", [Gestalt, BoundaryDecoder])
def test_a_prompt_by_itself_is_cut_by_the_defaults(cls, tmp_path):
    network = network_of(cls, None, cap=16)
    cap = 16 if cls is Gestalt else 64  # never more than a network takes
    assert network.prompt(TOKENIZER, TEXT) == read_by(network, store_of(tmp_path / "store", Segmentation(cap=cap)))
    assert network.prompt(TOKENIZER, "") == [network.vocabulary + (cls is BoundaryDecoder)]  # [EOS], [BOS]


def test_the_last_sentence_of_a_prompt_is_open_and_so_never_too_short():
    network = network_of(Gestalt, Segmentation(cap=16))
    text, ids = "It rained. He", TOKENIZER.encode
    assert len(ids(" He")) < 3
    assert network.prompt(TOKENIZER, text) == [*ids("It rained."), network.end, *ids(" He")]


def test_an_empty_text_begins_as_texts_do():
    """After [BOS] alone, or the learned start of a stream."""
    network = network_of(Gestalt, Segmentation(cap=16))
    opened, begun = network.session(1), network.session(1)
    logits = opened.prefill([network.prompt(TOKENIZER, "")])
    begun.step(torch.tensor([5]))
    assert opened.known.tolist() == [0] and opened.held.tolist() == [1]
    assert torch.equal(opened.step(torch.tensor([5])), begun.logits) and not torch.equal(logits, begun.logits)


def test_pieces_of_a_text_count_the_sentences_that_were_closed_by_force():
    """With a cap of one token, every token that was read, but not the last one drawn."""
    options = {"sampler": Sampler(Sampler.Config()), "max_tokens": 9, "rows": 2}
    network, prompts = network_of(Gestalt, Segmentation(cap=1), cap=1), ["", "It rained.", "He"]
    read = [0, *(len(TOKENIZER.encode(prompt)) for prompt in prompts[1:])]
    pieces = list(stream_text(network, TOKENIZER, prompts, **options))
    assert {piece.row for piece in pieces if piece.end} == {0, 1, 2}
    assert all(piece.closed_by_force == read[piece.row] + piece.tokens - 1 for piece in pieces)
    others = stream_text(network_of(BoundaryDecoder, Segmentation()), TOKENIZER, prompts, **options)
    assert {piece.closed_by_force for piece in others} == {None}


def test_prompts_have_no_given_sentences():
    network = network_of(Gestalt, Segmentation(splitter="given", cap=16))
    assert network.prompt(TOKENIZER, TEXT) == network_of(Gestalt, Segmentation(cap=16)).prompt(TOKENIZER, TEXT)
