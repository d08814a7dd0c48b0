import itertools
import math

import numpy as np
import pytest
import torch

from tandem.corpus import (
    IGNORE,
    Batch,
    Order,
    Segmentation,
    Store,
    Tokenizer,
    scoring_boundary_rows,
    scoring_rows,
    scoring_streams,
    sentences_of,
)
from tandem.corpus.store import StoreWriter
from tandem.evaluation.likelihood import Likelihood, likelihood, ratio_error, require_bytes
from tandem.networks.decoder import Decoder
from tandem.recipe import UserError, load

TEXTS = ["a short one", "", "é", "x", "naïve " * 12, "The cat sat on the mat. " * 9, "end", "東京 " * 7]


@pytest.fixture
def store(tmp_path):
    writer = StoreWriter(tmp_path / "store", Tokenizer.of_bytes())
    writer.append(*writer.tokenizer.encode_batch(TEXTS))
    writer.close(["made up"])
    return Store(tmp_path / "store")


@pytest.fixture(scope="module")
def network():
    network = Decoder(Decoder.Config(width=32, heads=2, depth=2), 257, 24, torch.Generator().manual_seed(0))
    for parameter in network.parameters():
        parameter.data *= 3
    return network


class Priced:
    """Stands in for a network: a token costs what its id says, whatever came before it."""

    def __init__(self, ids=257):
        self.head = torch.zeros(1)
        self.prices = torch.rand(ids, generator=torch.Generator().manual_seed(0)) + 1

    def scoring(self, store, context, rows, documents, whole):
        return scoring_rows(store, context, rows, documents)

    def score(self, batch: Batch):
        return self.prices[batch.targets.clamp_min(0)] * (batch.targets != IGNORE)


def scored(store, document):
    return store.document(document)[1:].astype(int)


@pytest.mark.parametrize(("context", "rows"), [(2, 3), (7, 1), (24, 2), (64, 3), (1000, 2)])
def test_every_token_after_the_first_is_scored_once(store, context, rows):
    found, prices = likelihood(Priced(), store, context=context, rows=rows), Priced().prices.double().numpy()
    kept = [i for i, text in enumerate(TEXTS) if text]
    assert found.order.tolist() == kept
    np.testing.assert_allclose(found.nats_by_document, [prices[scored(store, i)].sum() for i in kept], rtol=1e-12)
    assert found.tokens_by_document.tolist() == [len(TEXTS[i].encode()) for i in kept]  # its end for its first byte
    assert found.tokens == found.tokens_by_document.sum() and found.documents == len(kept)
    assert found.nats == pytest.approx(found.nats_by_document.sum(), rel=1e-15)


@pytest.mark.parametrize(("context", "rows"), [(7, 1), (24, 2), (1000, 2)])
def test_sums_by_position_are_of_tokens_from_a_power_of_two_to_the_next(store, context, rows):
    found, prices = likelihood(Priced(), store, context=context, rows=rows), Priced().prices.double().numpy()
    nats, tokens = {}, {}
    for document in range(len(TEXTS)):
        for position, token in enumerate(scored(store, document), 1):
            first = 2 ** (len(bin(position)) - 3)
            nats[first], tokens[first] = nats.get(first, 0) + prices[token], tokens.get(first, 0) + 1
    assert [*found.nll_by_position] == sorted(tokens) == [1, 2, 4, 8, 16, 32, 64, 128]  # the longest has 217
    assert found.nll_by_position == pytest.approx({n: nats[n] / tokens[n] for n in tokens}, rel=1e-12)
    part = likelihood(Priced(), store, context=context, rows=rows, documents=3)
    assert found.of(part.order).nll_by_position == pytest.approx(part.nll_by_position, rel=1e-12)


def test_bytes_are_those_of_the_scored_tokens(store):
    found = likelihood(Priced(), store, context=24, rows=2)
    assert found.bytes_by_document.tolist() == [len(text.encode()) - 1 for text in TEXTS if text]
    assert found.bytes == found.bytes_by_document.sum()


