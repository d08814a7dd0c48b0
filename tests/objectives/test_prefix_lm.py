"""From a pretrained run to prefix LM and its score, for three networks on the same rows, by the command."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tandem.cli import main
from tandem.comparison.trained import open_trained
from tandem.corpus import suffix_windows
from tandem.evaluation.likelihood import likelihood
from tandem.recipe import UserError

SMALL = ["batch.rows=4", "batch.context=32", "sampling.tokens=3", "evaluation.rows=4", "network.width=32"]
PRETRAINING = {
    "decoder": ["decoder/tiny", "network.depth=2", "evaluation.prefix=true"],
    "double_decoder": ["decoder/tiny", "network.name=double_decoder", "network.context_layers=2", "network.heads=2",
                       "network.generation_layers=1", "evaluation.prefix=true"],
    "encoder_decoder": ["encoder_decoder/tiny", "network.encoder_layers=1"],
}  # fmt: skip


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
    store, network = run.corpus.validation, run.network.eval()
    given = {"context": 32, "prefix": True}
    whole, other = (likelihood(network, store, rows=rows, **given) for rows in (2, 7))
    np.testing.assert_allclose(whole.nats_by_document, other.nats_by_document, rtol=1e-4)
    half = likelihood(network, store, rows=4, share=(1, 2), **given)
    np.testing.assert_allclose(half.nats_by_document, whole.nats_by_document[1::2], rtol=1e-4)
    with pytest.raises(UserError, match="targets included"):
        likelihood(network, store, rows=4, context=32)
    assert torch.isfinite(torch.from_numpy(whole.nats_by_document)).all()
