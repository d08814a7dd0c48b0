"""Double decoders at their paper's sizes: parameters, costs, rates and rows; and ours beside the decoders."""

import math

import pytest
import torch

from tandem.comparison.grid import rows_by_rule
from tandem.networks.decoder import Decoder
from tandem.networks.double_decoder import DoubleDecoder
from tandem.recipe import load
from tandem.training.optimiser import groups

SIZES = {  # width, context and generation layers, heads, parameters beside the table, FLOPs of the page's table
    "paper_6m": (192, 10, 5, 3, 6_642_048, 247_974_985_728, 35_743_334_400, 24_870_912, 3_840),
    "paper_12m": (256, 10, 5, 4, 11_805_184, 368_885_366_784, 56_381_931_520, 35_127_296, 5_120),
    "paper_25m": (448, 8, 4, 7, 28_913_920, 713_175_859_200, 115_576_143_872, 63_307_776, 7_168),
    "paper_50m": (576, 8, 4, 9, 47_791_872, 1_054_647_779_328, 180_004_847_616, 88_473_600, 9_216),
    "paper_100m": (832, 8, 4, 13, 99_703_552, 1_921_201_471_488, 350_738_186_240, 148_242_432, 13_312),
}


DECODERS = {  # of as many blocks: FLOPs of training a row, of a prompt and of a token, and bytes of cache a token
    "paper_6m": (243_445_137_408, 51_350_077_440, 49_446_912, 11_520),
    "paper_12m": (360_832_303_104, 80_546_365_440, 71_827_456, 15_360),
    "paper_25m": (693_445_853_184, 163_499_212_800, 131_203_072, 21_504),
    "paper_50m": (1_022_032_871_424, 253_699_817_472, 189_923_328, 27_648),
    "paper_100m": (1_853_153_083_392, 492_083_085_312, 335_675_392, 39_936),
}


def on_meta(recipe, vocabulary=32_768):
    with torch.device("meta"):
        return DoubleDecoder(load(f"double_decoder/{recipe}").network, vocabulary, 2048)


@pytest.mark.parametrize("recipe", SIZES)
def test_costs_of_the_papers_sizes(recipe):
    C, L_c, L_g, heads, _, training, prefill, decode, cache = SIZES[recipe]
    network = on_meta(recipe)
    c, cost = network.config, network.cost()
    assert (c.width, c.context_layers, c.generation_layers, c.heads) == (C, L_c, L_g, heads)
    assert sum(cost.training(2048).values()) == training
    assert (cost.prefill(2048), cost.decode(2047), 2 * cost.cache(1)) == (prefill, decode, cache)
    T, linear = 2048, cost.training(2048)["linear"]
    attention = 12 * T**2 * C * (L_c + L_g)  # the paper's, causality left out
    ratio = (linear + attention) / ((L_c + L_g) * 72 * T * C**2 + attention)
    if C in (256, 832):
        assert round(ratio, 4) == {256: 1.0238, 832: 1.0394}[C]


@pytest.mark.parametrize("recipe", SIZES)
def test_costs_of_the_decoders_beside_them(recipe):
    double, plain = load(f"double_decoder/{recipe}"), load(f"decoder/{recipe}")
    assert (double.batch, double.budget) == (plain.batch, plain.budget)
    with torch.device("meta"):
        cost = Decoder(plain.network, 32_768, 2048).cost()
    found = sum(cost.training(2048).values()), cost.prefill(2048), cost.decode(2047), 2 * cost.cache(1)
    assert found == DECODERS[recipe]


@pytest.mark.parametrize("recipe", [*SIZES, "paper"])
def test_parameters_of_the_papers_sizes(recipe):
    network = on_meta(recipe, 32_766)  # two spare rows fill the table
    C, beside = network.config.width, SIZES[recipe][4] if recipe in SIZES else 295_936
    assert network.cost().total_parameters == 32_768 * C + beside


@pytest.mark.parametrize(
    "name", [f"{n}/paper_{m}m" for n in ("decoder", "double_decoder", "encoder_decoder") for m in (6, 12, 25, 50, 100)]
)
def test_the_papers_sizes_have_the_rates_of_width_64(name):
    recipe = load(name)
    with torch.device("meta"):
        network = recipe.choice("network")(recipe.network, 32_766, 2048)
    hidden, rest, decay = 64 / recipe.network.width, 1.0, 0.1 if name.startswith("decoder") else 0.5
    assert {(group["scale"], group["weight_decay"]) for group in groups(network, recipe.optimiser)} == {
        (hidden, decay), (rest, decay), (rest, 0.0)
    }  # fmt: skip
    rates = recipe.choice("schedule")(recipe.schedule, 40)
    assert [round(rates(step), 4) for step in range(6)] == [0, 0.5, 1, 0.9763, 0.9526, 0.9289]


def test_keys_of_their_own_for_latents_cost_two_squares_a_block():
    settings = {"width": 64, "heads": 2}
    with torch.device("meta"):
        shared, own = (DoubleDecoder(DoubleDecoder.Config(**settings, shared_kv=s), 62, 40) for s in (True, False))
    assert own.cost().total_parameters - shared.cost().total_parameters == 2 * 2 * 64**2
    assert own.cost().training(40) == shared.cost().training(40)


