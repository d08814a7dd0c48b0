"""Data sets of the hub, by way of `datasets` itself: it opens local folders as it opens the hub's."""

import json
import sys
from types import SimpleNamespace

import pytest

from tandem.corpus import Corpus, prepare, reading
from tandem.corpus.hub import Hub
from tandem.recipe import UserError

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


def texts_of(corpus):
    stores = corpus.train, corpus.validation
    return [store.tokenizer.decode(store.document(i)) for store in stores for i in range(len(store))]


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

    def load_dataset_builder(*which, **how):
        def as_streaming_dataset(**further):
            asked.append((which, how | further))
            return SimpleNamespace(column_names=None)

        return SimpleNamespace(hash="0123abc", as_streaming_dataset=as_streaming_dataset)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset_builder=load_dataset_builder))
    Hub.parse("hf:own/tiny/small@0123abc?split=held", ("text",)).check()
    Hub.parse("hf:own/tiny", ("text",)).check()
    assert asked == [
        (("own/tiny", "small"), {"split": "held", "revision": "0123abc"}),
        (("own/tiny", None), {"split": "train", "revision": None}),
    ]


def test_an_error_without_words_is_called_by_its_kind(monkeypatch):
    def fail(*_, **__):
        raise ValueError

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset_builder=fail))
    with pytest.raises(UserError, match="hf:own/tiny: cannot be opened: ValueError"):
        read("hf:own/tiny")


def test_a_corpus_is_prepared_from_the_hub_and_named_by_what_was_asked(local, tmp_path):
    config = lambda name: Corpus.Config(texts=name, validation=0.2, vocabulary=300, folder=str(tmp_path / "corpora"))
    seen = []
    corpus = prepare(config("hf:own/tiny/large"), lambda done, total: seen.append(total))
    assert sorted(texts_of(corpus)) == sorted(TEXTS) and set(seen) == {None}
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
    monkeypatch.setattr(reading, "SAVE", 500)
    lost, read = [], []

    class Stream:
        """The data set, whose connection is lost once."""

        def __init__(self, data):
            self.data, self.num_shards, self.column_names = data, data.num_shards, data.column_names

        def shard(self, count, number):
            read.append(number)
            for row, record in enumerate(self.data.shard(count, number)):
                if (number, row) == (4, 3) and not lost:
                    lost.append(row)
                    raise TimeoutError
                yield record

    monkeypatch.setattr(Hub, "_data", property(lambda hub: Stream(hub._opened[1])))
    config = Corpus.Config(texts="hf:own/tiny/x", validation=0.2, tokenizer="bytes", folder=str(tmp_path / "corpora"))
    with pytest.raises(UserError, match=r"x: broke off after row 3 of shard 5 \(TimeoutError\); start the same"):
        prepare(config)
    corpus = prepare(config)
    assert read[:5] == [0, 1, 2, 3, 4] and read[5:] == [*range(read[5], 6)] and read[5] > 0
    assert sorted(texts_of(corpus)) == sorted(TEXTS)


def test_a_data_set_that_changed_meanwhile_is_begun_anew(local, tmp_path, monkeypatch):
    """Without a revision, its name says nothing of it."""
    monkeypatch.setattr(reading, "SAVE", 300)
    corpora = tmp_path / "corpora"
    for name in ("README.md", "b.jsonl", "b-held.jsonl"):  # without configurations, files stand for the commit
        (local / name).unlink()
    config = Corpus.Config(texts="hf:own/tiny", validation=0.2, tokenizer="bytes", folder=str(corpora))
    (local / "a.jsonl").write_text((local / "a.jsonl").read_text() + "{broken\n")
    with pytest.raises(UserError, match="broke off after row"):
        prepare(config)
    assert [*corpora.glob(".*/written.json")]
    others = [f"Another row, number {i}." for i in range(40)]
    (local / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in others))
    with pytest.raises(UserError, match=r"hf:own/tiny: has changed since .* begins anew"):
        prepare(config)
    assert sorted(texts_of(prepare(config))) == sorted(others)


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
