"""Segmentations of a store: made once, beside the tokens, from the text that the tokens hold."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from pydantic import ValidationError
from tokenizers import models, pre_tokenizers

from tandem.corpus import Corpus, Segmentation, Tokenizer, open_sentences, prepare, segment
from tandem.corpus import sentences as module
from tandem.corpus.splitters import splitter
from tandem.corpus.store import Store, StoreWriter
from tandem.machine import end_with_parent
from tandem.recipe import UserError

pysbd = pytest.importorskip("pysbd")

TEXTS = [
    "Mr. Smith went to Washington. He arrived at 3.5 p.m., didn't he? Yes!",
    "\n\n A line first.\n\nThen ☉ another... . . one? And \U0001f600 so on.\n \nThe end",
    "One sentence only",
    "x",
    "and so it goes on and on, " * 40 + "until it ends.",
]


def made(folder, texts, tokenizer=None) -> Store:
    tokenizer = tokenizer or Tokenizer.train(TEXTS * 20, 330)
    writer = StoreWriter(folder, tokenizer)
    writer.append(*tokenizer.encode_batch(texts))
    writer.close([])
    return Store(folder)


@pytest.fixture
def store(tmp_path):
    return made(tmp_path / "store", TEXTS)


def sentences_of(store, found, i):
    tokens = store.document(i)
    starts = found.document(i)
    return [store.tokenizer.decode(tokens[a:b]) for a, b in zip(starts, [*starts[1:], len(tokens)], strict=True)]


def test_sentences_tile_every_document_and_decode_to_its_text(store):
    found = segment(store, Segmentation())
    assert found.firsts[0] == 0 and found.firsts[-1] == len(found.starts) == found.manifest.sentences
    for i, text in enumerate(TEXTS):
        assert "".join(sentences_of(store, found, i)) == text
        starts = found.document(i)
        lengths = np.diff(starts, append=len(store.document(i)))
        assert starts[0] == 0 and (lengths > 0).all() and (lengths <= 64).all()
    assert sentences_of(store, found, 0) == [
        "Mr. Smith went to Washington.",
        " He arrived at 3.5 p.m., didn't he?",
        " Yes!",
    ]
    assert len(found.document(2)) == len(found.document(3)) == 1  # documents of one sentence are kept
    assert len(found.document(4)) > 4 and found.manifest.counts["cut"] == 1


def test_white_space_around_a_line_is_no_part_of_what_is_cut():
    """WikiText's lines all begin with a space."""
    text = " Mr. Smith left. He ran.\n \n\t\u3000St. Paul fell. \n \n  It is 3.5 m. "
    ((pieces, by_pattern),) = splitter("rules", None, None)([text])
    assert "".join(pieces) == text and by_pattern == 0
    cut = ["Mr. Smith left.", "He ran.", "St. Paul fell.", "It is 3.5 m."]
    assert [piece.strip() for piece in pieces if piece.strip()] == cut


def test_lines_that_pysbd_changes_are_cut_by_the_pattern_instead():
    ((pieces, by_pattern),) = splitter("rules", None, None)(["Fine. Good.\nIt ☉ is. And . . . so? 3.5 on.\n\nEnd"])
    assert "".join(pieces) == "Fine. Good.\nIt ☉ is. And . . . so? 3.5 on.\n\nEnd" and by_pattern == 1
    by_hand = ["Fine.", "Good.", "It ☉ is.", "And .", ".", ".", "so?", "3.5 on.", "End"]
    assert [piece.strip() for piece in pieces if piece.strip()] == by_hand


def test_lines_that_pysbd_fails_on_are_cut_by_the_pattern_instead():
    text = "Mr. Low is in.\nSee Mr.\x1f5. Low is out.\nMr. End."
    ((pieces, by_pattern),) = splitter("rules", None, None)([text])
    assert "".join(pieces) == text and by_pattern == 1
    assert pieces == ["Mr. Low is in.\n", "See Mr.", "\x1f5.", " Low is out.\n", "Mr. End."]


