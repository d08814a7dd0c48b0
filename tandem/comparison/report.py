"""A study as one HTML page (page.py has its pieces), and as a table for the terminal.

The table has two parts: numbers that are equal in two equal studies, and timings that depend on the machine.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from tandem.comparison import charts
from tandem.comparison.page import footnote, html_table, listed, marked, portable, rendered, side_by_side, worded
from tandem.comparison.readings import MISSED
from tandem.comparison.results import Point, Result
from tandem.comparison.statistics import equivalent, welch_lower
from tandem.comparison.summary import Summary, best_rate, chance, fixed, mean_curve, signed
from tandem.comparison.table import ALONE, COST, ENDS, FREE_ENDS, NONE, TIMED, likelihoods, plain, tabulate
from tandem.disk import replace_file
from tandem.recipe import counted
from tandem.training.display import budget_in_words, clock, scaled
from tandem.training.folder import RunFolder, leaves, read_part


def write_report(summary: Summary, folder: Path) -> Path:
    """Writes report.html and table.txt into `folder`; returns the path of the page.

    Raises: UserError where scipy is missing.
    """
    replace_file(folder / "table.txt", plain(summary).encode())
    page = folder / "report.html"
    replace_file(page, _page(summary).encode())
    return page


def _page(summary: Summary) -> str:
    study = summary.study
    headline, reason = summary.verdict
    sections = {
        "Held-out likelihood": _likelihood(summary),
        "Differences by seed": _by_seed(summary),
        "Loss during training": _curves(summary),
        "Loss by position": _positions(summary),
        "Cost to reach a loss": _targets(summary),
        "Cost": _cost(summary) if summary.flat else "",
        "By document": _by_document(summary),
        "Learning rates": _trials(summary),
        "Samples": _samples(summary),
        "What was compared": _compared(summary),
        "Machine and versions": _environments(summary),
    }
    told = {"headline": headline, "reason": reason, "test": summary.test}
    missing = [f"Missing: {'; '.join(summary.missing)}."] if summary.missing else []
    warnings = [*missing, *summary.warnings]
    return rendered(study, told, _facts(summary), warnings, sections, bool(summary.judgement.winner))


def _facts(summary: Summary) -> Iterable[tuple[str, str]]:
    study = summary.study
    yield "arms", str(len(study.arms))
    yield "seeds", ", ".join(map(str, study.seeds))
    yield "budget of a run", budget_in_words(str(study.budget))
    yield "texts", ", ".join(map(portable, study.texts))
    yield "held out", counted(summary.documents, "documents") if summary.documents else "none yet"


def _likelihood(summary: Summary) -> str:
    if not summary.flat:
        return ""
    confidence = f"{100 * (1 - summary.study.level):g} %"
    note = (
        "Lower is better. ± is the standard deviation over seeds; intervals of means are Student's, over seeds alone. "
        f"Differences to {summary.study.baseline} are paired; p is Holm-corrected over the arms. "
        f"Each interval has a confidence of {confidence} on its own."
    )
    if margin := summary.study.keys.margin:
        note += (
            f" p, within ± {margin:g}: of two one-sided tests that an arm is no further than this from "
            f"{summary.study.baseline}."
        )
    html = html_table(likelihoods(summary), summary.runs, summary.judgement.winner)
    if ALONE in html:
        note += f"{ALONE} One seed: the interval of these two networks, over documents alone; one document: over seeds."
    html += footnote(note)
    if summary.pays_for_ends:
        html += footnote(ENDS) + html_table(tabulate(summary, FREE_ENDS), summary.runs)
    return html + _unpaired(summary)


def _unpaired(summary: Summary) -> str:
    """Welch's tests of all pairs of arms, as papers report them."""
    if summary.judgement.missing:
        return ""
    margin = summary.study.keys.margin
    samples = [(arm, summary.sample(arm, lambda r: r.paid_per_token)) for arm in summary.runs]
    rows = [["arm", "lower than", "gap", "t", "degrees of freedom", "p, one-sided"]]
    rows[0] += [f"p, within ± {margin:g}"] if margin else []
    for (arm, low), (other, high) in itertools.combinations(sorted(samples, key=lambda pair: pair[1].mean), 2):
        if found := welch_lower(low, high):
            gap, (t, freedom, p) = signed(low.mean - high.mean), found
            within = equivalent(low, high, margin) if margin else None
            same = [f"{within.p:.2g}"] if within else []
            rows.append([arm, other, gap, f"{t:.2f}", f"{freedom:.2f}", f"{p:.2g}", *same])
    if len(rows) == 1:
        return ""
    summed = "Unpaired, as papers print it: Welch's test that one arm is lower than another"
    note = (
        "Over seeds alone: other documents might change it. Which arm is tested to be lower is read off the same runs, "
        "so double p for a test of both sides; p is not corrected for the number of pairs."
    )
    return f"<details><summary>{escape(summed)}</summary>{html_table(rows, summary.runs)}{footnote(note)}</details>"


