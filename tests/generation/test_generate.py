import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from tandem.corpus import Batch, Tokenizer
from tandem.generation.generate import TextStream, generate, generate_text, stream_text
from tandem.generation.sampling import Sampler, row_generators
from tandem.networks.decoder import Decoder
from tandem.recipe import UserError, registered
from tandem.testing.cases import VOCABULARY, Case

DRAWN, GREEDY = (Sampler(Sampler.Config(temperature=t)) for t in (1.0, 0.0))
PROMPTS = [[5, 2, 9], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [11, 12]]


def network_of(vocabulary=61, context=32, scale=3.0, **settings):
    network = Decoder(
        Decoder.Config(width=32, heads=2, depth=2, **settings), vocabulary, context, torch.Generator().manual_seed(0)
    )
    for parameter in network.parameters():
        parameter.data *= scale
    return network


def continuations(network, prompts, generators, **options):
    rows = [[] for _ in prompts]
    for row, token in generate(network, prompts, generators, **options):
        rows[row].append(token)
    return rows


@pytest.mark.parametrize("settings", [{}, {"window": 4}, {"positions": "learned"}])
def test_a_batch_gives_what_its_prompts_give_one_by_one(settings):
    network = network_of(context=96, **settings)
    options = {"sampler": DRAWN, "max_tokens": 80, "stop": 3}
    together = continuations(network, PROMPTS, row_generators(1, 4), **options)
    alone = [
        continuations(network, [prompt], [generator], **options)[0]
        for prompt, generator in zip(PROMPTS, row_generators(1, 4), strict=True)
    ]
    assert together == alone
    assert len(set(map(len, together))) > 1  # some stopped before others, and stayed stopped


def test_greedy_continuations_are_the_likeliest_tokens_of_full_passes():
    network = network_of()
    (text,) = continuations(network, [PROMPTS[0]], row_generators(0, 1), sampler=GREEDY, max_tokens=15)
    read = list(PROMPTS[0])
    for token in text:
        row = torch.tensor([read])
        hidden, _ = network(network.embed(row), Batch(row, row, torch.zeros_like(row)))
        assert token == int((hidden[0, -1] @ network.head.T).argmax())
        read.append(token)
    assert len(text) == 15


def test_a_row_ends_with_the_stop_token_or_at_its_length():
    network = network_of(scale=0.0)  # all tokens equally likely
    rows = continuations(network, [[1]] * 40, row_generators(0, 40), sampler=DRAWN, max_tokens=30, stop=2)
    assert all(2 not in row[:-1] for row in rows)
    assert all(row[-1] == 2 or len(row) == 30 for row in rows)
    assert {row[-1] == 2 for row in rows} == {True, False}
    unstopped = continuations(network, [[1]] * 40, row_generators(0, 40), sampler=DRAWN, max_tokens=30)
    assert {len(row) for row in unstopped} == {30}
    assert all(long[: len(row)] == row for row, long in zip(rows, unstopped, strict=True))


@pytest.mark.parametrize("name", ["boundary_decoder", "gestalt"])
def test_boundaries_never_take_the_place_of_the_tokens_asked_for(name):
    given = {"memory": 2, "cap": 7, "thought_from": 1} if name == "gestalt" else {}
    network = registered("network")[name]
    network = Case("", network, network.Config(width=32, heads=2, depth=2, **given)).build().float()
    with torch.no_grad():
        network.table.weight[VOCABULARY:] *= 3  # half of what is drawn
    rows = continuations(network, [[5, 3]] * 50, row_generators(0, 50), sampler=DRAWN, max_tokens=2)
    assert {len(row) for row in rows} == {2}
    assert max(map(max, rows)) < VOCABULARY


def test_nothing_runs_after_the_last_token(monkeypatch):
    network, steps = network_of(), []
    session = network.session(1)
    step = session.step
    monkeypatch.setattr(session, "step", lambda tokens: steps.append(tokens.shape) or step(tokens))
    monkeypatch.setattr(network, "session", lambda rows: session)
    list(generate(network, [[1, 2]], row_generators(0, 1), sampler=GREEDY, max_tokens=5))
    assert len(steps) == 1 + 4  # the prefill is a step of several tokens


