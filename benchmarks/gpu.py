"""Everything that only a CUDA device can show, in one call of less than nine minutes.

    python benchmarks/gpu.py [--out benchmarks/results/gpu]

The tests named after CUDA gate the timings: kernels that are wrong are not timed. Each step has a time limit, and a
step that fails is reported and does not stop the others. Logs and JSON lines go to --out.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch
from machine import header

HERE = Path(__file__).parent
STEPS = [  # name, seconds, command
    ("tests", 150, ["-m", "pytest", "-q", "-k", "cuda", "tests"]),
    ("training", 150, ["benchmarks/training.py", "--out", "{out}/training.jsonl"]),
    ("head", 90, ["benchmarks/head.py", "--pairs", "10", "--out", "{out}/head.jsonl"]),
    ("decoding", 60, ["benchmarks/decoding.py", "--out", "{out}/decoding.jsonl"]),
]


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=HERE / "results" / "gpu")
    out = arguments.parse_args().out
    if not torch.cuda.is_available():
        sys.exit("no CUDA device here; the other scripts of this folder run on a CPU")
    out.mkdir(parents=True, exist_ok=True)
    print(header())
    for name, limit, command in STEPS:
        began = time.perf_counter()
        with (out / f"{name}.log").open("w") as log:
            words = [word.format(out=out.resolve()) for word in command]
            try:
                done = subprocess.run(
                    [sys.executable, *words], cwd=HERE.parent, stdout=log, stderr=subprocess.STDOUT, timeout=limit
                )
                verdict = "passed" if done.returncode == 0 else f"failed with {done.returncode}"
            except subprocess.TimeoutExpired:
                verdict = f"cut off at {limit} s"
        print(f"{name:<10} {verdict}, {time.perf_counter() - began:.0f} s, {out / name}.log", flush=True)
        if name == "tests" and verdict != "passed":
            sys.exit("the tests gate the timings; see the log")


if __name__ == "__main__":
    main()
