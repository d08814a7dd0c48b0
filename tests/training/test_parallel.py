"""Any number of processes takes the same steps as one, and goes on from what any other number has saved."""

import json

import pytest
import torch
from ranks import Ranks, fail_alone, stage, stages

from tandem.recipe import UserError
from tandem.training.device import Training
from tandem.training.parallel import ALONE, choose_parallel, require_divisible
from tandem.training.parallel import Ranks as Group

SIZE = ["network.depth=2", "network.width=32", "batch.rows=16", "batch.context=16", "budget=12 steps"]
BAGS = ["objective.name=superposition", "objective.bag=2", "objective.boundary=fold", "objective.until=0.5"]
BAGS += ["objective.reinit_at_switch=embeddings", "network.moe.experts=4", "network.moe.active=2"]
BAGS += ["network.moe.balance=0.1", "network.mlp_width=24"]
"""Phases, slots of unequal counts, and a loss of which every process knows a part."""
TIED = ["network.name=context_ready", "network.correction=tied"]
"""Weights that are asked inside of their block and outside."""
STEPS = 12
APART = 1e-5
"""float32 sums in another order: a tenth of this was seen after 20."""


@pytest.fixture(scope="module")
def spec(small_corpus):
    def make(how="auto", micro=1, **given):
        how = [f"training.parallel={how}", f"batch.micro_batches={micro}", "training.precision=float32"]
        return {"overrides": [*SIZE, *small_corpus, *how], "last": STEPS, **given}

    return make


@pytest.fixture(scope="module")
def alone(spec):
    """All steps by one process."""
    return stage(**spec())


def by(count, specs, folder):
    ranks = Ranks(count, folder / f"log of {count}", stages, specs, folder / "result.json")
    assert ranks.wait() == [0] * count, ranks.said
    return json.loads((folder / "result.json").read_text())


def require_same(found, alone, first=0):
    assert torch.tensor(found["seen"]).sub(torch.tensor(alone["seen"][first:])).abs().max() < APART
    assert found["counts"] == alone["counts"]
    assert found["tokens"] == alone["tokens"] and found["nats"] == pytest.approx(alone["nats"], rel=APART)
    for name, weights in found["weights"].items():
        assert weights == pytest.approx(alone["weights"][name], abs=1e-4), name  # AdamW magnifies the least gradients


@pytest.fixture(scope="module")
def in_two(spec, tmp_path_factory):
    """What two processes saw, and where they saved step 6 (fsdp) and step 9 (ddp, from that)."""
    folder = tmp_path_factory.mktemp("two")
    six, nine = str(folder / "six"), str(folder / "nine")
    cases = {
        "ddp": spec("ddp"),
        "ddp, accumulated": spec("ddp", 4),
        "fsdp": spec("fsdp"),
        "fsdp, accumulated": spec("fsdp", 4),
        "fsdp, half": spec("fsdp", save_in=six) | {"last": 6},
        "ddp, from there": spec("ddp", load_from=f"{six}/step-00000006", first=6, save_in=nine) | {"last": 9},
        "ddp, compiled": spec("ddp", compiled=True),
        "fsdp, compiled": spec("fsdp", 2, compiled=True),
    }
    for how in ("ddp", "fsdp"):
        cases[f"{how}, bags"] = spec(how)
        cases[f"{how}, bags"]["overrides"] += BAGS
    cases["fsdp, tied"] = spec("fsdp") | {"last": 5}
    cases["fsdp, tied"]["overrides"] += TIED
    for name in ("ddp, compiled", "fsdp, compiled"):
        cases[name]["overrides"].append("training.recompute=true")
    return dict(zip(cases, by(2, list(cases.values()), folder), strict=True)), folder