def test_tokens_come_as_they_are_drawn():
    stream = generate(network_of(), [[1], [2]], row_generators(0, 2), sampler=GREEDY, max_tokens=10**9)
    assert [next(stream)[0] for _ in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("kind", [tuple, torch.tensor, lambda prompt: np.array(prompt, np.uint32)])
def test_prompts_are_any_sequences_of_whole_numbers(kind):
    network, options = network_of(), {"sampler": GREEDY, "max_tokens": 5}
    expected = continuations(network, PROMPTS, row_generators(0, 4), **options)
    assert continuations(network, [kind(prompt) for prompt in PROMPTS], row_generators(0, 4), **options) == expected
    with pytest.raises(TypeError, match="float"):
        generate(network, [kind([1, 2]), [1.5]], row_generators(0, 2), **options)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([1, 61], 5, r"prompt 2 has id 61; the network knows 0 to 60"),
        ([-1], 5, r"prompt 2 has id -1"),
        ([], 5, r"prompt 2 has no tokens"),
        ([1], 0, r"max_tokens = 0: ask for at least 1"),
        ([1] * 30, 4, r"prompt 2 has 30 tokens and 4 more are asked, .* positions for 32:"),
    ],
)
def test_what_can_not_be_generated_is_refused_before_anything_runs(prompt, max_tokens, message, monkeypatch):
    network = network_of(positions="learned")
    monkeypatch.setattr(network, "session", None)
    with pytest.raises(UserError, match=message):
        generate(network, [[1], prompt], row_generators(0, 2), sampler=GREEDY, max_tokens=max_tokens)


def test_learned_positions_serve_to_their_end_and_rotary_ones_beyond_the_context():
    learned, rotary = network_of(positions="learned"), network_of()
    for network, asked in ((learned, 3), (rotary, 50)):
        (text,) = continuations(network, [[1] * 30], row_generators(0, 1), sampler=DRAWN, max_tokens=asked)
        assert len(text) == asked


# ---- text -----------------------------------------------------------------------------------------------------------

TEXT = "naïve café, 東京 🦆 – ok"


def test_characters_appear_whole_however_many_tokens_they_span():
    tokenizer = Tokenizer.of_bytes()
    stream, pieces = TextStream(tokenizer), []
    for token in tokenizer.encode(TEXT).tolist():
        pieces.append(stream.push(token))
    assert [piece for piece in pieces if piece] == list(TEXT)
    assert stream.rest() == ""


def test_bytes_that_are_no_character_do_not_stop_the_stream():
    tokenizer = Tokenizer.of_bytes()
    stream = TextStream(tokenizer)
    shown = [stream.push(token) for token in (0xE6, 0x9D, *b"ab", 0xFF, *b"c", 0xF0, 0x9F)]
    assert "".join(shown) == "\ufffdab\ufffdc"
    assert stream.rest() == "\ufffd"


@pytest.mark.parametrize("stride", [1, 7])
def test_pieces_of_a_trained_tokenizer_join_to_its_text(stride):
    tokenizer = Tokenizer.train([TEXT * 20, "the cat sat on the mat " * 20], 300)
    ids = tokenizer.encode(TEXT * 3 + " the cat").tolist()[::stride]  # every seventh: characters torn apart
    stream = TextStream(tokenizer)
    assert "".join(stream.push(token) for token in ids) + stream.rest() == tokenizer.decode(ids)


