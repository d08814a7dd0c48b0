"""What training and decoding cost on CUDA, network by network: parts of gpu.py, each of which can run alone.

    python benchmarks/gpu_networks.py steps --out steps.jsonl [--tiny]

    steps    a training step of every registered network at S shape (12 blocks, C 768, 131 M), T 4,096, compiled,
             against the plain decoder, attention by flex and by triton
    decode   tokens/s and cache bytes at M shape (24 blocks, C 1,024), a prompt of 1,024 tokens and 3,072 more, batch 1
             and 16, bfloat16, eager and as CUDA graphs; one wide context-ready block against six blocks
    heads    the chunked head against full logits and F.cross_entropy, one target and eight
    bags     a step in bags of 8 against a next-token step of as many positions
    passes   a context-ready step in five passes against one, with and without recomputation, and their memory

Steps are those of a trainer without its records: autocast, chunked head, fused AdamW. A network that can not do what is
asked (another view, no fixed session) is recorded with its reason. --tiny: a few channels, on any device.
"""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from machine import append, header, machine, time_arms
from torch import Tensor

import tandem.networks  # noqa: F401 - registers them
from tandem.corpus import IGNORE, Batch
from tandem.networks.captured import CapturedSession
from tandem.nn import measured
from tandem.nn.head import nll_sums
from tandem.recipe import registered

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
LONG = ("decoder", "sps", "double_decoder")
"""Networks whose decoding is timed to 4,096 tokens; of the others 512 tokens are."""
PEAK = 989e12
"""Dense bfloat16 FLOPs a second of an H100 or H200, by the data sheet."""
Settings = dict[str, Any]
S: Settings = {"depth": 12, "width": 768, "heads": 12, "mlp_width": 2304}
M: Settings = {"depth": 24, "width": 1024, "heads": 16, "mlp_width": 3072}
TINY: Settings = {"depth": 2, "width": 32, "heads": 2, "mlp_width": 64}
SPLIT = {S["depth"]: (8, 4), M["depth"]: (16, 8), TINY["depth"]: (1, 1)}  # of a double decoder's blocks


@contextlib.contextmanager
def preferring(backend: str) -> Iterator[None]:
    """Long queries on CUDA are read by this backend, whatever was measured."""
    choose = measured.choose
    measured.choose = lambda *_: (backend == "triton", "asked for by a benchmark")
    try:
        yield
    finally:
        measured.choose = choose


def build(name: str, shape: Settings, vocabulary: int, context: int, **settings: Any) -> Any:
    cls: Any = registered("network")[name]
    context_layers, generation_layers = SPLIT.get(shape["depth"], (1, 1))
    given = shape | {"context_layers": context_layers, "generation_layers": generation_layers} | settings
    known = {key: value for key, value in given.items() if key in cls.Config.model_fields}
    return cls(cls.Config(**known), vocabulary, context, torch.Generator().manual_seed(0)).to(DEVICE)


def rows_of(vocabulary: int, rows: int, T: int, seed: int = 0) -> Batch:
    ids = torch.randint(vocabulary, (rows, T + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.zeros(rows, T, dtype=torch.long))


def stepper(network: Any, batch: Batch, bag: int = 1) -> Callable[[], Any]:
    """A training step, repeated on one batch; in bags, a position reads the mean of `bag` embeddings."""
    options: Settings = {"fused": True} if CUDA else {}
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-4, **options)
    placed = batch.to(DEVICE)

    def step():
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
            x = network.embed(placed.tokens)
            hidden, _ = network(x.mean(2) if bag > 1 else x, placed)
            loss, _ = network.nll(hidden, placed.targets)
        (loss / placed.targets.numel()).backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


# ---- the parts ------------------------------------------------------------------------------------------------------


