"""How fast a run will be: a few of its steps, taken on copies and timed."""

import copy
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tandem.training.health import peak_memory
from tandem.training.loop import take_step
from tandem.training.progress import Progress

if TYPE_CHECKING:
    from tandem.training.run import Run


@dataclass(frozen=True)
class Speed:
    """Measured over a few steps on copies: seconds for one step, seconds before the first, bytes at the peak."""

    step_seconds: float
    start_seconds: float
    memory: int


def measure(run: "Run", steps: int = 3) -> Speed:
    """Takes a few steps of `run` on copies of its network and optimiser; the run itself is left as it was."""
    scratch = copy.copy(run)
    scratch.network = copy.deepcopy(run.network).train()
    scratch.optimiser = type(run.optimiser)(run.optimiser.config, scratch.network)
    scratch.schedule = lambda step: 0.0  # type: ignore[assignment]
    scratch.progress = Progress()
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
    return Speed(sorted(taken)[len(taken) // 2], start_seconds, peak_memory(run.device.value))
