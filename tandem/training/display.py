"""A run on the terminal: one line that is updated in place or, where there is no terminal, one line every few seconds.

    step 120/381   31 %  loss 3.412 (last 3.398)  norm 0.42  lr 6.0e-4  232 k tok/s  355 TFLOP/s  21.1 GiB  25 min left
    likelihood  3.287 nats/token, 1.031 bits/byte on wiki-val

`loss` is smoothed, starting afresh when a phase changes what it measures. FLOP/s are those of all devices that the
network needs (recomputation is not counted); over their peak, they are MFU. The time left is that of the remaining
FLOPs at the current speed.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tandem.recipe import counted, parse_budget

Told = Callable[[int, int | None], None]
"""Called with (done, total); the total is None where it is not known."""

SHOWN = 4
"""Most terms on a step's line, besides the loss; the record has them all."""

LOG_PAUSE = 30.0
"""Seconds between lines of progress outside training, where there is no terminal."""


class _Terminal(Console):
    def on_broken_pipe(self) -> None:
        """A run goes on when nobody reads what it prints any more; rich would end the process."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


TERMINAL = _Terminal(highlight=False, markup=False, emoji=False)
"""Where everything is shown, verbatim: a text may contain :smile: or [b]. Quiet in all but a run's first process."""


def say(text: object, title: str = "") -> None:
    """Prints one or more lines; without `soft_wrap`, rich would wrap at 80 columns where there is no terminal."""
    TERMINAL.print(titled(title, text) if title else text, soft_wrap=True)


def titled(title: str, text: object) -> str:
    """A line of a page of titles and texts, in two columns."""
    return f"{title:<11} {text}"


class Display:
    """A sink for records (training/observers.py) that prints to `console`, by default TERMINAL."""

    def __init__(self, console: Console | None = None, pause: float = 10.0, now: Callable[[], float] = time.monotonic):
        """`pause`: seconds between lines where there is no terminal; `now`: a clock in seconds."""
        self.console = console or TERMINAL
        watched = self.console.is_terminal and not self.console.is_dumb_terminal
        self.live = Live(console=self.console, auto_refresh=False, transient=True) if watched else None
        self.pause = 0.1 if watched else pause
        self.now = now
        self.shown_at = float("-inf")
        self.smoothed, self.phase = Smoothed(), 0
        self.waiting = ""
        """The newest line, until it is printed to the scrollback."""

    def write(self, record: dict[str, Any], text: str = "") -> None:
        if record["kind"] != "step":
            if text:
                self._print(titled(record["kind"], text))
            return
        if record["phase"] != self.phase:  # a loss over bags says nothing about one over tokens
            self.smoothed, self.phase = Smoothed(), record["phase"]
        self.waiting = progress_line(record, self.smoothed(loss_of(record)))
        if record["step"] == record["steps"]:
            self.close()
        elif self.now() - self.shown_at >= self.pause:
            self.shown_at = self.now()
            self._show(record["step"], record["steps"])

    def close(self) -> None:
        """Prints the line of the newest step, unless it is printed already."""
        if self.live is not None:
            self.live.stop()
        if self.waiting:
            self._print(self.waiting)
        self.waiting = ""

    def _show(self, step: int, steps: int) -> None:
        if self.live is None:
            self.close()
            return
        bar = ProgressBar(total=steps, completed=step, width=min(self.console.width, 100))
        self.live.start()  # does nothing when it has started
        rows = Table.grid()  # a bar alone does not end its line
        rows.add_row(bar)
        rows.add_row(Text(self.waiting))
        self.live.update(rows, refresh=True)

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, emoji=False, soft_wrap=True)


@contextlib.contextmanager
def progress_bar(
    title: str, count: ProgressColumn, console: Console = TERMINAL, now: Callable[[], float] = time.monotonic
) -> Iterator[Told]:
    """Yields a function that shows (done, total). The bar appears at its first call and disappears at the end.

    Where there is no terminal, a line says how far it is every LOG_PAUSE seconds; shorter work says nothing.
    """
    if not console.is_terminal:
        due = now() + LOG_PAUSE

        def tell(done: int, total: int | None) -> None:
            nonlocal due
            if (at := now()) >= due:
                due = at + LOG_PAUSE
                share = f"{100 * done // total} %" if total else scaled(done)
                console.print(f"{title}, {share}", soft_wrap=True)

        yield tell
        return
    columns = TextColumn(title, markup=False), BarColumn(), count, TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None, visible=False)

        def show(done: int, total: int | None) -> None:
            bar.update(task, completed=done, total=total, visible=True)

        yield show


class Smoothed:
    """Mean of the values so far, each weighing `decay` times the one after it."""

    def __init__(self, decay: float = 0.9):
        self.decay, self.total, self.weight = decay, 0.0, 0.0

    def __call__(self, value: float) -> float:
        self.total = self.decay * self.total + value
        self.weight = self.decay * self.weight + 1
        return self.total / self.weight


def loss_of(record: Mapping[str, Any]) -> float:
    """The loss of a record of kind "step": the first of its terms."""
    return next(iter(record["terms"].values()))


def progress_line(record: dict[str, Any], loss: float) -> str:
    """A record of kind "step" in one line; `loss` is the smoothed one."""
    (_, last), *others = record["terms"].items()
    parts = [_place(record), f"loss {loss:.3f} (last {last:.3f})"]
    parts += [f"{name} {value:.3f}" for name, value in others[:SHOWN]]
    parts += [f"norm {record['norm']:.2f}", f"lr {short(record['lr'])}"]
    parts += [f"{scaled(record['tokens_per_second'])} tok/s", f"{scaled(record['flops_per_second'])}FLOP/s"]
    parts += [f"{record['memory_bytes'] / 2**30:.1f} GiB"]
    parts += [spikes_in_words(record)] if record.get("spikes") else []
    return "  ".join(parts) + _time_left(record)


def brief_line(record: dict[str, Any]) -> str:
    """The same shorter, for a line beside those of other runs; the loss is the step's own."""
    speed = f"{scaled(record['tokens_per_second'])} tok/s"
    return f"{_place(record)}  loss {loss_of(record):.3f}  {speed}{_time_left(record)}"


def _place(record: dict[str, Any]) -> str:
    step, steps = record["step"], record["steps"]
    return f"step {step:>{len(str(steps))}}/{steps}  {100 * step // steps:>3} %"


def _time_left(record: dict[str, Any]) -> str:
    return f"  {clock(record['seconds_left'])} left" if record["step"] < record["steps"] else ""


def spikes_in_words(record: dict[str, Any]) -> str:
    """'3 spikes, 2 skipped'."""
    return counted(record["spikes"], "spikes") + (f", {record['skipped']} skipped" if record["skipped"] else "")


def short(number: float) -> str:
    """0.0006 as '6.0e-4'."""
    digits, _, exponent = f"{number:.1e}".partition("e")
    return f"{digits}e{int(exponent)}"


def scaled(number: float) -> str:
    """1234567 as '1.23 M'."""
    for prefix in ("", " k", " M", " G", " T", " P"):
        if abs(number) < 999.5:
            return f"{number:.3g}{prefix}"
        number /= 1000
    return f"{number:.3g} E"


def budget_in_words(text: str) -> str:
    """'2.5e13 flops' as '25 T flops'."""
    budget = parse_budget(text)
    return f"{scaled(budget.amount)} {budget.unit}"


def clock(seconds: float) -> str:
    """Seconds as people write them."""
    if seconds < 89.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
