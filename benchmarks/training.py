"""The trainer's step against the minimal hand-written one (minimal.py): time, peak memory, losses.

    python benchmarks/training.py [--pairs 20] [--out results.jsonl]

3 M parameters beside the table, 4,096 tokens a step in rows of 256, one document a row, compiled per block.
Time: interleaved pairs in one process. Memory: growth over the process before its first step, one process an arm.
Losses: 200 steps in float32 on the same batches from the same weights.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from machine import compare, header, write
from minimal import Minimal, Stepper, copy_weights

from tandem.corpus import Batch
from tandem.networks.decoder import Decoder
from tandem.objectives.next_token import NextToken
from tandem.training.device import Choice, autocast
from tandem.training.loop import take_step
from tandem.training.optimiser import AdamW

ROWS, CONTEXT, LR = 16, 256, 1e-3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class OneDocument:
    """Rows of random tokens, each one document; step k is a pure function of k. Low ids are more frequent."""

    rows = ROWS

    def __init__(self, vocabulary):
        self.vocabulary = vocabulary

    def batch(self, step):
        generator = torch.Generator().manual_seed(step)
        ids = (torch.rand(ROWS, CONTEXT + 1, generator=generator) ** 3 * self.vocabulary).long()
        return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.zeros(ROWS, CONTEXT, dtype=torch.long))


class Trainer:
    """What take_step needs of a run, around the package's decoder."""

    def __init__(self, vocabulary, dtype, compiled):
        config = Decoder.Config(depth=8, width=176, heads=4)
        self.network = Decoder(config, vocabulary, CONTEXT, torch.Generator().manual_seed(0)).to(DEVICE).train()
        if compiled:
            self.network.compile()
        self.objective, self.view = NextToken(NextToken.Config()), OneDocument(vocabulary)
        self.optimiser = AdamW(AdamW.Config(lr=LR), self.network)
        self.device, self.dtype = Choice(DEVICE, ""), dtype
        self.schedule = lambda step: min(1.0, (step + 1) / 20)

    def batches(self, step):
        return [self.view.batch(step)]

    def place(self, step):
        return "random rows"

    def autocast(self):
        return autocast(DEVICE, self.dtype)

    def __call__(self, step):
        return take_step(self, step).means()["nll"]


class Hand:
    def __init__(self, trainer, vocabulary, dtype, compiled):
        c = trainer.network.config
        model = Minimal(vocabulary, c.depth, c.width, c.heads, c.mlp_width, CONTEXT)
        copy_weights(model, trainer.network)
        self.step, self.view = Stepper(model.to(DEVICE), lr=LR, dtype=dtype, compiled=compiled), trainer.view

    def __call__(self, step):
        batch = self.view.batch(step)
        return self.step(batch.tokens.to(DEVICE), batch.targets.to(DEVICE), min(1.0, (step + 1) / 20))


def times(pairs):
    trainer = Trainer(4096, torch.bfloat16, compiled=True)
    hand = Hand(trainer, 4096, torch.bfloat16, compiled=True)
    count = iter(range(10**9))
    return compare("trainer / by hand", lambda: trainer(next(count)), lambda: hand(next(count)), pairs=pairs, warmup=3)


def memory(arm):
    """Bytes that this process grew by over its first two steps, everything built before."""
    trainer = Trainer(32_000, torch.bfloat16, compiled=False)
    step = trainer if arm == "trainer" else Hand(trainer, 32_000, torch.bfloat16, compiled=False)
    if DEVICE.type == "cuda":
        before = torch.cuda.memory_allocated()
        step(0), step(1)
        return torch.cuda.max_memory_allocated() - before
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    step(0), step(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def losses(steps):
    trainer = Trainer(4096, torch.float32, compiled=False)
    hand = Hand(trainer, 4096, torch.float32, compiled=False)
    return max(abs(trainer(step) - hand(step)) for step in range(steps))


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pairs", type=int, default=20)
    arguments.add_argument("--loss-steps", type=int, default=200)
    arguments.add_argument("--out")
    arguments.add_argument("--memory-of", choices=["trainer", "hand"], help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.memory_of:
        print(json.dumps(memory(given.memory_of)))
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
    if given.out:
        write(given.out, records)


if __name__ == "__main__":
    main()
