"""The trainer's step against the minimal hand-written one (minimal.py): time, peak memory, losses.

    python benchmarks/training.py [--pairs 20] [--out results.jsonl]

3 M parameters besides the table, 4,096 tokens a step in rows of 256, one document a row.
Time: interleaved pairs in one process, compiled per block. Memory: growth of a process from before its first step, one
process per arm, not compiled. Losses: 200 steps in float32 on the same batches from the same weights, not compiled.
"""

import argparse
import itertools
import subprocess
import sys
import time

import torch
from batches import one_document
from machine import compare, header, options_of, write
from minimal import Minimal, Stepper, copy_weights
from steps import DEVICE, LR, Steps, growth

from tandem.networks.decoder import Decoder

ROWS, CONTEXT = 16, 256


def trainer(vocabulary, dtype, compiled):
    config = Decoder.Config(depth=8, width=176, heads=4)
    network = Decoder(config, vocabulary, CONTEXT, torch.Generator().manual_seed(0))
    return Steps(network, lambda step: one_document(vocabulary, ROWS, CONTEXT, step), dtype=dtype, compiled=compiled)


class Hand:
    def __init__(self, steps, vocabulary, dtype, compiled):
        c = steps.network.config
        model = Minimal(vocabulary, c.depth, c.width, c.heads, c.mlp_width, CONTEXT)
        copy_weights(model, steps.network)
        self.step, self.steps = Stepper(model.to(DEVICE), lr=LR, dtype=dtype, compiled=compiled), steps

    def __call__(self, step):
        batch = self.steps.batch(step)
        return self.step(batch.tokens.to(DEVICE), batch.targets.to(DEVICE), self.steps.schedule(step))


def times(pairs):
    ours = trainer(4096, torch.bfloat16, compiled=True)
    hand = Hand(ours, 4096, torch.bfloat16, compiled=True)
    count = itertools.count()
    return compare("trainer / by hand", lambda: ours(next(count)), lambda: hand(next(count)), pairs=pairs, warmup=3)


def memory(arm):
    """Bytes by which this process grew over its first two steps, after everything was built."""
    step = ours = trainer(32_000, torch.bfloat16, compiled=False)
    if arm == "hand":
        step = Hand(ours, 32_000, torch.bfloat16, compiled=False)
    return growth(lambda: (step(0), step(1)))


def losses(steps):
    ours = trainer(4096, torch.float32, compiled=False)
    hand = Hand(ours, 4096, torch.float32, compiled=False)
    return max(abs(ours(step) - hand(step)) for step in range(steps))


def main():
    arguments = options_of(__doc__, pairs=20)
    arguments.add_argument("--loss-steps", type=int, default=200)
    arguments.add_argument("--memory-of", choices=["trainer", "hand"], help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.memory_of:
        print(memory(given.memory_of))
        return
    print(header())
    records = [times(given.pairs)]
    grown = {
        arm: int(subprocess.run([sys.executable, __file__, "--memory-of", arm], capture_output=True, check=True).stdout)
        for arm in ("trainer", "hand")
    }
    ratio = grown["trainer"] / grown["hand"]
    print(f"extra peak memory at vocabulary 32,000: {ratio:.2f} x   {grown['trainer']:,} / {grown['hand']:,} bytes")
    records.append({"what": "extra peak memory, vocabulary 32,000, trainer / by hand", "ratio": ratio, **grown})
    began = time.perf_counter()
    apart = losses(given.loss_steps)
    print(
        f"losses of {given.loss_steps} steps, float32: at most {apart:.1e} apart ({time.perf_counter() - began:.0f} s)"
    )
    records.append({"what": f"largest difference of losses, {given.loss_steps} steps, float32", "nats": apart})
    write(given.out, records)


if __name__ == "__main__":
    main()
