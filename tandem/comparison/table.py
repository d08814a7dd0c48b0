"""The main tables of a study: a column for every number, a row for every arm; and all of it as plain text."""

import math
from collections.abc import Callable, Mapping

import numpy as np

from tandem.comparison.results import Result
from tandem.comparison.statistics import Judgement
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

Cell = Callable[[Summary, str], str]
"""What a column says of an arm; tables below are their columns by title."""


def _mean(of: Callable[[Result], float], show: Callable[[float], str]) -> Cell:
    return lambda summary, arm: show(summary.sample(arm, of).mean)


def _spread(of: Callable[[Result], float]) -> Cell:
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


def _differences(of: Callable[[Summary], Judgement]) -> dict[str, Cell]:
    def difference(summary: Summary, arm: str) -> str:
        if arm == summary.study.baseline:
            return "baseline"
        found = of(summary).to_baseline.get(arm)
        return signed(found.mean) if found else NONE

    def interval(summary: Summary, arm: str) -> str:
        found = of(summary).to_baseline.get(arm)
        low, high = found.interval(summary.study.level) if found else (math.nan, math.nan)
        if found is None or math.isnan(low):
            return NONE
        return f"{signed(low)} to {signed(high)}{'' if found.is_testable else ALONE}"

    return {"difference": difference, "interval": interval}


def _p(of: Callable[[Summary], Mapping[str, float]]) -> Cell:
    def cell(summary: Summary, arm: str) -> str:
        p = of(summary).get(arm, math.nan)
        return NONE if math.isnan(p) else chance(p, summary.study.level).removeprefix("= ")

    return cell


def _in_windows(summary: Summary, arm: str) -> str:
    found = [run.in_windows[1] for run in summary.runs[arm] if run.in_windows]
    return fixed(float(np.mean(found))) if found else NONE


LIKELIHOOD: dict[str, Cell] = {
    "nats/token ± sd": _spread(lambda r: r.paid_per_token),
    "interval of the mean": _interval,
    "n": lambda s, arm: str(len(s.runs[arm])),
    "bits/byte": _mean(lambda r: float(r.paid_nats.sum() / np.log(2) / r.document_bytes.sum()), fixed),
    **_differences(lambda s: s.judgement),
    "p (Holm)": _p(lambda s: s.judgement.p_to_baseline),
}
FREE_ENDS: dict[str, Cell] = {  # where an arm is told where sentences end
    "nats/token, ends for free": _spread(lambda r: r.nats_per_token),
    **_differences(lambda s: s.free_ends),
    "nats of the ends per token": _mean(lambda r: r.paid_per_token - r.nats_per_token, fixed),
}
COST: dict[str, Cell] = {
    "learning rate": lambda s, arm: ", ".join(dict.fromkeys(f"{r.lr:g}" for r in s.runs[arm])),
    "parameters": _mean(lambda r: sum(r.parameters.values()), scaled),
    "non-embedding": _mean(lambda r: non_embedding(r.parameters), scaled),
    "training tokens": _mean(lambda r: r.tokens, scaled),
    "positions": _mean(lambda r: r.positions, scaled),
    "training FLOPs": _mean(lambda r: r.flops, scaled),
    "cache bytes/token": _mean(lambda r: r.decoding.cache_bytes / r.decoding.prompt, scaled),
}
TIMED: dict[str, Cell] = {  # by the machine's clock
    "training time": _mean(lambda r: r.training_seconds, clock),
    "tokens/s": _mean(lambda r: r.tokens / r.training_seconds, scaled),
    "decoding tokens/s": _mean(lambda r: r.decoding.tokens_per_second, scaled),
    "prefill": _prefill,
}


def tabulate(summary: Summary, columns: Mapping[str, Cell]) -> list[list[str]]:
    """A header, and a row for every arm; an arm without runs has dashes in it."""
    table = [["arm", *columns]]
    for arm, found in summary.runs.items():
        table.append([arm, *(cell(summary, arm) if found else NONE for cell in columns.values())])
    return table


def likelihoods(summary: Summary) -> list[list[str]]:
    """The first table of a study."""
    shown = {**LIKELIHOOD}
    if margin := summary.study.keys.margin:
        shown[f"p, within ± {margin:g} (Holm)"] = _p(lambda s: s.p_within)
    if any(run.in_windows for run in summary.flat):  # an arm reads documents whole
        shown["in windows of the context"] = _in_windows
    return tabulate(summary, shown)


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
