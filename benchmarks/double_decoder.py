"""The cost of a double decoder against a plain decoder of as many parameters: attention, a step, a token, a prefix.

    python benchmarks/double_decoder.py [--pairs 20] [--eager] [--only work step decode prefix] [--out results.jsonl]

work    Query-key pairs of a generation block at T 2,048 over 1,000 drawn partitions, as a share of T^2: those that the
        tiles of the network visit, those of 128-query tiles with exact slices of the keys, and whole 128 x 128 tiles.
        Required of the tiles: 0.59, and 0.54 with splits at multiples of 128.
step    A training step of 3 M parameters (8 + 4 blocks, C 144) over the decoder's (12 blocks), T 1,024, 4,096 tokens a
        step, bfloat16 products, compiled per block, both through tiles. Required: 1.20 with one partition for all rows
        or aligned to 128, 1.30 with one per document. For the decoder, tiles are the fastest path: one causal call a
        row, as rows have one document. Also shown: the ratio of needed FLOPs.
decode  Eight steps after a prompt of 1,024 tokens, float32, one row. Required: 1.8 times the decoder's tokens a second.
        Also shown: reading the prompt.
prefix  Time to the first logits of a second request with the same first 1,024 tokens and 16 of its own: a new session
        over a fork of one that has read the prefix. Its own tokens open the block (any partition is valid) or, except
        for the last, also pass through the context stack and extend the context. Required: 10 x.

Times are CPU time of one process on one thread, in interleaved pairs: wall-clock time depends on other processes.
"""

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from batches import one_document
from machine import compare, header, missed, options_of, write
from steps import Steps

from tandem.corpus.partition import PartitionConfig, training_blocks
from tandem.networks.decoder import Decoder
from tandem.networks.double_decoder import TILE, DoubleDecoder, block_spans
from tandem.nn.attention import plan_attention

VOCABULARY, PROMPT, STEPS, OWN = 4096, 1024, 8, 16
SHAPE: dict[str, Any] = {"width": 144, "heads": 4}
PARTITIONS: dict[str, tuple[dict[str, Any], float]] = {
    "one for all rows": ({"scope": "row", "shared": True}, 1.20),
    "aligned to 128": ({"align": 128}, 1.20),
    "one per document": ({}, 1.30),
}


def double_decoder(context=2048, **partition) -> DoubleDecoder:
    config = DoubleDecoder.Config(
        **SHAPE, context_layers=8, generation_layers=4, partition=PartitionConfig(**partition)
    )
    return DoubleDecoder(config, VOCABULARY, context, torch.Generator().manual_seed(0))


def decoder(context=2048) -> Decoder:
    return Decoder(Decoder.Config(**SHAPE, depth=12), VOCABULARY, context, torch.Generator().manual_seed(0))


# ---- pairs ----------------------------------------------------------------------------------------------------------


