"""What training and decoding cost on CUDA, network by network: parts of gpu.py, each of which can run alone.

    python benchmarks/gpu_networks.py steps --out steps.jsonl [--tiny]

    steps    a training step of every registered network at S shape (12 blocks, C 768, 131 M), 8 rows of T 4,096,
             compiled, attention by flex and by triton, in turns with the plain decoder's by triton; several in a row,
             as in a run
    decode   tokens/s and cache bytes at M shape (24 blocks, C 1,024), a prompt of 1,024 tokens and 512 more (3,072 for
             the main networks at batch 16), batch 1 and 16, bfloat16, eager and as CUDA graphs of compiled blocks; one
             wide context-ready block against six blocks. Prompts are read in five passes, as in training: in bfloat16,
             convergence takes about as many passes as there are tokens
    heads    the chunked head, eager and in one kernel, against full logits and F.cross_entropy, one target and eight
    bags     a step in bags of 8 against a next-token step with as many positions
    passes   a context-ready step in five passes against one, with and without recomputation, and their memory

Steps are those of a trainer without logging: autocast, chunked head, fused AdamW; the encoder-decoder reads half of a
row and is asked for the rest. A network with sentences reads streams of these, of 25 tokens on average, in a step, and
an end after every 25 tokens of a prompt. A network that cannot do what is asked (no fixed session) is recorded with the
reason.
--tiny: a few channels, on any device.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from batches import in_bags, lengths_of, streams
from machine import append, compile_each_shape, header, machine, options_of, time_arms, told
from torch import Tensor

import tandem.networks  # noqa: F401 - registers them
from tandem.corpus import Batch
from tandem.corpus.prefixes import divided
from tandem.networks.captured import CapturedSession
from tandem.networks.cost import SENTENCE, Parts
from tandem.nn import measured
from tandem.nn.attention import Plan
from tandem.nn.head import nll_sums
from tandem.objectives.superposition import Superposition
from tandem.recipe import registered

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
LONG = ("decoder", "sps", "double_decoder")
"""Networks that come first; their decoding at batch 16 is timed to 4,096 tokens, all else for 512 tokens."""
LAST = ("gestalt", "context_ready", "context_ready_sps")
"""Networks whose steps take longest, sentence by sentence or in five passes: these a part that is cut off loses."""
PEAK = 989e12
"""Dense bfloat16 FLOPs a second of an H100 or H200, by the data sheet."""
IN_A_ROW = 4
"""Steps timed together: the host prepares a step while the device is still busy with the one before."""
Settings = dict[str, Any]
S: Settings = {"depth": 12, "width": 768, "heads": 12, "mlp_width": 2304}
M: Settings = {"depth": 24, "width": 1024, "heads": 16, "mlp_width": 3072}
TINY: Settings = {"depth": 2, "width": 32, "heads": 2, "mlp_width": 64, "thought_from": 2}
SPLIT = {S["depth"]: (8, 4), M["depth"]: (16, 8)}  # the stacks of a double decoder; of other depths one block each


def build(name: str, shape: Settings, vocabulary: int, context: int, **settings: Any) -> Any:
    cls: Any = registered("network")[name]
    context_layers, generation_layers = SPLIT.get(shape["depth"], (1, 1))
    given = shape | {"context_layers": context_layers, "generation_layers": generation_layers} | settings
    known = {key: value for key, value in given.items() if key in cls.Config.model_fields}
    with DEVICE:  # drawn on the device: a CPU takes longer over the weights than the device over what is timed
        network = cls(cls.Config(**known), vocabulary, context)
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.02)
    return network


def rows_of(vocabulary: int, rows: int, T: int, seed: int = 0) -> Batch:
    """Rows of a step, with its key; without a key, networks would read them as for scoring."""
    ids = torch.randint(vocabulary, (rows, T + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.zeros(rows, T, dtype=torch.long), key=seed)


def prompts_of(network: Any, vocabulary: int, rows: int, prompt: int) -> list[list[int]]:
    """Random prompts of so many tokens, with the ends of sentences where a network has one."""
    ids = torch.randint(vocabulary, (rows, prompt), generator=torch.Generator().manual_seed(0))
    if hasattr(network, "end"):
        *closed, last = ids.split(SENTENCE, dim=1)
        ids = torch.cat([*(F.pad(part, (0, 1), value=network.end) for part in closed), last], dim=1)
    return ids.tolist()


def stepper(network: Any, batch: Batch, bag: int = 1) -> Callable[[], Any]:
    """A training step, repeated on one batch: targets are counted on the host, then the objective takes its loss."""
    objective = Superposition(Superposition.Config(bag=bag))  # bags of 1 are next tokens
    options: Settings = {"fused": True} if CUDA else {}
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-4, **options)
    placed = batch.to(DEVICE)

    def step():
        counts = objective.count(network, batch)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
            loss, _ = objective.loss(network, placed, counts)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def in_order() -> list[str]:
    """All registered networks, as they are timed."""
    return [*LONG, *(name for name in registered("network") if name not in LONG + LAST), *LAST]


# ---- the parts ------------------------------------------------------------------------------------------------------


def steps(record: Callable[[dict], None], options: Any) -> None:
    shape, rows, T, vocabulary = (TINY, 2, 32, 62) if options.tiny else (S, 8, 4096, 50_302)
    backends, decoder = options.backends if CUDA else ("tiled",), {}
    for name in options.networks or in_order():
        found: dict[str, Any] = {"network": name, "rows": rows, "T": T, "vocabulary": vocabulary}
        try:
            network = build(name, shape, vocabulary, T, passes_min=None)
            batch, parts, cost = rows_of(vocabulary, rows, T), None, network.cost()
            if network.suffixes_only:  # it reads half of the row, and is asked for the other
                batch, parts = divided(batch, torch.full_like(batch.starts, T // 2)), Parts(T // 2, T - T // 2)
            costs = [cost.training(T, parts=parts)] * rows
            if hasattr(network, "end"):
                batch = streams(lengths_of(0, rows * T), vocabulary)
                costs = [cost.stream(lengths) for lengths in batch.lengths]
            flops, attention = sum(sum(one.values()) for one in costs), sum(one["attention"] for one in costs)
            model = flops - attention / 7  # 2 of 14 parts are scores computed again: not the model's
            if not options.tiny:
                network.compile()
            step = stepper(network, batch)
            arms = {backend: lambda backend=backend, step=step: _preferring(backend, step) for backend in backends}
            rounds, calls = (options.rounds, IN_A_ROW) if name in LONG else (min(options.rounds, 3), IN_A_ROW // 2)
            times = time_arms(decoder | arms, rounds, warmup=1, calls=calls if rounds else 1)
        except Exception as error:  # of one network: record it and go on
            record(found | {"failed": told(error)})
            continue
        reference = times.pop("decoder", {})
        if name == "decoder":
            decoder = {"decoder": arms[backends[-1]]}
        for backend, time_of in times.items():
            if "ms" in time_of:
                of = {"mfu": model / time_of["ms"] * 1e3 / PEAK}
                if name == "decoder":  # by the convention of PaLM (arXiv 2204.02311), that of causal masks, too
                    all_pairs = model + attention * 6 / 7 * (T - 1) / (T + 1)
                    of["mfu, all pairs"] = all_pairs / time_of["ms"] * 1e3 / PEAK
                if "ms" in reference:
                    of |= {"over decoder": time_of["ms"] / reference["ms"], "decoder ms": reference["ms"]}
                time_of = of | time_of
            record(found | {"backend": backend, "flops": flops} | time_of)


def _preferring(backend: str, step: Callable[[], Any]) -> None:
    """Takes a step in which this backend serves long queries on CUDA, whatever was measured."""
    with patch.object(measured, "choose", lambda *_: (backend == "triton", "asked for by a benchmark")):
        step()


def arms_of_decode() -> list[tuple[str, str, Settings]]:
    """What is decoded, by name: a network, at a shape."""
    wide = {"depth": 1, "width": 2048, "heads": 16}, {"depth": 6, "width": 1088, "heads": 17}
    arms: list[tuple[str, str, Settings]] = [(name, name, M) for name in LONG]
    arms += [("context_ready, 1 wide block", "context_ready", wide[0]), ("decoder, 6 blocks", "decoder", wide[1])]
    return arms + [(name, name, M) for name in in_order() if name not in LONG]


def decode(record: Callable[[dict], None], options: Any) -> None:
    vocabulary = 62 if options.tiny else 50_302
    for what, name, shape in arms_of_decode():
        if options.networks and what not in options.networks:
            continue
        network = None
        for rows in (1, 16):
            prompt, tokens = (27, 3) if options.tiny else (1024, 3072 if rows > 1 and what in LONG else 512)
            found: dict[str, Any] = {"network": what, "rows": rows, "prompt": prompt, "tokens": tokens}
            try:
                if network is None:  # once for all rows: drawing weights takes longer than decoding
                    network = build(name, TINY if options.tiny else shape, vocabulary, 4096, prefill=5)
                    network = network.to(torch.bfloat16 if CUDA else torch.float32)
                    if CUDA and not options.tiny:
                        network.compile()  # serves captured steps alone
                _decode_into(found, network, vocabulary, options.rounds)
            except Exception as error:  # no session for plain prompts, or none of a fixed size
                found["failed"] = told(error)
            record(found)


def _decode_into(found: dict[str, Any], network: Any, vocabulary: int, rounds: int) -> None:
    """Tokens a second, entered as they are measured: eager over the first few tokens, as CUDA graphs over all."""
    rows, prompt, tokens = found["rows"], found["prompt"], found["tokens"]
    ids = prompts_of(network, vocabulary, rows, prompt)
    few, all_ = (min(tokens, 24), tokens - 1) if rounds else (1, 1)
    session = network.session(rows)
    began = _now()
    token = session.prefill(ids).argmax(-1)
    found["first prefill seconds"] = _now() - began
    found["cache bytes"] = session.bytes
    found["weight bytes"] = sum(x.numel() * x.element_size() for x in network.parameters())
    session.step(token)
    found["eager tokens/s"] = rows * few / _stepped(session, token, few)
    if CUDA and found["network"] == "decoder":
        with patch.object(Plan, "choose", lambda *_: ("tiled", "asked for by a benchmark")):
            slow = min(few, 8)
            found["eager tokens/s by SDPA"] = rows * slow / _stepped(session, token, slow)
    if CUDA:
        captured = CapturedSession(network.session(rows), prompt + tokens)
        began = _now()
        token = captured.prefill(ids).argmax(-1)
        found["prefill seconds"] = _now() - began
        token = captured.step(token).argmax(-1)
        found["graph tokens/s"] = rows * all_ / _stepped(captured, token, all_)


def _stepped(session: Any, token: Tensor, steps: int) -> float:
    """Seconds for `steps` steps, each with the likeliest token."""
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
        ways = {
            "chunked": lambda: nll_sums(hidden, weight, targets, fused=False)[0],  # noqa: B023
            "cross-entropy": lambda: full(targets),  # noqa: B023
        }
        if CUDA:
            ways["chunked, fused"] = lambda: nll_sums(hidden, weight, targets, fused=True)[0]  # noqa: B023
        arms = {way: lambda loss=loss: torch.autograd.grad(loss(), (hidden, weight)) for way, loss in ways.items()}
        memory = {way: _peak(run) for way, run in arms.items()}
        record({"N": N, "C": C, "V": V, "targets": slots, "bytes": memory, "arms": time_arms(arms, options.rounds)})


def bags(record: Callable[[dict], None], options: Any) -> None:
    shape, rows, T, vocabulary, bag = (TINY, 2, 16, 62, 4) if options.tiny else (S, 4, 4096, 50_302, 8)
    bagged = in_bags(rows_of(vocabulary, rows, (T + 1) * bag).tokens, bag)
    network = build("decoder", shape, vocabulary, T)
    if not options.tiny:
        network.compile()
    arms = {
        "bags": stepper(network, bagged.keyed(0, part=0), bag),
        "next token": stepper(network, rows_of(vocabulary, rows, T)),
    }
    memory = {name: _peak(run) for name, run in arms.items()}
    times = time_arms(arms, options.rounds, warmup=1, calls=IN_A_ROW)
    record({"bag": bag, "rows": rows, "T": T, "bytes": memory, "arms": times})


def passes(record: Callable[[dict], None], options: Any) -> None:
    blocks = {"depth": 3, "width": 1024, "heads": 16}, {"depth": 1, "width": 2048, "heads": 16}
    rows, T, vocabulary = (2, 16, 62) if options.tiny else (64, 256, 32_000)
    for shape in [TINY] if options.tiny else blocks:
        arms, memory = {}, {}
        for what, K, recompute in (("K 1", 1, False), ("K 5", 5, False), ("K 5 recomputed", 5, True)):
            network = build("context_ready", shape, vocabulary, T, passes=K, passes_min=None)
            network.recompute = recompute
            if not options.tiny:
                network.compile()
            arms[what] = stepper(network, rows_of(vocabulary, rows, T))
            memory[what] = _peak(arms[what])
        times = time_arms(arms, options.rounds, warmup=1, calls=IN_A_ROW)
        record(shape | {"rows": rows, "T": T, "bytes": memory, "arms": times})


def _peak(run: Callable[[], Any]) -> int | None:
    """Peak growth of the device's memory in bytes, once everything is compiled, set up and warm; None without CUDA, and
    for an arm that fails, of which `time_arms` says why."""
    if not CUDA:
        return None
    try:
        run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    except Exception:
        return None


PARTS = {part.__name__: part for part in (steps, decode, heads, bags, passes)}


def main() -> None:
    arguments = options_of(__doc__)
    arguments.add_argument("parts", nargs="+", choices=PARTS)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--networks", nargs="+", help="of steps and decode; all that are registered")
    arguments.add_argument("--backends", nargs="+", default=["flex", "triton"], help="of attention on CUDA, of steps")
    arguments.add_argument("--rounds", type=int, default=10, help="0: compile everything, time nothing")
    arguments.add_argument("--tiny", action="store_true")
    options = arguments.parse_args()
    known = [what for what, _, _ in arms_of_decode()]
    if unknown := set(options.networks or ()) - set(known):
        arguments.error(f"--networks {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    compile_each_shape()
    if CUDA:
        torch.set_num_threads(1)  # as a run does
    print(header())
    append(options.out, machine())

    failed = False
    for part in options.parts:

        def record(found: dict, part: str = part) -> None:
            print(found, flush=True)
            append(options.out, {"part": part} | found)

        try:
            PARTS[part](record, options)
        except Exception as error:  # the other parts are still to come
            record({"failed": told(error)})
            failed = True
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
