"""Runs that start from the weights of others: conversion, its control, and what is refused."""

import json
import shutil

import pytest
import torch
from typed import tandem

from tandem.comparison.pretrain import plan
from tandem.comparison.trained import converted, open_trained
from tandem.corpus import prepare
from tandem.recipe import UserError, load
from tandem.testing.cases import pack, texts
from tandem.training.folder import RunFolder
from tandem.training.plan import page
from tandem.training.run import Run
from tandem.training.speed import Speed
from tandem.training.start import start

SMALL = ["network.depth=1", "network.width=32", "batch.rows=2", "batch.context=32", "sampling.tokens=3"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory, small_corpus):
    folder = tmp_path_factory.mktemp("runs") / "plain"
    given = [*SMALL, "budget=6 steps", *small_corpus]
    done = tandem("train", "decoder/tiny", "--run", folder.name, "--runs", folder.parent, *given)
    assert done.exit_code == 0, done.output
    return folder


@pytest.mark.filterwarnings("error")  # weights that go nowhere are told so
def test_a_plan_refuses_weights_that_do_not_fit(plain, small_corpus):
    given = [*SMALL, "budget=3 steps", *small_corpus, f"start.run={plain}"]
    assert f"start       weights of {plain}" in plan(load("decoder/tiny", given))
    with pytest.raises(UserError, match=r"start.run: this network cannot take over .*\n  depth: 1 there, 2 here"):
        plan(load("decoder/tiny", [*given, "network.depth=2"]))


def test_a_conversion_starts_where_the_other_run_ended(plain):
    recipe = converted(plain, ["network.passes=3"])
    run, source = Run(recipe, prepare(recipe.corpus)), open_trained(plain)
    start(run.network, recipe, run.corpus)
    batch = pack(texts())
    assert recipe.values["network"]["name"] == "context_ready" and recipe.network.passes == 3
    assert torch.equal(run.network.score(batch), source.network.score(batch))
    losses = []
    for one in (run, source):
        (first,) = one.batches(0)
        losses.append(one.objective.loss(one.network, first, one.objective.count(one.network, first))[0])
    assert torch.equal(*losses)
    assert not run.optimiser.state_dict()["state"]


def test_a_run_of_two_streams_is_converted_to_corrected_ones(plain, tmp_path, small_corpus):
    RunFolder.start(tmp_path / "two", load("sps/tiny", [*SMALL, *small_corpus]).to_yaml()).close()
    recipe = converted(tmp_path / "two", [])
    assert recipe.values["network"]["name"] == "context_ready_sps" and recipe.network.window == 16


def test_a_conversion_starts_from_no_other_run(plain):
    with pytest.raises(UserError, match=f"start.run=runs/b: it starts from {plain}; to start from another run"):
        converted(plain, ["start.run=runs/b"])


def test_a_run_is_converted_whatever_its_name(plain, tmp_path):
    for name in ("mine #2", "\N{CAT FACE}"):
        (tmp_path / name).symlink_to(plain)
        assert converted(tmp_path / name, []).start.run == tmp_path / name


def test_the_other_run_may_lie_in_the_home_folder(plain, small_corpus, monkeypatch):
    monkeypatch.setenv("HOME", str(plain.parent))
    recipe = load("decoder/tiny", [*SMALL, *small_corpus, f"start.run=~/{plain.name}"])
    assert recipe.start.run == plain and recipe.value("start.run") == str(plain)
    assert load("decoder/tiny", ["start.run=~nobody-here/x"]).value("start.run") == "~nobody-here/x"


def test_a_converted_run_trains_and_outlives_the_other(plain, tmp_path):
    source = shutil.copytree(plain, tmp_path / "plain")
    done = tandem("convert", source, "budget=3 steps", "--run", "new", "--runs", tmp_path)
    assert done.exit_code == 0, done.output
    shutil.rmtree(source)
    assert tandem("generate", tmp_path / "new", "cat").exit_code == 0


def test_the_control_goes_on_as_it_was(plain, small_corpus):
    recipe = load("decoder/tiny", [*SMALL, "budget=3 steps", *small_corpus, f"start.run={plain}"])
    run = Run(recipe, prepare(recipe.corpus))
    start(run.network, recipe, run.corpus)
    for name, value in open_trained(plain).network.state_dict().items():
        assert torch.equal(run.network.state_dict()[name], value)


