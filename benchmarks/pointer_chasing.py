"""Pointer chasing by one recurrent block and by plain decoders of one block or more: the staircase.

    python benchmarks/pointer_chasing.py --measure
    python benchmarks/pointer_chasing.py --out docs/results/pointer_chasing [--size small] [--arms bptt,1,2,4]

An arm is `bptt` or `passes` (one context-ready block, trained through time or in five passes) or a number: a plain
decoder with that many blocks. Each trains with Adam on newly drawn rows until all columns are solved (accuracy of 0.99
on 256 more, others at every look and for the final figure), or for `--steps` steps. When an arm ends, it adds a line to
record.jsonl in the folder, and table and picture show all lines so far; an arm with a line is not run again. On a CPU
one thread is used, and time is its CPU time. `--measure` times five steps of every arm and prints how long each arm
would take at most.
"""

import json
import sys
import time
from pathlib import Path

import torch
from machine import append, header, options_of, write

from tandem.analysis.pointer_chasing import PUBLISHED, SOLVED, accuracies, learn, settings, solved
from tandem.networks.context_ready import ContextReady
from tandem.networks.decoder import Decoder

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build(arm, size, seed):
    if arm.isdecimal():
        cls, own = Decoder, {"depth": int(arm)}
    else:
        cls, own = ContextReady, {"depth": 1, "unroll": arm, "passes_min": None, "prefill": "stream"}
    task, options, lr = settings(size, **own)
    generator = torch.Generator().manual_seed(seed)
    network = cls(cls.Config(**options), task.vocabulary, task.length, generator).to(DEVICE)
    return network, task, lr


def run(arm, options):
    """Trains an arm; returns its record, with the accuracies by column at the end and at every look."""
    network, task, lr = build(arm, options.size, options.seed)
    began, curve = time.process_time(), []

    def watch(step, loss, found):
        curve.append({"step": step, "loss": loss, "accuracies": found})
        columns = " ".join(f"{accuracy:.2f}" for accuracy in found)
        print(f"  {arm:>6} {step:>6}  loss {loss:.3f}  {columns}", flush=True)
        return solved(found) == len(found)

    steps = learn(network, task, seed=options.seed, steps=options.steps, lr=lr, every=options.every, watch=watch)
    seconds, found = time.process_time() - began, accuracies(network, task, options.seed)
    return {"arm": arm, "size": options.size, "seed": options.seed, "parameters": network.cost().total_parameters,
            "steps": steps, "cpu_seconds": seconds, "solved": solved(found), "accuracies": found,
            "curve": curve}  # fmt: skip


def seconds_a_step(arm, options):
    network, task, lr = build(arm, options.size, options.seed)
    learn(network, task, seed=options.seed, steps=2, lr=lr)
    began = time.process_time()
    learn(network, task, seed=options.seed, steps=5, lr=lr)
    return (time.process_time() - began) / 5


def named(arm):
    """An arm in words."""
    return f"plain, {arm} block{'s' * (arm != '1')}" if arm.isdecimal() else f"recurrent, 1 block ({arm})"


def columns(record):
    """Names of the columns: the levels from 0, and the last query."""
    return [*(f"L{level}" for level in range(len(record["accuracies"]) - 1)), "last"]


def table(records):
    asked = columns(records[0])
    head = f"{'arm':<26}{'parameters':>11}{'steps':>7}{'CPU s':>7}{'solved':>8}  " + "".join(f"{c:>6}" for c in asked)
    rows = [
        f"{named(r['arm']):<26}{r['parameters']:>11,}{r['steps']:>7,}{r['cpu_seconds']:>7.0f}"
        f"{r['solved']:>3} of {len(asked)}  " + "".join(f"{a:>6.2f}" for a in r["accuracies"])
        for r in records
    ]
    return "\n".join([head, *rows]) + "\n"


def draw(records, path):
    """Accuracy by column of every arm, and below it, arm by arm, over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.6 * len(records), 5.6), dpi=120, layout="constrained")
    arms = [r["arm"] for r in records]
    axes = figure.subplot_mosaic([["all"] * len(arms), arms])
    for record in records:
        axes["all"].plot(columns(record), record["accuracies"], "o-", label=named(record["arm"]), alpha=0.8)
        own, steps = axes[record["arm"]], [look["step"] for look in record["curve"]]
        for i, column in enumerate(columns(record)):
            own.plot(steps, [look["accuracies"][i] for look in record["curve"]], f"C{i}", label=column)
        own.set_title(named(record["arm"]), fontsize=9)
        own.set_xlabel("step")
    for name, own in axes.items():
        own.set_ylim(0, 1.04)
        own.axhline(SOLVED, color="grey", linewidth=0.6, linestyle=":")
        if name in ("all", arms[0]):
            own.set_ylabel("accuracy")
            own.legend(frameon=False, fontsize=8)
    axes["all"].set_title("Levels of pointer chasing after training", fontsize=10)
    figure.savefig(path, format="png")


def show(records, folder) -> None:
    """Writes table and picture."""
    (folder / "table.txt").write_text(table(records))
    draw(records, folder / "picture.png")


def main() -> int:
    arguments = options_of(__doc__)
    arguments.add_argument("--size", default="small", choices=PUBLISHED)
    arguments.add_argument("--arms", default="bptt,1,2,4")
    arguments.add_argument("--steps", type=int, default=3000)
    arguments.add_argument("--every", type=int, default=50, help="steps between looks at the accuracies")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--measure", action="store_true")
    arguments.add_argument("--out", type=Path, help="a folder")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    print(header())
    arms = options.arms.split(",")
    if options.measure:
        for arm in arms:
            seconds = seconds_a_step(arm, options)
            print(f"{arm:>8}: {seconds:.3f} s a step, {options.steps * seconds / 60:.1f} min for {options.steps} steps")
        return 0
    records = []
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / "record.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()[1:]] if path.exists() else []
        if not records:
            write(path, records)
        for kept in records:  # one that has solved all at a look stops before its last step
            looks = [solved(look["accuracies"]) for look in kept["curve"][-1:]]
            steps = kept["steps"] if looks == [len(kept["accuracies"])] else options.steps
            if (kept["size"], kept["seed"], kept["steps"]) != (options.size, options.seed, steps):
                told = f"size {kept['size']}, seed {kept['seed']}, {kept['steps']} steps"
                sys.exit(f"{path} has arm {kept['arm']} at {told}: ask for the same, or give another --out")
    for arm in (arm for arm in arms if arm not in [record["arm"] for record in records]):
        records.append(run(arm, options))
        if options.out:
            append(path, records[-1])
            show(records, options.out)
    if options.out:
        show(records, options.out)  # also where nothing was left to run
    print(table(records), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
