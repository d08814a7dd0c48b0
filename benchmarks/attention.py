"""Attention over spans by tiles against what people write by hand: one SDPA call with a dense bool mask.

    python benchmarks/attention.py [--threads 1] [--out results.jsonl]

Forward and backward, H 8, D 64, every row with its own document ends; a ratio above 1 means that the tiles are faster.
The two streams of State-Prediction Separation (window 64) are compared with one interleaved sequence of 2T tokens and
its 2T x 2T mask, the double decoder's generation layer with a T x 2T mask, and decoding with the bare call.
Ours also differs from SDPA in its backward in bfloat16, which is timed apart. Some ten minutes on one core.
"""

from collections.abc import Callable
from itertools import cycle
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from machine import compare, header, options_of, write
from torch import Tensor

from tandem.nn import tiled
from tandem.nn.attention import Plan, Source, attend, plan_attention
from tandem.nn.spans import Span, causal, readable

H, D, WINDOW, CALLS = 8, 64, 64, 100
Pair = tuple[Callable[[], object], ...]  # (by hand, tiled)


def segments(B: int, T: int, number: int, seed: int = 0) -> Tensor:
    """starts (B, T): every row cut independently into `number` segments."""
    starts = torch.zeros(B, T, dtype=torch.long)
    for row in range(B):
        cuts = torch.randperm(T - 1, generator=torch.Generator().manual_seed(seed + row))[: number - 1] + 1
        starts[row, cuts] = cuts
    return starts.cummax(1).values


