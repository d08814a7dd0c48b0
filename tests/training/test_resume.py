"""Killed without warning and started again, a run ends bit for bit where it would have ended.

TANDEM_KILLS=40 pytest tests/training/test_resume.py -k kill          as often as one likes; KILL_SEED repeats one
"""

import fcntl
import json
import os
import pty
import random
import signal
import subprocess
import sys
import termios
import time
from dataclasses import asdict

import pytest
import torch
from ranks import Ranks, command
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tandem.comparison.pretrain import prepared
from tandem.recipe import load
from tandem.recipe.document import recipes
from tandem.training import checkpoint
from tandem.training.health import SIGNALS
from tandem.training.loop import take_step
from tandem.training.observers import CLOCK_KEYS
from tandem.training.progress import Progress
from tandem.training.run import Run

KILLS = int(os.environ.get("TANDEM_KILLS", "2"))
SIZE = ["network.depth=2", "network.width=16", "network.heads=2", "batch.rows=4", "batch.context=16"]
SIZE += [
    "training.compile=false",
    "training.precision=float32",
    "training.parallel=fsdp",
    "sampling.tokens=2",
    "log.every=1",
]


def start(folder, small_corpus, count=1, steps=60, every=3, damage=None, at=0, more=()):
    due = [f"checkpoint.every={every}", f"evaluation.every={every * 7}", "evaluation.documents=3"]
    into = ["--run", folder.name, "--runs", str(folder.parent)]
    arguments = ["train", "decoder/tiny", *into, *SIZE, *due, *small_corpus, f"budget={steps} steps", *more]
    return Ranks(count, folder.with_suffix(".log"), command, arguments, damage, at)


def finish(ranks, code=0):
    codes = ranks.wait()
    assert codes == [code] * len(codes), ranks.said


def steps_recorded(folder):
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b'"kind": "step"') if metrics.exists() else 0


def wait_for(ranks, folder, steps):
    while steps_recorded(folder) < steps and all(p.is_alive() for p in ranks.processes):
        time.sleep(0.001)


