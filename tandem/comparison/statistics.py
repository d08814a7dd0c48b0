"""Is one method better than another, or was it the seeds and the documents? The tests behind a study's verdict.

The claim is that arm A, if trained again, gives text of this kind fewer nats per token than arm B. Two things are
random: the training seeds and the choice of held-out documents. All arms share both, so the test is paired: with
d[s, i] = nats of document i under A minus those under B, both of seed s, and w[i] its tokens, the difference is

    m = sum d / (S sum w)                                   a ratio of sums, not a mean of means
    a = variance of the S means by seed / S                 what other seeds would have changed
    b = sum over i of (m without document i - m)^2          what other documents would have changed (the jackknife)
    c = the part of d that neither seed nor document explains: noise, which a and b both count; b gives its own back

b has fewer degrees of freedom than documents when a few long ones dominate it; its fourth moments tell how many. m is
compared with sqrt(a) T(S - 1) + sqrt(b) T(documents), the sum of two scaled Student variables (Behrens and Fisher).
A single t test with Satterthwaite's degrees of freedom would not do: with two seeds that differ much it names a winner
among equals in up to 14 % of studies at the 5 % level, and in six times the level that Holm's correction asks. This one
stays below 6 % from 2 seeds on, whichever of the two parts is larger, and is conservative in between. That holds where
documents favour the one arm and the other alike; where most favour one a little and a few the other by far, it takes
more of them: with exponentially distributed differences 9 % at 30 documents, and 7 % at 100.

A winner passes this test against every other arm, each time at the level itself: an arm that is not the best has to
beat the best one, too, to be named by chance (Gutmann and Maymin 1987). So a study names one among two equal arms in up
to 5 % of cases, also beside worse ones, and among more equal arms in about 1 %. Where arms are compared with a
baseline, each may be called better or worse: there Holm's correction is over the arms.

With one seed there is no a, and the result holds only for these two networks, not for the methods.

Shapes: S seeds, D held-out documents.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from tandem.recipe import require

POWER = 0.8
"""Probability with which a study ought to detect the difference it looks for."""
MOST_SEEDS = 1000


@dataclass(frozen=True)
class Difference:
    """Nats per token of one arm minus those of another, over the seeds and documents that both have."""

    mean: float
    by_seed: np.ndarray
    """(S,) the difference under each seed."""
    by_document: np.ndarray
    """(D,) the difference per token of each document, averaged over the seeds."""
    seed_variance: float
    """Of `mean`: `a` above; NaN with one seed."""
    document_variance: float
    """Of `mean`: `b` above; NaN with one document."""
    document_freedom: int
    """Degrees of freedom of `document_variance`."""

    @classmethod
    def between(cls, nats_SD: np.ndarray, other_SD: np.ndarray, tokens_D: np.ndarray) -> "Difference":
        """From the nats of two arms, (S, D) each with the same seed in each row, and the documents' scored tokens."""
        d, w = np.asarray(nats_SD - other_SD, float), np.asarray(tokens_D, float)
        (S, D), total = d.shape, w.sum()
        by_seed = d.sum(1) / total
        mean = float(by_seed.mean())
        residual = d - mean * w
        of_document = residual.mean(0)
        # Without document i the mean moves by its residual over the tokens that remain.
        square = (of_document / (total - w)) ** 2 if D > 1 else np.array([math.nan])
        seed_variance, document_variance = math.nan, float(square.sum())
        freedom = 1
        if document_variance > 0:  # a normal fourth moment is 3 squared variances; minus 2 for estimating it
            freedom = int(np.clip(3 * document_variance**2 / (square**2).sum() - 2, 1, D - 1))
        if S > 1:
            seed_variance = float(by_seed.var(ddof=1) / S)
            noise = residual - of_document - (by_seed - mean)[:, None] * w
            both = float(((noise / (total - w)) ** 2).sum() / (S - 1) / S) if D > 1 else math.nan
            document_variance -= min(both, seed_variance, document_variance)
        return cls(mean, by_seed, d.mean(0) / w, seed_variance, document_variance, freedom)

    @property
    def seeds(self) -> int:
        return len(self.by_seed)

    @property
    def is_testable(self) -> bool:
        """Whether it says anything about the methods: at least two seeds and documents, and finite likelihoods."""
        return math.isfinite(self.seed_variance + self.document_variance)

    @property
    def is_nothing(self) -> bool:
        """Whether the arms are equal under every seed and on every document."""
        return not (self.by_seed.any() or self.by_document.any())

    @property
    def _scales(self) -> tuple[tuple[float, int], ...]:
        """Standard error and degrees of freedom of every part that is known."""
        parts = ((self.seed_variance, self.seeds - 1), (self.document_variance, self.document_freedom))
        return tuple((math.sqrt(variance), freedom) for variance, freedom in parts if math.isfinite(variance))

    @cached_property
    def p(self) -> float:
        """Two-sided p-value; NaN where the difference is not testable."""
        return tail(abs(self.mean), *self._scales) if self.is_testable else math.nan

    def interval(self, level: float) -> tuple[float, float]:
        """Interval of the difference with confidence 1 - level; with one seed, for these two networks only."""
        if not self._scales or not math.isfinite(self.mean):
            return math.nan, math.nan
        half = quantile(level, *self._scales)
        return self.mean - half, self.mean + half

    def p_within(self, margin: float) -> float:
        """p-value of two one-sided tests that it is less than `margin` either way; NaN where it is not testable."""
        if not self.is_testable:
            return math.nan
        inside = margin - abs(self.mean)
        half = tail(abs(inside), *self._scales) / 2
        return half if inside > 0 else 1 - half

    def power(self, level: float, seeds: int) -> float:
        """Probability that a study with this number of seeds, two or more, detects a true difference as large as the
        one found, which is testable.

        From the noncentral t distribution with Satterthwaite's degrees of freedom, beyond the critical value of the
        test at the variances found.
        """
        special = require("scipy.special", "statistics")
        a, b = self.seed_variance * self.seeds / seeds, self.document_variance
        scales = (math.sqrt(a), seeds - 1), (math.sqrt(b), self.document_freedom)
        error = math.sqrt(a + b)
        if error == 0:
            return float(self.mean != 0)
        freedom = (a + b) ** 2 / (a**2 / (seeds - 1) + b**2 / self.document_freedom)
        shift, asked = abs(self.mean) / error, quantile(level, *scales) / error
        above, below = special.nctdtr(freedom, shift, asked), special.nctdtr(freedom, shift, -asked)
        if math.isnan(above):  # scipy has no value at some large shifts, where the normal tail is as good
            above = special.ndtr(asked - shift)
        return float(1 - above + np.nan_to_num(below))  # the far tail underflows to NaN

    def seeds_needed(self, level: float) -> int | None:
        """To detect a difference as large as the one found; None: no number of seeds will do, but more documents might.

        It uses the variances of this study, so it is only as exact as an estimate from that many seeds.
        """
        if not self.is_testable or self.power(level, MOST_SEEDS) < POWER:
            return None
        return bisect_left(range(MOST_SEEDS), POWER, lo=2, key=lambda seeds: self.power(level, seeds))