def steps(record: Callable[[dict], None], options: Any) -> None:
    shape, rows, T, vocabulary = (TINY, 2, 32, 62) if options.tiny else (S, 4, 4096, 50_302)
    backends, reference = ("triton", "flex") if CUDA else ("tiled",), {}
    order = ["decoder", "sps", "double_decoder"]
    names = [name for name in order if name in registered("network")]
    for name in options.networks or [*names, *(name for name in registered("network") if name not in names)]:
        found: dict[str, Any] = {"network": name, "rows": rows, "T": T, "vocabulary": vocabulary}
        try:
            network = build(name, shape, vocabulary, T).train()
            flops = rows * sum(network.cost().training(T).values())
            if not options.tiny:
                network.compile()
            step = stepper(network, rows_of(vocabulary, rows, T))
            arms = {backend: lambda backend=backend, step=step: _preferring(backend, step) for backend in backends}
            times = time_arms(arms, options.rounds)
        except Exception as error:  # another view, or a setting that this network lacks: said, and the next one
            record(found | {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"})
            continue
        for backend, time_of in times.items():
            if "ms" in time_of:
                reference.setdefault(backend, time_of["ms"])  # the decoder comes first
                of = {"over decoder": time_of["ms"] / reference[backend], "mfu": flops / time_of["ms"] * 1e3 / PEAK}
                time_of = of | time_of
            record(found | {"backend": backend, "flops": flops} | time_of)


def _preferring(backend: str, step: Callable[[], Any]) -> None:
    with preferring(backend):
        step()


def decode(record: Callable[[dict], None], options: Any) -> None:
    vocabulary = 62 if options.tiny else 50_302
    wide = {"depth": 1, "width": 2048, "heads": 16}, {"depth": 6, "width": 1088, "heads": 16}
    others = [name for name in registered("network") if name not in ("decoder", "sps")]
    arms: list[tuple[str, str, Settings]] = [(name, name, M) for name in ("decoder", "sps", *others)]
    arms += [("context_ready, 1 wide block", "context_ready", wide[0]), ("decoder, 6 blocks", "decoder", wide[1])]
    for what, name, shape in arms:
        if options.networks and what not in options.networks:
            continue
        for rows in (1, 16):
            prompt, tokens = (5, 3) if options.tiny else (1024, 3072 if rows > 1 and what in LONG else 512)
            found: dict[str, Any] = {"network": what, "rows": rows, "prompt": prompt, "tokens": tokens}
            try:
                network = build(name, TINY if options.tiny else shape, vocabulary, prompt + tokens)
                network = network.to(torch.bfloat16 if CUDA else torch.float32).eval()
                found |= _decoded(network, rows, prompt, tokens, vocabulary)
            except Exception as error:  # no session for plain prompts, or none that can be fixed
                found["failed"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
            record(found)
            network = None


def _decoded(network: Any, rows: int, prompt: int, tokens: int, vocabulary: int) -> dict[str, Any]:
    """Tokens a second: eager, of the first few; as CUDA graphs, of all."""
    ids = torch.randint(vocabulary, (rows, prompt), generator=torch.Generator().manual_seed(0)).tolist()
    few = min(tokens, 48)
    weights = sum(x.numel() * x.element_size() for x in network.parameters())
    session = network.session(rows)
    began = _now()
    token = session.prefill(ids).argmax(-1)
    found: dict[str, Any] = {
        "first prefill seconds": _now() - began,
        "cache bytes": session.bytes,
        "weight bytes": weights,
    }
    session.step(token)
    found["eager tokens/s"] = rows * few / _stepped(session, token, few)
    if CUDA:
        captured = CapturedSession(network.session(rows), prompt + tokens)
        began = _now()
        token = captured.prefill(ids).argmax(-1)
        found["prefill seconds"] = _now() - began
        token = captured.step(token).argmax(-1)
        found["graph tokens/s"] = rows * (tokens - 1) / _stepped(captured, token, tokens - 1)
    return found


def _stepped(session: Any, token: Tensor, steps: int) -> float:
    """Seconds for so many steps, the likeliest token each."""
    began = _now()
    for _ in range(steps):
        token = session.step(token).argmax(-1)
    return _now() - began


def _now() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def heads(record: Callable[[dict], None], options: Any) -> None:
    N, C, V = (64, 16, 100) if options.tiny else (8192, 768, 50_304)
    dtype = torch.bfloat16 if CUDA else torch.float32
    hidden = torch.randn(N, C, device=DEVICE, dtype=dtype).requires_grad_()
    weight = (0.02 * torch.randn(V, C, device=DEVICE)).requires_grad_()

    def full(targets):
        logits = F.linear(hidden, weight.to(dtype)).float()
        return torch.stack([F.cross_entropy(logits, slot) for slot in targets.unbind(1)]).sum()

    for slots in (1, 8):
        targets = torch.randint(V, (N, slots), device=DEVICE)
        ways = {"chunked": lambda: nll_sums(hidden, weight, targets)[0], "cross-entropy": lambda: full(targets)}  # noqa: B023
        arms = {way: lambda loss=loss: torch.autograd.grad(loss(), (hidden, weight)) for way, loss in ways.items()}
        memory = {way: _peak(run) for way, run in arms.items()}
        record({"N": N, "C": C, "V": V, "targets": slots, "bytes": memory, "arms": time_arms(arms, options.rounds)})


def bags(record: Callable[[dict], None], options: Any) -> None:
    shape, rows, T, vocabulary, bag = (TINY, 2, 16, 62, 4) if options.tiny else (S, 4, 4096, 50_302, 8)
    one = rows_of(vocabulary, rows, T)
    bagged = rows_of(vocabulary, rows, (T + 1) * bag).tokens.unflatten(1, (-1, bag))
    targets = bagged[:, 1:].clone()
    targets[:, -1, 1:] = IGNORE
    network = build("decoder", shape, vocabulary, T).train()
    if not options.tiny:
        network.compile()
    arms = {
        "bags": stepper(network, Batch(bagged[:, :-1].contiguous(), targets, one.starts), bag),
        "next token": stepper(network, one),
    }
    memory = {name: _peak(run) for name, run in arms.items()}
    record({"bag": bag, "rows": rows, "T": T, "bytes": memory, "arms": time_arms(arms, options.rounds)})


def passes(record: Callable[[dict], None], options: Any) -> None:
    blocks = {"depth": 3, "width": 1024, "heads": 16}, {"depth": 1, "width": 2048, "heads": 16}
    rows, T, vocabulary = (2, 16, 62) if options.tiny else (64, 256, 32_000)
    for shape in [TINY] if options.tiny else blocks:
        arms, memory = {}, {}
        for what, K, recompute in (("K 1", 1, False), ("K 5", 5, False), ("K 5 recomputed", 5, True)):
            network = build("context_ready", shape, vocabulary, T, passes=K, passes_min=None).train()
            network.recompute = recompute
            if not options.tiny:
                network.compile()
            arms[what] = stepper(network, rows_of(vocabulary, rows, T))
            arms[what]()
            memory[what] = _peak(arms[what])
        record(
            {"depth": shape["depth"], "rows": rows, "T": T, "bytes": memory, "arms": time_arms(arms, options.rounds)}
        )


def _peak(run: Callable[[], Any]) -> int | None:
    """Bytes that the device's memory grows by at most."""
    if not CUDA:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


PARTS = {part.__name__: part for part in (steps, decode, heads, bags, passes)}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("parts", nargs="+", choices=PARTS)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--networks", nargs="+", help="of steps and decode; all that are registered")
    arguments.add_argument("--rounds", type=int, default=10, help="0: compile everything, time nothing")
    arguments.add_argument("--tiny", action="store_true")
    options = arguments.parse_args()
    print(header())
    append(options.out, machine())

    for part in options.parts:

        def record(found: dict, part: str = part) -> None:
            print(found, flush=True)
            append(options.out, {"part": part} | found)

        PARTS[part](record, options)


if __name__ == "__main__":
    main()
