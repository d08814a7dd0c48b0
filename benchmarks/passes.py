"""A training step of a context-ready network in five passes against one, with and without recomputation: time, memory.

    python benchmarks/passes.py [--pairs 20] [--tiny] [--out results.jsonl]

3 M parameters beside the table (3 blocks, C 256; one wide block, C 400), 4,096 tokens a step in rows of 256, compiled
per block, bfloat16 products where `--float32` does not ask otherwise. Required of five passes over one: time at most
5.0 (one block 5.5); with recomputation per pass, time at most 6.5 (7.0) and memory at most 1.5. Memory is the growth of
a process of its own over its first two steps, the network built before.
"""

import argparse
import json
import subprocess
import sys

import torch
from machine import compare, header, write
from steps import Steps, growth, one_document

from tandem.networks.context_ready import ContextReady

SHAPES = {"three blocks": {"depth": 3, "width": 256, "heads": 8}, "one block": {"depth": 1, "width": 400, "heads": 10}}
ARMS = {"K 1": (1, False), "K 5": (5, False), "K 5 recomputed": (5, True)}
REQUIRED = {("three blocks", "K 5"): 5.0, ("one block", "K 5"): 5.5}
REQUIRED |= {("three blocks", "K 5 recomputed"): 6.5, ("one block", "K 5 recomputed"): 7.0}
MOST_MEMORY = 1.5


def arm_steps(shape, arm, options, compiled=True):
    passes, recompute = ARMS[arm]
    settings = SHAPES[shape] | ({"width": 32, "heads": 2} if options.tiny else {})
    rows, context = (2, 32) if options.tiny else (16, 256)
    config = ContextReady.Config(**settings, passes=passes, passes_min=None)
    network = ContextReady(config, 4096, context, torch.Generator().manual_seed(0))
    network.recompute = recompute
    batch = lambda step: one_document(4096, rows, context, step)
    return Steps(network, batch, dtype=torch.float32 if options.float32 else torch.bfloat16, compiled=compiled)


def memory(shape, arm, options):
    """Bytes by which this process grew over two steps."""
    steps = arm_steps(shape, arm, options, compiled=False)
    return growth(lambda: (steps(0), steps(1)))


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pairs", type=int, default=20)
    arguments.add_argument("--tiny", action="store_true", help="a few channels: to see that it runs")
    arguments.add_argument("--float32", action="store_true")
    arguments.add_argument("--out")
    arguments.add_argument("--memory-of", nargs=2, metavar=("SHAPE", "ARM"), help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.memory_of:
        print(json.dumps(memory(*options.memory_of, options)))
        return 0
    print(header())
    records, missed = [], 0
    for shape in SHAPES:
        one, count = arm_steps(shape, "K 1", options), iter(range(10**9))
        for arm in ("K 5", "K 5 recomputed"):
            more = arm_steps(shape, arm, options)
            pair = [lambda steps=steps: steps(next(count)) for steps in (more, one)]  # noqa: B023 - used at once
            record = compare(f"{shape}: {arm} / K 1", *pair, pairs=options.pairs)
            record["required"] = REQUIRED[shape, arm]
            missed += record["ratio"] > record["required"]
            records.append(record)
        grown = {arm: _grown(shape, arm) for arm in ARMS}
        for arm in ("K 5", "K 5 recomputed"):
            ratio = grown[arm] / grown["K 1"]
            print(f"  {shape}: memory of {arm} / K 1  {ratio:.2f} x   {grown[arm]:,} / {grown['K 1']:,} bytes")
            records.append({"what": f"{shape}: memory of {arm} / K 1", "ratio": ratio})
        missed += grown["K 5 recomputed"] / grown["K 1"] > MOST_MEMORY
    if options.out:
        write(options.out, records)
    print(f"{missed} of {3 * len(SHAPES)} requirements missed")
    return 1 if missed else 0


def _grown(shape, arm):
    command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", shape, arm]
    return int(subprocess.run(command, capture_output=True, check=True).stdout)


if __name__ == "__main__":
    sys.exit(main())
