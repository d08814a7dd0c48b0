"""Everything that only a CUDA device can show, in one call of less than nine minutes.

    python benchmarks/gpu.py [--out FOLDER] [--wheels FOLDER]

First, side by side on the processor's cores: a pass over the benchmarks that compiles what they need, and the tests
that need CUDA. Then the benchmarks, one after the other, from the compilers' caches. Every part has a time limit, so
that a failing or slow part costs no other part; time that a benchmark leaves unused goes to the next ones. The output
is three files:

    lines.jsonl   every number, written as it is measured
    log.txt       what each part printed, the last of it
    report.md     the machine, the tests, all numbers, and what of the goals is reached

Needs torch, triton, numpy, and what importing tandem.networks needs; the tests need pytest and the core dependencies.
Missing packages are installed from the wheels in --wheels into a temporary folder; nothing is downloaded. The commit in
the results is that of the environment variable TANDEM_COMMIT, where it is set, else what git says.

--shapes: instead of all that, compare other tiles of the attention kernels with the shipped ones (gpu_shapes.py).

--tiny: the same with a few tokens and channels, on any device, without the tests; on a CPU in Triton's interpreter.
"""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any, NamedTuple

HERE = Path(__file__).parent
PYDANTIC = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "typing_extensions")
"""Pydantic and what it needs, in matching versions."""
NEEDED = (*PYDANTIC, "yaml", "tokenizers")
"""What importing tandem.networks needs besides torch and numpy."""
WHEELS = {"yaml": "pyyaml"}
TOTAL = 520


class Part(NamedTuple):
    name: str
    seconds: int
    words: list[str]


ATTENTION, NETWORKS = "benchmarks/gpu_attention.py", "benchmarks/gpu_networks.py"
SHAPES = "benchmarks/gpu_shapes.py"
MASKS = ("causal", "sps", "double decoder")
OTHER_MASKS = ("double decoder", "double decoder, aligned", "windowed", "own and encoder")
KERNELS = "tests/nn/test_attention_triton.py"
OTHERS = [
    "tests/nn/test_head.py",
    "tests/nn/test_cache.py",
    "tests/networks/test_captured.py",
    "tests/networks/test_two_stacks.py",
]
OTHERS += ["tests/training/test_cuda.py"]


def tests(name: str, chosen: str, *files: str) -> Part:
    words = ["-m", "pytest", "-v", "--tb=short", "-p", "at_once", *files, "-k", chosen]
    return Part(f"tests-{name}", 170, words)


# Split by what takes the compiler longest: kernels in float32, which it unrolls, and wide ones.
TESTS = [
    *(tests(f"float32-{width}", f"every_width and {width} and torch.float32", KERNELS) for width in (128, 96)),
    tests("float32", "cuda_kernels_are and torch.float32", KERNELS),
    tests("float16", "cuda_kernels_are and torch.float16", KERNELS),
    tests("bfloat16", "cuda_kernels_are and bfloat16", KERNELS),
    tests("widths", "every_width and not torch.float32", KERNELS),
    tests("narrow", "every_width and torch.float32 and not (96 or 128)", KERNELS),
    tests("decoding", "cuda and not cuda_kernels_are and not every_width", KERNELS),
    # of a tile's edges, order, operators, layouts
    tests("probes", "even_loaded or same_bits or compiled_whole or laid_out or rows_of_one_tensor", KERNELS),
    tests("flex", "cuda and not tiled", "tests/nn/test_flex.py"),
    tests("tiled", "cuda and tiled", "tests/nn/test_flex.py"),
    tests("networks", "cuda", "tests/networks/test_cuda_networks.py"),
    tests("others", "cuda or in_one_kernel or one_launch", *OTHERS),
]
LONG = ("decoder", "sps", "double_decoder")
OTHER_LENGTHS = ["1024", "2048", "8192", "16384"]
OTHER_NETWORKS = ("encoder_decoder", "head_ffn", "gestalt")
DECODED = [*LONG, "context_ready, 1 wide block", "decoder, 6 blocks"]


