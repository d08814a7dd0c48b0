"""Gates of a trained memory: recorded on the way, measured at the end, and memories exchanged between documents."""

import json
import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from typed import tandem

from tandem.analysis.analysis import chosen_documents
from tandem.analysis.gates import Gates, Use, nats_per_token, watched
from tandem.corpus import ScoringBatch
from tandem.corpus.given import GivenTexts
from tandem.networks.gestalt import Gestalt
from tandem.networks.gestalt_blocks import rank_table
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
    made = Case("", Gestalt, Gestalt.tiny()[request.param]).build()
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


@torch.no_grad()
def test_attention_by_age_and_increments_position_by_position(network):
    (scoring,) = scorings(network, texts([[3, 4, 2, 5], [4, 3, 2]]))
    thoughts, seen, M, H = [], [], network.config.memory, network.config.heads
    use, handle = Use(M), network.thought.register_forward_hook(lambda head, given, made: thoughts.append(made[0]))
    with watched(network, use), watched(network, lambda *given: seen.append(given)):
        network.score(scoring.batch)
    handle.remove()
    # Those that a next sentence reads, step by step
    kept = torch.cat([made[:n] for made, n in zip(thoughts, scoring.batch.rows_at[1:], strict=False)])
    mass, queries, increments = {}, {}, {}
    for layer, memory, x, reader in seen:
        rows = reader.rows
        for at, row in enumerate((rows.cell // rows.columns).tolist()):
            if n := rows.filled[row]:
                read = kept[rows.windows[row, :n]]
                k, _ = memory.project(read + rank_table(M, x.shape[-1])[:n]).chunk(2, dim=-1)
                _, v = memory.project(read).chunk(2, dim=-1)
                q, k, v = (y.unflatten(-1, (H, -1)) for y in (memory.q(memory.norm(x[0, at])), k, v))
                p = (torch.einsum("hd,nhd->hn", q, k) / math.sqrt(q.shape[-1])).softmax(-1)
                added = memory.gate.weight * memory.output(torch.einsum("hn,nhd->hd", p, v).flatten())
                increments.setdefault(layer, []).append(float(added.norm() / x[0, at].norm()))
                mass.setdefault(layer, np.zeros(M))[:n] += p.mean(0).flip(0).numpy()
                queries.setdefault(layer, np.zeros(M))[:n] += 1
    assert mass.keys() == use.mass.keys() == set(network.reads_memory(range(network.config.depth)))
    for layer, found in mass.items():
        assert use.mass[layer] == pytest.approx(found, abs=1e-6) and found[0] != pytest.approx(found[1], abs=0.1)
        assert use.queries[layer] == pytest.approx(queries[layer])
        assert use.increments[layer] == pytest.approx([sum(increments[layer]), len(increments[layer])])


@torch.no_grad()
def test_counted_are_tokens_of_later_sentences_that_two_documents_have(network):
    given = texts([[3, 4, 2, 5], [4, 3], [2]])
    (scoring,) = scorings(network, given)
    counted = []
    for nats, document, i in zip(network.score(scoring.batch)[0], scoring.document[0], scoring.index[0], strict=True):
        step = int((i.item() >= np.cumsum([len(sentence) for sentence in given[document]])).sum())
        if step and sum(len(text) > step for text in given) > 1:
            counted.append(float(nats))
    assert len(counted) == 7
    assert nats_per_token(network, [scoring]) == pytest.approx(np.mean(counted))


def analysed(network, given, start=None, step=4, points=()) -> dict[str, Any]:
    """The record of a run that stands at `step` of those at which `points` were measured."""
    recipe = SimpleNamespace(start=SimpleNamespace(run=start))
    run: Any = SimpleNamespace(network=network, recipe=recipe, device=SimpleNamespace(value="cpu"))
    run.progress = SimpleNamespace(step=step)
    run.corpus = SimpleNamespace(validation=GivenTexts(given, VOCABULARY))
    analysis: Any = Gates(Gates.Config())
    analysis.folder = SimpleNamespace(records=lambda kind: points)
    return analysis.measure(run)


def test_a_record_says_what_each_exchange_costs_and_shares_by_age(network):
    given = texts([[3, 4, 2, 5], [4, 3, 4, 3]])
    record, read, bare, use = analysed(network, given), scorings(network, given), network.unseeded(), Use(2)
    own, own_bare = nats_per_token(network, read, use=use), nats_per_token(bare, read)
    wanted = {
        "all": nats_per_token(network, read, 1) - own,
        "all, seeds off": nats_per_token(bare, read, 1) - own_bare,
        "from the second newest on, seeds off": nats_per_token(bare, read, 2) - own_bare,
    }
    assert record["cost_of_exchange"] == pytest.approx(wanted) and record["nats_per_token"] == pytest.approx(own)
    assert len({round(cost, 4) for cost in [0.0, own - own_bare, *wanted.values()]}) == 5
    for layer, mass in use.mass.items():
        total, n = use.increments[layer]
        assert record["attention_by_age"][str(layer + 1)] == pytest.approx(mass / use.queries[layer])
        assert record["increment"][str(layer + 1)] == pytest.approx(total / n)


def test_documents_of_any_length_exchange_memories_among_at_most_eight():
    """Whatever a batch of the recipe holds: eleven documents of 40 tokens are read as six and five."""
    network = Case("", Gestalt, Gestalt.tiny()["alternate"]).build()
    given = texts([[4] * 10] * 11)
    chosen = chosen_documents(GivenTexts(given, VOCABULARY), None, shortest=2)
    found = [nats_per_token(network, scorings(network, [given[i] for i in part])) for part in (chosen[:6], chosen[6:])]
    record = analysed(network, given)
    assert record["nats_per_token"] == pytest.approx((6 * found[0] + 5 * found[1]) / 11)
    exchanged = [
        nats_per_token(network, scorings(network, [given[i] for i in part]), 1) for part in (chosen[:6], chosen[6:])
    ]
    cost = (6 * exchanged[0] + 5 * exchanged[1]) / 11 - record["nats_per_token"]
    assert record["cost_of_exchange"]["all"] == pytest.approx(cost, abs=1e-6) and abs(cost) > 1e-5


@torch.no_grad()
def test_an_exchanged_memory_is_what_the_other_document_remembers_by_itself(network):
    """A session reads the other's sentences, then one of this document's own, at every sentence step."""
    mine, other = texts([[3, 4, 2, 5], [4, 3, 4, 3]])
    bare, nats, tokens = network.unseeded(), 0.0, 0
    for own, memory in (mine, other), (other, mine):
        for t in range(1, 4):
            session = bare.session(1)
            logits = session.prefill([[token for sentence in memory[:t] for token in (*sentence, network.end)]])
            for token in own[t]:
                nats, tokens = nats - float(logits.double().log_softmax(-1)[0, token]), tokens + 1
                logits = session.step(torch.tensor([token]))
    found = nats_per_token(bare, scorings(network, [mine, other]), 1)
    assert found == pytest.approx(nats / tokens, rel=1e-5)


def test_gates_on_the_way_begin_as_drawn_and_end_at_the_step_of_the_run(network):
    given, before = texts([[3, 4], [4, 3]]), dict.fromkeys(network.gates, 0.5)
    points = [{"step": step, "gates": before} for step in (2, 5, 6)] + [{"step": 3}]
    record = analysed(network, given, points=points)
    assert [(at["step"], at["gates"]) for at in record["on_the_way"]] == [
        (0, dict.fromkeys(network.gates, 1.0)),
        (2, before),
        (4, network.gates),
    ]
    axes = Figure().subplots()
    Gates(Gates.Config()).draw(record, axes)
    assert [line.get_xdata().tolist() for line in axes.lines] == [[0, 2, 4]] * len(network.gates)
    assert [line.get_ydata().tolist() for line in axes.lines] == [[1, 0.5, gate] for gate in network.gates.values()]
    drawn = [(line.get_marker(), line.get_linewidth()) for line in axes.lines]
    assert all(one[0] != next_[0] and one[1] > next_[1] for one, next_ in pairwise(drawn))  # none hides another
    began_elsewhere = analysed(network, given, start="runs/other", points=points)
    assert [point["step"] for point in began_elsewhere["on_the_way"]] == [2, 4]


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
    said = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert {"gates, block 2", "increment, block 2", "attention_by_age, block 2", "cost_of_exchange, all"} <= {*said}
    record = json.loads((tmp_path / "mine/analysis/gates.json").read_text())
    assert [point["step"] for point in record["on_the_way"]] == [0, 2, 4, 6]
    assert record["on_the_way"][-1]["gates"] == record["gates"] and list(record["gates"]) == ["2"]
    assert record["on_the_way"][1]["gates"] != record["gates"] != {"2": 1.0}
    assert len(record["attention_by_age"]["2"]) == 3 and record["increment"]["2"] > 0
    assert len(record["cost_of_exchange"]) == 3
    assert (tmp_path / "mine/analysis/gates.png").stat().st_size > 5000
