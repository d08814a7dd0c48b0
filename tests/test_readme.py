"""Every `tandem` line of the README runs, with its budget cut to seconds, the demo with two of its arms, and the
program of docs/exchange.md."""

import os
import re
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from typed import tandem

from tandem.comparison import plots, pretrain

ROOT = Path(__file__).parents[1]
LINES = [line.split("  #")[0].strip() for line in (ROOT / "README.md").read_text().splitlines()]
LINES = [line for line in LINES if line.startswith("tandem ")]


def not_in_the_demo() -> list[str]:
    """What `make demo` does not install."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = re.search(r"/\.core: EXTRAS := ([\w,]+)", (ROOT / "Makefile").read_text())[1].split(",")
    hidden = [re.match(r"[\w-]+", need)[0] for name in extras.keys() - set(installed) for need in extras[name]]
    assert {"pyarrow", "transformers", "triton"} <= set(hidden) and "matplotlib" not in hidden
    return hidden


def hiding(modules: Sequence[str], folder: Path) -> str:
    """PYTHONPATH of processes that shall not find `modules`; what hides them lies in `folder`."""
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({modules})\n")
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


@pytest.mark.slow
def test_its_lines_run_in_order(tmp_path, monkeypatch, small_corpus):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pretrain, "plot_losses", plots.plot_losses)  # which other tests leave out
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
    study = yaml.safe_load((ROOT / "recipes/studies/demo.yaml").read_text())
    study["arms"] = {arm: study["arms"][arm] for arm in ("decoder", "thoughts")}  # of six
    (tmp_path / "recipes/studies").mkdir(parents=True)
    (tmp_path / "recipes/studies/demo.yaml").write_text(yaml.safe_dump(study))
    for line in LINES:
        words = shlex.split(line)[1:]
        if words[0] in ("plan", "train"):
            words = [*words[:2], *small, *words[2:]]
        if words[0] == "compare":
            words += [*small, "budget=2 steps", "batch.rows=10", "network.depth=3", "network.width=32", "together=null"]
            words += ["evaluation.points=1", "evaluation.documents=5"]
            monkeypatch.setenv("PYTHONPATH", hiding(not_in_the_demo(), tmp_path))
        done = tandem(*words)
        assert done.exit_code == 0 and done.stdout.strip() and not done.stderr, f"{line}\n{done.output}"
    assert (tmp_path / "exported" / "model.safetensors").exists()
    assert (tmp_path / "runs" / "first" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_commands_within_its_text_have_the_options_that_it_names():
    text = (ROOT / "README.md").read_text()
    inline = [line.split() for line in re.findall(r"`(tandem [^`]+)`", text.replace("\n", " "))]
    assert {"evaluate", "generate", "import", "compare"} <= {verb for _, verb, *_ in inline}
    for _, verb, *words in inline:
        told = tandem(verb, "--help").stdout
        assert all(word in told for word in words if word.startswith("--")), (verb, words)


def test_the_program_that_uses_tandem_runs(tmp_path, monkeypatch, small_corpus, capsys):
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"## In Python.*?```python\n(.*?)```", (ROOT / "docs/exchange.md").read_text(), re.DOTALL)
    small = [*small_corpus, "budget=4 steps", "batch.rows=2", "batch.context=32", "network.depth=1"]
    program = program.replace('["budget=1e6 tokens"]', repr(small))
    exec(program, names := {})
    assert len(names["texts"]) == 2 and all(names["texts"])
    assert names["likelihood"].documents == len(names["run"].corpus.validation)
    assert names["likelihood"].nll == pytest.approx(names["result"]["likelihood"]["nats_per_token"], rel=1e-6)
