"""A run that reads sentence streams takes the same steps in any number of processes and pieces, and when it goes on."""

import json

import pytest
import torch
from ranks import Ranks, stage, stages

from tandem.comparison.pretrain import built
from tandem.evaluation.likelihood import likelihood
from tandem.recipe import UserError, load
from tandem.training.parallel import ALONE

SIZE = ["network.name=gestalt", "network.depth=3", "network.width=32", "network.heads=4", "network.memory=2"]
SIZE += ["network.thought_from=1", "network.cap=24", "corpus.sentences.cap=24", "batch.rows=16", "batch.context=16"]
SIZE += ["training.precision=float32", "training.compile=false", "budget=20 steps"]
STREAMS = {"sentences": 4, "grow": 2, "every": 0.5, "end_weight_from": 0.25}
SIZE += [f"network.streams.{key}={value}" for key, value in STREAMS.items()]
QUIET = [f"network.dropout.{rate}=0.0" for rate in ("residual", "attention", "token", "thought")]
MEAN = "network.reduction=tokens"
WARMED = ["network.streams.half_dropout_from=2 steps", "network.streams.full_dropout_from=0.5"]
APART = 1e-5
"""float32 sums in another order."""


@pytest.fixture(scope="module")
def spec(small_corpus):
    def make(*more, **given):
        return {"overrides": [*SIZE, *small_corpus, *more], "last": 12, **given}

    return make


def require_same(found, expected, first=0):
    assert torch.tensor(found["seen"]).sub(torch.tensor(expected["seen"][first:])).abs().max() < 100 * APART
    assert (found["counts"], found["tokens"]) == (expected["counts"], expected["tokens"])
    assert found["nats"] == pytest.approx(expected["nats"], rel=APART)


def test_processes_and_micro_batches_take_the_steps_of_one(spec, tmp_path):
    alone, mean = stage(**spec(*QUIET)), stage(**spec(*QUIET, MEAN))
    cases = [
        [f"training.parallel={how}", f"batch.micro_batches={n}", *more]
        for how, n, *more in (("ddp", 1), ("ddp", 2), ("fsdp", 1), ("ddp", 2, MEAN))
    ]
    ranks = Ranks(2, tmp_path / "log", stages, [spec(*QUIET, *case) for case in cases], tmp_path / "result.json")
    assert ranks.wait() == [0, 0], ranks.said
    *steps, tokens = json.loads((tmp_path / "result.json").read_text())
    for found in [*steps, stage(**spec(*QUIET, "batch.micro_batches=4"))]:
        require_same(found, alone)
    require_same(tokens, mean)
    assert abs(mean["nats"] - alone["nats"]) > 1000 * APART


def test_going_on_repeats_nothing_and_restarts_nothing(spec, tmp_path):
    whole = stage(**spec(*WARMED))
    half = stage(**spec(*WARMED, save_in=str(tmp_path)) | {"last": 7})
    rest = stage(**spec(*WARMED, load_from=str(tmp_path / "step-00000007"), first=7))
    assert half["seen"] + rest["seen"] == whole["seen"]
    assert rest["nats"] == whole["nats"]


def test_a_run_tells_what_it_reads_and_reads_on_where_it_stopped(spec):
    run = built(load("decoder/tiny", spec()["overrides"]), None, ALONE)
    assert run.rows.of_run(run.steps).words == "streams of 4 sentences, 6 at the end"
    batches = [run.batches(step)[0] for step in range(run.steps)]
    assert [batch.end_weight for batch in batches] == [1.0] * 5 + [0.05] * 15
    assert {len(lengths) for batch in batches for lengths in batch.lengths} <= set(range(1, 7))
    assert [run.tokens(step) for step in range(1, 21)] == [
        sum(len(batch.tokens) for batch in batches[:step]) for step in range(1, 21)
    ]
    found = likelihood(run.network, run.corpus.validation, context=16, rows=16)
    assert found.tokens == sum(n - 1 for n in run.corpus.validation.lengths)
    assert found.nll_with_boundaries > found.nll and found.nll_paper is not None


def test_streams_too_long_for_a_step_are_refused_before_anything_is_spent(spec):
    with pytest.raises(UserError, match=r"network.streams: streams of 30 sentences of up to 24 tokens do not fit"):
        stage(**spec("network.streams.sentences=28"))