def record(folder):
    """Everything recorded but clocks and memory."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in CLOCK_KEYS} for line in lines]


def final(folder):
    """All tensors of the newest checkpoint, of weights and optimiser, by name."""
    (last,) = (folder / "checkpoints").iterdir()
    dcp_to_torch_save(last, folder / "joined.pt")
    return torch.load(folder / "joined.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2], ids=["one process", "fsdp on two"])
def test_killed_at_any_moment_and_resumed_is_bitwise_the_same(tmp_path, small_corpus, count):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    steps = 12 + 8 * KILLS
    uninterrupted = start(whole, small_corpus, count, steps)
    seed = int(os.environ.get("KILL_SEED", random.randrange(10**6)))
    print(f"KILL_SEED={seed}")  # shown when the test fails
    draw, kills, while_saving = random.Random(seed), 0, 0
    finish(uninterrupted)
    for attempt in range(KILLS):
        ranks = start(cut, small_corpus, count, steps, damage="slow")
        wait_for(ranks, cut, 8 * attempt + draw.randint(1, 8))
        time.sleep(draw.uniform(0, 0.1))
        victims = draw.choice([ranks.processes, [draw.choice(ranks.processes)]])
        for process in victims:
            process.kill()
        codes = ranks.wait()  # the others end by themselves
        kills += -signal.SIGKILL in codes
        while_saving += any((cut / "checkpoints").glob(".step-*"))
    print(f"{kills} of {KILLS} attempts were killed, {while_saving} while they saved")
    finish(start(cut, small_corpus, count, steps))
    assert kills == KILLS and (while_saving or KILLS < 10)
    assert record(cut) == record(whole)
    assert len([line for line in record(cut) if line["kind"] == "step"]) == steps
    a, b = final(cut), final(whole)
    assert a.keys() == b.keys() and len(a) > 50
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("number", SIGNALS)
def test_asked_to_stop_it_saves_and_goes_on(tmp_path, small_corpus, number):
    """Of two processes only one is asked, by SIGUSR1 twice, as where Slurm and torchrun both pass it on."""
    folder, count = tmp_path / "stopped", 2 if number == signal.SIGUSR1 else 1
    ranks = start(folder, small_corpus, count, steps=5000, every=5000)
    wait_for(ranks, folder, 4)
    for _ in range(count):
        os.kill(ranks.processes[-1].pid, number)
        time.sleep(0.001)
    finish(ranks, 128 + number)
    assert ranks.said.count("stopped after step") == 1 and "Traceback" not in ranks.said
    done = int(ranks.said.split("stopped after step ")[1].split(";")[0])
    assert (folder / "checkpoints" / f"step-{done:08d}" / "manifest.json").exists()
    assert steps_recorded(folder) == done


def test_a_terminal_that_closes_stops_a_run_that_has_saved_itself(tmp_path, small_corpus):
    ours, its = pty.openpty()

    def takes_over():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        fcntl.ioctl(its, termios.TIOCSCTTY, 0)

    given = ["budget=5000 steps", "checkpoint.every=5000", *SIZE, *small_corpus]
    typed = [sys.executable, "-m", "tandem", "train", "decoder/tiny", "--run", "mine", "--runs", str(tmp_path), *given]
    run = subprocess.Popen(typed, stdin=its, stdout=its, stderr=its, start_new_session=True, preexec_fn=takes_over)
    os.close(its)
    said = b""
    while b"step " not in said:
        said += os.read(ours, 1 << 16)
    os.close(ours)
    assert run.wait(60) == 128 + signal.SIGHUP
    (last,) = (tmp_path / "mine" / "checkpoints").glob("step-*")
    assert steps_recorded(tmp_path / "mine") == int(last.name.removeprefix("step-")) > 0


def test_asked_to_stop_while_it_saves_the_last_step_it_leaves_the_scoring_to_the_next_call(tmp_path, small_corpus):
    folder = tmp_path / "late"
    ranks = start(folder, small_corpus, count=2, steps=6, damage="warned", at=6)
    finish(ranks, 128 + signal.SIGUSR1)
    assert ranks.said.count("stopped after step 6; the same command goes on") == 1 and "Traceback" not in ranks.said
    stopped = record(folder)
    assert steps_recorded(folder) == 6 and all(line["kind"] == "step" for line in stopped)
    finish(start(folder, small_corpus, count=2, steps=6))
    assert record(folder)[:-1] == stopped and record(folder)[-1]["kind"] == "likelihood"
    assert (folder / "result.json").exists()


@pytest.mark.parametrize("count", [1, 2])
def test_a_full_disk_of_any_process_ends_all_with_one_message(tmp_path, small_corpus, count):
    folder = tmp_path / "full"
    ranks = start(folder, small_corpus, count, damage="full", at=6)  # the last process's alone
    finish(ranks, 2)
    assert ranks.said.count("step-00000006: not saved ([Errno 27] File too large") == 1, ranks.said
    assert "step-00000003 still stands. Make room on the disk" in ranks.said and "Traceback" not in ranks.said
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000003"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [("batch.rows=3", "batch.rows = 3: must be a multiple of 2"), ("network.widht=3", "did you mean network.width")],
)
def test_a_mistake_is_told_once(tmp_path, small_corpus, wrong, message):
    ranks = start(tmp_path / "wrong", small_corpus, count=2, more=[wrong])
    finish(ranks, 2)
    assert ranks.said.count(message) == 1 and "Traceback" not in ranks.said, ranks.said
    assert not (tmp_path / "wrong").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_disk_that_has_no_room_for_the_plan_ends_all_with_one_message(tmp_path, small_corpus):
    ranks = start(tmp_path / "full", small_corpus, count=2, damage="no plan")
    finish(ranks, 2)
    said = "/dev/full: No space left on device; make room on the disk and start the same command again"
    assert ranks.said.count(said) == 1 and "Traceback" not in ranks.said, ranks.said


@pytest.mark.parametrize("name", [name for name in recipes() if name.endswith("tiny")])
def test_every_network_goes_on_from_a_checkpoint_bit_for_bit(name, small_corpus, tmp_path):
    recipe = load(name, [*small_corpus, "budget=4 steps", "batch.rows=8", "batch.micro_batches=1"])
    corpus = prepared(recipe)

    def after(steps, run):
        for step in steps:
            run.enter(step)
            taken = take_step(run, step)
            run.progress.step = step + 1
        return taken

    whole, begun, on = (Run(recipe, corpus) for _ in range(3))
    expected = after(range(4), whole)
    after(range(2), begun)
    path = checkpoint.save(tmp_path, 2, begun.network, begun.optimiser, asdict(begun.progress), keep=1)
    on.progress = Progress(**checkpoint.restore(path, on.network, on.optimiser))
    found = after(range(2, 4), on)
    assert found.counts == expected.counts and torch.equal(found.norm, expected.norm)
    assert all(torch.equal(a, b) for a, b in zip(found.sums.values(), expected.sums.values(), strict=True))
    for (key, mine), theirs in zip(on.network.named_parameters(), whole.network.parameters(), strict=True):
        assert torch.equal(mine, theirs), key


def test_machines_that_choose_differently_are_told_once_and_nothing_hangs(tmp_path, small_corpus):
    ranks = start(tmp_path / "mixed", small_corpus, count=2, damage="mixed", more=["training.precision=auto"])
    finish(ranks, 2)
    said = "training.precision: torch.bfloat16 in processes [0], torch.float32 in processes [1]"
    assert ranks.said.count(said) == 1 and "Traceback" not in ranks.said, ranks.said
    assert not (tmp_path / "mixed").exists()


def test_recipes_that_differ_are_told_once_and_nothing_is_trained(tmp_path, small_corpus):
    ranks = start(tmp_path / "edited", small_corpus, count=2, damage="edited")
    finish(ranks, 2)
    assert ranks.said.count("optimiser.lr: 0.001 in processes [0], 0.03 in processes [1]") == 1, ranks.said
    assert "checkpoint.every: 3 in processes [0], 2 in processes [1]" in ranks.said  # or one would wait for the other
    assert "Traceback" not in ranks.said and not (tmp_path / "edited").exists()


def test_a_loss_that_is_not_finite_is_told_once(tmp_path, small_corpus):
    ranks = start(tmp_path / "high", small_corpus, count=2, more=["optimiser.lr=1e15", "schedule.warmup=0"])
    finish(ranks, 3)
    assert ranks.said.count("nothing was updated") == 1 and "Traceback" not in ranks.said, ranks.said


def test_a_process_whose_partner_is_gone_says_so(tmp_path, small_corpus):
    folder = tmp_path / "alone"
    ranks = start(folder, small_corpus, count=2, steps=10**6)
    wait_for(ranks, folder, 4)
    ranks.processes[1].kill()
    assert ranks.wait() == [2, -signal.SIGKILL], ranks.said
    assert "process 0 of 2 has lost another one" in ranks.said and "Traceback" not in ranks.said, ranks.said


def test_a_process_that_waits_too_long_for_another_says_so(tmp_path, small_corpus):
    folder = tmp_path / "asleep"
    ranks = start(folder, small_corpus, count=2, steps=10**6, damage="impatient", at=6)
    wait_for(ranks, folder, 4)
    os.kill(ranks.processes[1].pid, signal.SIGSTOP)
    ranks.processes[0].join(60)
    os.kill(ranks.processes[1].pid, signal.SIGCONT)
    assert ranks.wait() == [2, 2], ranks.said
    assert "process 0 of 2 has lost another one" in ranks.said and "imed out" in ranks.said, ranks.said
    assert "Traceback" not in ranks.said, ranks.said


def test_a_process_whose_partner_never_joins_says_so(tmp_path, small_corpus):
    ranks = start(tmp_path / "first", small_corpus, count=2, damage="impatient", at=2)
    ranks.processes[1].kill()
    assert ranks.wait() == [2, -signal.SIGKILL], ranks.said
    assert "process 0 of 2 has lost another one" in ranks.said and "1/2 clients joined" in ranks.said, ranks.said
    assert "Traceback" not in ranks.said, ranks.said


def test_a_checkpoint_that_one_process_alone_misreads_ends_all_with_one_message(tmp_path, small_corpus):
    folder, muon = tmp_path / "misread", ["optimiser.name=muon"]  # whose first step has its processes exchange weights
    finish(start(folder, small_corpus, count=2, steps=6, more=muon))
    (folder / "result.json").unlink()
    ranks = start(folder, small_corpus, count=2, steps=6, damage="misread", more=muon)
    finish(ranks, 2)
    assert ranks.said.count("/.metadata: ") == 1 and "Traceback" not in ranks.said, ranks.said


def test_a_damaged_checkpoint_ends_all_with_one_message(tmp_path, small_corpus):
    folder = tmp_path / "damaged"
    finish(start(folder, small_corpus, count=2, steps=6))
    (folder / "result.json").unlink()
    piece = folder / "checkpoints/step-00000006/__1_0.distcp"
    data = piece.read_bytes()
    piece.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    ranks = start(folder, small_corpus, count=2, steps=6)
    finish(ranks, 2)
    assert ranks.said.count(f"{piece}: ") == 1 and "Traceback" not in ranks.said, ranks.said
