"""What a study's page and table say: the verdict, all that was measured, nothing of the machine's paths."""

import dataclasses
import itertools
import json
import math
import re
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import scipy.stats

pytest.importorskip("scipy")

from tandem.comparison.charts import LOOKS, WIDTH, Line, Row, dot_chart, histogram, line_chart, log_ticks, ticks
from tandem.comparison.folder import StudyFolder
from tandem.comparison.page import TEMPLATE
from tandem.comparison.report import _by_position, _curves, _gaps, _losses
from tandem.comparison.results import DOCUMENTS, Decoding, Point, read_result
from tandem.comparison.study import Job, Study
from tandem.comparison.summary import Spent, Summary, chance, fixed, mean_curve, signed, spent_until
from tandem.comparison.table import ALONE, COST, FREE_ENDS, LIKELIHOOD, NONE, TIMED, likelihoods, plain, tabulate
from tandem.recipe import UserError
from tandem.training.sinks import JsonLines

VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """Text of a page by section; asserts that every element is closed and nothing is loaded."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "img", "iframe")
        assert all(not value.startswith(("http", "//", "/")) for key, value in attrs if key in ("src", "href"))
        self.open += [tag] if tag not in VOID else []

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += [] if self.open[-1:] == ["style"] else data.split()

    @property
    def text(self) -> str:
        return " ".join(self.words)


def everything(run, arms=("decoder", "sps", "memory <2x>"), seeds=(1, 2, 3), **changes):
    return [run(arm, seed, **changes) for arm in arms for seed in seeds]


def test_a_page_holds_all_of_a_study(make_study, run, page):
    rates = [1e-3, 2e-3, 4e-3]
    trials = [run(arm, 1000, rate, trial=True) for arm in ("decoder", "sps", "memory <2x>") for rate in rates]
    html = page(make_study(rates=rates), everything(run) + trials)
    text = Page(html).text
    assert "sps wins" in text and "every other arm" in text
    for word in (
        "network.window",
        "memory <2x>",
        "wiki.txt",
        "stories",
        "2 M tokens",
        "4c1f2ab",
        "AMD EPYC 9B45",
        "240",
    ):
        assert word in text
    for word in ("/home", "ada", "$", "edge of the learning rates", "warning: ", "nan"):
        assert word not in text, word
    assert "was wide <sps>, and nobody crossed it & lived." in text
    assert html.count("<svg") == 1 + 4 + 2
    assert not re.search(r"(?<!xmlns=.)https?://|@import|url\(", html)


def test_the_page_loads_nothing_and_closes_what_it_opens_for_every_kind_of_study(make_study, run, page):
    two = ("decoder", "sps")
    arms = {arm: {"network.name": arm} for arm in two}
    kinds = {
        "No result yet": (make_study(), []),
        "No verdict yet": (make_study(), everything(run)[:4]),
        "No winner: one seed": (make_study(arms=arms, seeds=[1]), everything(run, two, [1])),
        "No winner": (make_study(arms=arms), everything(run, two, spread=0.5)),
        "sps wins": (make_study(arms=arms), everything(run, two)),
    }
    for headline, (study, results) in kinds.items():
        text = Page(page(study, results)).text
        assert headline in text and "nan" not in text, headline
        assert headline in plain(Summary.of(study, results))
        assert ("wins" in text) == (headline == "sps wins")


def test_missing_runs_are_named_and_hold_back_the_verdict(make_study, run, page):
    html = page(make_study(rates=[1e-3, 2e-3]), [*everything(run)[:-1], run("sps", 1000, 1e-3, trial=True)])
    text = Page(html).text
    assert "memory <2x>, seed 3" in text and "sps, trial at 0.002" in text and "sps, trial at 0.001" not in text
    assert "8 of 9 runs" in text and "wins" not in text


def test_what_waiting_will_not_bring_is_told_where_the_verdict_is(make_study, run, page):
    cure = "A study without it takes another --studies folder; copy runs/ there."
    every, rates = everything(run), [1e-3, 2e-3]
    tried = [run(arm, 1000, rate, trial=True) for arm in ("decoder", "sps") for rate in rates]
    study, diverged = make_study(rates=rates), {("memory <2x>", rate) for rate in rates}
    found = [*[result for result in every if result.arm != "memory <2x>"], *tried]
    headline, reason = Summary.of(study, found, diverged).verdict
    assert headline == "No verdict yet" and reason.endswith(
        f"memory <2x> has no run, as its loss was finite at none of the rates: add lower ones, or drop the arm. {cure}"
    )
    assert "at none of the rates: add lower ones" in Page(page(study, found, diverged)).text
    headline, reason = Summary.of(study, [], {(arm, rate) for arm in study.arms for rate in rates}).verdict
    assert headline == "No result yet" and reason.count("at none of the rates") == 3 and reason.endswith(cure)
    headline, reason = Summary.of(make_study(), every[:-1], ended={("memory <2x>", 3)}).verdict
    assert headline == "No verdict yet" and reason.endswith(
        f" memory <2x>, seed 3, broke off with a loss that is not finite: drop the arm or seed. {cure}"
    )
    assert cure not in Summary.of(make_study(), every[:-1]).verdict[1]  # it may come
    assert cure not in Summary.of(study, found, {("memory <2x>", 2e-3)}).verdict[1]


def test_a_likelihood_that_is_not_finite_is_told_and_left_out_of_the_curve(make_study, run, page, tmp_path):
    *sound, drawn = everything(run)
    (tmp_path / "recipe.yaml").write_text("seed: 3\n")
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for point in drawn.curve:
        judged = {"step": point.step, "training_tokens": point.tokens, "training_flops": point.flops}
        nats = math.nan if point.step > 100 else point.nats_per_token
        told = {"nats_per_token": nats - 0.1, "nats_per_token_with_boundaries": nats}
        if point.step == 80:  # as at the end, where it is that of other documents
            told = {"nats_per_token": 9.0, "nats_per_token_with_boundaries": 9.0, "of_curve": told}
        lines.write({"kind": "likelihood", **judged, "training_seconds": point.seconds, **told})
    kept = ("tokens", "positions", "flops", "training_seconds", "evaluation_seconds", "parameters", "samples")
    told = {"step": drawn.steps, "decoding": dataclasses.asdict(drawn.decoding), **{k: getattr(drawn, k) for k in kept}}
    told |= {"note": "", "likelihood": {}}
    (tmp_path / "result.json").write_text(json.dumps(told))
    (tmp_path / "environment.json").write_text(json.dumps(drawn.environment))
    names = ("documents", "document_tokens", "document_bytes", "end_nats")
    np.savez(tmp_path / DOCUMENTS, nats=drawn.nats * math.nan, **{name: getattr(drawn, name) for name in names})
    read = read_result(tmp_path, drawn.arm, drawn.seed, drawn.lr, drawn.trial)
    assert [point.step for point in read.curve] == [10, 20, 40, 80]
    assert read.curve == drawn.curve[:4]  # sentence ends paid for
    assert read.text is None and read.in_windows is None
    assert read.by_position == {}
    told["likelihood"] = {"in_windows": {"nats_per_token": 3.5, "nats_per_token_with_boundaries": 3.75}}
    told["likelihood"] |= {"unknown": 0.292, "altered": "white space"}
    told["likelihood"]["by_position"] = {"1": 6.5, "2": None, "4": 3.25}  # null: not finite
    (tmp_path / "result.json").write_text(json.dumps(told))
    plan = {"steps": 400, "page": {}, "corpus": ["train", "held out", "sentences"]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    told = read_result(tmp_path, drawn.arm, drawn.seed, drawn.lr, drawn.trial)
    assert told.text == ("train", "held out")  # arms may cut sentences as they like
    assert told.in_windows == (3.5, 3.75) and told.by_position == {1: 6.5, 4: 3.25}
    assert told.environment == drawn.environment
    assert told.lost == "29.2% unknown to the tokenizer; the tokenizer changes or drops white space" and not read.lost
    text = Page(page(make_study(), [*sound, read])).text
    assert "Not finite: the likelihood of memory <2x>, seed 3." in text and "No winner" in text


def test_a_run_that_was_better_before_its_end_is_named_with_both(make_study, run):
    results = everything(run)
    assert not any("before the end" in warning for warning in Summary.of(make_study(), results).warnings)
    curve = [*results[4].curve[:-2], results[4].curve[-2]._replace(nats_per_token=3.0), results[4].curve[-1]]
    results[4] = dataclasses.replace(results[4], curve=curve)
    (told,) = (w for w in Summary.of(make_study(), results).warnings if "before the end" in w)
    assert told.endswith(f": sps, seed 2 (3.0000 after 360 steps, then {fixed(curve[-1].nats_per_token)}).")


@pytest.mark.parametrize(("documents", "factor"), [(240, math.nan), (1, 1.0)])
def test_one_seed_without_an_interval_has_no_difference_to_tell(make_study, run, documents, factor):
    names = "documents", "nats", "document_tokens", "document_bytes", "end_nats"
    results = everything(run, ("decoder", "sps"), [1])
    sound, other = (dataclasses.replace(r, **{name: getattr(r, name)[:documents] for name in names}) for r in results)
    found = [sound, dataclasses.replace(other, nats=factor * other.nats)]
    headline, reason = Summary.of(make_study(seeds=[1], arms={"decoder": {}, "sps": {}}), found).verdict
    assert headline == "No winner" and reason.endswith("cannot be told apart: too few documents, or not finite.")


def test_a_trial_whose_likelihood_is_not_finite_is_not_the_best(make_study, run, page):
    rates = [1e-3, 2e-3, 4e-3]
    trials = [run("sps", 1000, rate, trial=True) for rate in rates]
    trials[0] = dataclasses.replace(trials[0], nats=trials[0].nats * math.nan)
    text = Page(page(make_study(rates=rates), [*everything(run), *trials])).text
    best, spread = trials[1].nats_per_token, trials[2].nats_per_token - trials[1].nats_per_token
    assert f"{best:.4f} ★" in text and f"{spread:.4f}" in text and text.count("not finite") == 1
    ended = Page(page(make_study(rates=rates), [*everything(run), *trials[:2]], {("sps", 4e-3)})).text
    assert ended.count("not finite") == 2 and "sps, trial at" not in ended  # it told enough: nothing is missing


def test_warnings(make_study, run):
    rates = [1e-3, 2e-3, 4e-3]
    study = make_study(rates=rates)
    trials = [run("sps", 1000, rate, trial=True) for rate in (2e-3, 4e-3)]
    assert not any("edge" in warning for warning in Summary.of(study, [*trials, run("sps", 1, 1e-3)]).warnings)
    high = Summary.of(make_study(rates=rates[:2]), [run("sps", 1000, rate, trial=True) for rate in rates[:2]])
    assert high.warnings == ["sps did best at 0.002, the edge of the learning rates tried: try higher ones, too."]
    every = {("sps", rate) for rate in rates}
    assert not Summary.of(study, [run("sps", 1)], every).warnings  # no rate is the best one
    other = run("sps", 2)
    other.environment[:] = [other.environment[0] | {"torch": "2.11.0", "dirty": True}]
    found = Summary.of(study, [run("sps", 1), other]).warnings
    moved = "That alone may change their losses and their seconds."
    assert f"Runs differ in torch: 2.13.0+cpu; 2.11.0. {moved}" in found
    assert any("dirty" in warning for warning in found) and len(found) == 2
    (told,) = Summary.of(study, [run("sps", 1, note="bags of 4 until step 400"), run("sps", 2)]).warnings
    (lossy,) = Summary.of(
        make_study(), [run("sps", seed, lost="29.2% unknown to the tokenizer") for seed in (1, 2)]
    ).warnings
    assert lossy == "Bits per byte count text as predicted that is not read: 29.2% unknown to the tokenizer."
    judged = {
        seeds: Summary.of(make_study(), everything(run), judged={"seeds": seeds}).warnings
        for seeds in ((), (3, 1), (1, 2, 3))
    }
    assert judged.pop((3, 1)) == [
        "Judged before with seeds 3, 1; seeds added after a look name a winner more often than the level says: start a "
        "new study with none of these seeds."
    ] and not any(judged.values())
    run_and_note = "sps, seed 1, after bags of 4 until step 400"
    assert told == f"Scored one token at a time, though not a language model yet: {run_and_note}."


def test_what_an_arm_had_before_it_began_is_told(make_study, run, page, tmp_path, monkeypatch):
    def had(name, start):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps({"tokens": 5_000_000, "flops": 2.5e13}))
        (tmp_path / name / "recipe.yaml").write_text(f"start: {{run: {json.dumps(start)}}}\n")
        return tmp_path / name

    def told(**starts):
        study = make_study(arms={arm: {} for arm in ("decoder", "sps")}, starts=starts)
        found = Summary.of(study, everything(run, study.arms)).warnings
        assert all(warning in Page(page(study, everything(run, study.arms))).text for warning in found)
        return found

    monkeypatch.setenv("RUNS", str(tmp_path))
    plain = had("plain", None)
    second, lost = had("second", "${RUNS}/plain"), tmp_path / "lost"
    spent, shared = told(sps=plain)
    assert spent.startswith("Start from a run: sps from plain (5 M tokens, 2.5e+13 FLOP). What that run spent is not")
    assert shared.startswith("Seeds of sps share the weights that they start from, so they differ less")
    (shared,) = told(decoder=plain, sps=plain)  # trained alike
    assert shared.startswith("Seeds of decoder, sps share")
    spent, _ = told(decoder=lost, sps=second)
    assert "decoder from lost (no result of it is found, so what it had spent is unknown); " in spent
    assert "sps from second (5 M tokens, 2.5e+13 FLOP, after plain: 5 M tokens, 2.5e+13 FLOP). " in spent
    assert not told()
    one = make_study(arms={arm: {} for arm in ("decoder", "sps")}, starts={"decoder": plain, "sps": plain}, seeds=[1])
    assert not Summary.of(one, everything(run, one.arms, [1])).warnings


def test_what_moves_losses_is_told_apart_from_what_moves_the_clock_alone(make_study, run):
    def found(key, value, *results):
        results[-1].environment[:] = [results[-1].environment[0] | {key: value}]
        return Summary.of(make_study(), results).warnings

    for key, value in {"commit": "77aa0be", "precision": "weights float32, compute bfloat16", "gpus": ["H100"]}.items():
        (told,) = found(key, value, run("sps", 1), run("sps", 2))
        assert told.startswith(f"Runs differ in {key}: ") and "That alone may change their losses" in told
        (told,) = found(key, value, *everything(run), run("sps", 1000, 1e-3, True), run("sps", 1000, 2e-3, True))
        assert told.startswith(f"Trials differ in {key}: ") and "The learning rates that arms took may depend" in told
    for key, value in {"threads": 8, "cores": 64, "platform": "Linux-5.4", "python": "3.13.1"}.items():
        (told,) = found(key, value, run("sps", 1), run("sps", 2))
        assert told.startswith(f"Runs differ in {key}: ") and told.endswith(". Do not compare their seconds.")
        assert not found(key, value, run("sps", 1), run("sps", 1000, 1e-3, True), run("sps", 1000, 2e-3, True))


def test_arms_that_are_equal_bit_for_bit_are_called_so(make_study, run):
    arms = {arm: {"network.name": arm} for arm in ("decoder", "sps")}
    twins = [dataclasses.replace(run("decoder", seed), arm=arm) for arm in arms for seed in (1, 2, 3)]
    headline, reason = Summary.of(make_study(arms=arms), twins).verdict
    assert headline == "No winner"
    assert reason == "decoder and sps are equal on every document, over 3 seeds and 240 held-out documents."
    assert fixed(-0.0) == "0.0000"


def test_a_process_that_ended_before_it_trained_has_no_device_to_differ_in(make_study, run):
    first, *others = everything(run)
    began = {key: value for key, value in first.environment[0].items() if key not in ("device", "precision")}
    runs = [dataclasses.replace(first, environment=[began, *first.environment]), *others]
    summary = Summary.of(make_study(), runs)
    assert not any("differ in device" in warning or "in precision" in warning for warning in summary.warnings)
    assert summary.environments["device"] == Summary.of(make_study(), others).environments["device"]
    alone = [dataclasses.replace(r, environment=[began]) for r in everything(run)]
    assert Summary.of(make_study(), alone).environments["device"] == ["unknown"]


def test_an_interval_over_seeds_alone_is_marked(make_study, run, page):
    names = ("nats", "documents", "document_tokens", "document_bytes", "end_nats")
    results = [dataclasses.replace(r, **{name: getattr(r, name)[:1] for name in names}) for r in everything(run)]
    text = Page(page(make_study(), results)).text
    assert ", one document" in text and ", one seed" not in text and "† One seed" in text
    assert plain(Summary.of(make_study(), results)).count(ALONE) == 2
    assert ALONE not in plain(Summary.of(make_study(), everything(run)))


def test_a_margin_adds_a_test_of_equivalence(make_study, run, page):
    runs = everything(run)
    study = make_study(keys=SimpleNamespace(trial_share=1.0, margin=0.1))
    assert "within" not in page(make_study(), runs)
    told, summary = page(study, runs), Summary.of(study, runs)
    assert told.count("p, within ± 0.1 (Holm)") == told.count("that an arm is no further than this from decoder") == 1
    alone = {arm: difference.p_within(0.1) for arm, difference in summary.judgement.to_baseline.items()}
    assert summary.p_within == {"sps": max(alone.values()), "memory <2x>": 2 * min(alone.values())}
    assert f"{max(alone.values()):.3g}</td>" in told.split("within ± 0.1")[1].split("</table>")[0]
    assert summary.verdict[0] == "sps wins" and summary.verdict[1].endswith("called too small to matter.")
    assert (
        "too small" not in Summary.of(make_study(keys=SimpleNamespace(trial_share=1.0, margin=0.01)), runs).verdict[1]
    )


def test_every_pair_of_arms_is_tested_unpaired(make_study, run, page):
    runs = everything(run)
    study = make_study(keys=SimpleNamespace(trial_share=1.0, margin=0.1))
    summary = Summary.of(study, runs)
    values = {arm: [r.paid_per_token for r in of_arm] for arm, of_arm in summary.runs.items()}
    assert "within" not in Page(page(make_study(), runs)).text.split("Unpaired")[1]
    told = Page(page(study, runs)).text.split("Unpaired, as papers print it")[1].split("p, within ± 0.1")[1]
    order = sorted(values, key=lambda arm: sum(values[arm]))
    for low, high in itertools.combinations(order, 2):
        test = scipy.stats.ttest_ind(values[low], values[high], equal_var=False, alternative="less")
        sides = [
            scipy.stats.ttest_ind([x - shift for x in a], b, equal_var=False, alternative="less").pvalue
            for a, b, shift in ((values[low], values[high], 0.1), (values[high], values[low], 0.1))
        ]
        gap = signed(sum(values[low]) / 3 - sum(values[high]) / 3)
        assert "Over seeds alone: " in told and "double p for a test of both sides" in told
        row = f"{low} {high} {gap} {test.statistic:.2f} {test.df:.2f} {test.pvalue:.2g} {max(sides):.2g}"
        assert row in told


def test_nothing_is_tested_before_all_runs_are_there(make_study, run, page):
    study = make_study(keys=SimpleNamespace(trial_share=1.0, margin=0.1))
    summary = Summary.of(study, everything(run)[:-1])
    assert summary.verdict[0] == "No verdict yet" and not summary.p_within
    assert {row[-1] for row in likelihoods(summary)[1:]} == {row[-2] for row in likelihoods(summary)[1:]} == {NONE}
    text = Page(page(study, everything(run)[:-1])).text
    assert "Unpaired" not in text and "nan" not in text and "p = " not in text


def test_numbers_are_printed_with_the_digits_that_tell_them_apart():
    assert [fixed(x) for x in (-0.0, 1.23456, -0.00003)] == ["0.0000", "1.2346", "−3.0e−05"]
    assert [signed(x) for x in (0.0, 0.00003, -0.5)] == ["+0.0000", "+3.0e−05", "−0.5000"]
    told = {0.0496: "= 0.0496", 0.0504: "= 0.0504", 0.05: "= 0.05", 0.3: "= 0.30", 1e-5: "< 0.0001"}
    told |= {0.05002: "= 0.05002", 0.0500000001: "= 0.0500000001"}  # not significant at 0.05
    assert [chance(p, level=0.05) for p in told] == [*told.values()]


def test_gaps_are_means_at_one_step(make_study, run):
    """Of runs that end by the clock: the baseline's curve of the second seed begins after the arm's first point."""
    seconds = {
        ("decoder", 1): (1, 2, 3, 4),
        ("decoder", 2): (2, 3, 4, 5),
        ("sps", 1): (1, 2, 3, 4),
        ("sps", 2): (1, 2, 3, 4),
    }
    results = [
        run(
            arm,
            seed,
            curve=[Point(step, 0, 0.0, float(at), 4.0 - step * (arm == "sps")) for step, at in enumerate(own)],
        )
        for (arm, seed), own in seconds.items()
    ]
    study = make_study(seeds=[1, 2], arms={arm: {} for arm in ("decoder", "sps")})
    (line,) = _gaps(Summary.of(study, results), lambda point: point.seconds)
    assert line.mean == [(2, -1), (3, -2), (4, -3)] and [len(own) for own in line.runs] == [4, 3]
    later = [r.curve[-1]._replace(seconds=1.005 * r.curve[-1].seconds) for r in results]  # a step more, of whole steps
    ended = [dataclasses.replace(r, curve=[*r.curve[:-1], end]) for r, end in zip(results, later, strict=True)]
    (line,) = _gaps(Summary.of(study, [*results[:2], *ended[2:]]), lambda point: point.seconds)
    assert line.mean[-1] == (pytest.approx(4.02), -3) and [len(own) for own in line.runs] == [4, 3]


def test_a_page_names_the_arms_that_were_scored_before_they_were_language_models(make_study, run, page):
    results = everything(run)
    told = "Before its switch to tokens a network is scored one token at a time, too"
    assert told not in page(make_study(), results)
    early = lambda curve: [curve[0]._replace(note="bags of 4 until step 20"), *curve[1:]]
    phased = [dataclasses.replace(r, curve=early(r.curve)) if r.arm == "sps" else r for r in results]
    assert f"{told}: sps." in page(make_study(), phased)


def test_seeds_that_end_by_the_clock_have_a_mean_curve_and_gaps(make_study, run):
    """Seeds are judged at other steps, a step takes 1 or 8/9 seconds, and nats fall with log2 of the seconds."""
    steps = {1: (8, 16, 32, 64), 2: (9, 18, 36, 63)}
    curve = lambda arm, seed: [
        Point(step, step, 1.0 * step, at, 9.0 - math.log2(at) - (arm == "sps") - seed)
        for step in steps[seed]
        for at in [step * (1.0 if seed == 1 else 8 / 9)]
    ]
    study = make_study(seeds=[1, 2], arms={arm: {} for arm in ("decoder", "sps")})
    summary = Summary.of(study, [run(arm, seed, curve=curve(arm, seed)) for arm in study.arms for seed in (1, 2)])
    seconds = lambda point: point.seconds
    _, losses = _losses(summary, seconds)
    assert [x for x, _ in losses.mean] == pytest.approx([8, 16, 32, 56])  # as far as both go
    assert [y for _, y in losses.mean] == pytest.approx([6.5 - math.log2(x) for x, _ in losses.mean])
    (gaps,) = _gaps(summary, seconds)
    assert [x for x, _ in gaps.mean] == pytest.approx([8, 16, 32, 56]) and {y for _, y in gaps.mean} == {-1.0}
    assert "difference to decoder at equal" in _curves(summary)
    lost = [[Point(1, 1, 1.0, 1.0, 4.0)], [Point(2, 2, 2.0, 2.0, 4.0)], []]
    assert mean_curve(lost[:2], seconds) == mean_curve(lost, seconds) == mean_curve([], seconds) == []


def test_text_read_and_positions_computed_stand_side_by_side(make_study, run, page):
    study, results = make_study(), [*everything(run, ["decoder"]), *everything(run, ["sps"], positions=800_000)]
    text = plain(Summary.of(study, results))
    (row,) = re.findall(r"^arm .*training tokens .*\n.*\n(sps .*)", text, re.M)
    assert " 2 M  800 k " in re.sub(r" {2,}", "  ", row)
    assert "800 k" in Page(page(study, results)).text
    assert [result.as_numbers()["positions"] for result in results] == [1_250_000] * 3 + [800_000] * 3


def test_runs_scored_on_other_documents_are_refused(make_study, run):
    for own in ("documents", "document_tokens"):
        results = everything(run)
        results[4] = dataclasses.replace(results[4], **{own: getattr(results[4], own) + 1})
        with pytest.raises(UserError, match="different documents"):
            plain(Summary.of(make_study(), results))


def test_runs_trained_on_other_text_are_refused(make_study, run):
    results = everything(run, text=("a1", "b1"))
    results[0] = dataclasses.replace(results[0], text=None)  # its folder does not tell
    assert Summary.of(make_study(), results).flat
    trial = run("sps", 1000, trial=True)
    for place, other in (4, results[4]), (len(results), trial):
        changed = [*results[:place], dataclasses.replace(other, text=("a2", "b1")), *results[place + 1 :]]
        with pytest.raises(UserError) as caught:
            Summary.of(make_study(), changed)
        first, *texts = str(caught.value).splitlines()
        assert "not of one text" in first and "delete the runs of the others" in first and len(texts) == 2
        assert {line.partition(":")[0] for line in texts} == {f"  text a{n} and held out b1" for n in (1, 2)}
        assert [line.endswith(f": {other.folder}") for line in texts if "a2" in line] == [True]


def test_equal_studies_give_equal_tables_up_to_the_clock(make_study, run):
    told = [everything(run), everything(run, training_seconds=1.0)]
    in_passes = [dataclasses.replace(result.decoding, prefill_passes=9) for result in told[1]]
    told[1] = [dataclasses.replace(result, decoding=read) for result, read in zip(told[1], in_passes, strict=True)]
    first, second = (plain(Summary.of(make_study(), results)) for results in told)
    likelihood, clock = first.split("by the clock")
    assert likelihood == second.split("by the clock")[0] and clock != second.split("by the clock")[1]
    assert "31 ms, 9 passes" in second and "passes" not in first
    sps = next(line for line in likelihood.splitlines() if line.startswith("sps  "))
    runs = [run("sps", seed).nats_per_token for seed in (1, 2, 3)]
    assert f"{np.mean(runs):.4f} ± {np.std(runs, ddof=1):.4f}" in sps


def test_what_differs_has_a_row_for_each_setting_and_a_column_for_each_arm(make_study, run, page):
    own = {"network.window": 64, "network.partition": {"align": 1, "shared": False}, "network.moe": None}
    arms = {"decoder": {"network.name": "decoder"}, "sps": {"network.name": "sps", **own}}
    html = page(make_study(arms=arms), everything(run, arms)).split("What was compared")[1].split("</section>")[0]
    cells = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]
    assert [[re.sub(r"<.*?>", "", cell) for cell in row] for row in cells] == [
        ["", "decoder", "sps"],
        ["network.name", "decoder", "sps"],
        ["network.window", NONE, "64"],
        ["network.partition", NONE, "align: 1, shared: no"],
    ]


def test_what_a_loss_cost_lies_on_the_line_between_two_points():
    curve = [Point(1, 100, 10.0, 1.0, 5.0), Point(2, 200, 20.0, 3.0, 4.0), Point(3, 300, 30.0, 4.0, 4.5)]
    assert spent_until(curve, 4.25) == (175, 17.5, 2.5)
    assert np.isnan(spent_until(curve, 6.0)).all() and np.isnan(spent_until(curve, 5.0)).all()
    assert spent_until(curve, 3.9) is None and spent_until([], 3.9) is None


def test_losses_to_reach(make_study, run):
    summary = Summary.of(make_study(), everything(run))
    assert len(summary.targets) > 1
    assert all(isinstance(summary.spent(arm, summary.targets[-1]), Spent) for arm in summary.runs)
    best = min(result.nats_per_token for result in summary.runs["sps"])
    assert summary.spent("sps", best) == "not reached (1 of 3 seeds did)"
    assert summary.spent("sps", 0) == "not reached"
    assert Summary.of(make_study(targets=[3.5, 4.0]), everything(run)).targets == [4.0, 3.5]


def test_what_a_loss_before_the_first_evaluation_cost_is_not_told(make_study, run, page):
    loss, results = Summary.of(make_study(), everything(run)).targets[0], everything(run)
    results[0], *results[3:6] = (dataclasses.replace(r, curve=r.curve[-1:]) for r in (results[0], *results[3:6]))
    summary, asked = Summary.of(make_study(), results), make_study(targets=[loss])
    assert summary.targets == []
    assert summary.spent("decoder", loss) == "before the first evaluation (1 of 3 seeds)"
    assert summary.spent("sps", loss) == "before the first evaluation"
    text = Page(page(asked, results)).text
    cost = text[text.index("Cost to reach a loss") : text.index("× is against")]
    assert cost.count("before the first evaluation") == 2 and "×)" not in cost and "nan" not in cost


def test_ticks_are_round_and_inside():
    assert ticks(0, 1.0, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(-0.013, 0.021, 5) == pytest.approx([-0.01, 0, 0.01, 0.02])
    assert log_ticks(3, 40) == [5, 10, 20] and log_ticks(1, 1e6) == [10.0**power for power in range(7)]


def test_of_trials_that_are_equal_one_alone_was_taken(make_study, run, page):
    rates = [4e-3, 1e-3, 2e-3]
    trials = [dataclasses.replace(run("sps", 1000, 2e-3, trial=True), lr=rate) for rate in rates]
    starred = Page(page(make_study(rates=rates), [*everything(run), *trials])).text.split("★")
    assert len(starred) == 3 and starred[0].count(f"{trials[0].nats_per_token:.4f}") == 1  # the lowest, and the note


def test_who_is_told_where_sentences_end_pays_for_it(make_study, run, page):
    results = everything(run)
    told = [dataclasses.replace(r, end_nats=0.05 * r.document_tokens) if r.arm == "sps" else r for r in results]
    study = make_study()
    free, paid = Summary.of(study, results), Summary.of(study, told)
    assert free.judgement.winner == "sps" and not free.pays_for_ends
    assert paid.judgement.best != "sps" and paid.pays_for_ends and paid.free_ends.winner == "sps"
    gained = paid.judgement.to_baseline["sps"].mean - free.judgement.to_baseline["sps"].mean
    assert gained == pytest.approx(0.05)
    told_so = "are paid for: their nats are added"
    assert told_so in plain(Summary.of(study, told)) and told_so not in plain(Summary.of(study, results))
    assert told_so in Page(page(study, told)).text and "0.0500" in plain(Summary.of(study, told))
    rates = [1e-3, 2e-3, 4e-3]
    trials = [run("sps", 1000, rate, trial=True) for rate in rates]
    trials = [dataclasses.replace(r, end_nats=30 * r.lr * r.document_tokens) for r in trials]
    tried = Summary.of(make_study(rates=rates), [*told, *trials])
    assert min(tried.trial_losses("sps").items(), key=lambda pair: pair[1])[0] == 1e-3
    assert any(warning.startswith("sps did best at 0.001, the edge") for warning in tried.warnings)
    everyone = [dataclasses.replace(r, end_nats=(r.arm == "sps") * 0.2 * r.document_tokens + 1) for r in results]
    assert Summary.of(study, everyone).judgement.best != "sps"  # as their curves and rates are judged


def test_what_is_told_of_one_run_pays_for_sentence_ends_as_its_study_does(run, tmp_path):
    result = run("sps", 1)
    result = dataclasses.replace(result, end_nats=0.05 * result.document_tokens)
    folder, job = StudyFolder(cast(Study, None), tmp_path), Job("sps", 1, None, False)
    folder._results[job] = result
    assert folder.outcome(job).startswith(f"{result.paid_per_token:.4f} nats/token, ")
    told = result.as_numbers()
    assert told["nats_per_token_with_boundaries"] - told["nats_per_token"] == pytest.approx(0.05)


def test_an_arm_that_reads_documents_whole_has_what_windows_would_give_beside(make_study, run, page):
    results, title = everything(run), "in windows of the context"
    assert title not in plain(Summary.of(make_study(), results))
    told = [dataclasses.replace(r, in_windows=(3.0 + r.seed, 4.0 + r.seed)) if r.arm == "sps" else r for r in results]
    heads, *rows = likelihoods(Summary.of(make_study(), told))
    assert heads[-1] == title and {row[0]: row[-1] for row in rows}["sps"] == "6.0000"  # ends paid for, of three seeds
    assert {row[-1] for row in rows if row[0] != "sps"} == {NONE}
    assert title in plain(Summary.of(make_study(), told)) and title in Page(page(make_study(), told)).text


def test_loss_by_position_is_shown_where_it_is_recorded(make_study, run, page):
    study = make_study(seeds=[1, 2], arms={arm: {} for arm in ("decoder", "sps")})
    results = everything(run, ["decoder", "sps"], [1, 2])
    title = "difference to decoder by position"
    assert title not in page(study, results)
    by_position = lambda r: {n: 8 - math.log2(n) + r.seed - (r.arm == "sps") * n for n in (1, 2, 4)}
    told = [dataclasses.replace(r, by_position=by_position(r)) for r in results]
    assert title in page(study, told) and "whose first token is 0" in page(study, told)
    (line,) = _gaps(Summary.of(study, told), lambda point: point.tokens, _by_position)
    assert line.mean == [(1, -1), (2, -2), (4, -4)] and line.runs == [line.mean] * 2
    (line,) = _gaps(Summary.of(study, [*results[:1], *told[1:]]), lambda point: point.tokens, _by_position)
    assert line.runs == [[(1, -1), (2, -2), (4, -4)]]  # seed 1 of the baseline has no record


def test_cells_of_the_tables_are_their_definitions(make_study, run):
    sizes = {"documents": np.arange(2), "document_tokens": np.array([10, 30]), "document_bytes": np.array([40, 100])}
    told = {"tokens": 2_000_000, "training_seconds": 100.0, "decoding": Decoding(256, 0.03, 300.0, 2048), **sizes}
    told["parameters"] = {"embedding": 1000, "head": 500, "attention": 2000, "norm": 30}
    given = {"decoder": ([160, 164], 0.0), "sps": ([120, 124], 4.0)}  # nats of text by seed, of sentence ends
    results = [
        run(arm, seed, nats=np.array([60.0, all_of - 60]), end_nats=np.array([0.0, ends]), **told)
        for arm, (nats, ends) in given.items()
        for seed, all_of in enumerate(nats, 1)
    ]
    summary = Summary.of(make_study(seeds=[1, 2], arms={arm: {"network.name": arm} for arm in given}), results)
    assert summary.pays_for_ends
    told_bits = [results[0].bits_per_byte, results[0].as_numbers()["bits_per_byte"]]
    assert told_bits == pytest.approx([1.6488] * 2, abs=1e-4)

    def cells(columns):
        heads, *rows = tabulate(summary, columns)
        return {row[0]: dict(zip(heads[1:], row[1:], strict=True)) for row in rows}

    likelihood, free = cells(LIKELIHOOD), cells(FREE_ENDS)
    assert [likelihood[arm]["nats/token ± sd"] for arm in given] == ["4.0500 ± 0.0707", "3.1500 ± 0.0707"]
    assert likelihood["decoder"]["interval of the mean"] == "3.4147 to 4.6853"  # 12.706 standard errors
    assert [likelihood[arm]["bits/byte"] for arm in given] == ["1.6694", "1.2984"]
    assert [likelihood[arm]["difference"] for arm in given] == ["baseline", "−0.9000"]
    assert list(free["sps"].values())[:2] == ["3.0500 ± 0.0707", "−1.0000"]
    assert free["sps"]["nats of the ends per token"] == "0.1000" and likelihood["sps"]["n"] == "2"
    cost, timed = cells(COST)["sps"], cells(TIMED)["sps"]
    assert [cost[key] for key in ("parameters", "non-embedding", "cache bytes/token")] == ["3.53 k", "2.03 k", "8"]
    assert [timed[key] for key in ("tokens/s", "decoding tokens/s", "prefill")] == ["20 k", "300", "30 ms"]


def test_learning_rates_are_told_as_they_were_given(make_study, run, page):
    rates = [1.25e-3, 1.3e-3]
    trials = [run("sps", 1000, rate, trial=True) for rate in rates]
    text = Page(page(make_study(rates=rates), [*everything(run, lr=rates[0]), *trials])).text
    assert "arm 0.00125 0.0013 spread" in text and "sps did best at 0.0013, the edge" in text
    assert [row[1] for row in tabulate(Summary.of(make_study(), everything(run, lr=rates[0])), COST)[1:]] == [
        "0.00125"
    ] * 3


def test_trials_are_not_compared_whatever_their_seed(make_study, run):
    trial = run("sps", 1, 4e-3, trial=True)
    summary = Summary.of(make_study(), [*everything(run), trial])
    assert len(summary.flat) == 9 and summary.trials["sps"] == [trial]


def test_a_verdict_tells_its_interval_and_how_many_seeds_it_would_take(make_study, run):
    _, reason = Summary.of(make_study(), everything(run)).verdict
    difference, low, high = map(float, re.search(r"by ([\d.]+) nats .*interval ([\d.]+) to ([\d.]+);", reason).groups())
    assert 0 < low < difference < high
    open_one = Summary.of(make_study(), everything(run, spread=0.05))
    headline, reason = open_one.verdict
    rival = open_one.judgement.to_best[re.search("below ([^,]+),", reason)[1]]
    assert headline == "No winner" and f"roughly {rival.seeds_needed(0.05)} seeds, none of these," in reason
    assert ", which it is least certain to beat, but" in reason
    assert open_one.test.endswith("told from every other arm by it; p in the table is corrected over 2 arms (Holm).")
    tuned = Summary.of(make_study(rates=[1e-3, 2e-3]), everything(run)).test
    assert tuned.endswith("It takes the learning rates as given, which one trial of each chose.")


def circles(svg):
    """(x, y) by title."""
    found = re.findall(r'<circle class="[^"]*" cx="([^"]*)" cy="([^"]*)" r="[^"]*"><title>([^<]*)', svg)
    return {title: (float(x), float(y)) for x, y, title in found}


def test_lines_rise_with_what_they_show_and_lie_on_a_logarithm_where_it_spans_much():
    def drawn(*points):
        return [*circles(line_chart([Line("a", 0, [*points], [])], "tokens", "nats")).values()]

    (x1, y1), (x2, y2), (x3, y3) = drawn((1, 3.0), (10, 5.0), (100, 4.0))
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2) and y2 < y3 < y1  # in SVG, y grows downwards
    assert y1 - y3 == pytest.approx(y3 - y2, abs=0.2)
    (x1, _), (x2, _), (x3, _) = drawn((1, 3.0), (2, 5.0), (4, 4.0))
    assert x3 - x2 == pytest.approx(2 * (x2 - x1), abs=0.2)


def test_a_label_stands_right_of_the_end_of_its_line_and_inside():
    svg = line_chart([Line("a", 0, [(1, 3.0), (2, 2.0)], [], "64 k tokens"), Line("b", 1, [(1, 2.5)], [])], "x", "nats")
    (x, y) = map(float, re.search(r'x="([\d.]+)" y="([\d.]+)" text-anchor="start">64 k tokens<', svg).groups())
    end = circles(svg)["a: 2, 2.0000"]
    assert end[0] < x < end[0] + 10 and abs(y - end[1]) < 5 and x + 6 * len("64 k tokens") < WIDTH
    assert svg.count('text-anchor="start"') == 1


def test_a_row_shows_its_seeds_its_mean_and_its_interval():
    svg = dot_chart([Row("sps", 1, [(1, -0.5), (2, 0.1)], mean=-0.2, low=-0.8, high=0.4, text="")], "difference")
    interval, mean = re.findall(r'<path class="(?:interval|mean) arm-1" d="M([\d.]+) [\d.]+ L([\d.]+) ', svg)
    (low, high), (at, _) = map(float, interval), map(float, mean)
    seeds = [x for x, _ in circles(svg).values()]
    place = lambda value: low + (value + 0.8) / 1.2 * (high - low)
    assert low < high and [*seeds, at] == pytest.approx([place(value) for value in (-0.5, 0.1, -0.2)], abs=0.2)


def test_documents_read_better_stand_left_of_zero():
    svg = histogram(np.array([-0.9, -0.9, -0.1, 0.2, 0.9]), 1, "difference", bins=4)
    bars = re.findall(r'<rect class="([^"]*)" x="([^"]*)" .*?<title>(\d+)', svg)
    assert [(side, int(count)) for side, _, count in bars] == [
        ("better arm-1", 2),
        ("better arm-1", 1),
        ("worse", 1),
        ("worse", 1),
    ]
    assert "<title>2 documents</title>" in svg and "<title>1 document</title>" in svg
    counts = [re.findall(r'text-anchor="end">([^<]*)<', of) for of in (svg, histogram(np.array([-1.0, 1.0]), 1, "", 4))]
    assert counts == [["1", "2"], ["1"]]
    assert [float(x) for _, x, _ in bars] == sorted(float(x) for _, x, _ in bars)


def test_no_two_looks_of_arms_are_alike():
    page = TEMPLATE.read_text()
    hollow = re.search(r"(\.arm-\d+(?:, \.arm-\d+)*) { --dashes: ", page)[1].split(", ")
    looks = {(of, name in hollow) for name, of in re.findall(r"(\.arm-\d+) { --of: var\(--(arm-\d)\)", page)}
    assert len(looks) == LOOKS == 2 * len(hollow)
