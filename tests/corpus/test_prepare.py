"""Preparing writes what the texts say, once, whatever interrupts it and whoever else is at it."""

import functools
import gc
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from tandem.corpus import Corpus, documents_to_read, prepare, prepare_texts, reading
from tandem.corpus import tokenizer as tokenizer_module
from tandem.corpus.files import File
from tandem.corpus.sources import find_sources
from tandem.corpus.tokenizer import Tokenizer, content_hash
from tandem.recipe import UserError

prepare_module = sys.modules["tandem.corpus.prepare"]
TEXTS = [f"Document {i} is about the number {i * i}.\né" * (1 + i % 5) for i in range(200)]


@pytest.fixture
def texts(tmp_path) -> Path:
    (tmp_path / "texts").mkdir()
    for part in range(2):
        lines = [json.dumps({"text": text}) + "\n" for text in TEXTS[part * 100 : part * 100 + 100]]
        (tmp_path / "texts" / f"{part}.jsonl").write_text("".join(lines))
    return tmp_path / "texts"


@pytest.fixture
def config(texts, tmp_path):
    return lambda **more: Corpus.Config(
        **{"texts": [str(texts)], "validation": 0.2, "tokenizer": "bytes", "folder": str(tmp_path / "corpora")} | more
    )


def texts_in(store):
    return [store.tokenizer.decode(store.document(i)) for i in range(len(store))]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize("batch", [1, 50, 1 << 21])
def test_both_stores_hold_the_documents_in_order(config, monkeypatch, tokenizer, batch):
    monkeypatch.setattr(reading, "BATCH", batch)
    corpus = prepare(config(tokenizer=tokenizer, **({"vocabulary": 300} if tokenizer == "bpe" else {})))
    train, validation = texts_in(corpus.train), texts_in(corpus.validation)
    assert train == [text for text in TEXTS if text in set(train)]
    assert sorted(train + validation) == sorted(TEXTS)
    assert 15 < len(validation) < 75
    for store in (corpus.train, corpus.validation):
        store.verify()
        assert store.manifest.bytes == sum(len(text.encode()) for text in texts_in(store))
    assert corpus.tokenizer.vocabulary == corpus.train.vocabulary == (300 if tokenizer == "bpe" else 257)


def test_pieces_and_batches_do_not_change_the_fingerprint(config, monkeypatch, tmp_path):
    first = prepare(config(tokenizer="bpe", vocabulary=280))
    monkeypatch.setattr(reading, "BATCH", 300)
    monkeypatch.setattr(tokenizer_module, "PIECE", 20)
    second = prepare(config(tokenizer="bpe", vocabulary=280, folder=str(tmp_path / "other")))
    assert second.train.folder.parent.name == first.train.folder.parent.name
    assert second.train.fingerprint == first.train.fingerprint
    assert second.validation.fingerprint == first.validation.fingerprint


