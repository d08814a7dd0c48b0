"""Thought Gestalt in two packed phases against its literal loop (one stream, one sentence at a time), and its memory.

    python benchmarks/gestalt.py [--pairs 10] [--dtype float32 bfloat16] [--out results.jsonl]

3 M parameters beside a table of 4,096 ids (8 blocks, C 176, thought from block 5), 2,560 tokens a step in streams of up
to 30 sentences of 3 to 64 tokens, the lengths of encyclopaedia text. Forward and backward with the loss, no dropout,
nothing recomputed; interleaved pairs in one process, in CPU time where there is no other device. Memory is what a step
keeps for its backward (bytes of saved tensors, weights not counted), for 10, 20 and 40 sentence steps.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from machine import header, write
from steps import DEVICE

from tandem.corpus.streams import Stream, StreamBatch, stream_totals
from tandem.networks.gestalt import Gestalt, GestaltDropout
from tandem.objectives.next_token import NextToken
from tandem.testing.gestalt_loop import literal_loss
from tandem.training.device import autocast

VOCABULARY, TOKENS = 4096, 2560
NONE = GestaltDropout(residual=0.0, attention=0.0, token=0.0, thought=0.0)


def built(**settings) -> Gestalt:
    given: dict[str, Any] = {"depth": 8, "width": 176, "heads": 4, "thought_from": 5, "dropout": NONE}
    config = Gestalt.Config(**given | settings)
    return Gestalt(config, VOCABULARY, 256, torch.Generator().manual_seed(0)).to(DEVICE)


def streams(step: int, tokens: int = TOKENS, sentences: int = 30) -> StreamBatch:
    """Random text in streams of 1 to `sentences` sentences; lengths have mean 25 and a long tail."""
    generator, lengths, left = torch.Generator().manual_seed(step), [], tokens
    while left > 0:
        count = int(torch.randint(sentences // 2, sentences + 1, (), generator=generator))
        drawn = (torch.randn(count, generator=generator) * 0.55 + 3.07).exp().round().clamp(3, 64).long().tolist()
        lengths.append(drawn)
        left -= sum(drawn)
    lengths.sort(key=len, reverse=True)
    text = (torch.rand(sum(map(sum, lengths)), generator=generator) ** 3 * VOCABULARY).long()
    end = torch.tensor([VOCABULARY])
    pieces = text.split([n for stream in lengths for n in stream])
    targets = torch.cat([part for piece in pieces for part in (piece, end)])[None]
    made = [Stream(i, 0, stream) for i, stream in enumerate(lengths)]
    ids = list(range(len(lengths)))
    return StreamBatch(text, targets, lengths, ids, [0] * len(ids), *stream_totals(made), end_weight=0.05)


def packed(network: Gestalt, batch: StreamBatch) -> None:
    objective = NextToken(NextToken.Config())
    loss, _ = objective.loss(network, batch.to(DEVICE), objective.count(network, batch))
    loss.backward()


def literal(network: Gestalt, batch: StreamBatch) -> None:
    literal_loss(network, batch.to(DEVICE)).backward()


def speed(dtype: torch.dtype, pairs: int, compiled: bool) -> dict[str, Any]:
    network, other = built(), built()
    if compiled:
        network.compile()
    clock = time.perf_counter if DEVICE.type == "cuda" else time.process_time
    arms, seconds = {packed: network, literal: other}, {packed: [], literal: []}
    for pair in range(pairs + 1):
        batch = streams(pair)
        for run in (packed, literal) if pair % 2 else (literal, packed):
            arms[run].zero_grad()
            began = clock()
            with autocast(DEVICE, dtype):
                run(arms[run], batch)
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            if pair:  # the first warms up
                seconds[run].append(clock() - began)
    ratios = [b / a for a, b in zip(seconds[packed], seconds[literal], strict=True)]
    sentences = [sum(map(len, streams(pair + 1).lengths)) for pair in range(pairs)]
    rate = statistics.median(n / s for n, s in zip(sentences, seconds[packed], strict=True))
    quartiles = statistics.quantiles(ratios, n=4) if pairs > 1 else ratios * 3
    what = f"{str(dtype)[6:]}{', compiled' if compiled else ''}"
    print(f"  {what:<20} literal / packed {quartiles[1]:.2f} x [{quartiles[0]:.2f}, {quartiles[2]:.2f}], {pairs} pairs;"
          f" {rate:.0f} sentences/s", flush=True)  # fmt: skip
    return {"what": what, "ratio": quartiles[1], "quartiles": quartiles[::2], "sentences_per_second": rate}


def kept(recompute: bool, steps: int) -> int:
    """Bytes that a forward keeps for its backward, weights left out."""
    network = built()
    network.recompute = recompute
    own = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    seen: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in own:
            seen[x.untyped_storage().data_ptr()] = (x.untyped_storage().nbytes(), x)
        return x

    lengths = [[25] * steps] * 8
    made = [Stream(i, 0, stream) for i, stream in enumerate(lengths)]
    text = torch.zeros(sum(map(sum, lengths)), dtype=torch.long)
    targets = torch.zeros(1, len(text) + 8 * steps, dtype=torch.long)
    batch = StreamBatch(text, targets, lengths, list(range(8)), [0] * 8, *stream_totals(made))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        network(network.embed(batch.tokens.to(DEVICE)), batch.to(DEVICE))
    return sum(size for size, _ in seen.values())


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pairs", type=int, default=10)
    arguments.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    arguments.add_argument("--compile", action="store_true")
    arguments.add_argument("--out")
    options = arguments.parse_args()
    print(header())
    records = [speed(getattr(torch, dtype), options.pairs, options.compile) for dtype in options.dtype]
    sizes = {recompute: [kept(recompute, steps) for steps in (10, 20, 40)] for recompute in (False, True)}
    growth = {recompute: (held[-1] - held[0]) / 30 for recompute, held in sizes.items()}
    print(f"  kept a sentence step of 8 x 25 tokens: {growth[False] / 2**20:.2f} MiB, recomputed "
          f"{growth[True] / 2**20:.2f} MiB ({growth[True] / growth[False]:.2f} x)")  # fmt: skip
    records.append({"what": "bytes kept at 10, 20, 40 steps", "plain": sizes[False], "recomputed": sizes[True]})
    if options.out:
        write(options.out, records)


if __name__ == "__main__":
    main()
