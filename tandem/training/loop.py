"""The training loop: one screen, for every network and objective.

A step is a pure function of the weights and of (seed, step): batches are made from the step's number, targets are
counted over all micro-batches before the first backward, and the losses of micro-batches add up to the step's mean.
Observers are the only code that writes; they are called at multiples of their `every` and after the last step.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem.training.health import Stopped, StopRequest, peak_memory, require_finite
from tandem.training.observers import Observer, Step

if TYPE_CHECKING:
    from tandem.training.run import Run


@dataclass
class Taken:
    """One step: summed losses in nats and counts by name, gradient norm before clipping, learning rate."""

    sums: dict[str, Tensor]
    counts: dict[str, int]
    norm: Tensor
    lr: float

    def means(self) -> dict[str, float]:
        return {name: float(total) / max(1, self.counts[name]) for name, total in self.sums.items()}


def take_step(run: "Run", step: int) -> Taken:
    """One update of run.network from the batches of `step`."""
    batches = run.batches(step)
    counts = _added(run.objective.count(run.network, batch) for batch in batches)
    sums: dict[str, Tensor] = {}
    for batch in batches:
        batch = batch.to(run.device.value)
        with run.autocast():
            loss, terms = run.objective.loss(run.network, batch, counts)
        loss.backward()
        sums = _added((sums, terms))
    norm = run.optimiser.clip()
    require_finite(sums, norm, step, where=run.place(step))
    return Taken(sums, counts, norm, run.optimiser.step(run.schedule(step)))


def train(run: "Run", observers: Sequence[Observer], save: Callable[[], object], save_every: int) -> None:
    """Runs from where `run` stands to its end, or raises Stopped when asked to by a signal, after saving."""
    run.network.train()
    with StopRequest() as stop:
        for step in range(run.progress.step, run.steps):
            run.enter(step)
            began = time.perf_counter()
            taken = take_step(run, step)
            _finish(run.device.value)
            seconds = time.perf_counter() - began
            run.progress.step, run.progress.seconds = step + 1, run.progress.seconds + seconds
            last = step + 1 == run.steps
            due = [o for o in observers if last or (step + 1) % o.every == 0]
            if due:
                event = _event(run, taken, seconds)
                for observer in due:
                    observer.after_step(event)
            if last or stop.signal_number or (step + 1) % save_every == 0:
                save()
            if stop.signal_number and not last:
                raise Stopped(step + 1, stop.signal_number)


def _event(run: "Run", taken: Taken, seconds: float) -> Step:
    done = run.progress.step
    return Step(
        step=done,
        steps=run.steps,
        terms=taken.means(),
        norm=float(taken.norm),
        lr=taken.lr,
        tokens=run.tokens(done),
        flops=run.flops(done),
        seconds=run.progress.seconds,
        tokens_per_second=(run.tokens(done) - run.tokens(done - 1)) / seconds,
        memory_bytes=peak_memory(run.device.value),
    )


def _added(parts) -> dict:
    total: dict = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total[name] + value if name in total else value
    return total


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
