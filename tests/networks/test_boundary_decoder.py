"""Gist masking: own sentence and the ends of those before, by hand, in training and in a session."""

import math

import pytest
import torch

from tandem.comparison.pretrain import pretrain
from tandem.comparison.trained import open_model
from tandem.corpus import IGNORE, Batch, BoundaryBatch, Tokenizer
from tandem.generation.generate import generate
from tandem.generation.sampling import Sampler, row_generators
from tandem.networks.boundary_decoder import BoundaryDecoder, gist_spans
from tandem.nn.spans import readable
from tandem.recipe import UserError, load
from tandem.testing.cases import CONTEXT, VOCABULARY, Case

END, BEGIN = VOCABULARY, VOCABULARY + 1
#       0      1  2  3    4      5  6    7      8  9  10     11
TEXT = [BEGIN, 5, 9, END, BEGIN, 7, END, BEGIN, 4, 0, BEGIN, 3]
STARTS = torch.tensor([[0] * 10 + [10] * 2])
SENTENCES = torch.tensor([[0] * 4 + [4] * 3 + [7] * 3 + [10] * 2])


def case(sentences: str = "gist") -> BoundaryDecoder:
    network = Case("", BoundaryDecoder, BoundaryDecoder.tiny()[sentences]).build()
    assert isinstance(network, BoundaryDecoder)
    return network


def batch() -> BoundaryBatch:
    tokens = torch.tensor([TEXT])
    targets = torch.cat((tokens[:, 1:], torch.full((1, 1), IGNORE)), 1)
    return BoundaryBatch(tokens, targets, STARTS, sentences=SENTENCES)


def test_experts_are_refused_as_padding_would_count_in_their_balance():
    with pytest.raises(UserError, match=r"network\.moe"):
        load("decoder/boundaries_tiny", ["network.moe={experts: 4, active: 2}", "network.mlp_width=24"])


def test_three_sentences_by_hand():
    own, index, ends = gist_spans(STARTS, SENTENCES)
    assert index[0, :2].tolist() == [3, 6]
    reads = torch.zeros(12, 12, dtype=torch.bool)
    reads |= readable(own, 12)[0]
    for column, position in enumerate(index[0].tolist()):
        reads[:, position] |= readable(ends, index.shape[1])[0, :, column]
    rows = ["".join("#" if bit else "." for bit in row) for row in reads.tolist()]
    assert rows == [
        "#...........",
        "##..........",
        "###.........",
        "####........",
        "...##.......",
        "...###......",
        "...####.....",
        "...#..##....",
        "...#..###...",
        "...#..####..",
        "..........#.",
        "..........##",
    ]


def test_a_token_reads_its_sentence_and_the_ends_before_it_and_nothing_else():
    network, given = case(), batch()
    network.stack = network.stack[:1]  # of one block what is read is what is known
    x = network.embed(given.tokens).detach().requires_grad_()
    nll = network.score(given, x)
    for i, read in ((8, {3, 6, 7, 8}), (5, {3, 4, 5}), (10, {10})):
        (grad,) = torch.autograd.grad(nll[0, i], x, retain_graph=True)
        assert {*(grad.abs().amax(-1) > 0).nonzero()[:, 1].tolist()} == read


@pytest.mark.parametrize("sentences", ["tokens", "gist", "learned"])
def test_a_session_gives_what_one_pass_gives(sentences):
    network, given = case(sentences), batch()
    text = torch.tensor([TEXT[:10]])
    hidden, _ = network(network.embed(given.tokens), given)
    full = (hidden @ network.head.T)[0].float()
    for first in (1, 4, 7):
        session = network.session(2)
        logits = session.prefill([TEXT[:first], TEXT[:first]])
        for i in range(first, 10):
            torch.testing.assert_close(logits[0], full[i - 1], atol=1e-4, rtol=1e-4)
            logits = session.step(text[0, i].expand(2))
        torch.testing.assert_close(session.fork().step(torch.tensor([1, 1])), session.step(torch.tensor([1, 1])))


