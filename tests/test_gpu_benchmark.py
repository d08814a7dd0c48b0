"""The script for CUDA machines runs here, too, at tiny sizes: every part writes its lines, and the page holds them."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tandem.objectives.superposition import Superposition
from tandem.recipe import registered

pytest.importorskip("triton", reason="the benchmark times the kernels")
FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def test_the_script_for_cuda_runs_at_tiny_sizes(tmp_path):
    command = [sys.executable, str(FOLDER / "gpu.py"), "--tiny", "--out", str(tmp_path)]
    bare = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}  # which the tests set
    done = subprocess.run(command, capture_output=True, text=True, env=bare)
    assert done.returncode == 0, done.stderr[-2000:] + (tmp_path / "log.txt").read_text()[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    parts = {"attention", "shapes", "steps", "decode", "heads", "bags", "passes"}
    assert {line.get("part") for line in lines} == parts | {None}
    tiles = next(line for line in lines if line.get("part") == "shapes")
    assert len(tiles["off"]) == 6 and all(off < 2e-3 for off in tiles["off"].values())
    assert not [line for line in lines if "failed" in json.dumps(line)]
    timed = {line["mask"]: line["arms"] for line in lines if line.get("part") == "attention" and "flops" in line}
    assert all("ms" in arm for arms in timed.values() for arm in arms.values()), timed
    page = (tmp_path / "report.md").read_text()
    assert all(f"| {mask} |" in page for mask in timed) and "## Goals" in page and page.count("(shipped)") == 3


def test_the_kernels_compile_for_an_h100_with_hardly_a_spill(tmp_path):
    """The interpreter takes what the compiler refuses, or makes slow."""
    words = [str(FOLDER / "registers.py"), "--cases", "two_streams", "--widths", "64", "--out", str(tmp_path / "found")]
    fresh = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=fresh)
    assert done.returncode == 0, done.stderr[-2000:]
    records = [json.loads(line) for line in (tmp_path / "found").read_text().splitlines()[1:]]
    found = {record["kernel"]: record for record in records}
    gradients = {"key_gradient_kernel", "query_gradient_kernel"}
    assert found.keys() == gradients | {
        "forward_kernel",
        "decode_kernel",
        "combine_kernel",
        "nll_kernel",
        "append_kernel",
    }
    # Most has the gradient of queries: 24 with triton 3.6, 48 with 3.8, 116 with 3.9.
    assert not [record for record in records if record["spilled_bytes"] > 128 or not record["programs"]], records
    for name in gradients | {"forward_kernel", "decode_kernel"}:
        products = "HMMA" if name == "decode_kernel" else "HGMMA"
        assert found[name][products] and found[name]["copies"] and found[name]["loops"], found[name]


def test_a_step_in_bags_is_that_of_the_objective(benchmarks, monkeypatch):
    import gpu_networks

    seen, loss = [], Superposition.loss
    told = lambda task, network, batch, counts: seen.append(counts) or loss(task, network, batch, counts)
    monkeypatch.setattr(Superposition, "loss", told)
    gpu_networks.bags(lambda found: None, SimpleNamespace(tiny=True, rounds=1))
    in_bags = {"bag_nll": 32, "bag_kl": 32, "slot_1": 32, "slot_2": 30, "slot_3": 30, "slot_4": 30}  # 2 rows of 16
    assert in_bags in seen and {"nll": 32} in seen


def test_sentences_are_read_as_sentences(benchmarks, monkeypatch):
    import gpu_networks

    read, decoded = [], []
    monkeypatch.setattr(gpu_networks, "stepper", lambda network, batch: read.append(batch) or (lambda: None))
    gpu_networks.steps(lambda found: None, SimpleNamespace(tiny=True, rounds=1, networks=["gestalt"]))
    assert sum(map(sum, read[0].lengths)) >= 64 and len({n for stream in read[0].lengths for n in stream}) > 9
    options = SimpleNamespace(tiny=True, rounds=0, networks=["gestalt"])
    gpu_networks.decode(decoded.append, options)
    network = gpu_networks.build("gestalt", gpu_networks.TINY, 62, 64)
    session = network.session(1)
    session.prefill([[1] * 25 + [network.end] + [1] * 2])
    assert [found["cache bytes"] for found in decoded] == [session.bytes, 16 * session.bytes]


def test_a_network_that_is_not_there_is_no_part_of_a_benchmark(tmp_path):
    asked = ["decode", "--networks", "sps", "2x Memory", "--tiny", "--out", str(tmp_path / "x.jsonl")]
    done = subprocess.run([sys.executable, FOLDER / "gpu_networks.py", *asked], capture_output=True, text=True)
    assert done.returncode == 2 and "--networks 2x Memory: there are decoder, " in done.stderr


def test_what_may_be_cut_off_comes_last(benchmarks):
    import gpu_attention
    import gpu_networks

    order = gpu_networks.in_order()
    assert sorted(order) == sorted(registered("network")) and order[-1] == "context_ready_sps"
    for mask in gpu_attention.MOST:
        widths = [D for _, masks, _, D in gpu_attention.GRID if mask in masks]
        assert widths[:5] == [64] * 5 and 64 not in widths[5:]  # five lengths


def test_missing_wheels_are_named(tmp_path):
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import gpu\n"
        "gpu.NEEDED = ('torch', 'not_there'); gpu.provide(pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[2]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(FOLDER), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1 and "missing here: not_there." in done.stderr and "pip download" in done.stderr


def test_the_parts_need_no_package_that_the_script_does_not_provide():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.modules.update(dict.fromkeys(sys.argv[2:]))\n"
        "import gpu_attention, gpu_networks, gpu_shapes"
    )
    command = [sys.executable, "-c", code, str(FOLDER), "rich", "typer", "safetensors"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_without_pydantic_what_it_needs_comes_from_wheels_too(benchmarks, monkeypatch, tmp_path):
    import gpu

    for name in (*gpu.PYDANTIC, "pyyaml"):
        (tmp_path / f"{name}-1.0-py3-none-any.whl").write_bytes(b"")
    found, installed = importlib.util.find_spec, []
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None if name == "pydantic" else found(name))
    monkeypatch.setattr(
        gpu.subprocess, "run", lambda command: installed.extend(command) or SimpleNamespace(returncode=0)
    )
    gpu.provide(tmp_path, tmp_path)
    assert [Path(word).name for word in installed if word.endswith(".whl")] == [
        f"{name}-1.0-py3-none-any.whl" for name in gpu.PYDANTIC
    ]


def test_a_wheel_for_another_python_is_told_and_others_are_left_alone(tmp_path):
    for name in ("not_there-1.0-cp399-cp399-any.whl", "torch-1.0-cp399-cp399-any.whl"):
        (tmp_path / name).write_bytes(b"")
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import gpu\n"
        "gpu.NEEDED = ('torch', *sys.argv[3:]); gpu.provide(pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, str(FOLDER), str(tmp_path)]
    assert subprocess.run(command, capture_output=True).returncode == 0
    done = subprocess.run([*command, "not_there"], capture_output=True, text=True)
    assert done.returncode == 1 and "not for this Python" in done.stderr and "Traceback" not in done.stderr


def test_an_arm_that_fails_of_anything_loses_itself_alone(benchmarks):
    from machine import time_arms

    class CompilationError(Exception):  # Triton's: no RuntimeError, and it may say nothing
        pass

    def fail():
        raise CompilationError

    timed = time_arms({"broken": fail, "sound": lambda: None}, rounds=2)
    assert timed["broken"] == {"failed": "CompilationError: "} and timed["sound"]["ms"] >= 0


def test_an_arm_that_breaks_the_device_leaves_what_was_timed_before_it(benchmarks):
    from machine import time_arms

    broken = []

    def sound():
        if broken:
            raise RuntimeError("an illegal memory access was encountered")

    timed = time_arms({"first": sound, "breaks": lambda: broken.append(1) or sound(), "last": sound}, rounds=3)
    failed = {"failed": "RuntimeError: an illegal memory access was encountered"}
    assert timed == {"first": timed["first"], "breaks": failed, "last": failed}
    assert timed["first"]["ms"] >= 0


def test_arms_without_a_number_are_named_with_their_errors(benchmarks, tmp_path):
    from gpu_report import write_report

    attention = {"part": "attention", "T": 64, "D": 32, "mask": "causal", "documents": "none"}
    lines = [
        attention | {"arms": {"flex": {"ms": 1.5, "quartiles": [1.0, 2.0]}, "triton": {"failed": "RuntimeError: odd"}}},
        {"part": "steps", "network": "sps", "backend": "flex", "failed": "ValueError: no"},
        {"part": "steps", "network": "decoder", "backend": "flex", "ms": 2.0},
        *({"part": part, "failed": "OutOfMemoryError: no"} for part in ("bags", "passes")),
    ]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    failed = write_report(tmp_path, []).split("## Arms that failed\n\n")[1].split("\n\n")[0].splitlines()
    assert failed[2:] == [
        "| attention | 64, 32, causal, none | triton | RuntimeError: odd |",
        "| steps | sps, flex |  | ValueError: no |",
        "| bags |  |  | OutOfMemoryError: no |",
        "| passes |  |  | OutOfMemoryError: no |",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says that there is no CUDA device")
def test_without_a_device_the_script_says_what_runs_here(benchmarks):
    import gpu

    with pytest.raises(SystemExit, match="no CUDA device here; --tiny"):
        gpu.device_gib(gpu.provide(FOLDER, FOLDER))


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


def test_an_arm_without_memory_does_not_end_its_part(benchmarks, monkeypatch):
    import gpu_networks

    def fail():
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(gpu_networks, "CUDA", True)
    assert gpu_networks._peak(fail) is None


def test_every_test_that_needs_cuda_is_among_the_parts(benchmarks):
    import gpu

    needed, root = set(), FOLDER.parent
    for file in (root / "tests").rglob("test_*.py"):
        text = file.read_text()
        for found in re.finditer(r"skipif\(\s*not torch\.cuda", text):
            needed.add(file.relative_to(root).as_posix())
            name = re.search(r"def (test_\w+)", text[found.end() :])
            assert name and ("cuda" in name[1] or "cuda" in file.stem), f"{file.name}: -k cuda passes over {name}"
    assert needed <= {word for part in gpu.TESTS for word in part.words if word.startswith("tests/")}


@pytest.mark.parametrize("window", [None, 3])
def test_the_mask_of_two_streams_in_turns_is_that_of_the_spans(benchmarks, window):
    import gpu_attention
    import torch

    from tandem.nn.spans import readable

    B, T = 2, 24
    spans = gpu_attention.two_streams(torch.tensor([[0] * 10 + [10] * 14, [0] * 24]), window)
    may = torch.stack([torch.stack([readable(span, T) for span in group], 2) for group in spans], 4)
    b, i, j = (torch.arange(n).view(shape) for n, shape in ((B, (-1, 1, 1)), (2 * T, (-1, 1)), (2 * T, (1, -1))))
    turns = gpu_attention.turns_mask(spans, B, torch.device("cpu"))
    assert torch.equal(turns(b, 0, i, j), may.reshape(B, 2 * T, 2 * T))


def test_a_failure_is_told_before_a_run_is_cut_off(tmp_path):
    (tmp_path / "test_it.py").write_text("import time\ndef test_a(): assert 1 == 2\ndef test_b(): time.sleep(60)\n")
    words = ["-m", "pytest", "-v", "-p", "at_once", str(tmp_path), "--rootdir", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(FOLDER)}
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen([sys.executable, *words], env=environment, stdout=log, stderr=log)
    end = time.monotonic() + 60
    while "test_b" not in (tmp_path / "log").read_text() and time.monotonic() < end:
        time.sleep(0.1)
    process.kill()
    process.wait()
    assert "assert 1 == 2" in (tmp_path / "log").read_text()
