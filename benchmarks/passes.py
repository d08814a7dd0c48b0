"""What a context-ready network costs: a training step in five passes against one, its memory, decoding, streaming.

    python benchmarks/passes.py [--pairs 20] [--only step parts memory streaming decode] [--out results.jsonl]

step       Five passes over one, with recomputation of passes and without. 3 M parameters besides the table (3 blocks,
           C 256; one wide block, C 400), 4,096 tokens a step in rows of 256, bfloat16 products, compiled per block.
           Required: time at most 5.0 (one block 5.5); recomputed 6.5 (7.0). Also shown: the FLOPs needed.
parts      Loss and gradients of five passes over the sum of their parts, each timed alone with its gradients: five
           times the blocks, four corrections, one head. Asked: 1.05, as passes share all else.
memory     Growth of a separate process over its first two steps, after the network is built: five passes, recomputed,
           over one, with an allocator that returns what is freed. Asked: the memory of one pass and K B T C elements of
           corrections, in the dtype of the products; shown beside it. Required, much less strict: 1.5. glibc's own
           allocator keeps what is freed, in pieces that the next pass cannot always use; that growth is shown, too.
streaming  The same networks, float32, 256 tokens: logits of a session, token by token, against those of reading the
           whole prefix in as many passes as it has tokens, plus one. Required: equal to 1e-5. Also shown: those of as
           many passes as the corrections take to move by no more than the tolerance of 1e-5.
decode     A token of the paper's one wide block (C 2,048) over one of its six plain blocks (C 1,088), vocabulary of
           32,000, float32, batch 1, after a prompt of 16; also shown: the bytes of weights that each must read.

Times are CPU time of one process on one thread, in interleaved pairs: wall-clock time depends on other processes.
On a GPU, use benchmarks/gpu.py.
"""

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from batches import one_document
from machine import compare, header, missed, options_of, write
from steps import Steps, growth

from tandem.analysis.pointer_chasing import BLOCK
from tandem.networks.context_ready import ContextReady
from tandem.networks.decoder import Decoder

SHAPES = {"three blocks": {"depth": 3, "width": 256, "heads": 8}, "one block": {"depth": 1, "width": 400, "heads": 10}}
ARMS = {"K 1": (1, False), "K 5": (5, False), "K 5 recomputed": (5, True)}
MOST_TIME = {("three blocks", "K 5"): 5.0, ("one block", "K 5"): 5.5}
MOST_TIME |= {("three blocks", "K 5 recomputed"): 6.5, ("one block", "K 5 recomputed"): 7.0}
MOST_PARTS, MOST_MEMORY, MOST_DIFFERENCE = 1.05, 1.5, 1e-5
VOCABULARY, ROWS, CONTEXT = 4096, 16, 256
PROMPT, STEPS = 16, 4


def network(shape, passes=5, tiny=False) -> ContextReady:
    settings = SHAPES[shape] | ({"width": 32, "heads": 2} if tiny else {})
    config = ContextReady.Config(**settings, passes=passes, passes_min=None)
    return ContextReady(config, VOCABULARY, CONTEXT, torch.Generator().manual_seed(0))


def arm_steps(shape, arm, options, compiled=True) -> Steps:
    passes, recompute = ARMS[arm]
    trained = network(shape, passes, options.tiny)
    trained.recompute = recompute
    batch = lambda step: one_document(VOCABULARY, 2 if options.tiny else ROWS, CONTEXT, step)
    return Steps(trained, batch, dtype=dtype(options), compiled=compiled)


def dtype(options) -> torch.dtype:
    return torch.float32 if options.float32 else torch.bfloat16


def timed(what, a, b, options) -> dict[str, Any]:
    return compare(what, a, b, pairs=options.pairs, warmup=min(3, options.pairs), clock=time.process_time)


def flops(steps: Steps) -> int:
    return sum(steps.network.cost().training(CONTEXT).values())


def step(options) -> list[dict]:
    records = []
    for shape in SHAPES:
        one, count = arm_steps(shape, "K 1", options), itertools.count()
        for arm in ("K 5", "K 5 recomputed"):
            more = arm_steps(shape, arm, options)
            pair = [lambda steps=steps: steps(next(count)) for steps in (more, one)]  # noqa: B023 - used at once
            record = timed(f"{shape}: {arm} / K 1", *pair, options)
            needed = flops(more) / flops(one)
            print(f"    needed FLOPs, none for recomputing: {needed:.2f} x; required {MOST_TIME[shape, arm]} x")
            records.append(record | {"needed": needed, "required": MOST_TIME[shape, arm]})
    return records


def parts(options) -> list[dict]:
    records = []
    for shape in SHAPES:
        whole, alone = _whole_and_alone(arm_steps(shape, "K 5", options))
        record = timed(f"{shape}: a step of K 5 / its parts", whole, alone, options)
        records.append(record | {"required": MOST_PARTS})
    return records