def test_pysbd_is_given_one_line_at_a_time_and_none_without_end(monkeypatch):
    """Its time grows with the square of what it is given."""
    seen, endless = [], "x. " * 40_000

    class Told(pysbd.Segmenter):
        def segment(self, text):
            seen.append(text)
            return super().segment(text)

    monkeypatch.setattr(pysbd, "Segmenter", Told)
    text = f"One. Two.\n \nThree.\n{endless}"
    ((pieces, by_pattern),) = splitter.__wrapped__("rules", None, None)([text])
    assert seen == ["One. Two.", "Three."] and "".join(pieces) == text
    assert by_pattern == 1 and len(pieces) > 40_000


def test_processes_find_the_same_sentences_in_the_same_order(tmp_path, monkeypatch):
    store = made(tmp_path / "store", TEXTS * 6)
    alone = segment(store, Segmentation(cap=20))
    monkeypatch.setattr(module, "BATCH", 500)
    monkeypatch.setattr(module, "cores", lambda: 2)
    copy = made(tmp_path / "copy", TEXTS * 6)
    seen = []
    spread = segment(copy, Segmentation(cap=20), lambda done, total: seen.append((done, total)))
    assert np.array_equal(spread.starts, alone.starts) and spread.manifest == alone.manifest
    assert len(seen) > 3 and seen == sorted(seen) and seen[-1] == (len(store.tokens), len(store.tokens))


def test_processes_turn_tokens_into_text_themselves(store, monkeypatch):
    """One that did it for all others would keep no more than 25 cores busy."""
    monkeypatch.setattr(module, "BATCH", 50)
    monkeypatch.setattr(module, "cores", lambda: 2)
    by, decode = [], Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: by.append(os.getpid()) or decode(self, ids))
    segment(store, Segmentation())
    assert not by
    monkeypatch.setattr(module, "cores", lambda: 1)
    segment(store, Segmentation(cap=20))
    assert {*by} == {os.getpid()}  # alone, it does


def test_processes_end_with_the_one_that_is_killed(store, monkeypatch):
    """Else they would hold its locks, and the same command would wait for ever."""
    monkeypatch.setattr(module, "BATCH", 50)
    monkeypatch.setattr(module, "cores", lambda: 2)
    monkeypatch.setattr(module, "_lengths", lambda *_: time.sleep(60))
    if not (pid := os.fork()):
        try:
            segment(store, Segmentation())
        finally:
            os._exit(1)  # whatever happens, it is no second run of these tests
    until = time.monotonic() + 20
    while not (workers := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        assert time.monotonic() < until
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    try:
        while any(Path(f"/proc/{worker}").exists() for worker in workers):
            assert time.monotonic() < until
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(worker), signal.SIGKILL)


def test_a_process_ends_if_its_parent_died_before_it_could_ask():
    if not (pid := os.fork()):
        end_with_parent(signal.SIGKILL, parent=os.getpid())  # which is not its parent
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_segmentations_lie_beside_one_store_and_are_made_once(store, monkeypatch):
    before = store.fingerprint
    made_once = segment(store, Segmentation())
    segment(store, Segmentation(cap=32))
    segment(store, Segmentation(splitter="every", every=5))
    assert len(list((store.folder / "sentences").glob("*/manifest.json"))) == 3
    monkeypatch.setattr(module, "_write", None)
    again = segment(Store(store.folder), Segmentation())
    assert np.array_equal(again.starts, made_once.starts)
    manifest = again.manifest
    assert manifest.segmentation["cap"] == 64 and manifest.version.startswith("pysbd ")
    assert manifest.tokenizer == store.manifest.tokenizer
    Store(store.folder).verify()
    assert Store(store.folder).fingerprint == before


