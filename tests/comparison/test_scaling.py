"""Fits against the papers' printed numbers, against laws that made the data, and intervals against the truth."""

import math
from dataclasses import asdict, replace

import numpy as np
import pytest

pytest.importorskip("scipy")

from tandem.comparison.scaling import Law, Line, Measured, fitted, frontier, interval

# Perplexity by tokens and by parameters: Thought Gestalt (arXiv 2512.25026), tables B.1a and B.1b.
TOKENS = [12e6, 20e6, 30e6, 50e6]
BY_TOKENS = {"gpt2": [50.9, 38.1, 30.9, 24.0], "gestalt": [49.5, 37.1, 29.8, 23.2]}
PARAMETERS = [0.34e6, 1.3e6, 5.4e6, 21.3e6]
BY_PARAMETERS = {"gpt2": [104.8, 68.7, 42.4, 28.8], "gestalt": [97.7, 59.8, 37.8, 26.8]}
BOUNDARIES = {20e6: 36.6, 30e6: 30.3, 50e6: 23.7}  # table B.2


def runs(axis, xs, perplexities):
    return [Measured(**({"parameters": 1, "tokens": 1} | {axis: x}), flops=x, nats=math.log(p))
            for x, p in zip(xs, perplexities, strict=True)]  # fmt: skip


@pytest.mark.parametrize(
    ("axis", "xs", "table", "exponents", "by_lines", "as_measured"),
    [
        ("tokens", TOKENS, BY_TOKENS, (0.1486, 0.1515), (1.047, 1.058, 1.066, 1.077), (1.048, 1.054, 1.071, 1.076)),
        ("parameters", PARAMETERS, BY_PARAMETERS, (0.0793, 0.0805), (1.334, 1.361, 1.391, 1.421),
         (1.278, 1.395, 1.505, 1.337)),
    ],
)  # fmt: skip
def test_exponents_and_multipliers_are_those_of_thought_gestalt(axis, xs, table, exponents, by_lines, as_measured):
    gpt2, gestalt = (Line.along(axis)(runs(axis, xs, table[name])) for name in ("gpt2", "gestalt"))
    assert (gpt2.b, gestalt.b) == pytest.approx(exponents, abs=5e-5)
    assert [gpt2.multiplier(gestalt.at(x), x) for x in xs] == pytest.approx(by_lines, abs=5e-4)
    measured = [gpt2.multiplier(math.log(p), x) for x, p in zip(xs, table["gestalt"], strict=True)]
    assert measured == pytest.approx(as_measured, abs=5e-4)


def test_a_single_point_and_an_exponent_make_a_line_too():
    gestalt = dict(zip(TOKENS, BY_TOKENS["gestalt"], strict=True))
    found = []
    for tokens, perplexity in BOUNDARIES.items():
        line = Line("tokens", math.log(perplexity) * tokens**0.1486, 0.1486)
        found.append(line.multiplier(math.log(gestalt[tokens]), tokens))
    assert found == pytest.approx([0.975, 1.033, 1.047], abs=5e-4)


def grid(law, noise=0.0, seed=0):
    draw = np.random.default_rng(seed)
    cells = [Measured(N, D, 6 * N * D, 0.0) for N in (1e6, 3e6, 1e7, 3e7) for D in (2e7, 6e7, 2e8, 6e8)]
    return [run._replace(nats=float(x + noise * draw.normal())) for run, x in zip(cells, law.loss(cells), strict=True)]


TRUE = Law(E=1.7, A=60.0, alpha=0.32, B=400.0, beta=0.36)


STEEP = Law(E=1.993, A=1e6**0.875, alpha=0.875, B=2e7**0.438, beta=0.438)
"""The search for its exponents starts at 1.0, of which the logarithm is 0."""


@pytest.mark.parametrize("law", [TRUE, STEEP])
def test_a_law_is_found_in_losses_that_it_made(law):
    starts = [law, replace(law, alpha=0.01), replace(law, beta=5.0)]
    for found in (Law.to(grid(law), start) for start in (None, *starts)):  # also at the bounds of the search
        assert asdict(found) == pytest.approx(asdict(law), rel=1e-3)
        assert found.loss(grid(law)) == pytest.approx(law.loss(grid(law)), abs=1e-6)


def test_nothing_in_a_law_is_negative():
    """Losses that would fall below nothing: E is 0, not less."""
    runs = [run._replace(nats=30 * run.parameters**-0.1 + 40 * run.tokens**-0.1 - 2) for run in grid(TRUE)]
    found = Law.to(runs)
    assert min(found.E, found.A, found.B) >= 0
    assert found.loss(runs) == pytest.approx([run.nats for run in runs], abs=0.1)


def test_a_law_says_how_much_more_would_have_done():
    better = Law(TRUE.E, TRUE.A, TRUE.alpha, TRUE.B * 0.8**TRUE.beta, TRUE.beta)  # as if it had read a quarter more
    one = Measured(3e6, 6e7, 0, 0)
    nats = float(better.loss([one])[0])
    assert TRUE.tokens(nats, one.parameters) / one.tokens == pytest.approx(1.25, rel=1e-9)
    assert TRUE.size(float(TRUE.loss([one])[0]), one.tokens) == pytest.approx(one.parameters, rel=1e-9)
    assert TRUE.tokens(TRUE.E, 1e6) == math.inf and TRUE.size(TRUE.E, 1e9) == math.inf