def test_a_text_is_the_same_however_it_is_spelled(plain, small_corpus, texts):
    spelled = [*small_corpus, f"corpus.texts=[{texts}/*.txt]", f"start.run={plain}"]
    recipe = load("decoder/tiny", [*SMALL, "budget=3 steps", *spelled])
    run = Run(recipe, prepare(recipe.corpus), fresh=True)
    assert page(run, Speed(0.5, 10.0, 3 << 29, 1.0))["start"] == f"weights of {plain}"


def test_training_goes_on_with_another_text_if_the_tokenizer_is_the_same(plain, tmp_path):
    (tmp_path / "new.txt").write_text("A sparrow sang in the house of the mouse. " * 40)
    text = [f"corpus.texts={tmp_path / 'new.txt'}", f"corpus.folder={tmp_path}", "corpus.validation=0.5"]
    own = f"corpus.tokenizer={plain / 'model' / 'tokenizer.json'}"
    (tmp_path / "other.txt").write_text("A cat and a dog ran after a mouse. " * 40)
    text[0] = f"corpus.texts=[{tmp_path / 'new.txt'}, {tmp_path / 'other.txt'}]"
    recipe = load("decoder/tiny", [*SMALL, "budget=3 steps", *text, own, f"start.run={plain}"])
    run = Run(recipe, prepare(recipe.corpus), fresh=True)
    for name, value in open_trained(plain).network.state_dict().items():
        assert torch.equal(run.network.state_dict()[name], value)
    assert "it may hold what is held out" in page(run, Speed(0.5, 10.0, 3 << 29, 1.0))["start"]
    recipe = load("decoder/tiny", [*SMALL, "budget=3 steps", *text, "corpus.tokenizer=bytes", f"start.run={plain}"])
    with pytest.raises(UserError, match=f"with another tokenizer; {own} takes its own"):
        Run(recipe, prepare(recipe.corpus), fresh=True)


def test_what_does_not_fit_is_refused_before_a_folder_is_made(plain, small_corpus, tmp_path):
    for changes, words in (
        (["network.rope_base=500", *small_corpus], ["rope_base: 10000.0 there, 500.0 here"]),
        (["network.depth=2", *small_corpus], ["depth: 1 there, 2 here"]),
        ([*small_corpus, "corpus.vocabulary=300"], ["another corpus"]),
        ([*small_corpus, "start.run=nowhere"], ["start.run = nowhere: no run here"]),
    ):
        given = [*SMALL, "budget=3 steps", f"start.run={plain}", *changes]
        for command in (["plan"], ["train", "--run", "new", "--runs", tmp_path]):
            done = tandem(*command, "decoder/tiny", *given)
            assert done.exit_code == 2 and all(word in done.stderr for word in words), done.output
        assert not (tmp_path / "new").exists()


def test_a_run_that_is_not_at_its_end_is_not_started_from(plain, tmp_path):
    source = shutil.copytree(plain, tmp_path / "plain")
    planned = json.loads((source / "plan.json").read_text())
    (source / "plan.json").write_text(json.dumps(planned | {"steps": 9}))
    recipe = converted(source, [])
    with pytest.raises(UserError, match="plain: stands at step 6 of 9; train it to its end first"):
        Run(recipe, prepare(recipe.corpus), fresh=True)


def test_weights_of_a_run_whose_text_has_changed_and_whose_tokenizer_is_gone_are_refused(plain, tmp_path):
    source = shutil.copytree(plain, tmp_path / "plain")
    (source / "plan.json").write_text(
        json.dumps(json.loads((source / "plan.json").read_text()) | {"corpus": ["other"]})
    )
    recipe = converted(source, [])
    Run(recipe, prepare(recipe.corpus), fresh=True)
    shutil.rmtree(source / "model")
    with pytest.raises(UserError, match="another corpus, and its tokenizer is gone; give this run the corpus of"):
        Run(recipe, prepare(recipe.corpus), fresh=True)


def test_only_what_another_network_wraps_can_be_converted(plain, tmp_path):
    assert tandem("convert", plain, "budget=2 steps", "--run", "new", "--runs", tmp_path).exit_code == 0
    with pytest.raises(UserError, match="no network wraps context_ready"):
        converted(tmp_path / "new", [])


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("gestalt", "reads every sentence as a row of its own"),
        ("encoder_decoder", "reads a context in both directions"),
    ],
)
def test_what_no_correction_can_stand_before_says_why_it_is_not_converted(recipe, reason, tmp_path):
    RunFolder.start(tmp_path / "run", load(f"{recipe}/tiny").to_yaml()).close()
    done = tandem("convert", tmp_path / "run")
    assert done.exit_code == 2 and f"no network wraps {recipe}, so it cannot be converted: it {reason}" in done.stderr