def test_an_interrupted_segmentation_goes_on_where_it_was(tmp_path, monkeypatch):
    """Two hours of work for 40 GB of text on 16 cores are not to be lost."""
    monkeypatch.setattr(module, "BATCH", 50)
    monkeypatch.setattr(module, "SAVE", 50)
    whole = segment(made(tmp_path / "whole", TEXTS * 4), Segmentation())
    store, seen, rest = made(tmp_path / "store", TEXTS * 4), [], []

    def interrupt(done, total):
        seen.append(done)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        segment(store, Segmentation(), interrupt)
    (partial,) = (store.folder / "sentences").glob(".*.partial")
    with (partial / "starts.bin").open("ab") as file:
        file.write(b"killed within a number")
    found = segment(store, Segmentation(), lambda done, total: rest.append(done))
    assert seen == sorted(seen) and rest == sorted(rest) and seen[-1] < rest[0] and rest[-1] == len(store.tokens)
    assert np.array_equal(found.starts, whole.starts) and found.manifest == whole.manifest
    names = {str(path.relative_to(store.folder / "sentences")) for path in (store.folder / "sentences").rglob("*")}
    folder = partial.name.removeprefix(".").removesuffix(".partial")
    assert names == {f".{folder}.lock", folder, f"{folder}/manifest.json", f"{folder}/starts.bin"}


def test_a_segmentation_is_saved_now_and_then_and_at_its_end(tmp_path, monkeypatch):
    """A disk takes longer to save a batch of spans than it takes to find it."""
    store = made(tmp_path / "store", TEXTS * 6)
    monkeypatch.setattr(module, "BATCH", 50)
    monkeypatch.setattr(module, "SAVE", 200)
    saved, found = [], []
    monkeypatch.setattr(module, "replace_file", lambda path, data: saved.append(json.loads(data)[0]))
    segment(store, Segmentation(splitter="every", every=5), lambda done, total: found.append(done))
    assert 1 < len(saved) < len(found) and saved[-1] == len(store)
    assert (np.diff(store.offsets[[0, *saved[:-1]]]) >= 200).all()


def test_a_segmentation_that_lost_what_was_saved_is_begun_anew(store, monkeypatch):
    monkeypatch.setattr(module, "BATCH", 50)
    monkeypatch.setattr(module, "SAVE", 50)

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        segment(store, Segmentation(), interrupt)
    (starts,) = (store.folder / "sentences").glob(".*.partial/starts.bin")
    starts.write_bytes(b"")
    with pytest.raises(UserError, match=r"starts.bin: has lost what was saved of it; .* begins anew"):
        segment(store, Segmentation())
    assert "".join(sentences_of(store, segment(store, Segmentation()), 0)) == TEXTS[0]


def test_spans_of_equally_many_tokens(store):
    for every in (1, 5):
        found = segment(store, Segmentation(splitter="every", every=every))
        for i in range(len(TEXTS)):
            text_tokens = len(store.document(i)) - 1
            assert found.document(i).tolist() == list(range(0, text_tokens, every))  # the document end joins the last


def test_given_sentences_are_those_of_the_texts(tmp_path):
    parts = [["One. Still one. ", "Two. "], ["Three."], ["ha, " * 80, "x."]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in parts))
    (tmp_path / "own.txt").write_text("Held out.")
    own = str(tmp_path / "own.txt")
    corpus = prepare(
        Corpus.Config(
            texts=str(tmp_path / "a.jsonl"), validation=own, tokenizer="bytes", folder=str(tmp_path / "corpora")
        )
    )
    found = segment(corpus.train, Segmentation(splitter="given", cap=100))
    assert sentences_of(corpus.train, found, 0) == parts[0]
    assert sentences_of(corpus.train, found, 1) == parts[1]
    last = sentences_of(corpus.train, found, 2)
    assert "".join(last) == "".join(parts[2]) and last[-1] == "x." and len(last) > 4
    with pytest.raises(UserError, match=r"splitter = given: the texts have none"):
        segment(corpus.validation, Segmentation(splitter="given"))


# Segment any Text: a stand-in for the package, whose weights are not here ------------------------------------------


class SaT:
    def __init__(self, folder, tokenizer_name_or_path, ort_providers):
        assert (folder, tokenizer_name_or_path, ort_providers) == (SaT.folder, SaT.folder, ["CPUExecutionProvider"])

    def split(self, texts, threshold):
        """Like the package: a generator of lists, without the line breaks between sentences."""
        assert threshold == 0.15
        for text in texts:
            pieces = [piece for piece in text.replace(". ", ".\n").split("\n") if piece]
            yield pieces if SaT.honest else ["Something else."]


