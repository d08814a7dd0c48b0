"""Gist masking: own sentence and the ends of those before, by hand, in training and in a session."""

import pytest
import torch

from tandem.corpus import IGNORE, BoundaryBatch, Tokenizer
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


@pytest.mark.parametrize("sentences", ["tokens", "gist"])
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


def test_rows_of_a_session_may_stand_at_different_sentences():
    network, prompts = case(), [TEXT[:10], TEXT[:5], [BEGIN, 8]]
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