def _whole_and_alone(steps: Steps) -> tuple[Callable[[], None], Callable[[], None]]:
    """Loss and gradients of five passes; the same number of passes, corrections and heads, each backward by itself."""
    net, batch = steps.network, steps.batch(0)
    assert isinstance(net, ContextReady)
    counts, first = steps.objective.count(net, batch), torch.arange(CONTEXT)[:, None] == 0
    e = net.wrapped.placed(net.embed(batch.tokens), batch).detach().requires_grad_()
    reader = net.wrapped.reader(e, batch)

    def whole():
        with steps.autocast():
            loss, _ = steps.objective.loss(net, batch, counts)
        loss.backward()

    def alone():
        runs = {lambda: net.wrapped.states(e, reader): 5, lambda: net.correct(e, e, first): 4}
        runs |= {lambda: net.asked(net.wrapped.norm(e), batch, counts)[0]: 1}
        for run, times in runs.items():
            for _ in range(times):
                with steps.autocast():
                    y = run()
                y.backward(torch.ones_like(y))

    return whole, alone


def memory(options) -> list[dict]:
    records = []
    for shape, sizes in SHAPES.items():
        rows, width = (2, 32) if options.tiny else (ROWS, sizes["width"])
        corrections = 5 * rows * CONTEXT * width * dtype(options).itemsize
        for kept, setting in (("", {"MALLOC_MMAP_THRESHOLD_": str(2**16)}), (", freed blocks kept", {})):
            bytes_of = {arm: _grown(shape, arm, setting) for arm in ARMS}
            asked = 1 + corrections / bytes_of["K 1"]
            for arm, required in (("K 5", None), ("K 5 recomputed", None if kept else MOST_MEMORY)):
                what, ratio = f"{shape}: memory of {arm} / K 1{kept}", bytes_of[arm] / bytes_of["K 1"]
                print(f"  {what}  {ratio:.2f} x   {bytes_of[arm]:,} / {bytes_of['K 1']:,} bytes")
                if required:
                    print(f"    asked {asked:.2f} x; required {required} x")
                record = {"what": what, "ratio": ratio, "bytes": bytes_of[arm]} | ({"asked": asked} if required else {})
                records.append(record | ({"required": required} if required else {}))
    return records


def _grown(shape, arm, setting) -> int:
    command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", shape, arm]
    return int(subprocess.run(command, capture_output=True, check=True, env=os.environ | setting).stdout)


@torch.no_grad()
def streaming(options) -> list[dict]:
    records = []
    for shape in SHAPES:
        streamed, batch = network(shape, tiny=options.tiny), one_document(VOCABULARY, 1, CONTEXT, 0)
        session, tokens = streamed.session(1), batch.tokens
        read = [session.prefill(tokens[:, :1].tolist()), *(session.step(token) for token in tokens.T[1:])]
        e = streamed.embed(tokens)
        _, converged = streamed.corrected(e, streamed.wrapped.reader(e, batch), batch.starts, "stream")
        for passes, required in ((CONTEXT + 1, MOST_DIFFERENCE), (converged, None)):
            logits = (streamed.read(batch, passes=passes) @ streamed.head.T)[0]
            off = float((torch.cat(read) - logits).abs().max())
            print(f"  {shape}: session / prefix in {passes} passes, largest difference of a logit {off:.1e}")
            record = {"what": f"{shape}: session / prefix in {passes} passes, difference of a logit", "ratio": off}
            records.append(record | ({"required": required} if required else {}))
    return records


def decode(options) -> list[dict]:
    context, vocabulary = PROMPT + STEPS, 256 if options.tiny else 32_000
    given = {ContextReady: {"depth": 1, "width": 2048}, Decoder: {"depth": 6, "width": 1088}}
    runs, read = [], []
    for cls, shape in given.items():
        own: dict[str, Any] = {**BLOCK, **shape, "heads": 16} | ({"width": 64} if options.tiny else {})
        model = cls(cls.Config(**own), vocabulary, context, torch.Generator().manual_seed(0))
        parameters = model.cost().parameters
        read.append(4 * (sum(parameters.values()) - parameters["embedding"]))  # only a row of the table is read
        session = model.session(1)
        session.prefill([list(range(PROMPT))])
        runs.append(lambda session=session: _go_on(session.fork()))
    record = timed(f"{STEPS} tokens: one block of 2,048 / six of 1,088", *runs, options)
    a, b = (STEPS * weights / ms / 1e6 for weights, ms in zip(read, record["ms"], strict=True))
    ratio = read[0] / read[1]
    print(f"    weights read a token {read[0]:,} / {read[1]:,} bytes, {ratio:.2f} x; {a:.1f} / {b:.1f} GB/s")
    return [record | {"tokens": STEPS, "bytes_a_token": read, "needed": ratio}]


def _go_on(session) -> None:
    for _ in range(STEPS):
        session.step(torch.zeros(1, dtype=torch.long))


PARTS = {"step": step, "parts": parts, "memory": memory, "streaming": streaming, "decode": decode}


def main() -> int:
    arguments = options_of(__doc__, pairs=20)
    arguments.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    arguments.add_argument("--tiny", action="store_true", help="a few channels: to see that it runs")
    arguments.add_argument("--float32", action="store_true")
    arguments.add_argument("--memory-of", nargs=2, metavar=("SHAPE", "ARM"), help=argparse.SUPPRESS)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        steps = arm_steps(*options.memory_of, options, compiled=False)
        print(growth(lambda: (steps(0), steps(1))))
        return 0
    print(header())
    records = [record for part in options.only for record in PARTS[part](options)]
    write(options.out, records)
    return missed(records)


if __name__ == "__main__":
    sys.exit(main())
