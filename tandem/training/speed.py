"""How fast a run will be: a few of its steps, taken on a copy and timed."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.training.health import peak_memory
from tandem.training.loop import finish, take_step

if TYPE_CHECKING:
    from tandem.training.run import Run


@dataclass(frozen=True)
class Speed:
    """Measured over a few steps on a copy: seconds for one step, seconds before the first, bytes at the peak; FLOPs
    of one of these steps."""

    step_seconds: float
    start_seconds: float
    memory: int
    flops: int

    def seconds(self, flops: int) -> float:
        """Seconds for steps of `flops` in all: between phases, time goes with FLOPs."""
        return self.step_seconds * (flops / self.flops)


def measure(scratch: "Run", steps: int = 3) -> Speed:
    """Takes a few steps of `scratch`, which is spoilt by it; of several processes the slowest and the largest count."""
    began = time.perf_counter()
    take_step(scratch, 0)
    start_seconds = time.perf_counter() - began
    taken = []
    for step in range(1, steps + 1):
        began = time.perf_counter()
        take_step(scratch, step)
        finish(scratch.device.value)
        taken.append(time.perf_counter() - began)
    memory = peak_memory(scratch.device.value)
    step_seconds, start_seconds, memory = scratch.ranks.largest(sorted(taken)[len(taken) // 2], start_seconds, memory)
    return Speed(step_seconds, start_seconds, int(memory), scratch.flops(1))
