"""What "auto" goes by on CUDA: how much faster the fused kernel is than FlexAttention, where that was measured.

A line counts for one kind of device and one shape of attention; whatever has no line keeps FlexAttention. The lines
come from `python benchmarks/gpu.py`, which prints them; they are entered by hand, so no run changes what another takes.
"""

from typing import NamedTuple


class Speed(NamedTuple):
    """`faster`: time of flex over time of triton, forward and backward, the least over the lengths that were measured.

    device: as CUDA names it.  width: channels of a head.  record: the file in benchmarks/results that holds the times.
    """

    device: str
    sources: int
    groups: int
    width: int
    faster: float
    record: str


SPEEDS: list[Speed] = []  # no CUDA device has been measured yet


def choose(device: str, sources: int, groups: int, width: int) -> tuple[bool, str]:
    """(whether triton is taken in place of flex, why)."""
    for line in SPEEDS:
        if line[:4] == (device, sources, groups, width):
            return line.faster > 1, f"triton is {line.faster:.2f} x flex on {device} ({line.record})"
    shape = f"{sources} sources, {groups} groups of queries and heads of {width}"
    return False, f"triton has not been measured against flex on {device} for {shape}"