def tail(x: float, *scales: tuple[float, int]) -> float:
    """P(|sum of scale x Student(freedom)| > x), of one or two variables given as (scale, degrees of freedom)."""
    special = require("scipy.special", "statistics")
    parts = sorted(part for part in scales if part[0] > 0)
    if not parts:
        return 0.0 if x > 0 else 1.0
    *smaller, (scale, freedom) = parts
    if not smaller:
        return float(2 * special.stdtr(freedom, -x / scale))
    # Sum over quantiles of the variable with the smaller scale: the other's distribution function is smooth.
    (small, small_freedom) = smaller[0]
    values, weights = _quantiles(small_freedom)
    return float(min(1.0, 2 * weights @ special.stdtr(freedom, -(x + small * values) / scale)))


@lru_cache(maxsize=4096)
def _quantiles(freedom: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantiles of Student's distribution, evenly spaced in the logit of their probability, and their weights."""
    step = 0.05
    logit = np.arange(-40, 0, step)
    probability = 1 / (1 + np.exp(-logit))
    values = require("scipy.special", "statistics").stdtrit(freedom, probability)
    weights = probability * (1 - probability) * step
    # 1 - probability is exact only for the lower half, so the upper half is its mirror image.
    return np.concatenate([values, [0.0], -values]), np.concatenate([weights, [step / 4], weights])


def quantile(level: float, *scales: tuple[float, int]) -> float:
    """The x with tail(x) = level."""
    special, optimize = require("scipy.special", "statistics"), require("scipy.optimize", "statistics")
    # The sum exceeds x only if one of the two exceeds its share.
    most = sum(scale * -special.stdtrit(freedom, level / 4) for scale, freedom in scales)
    if most == 0:
        return 0.0
    return float(optimize.brentq(lambda x: tail(x, *scales) - level, 0, most, rtol=1e-10))


def holm(p: Sequence[float]) -> list[float]:
    """Holm's correction: comparing the results with a level bounds the family-wise error rate by it.

    A NaN stays NaN, and counts as a test that was made.
    """
    values = np.asarray(p, float)
    order = np.argsort(values, kind="stable")  # NaN comes last
    factors = len(values) - np.arange(len(values))
    adjusted = np.empty(len(values))
    adjusted[order] = np.minimum(1, np.maximum.accumulate(factors * values[order]))
    return adjusted.tolist()


@dataclass(frozen=True)
class Judgement:
    """What a study concludes about its arms."""

    best: str | None
    """The arm with the fewest nats per token; None where there is no run."""
    winner: str | None
    """`best`, if it differs significantly from every other arm."""
    to_baseline: dict[str, Difference]
    """Difference of every other arm to the baseline, where they share a seed."""
    p_to_baseline: dict[str, float]
    """Holm-corrected over the arms; NaN, like the next, where runs are missing."""
    to_best: dict[str, Difference]
    """Difference of `best` to every other arm, where they share a seed."""
    p_to_best: dict[str, float]
    """Not corrected: a winner has them all below the level."""
    missing: list[tuple[str, int]]
    """(arm, seed) of the planned runs without a result. Nothing is tested before they have one: testing again after
    every run would name a winner too often."""

    @property
    def is_test(self) -> bool:
        """Whether a winner could be named: all runs are there, of more than one seed."""
        return any(math.isfinite(p) for p in self.p_to_best.values())


def judge(
    nats: Mapping[str, Mapping[int, np.ndarray]],
    tokens_D: np.ndarray,
    baseline: str,
    seeds: Sequence[int],
    level: float = 0.05,
) -> Judgement:
    """Names the arm that differs significantly from all others at `level`, if there is one.

    Args:
        nats: arm -> seed -> (D,) nats of every document; an arm without runs has an empty entry.
        tokens_D: scored tokens of every document.
        baseline: the arm to which all others are compared.
        seeds: those that the study plans.
        level: how often a study of equal arms may name one.
    """
    arms = [arm for arm in nats if nats[arm]]
    total = float(np.sum(tokens_D))
    mean = {arm: float(np.mean([x.sum() for x in nats[arm].values()])) / total for arm in arms}
    best = min(arms, key=lambda arm: (math.isnan(mean[arm]), mean[arm]), default=None)
    missing = [(arm, seed) for arm in nats for seed in seeds if seed not in nats[arm]]

    def difference(one: str, other: str) -> Difference | None:
        shared = [seed for seed in nats[one] if seed in nats[other]]
        if not shared:
            return None
        x, y = (np.stack([nats[arm][seed] for seed in shared]) for arm in (one, other))
        return Difference.between(x, y, tokens_D)

    def p(found: Difference | None) -> float:
        return found.p if found and not missing else math.nan

    to_baseline = {arm: difference(arm, baseline) for arm in nats if arm != baseline}
    to_best = {arm: difference(best, arm) for arm in nats if arm != best} if best else {}
    p_best = {arm: p(found) for arm, found in to_best.items()}
    told = bool(p_best) and all(of <= level for of in p_best.values())  # false for NaN
    return Judgement(
        best=best,
        winner=best if told else None,
        to_baseline={arm: found for arm, found in to_baseline.items() if found},
        p_to_baseline=dict(zip(to_baseline, holm([p(found) for found in to_baseline.values()]), strict=True)),
        to_best={arm: found for arm, found in to_best.items() if found},
        p_to_best=p_best,
        missing=missing,
    )


# Tests that papers report -------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """What these tests need to know about n independent values."""

    mean: float
    deviation: float
    """Standard deviation, with n - 1."""
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Sample":
        return cls(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan, len(values))

    def half_width(self, level: float = 0.05) -> float:
        """Half the width of Student's interval, m +- t(1 - level / 2, n - 1) s / sqrt(n); NaN with one value."""
        if self.n < 2:
            return math.nan
        t = -require("scipy.special", "statistics").stdtrit(self.n - 1, level / 2)
        return float(t * self.deviation / math.sqrt(self.n))


class Outcome(NamedTuple):
    t: float
    freedom: float
    p: float


def welch_lower(a: Sample, b: Sample, margin: float = 0.0) -> Outcome | None:
    """Welch's one-sided test, unpaired, that the mean of `a` is lower than that of `b` plus `margin`.

    None where a sample has one value or one that is not finite, or neither varies.
    """
    if not a.deviation + b.deviation > 0:  # NaN included
        return None
    v_a, v_b = a.deviation**2 / a.n, b.deviation**2 / b.n
    t = (a.mean - b.mean - margin) / math.sqrt(v_a + v_b)
    freedom = (v_a + v_b) ** 2 / (v_a**2 / (a.n - 1) + v_b**2 / (b.n - 1))
    return Outcome(t, freedom, float(require("scipy.special", "statistics").stdtr(freedom, t)))


def equivalent(a: Sample, b: Sample, margin: float) -> Outcome | None:
    """Two one-sided tests that the means differ by less than `margin`: the weaker of the two. None as above.

    It knows seeds alone; `Difference.p_within` knows documents, too.
    """
    lower, higher = welch_lower(a, b, margin), welch_lower(b, a, margin)
    return max(lower, higher, key=lambda outcome: outcome.p) if lower and higher else None
