"""From a pretrained run to prefix LM and its score, for three networks on the same rows, by the command."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tandem.cli import main
from tandem.comparison.trained import open_trained
from tandem.corpus import PrefixRows, Streams, suffix_windows
from tandem.corpus.partition import PartitionConfig
from tandem.evaluation.likelihood import likelihood
from tandem.networks.gestalt import GestaltDropout
from tandem.objectives.phases import Phases
from tandem.objectives.prefix_lm import PrefixLM
from tandem.recipe import UserError, load
from tandem.testing.cases import cases, document, packed

SMALL = ["batch.rows=4", "batch.context=32", "sampling.tokens=3", "evaluation.rows=4", "network.width=32"]
PRETRAINING = {
    "decoder": ["decoder/tiny", "network.depth=2", "evaluation.prefix=true"],
    "double_decoder": ["decoder/tiny", "network.name=double_decoder", "network.context_layers=2", "network.heads=2",
                       "network.generation_layers=1", "evaluation.prefix=true"],
    "encoder_decoder": ["encoder_decoder/tiny", "network.encoder_layers=1"],
}  # fmt: skip

ROWS = [[document(20, 1), document(12, 2)], [document(32, 3)]]


def tandem(*arguments):
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, small_corpus):
    """Folders of runs of prefix LM by network, each from a run of its own objective."""
    runs = tmp_path_factory.mktemp("runs")
    for name, recipe in PRETRAINING.items():
        given = [*recipe, *SMALL, *small_corpus, "--runs", runs]
        tandem("train", *given, "budget=4 steps", "--run", name)
        objective = ["objective={name: prefix_lm}", f"start.run={runs / name}", "seed=2", "budget=3 steps"]
        tandem("train", *given, *objective, "--run", f"{name}-tuned")
    return {name: runs / f"{name}-tuned" for name in PRETRAINING}


def test_three_networks_are_scored_on_the_same_tokens_of_the_same_documents(tuned):
    results = {name: json.loads((path / "result.json").read_text()) for name, path in tuned.items()}
    arrays = {name: dict(np.load(path / "documents.npz")) for name, path in tuned.items()}
    one, *others = arrays.values()
    for other in others:
        for key in ("documents", "document_tokens", "document_bytes"):
            assert np.array_equal(one[key], other[key])
        assert not np.array_equal(one["nats"], other["nats"])
    run = open_trained(tuned["decoder"])
    windows = list(suffix_windows(run.corpus.validation, 32))
    assert one["document_tokens"].sum() == sum(last - asked for *_, last, asked in windows)
    assert one["document_tokens"].sum() < 0.8 * (run.corpus.validation.lengths - 1).sum()
    assert all(result["likelihood"]["prefix"] for result in results.values())
    assert len({result["tokens"] for result in results.values()}) == 1


def test_they_started_from_the_weights_of_the_other_run(tuned):
    for name, path in tuned.items():
        before, after = (open_trained(p, unfinished=True).network.state_dict() for p in (path.parent / name, path))
        moved = max((after[key] - value).abs().max().item() for key, value in before.items())
        assert 0 < moved < 0.01


SINGLE = PartitionConfig(strategy="single")
FREE = {
    "decoder-house": {"dropout": 0.2},
    "encoder_decoder-house": {"start": 5, "decoder_positions": "offset"},
    "double_decoder-blocks": {"context_loss": 0.2, "score_partitions": 3, "partition": SINGLE},
    "context_ready-passes": {
        **{"passes": 9, "passes_min": 2, "score_passes": 3, "unroll": "bptt"},
        **{"correction_init": "zero", "prefill": "converge", "tolerance": 1e-5, "dropout": 0.2},
    },
    "gestalt-alternate": {
        **{"detach": True, "hinge": 0.5, "reduction": "tokens"},
        **{"dropout": GestaltDropout(token=0.5), "streams": Streams(sentences=3)},
    },
}


@pytest.mark.parametrize("name", FREE)
def test_what_no_weight_depends_on_may_change_where_another_run_goes_on(name):
    case = next(case for case in cases() if case.name == name)
    changed = replace(case, config=case.config.model_copy(update=FREE[name]))
    other, network = case.build(seed=1), changed.build()
    network.start_from(other)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in network.state_dict().items())
    assert set(FREE[name]) == set(network.free)
    with pytest.raises(UserError, match=r"rope_base: 10000.0 there, 500.0 here$"):
        replace(changed, config=changed.config.model_copy(update={"rope_base": 500.0})).build().start_from(other)


def test_after_span_corruption_alone_it_is_no_language_model(tuned):
    spans = tuned["encoder_decoder"].parent / "encoder_decoder"
    assert not (spans / "model").exists()
    with pytest.raises(UserError, match="no language model yet: it has read texts with gaps alone"):
        open_trained(spans)
    for path in tuned.values():
        assert tandem("generate", path / "model", "the cat", "--tokens", 3).startswith("the cat")
        assert "break points of held-out text" in tandem("evaluate", path, "--documents", 3)


def test_a_score_depends_on_neither_the_rows_at_a_time_nor_the_other_documents(tuned):
    run = open_trained(tuned["encoder_decoder"])
    store, network = run.corpus.validation, run.network
    given = {"context": 32, "prefix": True}
    whole, other = (likelihood(network, store, rows=rows, **given) for rows in (2, 7))
    np.testing.assert_allclose(whole.nats_by_document, other.nats_by_document, rtol=1e-4)
    half = likelihood(network, store, rows=4, share=(1, 2), **given)
    np.testing.assert_allclose(half.nats_by_document, whole.nats_by_document[1::2], rtol=1e-4)
    with pytest.raises(UserError, match="targets included"):
        likelihood(network, store, rows=4, context=32)
    assert torch.isfinite(torch.from_numpy(whole.nats_by_document)).all()


def whole_run(after, steps=10, since=0.7):
    objective = PrefixLM(PrefixLM.Config(after=after, since=since))
    return objective, Phases(objective.phases(packed(ROWS), steps))


@pytest.mark.parametrize("after", ["next_token", "span_corruption"])
def test_what_is_asked_first_ends_where_it_says_and_prefix_lm_reads_on(after):
    objective, phases = whole_run(after)
    (first,) = objective.first.phases(packed(ROWS), 10)
    assert [phases.at(step).note for step in (0, 6, 7, 9)] == [first.note, first.note, "", ""]
    assert torch.equal(phases.batch(6).tokens, first.view.batch(6).tokens)
    assert torch.equal(phases.batch(8).tokens, packed(ROWS).batch(8).tokens)
    assert [phases.tokens(step) for step in (7, 8)] == [7 * 64, 8 * 64]
    assert torch.equal(phases.batch(7).blocks, PrefixRows(packed(ROWS).from_token(7 * 64)).batch(0).blocks)


@pytest.mark.parametrize(("name", "after"), [("decoder", "next_token"), ("encoder_decoder", "span_corruption")])
def test_each_phase_asks_as_its_objective_does_alone(name, after):
    case = next(case for case in cases() if str(case).startswith(name + "-"))
    network = case.fresh()
    objective, phases = whole_run(after)
    for step, alone in ((0, objective.first), (7, PrefixLM(PrefixLM.Config()))):
        batch = phases.batch(step)
        counts = objective.count(network, batch)
        assert counts == alone.count(network, batch)
        (loss, sums), (wanted, _) = (one.loss(network, batch, counts) for one in (objective, alone))
        assert torch.equal(loss, wanted) and sums.keys() == {"nll"}


def test_one_run_of_both_is_a_language_model(tuned, tmp_path, small_corpus):
    given = [*PRETRAINING["encoder_decoder"], *SMALL, *small_corpus, "budget=6 steps", "evaluation.points=3"]
    objective = "objective={name: prefix_lm, after: span_corruption, since: 4}"
    tandem("train", *given, objective, "--run", "both", "--runs", tmp_path)
    assert tandem("generate", tmp_path / "both" / "model", "the cat", "--tokens", 3).startswith("the cat")
    both, alone = (json.loads((path / "result.json").read_text()) for path in (tmp_path / "both", tuned["decoder"]))
    assert both["likelihood"]["tokens"] == alone["likelihood"]["tokens"] and both["tokens"] == 6 * 4 * 32
    curve = map(json.loads, (tmp_path / "both" / "metrics.jsonl").read_text().splitlines())
    assert [record["step"] for record in curve if record["kind"] == "likelihood"] == [2, 4, 6]


def test_a_run_that_would_never_come_to_prefixes_is_refused():
    for after, since in (("next_token", 9), ("next_token", 1.0), (None, None)):
        whole_run(after, since=since)[0].require(10)
    with pytest.raises(UserError, match=r"objective.since = 10: the run has 10 steps.*never come to prefix LM"):
        whole_run("next_token", since=10)[0].require(10)


def test_where_nothing_ends_is_refused(tmp_path):
    given = ["objective={name: prefix_lm}", "evaluation.prefix=true"]
    recipe = load("decoder/tiny", given)
    (tmp_path / "whole.yaml").write_text(recipe.to_yaml())
    assert load(str(tmp_path / "whole.yaml")).objective.since is None
    assert load("decoder/tiny", [*given, "objective.after=next_token"]).objective.since == 0.9
    with pytest.raises(UserError, match=r"since = 0\.5: where what is asked first ends; name it in after"):
        load("decoder/tiny", [*given, "objective.since=0.5"])


@pytest.mark.parametrize(
    ("recipe", "after", "words"),
    [
        ("decoder/tiny", "span_corruption", "network decoder has no encoder"),
        ("encoder_decoder/tiny", "next_token", "network encoder_decoder reads in both directions"),
        ("encoder_decoder/tiny", "span_corruption", "asks for 100 sentinels, network.sentinels is 7"),
    ],
)
def test_what_a_network_can_not_be_asked_first_is_refused(recipe, after, words):
    given = [f"objective={{name: prefix_lm, after: {after}}}", "evaluation.prefix=true"]
    with pytest.raises(UserError, match=f"objective.after.*{words}"):
        load(recipe, [*given, "network.sentinels=7"] if recipe.startswith("enc") else given)
