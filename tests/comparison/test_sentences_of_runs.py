"""What a run knows of sentences, from its recipe to its prompts and its export."""

import json
import math
import sys

import pytest

from tandem.comparison.pretrain import prepared, pretrain, require_splitter
from tandem.comparison.tasks import judge_tasks
from tandem.comparison.texts import in_words, recorded
from tandem.comparison.trained import evaluate, open_model, open_trained, write_model
from tandem.corpus import SUBSET, Order, Segmentation, sentences
from tandem.evaluation.likelihood import likelihood
from tandem.recipe import UserError, load
from tandem.training.run import Run

SMALL = ["budget=2 steps", "batch.rows=4", "batch.context=32", "network.cap=8", "network.streams.sentences=4"]
SMALL += ["sampling.tokens=3"]
SMALL += ["network.streams.grow=0", "network.width=16", "network.depth=2", "network.thought_from=1"]
SPANS = ["corpus.sentences={splitter: every, every: 5, cap: null}", "sampling.prompts=[the cat sees a river]"]


@pytest.fixture(scope="module")
def spans(small_corpus, tmp_path_factory):
    """A finished run that reads spans of five tokens, without the package that finds sentences, and its result."""
    path = tmp_path_factory.mktemp("spans") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pysbd", None)
        return path, pretrain(load("gestalt/tiny", [*SMALL, *SPANS, *small_corpus]), path)


def test_prompts_of_a_run_are_cut_as_its_text_is_and_so_are_those_of_its_export(spans):
    path, result = spans
    ((prompt, text),) = result["samples"]
    assert prompt == "the cat sees a river" and isinstance(text, str)
    for network, tokenizer in open_model(path), open_model(path / "model"):
        marked, ids = network.prompt(tokenizer, prompt), tokenizer.encode(prompt).tolist()
        assert len(ids) > 5 and marked[:6] == [*ids[:5], tokenizer.vocabulary]


def test_a_run_knows_its_sentences_whatever_found_them(spans, small_corpus, tmp_path, monkeypatch):
    path, _ = spans
    monkeypatch.setattr(sentences, "version_of", lambda splitter: "a new one")
    open_trained(path)
    monkeypatch.setattr(sentences, "version_of", lambda splitter: "that cuts elsewhere")
    fours = Segmentation(splitter="every", every=4)
    starts = sentences._starts
    monkeypatch.setattr(sentences, "_starts", lambda config, documents: starts(fours, documents))
    with pytest.raises(UserError, match="other sentences than its text is cut into now"):
        open_trained(path)
    (path / "result.json").rename(tmp_path / "result.json")
    with pytest.raises(UserError, match="was trained on other sentences"):
        pretrain(load("gestalt/tiny", [*SMALL, *SPANS, *small_corpus]), path)
    (tmp_path / "result.json").rename(path / "result.json")
    again = load("gestalt/tiny", [*SMALL, *SPANS, *small_corpus, f"start.run={path}"])
    Run(again, prepared(again), fresh=True)


def test_three_numbers_are_shown_of_a_network_that_is_told_of_boundaries(spans):
    judged = spans[1]["likelihood"]
    free, paid, published = (judged[f"nats_per_token{name}"] for name in ("", "_with_boundaries", "_as_published"))
    assert len({free, paid, published}) == 3
    told = f"{free:.3f} nats/token ({paid:.3f} with the sentence boundaries paid for, {published:.3f} as published"
    plain = {key: value for key, value in judged.items() if key != "in_windows"}
    assert in_words(plain).startswith(f"{told}), ")
    plain = {key: value for key, value in plain.items() if not key.startswith("nats_per_token_")}
    assert in_words(plain).startswith(f"{free:.3f} nats/token, ")


