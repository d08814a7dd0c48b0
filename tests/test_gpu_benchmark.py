"""The script for CUDA machines runs here, too, at tiny sizes: every part writes its lines, and the page holds them."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the benchmark times the kernels")
FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def test_the_script_for_cuda_runs_at_tiny_sizes(tmp_path):
    command = [sys.executable, str(FOLDER / "gpu.py"), "--tiny", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:] + (tmp_path / "log.txt").read_text()[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert {line.get("part") for line in lines} == {None, "attention", "steps", "decode", "heads", "bags", "passes"}
    assert not [line for line in lines if "failed" in json.dumps(line) and line.get("network") in ("decoder", "sps")]
    timed = {line["mask"]: line["arms"] for line in lines if line.get("part") == "attention" and "flops" in line}
    assert all("ms" in arm for arms in timed.values() for arm in arms.values()), timed
    page = (tmp_path / "report.md").read_text()
    assert all(f"| {mask} |" in page for mask in timed) and "## Goals" in page


def test_missing_wheels_are_named(tmp_path):
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import gpu\n"
        "gpu.NEEDED = ('torch', 'not_there'); gpu.provide(pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[2]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(FOLDER), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1 and "missing here: not_there." in done.stderr and "pip download" in done.stderr


def test_an_arm_that_fails_of_anything_loses_itself_alone(benchmarks):
    from machine import time_arms

    class CompilationError(Exception):  # Triton's: no RuntimeError, and it may say nothing
        pass

    def fail():
        raise CompilationError

    timed = time_arms({"broken": fail, "sound": lambda: None}, rounds=2)
    assert timed["broken"] == {"failed": "CompilationError: "} and timed["sound"]["ms"] >= 0


def test_parts_run_side_by_side_until_their_time_is_up(benchmarks, tmp_path):
    import gpu

    sleeper = "import time; print('so far', flush=True); time.sleep(60)"
    sleepers = [gpu.Part("short", 1, ["-c", sleeper]), gpu.Part("long", 60, ["-c", sleeper])]
    quick = [gpu.Part("wrong", 60, ["-c", "raise SystemExit(3)"]), gpu.Part("right", 60, ["-c", ""])]
    began = time.monotonic()
    found = gpu.run(
        [*sleepers, *quick, gpu.Part("late", 60, ["-c", sleeper])], tmp_path, dict(os.environ), 3, at_once=2
    )
    verdicts = {verdict["name"]: verdict["verdict"] for verdict in found}
    cut = {"short": "cut off", "long": "cut off", "late": "cut off"}
    assert verdicts == cut | {"wrong": "failed with 3", "right": "passed"}
    assert time.monotonic() - began < 30
    assert (tmp_path / "log.txt").read_text().count("so far") == 3


def test_every_test_that_needs_cuda_is_among_the_parts(benchmarks):
    import gpu

    needed, root = set(), FOLDER.parent
    for file in (root / "tests").rglob("test_*.py"):
        text = file.read_text()
        for found in re.finditer(r"skipif\(\s*not torch\.cuda", text):
            needed.add(file.relative_to(root).as_posix())
            name = re.search(r"def (test_\w+)", text[found.end() :])
            assert name and ("cuda" in name[1] or "cuda" in file.stem), f"{file.name}: -k cuda passes over {name}"
    assert needed == {word for part in gpu.TESTS for word in part.words if word.startswith("tests/")}
