"""Thought Gestalt in two packed phases against its literal loop (one stream, one sentence at a time), and its memory.

    python benchmarks/gestalt.py [--pairs 10] [--dtype float32 bfloat16] [--compile] [--cpu-time] [--out results.jsonl]

3 M parameters besides a table of 4,096 ids (8 blocks, C 176, thought from block 5), 2,560 tokens a step in streams of
up to 30 sentences of 3 to 64 tokens, as in encyclopaedia text. Forward and backward with the loss, no dropout.

Time: interleaved pairs in one process, nothing recomputed; --compile compiles only the packed phases; --cpu-time
counts CPU seconds on one thread, for machines that others use. Memory: growth of a process from before its first step,
one process per arm, with 8 streams of 10 and of 40 sentences of 25 tokens; their difference gives what a sentence step
adds.
"""

import argparse
import itertools
import subprocess
import sys
import time
from typing import Any

import torch
from batches import lengths_of, streams
from machine import compare, header, options_of, write
from steps import DEVICE, growth

from tandem.corpus.streams import StreamBatch
from tandem.networks.gestalt import Gestalt
from tandem.networks.gestalt_reading import NO_DROPOUT
from tandem.objectives.next_token import NextToken
from tandem.testing.gestalt_loop import literal_loss
from tandem.training.device import autocast

VOCABULARY, TOKENS, SENTENCES = 4096, 2560, (10, 40)


def built(**settings) -> Gestalt:
    given: dict[str, Any] = {"depth": 8, "width": 176, "heads": 4, "thought_from": 5, "dropout": NO_DROPOUT}
    config = Gestalt.Config(**given | settings)
    return Gestalt(config, VOCABULARY, 256, torch.Generator().manual_seed(0)).to(DEVICE)


def packed(network: Gestalt, batch: StreamBatch) -> None:
    objective = NextToken(NextToken.Config())
    loss, _ = objective.loss(network, batch.to(DEVICE), objective.count(network, batch))
    loss.backward()


def literal(network: Gestalt, batch: StreamBatch) -> None:
    literal_loss(network, batch.to(DEVICE)).backward()


def speed(dtype: torch.dtype, pairs: int, compiled: bool, clock) -> dict[str, Any]:
    batches = [streams(lengths_of(step, TOKENS), VOCABULARY) for step in range(4)]

    def arm(run):
        network, turns = built(), itertools.cycle(batches)
        if compiled and run is packed:
            network.compile()

        def step():
            network.zero_grad()
            with autocast(DEVICE, dtype):
                run(network, next(turns))

        return step

    what = f"literal / packed, {str(dtype)[6:]}{', compiled' if compiled else ''}"
    timed = compare(what, arm(literal), arm(packed), pairs=pairs, warmup=2, clock=clock)
    sentences = sum(len(stream) for batch in batches for stream in batch.lengths) / len(batches)
    rates = [1e3 * sentences / ms for ms in timed["ms"]]
    print(f"  sentences/s {rates[0]:.0f} / {rates[1]:.0f}", flush=True)
    return timed | {"sentences_per_second": rates, "clock": clock.__name__}


def extra_memory(recompute: bool, sentences: int) -> int:
    """Bytes by which this process grows over two steps, after everything is built."""
    network, batch = built(), streams([[25] * sentences] * 8, VOCABULARY)
    network.recompute = recompute
    return growth(lambda: (packed(network, batch), packed(network, batch)))


def memory() -> dict[str, Any]:
    def grown(recompute: bool) -> list[int]:
        command = [sys.executable, __file__, "--memory-of", str(int(recompute))]
        return [int(subprocess.check_output([*command, str(n)])) for n in SENTENCES]

    plain, again = grown(False), grown(True)
    each = [(most - least) / (SENTENCES[1] - SENTENCES[0]) for least, most in (plain, again)]
    print(f"  peak memory a sentence step of 8 x 25 tokens adds: {each[0] / 2**20:.2f} MiB, recomputed "
          f"{each[1] / 2**20:.2f} MiB ({each[1] / each[0]:.2f} x)")  # fmt: skip
    what = f"extra peak memory of {SENTENCES[0]} and {SENTENCES[1]} sentence steps of 8 x 25 tokens, float32"
    return {"what": what, "plain": plain, "recomputed": again, "ratio": each[1] / each[0]}


def main():
    arguments = options_of(__doc__, pairs=10)
    arguments.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    arguments.add_argument("--compile", action="store_true")
    arguments.add_argument("--cpu-time", action="store_true")
    arguments.add_argument("--memory-of", nargs=2, type=int, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.memory_of:
        print(extra_memory(bool(options.memory_of[0]), options.memory_of[1]))
        return
    print(header())
    if options.cpu_time:
        torch.set_num_threads(1)
    clock = time.process_time if options.cpu_time else time.perf_counter
    records = [speed(getattr(torch, dtype), options.pairs, options.compile, clock) for dtype in options.dtype]
    records.append(memory())
    write(options.out, records)


if __name__ == "__main__":
    main()