@pytest.mark.parametrize("sentences", ["gist", "learned"])
def test_rows_of_a_session_may_stand_at_different_sentences(sentences):
    network, prompts = case(sentences), [TEXT[:10], TEXT[:5], [BEGIN, 8]]
    logits = network.session(3).prefill(prompts)
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(logits[row], network.session(1).prefill([prompt])[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n", [1, 27, 30, 100])
def test_training_with_gist_costs_the_keys_of_sentences_of_25_tokens(n):
    sentences = (torch.arange(n) // 27 * 27)[None]
    own, _, ends = gist_spans(torch.zeros_like(sentences), sentences)
    cost = case().cost()
    assert cost.pairs(n) == sum(int((span.hi - span.lo).sum()) for span in (own, ends))
    assert cost.prefill(n) == case("tokens").cost().prefill(n)


def test_boundaries_take_part_in_the_softmax_and_a_spare_row_does_not():
    assert len(case("tokens").head) == VOCABULARY + 2 < len(case("tokens").table.weight)
    config = BoundaryDecoder.Config(width=32, heads=4, depth=1, sentences=None)
    assert len(BoundaryDecoder(config, VOCABULARY, CONTEXT).head) == VOCABULARY


def test_a_prompt_is_given_its_boundaries():
    network = BoundaryDecoder(BoundaryDecoder.tiny()["gist"], 257, CONTEXT, torch.Generator().manual_seed(0))
    prompt = network.prompt(Tokenizer.of_bytes(), "It rains. He goes")
    assert prompt == [258, *b"It rains. ", 257, 258, *b"He goes"]  # of bytes, a space is a token of its own
    assert network.prompt(Tokenizer.of_bytes(), "") == [258]
    sampler = Sampler(Sampler.Config())
    made = list(generate(network, [prompt], row_generators(0, 1), sampler=sampler, max_tokens=9))
    assert len(made) <= 9 and all(token < 257 for _, token in made)


# ---- learned positions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sentences", ["tokens", "gist", None])
def test_learned_positions_are_as_many_as_a_row_can_take_and_without_boundaries_its_tokens(sentences):
    config = BoundaryDecoder.tiny()["learned"].model_copy(update={"sentences": sentences})
    network = BoundaryDecoder(config, VOCABULARY, 4, torch.Generator().manual_seed(0))
    assert network.places is not None
    assert len(network.places.weight) == (4 if sentences is None else 13)
    assert network.longest == 4
    text = torch.randint(VOCABULARY, (1, len(network.places.weight) + 1))
    network.score(Batch(text[:, 1:], text[:, 1:], torch.zeros_like(text[:, 1:])))
    with pytest.raises(ValueError, match="learned positions end"):
        network.score(Batch(text, text, torch.zeros_like(text)))


def test_learned_positions_last_for_all_boundaries_that_generation_may_draw():
    network, generators, read = case("learned").float(), row_generators(0, 1), []

    class Boundaries(Sampler):
        def choose(self, logits, generators):
            read.append(logits)
            return torch.where(logits[:, END] > -torch.inf, END, 1)

    options = {"sampler": Boundaries(Sampler.Config()), "max_tokens": CONTEXT}
    assert [*generate(network, [[BEGIN]], generators, **options)] == [(0, 1)] * CONTEXT
    assert len(read) == 3 * CONTEXT
    with pytest.raises(UserError, match=f"learned positions for {CONTEXT}"):
        generate(network, [[BEGIN, 1]], generators, **options)


@pytest.mark.parametrize("name", ["gpt2_boundaries", "gpt2_gist"])
def test_the_opponents_that_are_told_of_sentences_are_the_published_one(name):
    """But for two thirds of their positions, and one: 2,049 rows of the table, 1,573,632 numbers."""
    recipe, plain = load(f"gestalt/{name}"), load("gestalt/gpt2")
    assert {**recipe.values, "network": None} == {**plain.values, "network": None}
    own = {key: recipe.values["network"][key] for key in plain.values["network"]}
    assert own == {**plain.values["network"], "name": "boundary_decoder"}
    assert recipe.network.sentences == ("gist" if name == "gpt2_gist" else "tokens")
    with torch.device("meta"):
        network, decoder = (r.choice("network")(r.network, 50_257, r.batch.context) for r in (recipe, plain))
    shapes, expected = ({key: [*value.shape] for key, value in n.state_dict().items()} for n in (network, decoder))
    assert shapes == {**expected, "places.weight": [3073, 768]} and expected["places.weight"] == [1024, 768]
    roles, others = network.cost().parameters, decoder.cost().parameters
    assert sum(roles.values()) - roles["embedding"] == 85_056_000
    assert roles == {**others, "embedding": others["embedding"] + 2049 * 768}


@pytest.mark.parametrize("name", ["gpt2_boundaries", "gpt2_gist"])
def test_they_train_and_are_scored_where_every_token_is_a_sentence(name, small_corpus, tmp_path):
    shape = ["network.width=16", "network.depth=1", "network.heads=2", "batch.rows=4", "batch.context=8"]
    given = [*shape, *small_corpus, "corpus.sentences={splitter: every, every: 1}", "corpus.train_tokens=null"]
    given += ["budget=20 steps", "optimiser.lr=1e-2", "sampling.prompts=[]", "evaluation.final_documents=4"]
    result = pretrain(load(f"gestalt/{name}", given), tmp_path / "run")
    network, _ = open_model(tmp_path / "run")
    assert network.places.weight.shape == (25, 16)
    assert 0 < result["likelihood"]["nats_per_token"] < math.log(400)