def test_documents_whose_scored_tokens_are_no_text_are_refused(tmp_path):
    writer = StoreWriter(tmp_path / "store", Tokenizer.of_bytes())
    writer.append(*writer.tokenizer.encode_batch(["x", "ab", "y", "cd", "ef"]))
    writer.close(["letters.txt"])
    store, refused = Store(tmp_path / "store"), {False: 0, True: 0}
    for documents, prefix in itertools.product(range(1, 6), (False, True)):
        if likelihood(Priced(), store, context=8, rows=2, documents=documents, prefix=prefix).bytes:
            require_bytes(store, 8, documents, "all", prefix)
            continue
        refused[prefix] += 1
        with pytest.raises(UserError, match=rf"letters.txt .*: of {documents} documents? to score only the ends"):
            require_bytes(store, 8, documents, "all", prefix)
    assert 0 < refused[False] < refused[True] < 5


def test_nats_become_nll_and_bits_per_byte():
    ones = np.ones(1, np.int64)
    found = Likelihood(ones, np.array([[2.0, 4.0]]), np.array([[1, 2]]), 8 * ones, np.array([1.5]), np.array([4.5]))
    assert (found.nll_with_boundaries, found.nll_paper) == (2.5, 1.5)
    assert found.nll == 2.0 and found.nll_by_position == {1: 2.0, 2: 2.0}
    assert found.bits_per_byte == pytest.approx(6 / math.log(2) / 8, rel=1e-15)


def test_the_standard_error_of_a_ratio_is_over_documents():
    alike = ratio_error(np.array([1.0, 3.0, 2.0, 4.0]), np.full(4, 2))  # equal weights: that of a mean
    assert alike == pytest.approx(np.std([0.5, 1.5, 1.0, 2.0], ddof=1) / 2, rel=1e-12)
    assert ratio_error(np.array([2.0, 20.0]), np.array([1, 10])) == 0  # a long document and a short one of equal nll
    assert math.isnan(ratio_error(np.array([2.0]), np.array([1])))


def test_short_documents_start_with_no_context_and_long_ones_overlap_by_half(store, network):
    context = 24
    found = likelihood(network, store, context=context, rows=3)
    for document, nats in zip(found.order, found.nats_by_document, strict=True):
        tokens = torch.from_numpy(store.document(document).astype(int))
        expected, asked, first = 0.0, 0, 0
        while asked < len(tokens) - 1:
            window = tokens[first : first + context + 1]
            row = Batch(window[None, :-1], window[None, 1:], torch.zeros(1, len(window) - 1, dtype=torch.long))
            nll = network.score(row)[0].double()
            expected += nll[asked - first :].sum().item()
            asked, first = first + len(nll), first + context // 2
        # float32 sums in other shapes: 1e-6 of about 5 nats a token
        assert nats == pytest.approx(expected, rel=1e-5)


def test_neither_rows_nor_mixed_precision_change_the_score(store, network):
    found = likelihood(network, store, context=24, rows=1)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = likelihood(network, store, context=24, rows=1)
    assert mixed.nats == found.nats
    assert likelihood(network, store, context=24, rows=5).nats == pytest.approx(found.nats, rel=1e-6)


def test_sums_are_float64(store):
    class Large(Priced):
        def score(self, batch):
            return (batch.targets != IGNORE) * torch.full(batch.targets.shape, 2.0**24 + 2)

    found = likelihood(Large(), store, context=24, rows=2)
    assert found.nats == (2**24 + 2) * found.tokens  # a float32 sum keeps 24 bits


def test_a_part_is_the_same_for_everyone_and_within_every_larger_part(store):
    parts = [likelihood(Priced(), store, context=24, rows=2, documents=n).order.tolist() for n in range(1, 9)]
    order = Order(store, 0).epoch(0).documents.tolist()
    assert parts == [[i for i in order[:n] if TEXTS[i]] for n in range(1, 9)]
    assert order != sorted(order)
    whole, everything = (likelihood(Priced(), store, context=24, rows=2, documents=n) for n in (None, 100))
    assert whole.nats == pytest.approx(everything.nats, rel=1e-12) and everything.tokens == whole.tokens


