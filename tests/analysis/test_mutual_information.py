"""The estimate against chains whose information is known, the fit against a law that is known."""

from types import SimpleNamespace

import matplotlib.figure
import numpy as np
import pytest

from tandem.analysis.mutual_information import MutualInformation, _classes, _text, distances_to, fit, information
from tandem.corpus import Store, Tokenizer, prepare
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


def test_a_document_that_counts_twice_is_there_twice():
    ids, document = np.random.default_rng(0).integers(3, size=60), np.repeat([0, 1], 30)
    twice = np.concatenate((ids[:30], ids)), np.concatenate((document[:30], document + 1))
    assert information(ids, document, 2, weights=np.array([2, 1])) == pytest.approx(information(*twice, 2))


def test_the_fit_returns_the_law_of_the_paper():
    law = fit([1, 2, 4, 10], [4.98, 4.197605, 3.868649, 3.705916])
    assert law == pytest.approx((3.63, 1.35, -1.25), abs=1e-3)


def test_distances():
    assert distances_to(8) == [*range(1, 9)]
    found = distances_to(128)
    assert found[:16] == [*range(1, 17)] and found[-1] == 128 and len(found) == 32


def test_a_run_is_measured_and_drawn(small_corpus):
    recipe = load("decoder/tiny", [*small_corpus, "network.depth=1", "network.width=16", "training.compile=false"])
    analysis = MutualInformation(MutualInformation.Config(longest=12, resamples=3, slots=4))
    record = analysis.measure(Run(recipe, prepare(recipe.corpus)))
    assert record["distance"] == [*range(1, 13)]
    assert record["information"][0] > 10 * abs(record["shuffled"][0])
    assert record["exponent_low"] <= record["exponent_high"]
    assert record["weights"] == [round(slot ** record["law_exponent"], 6) for slot in (1, 2, 3, 4)]
    axes = matplotlib.figure.Figure().subplots()
    analysis.draw(record, axes)
    assert len(axes.lines) == 4  # the text, its law, the published exponent, shuffled pairs


def measured(folder, lengths, letters=lambda draw, n: draw.choice([*"aab"], size=n), resamples=20):
    """Of a text of random letters, documents of so many tokens."""
    draw = np.random.default_rng(0)
    writer = StoreWriter(folder / "store", Tokenizer.of_bytes())
    writer.append(*writer.tokenizer.encode_batch(["".join(letters(draw, n)) for n in lengths]))
    writer.close(["made up"])
    run = SimpleNamespace(corpus=SimpleNamespace(train=Store(folder / "store")), recipe=SimpleNamespace(seed=0))
    return MutualInformation(MutualInformation.Config(classes=2, resamples=resamples)).measure(run)  # type: ignore[arg-type]


def test_classes_are_the_most_frequent_ids_and_one_for_the_rest():
    assert _classes(np.array([5, 5, 5, 2, 2, 9]), 2).tolist() == [0, 0, 0, 1, 1, 2]
    assert _classes(np.array([7, 1, 1, 3, 4]), 1).tolist() == [1, 0, 0, 1, 1]


def test_the_text_is_that_of_whole_documents_without_their_ends(tmp_path):
    measured(tmp_path, [6, 9])
    store = Store(tmp_path / "store")
    ids, document = _text(store, 1000)
    found = sorted((ids[document == d].tolist() for d in (0, 1)), key=len)
    assert found == [store.document(d)[:-1].tolist() for d in (0, 1)] and [*map(len, found)] == [6, 9]
    assert len(_text(store, 1)[0]) in (6, 9)  # whole, and no more than are needed


def test_the_interval_is_that_of_documents_drawn_again(tmp_path):
    record = measured(tmp_path, [9] * 12, lambda draw, n: np.array([*"ab"])[(draw.random(n) < 0.2).cumsum() % 2], 4)
    ids, document = _text(Store(tmp_path / "store"), 1000)
    classes, draw, exponents = _classes(ids, 2), np.random.default_rng(0), []
    for d in record["distance"]:
        assert information(classes, document, d, shuffled=draw) == record["shuffled"][d - 1]
    for _ in range(4):
        again = np.concatenate([classes[document == d] for d in sorted(draw.integers(12, size=12))])
        found = [information(again, np.repeat(np.arange(12), 9), d) for d in record["distance"]]
        exponents.append(fit(record["distance"], found).exponent)
    low, high = np.quantile(exponents, 0.025), np.quantile(exponents, 0.975)
    assert (record["exponent_low"], record["exponent_high"]) == pytest.approx((low, high), rel=1e-3) and low < high


def test_one_document_has_no_interval(tmp_path):
    record = measured(tmp_path, [200])
    assert record["documents"] == 1 and record["exponent_low"] is record["exponent_high"] is None


def test_a_resample_without_the_longest_document_is_fitted_over_the_distances_of_the_others(tmp_path):
    record = measured(tmp_path, [40] * 60 + [200])
    assert record["distance"][-1] == 128 and record["documents"] == 61
    assert np.isfinite([record["exponent_low"], record["exponent_high"]]).all()


def test_documents_without_four_distances_are_left_out(tmp_path):
    record = measured(tmp_path / "some", [3] * 60 + [5, 200])
    assert record["documents"] == 2 and np.isfinite(record["exponent_low"])
    with pytest.raises(UserError, match="no document has the 6 tokens that this takes; the longest has 5"):
        measured(tmp_path / "none", [1, 4])
