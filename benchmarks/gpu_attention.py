"""Attention on CUDA, one layer forward and backward: the fused kernels against FlexAttention and SDPA, mask by mask.

    python benchmarks/gpu_attention.py --out attention.jsonl [--tiny]

Every mask at T 4,096, the main ones at T 1,024 to 16,384: without documents, and these also with documents of lognormal
lengths (mean 1,030, median 650, as on the web) and, at T 4,096, of exactly 1,000 tokens; 16,384 tokens a call, 768
channels in heads of 64, 128 or 32, bfloat16.

    triton, flex    `attend` by these backends; the plan is made once, as in training
    sdpa            causal SDPA of one stream without documents, by the fastest of its backends: what a mask costs
    dense           SDPA with the mask as a tensor; for two streams, over the interleaved sequence of 2T tokens
    flex in turns   FlexAttention over those 2T tokens, its mask computed from positions and document starts,
                    its blocks as PyTorch finds them, heads of 64 only
                    (both are given interleaved tokens: interleaving them is not timed)

--tiny: a few tokens and heads, on any device; on a CPU the kernels run in Triton's interpreter.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from machine import append, compile_each_shape, header, machine, options_of, time_arms, told
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tandem.nn.attention import Groups, Source, attend, plan_attention
from tandem.nn.spans import Span, causal, prefix, readable

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DENSE_UNTIL = 4096
WINDOW = 64


# ---- masks ----------------------------------------------------------------------------------------------------------


def documents(kind: str, rows: int, T: int) -> Tensor:
    """starts (rows, T)."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.zeros(rows, T, dtype=torch.long)
    for row in starts:
        ends = [0]
        while kind != "none" and ends[-1] < T:
            length = 1000.0
            if kind == "lognormal":  # mean 1,030, median 650
                spread = math.sqrt(2 * math.log(1030 / 650))
                length = 650 * math.exp(spread * float(torch.randn((), generator=generator)))
            ends.append(ends[-1] + max(1, round(length)))
        cuts = torch.tensor(ends)[1:]
        cuts = cuts[cuts < T]
        row[cuts] = cuts
    return starts.cummax(1).values


def two_streams(starts: Tensor, window: int | None = WINDOW) -> list[Groups]:
    i = torch.arange(starts.shape[1])
    recent = starts if window is None else torch.maximum(starts, i - window)
    state = causal(starts)
    return [(state, state), (Span(recent, i), Span(recent, i + 1))]