def leaves(number: int, B: int, T: int, dtype: torch.dtype) -> list[Tensor]:
    """Tensors as a block hands them over: (B, H, T, D), a transposed view of (B, T, H, D)."""
    return [torch.randn(B, T, H, D, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(number)]


def one_stream(T: int, B: int, documents: int, dtype: torch.dtype = torch.float32) -> Pair:
    span = causal(segments(B, T, documents))
    q, k, v = inputs = leaves(3, B, T, dtype)
    mask, plan, grad = readable(span, T)[:, None], plan_attention([span], [T]), torch.randn_like(q)
    how: dict[str, Any] = {"attn_mask": mask} if documents > 1 else {"is_causal": True}
    dense = lambda: F.scaled_dot_product_attention(q, k, v, **how)
    tiled = lambda: attend(q, [Source(k, v, span)], plan=plan)
    return tuple(lambda f=f: torch.autograd.grad(f(), inputs, grad) for f in (dense, tiled))


def spans_of_two(starts: Tensor) -> list[tuple[Span, Span]]:
    i = torch.arange(starts.shape[1])
    recent = torch.maximum(starts, i - WINDOW)
    return [(causal(starts),) * 2, (Span(recent, i), Span(recent, i + 1))]


def two_streams(T: int, B: int, documents: int, dtype: torch.dtype = torch.float32) -> Pair:
    spans = spans_of_two(segments(B, T, documents))
    plan = plan_attention(spans, [T, T])
    x, p, kx, vx, kp, vp = inputs = leaves(6, B, T, dtype)
    mask = torch.stack([torch.stack([readable(s, T) for s in of], 2) for of in zip(*spans, strict=True)], 2)
    mask = mask.permute(0, 1, 2, 4, 3).reshape(B, 1, 2 * T, 2 * T)  # token i is row 2i, its prediction row 2i + 1
    grads = [torch.randn_like(x), torch.randn_like(p)]

    def dense():
        q, k, v = (torch.stack(pair, 3).flatten(2, 3) for pair in ((x, p), (kx, kp), (vx, vp)))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return y[:, :, 0::2], y[:, :, 1::2]

    tiled = lambda: attend((x, p), [Source(kx, vx, spans[0]), Source(kp, vp, spans[1])], plan=plan)
    return tuple(lambda f=f: torch.autograd.grad(f(), inputs, grads) for f in (dense, tiled))


def generation_layer(T: int, B: int, blocks: int) -> Pair:
    starts = segments(B, T, blocks)
    own, context = causal(starts), Span(torch.zeros_like(starts), starts)
    plan = plan_attention([own, context], [T, T])
    q, k, v, kc, vc = inputs = leaves(5, B, T, torch.float32)
    mask, grad = torch.cat([readable(own, T), readable(context, T)], 2)[:, None], torch.randn_like(q)
    dense = lambda: F.scaled_dot_product_attention(q, torch.cat([k, kc], 2), torch.cat([v, vc], 2), attn_mask=mask)
    tiled = lambda: attend(q, [Source(k, v, own), Source(kc, vc, context)], plan=plan)
    return tuple(lambda f=f: torch.autograd.grad(f(), inputs, grad) for f in (dense, tiled))


def decoding(N: int, B: int) -> Pair:
    """CALLS steps of one query a row, so that milliseconds read as tens of microseconds per call."""
    q, k, v = torch.randn(B, H, 1, D), torch.randn(B, H, N, D), torch.randn(B, H, N, D)
    span = Span(torch.zeros(B, 1, dtype=torch.long), torch.tensor([[N]]))
    plan = plan_attention([span], [N])
    bare = lambda: [F.scaled_dot_product_attention(q, k, v) for _ in range(CALLS)]
    tiled = lambda: [attend(q, [Source(k, v, span)], plan=plan) for _ in range(CALLS)]
    return bare, tiled


def backward(T: int, B: int, documents: int, streams: int) -> Pair:
    """In bfloat16 with SDPA's backward, and with ours. Each pair has documents of its own, as each step of a run."""
    inputs = leaves(3 * streams, B, T, torch.bfloat16)
    queries, keys, values = (inputs[i : i + streams] for i in range(0, 3 * streams, streams))
    grads = [torch.randn_like(q) for q in queries]

    def planned(seed: int) -> tuple[list[Source], Plan]:
        starts = segments(B, T, documents, seed)
        spans = spans_of_two(starts) if streams == 2 else [(causal(starts),)]
        plan = plan_attention(spans, [T] * streams)
        assert plan.tiles.strips  # built here, once per batch
        return [Source(*source) for source in zip(keys, values, spans, strict=True)], plan

    batches = [planned(1000 * batch) for batch in range(21)]  # 20 pairs and one to warm up

    def arm(has_own: Callable[..., bool]) -> Callable[[], object]:
        following = cycle(batches)

        def run():
            sources, plan = next(following)
            with patch.object(tiled, "_has_own_backward", has_own):
                return torch.autograd.grad(attend(tuple(queries), sources, plan=plan), inputs, grads)

        return run

    return arm(lambda *_: False), arm(tiled._has_own_backward)


def kept(run: Callable[[], object]) -> float:
    """MiB that one layer's forward keeps for its backward, without inputs and masks, which layers may share."""
    alive = {}

    def pack(x: Tensor) -> Tensor:
        alive[x.untyped_storage().data_ptr()] = x  # kept alive, so that no two layers get the same memory
        return x

    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        for _ in range(2):
            run()
            sizes.append(sum(x.untyped_storage().nbytes() for x in alive.values()))
    return (sizes[1] - sizes[0]) / 2**20


def main() -> None:
    arguments = options_of(__doc__)
    arguments.add_argument("--out")
    arguments.add_argument("--only", default="", metavar="WORDS", help="that a title contains")
    arguments.add_argument("--threads", type=int, default=1)
    given = arguments.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    records = []

    def measure(title: str, build: Callable[..., Pair], *sizes: tuple[int, int, int], **options) -> None:
        if given.only not in title:
            return
        print(title)
        for T, B, pairs in sizes:
            record = compare(f"B {B} T {T}", *build(T, B, **options), pairs=pairs, warmup=1)
            records.append({**record, "what": f"{title}, B {B} T {T}"})

    print(header())
    sizes = ((512, 1, 20), (1024, 1, 20), (2048, 1, 20), (4096, 1, 5))
    measure("dense mask / tiled: causal, 4 documents", one_stream, *sizes, (512, 8, 20), (2048, 8, 20), documents=4)
    measure("dense mask / tiled: two streams, 1 document", two_streams, *sizes, (1024, 8, 5), documents=1)
    measure("dense mask / tiled: two streams, 4 documents", two_streams, (1024, 1, 20), (2048, 1, 10), documents=4)
    measure("dense mask / tiled: generation layer, 5 blocks", generation_layer, (1024, 1, 20), (2048, 1, 20), blocks=5)
    bf16 = {"documents": 4, "dtype": torch.bfloat16}
    measure("dense mask / tiled: causal, 4 documents, bfloat16", one_stream, (2048, 1, 20), **bf16)
    measure("dense mask / tiled: two streams, 4 documents, bfloat16", two_streams, (2048, 1, 10), **bf16)
    long = ((1024, 4, 20), (2048, 2, 20))
    for streams, name in ((1, "causal"), (2, "two streams")):
        title = f"SDPA's backward / ours: {name}, bfloat16, documents per row: "
        measure(title + "1", backward, (256, 16, 20), *long, documents=1, streams=streams)
        measure(title + "4", backward, *long, documents=4, streams=streams)
    measure("is_causal / tiled: causal, 1 document", one_stream, (512, 1, 20), (2048, 1, 20), documents=1)
    measure(f"bare call / attend: {CALLS} decoding steps", decoding, (512, 1, 20), (512, 8, 20))
    print("MiB that a layer keeps for its backward, dense mask / tiled, B 1 T 2048")
    for title, build, number in (
        ("causal", one_stream, 4),
        ("two streams", two_streams, 1),
        ("generation layer", generation_layer, 5),
    ):
        dense, tiled = map(kept, build(2048, 1, number))
        print(f"  {title:<48} {dense:5.0f} / {tiled:.0f}")
        records.append({"what": f"MiB kept, dense mask / tiled: {title}, B 1 T 2048", "MiB": [dense, tiled]})
    write(given.out, records)


if __name__ == "__main__":
    main()
