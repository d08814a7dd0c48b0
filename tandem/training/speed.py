"""How fast a run will be: a few of its steps, taken on a copy and timed.

Some networks draw at random how much a step computes (context_ready draws its passes): a step with 1.5 times the FLOPs
of the mean step counts as two thirds of the time it took.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tandem.nn.attention import Backend, backends_taken
from tandem.training.device import CPU_FLOPS
from tandem.training.display import clock
from tandem.training.health import peak_memory
from tandem.training.loop import finish, take_step
from tandem.training.parallel import share_of_states

if TYPE_CHECKING:
    from tandem.training.run import Run


COUNTED = 3
"""Steps that count: the last ones, whose median time is taken."""
STEADY, MOST = 1.5, 12
"""More steps are taken, at most MOST, until the last COUNTED differ by a factor of at most STEADY: the machine may be
busy with something else, or blocks of a network compiled again in one of the first steps, which takes seconds."""

PATIENCE = 600.0
"""Seconds of a CPU that `tandem plan` spends on steps; of a recipe for other machines, these might take a day."""


@dataclass(frozen=True)
class Speed:
    """Measured over a few steps on a copy: seconds for the mean step, seconds before the first step that counts, peak
    bytes (including the run's own weights, if it has them, kept beside the copy), FLOPs of the mean step, and the
    attention backends that these steps took, with reasons."""

    step_seconds: float
    start_seconds: float
    memory: int
    flops: int
    attention: Mapping[Backend, str] = field(default_factory=dict)

    def seconds(self, flops: int) -> float:
        """Seconds for steps of `flops` in total: across phases, time is taken as proportional to FLOPs."""
        return self.step_seconds * (flops / self.flops)


def why_unmeasured(run: "Run") -> str:
    """Why `measure` would not end here, or not today, and the cure; empty where it would."""
    share, words = share_of_states(run.ranks, run.device.value, run.cost.total_parameters)
    if share > 1:
        return f"{words}; plan on the machine that will train"
    seconds = (COUNTED + 1) * run.flops(1) / (CPU_FLOPS * max(1, torch.get_num_threads() / 2))
    is_long = run.device.value.type == "cpu" and seconds > PATIENCE
    told = f"a few steps of {run.flops(1):.2e} FLOP take about {clock(seconds)} here"
    return f"{told}; plan with fewer batch.rows, or on the machine that will train" if is_long else ""


def measure(scratch: "Run") -> Speed:
    """Takes a few steps of `scratch`, which changes it; of several processes, the slowest and the largest count."""
    with backends_taken() as attention:
        taken, mean = _times(scratch)
        ahead = [phase for phase in scratch.view.phases if phase.first < max(1, scratch.steps)]
        if largest := max(ahead, key=lambda phase: phase.flops(scratch.cost, 1)).first:
            take_step(scratch, largest)  # a later phase that holds more
    memory = scratch.ranks.largest(peak_memory(scratch.device.value))
    step_seconds = sorted(mean[-COUNTED:])[COUNTED // 2]
    return Speed(step_seconds, sum(taken[:-COUNTED]), int(memory), scratch.flops(1), attention)


def _times(scratch: "Run") -> tuple[list[float], list[float]]:
    """Seconds that steps took, and what the mean step would have taken in each."""
    taken: list[float] = []
    mean: list[float] = []
    while len(taken) <= COUNTED or (len(taken) < MOST and max(mean[-COUNTED:]) > STEADY * min(mean[-COUNTED:])):
        step, began = len(taken) % (COUNTED + 1), time.perf_counter()
        take_step(scratch, step)
        finish(scratch.device.value)
        taken.append(scratch.ranks.largest(time.perf_counter() - began))  # the same in all, or one would go on alone
        mean.append(taken[-1] / scratch.share(step))
    return taken, mean