def pairs_in_tiles(spans, T: int, size: int, whole: bool) -> int:
    """Pairs visited by tiles of `size` queries: of every source the keys that each spans, or whole tiles of keys."""
    visited = 0
    for span in spans:
        for first in range(0, T, size):
            lo, hi = span.lo[0, first : first + size], span.hi[0, first : first + size]
            read = lo < hi
            if read.any():
                a, b = int(lo[read].min()), int(hi.max())
                visited += size * (-(-b // size) * size - a // size * size if whole else b - a)
    return visited


def work(options) -> list[dict]:
    T, records = 2048, []
    starts, number = torch.zeros(1, T, dtype=torch.long), 1000
    for align, required in ((1, 0.59), (128, 0.54)):
        config, found = PartitionConfig(align=align), [0, 0, 0]
        for key in range(number):
            spans = block_spans(starts, training_blocks(config, starts, key), sink=False)
            counts = (
                plan_attention(spans, [T, T], most=TILE).tiled_pairs,
                pairs_in_tiles(spans, T, 128, whole=False),
                pairs_in_tiles(spans, T, 128, whole=True),
            )
            found = [total + count for total, count in zip(found, counts, strict=True)]
        tiles, slices, whole = (total / number / T**2 for total in found)
        print(f"  pairs / T^2, align {align:<4} tiles {tiles:.4f}   128-query tiles {slices:.4f}   whole {whole:.4f}")
        record = {"what": f"pairs / T^2, align {align}", "ratio": tiles, "required": required, "at_most": True}
        records.append(record | {"of_128_query_tiles": slices, "of_whole_tiles": whole})
    return records


# ---- times ----------------------------------------------------------------------------------------------------------


def step(options) -> list[dict]:
    context, records, count = 1024, [], itertools.count()
    batch = lambda step: replace(one_document(VOCABULARY, 4096 // context, context, step), key=step)
    compiled = not options.eager
    plain = Steps(decoder(context), batch, compiled=compiled)
    needed = sum(plain.network.cost().training(context).values())
    for name, (partition, required) in PARTITIONS.items():
        double = Steps(double_decoder(context, **partition), batch, compiled=compiled)
        arms = [lambda arm=arm: arm(next(count)) for arm in (double, plain)]
        record = timed(f"training step, partitions {name}", *arms, options)
        flops = sum(double.network.cost().training(context).values()) / needed
        print(f"    needed FLOPs {flops:.3f} x; required at most {required} x")
        records.append(record | {"needed": flops, "required": required, "at_most": True})
    return records


def timed(what, a, b, options) -> dict:
    return compare(what, a, b, pairs=options.pairs, warmup=min(2, options.pairs), clock=time.process_time)


def decode(options) -> list[dict]:
    networks = decoder(), double_decoder()
    prompt = torch.randint(VOCABULARY, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()
    reading = [lambda network=network: network.session(1).prefill([prompt]) for network in networks]
    prefill = timed(f"prefill of {PROMPT}: decoder / double decoder", *reading, options)

    def steps(network) -> Callable[[], object]:
        session, token = network.session(1), torch.zeros(1, dtype=torch.long)
        session.prefill([prompt])
        return lambda: [session.step(token) for _ in range(STEPS)]

    record = timed(f"{STEPS} tokens after {PROMPT}: decoder / double decoder", *map(steps, networks), options)
    flops = networks[0].cost().decode(PROMPT) / networks[1].cost().decode(PROMPT)
    cache = networks[0].cost().cache(PROMPT) / networks[1].cost().cache(PROMPT)
    print(f"    needed FLOPs {flops:.2f} x, cache {cache:.2f} x; required at least 1.8 x")
    return [prefill, record | {"needed": flops, "required": 1.8, "at_most": False}]


def prefix(options) -> list[dict]:
    network = double_decoder()
    generator = torch.Generator().manual_seed(0)
    shared, own = (torch.randint(VOCABULARY, (1, n), generator=generator) for n in (PROMPT, OWN))
    held = network.session(1, keep="extendable")
    held.prefill(shared.tolist())
    held.commit()
    whole = torch.cat((shared, own), dim=1).tolist()
    torch.testing.assert_close(held.fork().extend(own), network.session(1).prefill(whole), rtol=1e-4, atol=1e-4)
    anew, what = lambda: network.session(1).prefill(whole), f"first token after {PROMPT} + {OWN}: anew / "
    in_block = timed(what + "own in the block", anew, lambda: held.fork().step(own), options)
    in_context = timed(what + "own in the context", anew, lambda: held.fork().extend(own), options)
    print("    required at least 10 x")
    return [record | {"required": 10, "at_most": False} for record in (in_block, in_context)]


PARTS = {"work": work, "step": step, "decode": decode, "prefix": prefix}


def main() -> int:
    arguments = options_of(__doc__, pairs=20)
    arguments.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    arguments.add_argument("--eager", action="store_true")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    print(header())
    records = [record for part in options.only for record in PARTS[part](options)]
    write(options.out, records)
    return missed(records)


if __name__ == "__main__":
    sys.exit(main())