def test_sums_of_a_part_belong_to_its_documents(store):
    whole, part = (likelihood(Priced(), store, context=9, rows=2, documents=n) for n in (None, 5))
    nats = dict(zip(whole.order.tolist(), whole.nats_by_document, strict=True))
    sizes = dict(zip(whole.order.tolist(), whole.bytes_by_document, strict=True))
    np.testing.assert_allclose(part.nats_by_document, [nats[i] for i in part.order.tolist()], rtol=1e-12)
    assert part.bytes_by_document.tolist() == [sizes[i] for i in part.order.tolist()]


def test_progress_ends_at_all_tokens(store):
    seen = []
    found = likelihood(Priced(), store, context=24, rows=1, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) > 3 and seen == sorted(seen) and seen[-1] == (found.tokens, found.tokens)
    assert {total for _, total in seen} == {found.tokens}


def test_no_gradient_is_kept(store, network):
    likelihood(network, store, context=24, rows=2)
    assert all(parameter.grad is None for parameter in network.parameters())


def test_the_halves_for_tuning_and_for_comparison_share_no_document_and_leave_none_out(store):
    options = {"context": 24, "rows": 2}
    halves = {split: likelihood(Priced(), store, split=split, **options) for split in ("all", "comparison", "tuning")}
    orders = {split: found.order.tolist() for split, found in halves.items()}
    assert not set(orders["comparison"]) & set(orders["tuning"])
    assert sorted(orders["comparison"] + orders["tuning"]) == orders["all"]
    assert halves["comparison"].nats + halves["tuning"].nats == pytest.approx(halves["all"].nats, rel=1e-12)
    part = likelihood(Priced(), store, split="tuning", documents=2, **options)
    assert set(part.order) < set(orders["tuning"])  # on the way, too


def test_an_unknown_split_and_no_documents_are_refused(store):
    for asked in ({"split": "test"}, {"documents": 0}, {"documents": -1}):
        with pytest.raises(ValueError, match="splits: all, comparison, tuning; documents: from 1"):
            likelihood(Priced(), store, context=16, rows=2, **asked)


@pytest.mark.parametrize("scoring", [scoring_streams, scoring_boundary_rows])
def test_sentence_ends_are_counted_apart(store, scoring):
    store.segmentation = Segmentation(splitter="every", every=5)
    network = Priced(259)
    network.scoring = lambda *given: scoring(*given[:4])
    found, plain = likelihood(network, store, context=24, rows=2), likelihood(Priced(259), store, context=24, rows=2)
    prices = network.prices.double().numpy()
    np.testing.assert_allclose(found.nats_by_document, plain.nats_by_document, rtol=1e-12)
    assert (found.tokens, found.bytes) == (plain.tokens, plain.bytes)
    ends = [len(sentences_of(store).document(int(i))) - 1 for i in found.order]
    np.testing.assert_allclose(found.end_nats_by_document, [n * prices[257] for n in ends], rtol=1e-12)
    text = [prices[store.document(int(i))[:-1].astype(int)].sum() for i in found.order]
    np.testing.assert_allclose(found.text_nats_by_document, text, rtol=1e-12)
    assert found.nll_with_boundaries == pytest.approx(found.nll + sum(ends) * prices[257] / found.tokens)
    assert plain.nll_with_boundaries == plain.nll and plain.nll_paper is None


@pytest.mark.parametrize("recipe", ["gestalt/tiny", "decoder/boundaries_tiny"])
def test_networks_that_read_sentences_are_asked_no_suffixes_of_rows_without_them(recipe):
    with pytest.raises(UserError, match=r"evaluation.prefix = true: network .* reads sentences, and break points lie"):
        load(recipe, ["evaluation.prefix=true"])