def _by_seed(summary: Summary) -> str:
    baseline, rows = summary.study.baseline, []
    for arm, difference in summary.judgement.to_baseline.items():
        seeds = [r.seed for r in summary.runs[arm] if r.seed in {b.seed for b in summary.runs[baseline]}]
        low, high = difference.interval(level := summary.study.level)
        p = summary.judgement.p_to_baseline[arm]
        p = f"p {chance(p, level)}" if not math.isnan(p) else NONE
        if not difference.is_testable:
            p = "one seed" if difference.seeds == 1 else "one document"
        dots = list(zip(seeds, difference.by_seed.tolist(), strict=True))
        text = f"{signed(difference.mean)}, {p}"
        rows.append(charts.Row(arm, charts.look(summary.runs, arm), dots, difference.mean, low, high, text))
    rows = [row for row in rows if math.isfinite(row.mean)]
    if not rows:
        return ""
    label = f"nats per token less those of {baseline} (left of zero: better)"
    note = (
        "A dot is a seed, the upright bar their mean, the line its interval (of one seed, over documents alone; on one "
        "document, over seeds)."
    )
    return f'<div class="chart wide">{charts.dot_chart(rows, label)}</div>' + footnote(note)


Axis = Callable[[Point], float]
Curve = Callable[[Result], list[Point]]
_of_training: Curve = lambda result: result.curve
AXES: dict[str, tuple[str, Axis]] = {  # by budget unit
    "tokens": ("tokens", lambda point: point.tokens),
    "flops": ("training FLOPs", lambda point: point.flops),
    "seconds": ("seconds of training", lambda point: point.seconds),
}


def _curves(summary: Summary) -> str:
    drawn = {
        f"loss against {label}": charts.line_chart(_losses(summary, x), label, "nats per token")
        for label, x in AXES.values()
    }
    if not all(drawn.values()):
        return ""
    label, x = AXES.get(summary.study.budget.unit, AXES["tokens"])
    gaps = charts.line_chart(_gaps(summary, x), label, "difference")
    drawn[f"difference to {summary.study.baseline} at equal {label}"] = gaps
    note = (
        "Nats per token of the held-out documents that are scored during training, sentence ends included: thick the "
        "mean of an arm, thin its seeds."
    )
    if phased := [arm for arm, found in summary.runs.items() if any(p.note for r in found for p in r.curve)]:
        note += f" Before its switch to tokens a network is scored one token at a time, too: {', '.join(phased)}."
    return side_by_side(drawn, summary.runs) + footnote(note)


def _line(summary: Summary, arm: str, curves: Sequence[Sequence[Point]], x: Axis) -> charts.Line:
    runs = [[(x(p), p.nats_per_token) for p in curve] for curve in curves]
    return charts.Line(arm, charts.look(summary.runs, arm), mean_curve(curves, x), runs)


def _losses(summary: Summary, x: Axis, curve: Curve = _of_training) -> list[charts.Line]:
    return [_line(summary, arm, [curve(r) for r in found], x) for arm, found in summary.runs.items() if found]


def _gaps(summary: Summary, x: Axis, curve: Curve = _of_training) -> list[charts.Line]:
    """Held-out loss minus that of the baseline under the same seed, interpolated on its curve at the same x."""
    base = {result.seed: points for result in summary.runs[summary.study.baseline] if (points := curve(result))}
    lines = []
    for arm in summary.judgement.to_baseline:
        runs = []
        for result in (result for result in summary.runs[arm] if result.seed in base):
            xs, ys = zip(*((x(point), point.nats_per_token) for point in base[result.seed]), strict=True)
            shared = [point for point in curve(result) if xs[0] <= x(point) <= (1 + MISSED) * xs[-1]]
            at = np.interp(np.log([x(point) for point in shared]), np.log(xs), ys)
            gaps = zip(shared, at.tolist(), strict=True)
            runs.append([p._replace(nats_per_token=p.nats_per_token - y) for p, y in gaps])
        lines.append(_line(summary, arm, runs, x))
    return [line for line in lines if line.mean]


def _positions(summary: Summary) -> str:
    place: Axis = lambda point: point.tokens
    label = "position in the document"
    losses = charts.line_chart(_losses(summary, place, _by_position), label, "nats per token")
    gaps = charts.line_chart(_gaps(summary, place, _by_position), label, "difference")
    drawn = {"loss by position": losses, f"difference to {summary.study.baseline} by position": gaps}
    note = (
        "A point at n is for tokens n to 2 n - 1 of the documents, whose first token is 0, without sentence ends. "
        "Networks that do not read documents whole read longer ones in windows of a row, overlapping by half."
    )
    return side_by_side(drawn, summary.runs) + footnote(note) if losses else ""


def _by_position(result: Result) -> list[Point]:
    return [Point(n, n, 0.0, 0.0, nats) for n, nats in result.by_position.items()]


def _cost(summary: Summary) -> str:
    tables = html_table(tabulate(summary, COST), summary.runs) + html_table(tabulate(summary, TIMED), summary.runs)
    return tables + footnote("Means over seeds. Cache and speed of decoding: one text at a time, after a prompt.")


