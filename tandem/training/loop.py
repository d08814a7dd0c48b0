"""The training loop: one screen, for every network and objective.

A step is a pure function of the weights and of (seed, step): batches are made from the step's number, targets are
counted over all micro-batches of all processes before the first backward pass, and their losses add up to the step's
mean. Apart from checkpoints, only observers write; they are called at multiples of their `every` and after the last
step. A signal to any process is shared with all at the start of their next step, and they stop after that step; one
that comes too late for that stops them once the last step is saved.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tandem.training.health import Stopped, StopRequest, forget_peak, peak_memory, require_finite
from tandem.training.observers import Observer, Step
from tandem.training.parallel import adding, whole

if TYPE_CHECKING:
    from tandem.training.run import Run

Number = TypeVar("Number", int, Tensor)


@dataclass
class Taken:
    """One step of all processes: summed losses in nats and counts by name, gradient norm before clipping, learning
    rate, the signal, if any, that asked a process to stop before it, and the batches of the step after it."""

    sums: dict[str, Tensor]
    counts: dict[str, int]
    norm: Tensor
    lr: float
    asked: int | None
    following: Sequence[Any] = ()

    def means(self) -> dict[str, float]:
        return {name: float(total) / max(1, self.counts[name]) for name, total in self.sums.items()}

    def level(self) -> dict[str, float]:
        """The values in which spikes show. Both were already read, to check that they are finite."""
        return {"loss": next(iter(self.means().values())), "norm": float(self.norm)}


def take_step(run: "Run", step: int, asked: int | None = None, batches: Sequence[Any] = ()) -> Taken:
    """One update of run.network from the batches of `step`, made here unless given; `asked`: the signal that asked this
    process to stop."""
    batches = batches or run.batches(step)
    counts, asked = run.ranks.total_counts(_added(run.objective.count(run.network, batch) for batch in batches), asked)
    sums: dict[str, Tensor] = {}
    for index, batch in enumerate(batches, 1):
        batch = batch.to(run.device.value)
        with adding(run.model, is_last=index == len(batches)):
            with run.autocast():
                loss, terms = run.model(batch, counts)
            loss.backward()
        sums = _added((sums, terms))
    sums, norm = run.ranks.total_sums(sums), whole(run.optimiser.clip())
    following = run.batches(step + 1) if step + 1 < run.steps else []  # made while a device is busy: CUDA runs behind
    require_finite(sums, norm, step + 1, run.place(step), is_told_elsewhere=not run.ranks.is_first)
    taken = Taken(sums, counts, norm, 0.0, asked, following)
    skip = run.optimiser.config.skip_spikes
    is_spike = run.progress.is_spike(taken.level(), run.optimiser.config.spike, skip)
    taken.lr = run.optimiser.step(run.schedule(step), update=not (is_spike and skip))
    return taken


def train(
    run: "Run",
    observers: Sequence[Observer],
    save: Callable[[], object],
    save_every: int,
    save_at: Collection[int] = (),
) -> None:
    """Trains `run` from its current step to its end; raises Stopped, after saving, when a signal asks for it.

    It also saves after every `save_every` steps, and after those of `save_at`.
    """
    forget_peak(run.device.value)
    with StopRequest() as stop:
        batches: Sequence[Any] = ()
        for step in range(run.progress.step, run.steps):
            run.enter(step)
            began = time.perf_counter()
            taken = take_step(run, step, stop.signal_number, batches)
            batches = taken.following
            finish(run.device.value)
            seconds = time.perf_counter() - began
            run.progress.step, run.progress.seconds = step + 1, run.progress.seconds + seconds
            last = step + 1 == run.steps
            due = [o for o in observers if last or (step + 1) % o.every == 0]
            if due:
                event = _event(run, taken, seconds)
                for observer in due:
                    with run.ranks.together():
                        observer.after_step(event)
            if last or taken.asked or (step + 1) % save_every == 0 or step + 1 in save_at:
                save()
            if taken.asked and not last:
                raise Stopped(f"after step {step + 1}", taken.asked, not run.ranks.is_first)
    _, asked = run.ranks.total_counts({}, stop.signal_number)  # a signal before or during the last step
    if asked:
        raise Stopped(f"after step {run.steps}", asked, not run.ranks.is_first)


def _event(run: "Run", taken: Taken, seconds: float) -> Step:
    done = run.progress.step
    flops = run.flops(done)
    rate = run.share(done - 1) * (flops - run.flops(done - 1)) / seconds
    return Step(
        step=done,
        steps=run.steps,
        phase=run.view.at(done - 1).first,
        terms=taken.means(),
        norm=float(taken.norm),
        lr=taken.lr,
        tokens=run.tokens(done),
        flops=flops,
        seconds=run.progress.seconds,
        tokens_per_second=(run.tokens(done) - run.tokens(done - 1)) / seconds,
        flops_per_second=rate,
        seconds_left=(run.flops(run.steps) - flops) / rate,
        memory_bytes=int(run.ranks.largest(peak_memory(run.device.value))),
        spikes=run.progress.spikes,
        skipped=run.progress.skipped,
    )


def _added(parts: Iterable[Mapping[str, Number]]) -> dict[str, Number]:
    total: dict[str, Number] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total[name] + value if name in total else value
    return total


def finish(device: torch.device) -> None:
    """Waits until the device has finished its work, so that a clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
