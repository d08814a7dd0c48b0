"""The chunked head against full logits and F.cross_entropy: time and extra peak memory, forward and backward.

    python benchmarks/head.py [--pairs 20] [--dtype bfloat16] [--out results.jsonl]

8,192 positions, width 512, vocabulary 32,000, on random targets. `eight` predicts the next eight tokens at each
position, as superposition's bags do: in the chunked head they share one log-sum-exp; in the paper's listing (arXiv
2605.06546) they share float32 logits, and each has its own cross-entropy. Time: interleaved pairs in one process.
Memory: growth of a process from before the step, one process per arm.
"""

import argparse
import subprocess
import sys

import torch
from machine import compare, header, options_of, write
from steps import DEVICE, growth
from torch.nn import functional as F

from tandem.nn.head import nll_sums

N, C, V, BAG = 8192, 512, 32_000, 8


def chunked(hidden, weight, targets):
    coefficients = torch.full(targets.shape[1:], 1 / targets.numel(), device=DEVICE)
    nll_sums(hidden, weight, targets, coefficients=coefficients)[0].backward()


def full(hidden, weight, targets):
    logits = F.linear(hidden, weight.to(hidden.dtype)).float()
    torch.stack([F.cross_entropy(logits, slot) for slot in targets.unbind(1)]).mean().backward()


ARMS = {
    "chunked, eight": (chunked, BAG),
    "cross-entropy, eight": (full, BAG),
    "chunked, one": (chunked, 1),
    "cross-entropy, one": (full, 1),
}
PAIRS = [
    ("chunked, eight", "cross-entropy, eight"),
    ("chunked, eight", "chunked, one"),
    ("chunked, one", "cross-entropy, one"),  # for comparison, in a quarter of the pairs
]


def step_of(arm, dtype):
    """A step of this arm on tensors built now; it leaves no gradients behind."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, C, generator=generator).to(DEVICE, dtype).requires_grad_()
    weight = (torch.randn(V, C, generator=generator) * 0.02).to(DEVICE).requires_grad_()
    head, slots = ARMS[arm]
    targets = torch.randint(V, (N, slots), generator=generator).to(DEVICE)

    def step():
        head(hidden, weight, targets)
        hidden.grad = weight.grad = None

    return step


def main():
    arguments = options_of(__doc__, pairs=20)
    arguments.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments.add_argument("--memory-of", choices=ARMS, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    dtype = getattr(torch, given.dtype)
    if given.memory_of:
        print(growth(step_of(given.memory_of, dtype)))  # bytes, gradients included
        return
    print(header())
    command = [sys.executable, __file__, "--dtype", given.dtype, "--memory-of"]
    grown = {arm: int(subprocess.check_output([*command, arm])) for arm in ARMS}
    settings = {"dtype": given.dtype}
    records = []
    for new, old in PAIRS:
        what = f"{new} / {old}"
        record = compare(
            what,
            step_of(new, dtype),
            step_of(old, dtype),
            pairs=given.pairs if new != "chunked, one" else max(2, given.pairs // 4),
            warmup=1,
        )
        ratio = grown[new] / grown[old]
        print(f"  extra peak memory {ratio:.3f} x   {grown[new]:,} / {grown[old]:,} bytes")
        memory = {"what": f"extra peak memory, {what}", "ratio": ratio, "bytes": [grown[new], grown[old]]}
        records += [record | settings, memory | settings]
    write(given.out, records)


if __name__ == "__main__":
    main()
