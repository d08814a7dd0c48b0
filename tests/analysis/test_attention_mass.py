"""Attention on own tokens and its like, against a sum over every weight; bounds of a score, against other settings."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from typed import tandem

from tandem.analysis.analysis import Sums
from tandem.analysis.attention_mass import AttentionMass, add_by_layer
from tandem.corpus.given import GivenTexts
from tandem.corpus.partition import PartitionConfig
from tandem.networks.decoder import Decoder
from tandem.networks.double_decoder import DoubleDecoder
from tandem.nn.rope import rotate
from tandem.testing.cases import VOCABULARY, Case, document, pack


def build(**settings):
    shape = {"width": 32, "heads": 4, "context_layers": 2, "generation_layers": 3, "score_partitions": 2}
    return Case("", DoubleDecoder, DoubleDecoder.Config(**shape | settings)).build()


def by_hand(network, batch):
    """(sum, count) of every measure by stack and layer, weight by weight, in one document."""
    x, T = network.embed(batch.tokens), batch.tokens.shape[1]
    blocks, c = network.partition(batch), network.config
    seen = []
    hooks = [b.register_forward_hook(lambda block, given, y: seen.append((given[0], y[0]))) for b in network.blocks]
    latents = network.latents(x, batch.starts)
    network.generated(x, latents, batch.starts, blocks)
    for hook in hooks:
        hook.remove()
    H, G, found = c.heads, c.derived[0], {}
    rotation = network.rotation(0, T, x)
    for number, (block, (state, y)) in enumerate(zip(network.blocks, seen, strict=True)):
        generates = number >= c.context_layers
        place = ("generation", number - c.context_layers) if generates else ("context", number)
        q, k, _ = block.qkv(block.attention_norm(state)).unflatten(-1, (-1, 8)).split((H, G, G), dim=2)
        kc, _ = torch.nn.functional.linear(latents, block.qkv.weight[8 * H :]).unflatten(-1, (-1, 8)).split(G, dim=2)
        q, k, kc = (rotate(given, rotation.cos_TJ, rotation.sin_TJ, "adjacent")[0] for given in (q, k, kc))
        own, entropies, variances = [], [], []
        for i in range(T):
            b = int(blocks[0, i]) if generates else 0
            for h in range(H):
                g = h * G // H
                latent = kc[: max(b, c.sink), g] if generates else kc[:0, g]
                scores = torch.cat((k[b : i + 1, g], latent)) @ q[i, h] / math.sqrt(8)
                p = scores.softmax(0)
                entropies.append(-(p * p.log()).sum())
                own += [p[: i + 1 - b].sum()] if b else []
                variances += [scores.var(unbiased=False)] if len(scores) > 1 else []
        measures = {"entropy": entropies, "variance": variances, "residual": y.square().flatten().tolist()}
        measures |= {"own_mass": own} if generates else {}
        found[place] = {name: (float(sum(values)), len(values)) for name, values in measures.items()}
    return found


def sums_of(network, batch):
    add_by_layer(sums := Sums(), network, batch)
    return sums


@torch.no_grad()
@pytest.mark.parametrize("settings", [{}, {"key_heads": 2}, {"sink": True}], ids=["plain", "grouped", "sink"])
def test_all_measures_are_sums_over_the_weights(settings):
    network, batch = build(**settings), pack([[document(30, 1)]])
    found, expected = sums_of(network, batch), by_hand(network, batch)
    wanted = {(*place, name): told for place, measures in expected.items() for name, told in measures.items()}
    assert found.keys() == wanted.keys() and len(expected) == 5
    for place, (total, count) in wanted.items():
        assert found[place] == (pytest.approx(total, abs=1e-9), count)
    shares = [total / count for total, count in (expected["generation", layer]["own_mass"] for layer in range(3))]
    assert len({round(share, 6) for share in shares}) == 3


@torch.no_grad()
def test_a_plain_decoder_has_the_measures_of_a_generation_stack_without_context():
    network, batch = build(partition=PartitionConfig(strategy="single")), pack([[document(30, 1)]])
    _, plain, own = DoubleDecoder.degenerate(network.config)
    decoder = Case("", Decoder, plain).build(seed=1)
    decoder.load_state_dict({other: x for name, x in network.state_dict().items() if (other := own(name))})
    found, expected = sums_of(decoder, batch), sums_of(network, batch)
    assert {stack for stack, _, _ in found} == {"decoder"} and len(found) == 9
    for (_, layer, name), (total, count) in found.items():
        assert expected["generation", layer, name] == (pytest.approx(total, rel=1e-12), count)


@torch.no_grad()
@pytest.mark.parametrize("sink", [False, True])
def test_queries_without_context_are_left_out(sink):
    network, batch = build(partition=PartitionConfig(strategy="single"), sink=sink), pack([[document(30, 1)]])
    assert sums_of(network, batch)["generation", 0, "own_mass"] == (0, 0)
    assert network.watch is None


def record_of(network, texts, tokens):
    store = GivenTexts([[text] for text in texts], VOCABULARY)
    run = SimpleNamespace(
        network=network, corpus=SimpleNamespace(validation=store), device=SimpleNamespace(value="cpu")
    )
    return AttentionMass(AttentionMass.Config(tokens=tokens)).measure(run)


@torch.no_grad()
def test_a_record_is_a_mean_over_the_queries_of_all_documents():
    network, texts = build(), [document(n, n) for n in (30, 9, 20)]
    record, wanted = record_of(network, texts, 64), {}
    sums = [by_hand(network, pack([[text[:-1]]])) for text in texts]
    for stack, layer in sorted(sums[0]):
        for name in sums[0][stack, layer]:
            total, count = map(sum, zip(*(one[stack, layer][name] for one in sums), strict=True))
            named = {"variance": "score_deviation", "residual": "residual_rms"}.get(name)
            mean = total / count
            wanted.setdefault(f"{stack}_{named or name}", []).append(mean**0.5 if named else mean)
    assert record == {"documents": 3, **{name: pytest.approx(values, abs=1e-9) for name, values in wanted.items()}}


def test_what_a_document_lacks_is_no_query():
    for sink in (False, True):
        network, texts = build(sink=sink), [document(n, n) for n in (2, 9, 20)]
        assert record_of(network, texts, 64) == record_of(network, texts, 256)


def test_an_analysis_of_a_run_and_the_bounds_beside_its_score(tmp_path, small_corpus):
    small = ["budget=2 steps", "batch.rows=2", "batch.context=64", "sampling.tokens=3", "evaluation.documents=2"]
    run = ["train", "double_decoder/tiny", "--run", "dd", "--runs", str(tmp_path), *small, *small_corpus]
    assert tandem(*run).exit_code == 0
    done = tandem("analyse", "attention_mass", tmp_path / "dd", "documents=4")
    assert done.exit_code == 0, done.output
    mass = json.loads((tmp_path / "dd/analysis/attention_mass.json").read_text())
    assert all(0 < share < 1 for share in mass["generation_own_mass"]) and len(mass["generation_own_mass"]) == 2
    for name in ("context_score_deviation", "generation_entropy", "context_residual_rms"):
        assert len(mass[name]) == 2 and all(value > 0 for value in mass[name])

    def told(*settings):
        done = tandem("evaluate", tmp_path / "dd", *settings, "--documents", 4).stdout
        return re.findall(r"([\d.]+) nats/token|every_token ([\d.]+), single ([\d.]+)", done.replace("\n", " "))

    (_, (_, *bounds)) = told()
    nats = [told(f"network.partition.strategy={strategy}")[0][0] for strategy in ("every_token", "single")]
    assert bounds == nats and len(set(nats)) == 2
