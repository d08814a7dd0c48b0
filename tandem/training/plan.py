"""What a run will do, cost and take, said before anything is spent; `plan` and `train` print this page."""

import copy
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tandem.training.display import clock, scaled
from tandem.training.health import peak_memory
from tandem.training.loop import take_step

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


def page(run: "Run", speed: Speed | None) -> dict[str, str]:
    """The plan by line title; without `speed`, time and memory are left out."""
    recipe, cost = run.recipe, run.cost
    batch = recipe.batch
    chosen = recipe.values["network"]
    network = ", ".join(f"{key} {value}" for key, value in chosen.items() if key != "name" and value is not None)
    roles = sorted(cost.parameters.items(), key=lambda item: -item[1])
    flops = cost.training(batch.context)
    by_part = " + ".join(f"{part} {scaled(n / batch.context)}" for part, n in flops.items())
    lines = {
        "network": f"{chosen['name']}: {network}",
        "parameters": f"{scaled(cost.total_parameters)} = " + " + ".join(f"{r} {scaled(n)}" for r, n in roles),
        "text": f"{run.recipe.corpus.texts}: {scaled(len(run.corpus.train.tokens))} tokens in "
        f"{len(run.corpus.train):,} documents, packed rows of {batch.context}",
        "device": f"{run.device.value} ({run.device.reason}), {torch.get_num_threads()} threads",
        "precision": f"weights float32, compute {str(run.precision.value)[6:]} ({run.precision.reason})",
        "compile": f"{'blocks' if run.compiled.value else 'no'} ({run.compiled.reason})",
        "cost": f"{scaled(sum(flops.values()) / batch.context)}FLOP per token of text = {by_part}",
        "budget": f"{recipe.budget} = {run.steps:,} steps of {run.tokens_per_step:,} tokens"
        f" = {scaled(run.steps * run.tokens_per_step)} tokens = {run.steps * run.flops_per_step:.2e} FLOP",
    }
    if speed is not None:
        rate = run.tokens_per_step / speed.step_seconds
        total = run.steps * speed.step_seconds + speed.start_seconds
        lines["time"] = f"about {clock(total)} at {scaled(rate)} tokens/s, evaluation apart (3 steps measured)"
        lines["memory"] = f"{speed.memory / 2**30:.2f} GiB at the peak (measured)"
    return lines