@pytest.fixture
def sat(tmp_path, monkeypatch):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    SaT.folder, SaT.honest = str(tmp_path / "weights"), True
    monkeypatch.setitem(sys.modules, "wtpsplit", SimpleNamespace(SaT=SaT))
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace())
    monkeypatch.setattr("importlib.metadata.version", lambda package: f"{package} stand-in")
    splitter.cache_clear()
    yield Segmentation(splitter="sat", weights=SaT.folder)
    splitter.cache_clear()


def test_segment_any_text_splits_through_its_package(tmp_path, sat):
    store = made(tmp_path / "store", ["One.\n\nTwo. Three", "Four", "", "\n"])
    found = segment(store, sat)
    assert [found.document(i).tolist() for i in (2, 3)] == [[0], [0]]
    assert [sentence.strip() for sentence in sentences_of(store, found, 0)] == ["One.", "Two.", "Three"]
    assert "".join(sentences_of(store, found, 0)) == "One.\n\nTwo. Three"
    assert found.manifest.version == "wtpsplit wtpsplit stand-in"
    (tmp_path / "weights" / "model.safetensors").write_text("other weights")
    splitter.cache_clear()
    segment(store, sat)
    assert len(list((store.folder / "sentences").glob("sat-*/manifest.json"))) == 2


def test_the_weights_may_lie_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Segmentation(splitter="sat", weights="~").weights == str(tmp_path)


def test_a_splitter_that_changes_the_text_is_refused_never_replaced(tmp_path, sat):
    SaT.honest = False
    with pytest.raises(UserError, match=r"splitter = sat: its sentences leave out text"):
        segment(made(tmp_path / "store", ["One. Two."]), sat)


def test_prompts_are_split_by_segment_any_text_where_a_run_was(sat):
    """Rules know that Gen. ends no sentence; the stand-in does not."""
    tokenizer, text = Tokenizer.of_bytes(), "He is Gen. Smith of old. Nobody saw"
    split = lambda how: [tokenizer.decode(part) for part in open_sentences(text, tokenizer, how)]
    assert split(sat) == ["He is Gen. ", "Smith of old. ", "Nobody saw"]
    assert split(Segmentation()) == ["He is Gen. Smith of old. ", "Nobody saw"]


def test_a_folder_that_the_package_cannot_use_is_named_with_what_it_has_to_hold(tmp_path, sat, monkeypatch):
    monkeypatch.setattr(SaT, "split", lambda *_, **__: 1 / 0)
    said = r"weights = .*weights cannot be used \(ZeroDivisionError: division by zero\); .*facebookAI/xlm-roberta-base"
    with pytest.raises(UserError, match=said):
        segment(made(tmp_path / "store", ["One. Two."]), sat)


# The package itself, with a model of one table: its logits end a sentence behind "." ------------------------------


def message(*fields) -> bytes:
    """A protobuf message of fields (number, value): whole numbers, texts or messages."""
    number = lambda n: bytes([n & 127 | 128]) + number(n >> 7) if n > 127 else bytes([n])
    made = b""
    for i, value in fields:
        content = value.encode() if isinstance(value, str) else value
        made += (
            number(i << 3) + number(value)
            if isinstance(value, int)
            else number(i << 3 | 2) + number(len(content)) + content
        )
    return made


def onnx_model() -> bytes:
    """logits (B, T, 1) = table (5, 1)[input_ids (B, T)], in float16; the attention mask is not read."""
    half, whole = 10, 7
    shape = lambda *sizes: message(*((1, message((2, size))) for size in sizes))
    value = lambda name, kind, *sizes: message((1, name), (2, message((1, message((1, kind), (2, shape(*sizes)))))))
    table = np.array([-10, -10, -10, -10, 10], np.float16).tobytes()
    graph = message(
        (1, message((1, "table"), (1, "input_ids"), (2, "logits"), (4, "Gather"))),
        (2, "graph"),
        (5, message((1, 5), (1, 1), (2, half), (8, "table"), (9, table))),
        (11, value("input_ids", whole, "B", "T")),
        (11, value("attention_mask", half, "B", "T")),
        (12, value("logits", half, "B", "T", "one")),
    )
    return message((1, 8), (7, graph), (8, message((2, 17))))


