"""Width transfer keeps the scale of activations, and the check can tell."""

import json

import pytest
import torch
from typed import tandem

from tandem.analysis import coordinate_check
from tandem.analysis.analysis import Sums
from tandem.analysis.coordinate_check import CoordinateCheck, at_width, roots, spread, watched
from tandem.corpus import Batch, prepare
from tandem.networks.decoder import Decoder
from tandem.recipe import UserError, configure, load, register_all
from tandem.training.health import NotFinite
from tandem.training.run import Run

ROWS = ["batch.rows=2", "batch.context=32", "network.width=32"]
SMALL = [*ROWS, "network.depth=2"]
STACKS = [*ROWS, "network.context_layers=1", "network.generation_layers=1"]


@pytest.mark.parametrize("recipe", ["decoder/tiny", "sps/tiny", "context_ready/tiny", "double_decoder/tiny"])
def test_scales_are_flat_with_width_transfer_and_not_without(recipe, small_corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["widths=[16, 128]", "lr=4e-3", "steps=6", *small_corpus]
    options += STACKS if recipe.startswith("double") else SMALL
    done = tandem("analyse", "coordinate_check", recipe, *options)
    assert done.exit_code == 0, done.output
    folder = tmp_path / "analysis" / recipe.replace("/", "-")
    record = json.loads((folder / "coordinate_check.json").read_text())
    assert record["transferred_residual_ratio"] < 2 < record["untransferred_residual_ratio"]
    assert record["base_width"] == 16 and len(record["scales"]["transferred"]) == 2
    first, *_ = (scales[0] for scales in record["scales"].values())
    assert len(first) == 3 and "logits" in first and all(value > 0 for value in first.values())
    assert (folder / "coordinate_check.png").stat().st_size > 5000


def test_steps_are_taken_at_the_peak_rate_and_scales_on_the_batch_after_them(small_corpus, monkeypatch):
    recipe = load(
        "decoder/tiny", [*SMALL, *small_corpus, "training.compile=false", "schedule.warmup=9", "optimiser.lr=3e-3"]
    )
    run, rates, take_step = Run(recipe, prepare(recipe.corpus)), [], coordinate_check.take_step
    monkeypatch.setattr(coordinate_check, "take_step", lambda *step: rates.append(take_step(*step).lr))
    monkeypatch.setattr(coordinate_check, "coordinates", lambda run, step: {"batch": step})
    for steps in (3, 0):
        rates.clear()
        assert CoordinateCheck(CoordinateCheck.Config(steps=steps)).scales(recipe, run) == {"batch": steps}
        assert rates == [3e-3] * steps


@pytest.mark.parametrize("steps", [1, 2])  # the scales are not finite, or the loss of the second step is not
def test_a_rate_at_which_training_fails_is_told(steps, small_corpus):
    recipe = load("decoder/tiny", [*SMALL, *small_corpus])
    check = CoordinateCheck(CoordinateCheck.Config(widths=[16, 32], steps=steps, lr=1e12))
    with pytest.raises(NotFinite, match=f"analysis.lr = .* width 16, base width 16, numbers after {steps} step.* not"):
        check.measure(Run(recipe, prepare(recipe.corpus)))


def test_a_mixture_of_experts_is_checked_too(small_corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experts = ["network.moe.experts=4", "network.moe.active=2"]
    done = tandem(
        "analyse", "coordinate_check", "decoder/tiny", "widths=[16, 32]", "steps=1", *experts, *SMALL, *small_corpus
    )
    assert done.exit_code == 0, done.output


def test_a_width_keeps_the_heads_and_the_shape_of_the_mlp():
    recipe = at_width(load("decoder/tiny", ["network.key_heads=1", "network.mlp_width=96"]), 128, 64)
    network = recipe.network
    assert (network.width, network.heads, network.key_heads, network.head_width) == (128, 4, 2, 32)
    assert (network.mlp_width, network.base_width, network.depth) == (192, 64, 4)
    derived = at_width(load("decoder/tiny"), 128, None).network
    assert derived.mlp_width == Decoder.Config(width=128, heads=4).mlp_width and derived.base_width is None
    with pytest.raises(UserError, match=r"analysis.widths: 48: no whole number of heads"):
        at_width(load("decoder/tiny"), 48, None)


def test_what_is_watched_is_what_the_blocks_put_out():
    network = Decoder(Decoder.Config(width=16, heads=2, depth=2, base_width=4), 30, 8, torch.Generator().manual_seed(0))
    tokens = torch.arange(16).view(2, 8)
    batch = Batch(tokens, tokens, torch.zeros(2, 8, dtype=torch.long))
    with torch.no_grad(), watched(network) as squares:
        hidden, _ = network(network.embed(tokens), batch)
        found = roots(squares)
        first = network.stack[0](network.embed(tokens), network.reader(network.embed(tokens), batch))
    assert list(found) == ["stack.0", "stack.1", "logits"]
    assert found["stack.0"] == pytest.approx(first.square().mean().sqrt().item(), rel=1e-5)
    assert found["logits"] == pytest.approx((hidden @ network.head.T).square().mean().sqrt().item(), rel=1e-5)
    assert not any(module._forward_hooks for module in network.modules())


def test_a_block_of_several_passes_tells_of_all_of_them():
    squares = Sums()
    squares.add("block", torch.full((2, 3), 1.0))
    squares.add("block", torch.full((6, 3), 9.0))
    assert roots(squares) == {"block": pytest.approx((28 / 4) ** 0.5)}
    assert spread({64: {"a": 1.0, "b": 3.0}, 128: {"a": 4.0, "b": 2.0}}) == {"a": 4.0, "b": 1.5}


def test_a_width_named_twice_is_refused():
    register_all()
    with pytest.raises(UserError, match=r"analysis.widths = \[64, 64, 128\]: .*each width once"):
        configure("analysis", "coordinate_check", ["analysis.widths=[64, 64, 128]"])


def test_a_width_that_cannot_be_built_is_refused_before_another_is_trained(tmp_path, small_corpus, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CoordinateCheck, "scales", lambda *_: pytest.fail("a network was trained"))
    done = tandem("analyse", "coordinate_check", "decoder/tiny", "widths=[64, 40]", *SMALL, *small_corpus)
    assert done.exit_code == 2 and "analysis.widths: 40: no whole number of heads" in done.output
