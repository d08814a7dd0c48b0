"""Every kind of tokenizer: text comes back, bytes add up, and no text can spell the document end."""

import json
import string
from unittest.mock import Mock

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, trainers

from tandem.corpus import tokenizer as module
from tandem.corpus.tokenizer import Tokenizer, load_tokenizer
from tandem.recipe import UserError

SAMPLE = [
    "The house keeps the order of the houses, and the other house keeps them.\n\n\n\nHéllo wörld 123.\n \n \n",
    "In a hole in the ground there lived a hobbit's friend; they'd said so.",
] * 20
BYTES, TRAINED = Tokenizer.of_bytes(), Tokenizer.train(SAMPLE, 320)
TELLING = st.sampled_from(["<|endoftext|>", "the", "\r\n\n", "  ", "é☃😀", "'ll"])
TEXT = st.lists(st.one_of(st.text(), TELLING)).map("".join)


def word_level() -> Tokenizer:
    """Not byte-level: lower case, white space lost, unknown words one id."""
    inner = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "é☃": 2, "house": 3}, unk_token="<unk>"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.enable_padding(length=8)
    inner.enable_truncation(3)
    return Tokenizer(inner)


def test_what_is_changed_or_lost_before_text_becomes_tokens_is_known():
    assert word_level().altered == string.ascii_uppercase + " and white space"
    assert BYTES.altered == TRAINED.altered == ""
    for normaliser, altered in (
        (normalizers.NFC(), ""),
        (normalizers.NFD(), ""),
        (normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]), ""),
        (normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]), "\u00e9"),
        (normalizers.Replace("a", ""), "a"),
        (normalizers.ByteLevel(), ""),
        (normalizers.Replace(tokenizers.Regex(r"\s+"), " "), "white space"),
    ):
        inner = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "the": 1}, unk_token="<unk>"))
        inner.normalizer = normaliser
        assert Tokenizer(inner).altered == altered, normaliser
    for splitter, lost in (
        (pre_tokenizers.Whitespace(), "white space"),
        (pre_tokenizers.BertPreTokenizer(), "white space"),
        (pre_tokenizers.Metaspace(), ""),
        (pre_tokenizers.ByteLevel(), ""),
    ):
        inner = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "the": 1}, unk_token="<unk>"))
        inner.pre_tokenizer = splitter
        assert Tokenizer(inner).altered == lost, splitter


