"""The estimators against a map worked out by hand: blocks that are the identity, F(norm(u)) = u / 2."""

from itertools import islice

import numpy as np
import pytest
import torch

from tandem.analysis import contraction
from tandem.analysis.analysis import chosen_documents
from tandem.analysis.contraction import (
    Contraction,
    before_end,
    distances,
    last_ratio,
    least_constant,
    movements,
    passes_needed,
)
from tandem.corpus import IGNORE, prepare, scoring_rows
from tandem.evaluation.likelihood import likelihood
from tandem.networks.context_ready import ContextReady
from tandem.recipe import load
from tandem.testing.cases import Case, document, halving, pack
from tandem.training.run import Run


def test_movement_of_a_map_that_halves():
    moved = movements(halving(), pack([[document(8, 1)]]), passes=12).numpy()
    delta = moved.max(1)
    # Each pass settles one position more, the first by half of what the others moved
    assert delta.tolist() == [0.5**k for k in range(7)] + [0.5**8] + [0.0] * 4
    assert moved[1].tolist() == [0.0, 0.25] + [0.5] * 6
    assert (last_ratio(delta), last_ratio(before_end(delta, pack([[document(8, 1)]])))) == (0.25, 0.5)


def test_what_is_left_lies_within_the_bounds():
    """Of the example above: c* ends at 1.98828125, and the map contracts by exactly q."""
    network, batch = halving(), pack([[document(8, 1)]])
    e = network.embed(batch.tokens)
    c = list(islice(network.corrections(e, network.wrapped.reader(e, batch), batch.starts), 8))
    left, fixed_point, q, K = float((c[2] - c[7]).detach().abs().max()), float(c[7].detach().max()), 0.5, 3
    delta = movements(network, batch, passes=K).numpy().max(1)
    assert left == 0.23828125
    assert q**K * fixed_point == 0.24853515625
    assert q**K / (1 - q) * delta[0] == q / (1 - q) * delta[-1] == 0.25


def test_least_constant_that_the_last_passes_allow():
    network, batch = halving(), pack([[document(8, 1)]])
    delta, left = movements(network, batch, passes=10).numpy().max(1), distances(network, batch, passes=10)
    assert left.tolist()[:3] == [0.98828125, 0.48828125, 0.23828125] and left[7:].tolist() == [0, 0, 0]
    # Longer rows come closer to the map's own constant, 0.5; a constant that is smaller breaks a bound
    q = least_constant(delta, left)
    assert q == max(a / (a + b) for a, b in zip(left[:8], delta[:8], strict=True)) == 0.98828125 / 1.98828125
    assert least_constant(np.array([1, 0]), np.array([0.5, 1e-9])) == 0.5 / 1.5  # a movement that rounding hides
    assert least_constant(delta, left, tolerance=0.99) == q and least_constant(delta, left, tolerance=1) == 0
    assert least_constant(delta, left, tolerance=0.0625) == q > least_constant(delta[1:], left[1:])


def test_ratio_and_passes_by_hand():
    delta = np.array([1, 0.5, 0.25])
    assert last_ratio(delta) == 0.5
    assert last_ratio(np.array([1.0, 0.0])) == 0.0
    assert last_ratio(np.array([1, 0.25, 1e-7, 1e-7]), tolerance=1e-5) == 0.25  # the rest is rounding
    assert [passes_needed(delta, tolerance, 9) for tolerance in (1, 0.3, 0.25, 0.1)] == [2, 4, 4, None]
    assert [passes_needed(delta, 0.1, T) for T in (2, 3, 4)] == [3, 4, None]  # T corrections are all there are


@pytest.mark.parametrize("tolerance", [1e-2, 1e-5, 0.0])
def test_passes_are_counted_as_by_a_session(tolerance):
    config = ContextReady.Config(width=32, heads=4, depth=2, init="torch", tied=False, tolerance=tolerance)
    network, text = Case("", ContextReady, config).fresh(), document(24, 2)
    session = network.session(1)
    session.prefill([text])
    delta = movements(network, pack([[text]]), passes=24).numpy().max(1)
    assert passes_needed(delta, tolerance, 24) == session.passes


def test_nothing_moves_after_as_many_passes_as_there_are_tokens():
    network = Case("", ContextReady, ContextReady.Config(width=32, heads=4, depth=1)).build()
    moved = movements(network, pack([[document(7, 1)]]), passes=10)
    assert (moved[7:] == 0).all() and moved[5].max() > 0


@pytest.mark.parametrize("tolerance", [0.0, 1e-7])
def test_rounding_is_no_movement(tolerance):
    network, batch = halving().float(), pack([[document(64, 1)]])
    with torch.no_grad():
        network.wrapped.table.weight.normal_(generator=torch.Generator().manual_seed(1))
    delta = movements(network, batch, passes=40).numpy().max(1)
    assert last_ratio(delta, tolerance) == pytest.approx(0.5, abs=0.1)
    assert passes_needed(delta, tolerance, 64) in range(21, 27)  # 0.5 ** 23 is 1.2e-7


