"""Every `tandem` line of the README runs, with its budget cut to seconds."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINES = [line.split("  #")[0].strip() for line in (ROOT / "README.md").read_text().splitlines()]
LINES = [line for line in LINES if line.startswith("tandem ")]


@pytest.mark.slow
def test_its_lines_run_in_order(tmp_path, small_corpus):
    assert len(LINES) >= 8
    small = [*small_corpus, "budget=12 steps", "batch.rows=2", "sampling.tokens=5"]
    for line in LINES:
        words = shlex.split(line)[1:]
        if words[0] in ("plan", "train"):
            words = [*words[:2], *small, *words[2:]]
        done = subprocess.run(
            [sys.executable, "-m", "tandem", *words], cwd=tmp_path, capture_output=True, text=True, env=os.environ
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert done.stdout.strip() and not done.stderr, f"{line}\n{done.stderr}"
    assert (tmp_path / "exported" / "model.safetensors").exists()
    assert (tmp_path / "runs" / "first" / "loss.png").read_bytes().startswith(b"\x89PNG")
