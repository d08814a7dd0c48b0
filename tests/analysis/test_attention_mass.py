"""Attention on own tokens, against a sum over every weight, and nats by partition."""

import json
import math

import pytest
import torch
from typed import tandem

from tandem.analysis.attention_mass import sums_by_layer
from tandem.analysis.partitions import under_partitions
from tandem.corpus import IGNORE
from tandem.corpus.partition import PartitionConfig
from tandem.networks.double_decoder import DoubleDecoder
from tandem.nn.rope import rotate
from tandem.testing.cases import Case, document, pack


def build(**settings):
    shape = {"width": 32, "heads": 4, "context_layers": 2, "generation_layers": 3, "score_partitions": 2}
    return Case("", DoubleDecoder, DoubleDecoder.Config(**shape | settings)).build()


def by_hand(network, batch):
    """(own mass, entropy, variance) of every block of the generation stack, weight by weight, in one document."""
    x, T = network.embed(batch.tokens), batch.tokens.shape[1]
    blocks = network.partition(batch)
    latents, found = network.latents(x, batch.starts), []
    rotation = network.rotation(0, T, x)
    cos, sin = rotation.cos_TD, rotation.sin_TD
    states = []
    for block in network.generation_stack.blocks:
        block.register_forward_hook(lambda block, given, y: states.append(given[0]))
    network.generated(x, latents, batch.starts, blocks)
    for block, state in zip(network.generation_stack.blocks, states, strict=True):
        q, k, _ = block.qkv(block.norm_attention(state)).unflatten(-1, (12, 8)).split(4, dim=2)
        kc, _ = torch.nn.functional.linear(latents, block.qkv.weight[32:]).unflatten(-1, (8, 8)).split(4, dim=2)
        q, k, kc = (rotate(given, cos, sin, "adjacent")[0] for given in (q, k, kc))
        own, entropy, variance, asked, spread = 0.0, 0.0, 0.0, 0, 0
        for i in range(T):
            b = int(blocks[0, i])
            for h in range(4):
                keys = torch.cat((k[b : i + 1, h], kc[:b, h]))
                scores = keys @ q[i, h] / math.sqrt(8)
                p = scores.softmax(0)
                entropy -= (p * p.log()).sum().item()
                if b:
                    own, asked = own + p[: i + 1 - b].sum().item(), asked + 1
                if len(scores) > 1:
                    variance, spread = variance + scores.var(unbiased=False).item(), spread + 1
        found.append({"own_mass": (own, asked), "entropy": (entropy, 4 * T), "variance": (variance, spread)})
    return found


@torch.no_grad()
def test_own_mass_entropy_and_deviation_are_sums_over_the_weights():
    network, batch = build(), pack([[document(30, 1)]])
    found = sums_by_layer(network, batch)
    expected = by_hand(network, batch)
    for layer, measures in enumerate(expected):
        for name, (total, count) in measures.items():
            assert found["generation", layer][name] == (pytest.approx(total, abs=1e-9), count)
    shares = [total / count for total, count in (one["own_mass"] for one in expected)]
    assert len({round(share, 6) for share in shares}) == 3
    assert {place for place in found} == {("context", 0), ("context", 1), *(("generation", i) for i in range(3))}


@torch.no_grad()
def test_queries_without_context_are_left_out():
    network, batch = build(partition=PartitionConfig(strategy="single")), pack([[document(30, 1)]])
    assert sums_by_layer(network, batch)["generation", 0]["own_mass"] == (0.0, 0)
    assert network.watch is None


@torch.no_grad()
def test_nats_by_partition():
    network, batch = build(), pack([[document(30, 1), document(9, 2)]])
    found = under_partitions(network, batch)
    assert torch.equal(found["training"], network.score(batch))
    alone = build(partition=PartitionConfig(strategy="single")).score(batch)
    torch.testing.assert_close(found["single"], alone)
    every = build(partition=PartitionConfig(strategy="every_token")).score(batch)
    torch.testing.assert_close(found["every_token"], every)
    assert all((nats[batch.targets == IGNORE] == 0).all() for nats in found.values())


def test_both_analyses_of_a_run(tmp_path, small_corpus):
    small = ["budget=2 steps", "batch.rows=2", "batch.context=64", "sampling.tokens=3", "evaluation.documents=2"]
    run = ["train", "double_decoder/tiny", "--run", "dd", "--runs", str(tmp_path), *small, *small_corpus]
    assert tandem(*run).exit_code == 0
    for name in ("attention_mass", "partitions"):
        done = tandem("analyse", name, tmp_path / "dd", "documents=4")
        assert done.exit_code == 0, done.output
    mass = json.loads((tmp_path / "dd/analysis/attention_mass.json").read_text())
    assert all(0 < share < 1 for share in mass["generation_own_mass"]) and len(mass["generation_own_mass"]) == 2
    for name in ("context_score_deviation", "generation_entropy", "context_residual_rms"):
        assert len(mass[name]) == 2 and all(value > 0 for value in mass[name])
    nats = json.loads((tmp_path / "dd/analysis/partitions.json").read_text())["nats_per_token"]
    assert set(nats) == {"training", "every_token", "single"}