def test_the_side_of_a_document_depends_on_its_text_alone(config, texts):
    held_out = set(texts_in(prepare(config()).validation))
    (texts / "0.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[::-3]))
    (texts / "1.jsonl").unlink()
    assert set(texts_in(prepare(config()).validation)) == held_out & set(TEXTS[::-3])
    assert set(texts_in(prepare(config(validation=0.4)).validation)) > held_out & set(TEXTS[::-3])


def test_validation_texts_of_its_own_leave_the_training_texts_whole(config, texts, tmp_path):
    (tmp_path / "own.txt").write_text("Held out.")
    corpus = prepare(config(validation=str(tmp_path / "own.txt")))
    assert texts_in(corpus.train) == TEXTS and texts_in(corpus.validation) == ["Held out."]
    assert corpus.validation.manifest.sources == [str(tmp_path / "own.txt")]


def test_held_out_documents_that_are_trained_on_too_are_counted(config, tmp_path):
    lines = [TEXTS[3], "Held out.", TEXTS[3], TEXTS[7], TEXTS[7][:-1] + "e"]  # the last is as long as one trained on
    (tmp_path / "own.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    for _ in range(2):  # prepared, opened
        assert prepare(config(validation=str(tmp_path / "own.jsonl"))).validation.manifest.trained_on == 3
    assert prepare(config()).validation.manifest.trained_on == 0


def test_fewer_training_tokens_are_read_from_the_same_prepared_text(config, texts):
    whole, part = prepare(config()), prepare(config(train_tokens=2000))
    assert part.train.folder == whole.train.folder and part.fingerprints == whole.fingerprints
    documents = documents_to_read(part.train)
    assert 1500 < part.train.lengths[documents].sum() <= 2000
    for store in (whole.train, part.validation):
        assert len(documents_to_read(store)) == len(store)
    with pytest.raises(ValidationError, match="train_tokens = 2000: only for texts without shares"):
        config(train_tokens=2000, texts={str(texts / "0.jsonl"): 0.5, str(texts / "1.jsonl"): 0.5})


@pytest.fixture
def seen(monkeypatch):
    """The texts on which tokenizers are trained."""
    seen, real = [], prepare_module.Tokenizer.train.__func__

    def train(cls, texts, vocabulary):
        seen.extend(texts)
        return real(cls, seen, vocabulary)

    monkeypatch.setattr(prepare_module.Tokenizer, "train", classmethod(train))
    return seen


def test_a_tokenizer_is_trained_on_training_texts_only_and_evenly(config, texts, tmp_path, monkeypatch, seen):
    corpus = prepare(config(tokenizer="bpe", vocabulary=300))
    assert seen == texts_in(corpus.train)
    seen.clear()
    monkeypatch.setattr(prepare_module, "SAMPLE", 1000)
    prepare(config(tokenizer="bpe", vocabulary=301))
    assert 500 < sum(map(len, seen)) < 1300
    assert {TEXTS.index(text) // 50 for text in seen} == {0, 1, 2, 3}
    for more in ({}, {"texts": {str(texts): 1}}):
        seen.clear()
        (tmp_path / "own.txt").write_text("Held out. " * 10_000)
        prepare(config(tokenizer="bpe", vocabulary=301, validation=str(tmp_path / "own.txt"), **more))
        assert 500 < sum(map(len, seen)) < 1300 and set(seen) <= set(TEXTS), len(seen)


def test_a_second_call_opens_and_a_changed_text_prepares_anew(config, texts, monkeypatch):
    first = prepare(config())
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "write", None)
        assert prepare(config()).train.fingerprint == first.train.fingerprint
    with (texts / "1.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    assert prepare(config()).train.folder != first.train.folder
    folders = {prepare(config(**more)).train.folder for more in ({}, {"validation": 0.3}, {"tokenizer": "bpe"})}
    assert len(folders) == 3


def test_progress_reaches_the_size_of_the_texts(config, texts, monkeypatch):
    monkeypatch.setattr(reading, "BATCH", 500)
    seen = []
    prepare(config(), progress=lambda done, total: seen.append((done, total)))
    total = sum(path.stat().st_size for path in texts.iterdir())
    assert {t for _, t in seen} == {total} and seen == sorted(seen) and seen[-1][0] == total and len(seen) > 10


def test_how_far_what_is_passed_over_reaches_is_told(tmp_path):
    """Or a large file, read again up to where it was interrupted, would look like one that hangs."""
    (tmp_path / "many.jsonl").write_text("".join(f'{{"text": "Number {n}."}}\n' for n in range(2500)))
    parts = [
        reading.Part(source, 0.0, 0) for source in find_sources("corpus.texts", [f"{tmp_path}/many.jsonl"], "text")
    ]
    everything, passed = [*reading.documents_of(parts)], []
    rest = [*reading.documents_of(parts, everything[2399].place, passed.append)]
    assert rest == everything[2400:]
    assert passed == [everything[999].done, everything[1999].done]


@pytest.mark.parametrize("kind", ["split", "mixture", "given", "bpe", "own validation"])
def test_an_interrupted_preparation_goes_on_where_it_was(config, texts, tmp_path, monkeypatch, kind):
    """Hours of work for hundreds of gigabytes are not to be lost."""
    (tmp_path / "held.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:30]))
    parts = [json.dumps({"text": [f"{text} ", "And more."]}) + "\n" for text in TEXTS[:50]]
    (texts / "given.jsonl").write_text("".join(parts) if kind == "given" else '{"text": "One more."}\n')
    changes = {
        "mixture": {"texts": {str(path): 1.0 for path in texts.iterdir()}},
        "bpe": {"tokenizer": "bpe", "vocabulary": 280},
        "own validation": {"validation": str(tmp_path / "held.jsonl")},
    }.get(kind, {})
    whole = prepare(config(**changes, folder=str(tmp_path / "whole")))
    monkeypatch.setattr(reading, "BATCH", 300)
    monkeypatch.setattr(reading, "SAVE", 1000)
    firsts, trained, train = [], [], Tokenizer.train
    monkeypatch.setattr(Tokenizer, "train", lambda *given: trained.append(given) or train(*given))
    corpora = tmp_path / "corpora"

    def attempt():
        seen = []

        def interrupt(done, total):
            seen.extend([done] if [*corpora.glob(".*/written.json")] else [])
            if len(seen) > 20:
                raise KeyboardInterrupt

        try:
            return prepare(config(**changes), interrupt)
        except KeyboardInterrupt:
            for file in corpora.glob(".*/train/*.bin"):
                file.write_bytes(file.read_bytes() + b"killed within a number")
            return None
        finally:
            firsts.append(seen[0])

    while (corpus := attempt()) is None:
        assert len(firsts) < 20
    assert len(firsts) > 2 and firsts == sorted({*firsts}) and len(trained) == (kind == "bpe")
    assert corpus.fingerprints == whole.fingerprints
    assert corpus.train.manifest == whole.train.manifest and corpus.validation.manifest == whole.validation.manifest
    (folder,) = {store.folder.parent for store in (corpus.train, corpus.validation)}
    assert {path.name for path in folder.iterdir()} == {"train", "validation"}
    assert {p.name for p in corpus.train.folder.iterdir()} == {p.name for p in whole.train.folder.iterdir()}


def test_a_mistake_in_the_text_leaves_nothing_and_a_reader_that_broke_off_what_it_read(config, texts, monkeypatch):
    monkeypatch.setattr(reading, "SAVE", 1000)
    folder = texts.parent / "corpora"
    with (texts / "1.jsonl").open("a") as file:
        file.write("{broken\n")
    with pytest.raises(UserError, match="not a JSON line"):
        prepare(config())
    assert [path.suffix for path in folder.iterdir()] == [".lock"]
    (texts / "1.jsonl").write_text((texts / "1.jsonl").read_text().removesuffix("{broken\n"))
    read = []

    def lines(file, raw):
        for line in raw:
            read.append(line)
            if len(read) == 180:
                raise OSError(5, "Input/output error")
            yield line

    with monkeypatch.context() as patch:
        patch.setattr(File, "_unpacked", lines)
        with pytest.raises(UserError, match=r"1\.jsonl: cannot be read \(Input/output error\)"):
            prepare(config())
        assert [path.suffix for path in folder.iterdir() if path.is_dir()] == [".partial"]
        assert len(texts_in(prepare(config()).train)) > 60 and not [*folder.glob(".*.partial")]
    assert len(read) == 180 + 100  # the first file was not read again


def test_what_cannot_get_its_name_is_gone_on_with(config, texts, monkeypatch):
    """A file system over a network may fail just then, after hours of work."""
    monkeypatch.setattr(reading, "SAVE", 1000)
    rename, read = Path.rename, []

    def fails(path, target):
        if path.suffix == ".partial":
            raise OSError(116, "Stale file handle")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fails)
        with pytest.raises(UserError, match="Stale file handle"):
            prepare(config())
    lines = File.read
    monkeypatch.setattr(File, "read", lambda file, shard: read.append(file) or lines(file, shard))
    prepare(config())
    assert 0 < len(read) < len([*texts.iterdir()])


def test_an_attempt_that_failed_writes_nothing_into_the_next_one(config, tmp_path, monkeypatch):
    """Its files may live on with its exception, which a notebook keeps, as do processes that wait for each other."""
    whole = prepare(config(folder=str(tmp_path / "whole")))
    monkeypatch.setattr(reading, "BATCH", 300)
    monkeypatch.setattr(reading, "SAVE", 5000)
    kept = []

    def fail(done, total, fails_at=None):
        fail.calls += 1
        if fail.calls == fails_at:
            raise KeyboardInterrupt

    for at in (20, 40):
        fail.calls = 0
        with pytest.raises(KeyboardInterrupt) as raised:
            prepare(config(), functools.partial(fail, fails_at=at))
        kept.append(raised.value)
    corpus = prepare(config())
    del raised
    kept.clear()
    gc.collect()
    assert prepare(config()).fingerprints == corpus.fingerprints == whole.fingerprints
    corpus.train.verify()
    corpus.validation.verify()


@pytest.mark.parametrize(
    ("damaged", "kind"),
    [
        ("train/tokens.bin", "bytes"),
        ("train/tokenizer.json", "bpe"),
        ("train/given.bin", "given"),
        ("written.json", "bytes"),
    ],
)
def test_what_was_saved_and_is_damaged_is_told_and_begun_anew(config, texts, monkeypatch, damaged, kind):
    if kind == "given":
        (texts / "0.jsonl").write_text(json.dumps({"text": ["One. ", "Two."]}) + "\n")
    monkeypatch.setattr(reading, "BATCH", 300)
    monkeypatch.setattr(reading, "SAVE", 1000)
    corpora, asked = texts.parent / "corpora", {"tokenizer": "bpe", "vocabulary": 280} if kind == "bpe" else {}

    def interrupt(done, total):
        if [*corpora.glob(".*/written.json")] and done > 5000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config(**asked), interrupt)
    (file,) = corpora.glob(f".*/{damaged}")
    file.write_bytes(file.read_bytes()[:5])
    with pytest.raises(UserError, match=rf"{damaged}: has lost what was saved of it; .* begins anew"):
        prepare(config(**asked))
    assert not [*corpora.glob(".*.partial")]
    whole = prepare(config(**asked, folder=str(texts.parent / "whole")))
    assert prepare(config(**asked)).fingerprints == whole.fingerprints


def test_a_parquet_file_that_cannot_be_opened_takes_nothing_of_what_was_read(config, texts, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table({"text": TEXTS[:20]}), texts / "2.parquet")
    monkeypatch.setattr(reading, "SAVE", 1000)
    opened, opens = [], parquet.ParquetFile

    def refused(*given, **how):
        opened.append(given)
        if len(opened) == 2:  # the first looks for the column
            raise OSError(13, "Permission denied")
        return opens(*given, **how)

    monkeypatch.setattr(parquet, "ParquetFile", refused)
    with pytest.raises(UserError, match=r"2\.parquet: cannot be read \(Permission denied\)"):
        prepare(config())
    (mark,) = (texts.parent / "corpora").glob(".*/written.json")
    assert json.loads(mark.read_text())[0][0] >= 1  # a file was done with
    assert prepare(config()).train.manifest.documents > 60


@pytest.mark.parametrize("texts", [[], {}])
def test_no_text_at_all_is_refused(config, texts):
    with pytest.raises(UserError, match=r"corpus.texts: names no text; allowed are"):
        prepare(config(texts=texts))


def test_a_disk_that_is_full_or_can_not_be_written_is_told(config, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/.*: not made \(.*; make .*/file writable, make room"):
        prepare(config(folder=str(tmp_path / "file")))

    def refuse(*arguments):
        raise OSError("2098571 requested and 153600 written")  # numpy's words for a full disk

    monkeypatch.setattr(prepare_module.StoreWriter, "append", refuse)
    with pytest.raises(UserError, match=r"not made .2098571 requested.* make room"):
        prepare(config())
    assert sorted(path.suffix for path in (tmp_path / "corpora").iterdir()) == [".lock", ".partial"]
    monkeypatch.undo()
    prepare(config()).train.verify()


def test_what_a_killed_preparation_left_is_removed(config, tmp_path):
    folder = prepare(config()).train.folder.parent
    left = folder.rename(folder.with_name(f".{folder.name}.partial"))
    (left / "junk").write_text("")
    corpus = prepare(config())
    corpus.train.verify()
    assert sorted(path.name for path in folder.iterdir()) == ["train", "validation"]
    assert sorted(path.suffix for path in folder.parent.iterdir()) == ["", ".lock"]


def test_processes_preparing_at_once_share_one_result(config, tmp_path):
    script = """
import sys, time
from pathlib import Path
from tandem.corpus import Corpus, prepare, prepare_texts

config, me, other = sys.argv[1:]
seen = []
Path(me).touch()
while not Path(other).exists():
    time.sleep(0.01)
corpus = prepare(Corpus.Config.model_validate_json(config), lambda *done: (seen.append(done), time.sleep(0.2)))
corpus.train.verify()
print(bool(seen), corpus.train.fingerprint)
"""
    command = [sys.executable, "-c", script, config().model_dump_json()]
    ready = [str(tmp_path / name) for name in "ab"]
    running = [subprocess.Popen([*command, *names], stdout=subprocess.PIPE) for names in (ready, ready[::-1])]
    said = [process.communicate(timeout=300)[0].split() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert sorted(worked for worked, _ in said) == [b"False", b"True"]
    assert said[0][1] == said[1][1]


def test_a_damaged_corpus_is_refused_with_the_cure(config):
    folder = prepare(config()).train.folder
    data = (folder / "tokens.bin").read_bytes()
    (folder / "tokens.bin").write_bytes(data[:-2])
    with pytest.raises(UserError, match=f"tokens.bin has .* manifest says .*; delete {folder.parent} and prepare"):
        prepare(config())


def test_a_file_whose_name_is_not_utf_8_is_a_text_like_any_other(config, tmp_path):
    folder = tmp_path / "named"
    folder.mkdir()
    for number in range(20):
        (folder / f"caf\udce9 {number}.txt").write_text(f"Coffee number {number}.")
    corpus = prepare(config(texts=str(folder)))
    assert len(corpus.train) + len(corpus.validation) == 20
    assert str(folder / "caf\\xe9 0.txt") in corpus.train.manifest.sources
    assert prepare(config(texts=str(folder))).fingerprints == corpus.fingerprints


def test_a_file_may_have_as_long_a_name_as_the_disk_allows(config, tmp_path):
    for letter in ("a", "\N{CJK UNIFIED IDEOGRAPH-6587}"):
        text = tmp_path / f"{letter * (249 // len(letter.encode()))}.jsonl"
        text.write_text("".join(f'{{"text": "{i}"}}\n' for i in range(20)))
        assert len(prepare(config(texts=[str(text)])).train)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no file here that cannot be read")
@pytest.mark.parametrize("kind", [".txt", ".tokens"])
def test_a_text_that_cannot_be_read_is_named(config, tmp_path, kind):
    (tmp_path / f"mine{kind}").symlink_to("/proc/self/mem")  # for every user, root included
    with pytest.raises(UserError, match=rf"mine{kind}: cannot be read \(Input/output error\); see to that"):
        prepare(config(texts=[str(tmp_path / f"mine{kind}")]))


def test_a_bad_text_is_refused_also_while_a_tokenizer_is_trained(config, texts):
    (texts / "2.jsonl").write_text("{}\n")
    for tokenizer in ("bytes", "bpe"):
        with pytest.raises(UserError, match=r'2\.jsonl:1: no field "text"'):
            prepare(config(tokenizer=tokenizer))


def test_a_side_without_documents_is_refused(config, tmp_path):
    (tmp_path / "one.txt").write_text("The only document.")
    of = r"for (train|validation), of 1 document \(a text file is one, as is a line of .jsonl; equal ones count as one"
    with pytest.raises(UserError, match=of + r"\); give more of them, or other texts"):
        prepare(config(texts=str(tmp_path / "one.txt")))
    (tmp_path / "two.jsonl").write_text('{"text": "One of two."}\n{"text": "The other."}\n')
    with pytest.raises(UserError, match=r"of 2 documents .*; give more of them, another share, or other texts"):
        prepare(config(texts=str(tmp_path / "two.jsonl"), validation=1e-6))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_texts_that_are_empty_are_named_with_their_key(config, tmp_path, tokenizer):
    none = tmp_path / "none.txt"
    none.write_text("")
    for given in ({"texts": str(none)}, {"validation": [str(none)]}):
        with pytest.raises(UserError, match=rf"corpus\.{next(iter(given))}: there is no text in {none}; write some"):
            prepare(config(tokenizer=tokenizer, **given))


def test_settings_that_mean_nothing_are_refused():
    assert Corpus.Config().vocabulary == 4096 and Corpus.Config(tokenizer="bytes").vocabulary is None
    for bad in ({"tokenizer": "bytes", "vocabulary": 300}, {"vocabulary": 256}, {"validation": 1.0}, {"validation": 0}):
        with pytest.raises(ValidationError):
            Corpus.Config(**bad)


def test_ids_of_a_store_are_those_of_its_tokenizer(config):
    corpus = prepare(config(tokenizer="bpe", vocabulary=290))
    for i in range(0, len(corpus.train), 17):
        document = corpus.train.document(i)
        np.testing.assert_array_equal(document[:-1], corpus.tokenizer.encode(corpus.tokenizer.decode(document)))


def test_further_texts_are_prepared_once_under_the_tokenizer_they_are_given(config, tmp_path, monkeypatch):
    (tmp_path / "more.jsonl").write_text('{"text": "Naïve."}\n{"text": "Another one."}\n')
    tokenizer = prepare(config(tokenizer="bpe", vocabulary=280)).tokenizer
    key, more = "evaluation.texts.more", [str(tmp_path / "more.jsonl")]
    store = prepare_texts(config(), key, more, tokenizer)
    assert texts_in(store) == ["Naïve.", "Another one."]
    assert (store.tokenizer.hash, store.manifest.bytes) == (tokenizer.hash, 7 + 12)
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "StoreWriter", None)
        assert prepare_texts(config(), key, more, tokenizer).folder == store.folder
    (tmp_path / "more.jsonl").write_text('{"text": "Changed."}\n')
    assert texts_in(prepare_texts(config(), key, more, tokenizer)) == ["Changed."]
    with pytest.raises(UserError, match=r'evaluation\.texts\.more = "nowhere\.txt": no such text'):
        prepare_texts(config(), key, "nowhere.txt", tokenizer)
    (tmp_path / "none.txt").write_text(" ")
    with pytest.raises(UserError, match=r"evaluation\.texts\.more: there is no text in .*none\.txt; write"):
        prepare_texts(config(), key, str(tmp_path / "none.txt"), tokenizer)


# Mixtures -------------------------------------------------------------------------------------------------------


@pytest.fixture
def mixture(config, texts):
    first, second = str(texts / "0.jsonl"), str(texts / "1*.jsonl")
    return lambda **more: config(**{"texts": {first: 3, second: 1}} | more)


def test_a_mixture_is_one_store_in_which_each_document_knows_its_source(mixture, config, texts):
    corpus, plain = prepare(mixture()), prepare(config())
    for store, same in ((corpus.train, plain.train), (corpus.validation, plain.validation)):
        assert store.manifest.shares == {str(texts / "0.jsonl"): 0.75, str(texts / "1*.jsonl"): 0.25}
        assert texts_in(store) == texts_in(same)  # the same documents on the same side
        assert store.source_of.tolist() == [TEXTS.index(text) // 100 for text in texts_in(store)]
        assert not len(same.source_of) and not same.manifest.shares
        assert store.fingerprint != same.fingerprint
        store.verify()
    turned = mixture(texts=dict(reversed(mixture().texts.items())))
    assert prepare(mixture()).train.folder == prepare(turned).train.folder == corpus.train.folder
    other = mixture(texts={name: 1 for name in mixture().texts})
    assert prepare(other).train.folder != corpus.train.folder


def test_what_is_prepared_without_shares_keeps_its_name_and_contents(tmp_path, monkeypatch):
    """But for the format, as they were before there were mixtures: prepared corpora must be found again."""
    (tmp_path / "a.txt").write_text("One document, and no more than that.")
    (tmp_path / "b.txt").write_text("Another.")
    monkeypatch.setattr(File, "identity", property(lambda file: f"{file.path.name} {' '.join(file.fields)}"))
    texts, validation = str(tmp_path / "a.txt"), str(tmp_path / "b.txt")
    config = Corpus.Config(texts=texts, validation=validation, tokenizer="bytes", folder=str(tmp_path / "corpora"))
    store = prepare(config).train
    key = json.dumps([2, [["a.txt text", 0.0], ["b.txt text", 1.0]], store.tokenizer.hash]).encode()
    assert store.folder.parent.name == f"a-{content_hash(key)[:12]}"
    files = ("tokens.bin", "token_bytes.bin", "offsets.bin", "tokenizer.json")
    digests = [hashlib.blake2b((store.folder / name).read_bytes()).digest() for name in files]
    assert store.fingerprint == content_hash(*digests)
    assert sorted(path.name for path in store.folder.iterdir()) == sorted([*files, "manifest.json"])


def test_a_tokenizer_is_trained_on_a_mixture_by_its_shares(mixture, monkeypatch, seen):
    monkeypatch.setattr(prepare_module, "SAMPLE", 2000)
    prepare(mixture(tokenizer="bpe", vocabulary=300))
    first = sum(len(text) for text in seen if TEXTS.index(text) < 100)
    assert first / sum(map(len, seen)) == pytest.approx(0.75, abs=0.05)
    assert 1800 < sum(map(len, seen)) < 2300


def test_validation_texts_of_its_own_belong_to_no_source(mixture, tmp_path):
    (tmp_path / "own.txt").write_text("Held out.")
    corpus = prepare(mixture(validation=str(tmp_path / "own.txt")))
    assert corpus.train.shares == [0.75, 0.25] and not corpus.validation.shares


def test_a_source_without_training_documents_is_named(config, texts, tmp_path):
    (tmp_path / "empty.jsonl").write_text('{"text": " "}\n')
    with pytest.raises(UserError, match=r'empty\.jsonl" has no document to train on; take it out'):
        prepare(config(texts={str(texts): 1, str(tmp_path / "empty.jsonl"): 1}))


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"texts": {"{}": 0.5, "{}/0.jsonl": 0.5}}, "corpus.texts"),
        ({"texts": ["{}", "{}/../texts/0*"]}, "corpus.texts"),
        ({"texts": "{}/*", "validation": "{}/0.jsonl"}, "corpus.validation"),
    ],
)
def test_a_text_that_stands_twice_is_refused(config, texts, given, key):
    given = json.loads(json.dumps(given).replace("{}", str(texts)))
    with pytest.raises(UserError, match=rf'0\.jsonl" stands in corpus.texts and again in {key}; name it once'):
        prepare(config(**given))
    assert not Path(config().folder).exists()


@pytest.mark.parametrize("share", [0, -1])
def test_shares_are_positive(config, share):
    with pytest.raises(ValidationError, match="greater than 0"):
        config(texts={"a.txt": 1, "b.txt": share})


def test_sentences_that_come_with_the_texts_are_kept(config, tmp_path):
    records = [["One é. ", "Two. "], "Three. Four.", ["Five."]]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in records)
    (tmp_path / "given.jsonl").write_text(lines)
    (tmp_path / "own.txt").write_text("Held out.")
    corpus = prepare(config(texts=str(tmp_path / "given.jsonl"), validation=str(tmp_path / "own.txt")))
    assert texts_in(corpus.train) == ["One é. Two. ", "Three. Four.", "Five."]
    assert corpus.train.given.tolist() == [0, 8, 14, 27]
    assert not len(corpus.validation.given)
    corpus.train.verify()


def test_a_tokenizer_is_given_by_its_path(config, tmp_path):
    corpus = prepare(config())
    corpus.tokenizer.to_file(tmp_path / "tokenizer.json")
    assert prepare(config(tokenizer=str(tmp_path / "tokenizer.json"))).tokenizer.hash == corpus.tokenizer.hash
