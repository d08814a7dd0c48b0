"""benchmarks/recall.py: what its text asks, and which tokens are the answer."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tandem.comparison.pretrain import built
from tandem.corpus import scoring_rows
from tandem.recipe import load
from tandem.training.parallel import ALONE

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))


def test_the_answer_is_the_fact_of_the_first_sentence(tmp_path, monkeypatch):
    import recall

    monkeypatch.setattr(recall, "DOCUMENTS", {"train": 3000, "validation": 20})
    recall.write_text(tmp_path)
    given = [f"corpus.texts=[{tmp_path}/train.jsonl]", f"corpus.validation=[{tmp_path}/validation.jsonl]"]
    recipe = load("gestalt/recall", [*given, "corpus.vocabulary=512", f"corpus.folder={tmp_path}/corpora"])
    corpus = built(recipe, None, ALONE).corpus
    encode = lambda text: corpus.tokenizer.encode_batch([text])[0][0]
    price = torch.rand(600, generator=torch.Generator().manual_seed(0))
    network = SimpleNamespace(
        scoring=lambda store, context, rows, documents, whole: scoring_rows(store, context, rows, documents),
        score=lambda batch: price[batch.targets.clamp_min(0)],
    )
    found = recall.answers(SimpleNamespace(corpus=corpus, network=network, recipe=recipe))
    expected = {"name": 0.0, "liking": 0.0}
    for line in (tmp_path / "validation.jsonl").read_text().splitlines():
        first, *_, last = json.loads(line)["text"]
        assert last == f"So {first.strip()}"
        so, name, likes, liking = last.removesuffix(".").split()
        assert (so, likes) == ("So", "likes")
        expected["name"] += float(price[encode(f" {name}")].sum()) / 20
        expected["liking"] += float(price[encode(f" {liking}")].sum()) / 20
    assert found == pytest.approx(expected, rel=1e-5)
