"""Dropout of the decoder and of the networks around it; that of Thought Gestalt is in test_thoughts.py."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tandem.networks import boundary_decoder, decoder
from tandem.networks.boundary_decoder import BoundaryDecoder
from tandem.networks.context_ready import ContextReady
from tandem.networks.decoder import Decoder
from tandem.networks.head_ffn import HeadFFN
from tandem.objectives.next_token import NextToken
from tandem.objectives.superposition import mean_embedding
from tandem.recipe import UserError, load, recipes
from tandem.testing.cases import Case, document, pack
from tandem.testing.comparing import backward, same_gradients

PLAIN = {"width": 16, "heads": 2, "depth": 2}
PASSES = {**PLAIN, "passes": 3, "passes_min": None}
BATCH = replace(pack([[document(12, 1)], [document(5, 2), document(7, 3)]]), key=3)
TASK = NextToken(NextToken.Config())


def build(cls, **settings):
    return Case("", cls, cls.Config(**{"dropout": 0.3, **settings})).build()


@pytest.mark.parametrize(
    ("cls", "settings", "draws"),  # for the embedding, for every block, for every correction
    [
        (Decoder, PLAIN, 1 + 2),
        (BoundaryDecoder, PLAIN, 1 + 2),
        (HeadFFN, PLAIN, 1 + 2 + 1),
        (ContextReady, PASSES, 1 + 3 * 2 + 2),
        (ContextReady, {**PASSES, "correction": "block_head"}, 1 + 3 * 2),
    ],
)
def test_embeddings_attention_weights_and_what_is_added_are_dropped_anew_everywhere(cls, settings, draws, monkeypatch):
    dropped, weights, plain, attend = [], [], F.dropout, decoder.attend

    def drop(x, rate):
        dropped.append((torch.initial_seed(), tuple(x.shape), rate))
        return plain(x, rate)

    def read(*given, dropout=0.0, **more):
        weights.append((torch.initial_seed(), dropout))
        return attend(*given, dropout=dropout, **more)

    monkeypatch.setattr(F, "dropout", drop)
    for module in (decoder, boundary_decoder):
        monkeypatch.setattr(module, "attend", read)
    network = build(cls, **settings)
    before = torch.initial_seed()
    network(network.embed(BATCH.tokens), BATCH)
    assert torch.initial_seed() == before
    assert {(shape, rate) for _, shape, rate in dropped} == {((2, 12, 16), 0.3)}  # no inner channels of an MLP
    seeds = [seed for seed, *_ in dropped]
    blocks = [seed for seed, rate in weights if rate == 0.3]
    assert len(blocks) == len(weights) and [seeds.count(seed) for seed in blocks] == [2] * len(blocks)
    assert len(set(seeds)) == len(seeds) - len(blocks) == draws


@pytest.mark.parametrize(
    ("cls", "settings"), [(Decoder, PLAIN), (BoundaryDecoder, PLAIN), (HeadFFN, PLAIN), (ContextReady, PASSES)]
)
@pytest.mark.parametrize("rates", [0.3, {"token": 0.5, "attention": 0.2}, {"token": 0.5, "residual": 0.1}])
def test_rates_are_of_what_they_are_named_after(cls, settings, rates, monkeypatch):
    entries, weights, plain, attend = set(), set(), F.dropout, decoder.attend
    monkeypatch.setattr(F, "dropout", lambda x, rate: entries.add(rate) or plain(x, rate))
    for module in (decoder, boundary_decoder):
        read = lambda *given, dropout=0.0, **more: weights.add(dropout) or attend(*given, dropout=dropout, **more)
        monkeypatch.setattr(module, "attend", read)
    network = build(cls, **settings, dropout=rates)
    rates = rates if isinstance(rates, dict) else {"residual": rates, "attention": rates}
    x = network.embed(BATCH.tokens).detach().requires_grad_()
    network(x, BATCH)[0].square().sum().backward()
    assert entries == ({rates["residual"]} if "residual" in rates else set())
    assert weights == {rates.get("attention", 0.0)}
    out = (x.grad == 0).all(-1)
    assert out.any() == ("token" in rates) and not out.all()


@pytest.mark.parametrize("cls", [Decoder, BoundaryDecoder])
def test_tokens_are_dropped_with_their_positions_and_boundaries_are_not(cls):
    """At a rate of nearly 1: what is left is what boundaries, and only they, bring in."""
    network = build(cls, **PLAIN, positions="learned", dropout={"token": 1 - 1e-9})
    V, boundaries = network.vocabulary, 2 * (cls is BoundaryDecoder)
    tokens = torch.tensor([[V - 1, V - 2, V - 3, V - 4]]) + boundaries
    batch = replace(BATCH, tokens=tokens, targets=tokens, starts=torch.zeros_like(tokens))
    entered, states = [], network.states
    network.states = lambda x, reader: entered.append(x) or states(x, reader)
    network(network.embed(tokens), batch)
    expected = network.placed(network.embed(tokens), batch).masked_fill((tokens < V)[..., None], 0.0)
    assert torch.equal(entered[0], expected)


def test_bags_are_dropped_whole():
    network = build(Decoder, **PLAIN, dropout={"token": 1 - 1e-9})
    tokens = BATCH.tokens.reshape(2, 6, 2)
    starts = torch.zeros(2, 6, dtype=torch.long)
    entered, states = [], network.states
    network.states = lambda x, reader: entered.append(x) or states(x, reader)
    network(mean_embedding(network, tokens), replace(BATCH, tokens=tokens, targets=tokens, starts=starts))
    assert not entered[0].any()


@pytest.mark.parametrize(("cls", "settings"), [(Decoder, PLAIN), (ContextReady, PASSES)])
def test_masks_are_a_function_of_step_and_rows_and_recomputed_bit_by_bit(cls, settings):
    networks = [build(cls, **settings), build(cls, **settings)]
    networks[1].recompute = True
    losses = [backward(network, TASK, [BATCH]) for network in networks]
    assert losses[0] == losses[1]
    for one, other in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
    others = [backward(networks[0], TASK, [batch]) for batch in (replace(BATCH, key=4), replace(BATCH, row=2))]
    assert len({loss.item() for loss in (losses[0], *others)}) == 3


@pytest.mark.parametrize(("cls", "settings"), [(Decoder, PLAIN), (ContextReady, PASSES)])
def test_nothing_is_dropped_in_scores_and_sessions(cls, settings):
    network, plain = build(cls, **settings), build(cls, **settings, dropout=None)
    batch = replace(BATCH, key=None)
    assert torch.equal(network.score(batch), plain.score(batch))
    with torch.no_grad():
        assert torch.equal(network.score(BATCH), plain.score(batch))
    prompts = [[1, 2, 3], [4]]
    assert torch.equal(network.float().session(2).prefill(prompts), plain.float().session(2).prefill(prompts))
    plain.start_from(network)  # no weight depends on it


def test_the_published_opponent_takes_the_rates_of_thought_gestalt():
    given = ["network.dropout={token: 0.15, attention: 0.2, residual: 0.1}"]
    theirs = load("gestalt/paper").network.dropout
    found = load("gestalt/gpt2", given).network.dropout
    assert all(getattr(found, name) == getattr(theirs, name) for name in ("token", "attention", "residual"))
    assert load("gestalt/gpt2", ["network.dropout=0.1"]).network.dropout == 0.1
    for wrong in ("network.dropout=1.5", "network.dropout.token=1.5", "network.dropout.thought=0.1"):
        with pytest.raises(UserError, match=r"network\.dropout"):
            load("gestalt/gpt2", [wrong])


def test_compiled_blocks_drop_too():
    network, eager = build(Decoder, **PLAIN).compile("eager"), build(Decoder, **PLAIN)
    assert backward(network, TASK, [BATCH]) == backward(eager, TASK, [BATCH])
    same_gradients(network, eager, "compiled")


def test_the_papers_context_ready_networks_drop_a_fifth_and_their_decoders_too():
    papers = [name for name in recipes() if name.startswith("context_ready/paper_")]
    assert len(papers) == 13
    assert {load(name).network.dropout for name in papers} == {0.2}
    with pytest.raises(UserError, match=r"network.dropout.*: position by position .* nothing is dropped"):
        load("context_ready/paper_d6", ["network.unroll=bptt"])
