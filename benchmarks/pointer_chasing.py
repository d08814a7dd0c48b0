"""Pointer chasing by one recurrent block and by plain decoders of several: the staircase.

    python benchmarks/pointer_chasing.py [--size small] [--arms bptt,passes,1,2,4] [--steps 3000] [--out results.jsonl]

An arm is `bptt` or `passes` (one context-ready block, trained through time or in five passes) or a number: a plain
decoder of so many blocks. Each trains with Adam on fresh rows until all columns are solved (accuracy of 0.99 on 256
fresh rows), or to the last step; the table says what it reached and how long it took. `--measure` takes five steps of
every arm and says how long the whole would take at most.
"""

import argparse
import sys
import time

import torch
from machine import header, write

from tandem.evaluation.pointer_chasing import PUBLISHED, accuracies, learn, settings, solved
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
    network, task, lr = build(arm, options.size, options.seed)
    began = time.perf_counter()

    def watch(step, loss, found):
        columns = " ".join(f"{accuracy:.2f}" for accuracy in found)
        print(f"  {arm:>6} {step:>6}  loss {loss:.3f}  {columns}", flush=True)
        return solved(found) == len(found)

    steps = learn(network, task, seed=options.seed, steps=options.steps, lr=lr, every=options.every, watch=watch)
    found = accuracies(network, task, options.seed)
    seconds = time.perf_counter() - began
    print(f"{arm:>8}: {solved(found)} of {len(found)} columns after {steps} steps, {seconds:.0f} s", flush=True)
    return {"arm": arm, "size": options.size, "seed": options.seed, "steps": steps, "seconds": seconds,
            "solved": solved(found), "accuracies": found}  # fmt: skip


def seconds_a_step(arm, options):
    network, task, lr = build(arm, options.size, options.seed)
    learn(network, task, seed=options.seed, steps=2, lr=lr)
    began = time.perf_counter()
    learn(network, task, seed=options.seed, steps=5, lr=lr)
    return (time.perf_counter() - began) / 5


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--size", default="small", choices=PUBLISHED)
    arguments.add_argument("--arms", default="bptt,passes,1,2,4")
    arguments.add_argument("--steps", type=int, default=3000)
    arguments.add_argument("--every", type=int, default=100)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--measure", action="store_true")
    arguments.add_argument("--out")
    options = arguments.parse_args()
    print(header())
    arms = options.arms.split(",")
    if options.measure:
        for arm in arms:
            seconds = seconds_a_step(arm, options)
            print(f"{arm:>8}: {seconds:.3f} s a step, {options.steps * seconds / 60:.1f} min for {options.steps} steps")
        return 0
    records = [run(arm, options) for arm in arms]
    if options.out:
        write(options.out, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
