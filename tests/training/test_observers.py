"""What a run records and shows: exact, lasting, and nothing shown that is not recorded."""

import contextlib
import io
import itertools
import json
import math
import os
import re
import signal
import struct
import sys
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.progress import TaskProgressColumn

from tandem.comparison.plots import picture, plot_losses, smoothed_by_phase
from tandem.recipe import UserError
from tandem.training import display as display_module
from tandem.training.display import TERMINAL, Display, Smoothed, clock, progress_bar, say, scaled, short
from tandem.training.folder import RunFolder
from tandem.training.observers import CLOCK_KEYS, Log, Step
from tandem.training.sinks import JsonLines

STEP = Step(
    step=1200,
    steps=3815,
    phase=0,
    terms={"nll": 3.412},
    norm=0.42,
    lr=6e-4,
    tokens=1200 * 131072,
    flops=1.53e9 * 1200 * 131072,
    seconds=678.0,
    tokens_per_second=232e3,
    flops_per_second=355e12,
    seconds_left=1477.0,
    memory_bytes=int(21.1 * 2**30),
)


def record(**changes) -> dict:
    return {"kind": "step", **asdict(replace(STEP, **changes))}


def make_log(path: Path, **config) -> Log:
    with RunFolder.start(path, "seed: 1\n") as folder:
        return Log(Log.Config(**config), folder, display=Display(Console(file=io.StringIO())))


def plain(**options) -> tuple[Display, io.StringIO]:
    out = io.StringIO()
    return Display(Console(file=out, width=80, highlight=False), **options), out


# JSON lines


def test_floats_read_back_bit_for_bit(tmp_path):
    values = [0.1, 1 / 3, math.pi, 5e-324, -0.0, 1.7976931348623157e308, struct.unpack("f", b"\x01\x02\x03\x04")[0]]
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for value in values:
        lines.write({"kind": "step", "step": 1, "terms": {"nll": value}})
    read = [r["terms"]["nll"] for r in RunFolder(tmp_path).records("step")]
    assert [struct.pack("d", value) for value in read] == [struct.pack("d", value) for value in values]


def test_what_is_not_finite_is_null_and_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    record = {"kind": "x", "step": 1, "norm": math.inf, "terms": {"nll": math.nan, "z": 1.5}, "low": -math.inf}
    lines.write(record)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(path.read_text(), parse_constant=refuse) == {
        "kind": "x",
        "step": 1,
        "norm": None,
        "terms": {"nll": None, "z": 1.5},
        "low": None,
        "not_finite": {"norm": "inf", "terms.nll": "nan", "low": "-inf"},
    }
    (read,) = RunFolder(tmp_path).records()
    assert repr(read) == repr(record)