@pytest.fixture
def real_sat(tmp_path):
    pytest.importorskip("wtpsplit")
    pytest.importorskip("onnxruntime")
    from transformers import PreTrainedTokenizerFast

    words = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, ".": 4}
    inner = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>", "unk_token": "<unk>"}
    folder = tmp_path / "weights"
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "xlm-token", "num_labels": 1}')
    (folder / "model_optimized.onnx").write_bytes(onnx_model())
    splitter.cache_clear()
    return folder


def test_the_package_itself_splits_without_its_model_in_pytorch(tmp_path, real_sat):
    texts = ["One. Two.\n\nThree four.", " \n", "x", "\n Then. " * 400]
    store = made(tmp_path / "store", texts)
    found = segment(store, Segmentation(splitter="sat", weights=str(real_sat)))
    assert ["".join(sentences_of(store, found, i)) for i in range(len(texts))] == texts
    assert [part.split() for part in sentences_of(store, found, 0)] == [["One."], ["Two."], ["Three", "four."]]
    assert len(found.document(3)) == 400
    assert found.manifest.version.startswith("wtpsplit 2") and "wtpsplit.models" not in sys.modules


@pytest.mark.parametrize("lacks", ["config.json", "model_optimized.onnx", "tokenizer", "names of special tokens"])
def test_the_package_cannot_use_a_folder_that_lacks_something(tmp_path, real_sat, lacks):
    if lacks == "names of special tokens":  # as beside xlm-roberta-base itself
        (real_sat / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    else:
        [path.unlink() for path in real_sat.iterdir() if path.name.startswith(lacks)]
    said = r"weights = .*weights cannot be used \(\w+: .+\); .*facebookAI/xlm-roberta-base"
    with pytest.raises(UserError, match=said):
        segment(made(tmp_path / "store", ["One. Two."]), Segmentation(splitter="sat", weights=str(real_sat)))


def test_a_missing_package_is_named_with_the_line_that_installs_it(store, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wtpsplit", None)
    with pytest.raises(UserError, match=r"wtpsplit is not installed; pip install 'tandem-lm\[sat\]'"):
        segment(store, Segmentation(splitter="sat", weights=str(tmp_path)))
    monkeypatch.setitem(sys.modules, "pysbd", None)
    with pytest.raises(UserError, match=r"pysbd is not installed; pip install 'tandem-lm\[sentences\]'"):
        segment(store, Segmentation())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"splitter": "sat"}, "weights = None is no folder"),
        ({"splitter": "sat", "weights": "nowhere"}, "weights = nowhere is no folder"),
        ({"splitter": "every"}, "needs every, the tokens of a span"),
        ({"splitter": "every", "every": 5, "cap": 9}, "cap = 9: only for splitter rules, sat, given; this is every"),
        ({"every": 5}, "every = 5: only for splitter every; this is rules"),
        ({"weights": "x"}, "weights = x: only for splitter sat; this is rules"),
    ],
)
def test_options_that_do_not_fit_are_refused_as_the_recipe_is_read(options, said):
    with pytest.raises(ValidationError, match=said):
        Segmentation(**options)


def test_a_tokenizer_that_changes_the_text_is_refused(tmp_path):
    inner = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    store = made(tmp_path / "store", ["a b. a"], Tokenizer(inner))
    with pytest.raises(UserError, match="this tokenizer changes the text"):
        segment(store, Segmentation())
    assert segment(store, Segmentation(splitter="every", every=2)).starts.tolist() == [0, 2]


def test_a_segmentation_cut_short_is_refused(store):
    segment(store, Segmentation())
    (path,) = (store.folder / "sentences").glob("rules-*/starts.bin")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"does not hold the \d+ sentences of its manifest; delete"):
        segment(store, Segmentation())


@pytest.mark.parametrize("name", ["manifest.json", "starts.bin"])
@pytest.mark.parametrize("content", [None, b""])
def test_a_segmentation_that_is_damaged_is_refused_with_the_cure(store, name, content):
    segment(store, Segmentation())
    (path,) = (store.folder / "sentences").glob(f"rules-*/{name}")
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match=f"{path.name}.*; delete {path.parent}"):
        segment(store, Segmentation())
