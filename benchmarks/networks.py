"""Every network against the plain decoder of the same width and depth: a training step, a prompt, a cached step.

    python benchmarks/networks.py [--networks sps] [--context 1024] [--pairs 20] [--eager] [--out results.jsonl]

3 M parameters besides a table of 4,096 ids (8 blocks, C 176, 4 heads), 4,096 tokens of text a step in rows of one
document, bfloat16 where the device has it, compiled per block; the needed ratio is that of `cost`. Generation is
float32: a prompt of 512 tokens, then eight steps from there. Interleaved pairs in one process.
"""

import itertools
from typing import Any

import torch
from batches import one_document
from machine import compare, header, options_of, write
from steps import DEVICE, Steps

import tandem.networks  # noqa: F401 - registers them
from tandem.recipe import registered
from tandem.training.device import Training, choose_precision

VOCABULARY, PROMPT, STEPS = 4096, 512, 8
SETTINGS: dict[str, dict[str, Any]] = {
    "sps": {"window": 64},
    "sps, window 0": {"window": 0},
    "sps, 2x Memory": {"window": None},
}


def built(name, context, **settings):
    cls: Any = registered("network")[name.partition(",")[0]]
    config = cls.Config(depth=8, width=176, heads=4, **settings)
    return cls(config, VOCABULARY, context, torch.Generator().manual_seed(0)).to(DEVICE)


def training(name, settings, context, pairs, is_compiled):
    networks = built(name, context, **settings), built("decoder", context)
    dtype = choose_precision(Training.Config(), DEVICE).value
    batch = lambda step: one_document(VOCABULARY, 4096 // context, context, step)
    arms = [Steps(network, batch, dtype=dtype, compiled=is_compiled) for network in networks]
    needed = [sum(arm.network.cost().training(context).values()) for arm in arms]
    count = itertools.count()
    steps = [lambda arm=arm: arm(next(count)) for arm in arms]
    record = compare(f"{name}: training step, T {context}", *steps, pairs=pairs, warmup=3)
    print(f"    needed FLOPs {needed[0] / needed[1]:.2f} x")
    return record | {"needed": needed[0] / needed[1]}


def generating(name, settings, rows, pairs):
    """Times of a prompt and of eight steps after it; each eight continue where the last eight ended."""
    networks = [built(name, 1024, **settings), built("decoder", 1024)]
    prompts = torch.randint(VOCABULARY, (rows, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    held = [network.session(rows) for network in networks]
    prefills = [lambda network=network: network.session(rows).prefill(prompts) for network in networks]
    for session in held:
        session.prefill(prompts)
    token = torch.zeros(rows, dtype=torch.long)

    def steps(session):
        going = session.fork()
        going.step(token)  # the first append of a fork copies what it holds
        return lambda: [going.step(token) for _ in range(STEPS)]

    what = f"{name}: {{}}, {rows} rows of {PROMPT}"
    prefill = compare(what.format("prefill"), *prefills, pairs=pairs, warmup=2)
    decode = compare(what.format(f"{STEPS} steps"), *map(steps, held), pairs=pairs, warmup=2)
    return [prefill, decode]


def main():
    arguments = options_of(__doc__, pairs=20)
    arguments.add_argument("--networks", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    arguments.add_argument("--context", type=int, default=1024)
    arguments.add_argument("--rows", type=int, nargs="+", default=[1, 16], help="of generation")
    arguments.add_argument("--eager", action="store_true")
    options = arguments.parse_args()
    print(header())
    records = []
    for name in options.networks:
        settings = SETTINGS[name]
        records.append(training(name, settings, options.context, options.pairs, not options.eager))
        for rows in options.rows:
            records += generating(name, settings, rows, options.pairs)
    write(options.out, records)


if __name__ == "__main__":
    main()