def compiling(name: str, *words: str) -> Part:
    return Part(f"compile-{name}", 170, [*words, "--rounds", "0"])


# Every graph once: other masks and networks reuse these. In the order in which they are needed.
COMPILING = [
    *(compiling(mask, ATTENTION, "--masks", mask, "--lengths", "4096") for mask in MASKS),
    *(compiling(f"step-{name}", NETWORKS, "steps", "--networks", name) for name in LONG),
    *(compiling(f"{mask}-lengths", ATTENTION, "--masks", mask, "--lengths", *OTHER_LENGTHS) for mask in MASKS),
]
# The blocks of all others are those of the decoder or of SPS.
LATER = [compiling("decode", NETWORKS, "decode", "--networks", *DECODED)]  # it takes longest
LATER += [*(compiling(f"step-{name}", NETWORKS, "steps", "--networks", name) for name in OTHER_NETWORKS)]
LATER += [compiling("others", NETWORKS, "passes", "bags")]
FIRST = [*COMPILING, *TESTS, *LATER]
PART_GIB = 6
"""Device memory of a part of the first phase; by estimate: the large ones take 10 to 25."""
BENCHMARKS = [  # together 367 seconds: compiling and the tests get what is left
    # One process each: an error that breaks the device breaks it for the rest of its process.
    Part("attention-causal", 42, [ATTENTION, "--masks", "causal"]),
    Part("attention-sps", 50, [ATTENTION, "--masks", "sps", "2x memory"]),
    Part("attention-others", 45, [ATTENTION, "--masks", *OTHER_MASKS]),
    Part("steps", 95, [NETWORKS, "steps", "--rounds", "4"]),
    Part("decode", 95, [NETWORKS, "decode"]),
    Part("others", 40, [NETWORKS, "heads", "bags", "passes", "--rounds", "3"]),
]
COMPILING_SHAPES = [
    compiling(f"{mask}-{width}", SHAPES, "--masks", mask, "--widths", width)
    for mask in MASKS
    for width in ("64", "128")
]
TINY = [
    Part("shapes", 600, [SHAPES, "--masks", "sps", "--tiny", "--rounds", "1"]),
    Part("attention", 600, [ATTENTION, "--tiny", "--rounds", "1"]),
    Part("networks", 600, [NETWORKS, "steps", "decode", "heads", "bags", "passes", "--tiny", "--rounds", "1"]),
]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=HERE / "results" / "gpu")
    arguments.add_argument("--wheels", type=Path, default=HERE.parent / ".whl")
    arguments.add_argument("--tiny", action="store_true")
    arguments.add_argument("--shapes", action="store_true", help="tiles of the kernels, and nothing else")
    options = arguments.parse_args()
    began, out = time.monotonic(), options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for name in ("lines.jsonl", "log.txt"):
        (out / name).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as site:
        environment = provide(options.wheels, Path(site))
        left = lambda: TOTAL - (time.monotonic() - began)
        if options.tiny:
            if not importlib.import_module("torch").cuda.is_available():
                environment["TRITON_INTERPRET"] = "1"
            verdicts = [run([part], out, environment, 1200)[0] for part in TINY]
        else:
            at_once = max(1, int(device_gib(environment) / PART_GIB))
            many = environment | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
            first, then = (COMPILING_SHAPES, [Part("shapes", 200, [SHAPES])]) if options.shapes else (FIRST, BENCHMARKS)
            verdicts = run(first, out, many, left() - sum(part.seconds for part in then), at_once)
            for n, part in enumerate(then):
                seconds = left() - sum(later.seconds for later in then[n + 1 :])
                verdicts += run([part._replace(seconds=max(part.seconds, seconds))], out, environment, left())
    from gpu_report import write_report  # needs only the files

    print(write_report(out, verdicts))
    return 0 if all(verdict["verdict"] == "passed" for verdict in verdicts) else 1


