"""The plan says what there is to read."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from tandem.comparison.pretrain import plan
from tandem.corpus import prepare
from tandem.networks.decoder import Decoder
from tandem.recipe import load, recipes
from tandem.training import speed
from tandem.training.optimiser import AdamW
from tandem.training.plan import _groups, _peak, _sources, page
from tandem.training.run import Run
from tandem.training.schedule import WSD, Cosine
from tandem.training.speed import Speed


def test_the_sources_of_a_mixture_are_told_with_their_shares_and_how_often_they_are_read():
    shares = {"wiki/*.jsonl.gz": 0.7, "books": 0.3}
    train = SimpleNamespace(
        manifest=SimpleNamespace(shares=shares), lengths=np.array([900, 600, 30]), source_of=np.array([0, 0, 1])
    )
    recipe = SimpleNamespace(corpus=SimpleNamespace(texts="builtin"))
    run = SimpleNamespace(corpus=SimpleNamespace(train=train), recipe=recipe, steps=2, tokens=lambda steps: 500 * steps)
    every = np.arange(3)
    assert _sources(run, every) == (
        "wiki/*.jsonl.gz 70.0% (1.5 k tokens in 2 documents) + books 30.0% (30 tokens in 1 document, read 10 times)"
    )
    assert "70.0% (600 tokens in 1 document, read 1.17 times)" in _sources(run, every[1:])
    often = SimpleNamespace(**vars(run) | {"tokens": lambda steps: 5_304_321 * steps})
    assert "read 12,400 times) + books" in (told := _sources(often, every[1:])) and "read 106,000 times)" in told
    train.manifest.shares = {}
    assert _sources(run, every) == "builtin: 1.53 k tokens in 3 documents"


def test_the_groups_of_the_optimiser_are_told_with_rate_and_decay():
    network = Decoder(Decoder.Config(width=16, heads=2, depth=1, base_width=8), vocabulary=62, context=8)

    def told(**options):
        config = AdamW.Config(lr=4e-3, **options)
        recipe = SimpleNamespace(optimiser=config)
        return _groups(SimpleNamespace(network=network, recipe=recipe, optimiser=AdamW(config, network)))

    assert told() == [
        "embedding 1.02 k at 4.0e-3, decay 0.1",
        "attention, attention_out, mlp, mlp_out 4.1 k at 2.0e-3, decay 0.1",
        "norm 48 at 4.0e-3, no decay",
    ]
    parts = told(lr_scale={"stack": 0.5})
    assert parts[1].startswith("stack attention, stack attention_out, stack mlp") and "at 1.0e-3" in parts[1]
    assert parts[2:] == ["norm norm 16 at 4.0e-3, no decay", "stack norm 32 at 2.0e-3, no decay"]


def test_a_rate_that_stays_below_its_peak_is_told():
    def told(shape, steps, **config):
        return _peak(SimpleNamespace(steps=steps, schedule=shape(shape.Config(**config), steps)))

    assert told(WSD, 100, warmup=1000, decay=10).startswith("; the rate reaches 0.1 of its peak")
    assert told(WSD, 100, decay=400).startswith("; the rate reaches 0.25 of its peak")
    assert told(WSD, 10**15, warmup=10**17).startswith("; the rate reaches 0.01 of its peak")
    assert told(WSD, 10**15) == told(Cosine, 10**15) == told(WSD, 10**15, warmup=1, decay=1) == ""
    assert told(WSD, 100) == told(WSD, 2) == told(Cosine, 30, warmup=0.05, warmup_from_zero=True) == ""


def test_time_and_memory_are_those_of_the_steps_measured(small_corpus):
    shape = ["network.depth=1", "network.width=16", "batch.rows=4", "batch.context=32", "budget=40 steps"]
    recipe = load("decoder/tiny", [*shape, *small_corpus])
    run = Run(recipe, prepare(recipe.corpus))
    told = page(run, Speed(step_seconds=0.5, start_seconds=10.0, memory=3 << 29, flops=run.flops(1)))
    assert told["time"] == "about 30 s with the start, then at 256 tokens/s, evaluation apart (3 steps measured)"
    assert told["memory"] == "1.50 GiB at the peak of these steps"
    assert page(run, run.measure())["attention"] == "tiled (one plain call a tile is the fastest without CUDA)"
    assert told["budget"] == f"40 steps = 40 steps of 128 tokens = 5.12 k tokens = {run.flops(40):.2e} FLOP"


def test_steps_that_would_take_hours_are_not_measured(small_corpus, monkeypatch):
    monkeypatch.setattr(Run, "measure", lambda _: pytest.fail("measured"))
    shape = ["network.depth=1", "network.width=16", "batch.rows=4", "batch.context=32", "budget=40 steps"]
    monkeypatch.setattr(speed, "CPU_FLOPS", 1000.0)
    told = plan(load("decoder/tiny", [*shape, *small_corpus]))
    assert "time        not measured: a few steps of " in told and "attention   " not in told
    assert "memory      not measured: weights, gradients and optimiser alone take up to 0." in told
    assert "cost        " in told


def test_a_network_larger_than_all_memory_is_planned(small_corpus):
    shape = ["network.depth=2", "network.width=131072", "network.heads=1024", "batch.rows=2", "budget=40 steps"]
    told = plan(load("decoder/tiny", [*shape, *small_corpus]))
    assert "\nparameters  412 G = " in told
    why = r"weights, gradients and optimiser take up to (\d+\.\d\d) of \d+\.\d\d GiB a process; plan on the machine"
    (states,) = re.findall(rf"\ntime        not measured: {why}", told)
    assert float(states) > 6000
    assert f"\nmemory      not measured: weights, gradients and optimiser alone take up to {states} GiB" in told


def test_a_plan_tells_of_held_out_text_that_is_trained_on(small_corpus, texts):
    recipe = load("decoder/tiny", [*small_corpus, "budget=1 steps"])
    corpus = prepare(recipe.corpus)
    assert "stand in it" not in page(run := Run(recipe, corpus), Speed(0.5, 10.0, 3 << 29, 1.0))["text"]
    manifest = corpus.validation.manifest
    corpus.validation.manifest = manifest.model_copy(update={"trained_on": 1})
    for most, where in ((None, "it"), (500, "the whole of its texts")):
        corpus.train.most = most
        told = f"; 1 of {manifest.documents} documents held out stand in {where}, too"
        assert told in page(run, Speed(0.5, 10.0, 3 << 29, 1.0))["text"]


def test_a_plan_tells_where_a_text_is_too_small_for_its_vocabulary(small_corpus):
    recipe = load("decoder/tiny", [*small_corpus, "corpus.vocabulary=5000", "budget=1 steps"])
    corpus = prepare(recipe.corpus)
    told = page(Run(recipe, corpus), Speed(0.5, 10.0, 3 << 29, 1.0))["text"]
    assert told.endswith(f"; {corpus.train.vocabulary:,} ids of corpus.vocabulary=5000, as it gives no more")


def test_steps_of_unequal_streams_are_told_by_their_mean(small_corpus):
    recipe = load("gestalt/tiny", [*small_corpus, "budget=12 steps"])
    run = Run(recipe, prepare(recipe.corpus))
    told, tokens = page(run, Speed(0.5, 10.0, 3 << 29, run.flops(1))), run.tokens(12)
    assert tokens != 12 * run.tokens(1) and tokens != run.view.positions(12)
    shown = f"{tokens / 1000:.3g} k tokens"
    assert told["budget"] == f"12 steps = 12 steps of {tokens / 12:,.0f} tokens = {shown} = {run.flops(12):.2e} FLOP"
    assert f"about 16 s with the start, then at {tokens / 6000:.3g} k tokens/s" in told["time"]


def test_positions_are_told_where_they_are_not_tokens(small_corpus):
    bags = ["objective={name: superposition, bag: 2, until: 1}", "budget=8 steps"]
    recipe = load("decoder/tiny", [*small_corpus, *bags])
    told = page(run := Run(recipe, prepare(recipe.corpus)), Speed(0.5, 10.0, 3 << 29, 1))
    step = run.view.positions(1)
    assert run.tokens(8) == 9 * step and f"1 step of {2 * step:,} tokens" in told["budget"]
    assert " positions = " in told["budget"]


@pytest.mark.parametrize("name", [name for name in recipes() if name.endswith("tiny")])
def test_a_small_recipe_can_be_planned_and_is_told_as_it_is_written(name, small_corpus):
    recipe = load(name, small_corpus)
    told = page(run := Run(recipe, prepare(recipe.corpus)), Speed(0.5, 10.0, 3 << 29, run.flops(1)))
    network, *options = told["network"].replace(": ", ", ").split(", ")
    assert network == recipe.values["network"]["name"]
    assert {f"init {recipe.network.init}", f"width {recipe.network.width}"} < set(options)
    assert not [word for word in ("None", "True", "False", "'") if word in told["network"]]
    assert told["text"].startswith(f"{recipe.corpus.texts[0]}: ")


def test_one_override_needs_no_list():
    assert load("decoder/tiny", "network.depth=2").network.depth == 2