@pytest.mark.parametrize(
    "case", ["ddp", "ddp, accumulated", "fsdp", "fsdp, accumulated", "ddp, compiled", "fsdp, compiled"]
)
def test_two_processes_take_the_steps_of_one(in_two, alone, case):
    require_same(in_two[0][case], alone)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_mixtures_in_bags_take_the_steps_of_one(in_two, spec, how):
    given = spec()
    given["overrides"] += BAGS
    require_same(in_two[0][f"{how}, bags"], stage(**given))


def test_a_block_whose_mlp_corrects_takes_the_steps_of_one(in_two, spec):
    given = spec() | {"last": 5}
    given["overrides"] += TIED
    require_same(in_two[0]["fsdp, tied"], stage(**given))


def test_micro_batches_of_one_process_are_no_other_steps(spec, alone):
    require_same(stage(**spec(micro=4)), alone)


def test_from_fsdp_over_ddp_to_one_process_no_step_changes(in_two, spec, alone):
    found, folder = in_two
    whole = torch.tensor(alone["seen"])
    assert torch.tensor(found["fsdp, half"]["seen"]).sub(whole[:6]).abs().max() < APART
    assert torch.tensor(found["ddp, from there"]["seen"]).sub(whole[6:9]).abs().max() < APART
    require_same(stage(**spec(load_from=str(folder / "nine/step-00000009"), first=9)), alone, first=9)


def test_four_processes_go_on_from_two(in_two, spec, alone, tmp_path):
    six = str(in_two[1] / "six/step-00000006")
    for found in by(4, [spec(how, load_from=six, first=6) for how in ("fsdp", "ddp")], tmp_path):
        require_same(found, alone, first=6)


def test_rows_that_can_not_be_dealt_out_are_refused():
    require_divisible(16, 4, Group(0, 4))
    with pytest.raises(UserError, match=r"batch.rows = 16: must be a multiple of 12 = 3 processes x .* 4; write.*=24"):
        require_divisible(16, 4, Group(0, 3))
    for rows, micro, ranks, cure in ((8, 2, 6, "=12, or start 2 processes"), (4, 4, 2, "=8, or start 1 process")):
        with pytest.raises(UserError, match=f"write batch.rows{cure}$"):
            require_divisible(rows, micro, Group(0, ranks))
    with pytest.raises(UserError, match=r"of 16 = 1 process x .* write batch.rows=16$"):  # no number of processes helps
        require_divisible(4, 4, ALONE, divisor=4)


def test_what_fails_in_one_process_is_raised_in_those_that_gather_meanwhile(tmp_path):
    ranks = Ranks(3, tmp_path / "log", fail_alone, tmp_path / "told")
    assert ranks.wait() == [0, 0, 0], ranks.said
    for rank in range(3):
        told = json.loads((tmp_path / f"told.{rank}").read_text())
        failed = [["UserError", "the cause", rank > 0], [0, 1, 2], ["OSError", "the disk", rank > 0], [0, 1, 2]]
        assert told == failed * 2


def test_processes_that_differ_are_named(monkeypatch):
    theirs = [{"training.precision": "float32", "corpus": ["a", text]} for text in "bcb"]
    monkeypatch.setattr(Group, "gather", lambda group, mine: theirs)
    with pytest.raises(UserError, match=r"differ.*\n  corpus: \['a', 'b'\] in processes \[0, 2\], .* \[1\]$"):
        Group(0, 3).require_alike(theirs[0])
    theirs[1] = theirs[0]
    Group(0, 3).require_alike(theirs[0])


def test_weights_are_cut_where_they_would_fill_the_memory():
    cpu = torch.device("cpu")
    assert choose_parallel(Training.Config(parallel="fsdp"), ALONE, cpu, 1).value == "none"
    two = Group(0, 2)
    assert choose_parallel(Training.Config(), two, cpu, 10**6).value == "ddp"
    assert choose_parallel(Training.Config(), two, cpu, 10**13).value == "fsdp"
    assert choose_parallel(Training.Config(parallel="fsdp"), two, cpu, 10**6) == ("fsdp", "asked for")