def test_small_sizes_have_the_decoders_parameters():
    """Within 2 % beside the table."""
    for size, decoder in (("1m", "decoder/1m"), ("tiny", "decoder/tiny")):
        mine, theirs = load(f"double_decoder/{size}"), load(decoder)
        counts = []
        for recipe in (mine, theirs):
            with torch.device("meta"):
                network = recipe.choice("network")(recipe.network, 4096, 256)
            counts.append(network.cost().total_parameters - network.cost().parameters["embedding"])
        assert counts[0] == pytest.approx(counts[1], rel=0.02)


@pytest.mark.parametrize("recipe", SIZES)
def test_rows_of_a_billion_tokens_follow_the_authors_rule(recipe):
    """N are the blocks' matrices. Micro-batches divide the rows of other budgets, too: multiples of 32 in a grid."""
    C, L_c, L_g = SIZES[recipe][:3]
    for family in ("decoder", "double_decoder", "encoder_decoder"):
        batch = load(f"{family}/{recipe}").batch
        assert batch.rows == rows_by_rule(12 * C**2 * (L_c + L_g), 1e9)
        assert 32 % batch.micro_batches == 0


HOW = {  # all three networks of the paper
    "network": {"base_width": 64, "head_width": 64, "mlp": "gelu_tanh", "norm": "rms", "norm_eps": 2.0**-23,
                "bias": False, "qk_norm": False, "positions": "adjacent", "rope_base": 1e4, "final_norm": "layer",
                "init": "xavier"},
    "optimiser": {"name": "adamw", "betas": [0.9, 0.95], "eps": 1e-8, "max_norm": 1.0, "lr_scale": {}},
    "schedule": {"name": "linear", "warmup": 0.05, "floor": 0.1, "warmup_from_zero": True},
}  # fmt: skip
BLOCKS = {"tied": True, "shared_kv": True, "sink": True, "mixing": "softmax", "document_mask": False, "context_loss": 0}
SPLITS = {"strategy": "random_uniform", "scope": "row", "shared": True, "align": 1, "min_context": None}
PUBLISHED = ["decoder/paper", "encoder_decoder/paper_tuning", "double_decoder/paper"]
PUBLISHED += [f"{kind}_decoder/paper_{size}m" for kind in ("double", "encoder") for size in (6, 12, 25, 50, 100)]
CUT = {"name": "span_corruption", "density": 0.15, "span": 4.0, "sentinels": 100, "sampler": "poisson"}


def given(settings, expected):
    return {name: settings[name] for name in expected}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_papers_recipes_are_the_authors_settings(name):
    values, family = load(name).values, name.partition("/")[0]
    for section, expected in HOW.items():
        assert given(values[section], expected) == expected
    assert values["network"]["mlp_width"] == 4 * values["network"]["width"]
    rate = {"decoder": (0.01, 0.1), "double_decoder": (0.01, 0.5), "encoder_decoder": (0.004, 0.5)}[family]
    assert (values["optimiser"]["lr"], values["optimiser"]["weight_decay"]) == rate
    assert (values["corpus"]["vocabulary"], values["batch"]["context"]) == (32_768, 2048)
    if family == "double_decoder":
        assert given(values["network"], BLOCKS) == BLOCKS and values["network"]["partition"] == SPLITS
    assert values["objective"] == (CUT if family == "encoder_decoder" else {"name": "next_token"})


@pytest.mark.parametrize("first", PUBLISHED[:3])
def test_the_papers_prefix_lm_goes_on_from_the_tuning_size(first):
    before, after = load(first), load(f"{first.partition('/')[0]}/paper_prefix_lm")
    apart = {key for key, value in before.values["network"].items() if after.values["network"][key] != value}
    assert apart == ({"start", "decoder_positions"} if first.startswith("encoder") else set())
    assert apart <= set(before.choice("network").free)
    assert (before.batch, before.schedule, before.corpus) == (after.batch, after.schedule, after.corpus)
    assert (after.optimiser.lr, after.optimiser.weight_decay) == (2e-4, 0.1) and after.batch.rows == 32
    assert 10 * after.budget.amount == before.budget.amount and after.evaluation.prefix
    is_by_row = not first.startswith("encoder")  # which would generate all documents but one from nothing
    assert (after.objective.scope, after.objective.shared) == (("row", True) if is_by_row else ("document", False))


def test_residual_outputs_are_scaled_by_the_depth_of_their_own_stack():
    settings = {"width": 64, "heads": 2, "mlp_width": 128, "init": "per_matrix_scaled"}
    config = DoubleDecoder.Config(**settings, context_layers=6, generation_layers=2)
    network = DoubleDecoder(config, 62, 40, torch.Generator().manual_seed(0))
    for stack, depth in ((network.context_stack, 6), (network.generation_stack, 2)):
        for name, total in (("output", 2 * 64), ("mlp.down", 64 + 128)):
            drawn = torch.cat([block.get_submodule(name).weight.flatten() for block in stack.blocks])
            assert drawn.std().item() == pytest.approx(math.sqrt(4 / total / (2 * depth)), rel=0.03)