def test_a_killed_process_loses_at_most_the_line_it_is_writing(tmp_path):
    pid = os.fork()
    if pid == 0:
        try:
            lines = JsonLines(tmp_path / "metrics.jsonl")
            for step in itertools.count(1):
                lines.write({"kind": "step", "step": step, "text": "x" * (step % 7) * 4000})
                (tmp_path / "written").write_text(str(step))
        finally:
            os._exit(1)
    while not (tmp_path / "written").exists():
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    steps = [r["step"] for r in RunFolder(tmp_path).records()]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= int((tmp_path / "written").read_text() or 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_told_without_a_traceback():
    with pytest.raises(UserError, match=r"/dev/full: not written .*No space left.*checkpoints stand"):
        JsonLines(Path("/dev/full")).write({"kind": "step", "step": 1})


# Log


def test_an_interrupted_record_ends_as_the_uninterrupted_one(tmp_path):
    def run(log: Log, first: int, last: int, speed: float):
        with log:
            for step in range(first, last):
                log.after_step(replace(STEP, step=step, terms={"nll": 1 / step}, seconds=step / speed))
                if step % 2 == 0:
                    log.write({"kind": "sample", "step": step, "text": f"after {step}"})

    run(make_log(tmp_path / "whole"), 1, 10, speed=1.0)
    run(make_log(tmp_path / "halted"), 1, 9, speed=0.5)
    folder = RunFolder.open(tmp_path / "halted")
    with open(folder.metrics, "a") as file:
        file.write('{"kind": "st')
    folder.truncate_metrics(6)
    run(make_log(tmp_path / "halted"), 7, 10, speed=0.7)

    def timeless(name: str) -> list[dict]:
        return [{k: v for k, v in r.items() if k not in CLOCK_KEYS} for r in RunFolder(tmp_path / name).records()]

    assert timeless("halted") == timeless("whole")
    assert len(timeless("whole")) == 13


def test_clock_keys_are_the_readings_of_a_step():
    assert {field.name for field in fields(Step)} - CLOCK_KEYS == {
        *("step", "steps", "phase", "terms", "norm", "lr", "tokens", "flops", "spikes", "skipped")
    }
    assert {field.name for field in fields(Step)} >= CLOCK_KEYS - {"training_seconds"}  # of a likelihood


def test_nothing_is_shown_that_is_not_recorded(tmp_path):
    log = make_log(tmp_path / "mine", every=7)
    assert log.every == 7
    log.after_step(STEP)
    log.write({"kind": "likelihood", "step": 1200, "nats_per_token": 3.287}, "3.287 nats/token")
    log.close()
    assert [r["kind"] for r in RunFolder.open(tmp_path / "mine").records()] == ["step", "likelihood"]
    assert RunFolder.open(tmp_path / "mine").records("step") == [record()]
    with pytest.raises(AssertionError):
        log.write({"kind": "likelihood"})  # could not be taken back when the run goes on from a checkpoint


# Display


def test_the_line_of_a_step():
    display, out = plain()
    display.write(record())
    assert out.getvalue() == (
        "step 1200/3815   31 %  loss 3.412 (last 3.412)  norm 0.42  lr 6.0e-4  232 k tok/s"
        "  355 TFLOP/s  21.1 GiB  24 min 37 s left\n"
    )


def test_smoothing_starts_anew_where_a_step_is_asked_something_else():
    display, out = plain(pause=0.0)
    losses = {"bag_nll": 9.0, "bag_kl": 8.0}, {"bag_nll": 7.0}, {"nll": 5.0}, {"nll": 4.0}, {"nll": 6.0}
    for step, (phase, terms) in enumerate(zip((0, 0, 2, 2, 4), losses, strict=True), 1):
        display.write(record(step=step, steps=5, phase=phase, terms=terms))
    shown = re.findall(r"loss ([\d.]+) \(last", out.getvalue())
    assert shown == ["9.000", "7.947", "5.000", "4.474", "6.000"]
    assert smoothed_by_phase(100 * [0] + 100 * [100], [5.0] * 100 + [3.0] * 100).tolist() == [5.0] * 100 + [3.0] * 100


def test_spikes_stand_in_the_line_of_a_step():
    display, out = plain()
    display.write(record(step=3815, spikes=3, skipped=2))
    assert out.getvalue().endswith("21.1 GiB  3 spikes, 2 skipped\n")


def test_without_a_terminal_a_line_comes_every_few_seconds_and_at_the_end():
    seconds = [0.0]
    display, out = plain(pause=10.0, now=lambda: seconds[0])
    for step in range(1, 31):
        seconds[0] = float(step)
        display.write(record(step=step, steps=30))
    display.close()
    shown = [line.split("/")[0] for line in out.getvalue().splitlines()]
    assert shown == ["step  1", "step 11", "step 21", "step 30"]


def test_a_run_that_stops_early_shows_its_last_step_once():
    display, out = plain(pause=10.0, now=lambda: 0.0)
    for step in (1, 2, 3):
        display.write(record(step=step, steps=30))
    display.close()
    display.close()
    assert [line.split("/")[0] for line in out.getvalue().splitlines()] == ["step  1", "step  3"]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_last_step_is_shown_before_what_is_said_of_it(terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, highlight=False, _environ={"TERM": "xterm"})
    display = Display(console)
    for step in (1, 2, 3):
        display.write(record(step=step, steps=3))
    display.write({"kind": "likelihood", "step": 3}, "3.287 nats/token")
    display.close()
    *_, last_step, likelihood = out.getvalue().splitlines()
    assert "step 3/3" in last_step
    assert "likelihood  3.287 nats/token" in likelihood


def test_other_records_show_their_text_and_nothing_else(capsys):
    display, out = plain()
    text = "a [bold] word :smile: at 3:100:4" + 30 * " long"
    display.write({"kind": "sample", "step": 1, "text": "unsaid"})
    display.write({"kind": "sample", "step": 1}, text)
    say(text, "sample")
    assert out.getvalue() == capsys.readouterr().out == f"sample      {text}\n"


def test_a_run_goes_on_when_nobody_reads_what_it_prints(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    gone = []
    monkeypatch.setattr(display_module.os, "dup2", lambda new, old: gone.append(old))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(fileno=lambda: 1))
    with contextlib.suppress(BrokenPipeError), os.fdopen(write, "w") as out:
        console = type(TERMINAL)(file=out)
        display = Display(console)
        display.write({"kind": "sample", "step": 1}, "once upon a time")
        display.write({"kind": "sample", "step": 2}, "there was")
    assert gone == [1] and console.quiet


@pytest.mark.parametrize("name", ["mine", "a$\\b$c", "lr$2^$3", "caf\udce9", "_x", "</svg>"])
def test_a_run_of_any_name_has_a_curve(tmp_path, name):
    plot_losses(name, [record(step=1), record(step=2)], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_a_picture_takes_its_title_as_it_is_and_powers_of_ten_as_formulas(tmp_path):
    with picture(tmp_path / "drawn.png") as axes:
        axes.set_title("a$x$_{b")
        axes.semilogy([1, 10])
    assert not axes.title.get_parse_math()
    assert all(tick.label1.get_parse_math() for tick in axes.yaxis.get_major_ticks())


def test_on_a_terminal_a_bar_stands_below_what_is_printed_and_a_line_remains():
    out = io.StringIO()
    display = Display(Console(file=out, force_terminal=True, width=120, highlight=False, _environ={"TERM": "xterm"}))
    display.write(record(step=1))
    assert "━" in out.getvalue()
    display.write({"kind": "sample", "step": 1}, "once upon a time")
    display.write(record(step=2))
    display.close()
    assert "sample      once upon a time\n" in out.getvalue()
    last = out.getvalue().splitlines()[-1]
    assert last.endswith("left")
    assert "step    2/3815" in last


@pytest.mark.parametrize("width", [80, 120, 200])
def test_on_a_terminal_of_any_width_the_whole_line_stands_below_the_bar(width):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, _environ={"TERM": "xterm"})
    display = Display(console)
    display.write(record(step=1))
    frame = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", out.getvalue()).rpartition("\r")[2]
    bar, *below = frame.splitlines()
    assert "━" in bar and "step" not in bar
    assert " ".join(" ".join(below).split()) == " ".join(display.waiting.split())


def test_progress_is_a_bar_on_a_terminal():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    with progress_bar("scoring books", TaskProgressColumn(), console) as progress:
        progress(3, 4)
    assert "scoring books" in out.getvalue() and "75%" in out.getvalue()


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal():
    out, clock = io.StringIO(), iter([0, 29, 30, 59, 61, 91])
    console = Console(file=out, force_terminal=False)
    with progress_bar("scoring books", TaskProgressColumn(), console, lambda: next(clock)) as progress:
        for done, total in ((1, 8), (2, 8), (3, 8), (4, 8), (7000, None)):
            progress(done, total)
    assert out.getvalue().splitlines() == ["scoring books, 25 %", "scoring books, 50 %", "scoring books, 7 k"]


def test_smoothing_starts_unbiased_and_follows():
    smoothed = Smoothed(0.5)
    assert [smoothed(8.0), smoothed(8.0), smoothed(1.0)] == [8.0, 8.0, 4.0]


@pytest.mark.parametrize(
    ("function", "number", "text"),
    [
        (scaled, 0, "0"),
        (scaled, 999, "999"),
        (scaled, 999.9, "1 k"),
        (scaled, 232_000, "232 k"),
        (scaled, 1_234_567, "1.23 M"),
        (scaled, 7.66e17, "766 P"),
        (scaled, 7.66e18, "7.66 E"),
        (short, 6e-4, "6.0e-4"),
        (short, 0.0, "0.0e0"),
        (short, 12.0, "1.2e1"),
        (clock, 0.4, "0 s"),
        (clock, 89.6, "1 min 30 s"),
        (clock, 36 * 60 + 37, "36 min 37 s"),
        (clock, 3599.7, "1 h 00 min"),
        (clock, 2 * 3600 + 5 * 60, "2 h 05 min"),
    ],
)
def test_numbers_as_people_say_them(function, number, text):
    assert function(number) == text


# TensorBoard


def test_tensorboard_shows_every_number_and_hides_what_came_after_the_checkpoint(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with make_log(tmp_path / "mine") as log:  # a record that was made before TensorBoard was asked for
        log.after_step(replace(STEP, step=1, norm=1 / 4))
    with make_log(tmp_path / "mine", tensorboard=True) as log:
        for step in (2, 3):
            log.after_step(replace(STEP, step=step, norm=step / 4))
    with RunFolder.start(tmp_path / "mine", "seed: 1\n") as folder:
        log = Log(Log.Config(tensorboard=True), folder, step=2, display=plain()[0])
    log.after_step(replace(STEP, step=3, norm=9.0))
    log.write({"kind": "likelihood", "step": 3, "nats_per_token": 3.25, "corpus": "wiki"})
    log.close()

    events = EventAccumulator(str(tmp_path / "mine" / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("step/norm")] == [(1, 0.25), (2, 0.5), (3, 9.0)]
    assert [e.value for e in events.Scalars("step/terms/nll")] == [pytest.approx(3.412)] * 3
    assert [e.value for e in events.Scalars("likelihood/nats_per_token")] == [3.25]
