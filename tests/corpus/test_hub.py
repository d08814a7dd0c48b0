"""Data sets of the hub, by way of `datasets` itself: it opens local folders as it opens the hub's."""

import json
import sys
from types import SimpleNamespace

import pytest

from tandem.corpus import Corpus, prepare
from tandem.corpus.hub import Hub
from tandem.recipe import UserError

prepare_module = sys.modules["tandem.corpus.prepare"]
TEXTS = [f"Row number {i} of the data set." for i in range(60)]


@pytest.fixture
def local(tmp_path, monkeypatch):
    """`own/tiny` in the working directory: two configurations, the second with two splits."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "own" / "tiny"
    folder.mkdir(parents=True)
    for name, texts in {"a": TEXTS, "b": TEXTS[:5], "b-held": [" ", *TEXTS[5:7]]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts))
    (folder / "README.md").write_text(
        "---\nconfigs:\n"
        "- {config_name: small, data_files: [{split: train, path: b.jsonl}, {split: held, path: b-held.jsonl}]}\n"
        "- {config_name: large, data_files: [{split: train, path: a.jsonl}]}\n---\n"
    )
    return folder


def read(name, field="text"):
    source = Hub.parse(name, (field,))
    source.check()
    return [text for text, _ in source.read()]


def test_rows_of_a_configuration_and_split_are_streamed(local):
    assert read("hf:own/tiny/small") == TEXTS[:5]
    assert read("hf:own/tiny/small?split=held") == TEXTS[5:7]  # without the blank row
    assert next(iter(Hub.parse("hf:own/tiny/large", ("text",)).read())) == (TEXTS[0], len(TEXTS[0]))


@pytest.mark.parametrize(
    ("name", "field", "said"),
    [
        ("hf:own/tiny/medium", "text", "hf:own/tiny/medium: cannot be opened: BuilderConfig 'medium' not found"),
        ("hf:own/tiny/small?split=test", "text", "cannot be opened: Bad split: test. Available splits"),
        ("hf:own/tiny/small", "body", 'no column "body" .*found: id, text'),
        ("hf:own/tiny/small", "id", 'row 1: column "id" holds 1, not a text'),
    ],
)
def test_what_is_not_there_is_named(local, name, field, said):
    with pytest.raises(UserError, match=said):
        read(name, field)


def test_what_was_asked_is_what_is_opened(monkeypatch):
    asked = []

    def load_dataset(*which, **how):
        asked.append((which, how))
        return SimpleNamespace(column_names=None)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    Hub.parse("hf:own/tiny/small@0123abc?split=held", ("text",)).check()
    Hub.parse("hf:own/tiny", ("text",)).check()
    assert asked == [
        (("own/tiny", "small"), {"split": "held", "revision": "0123abc", "streaming": True}),
        (("own/tiny", None), {"split": "train", "revision": None, "streaming": True}),
    ]


def test_an_error_without_words_is_called_by_its_kind(monkeypatch):
    def fail(*_, **__):
        raise ValueError

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=fail))
    with pytest.raises(UserError, match="hf:own/tiny: cannot be opened: ValueError"):
        read("hf:own/tiny")


def test_a_corpus_is_prepared_from_the_hub_and_named_by_what_was_asked(local, tmp_path):
    config = lambda name: Corpus.Config(texts=name, validation=0.2, vocabulary=300, folder=str(tmp_path / "corpora"))
    seen = []
    corpus = prepare(config("hf:own/tiny/large"), lambda done, total: seen.append(total))
    texts = [
        store.tokenizer.decode(store.document(i))
        for store in (corpus.train, corpus.validation)
        for i in range(len(store))
    ]
    assert sorted(texts) == sorted(TEXTS) and set(seen) == {None}
    assert prepare(config("hf:own/tiny/large")).train.folder == corpus.train.folder
    # A local folder has no revisions, so what is asked differs where the texts do not.
    assert prepare(config("hf:own/tiny/large@v2")).train.folder != corpus.train.folder


def test_a_stream_that_breaks_off_is_told_by_its_row(local):
    (local / "b.jsonl").write_text('{"id": 1, "text": "Good."}\n' * 3 + "{broken\n")
    with pytest.raises(UserError, match=r"hf:own/tiny/small: broke off after row \d+ \("):
        read("hf:own/tiny/small")


def test_a_stream_that_broke_off_goes_on_in_the_file_in_which_it_was(local, tmp_path, monkeypatch):
    for n in range(6):
        (local / f"a{n}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[n * 10 : n * 10 + 10])
        )
    (local / "README.md").write_text(
        "---\nconfigs:\n- {config_name: x, data_files: [{split: train, path: 'a?.jsonl'}]}\n---\n"
    )
    monkeypatch.setattr(prepare_module, "SAVE", 500)
    asked, read = [], Hub._records
    monkeypatch.setattr(Hub, "_records", lambda hub, shard: asked.append(shard) or read(hub, shard))
    config = Corpus.Config(texts="hf:own/tiny/x", validation=0.2, tokenizer="bytes", folder=str(tmp_path / "corpora"))
    good = (local / "a4.jsonl").read_text()
    (local / "a4.jsonl").write_text('{"text": "Good."}\n' * 3 + "{broken\n")
    with pytest.raises(UserError, match=r"x: broke off after row \d+ of shard 5 \(.*start the same command again"):
        prepare(config)
    (local / "a4.jsonl").write_text(good)
    corpus = prepare(config)
    assert asked[:5] == [0, 1, 2, 3, 4] and asked[5:] == [*range(asked[5], 6)] and asked[5] > 0
    found = [
        store.tokenizer.decode(store.document(i))
        for store in (corpus.train, corpus.validation)
        for i in range(len(store))
    ]
    assert sorted(found) == sorted(TEXTS)


def test_without_a_network_the_reason_is_told(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(sys.modules["huggingface_hub.constants"], "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"hf:nobody/nothing@abc: cannot be opened: Couldn't reach .*'nobody/nothing'"):
        read("hf:nobody/nothing@abc")


def test_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"datasets is not installed; pip install 'tandem-lm\[hub\]'"):
        Hub.parse("hf:a/b", ("text",)).check()


def test_a_name_has_one_syntax():
    full = Hub.parse("hf:Own-er/na.me/con_fig@refs/pr/3?split=held", ("text",))
    assert (full.repository, full.config, full.revision, full.split) == ("Own-er/na.me", "con_fig", "refs/pr/3", "held")
    assert Hub.parse("hf:a/b", ("text",)).split == "train"
    for wrong in ("hf:wiki", "hf:a/b/c/d", "hf:a/b?train", "hf:a b/c"):
        with pytest.raises(
            ValueError, match=f"{wrong[3:7]}.* does not read as hf:owner/name/config@revision".replace("?", r"\?")
        ):
            Corpus.Config(texts=wrong)
