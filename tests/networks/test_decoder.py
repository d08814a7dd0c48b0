"""What is the decoder's own; what it shares with all networks is in test_contract.py."""

import math

import pytest
import torch

from tandem.corpus import Batch
from tandem.networks.decoder import Decoder
from tandem.networks.network import padded
from tandem.nn.rope import Rotation, rotate
from tandem.nn.spans import readable
from tandem.testing.cases import Case, document, pack, texts

CASES = {name: Case(name, Decoder, config) for name, config in Decoder.tiny().items()}


def decoded(network, batch):
    """The decoder written out with dense masks, rotary positions restarting in every document."""
    c, (B, T) = network.config, batch.tokens.shape
    x = network.table.weight[batch.tokens]
    place = torch.arange(T) - batch.starts
    if c.positions == "learned":
        x = x + network.places.weight[place]
    i, j = torch.arange(T)[:, None], torch.arange(T)
    may = (j <= i) & (j >= batch.starts[:, :, None]) & (True if c.window is None else i - j < c.window)

    def turned(y, b):
        table = Rotation(place[b], c.head_width, base=c.rope_base, pairing=c.positions, dtype=y.dtype)
        return rotate(y[None], table.cos_TJ, table.sin_TJ, c.positions)[0]

    for block in network.blocks:
        heads = block.qkv(block.attention_norm(x)).unflatten(-1, (-1, c.head_width))
        q, k, v = heads.split((c.heads, c.key_heads, c.key_heads), dim=2)
        if c.qk_norm:
            q, k = block.q_norm(q), block.k_norm(k)
        if c.positions != "learned":
            q, k = (torch.stack([turned(y[b], b) for b in range(B)]) for y in (q, k))
        k, v = (y.repeat_interleave(c.heads // c.key_heads, dim=2) for y in (k, v))
        score = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(c.head_width)
        weight = score.masked_fill(~may[:, None], -torch.inf).softmax(-1)
        x = x + block.output(torch.einsum("bhij,bjhd->bihd", weight, v).flatten(2))
        x = x + block.mlp(block.mlp_norm(x))
    return network.norm(x)


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_the_decoder_is_the_decoder_written_out(case):
    network, batch = case.build(), pack(texts())
    hidden, extra = network(network.embed(batch.tokens), batch)
    torch.testing.assert_close(hidden, decoded(network, batch), rtol=1e-9, atol=1e-9)
    assert extra.keys() == network.terms.keys()
    logits = hidden @ (network.table if case.config.tied else network.output).weight.T
    asked = batch.targets >= 0
    nll = -logits[..., : network.vocabulary].log_softmax(-1).gather(-1, batch.targets.clamp_min(0)[..., None])[..., 0]
    torch.testing.assert_close(network.score(batch), nll * asked, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [1, 2, 4])
def test_depth_times_a_window_is_how_far_a_token_reads(window):
    network = Case("", Decoder, Decoder.Config(width=32, heads=4, depth=3, window=window)).build()
    batch = pack([[document(5, 1), document(30, 2)]])
    x = network.embed(batch.tokens).detach().requires_grad_()
    hidden, _ = network(x, batch)
    for i in (5, 8, 20, 34):
        (grad,) = torch.autograd.grad(hidden[0, i].square().sum(), x, retain_graph=True)
        first = max(5, i - 3 * (window - 1))
        assert grad[0].abs().amax(-1).nonzero().flatten().tolist() == list(range(first, i + 1))


def test_a_row_that_begins_inside_a_document_begins_its_positions_there():
    network = CASES["gpt2"].build()
    text = document(20, 3)
    tokens = torch.tensor([text])
    alone = network.score(Batch(tokens[:, :-1], tokens[:, 1:], torch.zeros(1, 19, dtype=torch.long)))
    torch.testing.assert_close(alone, network.score(pack([[text]]))[:, :-1])


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_a_new_decoder_knows_nothing(case):
    """Initial logits are small: the loss starts at ln V."""
    network = Decoder(case.config, 1000, 40, torch.Generator().manual_seed(0))
    text = torch.randint(0, 1000, (4, 41), generator=torch.Generator().manual_seed(1))
    nll = network.score(Batch(text[:, :-1], text[:, 1:], torch.zeros(4, 40, dtype=torch.long))).mean().item()
    assert math.log(1000) - 0.02 < nll < math.log(1000) + 0.1


@pytest.mark.parametrize(("vocabulary", "rows"), [(62, 64), (63, 128), (61, 64), (50_257, 50_304)])
def test_tables_have_two_ids_to_spare_and_the_head_does_not_show_them(vocabulary, rows):
    assert padded(vocabulary) == rows
    for tied in (True, False):
        with torch.device("meta"):
            network = Decoder(Decoder.Config(width=16, heads=2, depth=1, tied=tied), vocabulary, 8)
        assert network.table.weight.shape == (rows, 16) and network.head.shape == (vocabulary, 16)


def test_a_tied_head_is_the_table_and_an_untied_one_is_not():
    tied, untied = CASES["house"].build(), CASES["qwen"].build()
    assert tied.head.data_ptr() == tied.table.weight.data_ptr()
    assert untied.head.data_ptr() == untied.output.weight.data_ptr() != untied.table.weight.data_ptr()


@pytest.mark.parametrize("prompts", [[[1]], [[1], []], [[1], [2], [3]]])
def test_a_session_takes_one_prompt_a_row_none_of_them_empty(prompts):
    with pytest.raises(ValueError, match="a session of 2 rows takes as many prompts, each of at least one token"):
        CASES["house"].build().session(2).prefill(prompts)


def test_a_text_longer_than_learned_positions_is_refused():
    network, text = CASES["gpt2"].build(), document(41, 1)
    network.score(pack([[text[:40], text[1:]]]))  # a row may be longer: positions restart
    with pytest.raises(ValueError, match="learned positions end at 40 tokens"):
        network.score(pack([[text]]))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
@pytest.mark.parametrize("name", ["house", "gpt2"])
def test_a_batch_of_no_tokens_is_refused(name, shape):
    none = torch.zeros(shape, dtype=torch.long)
    with pytest.raises(ValueError, match="{} rows of {} queries".format(*shape)):
        CASES[name].build().score(Batch(none, none, none))


def test_a_session_of_learned_positions_stops_at_its_last():
    session = CASES["gpt2"].build().session(2)
    session.prefill([[1] * 39, [1] * 5])
    session.step(torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="learned positions end at 40 tokens"):
        session.step(torch.tensor([1, 1]))


def test_a_picture_shows_the_spans_that_are_read():
    ((title, span, keys),) = Decoder.drawing(Decoder.Config(window=3), [0, 0, 0, 0, 4, 4])
    assert (title, keys) == ("tokens", 6)
    shown = readable(span, keys)[0].int().tolist()
    assert shown == [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0],
                     [0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1]]  # fmt: skip
