"""Further texts are judged by the ruler of the held-out text, under the run's tokenizer."""

import json
import math
import shutil

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers
from typed import tandem

from tandem.comparison.texts import in_words, recorded
from tandem.comparison.trained import open_trained
from tandem.corpus import prepare_texts
from tandem.evaluation.likelihood import likelihood
from tandem.training.folder import RunFolder

SMALL = ["budget=4 steps", "batch.rows=2", "batch.context=32", "network.depth=1", "network.width=16"]
BOOK = "The cat sees a naïve bird. " * 20


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_corpus):
    """A run with two texts, one of them of two files."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "book.txt").write_text(BOOK)
    (folder / "news.jsonl").write_text('{"text": "River."}\n{"text": "House and tree."}\n')
    named = f"evaluation.texts={{books: {folder}/book.txt, news: [{folder}/news.jsonl, {folder}/book.txt]}}"
    done = tandem("train", "decoder/tiny", "--run", "mine", "--runs", folder, *SMALL, *small_corpus, named)
    assert done.exit_code == 0, done.output
    return folder / "mine", done.output


def test_each_text_is_scored_at_the_end_shown_and_recorded(trained):
    path, said = trained
    result = json.loads((path / "result.json").read_text())
    (recorded,) = RunFolder.open(path).records("texts")
    assert recorded["texts"] == result["texts"] and recorded["step"] == 4
    assert [(name, text["documents"]) for name, text in result["texts"].items()] == [("books", 1), ("news", 3)]
    run = open_trained(path)
    for name, text in result["texts"].items():
        store = prepare_texts(run.recipe.corpus, "it", run.recipe.evaluation.texts[name], run.corpus.tokenizer)
        expected = likelihood(run.network, store, context=32, rows=3)
        first = [run.corpus.tokenizer.decode(store.document(i)[:1]) for i in range(len(store))]
        assert text["bytes"] == store.manifest.bytes - len("".join(first).encode())  # the first token is not scored
        assert text["tokens"] == len(store.tokens) - len(store)
        assert text["nats"] == pytest.approx(expected.nats, rel=1e-5)  # float32 in rows of another shape
        assert text["bits_per_byte"] == pytest.approx(text["nats"] / math.log(2) / text["bytes"], rel=1e-12)
        assert said.count(f"{text['bits_per_byte']:.3f} bits/byte on {name}: {text['tokens']:,} tokens") == 1
    assert said.count(in_words(result["likelihood"])) == 1


def test_what_a_tokenizer_does_not_know_is_told_beside_the_bits(tmp_path):
    """They count as if they were predicted: `<unk>` says that there is a word, and not which."""
    inner = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "cat": 1, "sees": 2}, unk_token="<unk>"))
    inner.normalizer = normalizers.Replace("q", "")
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.save(str(tmp_path / "words.json"))
    for name in ("text", "other"):
        (tmp_path / f"{name}.txt").write_text("cat sees cat sees unseen")
    given = [f"corpus.texts=[{tmp_path}/text.txt]", f"corpus.validation=[{tmp_path}/other.txt]"]
    given += [f"corpus.tokenizer={tmp_path}/words.json", f"corpus.folder={tmp_path}/corpora"]
    done = tandem("train", "decoder/tiny", "--run", "mine", "--runs", tmp_path, *SMALL, *given)
    assert done.exit_code == 0, done.output
    lost = "29.2% unknown to the tokenizer; the tokenizer changes or drops q and white space"
    assert f"21 bytes ({lost}), 1 document" in done.output
    assert json.loads((tmp_path / "mine/result.json").read_text())["likelihood"]["unknown"] == 7 / 24
    (tmp_path / "two.jsonl").write_text('{"text": "cat sees"}\n{"text": "unseen sees"}\n')
    both, one = (
        tandem("evaluate", tmp_path / "mine", "--texts", f"two={tmp_path}/two.jsonl", *few).stdout.splitlines()[-2]
        for few in ([], ["--documents", 1])
    )
    assert "10 bytes (31.6% unknown" in both and "5 bytes (the tokenizer changes" in one
    (tmp_path / "two.yaml").write_text(f"texts: {{two: {tmp_path}/two.jsonl}}")
    done = tandem("evaluate", tmp_path / "mine", "--tasks", tmp_path / "two.yaml")
    assert "\ntwo: 31.6% unknown to the tokenizer; the tokenizer changes or drops q and white space\n" in done.output
    assert json.loads((tmp_path / "mine/tasks/two.json").read_text())["unknown"] == 6 / 19


def test_texts_that_are_not_in_the_recipe_are_scored_on_demand(trained, tmp_path):
    path, said = trained
    (tmp_path / "poem.txt").write_text(BOOK)
    done = tandem("evaluate", path, "--texts", f"poems={tmp_path / 'poem.txt'}")
    assert done.exit_code == 0, done.output
    held_out, books, news, poems = done.stdout.strip().splitlines()[::2]
    by_position = json.loads((path / "result.json").read_text())["texts"]["books"]["by_position"]
    shown = ", ".join(f"{position}: {nats:.3f}" for position, nats in by_position.items())
    assert [*by_position][:3] == ["1", "2", "4"] and done.stdout.splitlines()[3].endswith(f", from token {shown}")
    assert held_out.startswith("step 4 of 4: ") and "bits/byte on held-out text" in held_out and " on news:" in news
    assert poems == books.replace("on books:", "on poems:")
    assert books in said


def test_what_is_scored_is_shown_though_the_rest_is_interrupted(trained, monkeypatch):
    texts = []

    def interrupted(run, store, *rest, **how):
        texts.append(store)
        if len(texts) == 3:
            raise KeyboardInterrupt
        return recorded(run, store, *rest, **how)

    monkeypatch.setattr("tandem.comparison.texts.recorded", interrupted)
    done = tandem("evaluate", trained[0])
    assert done.exit_code == 130 and "on held-out text" in done.stdout and " on books:" in done.stdout


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("poems", "--texts poems: write NAME=PATH"),
        ("held-out text=x.txt", "--texts held-out text: that is what the run's own text is called"),
        ("books=x.txt", "--texts books=x.txt: the run has a text books already"),
        ("poems=nowhere.txt", '--texts poems = "nowhere.txt": no such text found'),
    ],
)
def test_a_text_that_cannot_be_read_is_told(trained, given, message):
    done = tandem("evaluate", trained[0], "--texts", given)
    assert done.exit_code == 2 and message in done.stderr, done.stderr


def test_a_text_of_which_only_document_ends_are_asked_is_told_before_anything_is_spent(
    trained, tmp_path, small_corpus, monkeypatch
):
    monkeypatch.setattr("tandem.comparison.texts.recorded", None)
    (tmp_path / "letters.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    told = f"{tmp_path / 'letters.jsonl'} ("
    for given in (
        ["evaluate", trained[0], "--texts", f"letters={tmp_path / 'letters.jsonl'}"],
        ["train", "decoder/tiny", "--runs", tmp_path / "runs", *SMALL, *small_corpus,
         f"evaluation.texts={{letters: {tmp_path / 'letters.jsonl'}}}"],
    ):  # fmt: skip
        done = tandem(*given)
        assert done.exit_code == 2 and told in done.stderr and "of 2 documents to score only the ends" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_recipe_whose_texts_are_not_there_spends_nothing(tmp_path, small_corpus):
    missing = "evaluation.texts={books: nowhere.txt}"
    done = tandem("train", "decoder/tiny", "--run", "mine", "--runs", tmp_path, *SMALL, *small_corpus, missing)
    assert done.exit_code == 2 and 'evaluation.texts.books = "nowhere.txt": no such text found' in done.stderr
    assert not (tmp_path / "mine").exists()


def test_an_exported_model_is_scored_as_its_run_is_without_the_text_that_it_was_trained_on(
    trained, tmp_path, monkeypatch
):
    path, _ = trained
    monkeypatch.chdir(tmp_path)  # where it prepares texts
    model = shutil.copytree(path / "model", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    for key in (
        "corpus.texts",
        "corpus.validation",
        "corpus.tokenizer",
        "corpus.folder",
        "evaluation.texts",
        "start.run",
    ):
        section, _, option = key.partition(".")
        config["recipe"][section][option] = "${NOT_ON_THIS_MACHINE}"
    (model / "config.json").write_text(json.dumps(config))
    (tmp_path / "poem.txt").write_text("The river sees a cat. " * 9)
    task = tmp_path / "poems.yaml"
    task.write_text(f"texts: {{poem: {tmp_path}/poem.txt}}\n")
    given = ("--texts", f"poem={tmp_path}/poem.txt")
    lines = {}
    for folder in (path, model):
        done = tandem("evaluate", folder, *given)
        assert done.exit_code == 0, done.output
        lines[folder] = next(line for line in done.stdout.splitlines() if " on poem: " in line)
        assert tandem("evaluate", folder, "--tasks", task).exit_code == 0
    assert lines[path] == lines[model]
    of_run, of_model = (json.loads((folder / "tasks" / "poem.json").read_text()) for folder in (path, model))
    assert of_run["metrics"] == of_model["metrics"] and (of_run["step"], of_model["step"]) == (4, None)
    done = tandem("evaluate", model)
    assert done.exit_code == 2 and "an exported model has no text of its own; name some: --texts" in done.stderr
    del config["recipe"]
    (model / "config.json").write_text(json.dumps(config))
    done = tandem("evaluate", model, *given)
    assert done.exit_code == 2 and "was not trained by Tandem; `tandem import` makes it a run" in done.stderr
