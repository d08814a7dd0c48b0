"""What stops a run early: losses that are not finite, and signals; also, how much memory it takes."""

import math
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.recipe import UserError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals that ask a run to save and stop; SIGUSR1 is Slurm's warning that time is running out, SIGHUP says that the
terminal closes."""


class NotFinite(UserError):
    """A loss or gradient norm that is not finite; nothing was updated."""

    exit_code = 3  # lets a search for learning rates tell a rate that is too high from a user error


class Stopped(UserError):
    """A run or a study was asked to stop and has saved itself; `where` says how far it has come."""

    def __init__(self, where: str, signal_number: int, is_told_elsewhere: bool = False):
        super().__init__(f"stopped {where}; the same command goes on from there")
        self.exit_code, self.is_told_elsewhere = 128 + signal_number, is_told_elsewhere


def require_finite(
    sums: Mapping[str, Tensor], norm: Tensor, step: int, where: str, is_told_elsewhere: bool = False
) -> None:
    """Raises NotFinite, naming the step and its batch, before the update would spoil the weights."""
    if bad := [name for name, value in {**sums, "gradient norm": norm}.items() if not math.isfinite(value)]:
        error = NotFinite(
            f"step {step}: {' and '.join(bad)} not finite; nothing was updated. The batch: {where}. "
            "Checkpoints stand as they are; under another name, try a lower optimiser.lr, a longer schedule.warmup, "
            "or training.precision=float32"
        )
        error.is_told_elsewhere = is_told_elsewhere
        raise error


class StopRequest:
    """Turns SIGNALS into a request that the loop reads between steps; what this process ignores, as SIGHUP under nohup,
    it ignores here, too. Outside the main thread it hears none.

    A second SIGTERM or SIGINT acts at once. A second of the others does not: Slurm and torchrun, or a shell and its
    terminal, may each send one.
    """

    def __init__(self):
        self.signal_number: int | None = None

    def __enter__(self) -> "StopRequest":
        is_main = threading.current_thread() is threading.main_thread()  # Python hears signals nowhere else
        heard = [number for number in SIGNALS if is_main and signal.getsignal(number) != signal.SIG_IGN]
        self._previous: dict[int, Any] = {number: signal.signal(number, self._wish) for number in heard}
        self._on_terminal = [stream for stream in (1, 2) if os.isatty(stream)]
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _wish(self, number: int, _frame) -> None:
        self.signal_number = number
        if number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._previous[number])
        if number == signal.SIGHUP:  # to write to a terminal that is gone would be an error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for stream in self._on_terminal:
                os.dup2(nowhere, stream)
            os.close(nowhere)


def forget_peak(device: torch.device) -> None:
    """Resets the peak to the memory held now, on CUDA: what was measured before is no part of the training."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Peak bytes: of this process on CPU; of this process's tensors, since `forget_peak`, on CUDA."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Not ru_maxrss, which starts at the value of the parent process
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