def _targets(summary: Summary) -> str:
    html = ""
    for loss in summary.targets:
        rows = [["arm", "tokens", "training FLOPs", "training time"]]
        base = summary.spent(summary.study.baseline, loss)
        for arm in summary.runs:
            spent = summary.spent(arm, loss)
            if isinstance(spent, str):
                rows.append([arm, spent, "", ""])
                continue
            cells = [scaled(spent.tokens), scaled(spent.flops), clock(spent.seconds)]
            if not isinstance(base, str):
                cells = [f"{cell}  ({own / of:.2f} ×)" for cell, own, of in zip(cells, spent, base, strict=True)]
            rows.append([arm, *cells])
        html += f"<h3>{loss:g} nats per token</h3>" + html_table(rows, summary.runs)
    if not html:
        return ""
    return html + footnote(
        "Mean over seeds, interpolated on the held-out curve, most of it before the learning rate has fallen; × is "
        f"against {summary.study.baseline}."
    )


def _by_document(summary: Summary) -> str:
    html, baseline = "", summary.study.baseline
    for arm, difference in summary.judgement.to_baseline.items():
        values, look = difference.by_document, charts.look(summary.runs, arm)
        chart = charts.histogram(values, look, f"nats per token less those of {baseline}")
        if chart:
            count = counted(len(values), "documents")
            share = f"lower than {baseline} on {100 * np.mean(values < 0):.1f} % of {count}"
            head = f"<h3>{marked(summary.runs, arm)}</h3><p>{escape(share)}</p>"
            html += f'<div class="chart">{head}{chart}</div>'
    note = (
        "Bars count documents, each once; the difference above weighs them by tokens. The outermost bars also count "
        "what lies further out."
    )
    return f'<div class="grid-of-charts">{html}</div>' + footnote(note) if html else ""


def _trials(summary: Summary) -> str:
    rates = sorted(summary.study.rates)
    if not rates:
        return ""
    rows = [["arm", *(f"{rate:g}" for rate in rates), "spread"]]
    for arm in summary.study.arms:
        losses = summary.trial_losses(arm)
        best, finite = best_rate(losses), [loss for loss in losses.values() if math.isfinite(loss)]
        shown = {r: fixed(x) + " ★" * (r == best) if math.isfinite(x) else "not finite" for r, x in losses.items()}
        cells = [shown.get(rate, NONE) for rate in rates]
        spread = fixed(max(finite) - min(finite)) if finite else NONE
        rows.append([arm, *cells, spread])
    part = summary.study.keys.trial_share
    shorter = f" A trial spent {part:.0%} of what a run did." if part < 1 else ""
    note = (
        "Nats per token of the trials, on documents that the comparison leaves out; arms that are given sentence ends "
        "pay for them. ★ marks the rate that an arm took." + shorter
    )
    return html_table(rows, summary.runs) + footnote(note)


def _samples(summary: Summary) -> str:
    first = {arm: found[0] for arm, found in summary.runs.items() if found}
    prompts = dict.fromkeys(prompt for result in first.values() for prompt, _ in result.samples)
    html = ""
    for prompt in prompts:
        html += f'<h3 class="prompt">{escape(prompt)}</h3><div class="samples">'
        for arm, result in first.items():
            text = next((text for asked, text in result.samples if asked == prompt), None)
            if text is not None:
                head = marked(summary.runs, arm)
                html += f"<figure><figcaption>{head}</figcaption><p>…{escape(text)}</p></figure>"
        html += "</div>"
    return html + footnote("From the first seed of each arm.") if html else ""


def _compared(summary: Summary) -> str:
    arms = summary.study.arms
    keys = dict.fromkeys(key for changes in arms.values() for key in changes)
    rows = [(key, *(worded(changes.get(key)) for changes in arms.values())) for key in keys]
    rows = [row for row in rows if len({*row[1:]}) > 1]  # null in one arm and absent in another read alike
    heads = "".join(f"<th>{marked(arms, arm)}</th>" for arm in arms)
    html = listed(rows, f"<thead><tr><th></th>{heads}</tr></thead>") or footnote("No setting differs between the arms.")
    if shared := listed(_shared(summary.flat).items()):
        html += f"<details><summary>Shared settings</summary>{shared}</details>"
    return html


def _shared(runs: Iterable[Result]) -> dict[str, str]:
    """Settings that are equal in all runs, from those recipe files that exist."""
    files = [file for run in runs if (file := RunFolder(run.folder).recipe).is_file()]
    flat = [dict(leaves(read_part(file))) for file in files]
    own = ("seed", "corpus.texts", "corpus.folder")
    return {
        key: worded(value)
        for key, value in (flat[0] if flat else {}).items()
        if key not in own and not key.startswith(("log.", "checkpoint.")) and all(f.get(key) == value for f in flat)
    }


def _environments(summary: Summary) -> str:
    rows = [(key, "; ".join(portable(value) for value in values)) for key, values in summary.environments.items()]
    return listed((key, value) for key, value in rows if value)
