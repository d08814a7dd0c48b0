"""Every `tandem` line of the README runs, with its budget cut to seconds."""

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.cli import main

LINES = [line.split("  #")[0].strip() for line in (Path(__file__).parents[1] / "README.md").read_text().splitlines()]
LINES = [line for line in LINES if line.startswith("tandem ")]


@pytest.mark.slow
def test_its_lines_run_in_order(tmp_path, monkeypatch, small_corpus):
    monkeypatch.chdir(tmp_path)
    small = [*small_corpus, "budget=12 steps", "batch.rows=2", "sampling.tokens=5"]
    assert {shlex.split(line)[1] for line in LINES} == {
        "show",
        "plan",
        "train",
        "evaluate",
        "generate",
        "export",
        "compare",
    }
    for line in LINES:
        words = shlex.split(line)[1:]
        if words[0] in ("plan", "train"):
            words = [*words[:2], *small, *words[2:]]
        if words[0] == "compare":
            words += [*small, "budget=4 steps", "batch.rows=10", "together=null"]
            words += ["evaluation.points=1", "evaluation.documents=5"]
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0 and done.stdout.strip() and not done.stderr, f"{line}\n{done.output}"
    assert (tmp_path / "exported" / "model.safetensors").exists()
    assert (tmp_path / "runs" / "first" / "loss.png").read_bytes().startswith(b"\x89PNG")
