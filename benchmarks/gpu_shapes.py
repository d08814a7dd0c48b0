"""Which tiles make the fused kernels fastest on this device: each candidate in place of the shipped one.

    python benchmarks/gpu.py --shapes --out FOLDER        compiles side by side, then times
    python benchmarks/gpu_shapes.py --out shapes.jsonl [--masks causal] [--widths 64] [--rounds 10] [--tiny]

One kernel is varied at a time; a forward is timed alone, a gradient as a whole backward with the shipped tiles of the
other kernel. Without documents, T 4,096, 16,384 tokens a call, 768 channels, bfloat16. The result of a candidate is
compared with that of the shipped tiles: `off` is the largest difference over the largest value.

Candidates are shapes that fit in registers, or nearly (registers.py), most with two or three programs on a
multiprocessor. The best go into `HALF` of tandem/nn/attention_triton.py.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu_attention import DEVICE, MASKS, MOST, documents
from machine import append, header, machine, options_of, time_arms
from torch import Tensor

from tandem.nn import attention_triton
from tandem.nn.attention import Source, attend, plan_attention
from tandem.nn.attention_triton import HALF, PAIRED, Shape

KERNELS = ("forward", "gradient of queries", "gradient of keys")
CANDIDATES = {  # by head width and kernel: tile of queries, of keys, warps, stages
    64: (
        ((64, 64, 4, 4), (64, 64, 4, 2), (64, 32, 4, 4), (128, 64, 4, 3), (128, 64, 8, 4)),
        ((64, 64, 4, 2), (64, 64, 4, 4), (64, 32, 4, 4), (64, 128, 4, 2), (128, 64, 4, 3), (64, 64, 4, 3)),
        ((64, 64, 4, 4), (32, 64, 4, 3), (64, 32, 4, 3), (32, 128, 4, 3), (64, 128, 8, 3)),
    ),
    128: (
        ((64, 64, 4, 2), (64, 64, 4, 4), (64, 32, 4, 4), (128, 64, 8, 3), (128, 128, 8, 3)),
        ((64, 64, 4, 3), (64, 32, 4, 3), (64, 32, 4, 4), (128, 64, 8, 3)),
        ((64, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (32, 64, 4, 3), (32, 128, 8, 3)),
    ),
}


def arms_of(mask: str, B: int, T: int, H: int, D: int, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    spans = [group if len(group) > 1 else group[0] for group in MASKS[mask](documents("none", B, T))]
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(B, T, H, D, device=DEVICE, dtype=dtype, generator=generator).transpose(1, 2)

    groups = len(spans[0]) if isinstance(spans[0], tuple) else 1
    q = tuple(draw().requires_grad_() for _ in range(groups))
    sources = [Source(draw().requires_grad_(), draw().requires_grad_(), span) for span in spans]
    seeds, leaves = [draw() for _ in q], [*q, *(x for source in sources for x in (source.k, source.v))]
    plan = plan_attention(spans, [T] * len(spans), device=DEVICE, backend="triton")
    width = max(32, 1 << (D - 1).bit_length())
    shipped, made = attention_triton._shapes(list(q)), []

    def forward() -> tuple[Tensor, ...]:
        y = attend(q if groups > 1 else q[0], sources, plan=plan)
        return y if isinstance(y, tuple) else (y,)

    def backward() -> tuple[Tensor, ...]:
        if not made:
            made.append(forward())
        return torch.autograd.grad(made[0], leaves, seeds, retain_graph=True)

    def with_tiles(kernel: int, shape: Shape) -> tuple[Tensor, ...]:
        tiles = (*shipped[:kernel], shape, *shipped[kernel + 1 :])
        with patch.dict(HALF, {width: tiles}), patch.dict(PAIRED, {width: tiles[1]}):
            return backward() if kernel else forward()

    for kernel, given in enumerate(CANDIDATES[64 if D < 64 else D]):
        for shape in (shipped[kernel], *map(Shape._make, given[:1] if D < 64 else given)):
            yield f"{KERNELS[kernel]} {','.join(map(str, shape))}", partial(with_tiles, kernel, shape)


def off(found: tuple[Tensor, ...], shipped: tuple[Tensor, ...]) -> float:
    """The largest difference over the largest value."""
    pairs = zip(found, shipped, strict=True)
    return max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs)


def measure(out: Path, mask: str, D: int, options: Any) -> None:
    tokens, T, channels, dtype = (32, 32, 32, torch.float16) if options.tiny else (16_384, 4096, 768, torch.bfloat16)
    D = 16 if options.tiny else D
    B, H = tokens // T, channels // D
    arms = dict(arms_of(mask, B, T, H, D, dtype))
    timed = time_arms(arms, options.rounds, 1 if not options.rounds else 0 if options.tiny else 3)
    differ, shipped = {}, {}
    for name in [name for name in arms if "failed" not in timed.get(name, {}) and options.rounds]:
        found, kernel = arms[name](), name.rpartition(" ")[0]
        differ[name] = off(found, shipped.setdefault(kernel, found))  # the first of a kernel is the shipped one
    for name, x in timed.items():
        print(f"{mask}, D {D}, {name}: {x}, off {differ.get(name)}", flush=True)
    append(out, {"part": "shapes", "mask": mask, "B": B, "T": T, "H": H, "D": D, "arms": timed, "off": differ})


def main() -> None:
    arguments = options_of(__doc__)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--masks", nargs="+", choices=MOST, default=list(MOST))
    arguments.add_argument("--widths", nargs="+", type=int, choices=list(CANDIDATES), default=list(CANDIDATES))
    arguments.add_argument("--rounds", type=int, default=20, help="0: compile everything, time nothing")
    arguments.add_argument("--tiny", action="store_true")
    options = arguments.parse_args()
    print(header())
    append(options.out, machine())
    for D in options.widths[:1] if options.tiny else options.widths:
        for mask in options.masks:
            measure(options.out, mask, D, options)


if __name__ == "__main__":
    main()
