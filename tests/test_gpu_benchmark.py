"""The script for CUDA machines runs here, too, at tiny sizes: every part writes its lines, and the page holds them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the benchmark times the kernels")
FOLDER = Path(__file__).parents[1] / "benchmarks"


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
