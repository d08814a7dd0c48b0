"""The tests behind a verdict: worked values, and what they do on studies drawn from a known truth."""

import math
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("scipy")

from scipy import stats

from tandem.comparison.statistics import Difference, Sample, equivalent, holm, judge, quantile, tail, welch_lower

SPS, DELAYED, DOUBLE = Sample(2.8738, 0.0032, 3), Sample(2.8891, 0.0024, 3), Sample(2.8899, 0.0016, 3)
STUDIES = 1000


def study(rng, *, seeds=3, documents=100, seed=0.0, document=0.0, noise=0.0, effect=0.0, arms=2):
    """Nats by arm and seed, and tokens; `seed`, `document`, `noise`: standard deviations of the mean difference of two
    arms by each alone. The documents are of unequal lengths, and their difficulty and that of the seed are shared."""
    tokens = np.ceil(200 * np.exp(0.8 * rng.standard_normal(documents)))
    scale = np.sqrt(tokens) * tokens.sum() / np.sqrt(tokens.sum() * 2)  # nats; halved, for two arms differ in it
    shared = tokens * (3 + rng.normal(0, 0.5, documents)) + tokens * rng.normal(0, 0.3, (seeds, 1))
    nats = {}
    for arm in range(arms):
        of_seed = rng.normal(0, seed * math.sqrt(seeds / 2), (seeds, 1)) * tokens
        of_document = rng.normal(0, document, documents) * scale
        of_both = rng.normal(0, noise * math.sqrt(seeds), (seeds, documents)) * scale
        nats["ABCDEF"[arm]] = dict(enumerate(shared + of_seed + of_document + of_both + (arm > 0) * effect * tokens))
    return nats, tokens


def named(studies: int, **regime) -> float:
    rng = np.random.default_rng([11, regime.get("seeds", 3)])
    drawn = (study(rng, **regime) for _ in range(studies))
    return np.mean([judge(nats, tokens, "A", range(len(nats["A"]))).winner is not None for nats, tokens in drawn])


REGIMES = {
    "seeds differ": dict(seed=0.01, document=0.002, noise=0.001),
    "two seeds that differ": dict(seeds=2, seed=0.01, document=0.003, noise=0.001),
    "documents differ": dict(seeds=5, documents=30, document=0.01, seed=0.0005, noise=0.001),
    "both differ": dict(seeds=5, seed=0.01, document=0.01, noise=0.005),
}


@pytest.mark.parametrize("regime", REGIMES.values(), ids=REGIMES)
def test_equal_arms_are_told_apart_no_more_often_than_the_level_says(regime):
    # An exact test at 5 % would name more than 6 % of 1,000 with probability 0.07, and 3.7 % to 6.4 % of them 95 times
    # in 100: hence the fixed generator. Over 36 regimes of 6,000 studies and 12 of 1,500 (2 to 10 seeds, 30 to 3,000
    # documents) it named 0.2 % to 5.2 %, and 5.7 % in one of the small ones, whose 95 % band is 3.9 % to 6.1 %.
    assert named(STUDIES, **regime) <= 0.06


@pytest.mark.parametrize("worse", [0.0, 0.5])
def test_with_several_arms_an_equal_best_is_seldom_named(worse):
    """Four equal arms, or two beside two that are far behind: there one of the equal ones is named at the level."""
    rng, won = np.random.default_rng(13), 0
    for _ in range(300):
        nats, tokens = study(rng, arms=4, seed=0.01, document=0.005)
        for arm in "CD":
            nats[arm] = {seed: x + worse * tokens for seed, x in nats[arm].items()}
        won += judge(nats, tokens, "A", range(3)).winner is not None
    assert won / 300 <= 0.08


def test_more_arms_hide_a_winner_little():
    rng, won = np.random.default_rng(14), []
    for _ in range(200):
        nats, tokens = study(rng, arms=4, seed=0.006, document=0.002, noise=0.001, effect=0.04)
        won.append(judge(nats, tokens, "B", range(3)).winner)
    assert set(won) <= {"A", None} and won.count("A") / 200 >= 0.7  # 0.96 over the only rival, were there one


