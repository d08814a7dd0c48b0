"""A trained run is asked tasks by their names; what it reached is shown and kept."""

import json
import math
import shutil

import datasets
import pytest
from typed import tandem

from tandem.comparison.trained import open_trained
from tandem.corpus import prepare_texts
from tandem.evaluation.likelihood import likelihood, ratio_error

MINE = """
task: animals
dataset_path: json
dataset_kwargs: {data_files: {test: "${ANIMALS}/animals.jsonl"}}
output_type: multiple_choice
test_split: test
doc_to_text: query
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
metadata: {version: 2.0}
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    """mine.yaml, a task, and poems.yaml, texts; both say where their data lie by the environment."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("ANIMALS", str(tmp_path))
    items = [
        {"query": f"The {w} sees a", "choices": ["cat", "large house"], "gold": i % 2} for i, w in enumerate("abcd")
    ]
    (tmp_path / "animals.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (tmp_path / "poem.txt").write_text("The cat sees a naïve bird. " * 20)
    (tmp_path / "rhyme.txt").write_text("The river runs. " * 5)
    (tmp_path / "mine.yaml").write_text(MINE)
    (tmp_path / "poems.yaml").write_text("texts:\n  poems: ['${ANIMALS}/poem.txt', '${ANIMALS}/rhyme.txt']\n")
    return tmp_path


def test_what_is_reached_is_shown_and_kept_with_errors_settings_and_versions(trained, files):
    done = tandem("evaluate", trained, "--tasks", f"{files / 'mine.yaml'},{files / 'poems.yaml'}", "--limit", 3)
    assert done.exit_code == 0, done.output
    kept = json.loads((trained / "tasks" / "animals.json").read_text())
    items = [json.loads(line) for line in (trained / "tasks" / "animals.items.jsonl").read_text().splitlines()]
    right = [item["acc"] for item in items]
    assert kept["items"] == len(items) == kept["limit"] == 3 and kept["step"] == 4
    assert kept["metrics"]["acc"]["value"] == pytest.approx(sum(right) / 3) and kept["metrics"]["acc"]["error"] >= 0
    assert all(len(item["answers"]) == 2 for item in items)
    assert kept["versions"]["task"] == 2.0 and kept["versions"]["lm_eval"].startswith("0.4")
    assert kept["settings"]["rows"] == 16 and kept["settings"]["context"] == 32
    assert kept["settings"]["task"]["doc_to_text"] == "query" and kept["settings"]["task"]["num_fewshot"] == 0
    assert "longest continuation" in kept["settings"]["request_order"]
    assert list(kept["data"]) == [str(files / "animals.jsonl")] and kept["environment"]["torch"]
    for words in (["animals", "acc", f"{kept['metrics']['acc']['value']:#.4g}"], ["poems", "bits per byte"]):
        assert any(all(word in line for word in words) for line in done.stdout.splitlines()), done.stdout


def test_what_is_reached_is_shown_though_a_later_task_fails(trained, files):
    (files / "letters.jsonl").write_text('{"text": "a"}\n')
    (files / "letters.yaml").write_text("texts: {letters: '${ANIMALS}/letters.jsonl'}")
    done = tandem("evaluate", trained, "--tasks", f"{files / 'mine.yaml'},{files / 'letters.yaml'}", "--limit", 2)
    assert done.exit_code == 2 and "only the ends are asked" in done.stderr
    assert "animals" in done.stdout and f"kept in {trained / 'tasks'}" in done.stdout


def test_texts_are_scored_by_the_ruler(trained, files):
    done = tandem("evaluate", trained, "--tasks", files / "poems.yaml")
    assert done.exit_code == 0, done.output
    kept, run = json.loads((trained / "tasks" / "poems.json").read_text()), open_trained(trained)
    paths = [str(files / "poem.txt"), str(files / "rhyme.txt")]
    store = prepare_texts(run.recipe.corpus, "it", paths, run.corpus.tokenizer)
    expected = likelihood(run.network, store, context=32, rows=3)
    values = {name: metric["value"] for name, metric in kept["metrics"].items()}
    per_word = expected.nats / (20 * 6 + 5 * 3)
    numbers = {"nats per token": expected.nll, "bits per byte": expected.bits_per_byte, "nats per word": per_word}
    assert values == pytest.approx(numbers, rel=1e-5)
    error = ratio_error(expected.nats_by_document, expected.bytes_by_document) / math.log(2)
    assert kept["metrics"]["bits per byte"]["error"] == pytest.approx(error, rel=1e-3)
    items = [json.loads(line) for line in (trained / "tasks" / "poems.items.jsonl").read_text().splitlines()]
    assert sum(item["bytes"] for item in items) == expected.bytes and len(items) == 2


def test_words_are_those_of_the_documents_scored(trained, files):
    words = [5, 10, 15, 20]
    for number in words:
        (files / f"{number}.txt").write_text("river " * number)
    paths = [str(files / f"{number}.txt") for number in words]
    (files / "rivers.yaml").write_text(f"texts: {json.dumps({'rivers': paths})}")
    done = tandem("evaluate", trained, "--tasks", files / "rivers.yaml", "--limit", 2)
    assert done.exit_code == 0, done.output
    kept = json.loads((trained / "tasks" / "rivers.json").read_text())
    items = [json.loads(line) for line in (trained / "tasks" / "rivers.items.jsonl").read_text().splitlines()]
    asked = [item["item"] for item in items]
    assert asked == [0, 3]  # not the first two
    nats = sum(item["nats"] for item in items)
    assert kept["metrics"]["nats per word"]["value"] == pytest.approx(nats / sum(words[i] for i in asked))


@pytest.mark.parametrize(("name", "file"), [("2024", "2024"), ("/poems/of/2024", "-poems-of-2024")])
def test_a_text_may_be_called_by_a_year_or_a_path(trained, files, name, file):
    (files / "years.yaml").write_text(f"texts: {{{name}: '${{ANIMALS}}/poem.txt'}}")
    done = tandem("evaluate", trained, "--tasks", files / "years.yaml")
    assert done.exit_code == 0, done.output
    assert json.loads((trained / "tasks" / f"{file}.json").read_text())["task"] == name


def test_suffixes_are_not_divided_by_the_words_of_whole_documents(trained, files):
    run = shutil.copytree(trained, files / "suffixes")
    (run / "recipe.yaml").write_text((run / "recipe.yaml").read_text().replace("prefix: false", "prefix: true"))
    for path, is_prefix in ((trained, False), (run, True)):
        done = tandem("evaluate", path, "--tasks", files / "poems.yaml")
        assert done.exit_code == 0, done.output
        kept = json.loads((path / "tasks" / "poems.json").read_text())
        assert ("nats per word" in kept["metrics"]) != is_prefix == kept["settings"].get("prefix", False)


def test_rows_change_nothing(trained, files):
    answers = []
    for rows in (1, 3):
        assert tandem("evaluate", trained, "--tasks", files / "mine.yaml", "--rows", rows).exit_code == 0
        assert json.loads((trained / "tasks" / "animals.json").read_text())["settings"]["rows"] == rows
        lines = (trained / "tasks" / "animals.items.jsonl").read_text().splitlines()
        answers.append([nats for line in lines for nats, _ in json.loads(line)["answers"]])
    assert len(answers[0]) == 8 and answers[0] == pytest.approx(answers[1], abs=1e-4)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("nothing", "--tasks nothing: no such task; there are arc_challenge"),
        ("", "--tasks '': names no task"),
        ("broken.yaml", "broken.yaml:2: cannot be read"),
        (
            "poems.yaml,other/poems.yaml",
            "poems of poems.yaml and poems of other/poems.yaml would both be kept as tasks/poems.json; rename one",
        ),
        ("mine.yaml,named.yaml", "animals of mine.yaml and animals of named.yaml would both be kept"),
        ("mine.yaml,hf:animals", "animals of mine.yaml and animals of hf:animals would both be kept"),
        ("alike.yaml", "a/b of alike.yaml and a-b of alike.yaml would both be kept as tasks/a-b.json"),
        ("poems.yaml, ,twice.yaml", "twice.yaml:2: cannot be read: texts is written twice"),
        ("hellaswag", "the environment has no TANDEM_DATA; set it to the folder that holds the data"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(trained, files, monkeypatch, names, message):
    monkeypatch.chdir(files)
    monkeypatch.delenv("TANDEM_DATA", raising=False)
    (files / "broken.yaml").write_text("task: broken\n: [")
    (files / "named.yaml").write_text("texts: {animals: poem.txt}")
    (files / "alike.yaml").write_text("texts: {a/b: poem.txt, a-b: rhyme.txt}")
    (files / "twice.yaml").write_text("texts: {a: poem.txt}\ntexts: {b: rhyme.txt}")
    (files / "other").mkdir()
    (files / "other/poems.yaml").write_text("texts: {poems: rhyme.txt}")
    done = tandem("evaluate", trained, "--tasks", names)
    assert done.exit_code == 2 and message in done.stderr and "Traceback" not in done.stderr, done.output
    assert done.stderr.count("\n") == 1 and not done.stdout


def test_without_the_harness_the_line_that_installs_it_is_told(trained, files, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    done = tandem("evaluate", trained, "--tasks", files / "mine.yaml")
    assert done.exit_code == 2 and "pip install 'tandem-lm[harness]'" in done.stderr, done.output
    assert tandem("evaluate", trained, "--tasks", files / "poems.yaml").exit_code == 0
