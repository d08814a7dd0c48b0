"""Closed-form costs against integers worked out by hand for models of the papers; that they are what is run and held
is a check of the contract."""

import itertools
from dataclasses import replace

import pytest
import torch

from tandem.networks.cost import Cost
from tandem.networks.decoder import Decoder
from tandem.recipe import load


def on_meta(vocabulary, context=4096, **settings):
    with torch.device("meta"):
        return Decoder(Decoder.Config(**settings), vocabulary, context)


def sps_standard(depth, width, heads, vocabulary=50_304):
    """The baseline of State-Prediction Separation: a block of 13 C^2."""
    return on_meta(vocabulary, depth=depth, width=width, heads=heads, mlp_width=3 * width)


XS, XL = (8, 512, 8), (48, 1600, 25)


@pytest.mark.parametrize(
    ("scale", "training", "decode"),
    [(XS, 1_784_139_481_088, 122_830_848), (XL, 50_258_352_537_600, 3_670_732_800)],
)
def test_flops_of_the_smallest_and_the_largest_baseline_of_sps(scale, training, decode):
    cost = sps_standard(*scale).cost()
    assert sum(cost.training(4096).values()) == training
    assert cost.decode(1024) == decode


@pytest.mark.parametrize(
    ("scale", "parameters"),
    [
        (XS, 53_027_328),
        ((12, 768, 12), 130_665_216),
        ((24, 1024, 16), 378_717_184),
        ((36, 1280, 20), 831_253_760),
        (XL, 1_678_081_600),
    ],
)
def test_parameters_of_the_baselines_of_sps(scale, parameters):
    depth, C, _ = scale
    V = 50_304
    assert V * C + depth * (13 * C**2 + 2 * C) + C == parameters
    assert sps_standard(*scale, vocabulary=V - 2).cost().total_parameters == parameters  # two spare rows fill its table


@pytest.mark.parametrize(
    ("name", "width", "parameters"),
    [("270m", 576, 267_225_408), ("600m", 960, 600_208_320), ("3b", 2048, 3_564_259_328)],
)
def test_parameters_of_the_models_of_superposition(name, width, parameters):
    """Untied, with the tokenizer of Llama 3; beside it our tables hold rows to spare."""
    recipe = load(f"superposition/{name}")
    V = recipe.corpus.vocabulary
    with torch.device("meta"):
        cost = Decoder(recipe.network, V, 2048).cost()
    spare = 64  # two ids for sentence boundaries, rounded up to a multiple of 64
    assert cost.total_parameters == parameters + 2 * spare * width
    assert cost.parameters["embedding"] == cost.parameters["head"] == (V + spare) * width
    assert cost.head == V * width  # spare rows take no part


def test_parameters_of_the_model_of_patch_level_training():
    """Its authors say 370 M: a head of its own, 32,000 tokens."""
    V, spare, C = 32_000, 64, 1024
    with torch.device("meta"):
        cost = Decoder(load("superposition/patchtrain").network, V, 2048).cost()
    assert 2 * V * C + 24 * (4 * C**2 + 3 * C * 2752 + 2 * C) + C == 369_148_928
    assert cost.total_parameters == 369_148_928 + 2 * spare * C
    assert cost.head == V * C


@pytest.mark.parametrize(
    ("recipe", "linear", "head", "attention", "training"),
    [
        ("superposition/270m", 119_439_360, 73_875_456, 35_406_720, 1_372_329_216),
        ("superposition/600m", 353_894_400, 123_125_760, 62_945_280, 3_239_792_640),
    ],
)
def test_work_of_the_models_of_superposition(recipe, linear, head, attention, training):
    """Multiply-adds of a position; the paper's six FLOPs for each, where ours counts attention's recomputation, too."""
    settings = load(recipe).network
    with torch.device("meta"):
        cost = Decoder(settings, 128_256, 2048).cost()
    pairs = 2 * cost.pair * cost.pairs(2048) // 2048
    assert (cost.linear, cost.head, pairs) == (linear, head, attention)
    assert 6 * (linear + head + attention) == training
    assert sum(cost.training(2048).values()) == 2048 * (6 * (linear + head) + 7 * attention)