@pytest.mark.parametrize("regime", REGIMES.values(), ids=REGIMES)
def test_a_true_difference_is_told_as_often_as_the_power_formula_predicts(regime):
    a, b = regime["seed"] ** 2, regime["document"] ** 2
    error = math.sqrt(a + b + regime["noise"] ** 2)
    seeds, documents = regime.get("seeds", 3), regime.get("documents", 100)
    truth = Difference(2 * error, np.zeros(seeds), np.zeros(documents), a + regime["noise"] ** 2, b, documents - 1)
    assert named(STUDIES, effect=2 * error, **regime) == pytest.approx(truth.power(0.05, seeds), abs=0.05)


def test_seeds_needed_are_the_fewest_that_reach_the_power():
    found = Difference(0.01, np.zeros(3), np.zeros(100), 0.008**2, 0.001**2, 99)
    needed = found.seeds_needed(0.05)
    assert needed and found.power(0.05, seeds=needed) >= 0.8 > found.power(0.05, seeds=needed - 1)
    by_documents = Difference(0.01, np.zeros(3), np.zeros(100), 0.008**2, 0.008**2, 99)
    assert by_documents.seeds_needed(0.05) is None


def test_power_is_known_also_where_a_difference_is_of_a_hundred_deviations():
    far = Difference(-0.829190654635338, np.zeros(3), np.zeros(400), 0.06515518375499778, 5.983986743163953e-05, 39)
    powers = [far.power(0.05 / 6, seeds=seeds) for seeds in np.unique(np.geomspace(2, 999, 60).astype(int))]
    assert np.isfinite(powers).all() and (np.diff(powers) > -1e-9).all()
    assert far.seeds_needed(0.05 / 6) == 7


def test_arms_that_are_equal_bit_for_bit_are_told_apart_by_no_study():
    nats, tokens = study(np.random.default_rng(0))
    same = Difference.between(*(np.stack([*nats["A"].values()]),) * 2, tokens)
    assert same.is_nothing and same.p == 1 and same.power(0.05, same.seeds) == 0 and same.seeds_needed(0.05) is None
    assert replace(same, mean=1e-9).power(0.05, same.seeds) == 1


def test_only_finished_studies_of_two_seeds_name_a_winner():
    nats, tokens = study(np.random.default_rng(0), seeds=3, seed=1e-4, document=1e-4, effect=0.1)
    assert judge(nats, tokens, "B", [0, 1, 2]).winner == "A"
    assert judge(nats, tokens, "B", [0, 1, 2, 3]).winner is None
    one = judge({arm: {0: by_seed[0]} for arm, by_seed in nats.items()}, tokens, "A", [0])
    low, high = one.to_baseline["B"].interval(0.05)
    assert one.winner is None and math.isnan(one.p_to_baseline["B"]) and 0.09 < low < high < 0.11
    nothing = judge({"A": nats["A"], "B": {}}, tokens, "A", [0, 1, 2])
    assert nothing.winner is None and len(nothing.missing) == 3 and nothing.best == "A"
    broken = nats["B"] | {1: nats["B"][1] * math.nan}
    assert judge({"A": nats["A"], "B": broken}, tokens, "A", [0, 1, 2]).winner is None


def test_a_winner_beats_every_other_arm():
    nats, tokens = study(np.random.default_rng(1), arms=3, seed=1e-4, document=1e-4, effect=0.1)
    found = judge(nats, tokens, "C", [0, 1, 2])
    assert found.best == found.winner == "A"
    assert found.p_to_best == {arm: found.to_best[arm].p for arm in "BC"}
    raw = [found.to_baseline[arm].p for arm in "AB"]
    assert min(found.p_to_baseline.values()) == pytest.approx(2 * min(raw))
    nats["B"] = {seed: x + np.random.default_rng(seed).normal(0, 3, len(x)) for seed, x in nats["A"].items()}
    assert judge(nats, tokens, "C", [0, 1, 2]).winner is None


def test_differences_are_ratios_of_sums_paired_by_seed_and_document():
    d, tokens = np.array([[1.0, 5.0], [3.0, 3.0]]), np.array([10.0, 30.0])
    found = Difference.between(d + 7, np.full((2, 2), 7.0), tokens)
    assert found.mean == pytest.approx(12 / 80) and found.by_seed == pytest.approx([6 / 40, 6 / 40])
    assert found.by_document == pytest.approx([0.2, 4 / 30]) and found.seed_variance == 0
    alone = Difference.between(d[:1], 0 * d[:1], tokens)
    assert alone.document_variance == pytest.approx(sum((alone.mean - left) ** 2 for left in (1 / 10, 5 / 30)))


