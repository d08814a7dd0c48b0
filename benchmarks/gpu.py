"""Everything that only a CUDA device can show, in one call of less than nine minutes.

    python benchmarks/gpu.py [--out FOLDER] [--wheels FOLDER]

First, side by side on the processor's cores: the tests named after CUDA, and a pass over all benchmarks that compiles
what they need. Then the benchmarks, one after the other, from the compilers' caches. Every part has a time limit, so
that what fails or is slow loses nothing else. Three files come of it:

    lines.jsonl   every number, written as it is measured
    log.txt       what each part printed, the last of it
    report.md     the machine, the tests, all numbers, and what of the goals is reached

Needs torch, triton, numpy, and what importing tandem.networks needs; the tests need pytest and the core dependencies.
Where packages are missing, wheels from --wheels are installed into a folder of their own; nothing is downloaded.

--tiny: the same at a few tokens and channels, on any device, without the tests; on a CPU in Triton's interpreter.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
NEEDED = (
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "typing_inspection",
    "typing_extensions",
    "yaml",
    "tokenizers",
)
"""What importing tandem.networks takes beside torch and numpy."""
WHEELS = {"yaml": "pyyaml"}
TOTAL = 530


class Part(NamedTuple):
    name: str
    seconds: int
    words: list[str]


ATTENTION, NETWORKS = "benchmarks/gpu_attention.py", "benchmarks/gpu_networks.py"
KERNELS = "tests/nn/test_attention_triton.py"
OTHERS = ["--ignore", KERNELS, "--ignore", "tests/nn/test_flex.py", "--continue-on-collection-errors"]
TESTS = [
    Part("tests-bfloat16", 170, ["-m", "pytest", "-q", KERNELS, "-k", "cuda_kernels_are and bfloat16"]),
    Part("tests-float16", 170, ["-m", "pytest", "-q", KERNELS, "-k", "cuda_kernels_are and torch.float16"]),
    Part("tests-float32", 170, ["-m", "pytest", "-q", KERNELS, "-k", "cuda_kernels_are and float32"]),
    Part("tests-widths", 170, ["-m", "pytest", "-q", KERNELS, "-k", "cuda and not cuda_kernels_are"]),
    Part("tests-flex", 170, ["-m", "pytest", "-q", "tests/nn/test_flex.py", "-k", "cuda"]),
    Part("tests-others", 170, ["-m", "pytest", "-q", "tests", "-k", "cuda", *OTHERS]),
]
MASKS = ("causal", "windowed", "sps", "2x memory", "double decoder", "double decoder, aligned", "own and encoder")
COMPILING = [Part(f"compile-{mask}", 170, [ATTENTION, "--rounds", "0", "--masks", mask]) for mask in MASKS]
COMPILING += [Part(f"compile-{part}", 170, [NETWORKS, part, "--rounds", "0"]) for part in ("bags", "passes")]
BENCHMARKS = [  # together 400 seconds: the tests and compiling get what is left
    Part("attention", 120, [ATTENTION]),
    Part("steps", 120, [NETWORKS, "steps"]),
    Part("decode", 90, [NETWORKS, "decode"]),
    Part("heads", 15, [NETWORKS, "heads", "--rounds", "5"]),
    Part("bags", 25, [NETWORKS, "bags", "--rounds", "5"]),
    Part("passes", 30, [NETWORKS, "passes", "--rounds", "5"]),
]
TINY = [
    Part("attention", 600, [ATTENTION, "--tiny", "--rounds", "1"]),
    Part("networks", 600, [NETWORKS, "steps", "decode", "heads", "bags", "passes", "--tiny", "--rounds", "1"]),
]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=HERE / "results" / "gpu")
    arguments.add_argument("--wheels", type=Path, default=HERE.parent / ".whl")
    arguments.add_argument("--tiny", action="store_true")
    options = arguments.parse_args()
    began, out = time.monotonic(), options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for name in ("lines.jsonl", "log.txt"):
        (out / name).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as site:
        environment = provide(options.wheels, Path(site))
        left = lambda: TOTAL - (time.monotonic() - began)
        if options.tiny:
            verdicts = [run([part], out, environment, 1200)[0] for part in TINY]
        else:
            warm = [NETWORKS, "steps", "--rounds", "0", "--networks"]
            steps = [Part(f"compile-{name}", 170, [*warm, name]) for name in ask(environment)]
            many = environment | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
            verdicts = run(TESTS + COMPILING + steps, out, many, left() - sum(part.seconds for part in BENCHMARKS))
            for part in BENCHMARKS:
                verdicts += run([part], out, environment, left())
    from gpu_report import write_report  # reads lines alone

    print(write_report(out, verdicts))
    return 0 if all(verdict["verdict"] == "passed" for verdict in verdicts) else 1


def provide(wheels: Path, site: Path) -> dict[str, str]:
    """The environment of the parts, with the missing packages installed from wheels into `site`.

    Raises: SystemExit naming the wheels that are not there.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    found = list(wheels.glob("*.whl")) if missing else []
    held = {wheel.name.split("-")[0].lower() for wheel in found}
    absent = [name for name in missing if WHEELS.get(name, name) not in held]
    if absent:
        names = " ".join(WHEELS.get(name, name) for name in absent)
        sys.exit(
            f"missing here: {', '.join(absent)}. Put their wheels into {wheels}, on a machine with a network:\n"
            f"  python -m pip download --no-deps --only-binary=:all: --python-version {sys.version_info[0]}"
            f".{sys.version_info[1]} -d {wheels} {names}"
        )
    if found:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(site)]
        subprocess.run([*command, *map(str, found)], check=True)
    path = os.pathsep.join([str(HERE.parent), str(site), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path.rstrip(os.pathsep)}


def ask(environment: dict[str, str]) -> list[str]:
    """The names of all networks, asked where the wheels are. Raises: SystemExit without a CUDA device."""
    code = (
        "import torch, tandem.networks; from tandem.recipe import registered\n"
        "print(torch.cuda.is_available(), *registered('network'))"
    )
    asked = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if asked.returncode:
        sys.exit(asked.stderr[-2000:])
    has_cuda, *names = asked.stdout.split()
    if has_cuda == "False":
        sys.exit("no CUDA device here; --tiny runs the same at tiny sizes, the other scripts of this folder on a CPU")
    return names


def run(parts: list[Part], out: Path, environment: dict[str, str], seconds: float) -> list[dict]:
    """Runs the parts side by side, each until it ends or its time is up; what became of each."""
    began, going = time.monotonic(), []
    for part in parts:
        # What compiling writes is no result.
        lines = os.devnull if part.name.startswith("compile-") else str(out / "lines.jsonl")
        words = [*part.words, "--out", lines] if part.words[0] in (ATTENTION, NETWORKS) else part.words
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed below, when its process has ended
        command = [sys.executable, *words]
        process = subprocess.Popen(command, cwd=HERE.parent, env=environment, stdout=log, stderr=subprocess.STDOUT)
        going.append((part, process, log))
    verdicts = []
    for part, process, log in going:
        try:
            code = process.wait(max(1.0, min(part.seconds, seconds) - (time.monotonic() - began)))
            verdict = "passed" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            verdict = "cut off"
        verdicts.append({"name": part.name, "verdict": verdict, "seconds": round(time.monotonic() - began)})
        print(f"{part.name:<32} {verdict}, {verdicts[-1]['seconds']} s", flush=True)
        log.seek(0)
        with (out / "log.txt").open("ab") as all_logs, log:
            all_logs.write(f"\n==== {part.name}: {verdict}\n".encode() + log.read()[-20_000:])
    return verdicts


if __name__ == "__main__":
    sys.exit(main())