@pytest.mark.parametrize("prompt", ["\U0001f600", "hi", "\u00e9\U0001f600"])
def test_bytes_of_a_character_in_the_prompt_are_not_read_with_those_that_follow(prompt, monkeypatch):
    """A decoder with byte fallback reads a run of them as one."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<0x00>", byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(inner)
    drawn = ((0, token) for token in "\U0001f600a".encode())
    monkeypatch.setattr("tandem.generation.generate._tokens", lambda *_, **__: drawn)
    network = network_of(tokenizer.vocabulary)
    assert generate_text(network, tokenizer, [prompt], sampler=GREEDY, max_tokens=5) == ["\U0001f600a"]


def test_words_keep_the_space_between_them_and_the_prompt(monkeypatch):
    """A decoder of sentence pieces drops the first space of a text: here that of the prompt, not of what follows."""
    inner = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "▁the": 1, "▁cat": 2, "▁sat": 3}, unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = Tokenizer(inner)
    inner.add_special_tokens(["<unk>"])
    drawn = ((row, token) for token in (3, 1) for row in (0, 1, 2))
    monkeypatch.setattr("tandem.generation.generate._tokens", lambda *_, **__: drawn)
    network = network_of(tokenizer.vocabulary)
    texts = generate_text(network, tokenizer, ["the cat", "", "the cat \N{SNOWMAN}"], sampler=DRAWN, max_tokens=2)
    assert texts == [" sat the", "sat the", " sat the"]


def test_streamed_pieces_join_to_what_is_returned_and_the_end_is_not_shown():
    tokenizer = Tokenizer.of_bytes()
    network, pieces, ends = network_of(tokenizer.vocabulary, scale=0.0), ["", "", ""], {}
    prompts, options = ["Once upon", "", "東"], {"sampler": DRAWN, "max_tokens": 300, "seed": 4}
    for piece in stream_text(network, tokenizer, prompts, **options):
        assert piece.row not in ends and (piece.text or piece.end)
        pieces[piece.row] += piece.text
        if piece.end:
            ends[piece.row] = piece
    texts = generate_text(network, tokenizer, prompts, **options)
    assert texts == pieces and all(texts)
    assert len(set(texts)) == 3 and "<|endoftext|>" not in "".join(texts)
    assert {piece.end for piece in ends.values()} == {"document", "length"}  # one ended by itself
    assert all((piece.tokens == 300) == (piece.end == "length") for piece in ends.values())


def test_as_many_prompts_are_served_at_a_time_as_asked_and_the_texts_do_not_depend_on_it(monkeypatch):
    tokenizer, sizes = Tokenizer.of_bytes(), []
    network = network_of(tokenizer.vocabulary, context=96)
    new = network.session
    monkeypatch.setattr(network, "session", lambda rows: sizes.append(rows) or new(rows))
    prompts, options = ["a", "cat sat", "", "naïve", "b"], {"sampler": DRAWN, "max_tokens": 20, "seed": 1}
    together = generate_text(network, tokenizer, prompts, **options)
    for rows in (2, 1):
        texts = [""] * len(prompts)
        for piece in stream_text(network, tokenizer, prompts, rows=rows, **options):
            texts[piece.row] += piece.text
        assert texts == together
    assert generate_text(network, tokenizer, iter(prompts), **options) == together
    assert sizes == [5, 2, 2, 1, *[1] * 5, 5]
    stream = stream_text(network, tokenizer, prompts, rows=2, **options)
    assert {next(stream).row for _ in range(8)} == {0, 1} and sizes[10:] == [2]  # the others have not begun


def test_a_wrong_prompt_is_told_by_its_number_before_any_is_served(monkeypatch):
    network = network_of(257, positions="learned")
    monkeypatch.setattr(network, "session", None)
    with pytest.raises(UserError, match="prompt 3 has 40 tokens and 5 more"):
        stream_text(network, Tokenizer.of_bytes(), ["a", "b", "c" * 40], sampler=DRAWN, max_tokens=5, rows=1)


@pytest.mark.parametrize(("prompt", "message"), [(b"bytes", "prompt 2 is bytes, not text"), ("a\udc80", "not UTF-8")])
def test_prompts_that_are_not_text_are_refused(prompt, message):
    tokenizer = Tokenizer.of_bytes()
    with pytest.raises(UserError, match=message):
        generate_text(network_of(257), tokenizer, ["a", prompt], sampler=DRAWN, max_tokens=5)


def test_one_text_in_place_of_a_list_is_refused():
    with pytest.raises(UserError, match=r"pass a list, \['The'\]"):
        generate_text(network_of(257), Tokenizer.of_bytes(), "The", sampler=DRAWN, max_tokens=5)


@pytest.mark.parametrize("rows", [0, -1])
def test_less_than_one_row_at_a_time_is_refused(rows):
    with pytest.raises(UserError, match=f"rows = {rows}: serve at least 1"):
        stream_text(network_of(257), Tokenizer.of_bytes(), ["a"], sampler=DRAWN, max_tokens=5, rows=rows)


def test_a_tokenizer_of_more_ids_than_the_network_is_refused():
    with pytest.raises(UserError, match="prompt 1 has id 195; the network knows 0 to 60"):
        generate_text(network_of(), Tokenizer.of_bytes(), ["é"], sampler=DRAWN, max_tokens=5)
