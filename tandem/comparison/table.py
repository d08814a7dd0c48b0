"""The main tables of a study: a column for every number, a row for every arm; and all of it as plain text."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tandem.comparison.results import Result
from tandem.comparison.summary import Summary, chance, fixed, non_embedding, signed
from tandem.recipe.catalogue import columns
from tandem.training.display import clock, scaled

NONE = "\N{EN DASH}"
ALONE = " †"
"""Marks an interval over documents alone or seeds alone."""
PAID = (
    "To be told where sentences end is to be told something of the text to come. So these ends are paid for: their "
    "nats are added to those of the text."
)
ENDS = f"{PAID} With the ends for free, as the papers count:"


class Column(NamedTuple):
    """A column of a table with a row for every arm."""

    title: str
    cell: Callable[[Summary, str], str]


def _mean(of: Callable[[Result], float], show: Callable[[float], str]) -> Callable[[Summary, str], str]:
    return lambda summary, arm: show(summary.sample(arm, of).mean)


def _spread(of: Callable[[Result], float]) -> Callable[[Summary, str], str]:
    def cell(summary: Summary, arm: str) -> str:
        sample = summary.sample(arm, of)
        return fixed(sample.mean) + ("" if math.isnan(sample.deviation) else f" ± {fixed(sample.deviation)}")

    return cell


def _prefill(summary: Summary, arm: str) -> str:
    passes = [run.decoding.prefill_passes or 0 for run in summary.runs[arm]]
    taken = _mean(lambda r: r.decoding.prefill_seconds * 1e3, lambda ms: f"{ms:.3g} ms")(summary, arm)
    return f"{taken}, {np.mean(passes):.3g} passes" if all(passes) else taken


def _interval(summary: Summary, arm: str) -> str:
    sample = summary.sample(arm, lambda r: r.paid_per_token)
    half = sample.half_width(summary.study.level)
    return NONE if math.isnan(half) else f"{fixed(sample.mean - half)} to {fixed(sample.mean + half)}"


def _difference(summary: Summary, arm: str, free_ends: bool = False) -> str:
    if arm == summary.study.baseline:
        return "baseline"
    found = (summary.free_ends if free_ends else summary.judgement).to_baseline.get(arm)
    return signed(found.mean) if found else NONE


def _difference_interval(summary: Summary, arm: str, free_ends: bool = False) -> str:
    found = (summary.free_ends if free_ends else summary.judgement).to_baseline.get(arm)
    low, high = found.interval(summary.study.level) if found else (math.nan, math.nan)
    if found is None or math.isnan(low):
        return NONE
    return f"{signed(low)} to {signed(high)}{'' if found.is_testable else ALONE}"


def _p(of: Callable[[Summary], Mapping[str, float]]) -> Callable[[Summary, str], str]:
    def cell(summary: Summary, arm: str) -> str:
        p = of(summary).get(arm, math.nan)
        return NONE if math.isnan(p) else chance(p, summary.study.level).removeprefix("= ")

    return cell


def _in_windows(summary: Summary, arm: str) -> str:
    found = [run.in_windows[1] for run in summary.runs[arm] if run.in_windows]
    return fixed(float(np.mean(found))) if found else NONE


LIKELIHOOD = [
    Column("nats/token ± sd", _spread(lambda r: r.paid_per_token)),
    Column("interval of the mean", _interval),
    Column("n", lambda s, arm: str(len(s.runs[arm]))),
    Column("bits/byte", _mean(lambda r: float(r.paid_nats.sum() / np.log(2) / r.document_bytes.sum()), fixed)),
    Column("difference", _difference),
    Column("interval", _difference_interval),
    Column("p (Holm)", _p(lambda s: s.judgement.p_to_baseline)),
]
IN_WINDOWS = Column("in windows of the context", _in_windows)
"""Added where an arm reads documents whole."""
FREE_ENDS = [  # where an arm is told where sentences end
    Column("nats/token, ends for free", _spread(lambda r: r.nats_per_token)),
    Column("difference", lambda s, arm: _difference(s, arm, free_ends=True)),
    Column("interval", lambda s, arm: _difference_interval(s, arm, free_ends=True)),
    Column("nats of the ends per token", _mean(lambda r: r.paid_per_token - r.nats_per_token, fixed)),
]
COST = [
    Column("learning rate", lambda s, arm: ", ".join(dict.fromkeys(f"{r.lr:g}" for r in s.runs[arm]))),
    Column("parameters", _mean(lambda r: sum(r.parameters.values()), scaled)),
    Column("non-embedding", _mean(lambda r: non_embedding(r.parameters), scaled)),
    Column("training tokens", _mean(lambda r: r.tokens, scaled)),
    Column("positions", _mean(lambda r: r.positions, scaled)),
    Column("training FLOPs", _mean(lambda r: r.flops, scaled)),
    Column("cache bytes/token", _mean(lambda r: r.decoding.cache_bytes / r.decoding.prompt, scaled)),
]
TIMED = [  # by the machine's clock
    Column("training time", _mean(lambda r: r.training_seconds, clock)),
    Column("tokens/s", _mean(lambda r: r.tokens / r.training_seconds, scaled)),
    Column("decoding tokens/s", _mean(lambda r: r.decoding.tokens_per_second, scaled)),
    Column("prefill", _prefill),
]


def tabulate(summary: Summary, columns: Sequence[Column]) -> list[list[str]]:
    """A header, and a row for every arm; an arm without runs has dashes in it."""
    table = [["arm", *(column.title for column in columns)]]
    for arm, found in summary.runs.items():
        table.append([arm, *(column.cell(summary, arm) if found else NONE for column in columns)])
    return table


def likelihoods(summary: Summary) -> list[list[str]]:
    """The first table of a study."""
    reads_whole, margin = any(run.in_windows for run in summary.flat), summary.study.keys.margin
    within = [Column(f"p, within ± {margin:g} (Holm)", _p(lambda s: s.p_within))] if margin else []
    return tabulate(summary, [*LIKELIHOOD, *within, *([IN_WINDOWS] if reads_whole else [])])


# Plain text ---------------------------------------------------------------------------------------------------------


def plain(summary: Summary) -> str:
    """Verdict and tables; everything before "by the clock" is the same for two studies with the same results."""
    headline, reason = summary.verdict
    parts = [
        f"{summary.study.title}\n{summary.study.question}",
        f"{headline}. {reason}",
        columns(likelihoods(summary), right=True),
        *([f"{ENDS}\n{columns(tabulate(summary, FREE_ENDS), right=True)}"] if summary.pays_for_ends else []),
        columns(tabulate(summary, COST), right=True),
        f"test: {summary.test}",
        *(["missing: " + "; ".join(summary.missing)] if summary.missing else []),
        "by the clock",
        columns(tabulate(summary, TIMED), right=True),
        *(["\n".join("warning: " + warning for warning in summary.warnings)] if summary.warnings else []),
    ]
    return "\n\n".join(parts) + "\n"
