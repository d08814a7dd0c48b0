"""`tandem analyse`: a trained run, an analysis, its record and its picture."""

import itertools
import json
import re
import shutil
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from typed import tandem

from tandem.analysis.analysis import Analysis, chosen_documents, first_tokens, smoothed
from tandem.analysis.gradient_roles import GradientRoles, squared_norms
from tandem.analysis.state_window import StateWindow, _smoothing
from tandem.comparison.trained import analyse, open_trained
from tandem.networks.boundary_decoder import BoundaryDecoder
from tandem.networks.decoder import Decoder
from tandem.recipe import UserError, register, registered
from tandem.recipe.settings import _registry

SMALL = ["budget=4 steps", "batch.rows=2", "batch.context=64", "sampling.tokens=3", "evaluation.documents=2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, small_corpus):
    folder = tmp_path_factory.mktemp("runs")
    for name in ("sps", "decoder"):
        done = tandem("train", f"{name}/tiny", "--run", name, "--runs", folder, *SMALL, *small_corpus)
        assert done.exit_code == 0, done.output
    return folder


@pytest.mark.parametrize("network", ["sps", "decoder"])
def test_the_state_window_is_the_loss_of_a_cut_state(runs, network):
    done = tandem("analyse", "state_window", runs / network, "window=4", "tokens=40", "documents=5", "rows=2")
    assert done.exit_code == 0, done.output
    record = json.loads((runs / network / "analysis/state_window.json").read_text())
    assert (record["network"], record["step"], record["options"]["window"]) == (network, 4, 4)
    assert record["documents"] == 5 and len(record["delta"]) == 40
    assert all(abs(delta) < 1e-6 for delta in record["delta"][:5])  # nothing is cut yet
    assert any(abs(delta) > 1e-6 for delta in record["delta"][5:])
    run = open_trained(runs / network)
    whole, store = run.network, run.corpus.validation
    batch = first_tokens(whole, store, chosen_documents(store, 5, shortest=41), 40)
    with torch.no_grad():
        cut, nll = whole.restricted(4).score(batch), whole.score(batch)
    delta = cut - nll
    expected = {
        "delta": delta.mean(0),
        "nll": nll.mean(0),
        "delta_standard_error": delta.std(0) / 5**0.5,
        "nats_per_token": nll.mean(),
        "nats_per_token_cut": cut.mean(),
        "last_delta": torch.tensor(np.polyval(np.polyfit(range(5), delta.mean(0)[-5:].numpy(), 2), 4)),
    }
    for key, value in expected.items():
        torch.testing.assert_close(torch.tensor(record[key]), value, rtol=0, atol=1e-5, check_dtype=False, msg=key)
    axes = Figure().subplots()
    registered("analysis")["state_window"](None).draw(record, axes)
    (line,) = (line for line in axes.lines if line.get_label() == "smoothed")
    assert [*line.get_xdata()] == [*range(5, 40)]  # where something is cut
    assert line.get_ydata()[-1] == pytest.approx(record["last_delta"])
    assert (runs / network / "analysis/state_window.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("name", "options", "shares"),
    [
        ("state_window", ["window=4", "tokens=40", "documents=4", "rows=2"], [50, 100]),
        ("gradient_roles", ["tokens=32", "targets=8", "documents=2", "rows=1"], [50, 100]),
        ("coordinate_check", ["widths=[32, 64]", "steps=0"], [25, 50, 75, 100]),
        ("pointer_chasing", ["tables=1", "rows=1", "steps=200"], [50, 100]),
        ("mutual_information", ["tokens=1000", "longest=4", "groups=2"], [50, 100]),
    ],
)
def test_how_far_an_analysis_has_come_is_told(runs, monkeypatch, name, options, shares):
    monkeypatch.setattr("tandem.training.display.LOG_PAUSE", 0.0)
    done = tandem("analyse", name, runs / "decoder", *options)
    assert done.exit_code == 0, done.output
    told = [int(share) for share in re.findall(rf"^analysing {name}, (\d+) %$", done.output, re.M)]
    assert told == shares


def test_gradient_roles_tell_the_streams_apart(runs):
    done = tandem("analyse", "gradient_roles", runs / "sps", "tokens=48", "targets=10", "documents=6", "rows=4")
    assert done.exit_code == 0, done.output
    record = json.loads((runs / "sps/analysis/gradient_roles.json").read_text())
    assert list(record["streams"]) == ["inputs", "predictions"] and record["horizon"] == 24
    for curve in record["streams"].values():
        assert len(curve["mean"]) == 24 and sum(curve["pairs"]) * 2 == record["pairs"]
        assert all((mean is None) == (n == 0) for mean, n in zip(curve["mean"], curve["pairs"], strict=True))
    assert (runs / "sps/analysis/gradient_roles.png").stat().st_size > 5000


def test_gradient_roles_are_ratios_of_norms_and_of_documents_however_many_are_read_at_a_time(runs):
    run, options = open_trained(runs / "sps"), {"tokens": 48, "targets": 10}
    record, at_once = (GradientRoles(GradientRoles.Config(**options, documents=3, rows=n)).measure(run) for n in (1, 3))
    for name, curve in record["streams"].items():
        for key, values in curve.items():
            other = at_once["streams"][name][key]
            torch.testing.assert_close(numbers(values), numbers(other), equal_nan=True, rtol=1e-4, atol=0)

    network, store, draw, sums = run.network, run.corpus.validation, np.random.default_rng(0), {}
    for document in chosen_documents(store, 3, shortest=29):  # slots 3 .. 23, offsets 1 .. 24
        batch, losses = first_tokens(network, store, [document], 48), min(48, store.lengths[document] - 1)
        asked = np.sort(draw.choice(np.arange(3, losses), 10, replace=False))
        found = squared_norms(network, batch, torch.from_numpy(asked)[None])
        norms = {int(j): sum(parts.values())[:, 0].sqrt() for j, parts in zip(asked, found, strict=True)}
        for p, j in itertools.combinations(norms, 2):
            if p < min(24, losses - 24) and j - p <= 24:
                sums.setdefault(j - p, []).append(norms[j][:, p] / norms[p][:, p])
    assert record["pairs"] == 2 * sum(map(len, sums.values()))
    for offset, ratios in sums.items():
        found = [curve["mean"][offset - 1] for curve in record["streams"].values()]
        assert found == pytest.approx(torch.stack(ratios).mean(0).tolist(), rel=1e-4)


def numbers(values):
    """Lists of numbers, pairs of numbers and None, which becomes NaN, as one tensor."""
    flat = [x for value in values for x in (value if isinstance(value, list) else [value, value])]
    return torch.tensor([torch.nan if x is None else x for x in flat], dtype=torch.float64)


@pytest.mark.parametrize(("name", "shortest"), [("gradient_roles", 64 + 512 + 2), ("state_window", 2049)])
def test_where_the_context_is_long_as_many_tokens_are_read_as_in_the_paper(runs, name, shortest):
    run, cls = open_trained(runs / "sps"), registered("analysis")[name]
    longer = SimpleNamespace(batch=SimpleNamespace(context=8192))
    given: Any = SimpleNamespace(network=run.network, corpus=run.corpus, recipe=longer)
    with pytest.raises(UserError, match=f"no document has the {shortest} tokens"):
        cls(cls.Config()).measure(given)


def test_documents_and_smoothing_are_those_of_the_paper():
    assert StateWindow.Config() == StateWindow.Config(window=64, documents=8000)
    assert GradientRoles.Config() == GradientRoles.Config(documents=1000, targets=64)
    assert _smoothing(2048) == 201
    x = np.arange(30.0)
    assert smoothed(x**2, 7) == pytest.approx(x**2) and smoothed(x**3, 7) != pytest.approx(x**3)
    mean, axes = [1.0] * 255 + [10.0] + [1.0] * 256, Figure().subplots()
    curve = {"mean": mean, "mean_interval": [None] * 512}
    record = {"streams": {"tokens": curve}, "horizon": 512, "documents": 1}
    GradientRoles(GradientRoles.Config()).draw(record, axes)
    assert (np.abs(np.log(axes.lines[0].get_ydata())) > 1e-9).sum() == 21  # so far one value is felt
    assert axes.lines[0].get_ydata() == pytest.approx(10 ** smoothed(np.log10(mean), 21))  # not of ratios


def test_one_document_has_no_error_and_no_band(runs):
    given = {"state_window": ["window=4", "tokens=40"], "gradient_roles": ["tokens=48", "targets=10"]}
    for name, options in given.items():
        done = tandem("analyse", name, runs / "sps", *options, "documents=1")
        assert done.exit_code == 0, done.output
        record, axes = json.loads((runs / f"sps/analysis/{name}.json").read_text()), Figure().subplots()
        registered("analysis")[name](None).draw(record, axes)
        drawn = [path for band in axes.collections for path in band.get_paths() if len(path.vertices)]
        if name == "state_window":
            assert record["delta_standard_error"] is None and len(record["delta"]) == 40
        else:
            curves = record["streams"].values()
            assert all({*curve["mean_interval"], *curve["geometric_interval"]} == {None} for curve in curves)
            assert all(any(curve["mean"]) for curve in curves)
            assert axes.get_legend().get_title().get_text() == "smoothed mean"
        assert not drawn and len(axes.lines) > 1


def test_a_stream_without_a_present_loss_has_no_ratios(runs, small_corpus):
    own = ["network.persistent=predictions", "network.read=inputs"]
    done = tandem("train", "sps/tiny", "--run", "reverse", "--runs", runs, *SMALL, *small_corpus, *own)
    assert done.exit_code == 0, done.output
    done = tandem("analyse", "gradient_roles", runs / "reverse", "tokens=48", "targets=10", "documents=6")
    assert done.exit_code == 0, done.output
    streams = json.loads((runs / "reverse/analysis/gradient_roles.json").read_text())["streams"]
    assert set(streams["predictions"]["mean"]) == {None} and any(streams["inputs"]["mean"])


def test_an_analysis_of_the_text_alone_takes_a_recipe(small_corpus, tmp_path, monkeypatch):
    pytest.importorskip("scipy")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes/own").mkdir(parents=True)
    (tmp_path / "recipes/own/0.5m.yaml").write_text("extends: decoder/tiny\n")
    options = ["groups=0", "longest=16", "analysis.classes=32"]
    done = tandem("analyse", "mutual_information", "own/0.5m", *options, *small_corpus)
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "analysis/own-0.5m/mutual_information.json").read_text())
    assert len(record["information"]) == 16 and record["options"]["classes"] == 32


