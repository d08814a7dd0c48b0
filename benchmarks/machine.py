"""What all benchmarks share: a description of the machine, and comparisons of two ways of doing one thing in pairs.

    print(header())
    records = [compare("dense / tiled, T 2048", dense, tiled, pairs=20)]
    write("results.jsonl", records)

The two runs of a pair follow each other, in alternating order, so that whatever else the machine does affects both;
the result is the median of the pairs' ratios with its quartiles, never the ratio of two averages.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

WAITING = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
AHEAD = 6_000_000
"""Cycles, about 3 ms: longer than it takes to launch a forward and a backward of attention."""


def machine() -> dict[str, Any]:
    """Hardware, versions, commit and date."""
    changes = "" if _run("git", "status", "--porcelain") == "" else " and changes"
    known = _run("git", "rev-parse", "--short", "HEAD")
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _processor(),
        "threads": torch.get_num_threads(),
        "openmp": " ".join(f"{key}={os.environ[key]}" for key in WAITING if key in os.environ) or "defaults",
        "torch": torch.__version__,
        "triton": version("triton") if find_spec("triton") else None,
        "python": platform.python_version(),
        "tandem": os.environ.get("TANDEM_COMMIT") or (known + changes if known else "no commit"),
        "date": date.today().isoformat(),
    }


def header() -> str:
    """The machine in one line."""
    return ", ".join(str(fact) if name == "device" else f"{name} {fact}" for name, fact in machine().items())


def quartiles(values: list[float]) -> list[float]:
    """The three quartiles; of a single value, that value three times."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def compare(
    what: str, a: Callable[[], Any], b: Callable[[], Any], *, pairs: int = 20, warmup: int = 3, clock=time.perf_counter
) -> dict:
    """Times a and b in interleaved pairs; prints and returns the median of time(a) / time(b) and its quartiles.

    `clock`: time.process_time where others use the machine, and everything runs on one thread.
    """
    for _ in range(warmup):
        a()
        b()
    seconds = {a: [], b: []}
    for pair in range(pairs):
        for run in (a, b) if pair % 2 else (b, a):
            seconds[run].append(_time(run, clock))
    ratios = [x / y for x, y in zip(seconds[a], seconds[b], strict=True)]
    low, ratio, high = quartiles(ratios)
    ms = [1e3 * statistics.median(seconds[run]) for run in (a, b)]
    print(
        f"  {what:<48} {ratio:5.2f} x  [{low:.2f}, {high:.2f}]  {ms[0]:8.2f} / {ms[1]:.2f} ms  {pairs} pairs",
        flush=True,
    )
    return {"what": what, "ratio": ratio, "quartiles": [low, high], "ms": ms, "pairs": pairs}


def time_arms(
    arms: dict[str, Callable[[], Any]], rounds: int, warmup: int = 3, calls: int = 1
) -> dict[str, dict[str, Any]]:
    """Milliseconds of a call of each arm, median and quartiles over interleaved rounds of `calls` in a row. An arm that
    fails reports its error, whatever its type: those of Triton's compiler, say, are not RuntimeErrors. Each arm is
    timed once as soon as it is warm, so those timed before an arm breaks the device keep a number.

    On CUDA by the device's own clock, which starts when the host is AHEAD cycles ahead: as in a run, a device that has
    work queued does not wait for the host to launch a kernel.
    """
    times, failed = {name: [] for name in arms}, {}
    on_device = torch.cuda.is_available()
    for turn in range(max(1, rounds)):
        for name in [name for name in arms if name not in failed]:
            run = lambda arm=arms[name]: [arm() for _ in range(calls)]
            try:
                for _ in range(warmup if turn == 0 else 0):
                    run()
                if rounds:
                    ms = _device_ms(run) if on_device else 1e3 * _time(run, time.perf_counter)
                    times[name].append(ms / calls)
                elif on_device:
                    torch.cuda.synchronize()  # errors on the device are raised here, not in the next arm
            except Exception as error:  # an arm that fails does not stop the others
                failed[name] = {"failed": told(error)}
    found = {name: quartiles(x) for name, x in times.items() if x}
    return failed | {name: {"ms": q[1], "quartiles": [q[0], q[2]]} for name, q in found.items()}


def _device_ms(run: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def told(error: Exception) -> str:
    """An error in one line, for a record; all of it goes to the log."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def compile_each_shape() -> None:
    """Compiles a separate graph for every shape, as for the one shape of a run, and for up to 64 shapes.

    By default, the second shape of a process is compiled for all sizes, so what is timed, and what is found in the
    compilers' caches, depends on what came before; and from the ninth on FlexAttention silently runs uncompiled.
    """
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.recompile_limit = 64


def append(path: Path, record: dict) -> None:
    """Adds a line at once, so that what has been measured survives whatever happens next."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def write(path: str | Path | None, records: list[dict]) -> None:
    """JSON lines: the machine, then one record a line; without a path, nothing."""
    if path:
        Path(path).write_text("".join(json.dumps(line) + "\n" for line in [machine(), *records]))


def missed(records: list[dict]) -> int:
    """The exit status of a script: 1 if a ratio is not as `required`, by default at most; prints how many are not."""
    asked = [record for record in records if "required" in record]
    found = [r for r in asked if (r["ratio"] > r["required"]) is r.get("at_most", True)]
    print(f"{len(found)} of {len(asked)} requirements missed")
    return 1 if found else 0


def options_of(text: str | None, pairs: int = 0) -> argparse.ArgumentParser:
    """A parser of options, whose help begins with `text` as it stands; with the options of what times `pairs`."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if pairs:
        parser.add_argument("--pairs", type=int, default=pairs)
        parser.add_argument("--out")
    return parser


def _time(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = clock()
    run()
    wait()
    return clock() - start


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    except FileNotFoundError:  # a machine without git
        return ""
