"""The estimate against chains whose information is known, the fit against a law that is known."""

import math
from types import SimpleNamespace

import matplotlib.figure
import numpy as np
import pytest

from tandem.analysis.mutual_information import MutualInformation, _classes, _text, distances_to, fit, information
from tandem.corpus import Order, Store, Tokenizer, documents_to_read, prepare
from tandem.corpus.store import StoreWriter
from tandem.recipe import UserError, load
from tandem.training.run import Run

N = 1_000_000
ONE = np.zeros(N, int)


@pytest.fixture(scope="module")
def chain():
    """Two states, each left with probability 0.1."""
    return np.cumsum(np.random.default_rng(0).random(N) < 0.1) % 2


@pytest.mark.parametrize(("distance", "nats"), [(1, 0.368064), (2, 0.221754), (4, 0.086405), (8, 0.014141)])
def test_a_chain_of_two_states(chain, distance, nats):
    assert information(chain, ONE, distance) == pytest.approx(nats, abs=0.003)


def test_independent_tokens_and_shuffled_pairs_have_none(chain):
    draw = np.random.default_rng(1)
    assert abs(information(draw.integers(64, size=N), ONE, 3)) < 2e-4  # 2.0e-3 without the correction
    assert abs(information(chain, ONE, 1, shuffled=draw)) < 1e-5


def test_pairs_lie_inside_one_document():
    """Each document repeats one id: across documents there is nothing to learn, inside everything."""
    ids = np.repeat(np.random.default_rng(0).integers(4, size=5000), 2)
    document = np.repeat(np.arange(5000), 2)
    assert information(ids, document, 1) == pytest.approx(np.log(4), abs=0.01)
    assert information(ids, 0 * document, 1) < 0.6


def test_the_fit_returns_the_law_of_the_paper():
    law = fit([1, 2, 4, 10], [4.98, 4.197605, 3.868649, 3.705916])
    assert law == pytest.approx((3.63, 1.35, -1.25), abs=1e-3)


def test_distances():
    assert distances_to(8) == [*range(1, 9)]
    found = distances_to(128)
    assert found[:16] == [*range(1, 17)] and found[-1] == 128 and len(found) == 32


def test_a_run_is_measured_and_drawn(small_corpus):
    recipe = load("decoder/tiny", [*small_corpus, "network.depth=1", "network.width=16", "training.compile=false"])
    analysis = MutualInformation(MutualInformation.Config(longest=12, groups=3, slots=4))
    record = analysis.measure(Run(recipe, prepare(recipe.corpus)))
    assert record["distance"] == [*range(1, 13)]
    assert record["information"][0] > 10 * abs(record["shuffled"][0])
    assert record["exponent_low"] <= record["exponent_high"]
    assert record["weights"] == [round(slot ** record["law_exponent"], 6) for slot in (1, 2, 3, 4)]
    axes = matplotlib.figure.Figure().subplots()
    analysis.draw(record, axes)
    assert len(axes.lines) == 4  # the text, its law, the published exponent, shuffled pairs


def measured(folder, lengths, letters=lambda draw, n: draw.choice([*"aab"], size=n), groups=20):
    """Of a text of random letters, documents of so many tokens."""
    draw = np.random.default_rng(0)
    writer = StoreWriter(folder / "store", Tokenizer.of_bytes())
    writer.append(*writer.tokenizer.encode_batch(["".join(letters(draw, n)) for n in lengths]))
    writer.close(["made up"])
    run = SimpleNamespace(corpus=SimpleNamespace(train=Store(folder / "store")), recipe=SimpleNamespace(seed=0))
    return MutualInformation(MutualInformation.Config(classes=2, groups=groups)).measure(run)


def test_classes_are_the_most_frequent_ids_and_one_for_the_rest():
    assert _classes(np.array([5, 5, 5, 2, 2, 9]), 2).tolist() == [0, 0, 0, 1, 1, 2]
    assert _classes(np.array([7, 1, 1, 3, 4]), 1).tolist() == [1, 0, 0, 1, 1]


def test_the_text_is_that_of_whole_documents_without_their_ends(tmp_path):
    measured(tmp_path, [6, 9])
    store = Store(tmp_path / "store")
    ids, document = _text(Order(store, 0), 1000)
    found = sorted((ids[document == d].tolist() for d in (0, 1)), key=len)
    assert found == [store.document(d)[:-1].tolist() for d in (0, 1)] and [*map(len, found)] == [6, 9]
    assert len(_text(Order(store, 0), 1)[0]) in (6, 9)  # whole, and no more than are needed


def switching(draw, n):
    """Two letters, each left with probability 0.2."""
    return np.array([*"ab"])[(draw.random(n) < 0.2).cumsum() % 2]


def test_the_text_is_what_a_run_reads(tmp_path):
    """Of two sources 60 documents each, by their shares until one is used up; of a part of a corpus, that part."""
    tokenizer = Tokenizer.of_bytes()
    for name, shares in (("mixed", {"a": 0.75, "b": 0.25}), ("one", None)):
        writer = StoreWriter(tmp_path / name, tokenizer, shares)
        for number, letter in enumerate("ab"):
            writer.append(*tokenizer.encode_batch([letter * 9] * 60), [number] * 60 if shares else ())
        writer.close(["made up"])
    a, b = tokenizer.encode("ab").tolist()
    ids, _ = _text(Order(Store(tmp_path / "mixed"), 0), 10**6)
    assert [int((ids == letter).sum()) for letter in (a, b)] == pytest.approx([9 * 60, 9 * 20], abs=9)
    part = Store(tmp_path / "one")
    part.most = 300
    assert len(_text(Order(part, 0), 10**6)[0]) == 9 * 30 == 9 * len(documents_to_read(part))


def test_the_interval_is_that_of_fits_without_each_group(tmp_path):
    record = measured(tmp_path, [40] * 12, switching, groups=4)
    ids, document = _text(Order(Store(tmp_path / "store"), 0), 1000)
    classes, draw, exponents = _classes(ids, 2), np.random.default_rng(0), []
    for d, floor in zip(record["distance"], record["shuffled"], strict=True):
        assert information(classes, document, d, shuffled=draw) == floor
    group = draw.permutation(12) % 4
    for g in range(4):
        rest = np.concatenate([classes[document == d] for d in range(12) if group[d] != g])
        found = [information(rest, np.repeat(np.arange(9), 40), d) for d in record["distance"]]
        exponents.append(fit(record["distance"], found).exponent)
    half = 3.182446 * math.sqrt(3 / 4 * np.square(exponents - np.mean(exponents)).sum())  # t of 3 degrees of freedom
    low, high = record["law_exponent"] - half, record["law_exponent"] + half
    assert (record["exponent_low"], record["exponent_high"]) == pytest.approx((low, high), rel=1e-5) and low < high


def test_one_document_has_no_interval(tmp_path):
    record = measured(tmp_path, [200])
    assert record["documents"] == 1 and record["exponent_low"] is record["exponent_high"] is None


def test_without_the_longest_document_a_law_is_fitted_over_the_distances_of_the_others(tmp_path):
    record = measured(tmp_path, [40] * 60 + [200])
    assert record["distance"][-1] == 128 and record["documents"] == 61
    assert np.isfinite([record["exponent_low"], record["exponent_high"]]).all()


def test_documents_without_four_distances_are_left_out(tmp_path):
    record = measured(tmp_path / "some", [3] * 60 + [5, 200])
    assert record["documents"] == 2 and np.isfinite(record["exponent_low"])
    with pytest.raises(UserError, match="no document has the 6 tokens that this takes; the longest has 5"):
        measured(tmp_path / "none", [1, 4])
