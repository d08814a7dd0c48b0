"""How fast a run will be: a few of its steps, taken on copies and timed."""

import copy
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tandem.training.health import peak_memory
from tandem.training.loop import take_step

if TYPE_CHECKING:
    from tandem.training.run import Run


@dataclass(frozen=True)
class Speed:
    """Measured over a few steps on copies: seconds for one step, seconds before the first, bytes at the peak; FLOPs
    of one of these steps."""

    step_seconds: float
    start_seconds: float
    memory: int
    flops: int

    def seconds(self, flops: int) -> float:
        """Seconds for steps of `flops` in all: between phases, time goes with FLOPs."""
        return self.step_seconds * (flops / self.flops)


def measure(run: "Run", steps: int = 3) -> Speed:
    """Takes a few steps of `run` on copies of its network and optimiser; the run itself is left as it was."""
    scratch = copy.copy(run)
    scratch.network = copy.deepcopy(run.network).train()
    scratch.optimiser = type(run.optimiser)(run.optimiser.config, scratch.network)
    scratch.schedule = lambda step: 0.0  # type: ignore[assignment]
    began = time.perf_counter()
    take_step(scratch, 0)
    start_seconds = time.perf_counter() - began
    taken = []
    for step in range(1, steps + 1):
        began = time.perf_counter()
        take_step(scratch, step)
        if run.device.value.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return Speed(sorted(taken)[len(taken) // 2], start_seconds, peak_memory(run.device.value), run.flops(1))
