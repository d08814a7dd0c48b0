"""Gates of a trained memory: recorded on the way, measured at the end, and memories exchanged between documents."""

import json

import pytest
import torch
from typed import tandem

from tandem.analysis.gates import Use, nats_per_token, watched
from tandem.corpus import ScoringBatch
from tandem.corpus.given import GivenTexts
from tandem.networks.gestalt import Gestalt
from tandem.testing.cases import CONTEXT, VOCABULARY, Case

SMALL = ["network.name=gestalt", "network.depth=3", "network.width=16", "network.heads=2", "network.thought_from=1"]
SMALL += ["network.memory=3", "network.streams.sentences=3", "network.streams.grow=0", "corpus.sentences.cap=24"]
SMALL += ["network.cap=24", "batch.rows=8", "batch.context=16", "budget=6 steps", "evaluation.points=3"]
SMALL += ["sampling.tokens=3", "evaluation.documents=4", "training.compile=false"]


def texts(lengths) -> list[list[list[int]]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in text] for text in lengths]


@pytest.fixture(scope="module", params=["alternate", "serial", "parallel"])
def network(request) -> Gestalt:
    made = Case("", Gestalt, Gestalt.tiny()[request.param]).build().eval()
    assert isinstance(made, Gestalt)
    return made


def scorings(network, given) -> list[ScoringBatch]:
    return list(network.scoring(GivenTexts(given, VOCABULARY), CONTEXT, 100))


@torch.no_grad()
def test_attention_by_age_sums_to_one_and_increments_are_positive(network):
    use = Use(network.config.memory)
    with watched(network, use):
        network.score(scorings(network, texts([[3, 4, 2, 5], [4, 3], [2]]))[0].batch)
    assert sorted(use.mass) == network.reads_memory(range(network.config.depth))
    for layer, mass in use.mass.items():
        # Every query of sentences 2, 3 and 4 has an age 1, those of 3 and 4 an age 2 as well
        assert use.queries[layer][0] > use.queries[layer][1] > 0
        assert mass.sum() == pytest.approx(use.queries[layer][0])
        total, n = use.increments[layer]
        assert total > 0 and n == use.queries[layer][0]


def test_memories_of_other_documents_change_what_reads_them(network):
    given = texts([[3, 4, 2, 5], [4, 3, 4, 3], [2]])
    own = nats_per_token(network, scorings(network, given))
    assert nats_per_token(network, scorings(network, given)) == own  # watching leaves nothing behind
    costs = [nats_per_token(network, scorings(network, given), n) - own for n in (1, 2, 3)]
    assert abs(costs[0]) > 1e-4 and abs(costs[1]) > 1e-4 and costs[0] != costs[1]
    assert costs[2] == pytest.approx(0, abs=1e-12)  # memory holds two
    alike = [given[0], given[0], given[2]]
    same = nats_per_token(network, scorings(network, alike))
    assert nats_per_token(network, scorings(network, alike), 1) == pytest.approx(same, abs=1e-9)


def test_gates_are_on_record_from_evaluation_to_evaluation(tmp_path, small_corpus):
    done = tandem("train", "decoder/tiny", "--run", "mine", "--runs", tmp_path, *SMALL, *small_corpus)
    assert done.exit_code == 0, done.output
    done = tandem("analyse", "gates", tmp_path / "mine", "documents=6")
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "mine/analysis/gates.json").read_text())
    assert [point["step"] for point in record["on_the_way"]] == [2, 4, 6]
    assert record["on_the_way"][-1]["gates"] == record["gates"] and list(record["gates"]) == ["2"]
    assert record["on_the_way"][0]["gates"] != record["gates"] != {"2": 1.0}
    assert len(record["attention_by_age"]["2"]) == 3 and record["increment"]["2"] > 0
    assert len(record["cost_of_exchange"]) == 3
    assert (tmp_path / "mine/analysis/gates.png").stat().st_size > 5000