@pytest.mark.parametrize("tokenizer", [BYTES, TRAINED], ids=["bytes", "bpe"])
@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_text_survives_and_bytes_add_up(tokenizer, text):
    (ids,), (sizes,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text
    assert sizes.sum() == len(text.encode()) and len(sizes) == len(ids)
    assert not (ids >= tokenizer.vocabulary).any() and tokenizer.eos not in ids
    for i, size in zip(ids, sizes, strict=True):
        piece = tokenizer.decode([i])
        assert len(piece.encode()) == size or "\ufffd" in piece  # a token may end inside a character


@settings(max_examples=40, deadline=None)
@given(text=TEXT)
def test_long_documents_are_encoded_in_pieces_that_change_nothing(text):
    text = (text + "ab\ncd 1\n\n\n\n 2 _\n \n \nx\n\n\ny") * 3
    whole = TRAINED.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", 5)
        pieces = list(module._pieces(text))
        assert "".join(pieces) == text and len(pieces) > 1
        np.testing.assert_array_equal(TRAINED.encode(text), whole)


@pytest.mark.parametrize("splits", ["nowhere", "at spaces", "at line breaks"])
def test_pieces_change_no_token_that_reaches_over_a_line_break(monkeypatch, splits):
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = tokenizers.Tokenizer(models.BPE(letters | {"aĊ": 256}, [("a", "Ċ")]))
    split = {"nowhere": "<>", "at spaces": " ", "at line breaks": "\n"}[splits]
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(split, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer, text = Tokenizer(inner), "aaaa aaaaaaa\n" * 3
    whole = tokenizer.encode(text)
    assert len(whole) == (39 if splits == "at line breaks" else 36)
    monkeypatch.setattr(module, "PIECE", 10)
    np.testing.assert_array_equal(tokenizer.encode(text), whole)


@pytest.mark.parametrize("tokenizer", [BYTES, TRAINED], ids=["bytes", "bpe"])
def test_long_documents_are_cut_where_no_token_is(tokenizer, monkeypatch):
    monkeypatch.setattr(module, "PIECE", 10)
    monkeypatch.setattr(module, "_pieces", pieces := Mock(wraps=module._pieces))
    assert tokenizer.decode(tokenizer.encode(SAMPLE[0])) == SAMPLE[0] and pieces.called


def test_of_a_long_document_few_pieces_are_encoded_at_a_time(monkeypatch):
    tokenizer, text = Tokenizer.of_bytes(), "a line\n" * 50
    whole = tokenizer.encode(text)
    monkeypatch.setattr(module, "PIECE", 10)
    monkeypatch.setattr(module, "AT_ONCE", 40)
    monkeypatch.setattr(tokenizer, "_inner", inner := Mock(wraps=tokenizer._inner))
    np.testing.assert_array_equal(tokenizer.encode(text), whole)
    sizes = [sum(map(len, call.args[0])) for call in inner.encode_batch_fast.call_args_list]
    assert sum(sizes) == len(text) and max(sizes) < 40 + 2 * 10


def test_bytes_are_their_own_ids_and_the_document_end_comes_next():
    assert BYTES.encode("Hi é").tolist() == list("Hi é".encode())
    assert (BYTES.eos, BYTES.vocabulary) == (256, 257)


def test_a_trained_tokenizer_has_the_size_asked_for_and_depends_on_its_texts_only():
    assert (TRAINED.vocabulary, TRAINED.eos) == (320, 319)
    assert len(TRAINED.encode("the house keeps the order")) < 15
    assert Tokenizer.train(iter(SAMPLE), 320).hash == TRAINED.hash != Tokenizer.train(SAMPLE, 319).hash


@pytest.mark.parametrize("make", [lambda: BYTES, lambda: TRAINED, word_level], ids=["bytes", "bpe", "word level"])
def test_a_tokenizer_survives_its_file(make, tmp_path):
    tokenizer = make()
    tokenizer.to_file(tmp_path / "tokenizer.json")
    again = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert (again.hash, again.eos, again.vocabulary) == (tokenizer.hash, tokenizer.eos, tokenizer.vocabulary)
    text = "the house <|endoftext|> of the é☃"
    np.testing.assert_array_equal(again.encode(text), tokenizer.encode(text))
    assert load_tokenizer(str(tmp_path)).hash == tokenizer.hash


def test_offsets_give_the_bytes_where_tokens_are_not_bytes():
    tokenizer = word_level()
    (ids,), (sizes,) = tokenizer.encode_batch([" The é☃  strange HOUSE the the\n"])
    assert ids.tolist() == [1, 2, 0, 3, 1, 1]  # neither padded nor cut
    assert sizes.tolist() == [4, 6, 9, 6, 4, 5]  # what precedes a token is its own, what is left the last one's
    assert (tokenizer.eos, tokenizer.vocabulary) == (4, 5)


@pytest.mark.parametrize("change", ["normaliser", "space before", "word of its own"])
def test_bytes_add_up_where_a_byte_level_tokenizer_changes_the_text(change):
    inner = tokenizers.Tokenizer.from_str(TRAINED._inner.to_str())
    if change == "normaliser":
        inner.normalizer = normalizers.NFKC()
    elif change == "space before":
        inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=True)])
    else:
        inner.add_tokens([tokenizers.AddedToken("ﬁne", lstrip=True)])
    (ids,), (sizes,) = Tokenizer(inner).encode_batch(["the ﬁne ☃ ½"])
    assert sizes.sum() == len("the ﬁne ☃ ½".encode()) and len(ids) == len(sizes)