def test_reference_distribution():
    assert tail(4.302653, (1.0, 2)) == pytest.approx(0.05)
    draws = np.random.default_rng(0).standard_t([2, 9], (400_000, 2)) * [0.7, 1]
    assert tail(3.0, (0.7, 2), (1.0, 9)) == pytest.approx(np.mean(abs(draws.sum(1)) > 3), rel=0.02)
    assert tail(quantile(0.01, (0.1, 1), (1.0, 50)), (1.0, 50), (0.1, 1)) == pytest.approx(0.01)


@pytest.mark.parametrize("regime", REGIMES.values(), ids=REGIMES)
def test_a_difference_as_large_as_the_margin_is_seldom_called_within_it(regime):
    rng, found = np.random.default_rng(12), []
    for _ in range(STUDIES):
        nats, tokens = study(rng, effect=0.02, **regime)
        found.append(Difference.between(*(np.stack([*nats[arm].values()]) for arm in "BA"), tokens).p_within(0.02))
    assert np.mean(np.array(found) <= 0.05) <= 0.065


def test_a_difference_is_within_a_margin_where_its_interval_is():
    nats, tokens = study(np.random.default_rng(2), seed=0.01, document=0.01, effect=0.005)
    found = Difference.between(*(np.stack([*nats[arm].values()]) for arm in "BA"), tokens)
    low, high = found.interval(0.1)  # two tests of 5 %
    margin = max(-low, high)
    assert found.p_within(margin) == pytest.approx(0.05) and found.p_within(1.01 * margin) < 0.05
    assert found.p_within(abs(found.mean)) == pytest.approx(0.5) and found.p_within(0.5 * abs(found.mean)) > 0.5
    one_seed = Difference.between(np.ones((1, 3)), np.zeros((1, 3)), np.ones(3))
    assert math.isnan(one_seed.p_within(2.0)) and one_seed.seeds_needed(0.05) is None


def test_holm():
    assert holm([0.04, 0.01, math.nan, 0.02]) == pytest.approx([0.08, 0.04, math.nan, 0.06], nan_ok=True)


def test_tests_of_the_papers():
    """State-Prediction Separation, Figure 6: means and standard deviations of three seeds, read off the figure."""
    assert welch_lower(SPS, DELAYED) == pytest.approx((-6.625, 3.709, 1.750e-3), rel=5e-4)
    assert welch_lower(SPS, DOUBLE) == pytest.approx((-7.794, 2.941, 2.357e-3), rel=5e-4)
    assert equivalent(DELAYED, DOUBLE, 0.01) == pytest.approx((-5.524, 3.485, 3.891e-3), rel=5e-4)
    assert welch_lower(DELAYED, DOUBLE, 0.01) == pytest.approx((-6.485, 3.485, 2.318e-3), rel=5e-4)


def test_welch_and_equivalence_are_those_of_scipy():
    rng = np.random.default_rng(5)
    a, b = rng.normal(0, 1, 5), rng.normal(0.3, 2, 9)
    ours, theirs = welch_lower(Sample.of(a), Sample.of(b)), stats.ttest_ind(a, b, equal_var=False, alternative="less")
    assert ours == pytest.approx((theirs.statistic, theirs.df, theirs.pvalue), rel=1e-9)
    sides = [stats.ttest_ind(x, y + 2, equal_var=False, alternative="less").pvalue for x, y in ((a, b), (b, a))]
    assert equivalent(Sample.of(a), Sample.of(b), 2.0).p == pytest.approx(max(sides), rel=1e-9)


def test_what_one_value_or_no_variance_allows_to_say():
    low, high, one = Sample(1.0, 0.0, 3), Sample(2.0, 0.0, 3), Sample.of([1.0])
    assert welch_lower(one, high) is welch_lower(low, one) is welch_lower(low, high) is None
    assert equivalent(low, low, 0.1) is None


def test_students_interval_of_a_mean():
    assert Sample.of([1.0, 2.0, 4.0]).half_width() == pytest.approx(4.3027 * 1.527525 / 3**0.5, rel=1e-4)
    assert math.isnan(Sample.of([1.0]).half_width())
