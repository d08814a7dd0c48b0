"""Killed without warning and started again, a run ends bit for bit where it would have ended."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from tandem.training.observers import CLOCK_KEYS

STEPS = 60


def start(folder, small_corpus):
    size = ["network.depth=2", "network.width=32", "batch.rows=4", "batch.context=32", "sampling.tokens=5"]
    due = ["log.every=1", "checkpoint.every=7", "evaluation.every=20", "evaluation.documents=5"]
    command = [sys.executable, "-m", "tandem", "train", "decoder/tiny", "--run", folder.name, "--runs", folder.parent]
    overrides = [*size, *due, *small_corpus, f"budget={STEPS} steps"]
    return subprocess.Popen([*command, *overrides], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(process):
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors


def record(folder):
    """Everything recorded but clocks and memory."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in CLOCK_KEYS} for line in lines]


def final(folder):
    last = folder / "checkpoints" / f"step-{STEPS:08d}"
    progress = json.loads((last / "progress.json").read_text()) | {"seconds": None}
    return load_file(last / "network.safetensors"), torch.load(last / "optimiser.pt", weights_only=True), progress


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.slow
def test_killed_at_random_steps_and_resumed_is_bitwise_the_same(tmp_path, small_corpus):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    finish(start(whole, small_corpus))
    seed = int(os.environ.get("KILL_SEED", random.randrange(10**6)))
    print(f"KILL_SEED={seed}")  # shown when the test fails
    draw, kills = random.Random(seed), 0
    for at in sorted(draw.sample(range(3, STEPS - 2), 5)):
        process = start(cut, small_corpus)
        metrics = cut / "metrics.jsonl"
        while process.poll() is None:
            if metrics.exists() and metrics.read_bytes().count(b'"kind": "step"') >= at:
                process.send_signal(signal.SIGKILL)
            time.sleep(0.001)
        kills += process.returncode == -signal.SIGKILL
        process.communicate()
    assert kills >= 4  # one may have finished before the signal came
    finish(start(cut, small_corpus))
    assert record(cut) == record(whole)
    assert len([line for line in record(cut) if line["kind"] == "step"]) == STEPS
    for a, b in zip(final(cut), final(whole), strict=True):
        assert same(a, b)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_saves_and_goes_on(tmp_path, small_corpus, number):
    folder = tmp_path / "stopped"
    process = start(folder, small_corpus)
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b'"kind": "step"') >= 4):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.001)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert "stopped after step" in errors and "Traceback" not in errors
    done = int(errors.split("stopped after step ")[1].split(";")[0])
    assert (folder / "checkpoints" / f"step-{done:08d}" / "manifest.json").exists()