@pytest.mark.parametrize("loses", ["unseen bytes", "white space", "split"])
def test_a_byte_level_tokenizer_that_drops_text_is_refused(loses):
    inner, byte_level = tokenizers.Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False)
    before = {"white space": pre_tokenizers.Whitespace(), "split": pre_tokenizers.Split(" ", "removed")}
    inner.pre_tokenizer = pre_tokenizers.Sequence([before[loses], byte_level] if loses in before else [byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet() if loses in before else []
    inner.train_from_iterator(["the house"], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    tokenizer, text = Tokenizer(inner), "the house" + ("" if loses in before else "☃")
    tokenizer.encode("house")
    with pytest.raises(UserError, match=f"corpus.tokenizer drops text, e.g. of '{text}': .* of {len(text.encode())} b"):
        tokenizer.encode(text)


def test_bytes_add_up_but_no_text_comes_back_where_the_decoder_is_missing(tmp_path):
    described = json.loads(TRAINED._inner.to_str()) | {"decoder": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    bare = load_tokenizer(str(tmp_path))
    (ids,), (sizes,) = bare.encode_batch([SAMPLE[0]])
    assert sizes.sum() == len(SAMPLE[0].encode()) and bare.decode(ids) != SAMPLE[0]
    assert TRAINED.is_lossless and not bare.is_lossless


def test_tokens_without_text_of_their_own_have_no_bytes():
    sizes = module._bytes_by_offset("é☃😀!", [(0, 1), (0, 0), (1, 2), (1, 2), (2, 3)])
    assert sizes.tolist() == [2, 0, 3, 0, 5]


def test_gpt2_files_are_read(tmp_path):
    written = {"H": 0, "i": 1, "Hi": 2, "Ġ": 3, "<|endoftext|>": 4, "<": 5, "|": 6, ">": 7}
    (tmp_path / "encoder.json").write_text(json.dumps(written))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\nH i\n", encoding="utf-8")
    tokenizer = load_tokenizer(str(tmp_path))
    (ids,), (sizes,) = tokenizer.encode_batch(["Hi i<|>"])
    assert ids.tolist() == [2, 3, 1, 5, 6, 7] and sizes.tolist() == [2, 1, 1, 1, 1, 1]
    assert (tokenizer.eos, tokenizer.vocabulary) == (4, 8)


def test_a_document_end_that_a_text_can_spell_is_refused():
    inner = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with pytest.raises(UserError, match="a text spells '</s>'"):
        Tokenizer(inner).encode("one </s> two")


def test_a_text_has_the_same_tokens_each_time_where_training_dropped_merges_at_random():
    inner = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.5))
    assert Tokenizer(inner).encode("ab" * 99).tolist() == [2] * 99


@pytest.mark.parametrize(
    ("model", "text", "unread"),
    [
        (models.Unigram([("a", -1.0), ("b", -1.0)]), "ab ac", "c"),
        (models.BPE({"a": 0, "b": 1, "日": 2}, []), "ab aé日", "é"),  # which it drops, and 日 seems to cover
        (models.WordLevel({"ab": 0, "b": 1}), "ab ac", "ac"),
    ],
)
def test_a_tokenizer_that_has_no_token_for_some_text_is_refused(model, text, unread):
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(inner)
    assert tokenizer.encode("ab ab").tolist() in ([0, 1, 0, 1], [0, 0])
    with pytest.raises(UserError, match=f"corpus.tokenizer cannot read '{unread}': .*; train it with an unknown"):
        tokenizer.encode(text)


@pytest.mark.parametrize("name", ["bpe2", "nowhere/tokenizer.json"])
def test_an_unknown_tokenizer_names_what_is_allowed(name):
    with pytest.raises(UserError, match=r'corpus.tokenizer = .* allowed are "bpe", "bytes" and such a path'):
        load_tokenizer(name)


def test_a_folder_with_the_older_files_names_the_cure(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    with pytest.raises(UserError, match=r"transformers makes tokenizer.json of it, by AutoTokenizer"):
        load_tokenizer(str(tmp_path))


def test_an_empty_vocabulary_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizers.Tokenizer(models.BPE()).to_str())
    with pytest.raises(UserError, match="its vocabulary is empty"):
        load_tokenizer(str(tmp_path))


def test_a_damaged_tokenizer_file_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read as a tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "encoder.json").write_text('{"H": 0}')
    (tmp_path / "vocab.bpe").write_text("#version\nH i\n")
    with pytest.raises(UserError, match="cannot be read as a tokenizer"):
        load_tokenizer(str(tmp_path))


def test_fewer_ids_than_bytes_are_refused():
    assert Tokenizer.train(["a text"], 257).vocabulary == 257
    with pytest.raises(ValueError, match="vocabulary = 256: at least 257"):
        Tokenizer.train(["a text"], 256)
