"""Recipes of the Context-Ready Transformer against the tables of the paper; how its correction starts."""

import math

import pytest
import torch

from tandem.networks.context_ready import ContextReady
from tandem.recipe import load, recipes
from tandem.training.schedule import WSD

DRAWN, FIXED = (5, 2), (10, None)
SIZES = {  # network, blocks, width, heads, rows, tokens of a row, thousands of steps, vocabulary, passes
    "d1": ("context_ready", 1, 2048, 16, 16, 1024, 100, 32_000, FIXED),
    "d5": ("context_ready", 5, 1120, 16, 64, 256, 100, 32_000, DRAWN),
    "d6": ("context_ready", 6, 1024, 16, 64, 256, 100, 32_000, DRAWN),
    "d12": ("context_ready", 12, 1024, 16, 64, 256, 100, 32_000, DRAWN),
    "n2": ("decoder", 2, 1888, 16, 64, 256, 100, 32_000, None),
    "n6": ("decoder", 6, 1088, 16, 64, 256, 100, 32_000, None),
    "n12": ("decoder", 12, 768, 16, 64, 256, 100, 32_000, None),
    "large_d6": ("context_ready", 6, 2048, 16, 32, 256, 200, 32_000, DRAWN),
    "large_n6": ("decoder", 6, 2176, 16, 32, 256, 200, 32_000, None),
    "large_n12": ("decoder", 12, 1536, 16, 32, 256, 200, 32_000, None),
    "large_n24": ("decoder", 24, 1088, 16, 32, 256, 200, 32_000, None),
    "wikipedia": ("context_ready", 3, 446, 1, 64, 256, 100, 16_000, DRAWN),
    "wikipedia_head_ffn": ("head_ffn", 3, 446, 1, 64, 256, 100, 16_000, None),
}
NETWORK = {"norm": "layer", "mlp": "gelu", "bias": True, "tied": False, "init": "torch", "positions": "adjacent"}
ADAMW = {"name": "adamw", "lr": 2e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "max_norm": 1.0}
DEFAULTS = {"correction": "add", "correction_init": "standard", "passes": 5, "passes_min": 2, "unroll": "passes"}
DEFAULTS |= {"score_passes": "stream", "prefill": "converge", "tolerance": 1e-5}


def test_all_recipes_of_the_paper_are_in_the_table():
    prefix = "context_ready/paper_"
    assert {name.removeprefix(prefix) for name in recipes() if name.startswith(prefix)} == set(SIZES)


@pytest.mark.parametrize("size", SIZES)
def test_a_recipe_is_the_papers(size):
    name, depth, width, heads, rows, context, thousands, vocabulary, passes = SIZES[size]
    recipe = load(f"context_ready/paper_{size}")
    network, values = recipe.network, recipe.values
    own = {"name": name, "depth": depth, "width": width, "heads": heads, "rope_base": 10_000.0}
    assert values["network"] | NETWORK | own == values["network"]
    assert network.mlp_width == 4 * width and network.key_heads == heads
    assert (recipe.batch.rows, recipe.batch.context, recipe.corpus.vocabulary) == (rows, context, vocabulary)
    assert (recipe.budget.unit, recipe.budget.amount) == ("steps", thousands * 1000)
    assert values["optimiser"] | ADAMW == values["optimiser"]
    rate = WSD(recipe.schedule, thousands * 1000)  # constant, without warm-up or decay
    assert [rate(step) for step in (0, 1, thousands * 1000 - 1)] == [1.0] * 3
    if passes:
        assert (network.passes, network.passes_min) == passes
        others = {key: value for key, value in DEFAULTS.items() if key not in ("passes", "passes_min")}
        assert values["network"] | others == values["network"]


def test_the_defaults_of_passes_and_corrections():
    config = ContextReady.Config()
    assert {key: getattr(config, key) for key in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize(("scheme", "down"), [("normal", 1.0), ("scaled", 1 / math.sqrt(2 * 3))])
def test_the_correction_starts_like_the_mlp_of_a_block(scheme, down):
    config = ContextReady.Config(width=128, heads=4, depth=3, mlp="gelu", init=scheme)
    network = ContextReady(config, 62, 8, torch.Generator().manual_seed(0))
    for mlp in (network.correction.F, network.blocks[0].mlp):
        assert mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.03)
        assert mlp.down.weight.std().item() == pytest.approx(0.02 * down, rel=0.03)
    assert not network.correction.F.up.bias.any() and not network.correction.F.down.bias.any()