@pytest.mark.parametrize("name", ["gradient_roles", "mutual_information", "state_window"])
def test_scipy_is_asked_for_before_anything_is_opened(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(UserError, match=r"scipy is not installed; pip install 'tandem-lm\[statistics\]' brings it"):
        analyse(name, tmp_path / "nowhere", [])


def test_a_new_network_of_a_recipe_chases_pointers(small_corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["steps=2", "tables=2", "keys=2", "network.depth=1", "network.width=32"]
    done = tandem("analyse", "pointer_chasing", "decoder/tiny", *options, *small_corpus)
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "analysis/decoder-tiny/pointer_chasing.json").read_text())
    assert (record["trained_steps"], record["options"]["tables"]) == (2, 2) and "step" not in record
    assert (tmp_path / "analysis/decoder-tiny/pointer_chasing.png").stat().st_size > 5000
    assert any(line.startswith("  pointer_chasing ") for line in tandem("show").stdout.splitlines())
    assert "analysis.tables = 4" in tandem("show", "pointer_chasing").stdout


def test_an_analysis_without_weights_takes_a_run_without_a_checkpoint(runs, tmp_path, monkeypatch):
    shutil.copytree(runs / "decoder", tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    titles = []
    monkeypatch.setattr(Axes, "set_title", lambda axes, title: titles.append(title))
    options = ["steps=1", "tables=2", "keys=2"]
    done = tandem("analyse", "pointer_chasing", tmp_path / "run", *options)
    assert done.exit_code == 0, done.output
    assert "step" not in json.loads((tmp_path / "run/analysis/pointer_chasing.json").read_text())
    assert titles == ["run"] and "\nstep " not in done.output
    refused(tandem("analyse", "pointer_chasing", runs / "decoder", "--step", 4), "looks at no trained weights")


def test_father_and_son_by_names_of_the_text(runs, tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("cat dog bird sees hears likes small large red blue house tree river".replace(" ", "\n"))
    options = [f"names={names}", "analysis.pairs=8", "between=[0]"]
    done = tandem("analyse", "father_son", runs / "decoder", *options)
    assert done.exit_code == 0, done.output
    record = json.loads((runs / "decoder/analysis/father_son.json").read_text())
    assert record["pairs"] == 8 and [row["between"] for row in record["conditions"]] == [None, 0, None, 0]
    shown = done.stdout.splitlines()
    assert shown[0] == "conditions" and len(shown[1].split()) == len(record["conditions"][0])
    assert [line.split()[:3] for line in shown[2:4]] == [["normal", "\N{EN DASH}", "False"], ["normal", "0", "False"]]
    assert (runs / "decoder/analysis/father_son.png").stat().st_size > 5000


def test_rows_of_plain_values_are_shown_as_a_table(runs, monkeypatch):
    monkeypatch.setitem(_registry["analysis"], "listing", Listing)
    done = tandem("analyse", "listing", runs / "decoder")
    assert done.exit_code == 0, done.output
    table, rest = done.stdout.split("\n\n")
    assert table.splitlines() == ["words", "word   nats  after", "cat   1.235      \N{EN DASH}", "tree  2.000      3"]
    said = dict(re.split(r"  +", line) for line in rest.splitlines())
    assert [*said] == ["analysis", "network", "step", "count", "numbers", "by_kind, own", "record", "picture"]
    assert said["count"] == "2" and said["numbers"] == "1, 2.500" and said["by_kind, own"] == "0.1235"


class Listing(Analysis):
    """For a test; every network will do."""

    def measure(self, run):
        words = [{"word": "cat", "nats": 1.23456, "after": None}, {"word": "tree", "nats": 2.0, "after": 3}]
        plain = {"count": 2, "empty": [], "numbers": [1, 2.5], "long": [*range(99)], "by_kind": {"own": 0.12345}}
        return {**plain, "words": words, "nested": [{"word": "cat", "ids": [1]}]}

    def draw(self, record, axes):
        pass


def test_show_tells_what_the_numbers_of_an_analysis_are():
    assert tandem("show", "gates").stdout.count("|g O(read)| / |h|, mean over positions that have a memory") == 1
    assert "increment" not in tandem("show", "gestalt").stdout


def test_an_analysis_extends_the_base_of_all(monkeypatch, tmp_path):
    monkeypatch.setitem(_registry["analysis"], "bare", SimpleNamespace)
    with pytest.raises(TypeError, match=r"analysis bare: SimpleNamespace has to extend .*\.Analysis"):
        analyse("bare", tmp_path, [])


def refused(done, *words):
    assert done.exit_code == 2 and "Traceback" not in done.stderr, done.output
    for word in words:
        assert word in done.stderr, done.stderr


def test_a_network_that_reads_sentences_is_not_shown_bare_tokens(runs):
    network = BoundaryDecoder(BoundaryDecoder.Config(width=32, heads=4, depth=1), 61, 64)
    with pytest.raises(UserError, match="shows a network bare tokens, and this one reads sentences"):
        first_tokens(network, open_trained(runs / "decoder").corpus.validation, [0], 10)


def test_a_network_withdraws_what_it_inherits_by_none(runs, monkeypatch):
    monkeypatch.setattr(Decoder, "restricted", None)
    refused(tandem("analyse", "state_window", runs / "decoder", "window=4"), "for `restricted`, and decoder has none")


def test_what_can_not_be_analysed_is_refused_by_name(runs, tmp_path):
    @register("analysis", "asking")
    class Asking(Analysis):
        asks = "gates"

    try:
        refused(tandem("analyse", "asking", runs / "sps"), "asks a network for `gates`, and sps has none")
    finally:
        del _registry["analysis"]["asking"]
    refused(tandem("analyse", "gradient_role", runs / "sps"), "no such analysis; did you mean gradient_roles?")
    refused(tandem("analyse", "state_window", runs / "sps", "windw=3"), "did you mean analysis.window?")
    refused(tandem("analyse", "state_window", runs / "sps", "analysis.windw=3"), "did you mean analysis.window?")
    refused(tandem("analyse", "state_window", runs / "nowhere"), "no run here")
    refused(tandem("analyse", "state_window", runs / "sps", "tokens=40", "window=39"), "reads of 40 tokens")
    analysis = registered("analysis")["state_window"]
    run = SimpleNamespace(
        network=Decoder.unwritten(Decoder.Config(window=5), 62, 64), corpus=SimpleNamespace(validation=None)
    )
    with pytest.raises(UserError, match="window = 4: it cuts nothing of what this network reads of 40 tokens"):
        analysis(analysis.Config(window=4, tokens=40)).measure(run)
    refused(tandem("analyse", "state_window", runs / "sps", "tokens=100000"), "no document has the 100001 tokens")
    refused(tandem("analyse", "gradient_roles", runs / "sps", "tokens=40", "targets=21"), "at most 20 with 40 tokens")
    few = ["tokens=48", "targets=2", "documents=1"]
    refused(tandem("analyse", "gradient_roles", runs / "sps", *few), "no slot's own loss was drawn", "more targets")
    refused(tandem("analyse", "father_son", runs / "decoder", "between=[0, 0]"), "names a number twice; give each once")
    refused(tandem("analyse", "mutual_information", runs / "decoder/model"), "inside the run", "the folder to give")
    shutil.copytree(runs / "decoder/model", tmp_path / "model")
    refused(tandem("analyse", "mutual_information", tmp_path / "model"), "a model, no run")


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        ("encoder_decoder", "answers stand within a row, and this network writes after contexts"),
        ("double_decoder", "a session reads a row as one block, without context"),
    ],
)
def test_who_is_asked_otherwise_than_it_learns_chases_no_pointers(network, reason, small_corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(tandem("analyse", "pointer_chasing", f"{network}/tiny", "steps=1", "rows=1", *small_corpus), reason)