@pytest.mark.parametrize(("depth", "C", "beside"), [(6, 64, 295_808), (15, 192, None), (12, 832, None)])
def test_parameters_of_the_decoders_of_double_decoder(depth, C, beside):
    """12 C^2 L + 2 C L + 2 C beside the table: the last norm has a bias."""
    settings = load("decoder/paper", [f"network={{depth: {depth}, width: {C}, heads: {C // 64}}}"]).network
    with torch.device("meta"):
        counted = Decoder(settings, 32_766, 2048).cost().total_parameters - 32_768 * C
    assert counted == 12 * C**2 * depth + 2 * C * depth + 2 * C == (beside or counted)


@pytest.mark.parametrize("window", [None, 1, 4, 9, 30])
def test_pairs_are_those_that_the_spans_allow(window):
    cost = on_meta(61, width=32, heads=4, depth=3, window=window).cost()
    for n in (1, 3, 4, 5, 17):
        read = [min(i + 1, window or n) for i in range(n)]
        assert cost.pairs(n) == sum(read)
        assert [cost.keys(i) for i in range(n)] == read
        assert cost.cache(n) == 2 * 3 * 32 * min(n, window - 1 if window else n)


def test_grouped_keys_save_cache_and_projections_but_no_pairs():
    full, grouped = (on_meta(61, width=32, heads=4, depth=3, key_heads=g).cost() for g in (4, 1))
    assert grouped.cache(10) * 4 == full.cache(10)
    assert full.linear - grouped.linear == 3 * 32 * (2 * 3 * 8)
    assert grouped.pair == full.pair == 3 * 32


def test_documents_of_a_row_share_no_pairs():
    cost = on_meta(61, width=32, heads=4, depth=1).cost()
    whole, cut = cost.training(30), cost.training(30, documents=[10, 20])
    assert cut["attention"] * (30 * 31) == whole["attention"] * (10 * 11 + 20 * 21)
    assert (cut["linear"], cut["head"]) == (whole["linear"], whole["head"])


def test_prefill_and_decode_read_the_same_text_for_the_same_price():
    """Step by step costs what a prefill costs, but for the logits of each step."""
    for window in (None, 5):
        cost = on_meta(61, width=32, heads=4, depth=2, window=window).cost()
        steps = sum(cost.decode(n) for n in range(20))
        assert steps == cost.prefill(20) + 20 * 2 * cost.head


def test_roles_add_up_to_the_whole():
    cost = Cost({"a": 1, "b": 2}, 3, 4, 5, pairs=lambda n: n, keys=lambda n: n, cache=lambda n: n)
    assert cost.total_parameters == 3
    for part, tied in itertools.product(("adjacent", "learned"), (True, False)):
        network = on_meta(61, width=32, heads=4, depth=2, positions=part, tied=tied)
        roles = network.cost().parameters
        assert sum(roles.values()) == sum(p.numel() for p in network.parameters())
        assert roles["attention"] + roles["attention_out"] + roles["mlp"] + roles["mlp_out"] == network.cost().linear


def test_parts_of_a_cost_are_charged_where_they_are_spent():
    counts = {"pairs": lambda n: n * n, "keys": lambda n: n + 1, "cache": lambda n: n}
    plain = Cost({}, linear=3, head=4, pair=5, **counts)
    often = Cost({}, 3, 4, 5, passes=2.5, training_linear=7, prefill_linear=6, prefill_pairs=lambda n: n, **counts)
    held = Cost({}, 3, 4, 5, held_back=1, **counts)
    assert plain.training(10) == {"linear": 180, "attention": 7000, "head": 240}
    assert often.training(10) == {"linear": 420, "attention": 17_500, "head": 240}
    assert plain.prefill(10) == 60 + 2000 and often.prefill(10) == 120 + 200
    assert plain.first_logits(10) == 2060 + 8
    assert held.first_logits(10) == held.prefill(9) + held.decode(9) == 54 + 1620 + 14 + 200
    assert replace(held, held_back=0).first_logits(10) == 60 + 2000 + 14 + 200