def test_a_batch_moves_as_far_as_the_row_that_moves_most():
    network = Case("", ContextReady, ContextReady.Config(width=32, heads=4, depth=1)).build()
    texts = [document(8, seed) for seed in (1, 2, 3)]
    alone = [movements(network, pack([[text]]), passes=5) for text in texts]
    together = movements(network, pack([[text] for text in texts]), passes=5)
    torch.testing.assert_close(together, torch.stack(alone).amax(0))


@pytest.fixture(scope="module")
def run(small_corpus):
    given = ["network.depth=1", "budget=3 steps", "batch.context=32", "training.device=cpu", "evaluation.rows=2"]
    recipe = load("context_ready/tiny", [*given, *small_corpus])
    run = Run(recipe, prepare(recipe.corpus))
    torch.manual_seed(0)
    for parameter in run.network.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return run


def test_numbers_of_several_batches_by_hand(run):
    record = Contraction(Contraction.Config(passes=6, batches=3, documents=8)).measure(run)
    network, store = run.network, run.corpus.validation
    batches = [rows.batch for rows in scoring_rows(store, 32, 2, chosen_documents(store, 8, shortest=2))]
    moved = [movements(network, batch, 6).numpy() for batch in batches[:3]]
    assert len(batches) > 3
    largest = np.array([[pass_T.max() for pass_T in moved_KT] for moved_KT in moved])
    np.testing.assert_allclose(record["delta"], largest.mean(0))
    np.testing.assert_allclose(record["delta_by_position"], sum(moved) / 3, rtol=1e-6)
    tolerance = network.config.tolerance
    assert record["rho"] == pytest.approx(np.mean([last_ratio(delta_K, tolerance) for delta_K in largest]))
    left = [distances(network, batch, 6) for batch in batches[:3]]
    q = [least_constant(*pair, tolerance) for pair in zip(largest, left, strict=True)]
    assert record["q_at_least"] == max(q) > min(q)
    nll = record["nats_per_token"]
    assert nll["stream"] == pytest.approx(likelihood(network, store, context=32, rows=2, documents=8).nll, rel=1e-6)
    with torch.no_grad():
        sums = [network.score(batch, passes=1).double().sum().item() for batch in batches]
    assert nll["1"] == pytest.approx(sum(sums) / (store.lengths[chosen_documents(store, 8, 2)] - 1).sum())


def test_of_passes_the_slowest_batch_tells_and_of_ratios_the_mean(run, monkeypatch):
    moved, scored = iter([[4, 2, 1e-9], [1, 1e-9, 1e-9], [4, 3, 1e-9]]), {}
    monkeypatch.setattr(contraction, "movements", lambda *_: torch.tensor(next(moved))[:, None].expand(3, 32))
    monkeypatch.setattr(contraction, "nats_per_token", lambda _, given, passes: scored.update({passes: given}) or 0.0)
    record = Contraction(Contraction.Config(passes=3, batches=3, documents=None)).measure(run)
    assert record["passes_to_tolerance"] == 4
    assert record["rho"] == pytest.approx((2 / 4 + 0 + 3 / 4) / 3)  # the means would have 5 / 9
    assert record["delta"] == pytest.approx([3, 5 / 3, 1e-9])
    lengths = run.corpus.validation.lengths  # no number of documents: all of them
    assert sum(int((batch.targets != IGNORE).sum()) for batch in scored["stream"]) == (lengths - 1).sum()


def test_a_run_is_measured_and_drawn(run, tmp_path):
    plots = pytest.importorskip("matplotlib.figure")
    analysis = Contraction(Contraction.Config(passes=6, batches=2, documents=3))
    record = analysis.measure(run)
    assert [*record["nats_per_token"]] == ["1", "2", "3", "5", "10", "stream"]
    assert [record[f"perplexity_{K}"] for K in record["nats_per_token"]] == [
        pytest.approx(np.exp(nats)) for nats in record["nats_per_token"].values()
    ]
    nll = [*record["nats_per_token"].values()]
    assert abs(nll[4] - nll[5]) < abs(nll[0] - nll[5])
    assert 0 < record["rho"] < 1 and record["correction_share"] == nll[0] - nll[5]
    figure = plots.Figure()
    axes = figure.subplots()
    analysis.draw(record, axes)
    movement, slope = (line.get_ydata() for line in axes.get_lines())
    assert [*movement] == record["delta"]
    assert [*slope] == pytest.approx([record["delta"][0] * record["rho"] ** k for k in range(6)])
    drawn = {line.get_label(): line for line in axes.figure.axes[1].get_lines()}
    assert [*drawn["perplexity in k passes"].get_ydata()] == [record[f"perplexity_{K}"] for K in (1, 2, 3, 5, 10)]
    assert [*drawn["streaming"].get_ydata()] == [record["perplexity_stream"]] * 2
    figure.savefig(tmp_path / "drawn.png")
