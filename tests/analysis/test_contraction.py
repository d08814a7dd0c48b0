"""The estimators against a map worked out by hand: blocks that are the identity, F(norm(u)) = u / 2."""

from itertools import islice

import numpy as np
import pytest
import torch

from tandem.analysis.contraction import Contraction, last_ratio, movements, passes_needed
from tandem.corpus import prepare
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


def test_ratio_and_passes_by_hand():
    delta = np.array([1, 0.5, 0.25])
    assert last_ratio(delta) == 0.5
    assert last_ratio(np.array([1.0, 0.0])) == 0.0
    assert last_ratio(np.array([1, 0.25, 1e-7, 1e-7]), tolerance=1e-5) == 0.25  # the rest is rounding
    assert [passes_needed(delta, tolerance) for tolerance in (1, 0.3, 0.25, 0.1)] == [1, 3, 3, None]


def test_nothing_moves_after_as_many_passes_as_there_are_tokens():
    network = Case("", ContextReady, ContextReady.Config(width=32, heads=4, depth=1)).build()
    moved = movements(network, pack([[document(7, 1)]]), passes=10)
    assert (moved[7:] == 0).all() and moved[5].max() > 0


def test_a_run_is_measured_and_drawn(small_corpus, tmp_path):
    plots = pytest.importorskip("matplotlib.figure")
    given = ["network.depth=1", "budget=3 steps", "batch.context=32", "training.device=cpu", *small_corpus]
    recipe = load("context_ready/tiny", given)
    run = Run(recipe, prepare(recipe.corpus))
    torch.manual_seed(0)
    for parameter in run.network.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
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
    drawn = {line.get_label(): line for line in axes.figure.axes[1].get_lines()}
    assert [*drawn["perplexity in k passes"].get_ydata()] == [record[f"perplexity_{K}"] for K in (1, 2, 3, 5, 10)]
    assert [*drawn["streaming"].get_ydata()] == [record["perplexity_stream"]] * 2
    figure.savefig(tmp_path / "drawn.png")