def provide(wheels: Path, site: Path) -> dict[str, str]:
    """The environment of the parts, with the missing packages installed from wheels into `site`.

    Raises: SystemExit naming the wheels that are not there.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if "pydantic" in missing:  # parts of it that are here may be too old
        missing = [*PYDANTIC, *(name for name in missing if name not in PYDANTIC)]
    held = {wheel.name.split("-")[0].lower(): wheel for wheel in wheels.glob("*.whl")}
    absent = [name for name in missing if WHEELS.get(name, name) not in held]
    if absent:
        names = " ".join(WHEELS.get(name, name) for name in absent)
        sys.exit(
            f"missing here: {', '.join(absent)}. Put their wheels into {wheels}, on a machine with a network:\n"
            f"  python -m pip download --only-binary=:all: --python-version {sys.version_info[0]}"
            f".{sys.version_info[1]} -d {wheels} {names}\n(with what they need: pydantic takes one version of its core)"
        )
    if missing:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(site)]
        if subprocess.run([*command, *(str(held[WHEELS.get(name, name)]) for name in missing)]).returncode:
            sys.exit(
                f"a wheel in {wheels} is not for this Python {sys.version_info[0]}.{sys.version_info[1]}: as above"
            )
    path = os.pathsep.join([str(HERE.parent), str(HERE), str(site), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path.rstrip(os.pathsep)}


def device_gib(environment: dict[str, str]) -> float:
    """Memory of the CUDA device. Raises: SystemExit without one, or where tandem.networks cannot be imported."""
    code = (
        "import torch, tandem.networks\n"
        "print(torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else 0)"
    )
    asked = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if asked.returncode:
        sys.exit(asked.stderr[-2000:])
    if not (gib := float(asked.stdout.split()[-1])):
        sys.exit("no CUDA device here; --tiny runs the same at tiny sizes, the other scripts of this folder on a CPU")
    return gib


def run(parts: list[Part], out: Path, environment: dict[str, str], seconds: float, at_once: int = 1) -> list[dict]:
    """Runs the parts in order, `at_once` side by side, each until it ends or its time or all time is up.

    Returns the verdict on each.
    """
    began, waiting, going, verdicts = time.monotonic(), list(parts), [], []
    while waiting or going:
        is_over = time.monotonic() - began > seconds
        while waiting and (is_over or len(going) < at_once):
            part = waiting.pop(0)
            if is_over:
                verdicts.append({"name": part.name, "verdict": "no time left", "seconds": 0})
            else:
                going.append((part, time.monotonic(), *start(part, out, environment)))
        for one in [*going]:
            part, started, process, log = one
            took = time.monotonic() - started
            if process.poll() is None and took < part.seconds and not is_over:
                continue
            code = process.poll()
            if code is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that compile for it
                process.wait()
            verdict = {0: "passed", None: "cut off"}.get(code, f"failed with {code}")
            verdicts.append({"name": part.name, "verdict": verdict, "seconds": round(took)})
            print(f"{part.name:<32} {verdict}, {round(took)} s", flush=True)
            log.seek(0)
            with (out / "log.txt").open("ab") as all_logs, log:
                all_logs.write(f"\n==== {part.name}: {verdict}\n".encode() + log.read()[-20_000:])
            going.remove(one)
        time.sleep(0.05)
    return verdicts


def start(part: Part, out: Path, environment: dict[str, str]) -> tuple[subprocess.Popen, IO[bytes]]:
    """The process of a part, and the file with its output."""
    # What the compiling parts write is not a result.
    lines = os.devnull if part.name.startswith("compile-") else str(out / "lines.jsonl")
    words = [*part.words, "--out", lines] if part.words[0] in (ATTENTION, NETWORKS, SHAPES) else part.words
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed when its process has ended
    command = [sys.executable, *words]
    settings: Any = {"cwd": HERE.parent, "env": environment, "stdout": log, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, **settings, start_new_session=True), log


if __name__ == "__main__":
    sys.exit(main())