@pytest.mark.parametrize(("runs", "level", "least", "most"), [(8, 0.05, 0.83, 0.99), (4, 0.32, 0.50, 0.86)])
def test_intervals_of_a_line_hold_the_truth_as_often_as_they_say(runs, level, least, most):
    """100 studies: intervals of the exponent, within 4 standard errors of a binomial and its bias."""
    true, xs, held = Line("tokens", 40.0, 0.15), np.geomspace(1e6, 1e8, runs), 0
    for seed in range(100):
        noise = np.random.default_rng(1000 + seed).normal(0, 0.01, len(xs))
        made = [Measured(1, x, x, true.at(x) * math.exp(e)) for x, e in zip(xs, noise, strict=True)]
        fit = fitted({"": made}, Line.along("tokens"), level, draws=100, seed=seed)[""]
        found = fit.interval(lambda line: line.b, level)
        held += found.low <= true.b <= found.high
    assert least <= held / 100 <= most


def test_more_seeds_do_not_hide_that_a_line_does_not_fit():
    """A floor bends the losses: over 4 cells, 50 exact seeds of each tell as little about the exponent as one."""
    cells = [Measured(1, x, x, 2.5 + 1.5 * (x / 1e6) ** -0.3) for x in (1e6, 2e6, 4e6, 8e6)]
    one, many = (
        fitted({"": cells * n}, Line.along("tokens"), cells={"": [*range(4)] * n})[""].interval(lambda line: line.b)
        for n in (1, 50)
    )
    assert many == pytest.approx(one)
    as_cells_of_their_own = fitted({"": cells * 50}, Line.along("tokens"))[""].interval(lambda line: line.b)
    assert as_cells_of_their_own.high - as_cells_of_their_own.low < 0.1 * (one.high - one.low)


def test_a_low_level_takes_more_draws():
    cells = [Measured(1, x, x, 40 * x**-0.15) for x in (1e6, 2e6, 4e6)]
    assert [len(fitted({"": cells}, Line.along("tokens"), level)[""].draws) for level in (0.05, 0.01)] == [200, 1000]


def test_the_interval_of_a_law_holds_it_and_narrows_with_the_noise():
    made = {str(seed): grid(TRUE, 0.01, seed) for seed in range(6)} | {"fine": grid(TRUE, 0.001)}
    found = {name: fit.interval(lambda law: law.E) for name, fit in fitted(made, Law.to, draws=30).items()}
    assert sum(of.low <= TRUE.E <= of.high for of in found.values()) >= 6
    assert all(of.low < of.value < of.high for of in found.values())
    widths = [of.high - of.low for of in found.values()]
    assert widths[-1] < min(widths[:-1]) / 3


def test_methods_are_drawn_together():
    """What a cell gives both methods cancels: the multiplier is known better than either line."""
    base, noise = Line("tokens", 40.0, 0.15), np.random.default_rng(0).normal(0, 0.02, 8)
    shared = [(x, base.at(x) * math.exp(e)) for x, e in zip(np.geomspace(1e6, 1e8, 8), noise, strict=True)]
    gains = {"base": 1.0, "method": 0.99}
    made = {name: [Measured(1, x, x, gain * nats) for x, nats in shared] for name, gain in gains.items()}
    found = fitted(made, Line.along("tokens"), draws=200)
    draws = [b.multiplier(m.at(1e7), 1e7) for b, m in zip(found["base"].draws, found["method"].draws, strict=True)]
    assert np.ptp(draws) < 0.1 * np.ptp([line.b for line in found["base"].draws]) / base.b


def test_the_frontier_holds_what_no_cheaper_run_beats():
    made = [Measured(1, 1, flops, nats) for flops, nats in [(4, 3.0), (1, 5.0), (2, 5.5), (3, 4.0), (4, 3.5), (9, 3.0)]]
    assert [(run.flops, run.nats) for run in frontier(made)] == [(1, 5.0), (3, 4.0), (4, 3.0)]


def test_an_interval_may_have_no_end():
    assert interval(2.0, [1.0, 2.0, math.inf]) == (2.0, 1.0, math.inf)


def test_a_curve_that_is_as_good_as_flat_has_no_end():
    flat = [Measured(1, x, x, 4.0) for x in (1e6, 2e6, 4e6)]
    assert Line.along("tokens")(flat).multiplier(3.9, 1e6) == math.inf
    assert Line("tokens", 4.0, 0.0).multiplier(3.9, 1e6) == math.inf and Line("tokens", 4.0, 0.0).size(4.1) == 0
    law = Law(3.0, 1.0, 0.01, 1.0, 0.01)
    nats = 3.0001 + 1e6**-0.01
    assert law.tokens(nats, 1e6) == law.size(nats, 1e6) == math.inf
