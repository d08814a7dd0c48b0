"""The measurements behind "auto" on CUDA: how much faster the fused kernel is than FlexAttention.

An entry holds for one kind of device and one shape of attention; without an entry, FlexAttention is used. Entries are
printed by `python benchmarks/gpu.py` and added by hand, so no run changes what another one chooses.
"""

from typing import NamedTuple


class Speed(NamedTuple):
    """`faster`: time of flex over time of triton, forward and backward, the smallest over the measured lengths.

    device: as CUDA names it.  width: channels of a head.  record: the file in benchmarks/results that holds the times.
    """

    device: str
    sources: int
    groups: int
    width: int
    faster: float
    record: str


WIDEST = 128
"""Most channels of a head in the fused kernels: beyond, a tile of keys no longer fits beside the accumulators."""

H200 = "NVIDIA H200"
SPEEDS = [  # one source and heads of 64 at T 1,024 to 4,096, all others at 4,096
    Speed(H200, 1, 1, 32, 1.37, "h200.jsonl"),
    Speed(H200, 1, 1, 64, 1.57, "h200.jsonl"),
    Speed(H200, 1, 1, 128, 1.21, "h200.jsonl"),
    Speed(H200, 2, 2, 64, 1.54, "h200.jsonl"),
    Speed(H200, 2, 2, 128, 1.36, "h200.jsonl"),
    Speed(H200, 2, 1, 64, 1.67, "h200.jsonl"),
    Speed(H200, 2, 1, 128, 1.44, "h200.jsonl"),
]


def choose(device: str, sources: int, groups: int, width: int) -> tuple[bool, str]:
    """(whether to use triton instead of flex, the reason)."""
    for line in SPEEDS:
        if line[:4] == (device, sources, groups, width):
            return line.faster > 1, f"triton is {line.faster:.2f} x flex on {device} ({line.record})"
    shape = f"{sources} sources, {groups} groups of queries and heads of {width}"
    return False, f"triton has not been measured against flex on {device} for {shape}"
