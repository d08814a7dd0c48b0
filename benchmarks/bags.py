"""A step in bags against a next-token step with as many positions: time and extra peak memory.

    python benchmarks/bags.py [--pairs 20] [--bag 8] [--dtype bfloat16] [--rows 16] [--out results.jsonl]

3 M parameters besides the table, vocabulary 32,000, 4,096 positions a step in rows of 256, one document a row, random
tokens. Time: interleaved pairs in one process, both arms on one network. Memory: growth of a process from before its
first step, one process per arm, not compiled.
"""

import argparse
import itertools
import subprocess
import sys

import torch
from batches import drawn, in_bags, one_document
from machine import compare, header, options_of, write
from steps import Steps, growth

from tandem.networks.decoder import Decoder
from tandem.objectives.superposition import Superposition

VOCABULARY, ROWS, CONTEXT = 32_000, 16, 256


def steps_in_bags(network, bag, dtype, rows, compiled):
    """Steps in bags; bags of 1 are next tokens."""

    def batch(step):
        if bag == 1:
            return one_document(VOCABULARY, rows, CONTEXT, step)
        return in_bags(drawn((rows, (CONTEXT + 1) * bag), VOCABULARY, step), bag)

    return Steps(network, batch, Superposition(Superposition.Config(bag=bag)), dtype=dtype, compiled=compiled)


def network():
    config = Decoder.Config(depth=8, width=176, heads=4)
    return Decoder(config, VOCABULARY, CONTEXT, torch.Generator().manual_seed(0))


def extra_memory(bag, dtype, rows):
    """Bytes by which this process grows over two steps, after everything is built."""
    steps = steps_in_bags(network(), bag, dtype, rows, compiled=False)
    return growth(lambda: (steps(0), steps(1)))


def main():
    arguments = options_of(__doc__, pairs=20)
    arguments.add_argument("--bag", type=int, default=8)
    arguments.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    arguments.add_argument("--rows", type=int, default=ROWS)
    arguments.add_argument("--eager", action="store_true", help="leave the blocks uncompiled")
    arguments.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    dtype = getattr(torch, given.dtype)
    if given.memory_of:
        print(extra_memory(given.memory_of, dtype, given.rows))
        return
    print(header())
    one = network()  # the arms differ only in what a step reads and predicts
    bags, tokens = (steps_in_bags(one, bag, dtype, given.rows, not given.eager) for bag in (given.bag, 1))
    counts = itertools.count()

    what = f"bags of {given.bag} / next token, V {VOCABULARY:,}, {given.rows * CONTEXT:,} positions"
    timed = compare(what, lambda: bags(next(counts)), lambda: tokens(next(counts)), pairs=given.pairs, warmup=2)
    command = [sys.executable, __file__, "--dtype", given.dtype, "--rows", str(given.rows), "--memory-of"]
    grown = [int(subprocess.check_output([*command, str(bag)])) for bag in (given.bag, 1)]
    print(f"  extra peak memory {grown[0] / grown[1]:.3f} x   {grown[0]:,} / {grown[1]:,} bytes")
    memory = {"what": f"extra peak memory, {what}", "ratio": grown[0] / grown[1], "bytes": grown}
    timed |= {"dtype": given.dtype, "compiled": not given.eager}
    memory |= {"dtype": given.dtype, "compiled": False}  # as `extra_memory` builds its step
    write(given.out, [timed, memory])


if __name__ == "__main__":
    main()