def test_texts_of_tasks_are_also_told_with_their_boundaries(spans, tmp_path):
    path, _ = spans
    (tmp_path / "rivers.txt").write_text("the cat sees a river and the river sees a cat")
    (tmp_path / "mine.yaml").write_text(f"texts: {{rivers: {tmp_path / 'rivers.txt'}}}")
    judge_tasks(path, str(tmp_path / "mine.yaml"))
    kept = json.loads((path / "tasks" / "rivers.json").read_text())["metrics"]
    (item,) = map(json.loads, (path / "tasks" / "rivers.items.jsonl").read_text().splitlines())
    assert item["end_nats"] > 0
    sizes = {"nats per token": item["tokens"], "bits per byte": item["bytes"] * math.log(2), "nats per word": 11}
    assert {name: metric["value"] for name, metric in kept.items()} == pytest.approx(
        {name: item["nats"] / size for name, size in sizes.items()}
        | {f"{name} with boundaries": (item["nats"] + item["end_nats"]) / size for name, size in sizes.items()}
    )


def test_what_decoding_costs_is_measured_after_a_prompt_of_sentences(spans):
    path, result = spans
    run, told = open_trained(path), result["decoding"]
    stored, _ = Order(run.corpus.validation, SUBSET).read(0, 16)
    ids = run.corpus.tokenizer.encode(run.corpus.tokenizer.decode(stored)).tolist()
    session = run.network.session(1)
    session.prefill(
        [[token for i in range(0, len(ids), 5) for token in ([run.network.end] if i else []) + ids[i : i + 5]]]
    )
    assert told["prompt"] == len(ids) > 10 and told["cache_bytes"] == session.bytes


def test_what_reads_documents_whole_is_scored_in_windows_beside(spans, trained):
    path, result = spans
    run, found = open_trained(path), {}
    for context in (run.recipe.batch.context, 10_000):
        asked = {"context": context, "rows": 4, "whole": False}
        found[context] = likelihood(run.network, run.corpus.validation, **asked)
    cut, whole = found.values()
    windowed, judged = result["likelihood"]["in_windows"], result["likelihood"]
    assert [windowed["nats_per_token"], windowed["nats_per_token_with_boundaries"]] == pytest.approx(
        [cut.nll, cut.nll_with_boundaries], rel=1e-6
    )
    assert whole.nll == pytest.approx(judged["nats_per_token"], rel=1e-6) and abs(cut.nll - whole.nll) > 1e-4
    words = f" as published; {cut.nll:.3f} and {cut.nll_with_boundaries:.3f} in windows of the context), "
    assert words in in_words(judged) and words in "".join(evaluate(path, None))
    shares = []
    recorded(run, run.corpus.validation, progress=lambda done, total: shares.append(done / total))
    assert shares == sorted(shares) and shares[-1] == 1 and shares.count(1) == 1 and 0.5 in shares
    assert "in_windows" not in json.loads((trained / "result.json").read_text())["likelihood"]


def test_an_export_whose_splitter_is_not_here_is_told(spans, tmp_path):
    config = json.loads((spans[0] / "model" / "config.json").read_text())
    config["recipe"]["corpus"]["sentences"] = {"splitter": "sat", "weights": str(tmp_path / "away")}
    for file in (spans[0] / "model").iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"config.json: recipe.corpus.sentences: Value error, splitter sat: .*away"):
        open_model(tmp_path)


def test_an_export_says_that_transformers_knows_no_sentences(spans, trained, tmp_path):
    own, plain = tmp_path / "its own", tmp_path / "plain"
    *_, said = write_model(spans[0], own).splitlines()
    assert (
        said == f"under transformers no sentence ends, in a prompt or after it; as in training: tandem generate '{own}'"
    )
    assert "sentence" not in write_model(trained, plain)


def test_given_sentences_need_the_rules_for_prompts(monkeypatch):
    recipe = load("gestalt/tiny", ["corpus.sentences={splitter: given, cap: 32}"])
    require_splitter(recipe)
    monkeypatch.setitem(sys.modules, "pysbd", None)
    with pytest.raises(UserError, match=r"corpus.sentences.splitter given: .*'tandem-lm\[sentences\]'"):
        require_splitter(recipe)


def test_an_exported_model_of_sentences_is_scored_as_its_run_is(spans, tmp_path, monkeypatch):
    path, _ = spans
    monkeypatch.chdir(tmp_path)
    (tmp_path / "poem.txt").write_text("the river sees a cat and the cat sees a house " * 6)
    given = [f"poem={tmp_path / 'poem.txt'}"]
    *_, of_run, by_position = evaluate(path, None, given)
    assert [*evaluate(path / "model", None, given)] == [of_run, by_position] and " as published" in of_run