def generation_layer(starts: Tensor, align: int = 1) -> list[Groups]:
    """A double decoder's own tokens and context latents, five blocks a row, cut at multiples of `align`."""
    B, T = starts.shape
    blocks = torch.zeros_like(starts)
    for row in range(B):
        places = torch.randperm(max(1, T // align - 1), generator=torch.Generator().manual_seed(row))[:4] + 1
        places = places[places * align < T] * align
        blocks[row, places] = places
    own = torch.maximum(blocks.cummax(1).values, starts)
    return [(causal(own),), (Span(starts, own),)]


MASKS: dict[str, Callable[[Tensor], list[Groups]]] = {
    "causal": lambda s: [(causal(s),)],
    "windowed": lambda s: [(causal(s, window=256),)],
    "sps": two_streams,
    "2x memory": lambda s: two_streams(s, None),
    "double decoder": generation_layer,
    "double decoder, aligned": lambda s: generation_layer(s, 128),
    "own and encoder": lambda s: [(causal(s),), (prefix(s.shape[1] // 2, s.shape[1]),)],
}
# (T, masks, documents, head width): the masks that matter most first, at every length, as a part may be cut off; then
# heads of other widths, and all other masks.
MOST, KINDS = ("causal", "sps", "double decoder"), ("none", "1000", "lognormal")
REST = tuple(mask for mask in MASKS if mask not in MOST)
GRID = [(4096, MOST, KINDS, 64), *((T, MOST, ("none", "lognormal"), 64) for T in (16384, 8192, 1024, 2048))]
GRID += [(4096, ("causal", "sps"), KINDS, 128), (4096, REST, ("none",), 64)]
GRID += [(4096, ("double decoder",), ("none",), 128), (4096, MOST, ("none",), 32)]


# ---- arms -----------------------------------------------------------------------------------------------------------


def backward(run: Callable[[], Any], leaves: list[Tensor], seeds: list[Tensor]) -> Callable[[], Any]:
    def both():
        ys = run()
        return torch.autograd.grad(ys if isinstance(ys, tuple) else (ys,), leaves, seeds)

    return both


def interleaved(xs: Sequence[Tensor]) -> Tensor:
    return torch.stack(xs, 3).flatten(2, 3)


def arms_of(
    spans: list[Groups], B: int, T: int, H: int, D: int, dtype: torch.dtype, tiny: bool
) -> Iterator[tuple[str, Callable[[], Any]]]:
    groups = len(spans[0])
    leaf = lambda: torch.randn(B, T, H, D, device=DEVICE, dtype=dtype).transpose(1, 2).requires_grad_()
    q, kv = [leaf() for _ in range(groups)], [(leaf(), leaf()) for _ in spans]
    leaves, seeds = [*q, *(x for pair in kv for x in pair)], [torch.randn_like(x) for x in q]
    if T <= DENSE_UNTIL:
        yield from dense_arms(spans, q, kv, seeds, tiny)
    spans_of = [group if groups > 1 else group[0] for group in spans]
    sources = [Source(k, v, span) for (k, v), span in zip(kv, spans_of, strict=True)]
    # Ours last: if it broke the device, the others would fail, too.
    for backend in ("flex", "triton") if CUDA else ("tiled", "triton"):
        plan = plan_attention(spans_of, [T] * len(spans), device=DEVICE, backend=backend)
        run = lambda plan=plan: attend(tuple(q) if groups > 1 else q[0], sources, plan=plan)
        yield backend, backward(run, leaves, seeds)


def dense_arms(
    spans: list[Groups], q: list[Tensor], kv: list[tuple[Tensor, Tensor]], seeds: list[Tensor], tiny: bool
) -> Iterator[tuple[str, Callable[[], Any]]]:
    groups, (B, _, T, D) = len(q), q[0].shape
    leaves = [*q, *(x for pair in kv for x in pair)]
    there = lambda span: readable(span, T, DEVICE).expand(B, -1, -1)
    may = [torch.stack([there(span) for span in group], 2) for group in spans]  # (B, T, groups, N)
    if groups > 1:
        mask = torch.stack(may, 4).reshape(B, groups * T, -1)[:, None]
        leaves = [interleaved(xs).detach().requires_grad_() for xs in (q, *zip(*kv, strict=True))]
        lines = lambda: leaves
    else:
        mask = torch.cat(may, 3).flatten(1, 2)[:, None]
        lines = lambda: (q[0], *(torch.cat([pair[n] for pair in kv], 2) for n in (0, 1)))
    line_seeds = [interleaved(seeds) if groups > 1 else seeds[0]]
    yield "dense", backward(lambda: F.scaled_dot_product_attention(*lines(), attn_mask=mask), leaves, line_seeds)
    if groups > 1 and CUDA and D == 64 and not tiny:
        in_turns = torch.compile(flex_attention)
        blocks = create_block_mask(turns_mask(spans, B, DEVICE), B, None, *mask.shape[2:], device=DEVICE)
        yield "flex in turns", backward(lambda: in_turns(*lines(), block_mask=blocks), leaves, line_seeds)


def turns_mask(spans: list[Groups], B: int, device: torch.device) -> Callable[..., Tensor]:
    """The mask of two interleaved streams, x_0 p_0 x_1 p_1 .., as a mask_mod: state and prediction of one position
    follow each other, and the prediction sees its state."""
    state, recent = (group[0].lo.expand(B, -1).contiguous().to(device) for group in spans)

    def readable(b, h, i, j):
        t, u, of_state = i // 2, j // 2, j % 2 == 0
        first = torch.where(of_state, state[b, t], recent[b, t])
        return (first <= u) & (u < t + torch.where(of_state, 1, i % 2))

    return readable


def sdpa_arms(B: int, T: int, H: int, D: int, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    q, k, v = (torch.randn(B, T, H, D, device=DEVICE, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3))
    seed = torch.randn_like(q)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) if CUDA else (SDPBackend.MATH,):

        def run(backend=backend):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        yield f"sdpa {backend.name.split('_')[0].lower()}", backward(run, [q, k, v], [seed])


# ---- the run --------------------------------------------------------------------------------------------------------


def measure(out: Path, T: int, masks: tuple[str, ...], kinds: tuple[str, ...], D: int, options: Any) -> None:
    tokens, channels, dtype = (64, 32, torch.float32) if options.tiny else (16_384, 768, torch.bfloat16)
    B, H, warmup = max(1, tokens // T), channels // D, 1 if options.tiny else 3
    shape = {"part": "attention", "B": B, "T": T, "H": H, "D": D, "dtype": str(dtype)[6:]}
    if not set(masks) & set(options.masks) or T not in (options.lengths or [T]):
        return
    if not options.rounds:
        kinds, warmup = kinds[:1], 1  # documents do not change the graph
    if set(masks) & set(options.masks) & set(MOST):
        fastest = time_arms(dict(sdpa_arms(B, T, H, D, dtype)), options.rounds, warmup)
        append(out, shape | {"mask": "causal", "documents": "none", "arms": fastest})
    for mask in [mask for mask in masks if mask in options.masks]:
        for kind in kinds:
            spans = MASKS[mask](documents(kind, B, T))
            pairs = sum(int((s.hi - s.lo).sum()) * (B // s.lo.shape[0]) for group in spans for s in group)
            try:
                arms = time_arms(dict(arms_of(spans, B, T, H, D, dtype, options.tiny)), options.rounds, warmup)
            except Exception as error:  # a mask that cannot be made does not stop the others
                arms = {"all": {"failed": told(error)}}
            shown = "  ".join(f"{name} {x['ms']:.2f}" if "ms" in x else f"{name} -" for name, x in arms.items())
            print(f"T {T} D {D} {mask}, documents {kind}: {shown} ms", flush=True)
            # 14 FLOPs a pair and channel, forward and backward, as Cost counts them
            work = {"pairs": pairs, "flops": 14 * H * D * pairs, "sources": len(spans), "groups": len(spans[0])}
            append(out, shape | work | {"mask": mask, "documents": kind, "arms": arms})


def main() -> None:
    arguments = options_of(__doc__)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
    arguments.add_argument("--lengths", nargs="+", type=int, help="of T; all of them")
    arguments.add_argument("--rounds", type=int, default=10, help="0: compile everything, time nothing")
    arguments.add_argument("--tiny", action="store_true")
    options = arguments.parse_args()
    compile_each_shape()
    print(header())
    append(options.out, machine())
    for T, masks, kinds, D in [(32, MOST, ("none",), 16)] if options.tiny else GRID:
        measure(options.out, T, masks, kinds, D, options)


if __name__ == "__main__":
    main()
