"""Where records go: JSON lines, TensorBoard, Weights & Biases. (The terminal is training/display.py.)

A record is a dict with `kind`, `step`, and numbers, texts and further dicts. JSON lines are the record of the run;
everything else is a view made from them alone.
"""

import hashlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tandem.disk import replace_file
from tandem.recipe import UserError, require
from tandem.training.folder import RunFolder, leaves, read_part

Record = dict[str, Any]


class Sink(Protocol):
    """Where records go. `text` is what a terminal shows of a record that is not a step; empty: nothing."""

    def write(self, record: Record, text: str = "") -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One JSON object a line, appended by one write: a process that is killed loses at most the line it is writing."""

    def __init__(self, path: Path):
        self.path = path
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115

    def write(self, record: Record, text: str = "") -> None:
        data = as_line(record)
        try:
            while data:  # a disk that is nearly full takes a part, and refuses the rest
                data = data[self.file.write(data) :]
        except OSError as error:
            raise UserError(
                f"{self.path}: not written ({error}); checkpoints stand as they are. "
                "Make room on the disk and start the same command again"
            ) from error

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """Every number of every record as a scalar, `kind/key`; earlier entries for steps after `step` are hidden.

    What was recorded before it began, such as steps taken over from a trunk, is written as it begins.
    """

    def __init__(self, folder: RunFolder, step: int):
        from torch.utils.tensorboard import SummaryWriter

        before = [] if folder.tensorboard.exists() else folder.records()
        self.writer = SummaryWriter(str(folder.tensorboard), purge_step=step + 1)
        for record in before:
            self.write(record)

    def write(self, record: Record, text: str = "") -> None:
        for key, value in _numbers(record).items():
            self.writer.add_scalar(key, value, record["step"])

    def close(self) -> None:
        self.writer.close()


class WandB:
    """Every number of every record, `kind/key` over `step`, in one W&B run for as long as the folder lives; the values
    of the recipe are its config, by which W&B filters and groups runs.

    The W&B run is found again by an id made from the folder's name and the first process that trained in it, so a copy
    under another name is another run. `wandb.json` in the folder keeps, by kind, the last step that was sent: steps
    that are repeated after the last checkpoint are not sent twice, and what was recorded before but never sent, such as
    steps taken over from a trunk, is sent first.

    A long run does not end because the network connection does: an error of W&B is printed once, on standard error,
    and nothing more is sent. W&B writes late, so of a process that is killed it lacks the last records. The record on
    disk has everything.
    """

    def __init__(self, folder: RunFolder, project: str):
        self.wandb = require("wandb", "wandb")
        self.sent_file, self.project = folder.path / "wandb.json", project
        self.sent: dict[str, int] = read_part(self.sent_file) if self.sent_file.exists() else {}
        self.before = dict(self.sent)
        first = read_part(folder.environment, list)[0]
        self.id = hashlib.sha256(json.dumps([folder.path.name, first]).encode()).hexdigest()[:16]
        self.run: Any = None
        self._try(lambda: self._start(folder))

    def _start(self, folder: RunFolder) -> None:
        # The terminal belongs to the display. What a dead network leaves unsent at the end waits for `wandb sync`.
        waits = {"finish_timeout": 60.0, "finish_timeout_raises": True}
        settings = self.wandb.Settings(console="off", silent=True, **waits)
        self.run = self.wandb.init(
            **{"project": self.project, "id": self.id, "name": folder.path.name, "resume": "allow"},
            **{"dir": str(folder.path), "config": read_part(folder.recipe), "settings": settings},
        )
        self.run.define_metric("*", step_metric="step")  # W&B's own counter would refuse two records of one step
        for record in folder.records():
            self.write(record)

    def write(self, record: Record, text: str = "") -> None:
        if self.run is not None and record["step"] > self.before.get(record["kind"], -1):
            self._try(lambda: self._send(record))

    def _send(self, record: Record) -> None:
        self.run.log({"step": record["step"], **_numbers(record)})
        self.sent[record["kind"]] = record["step"]
        replace_file(self.sent_file, json.dumps(self.sent).encode())

    def close(self) -> None:
        if self.run is not None:
            self._try(self.run.finish)

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except (self.wandb.Error, OSError) as error:
            self.run = None
            print(f"Weights & Biases: {error}; nothing more is sent there. The record is whole.", file=sys.stderr)


def _numbers(record: Record) -> dict[str, int | float]:
    """Every number of a record by `kind/key`, except its step."""
    numbers = ((key, value) for key, value in leaves(record) if isinstance(value, int | float) and key != "step")
    return {f"{record['kind']}/{key.replace('.', '/')}": value for key, value in numbers}


def as_line(record: Record) -> bytes:
    """A record as a line of JSON.

    Floats are written so that they read back bit for bit. JSON has neither nan nor inf: such a value is null, and
    named in `not_finite`, as in {"norm": null, "not_finite": {"norm": "inf"}}.
    """
    odd = {key: repr(value) for key, value in leaves(record) if _is_odd(value)}
    line = json.dumps(_finite(record) | {"not_finite": odd} if odd else record, ensure_ascii=False, allow_nan=False)
    return line.encode() + b"\n"


def _finite(record: Record) -> Record:
    """The record with null in place of what is not finite."""
    return {k: _finite(v) if isinstance(v, dict) else None if _is_odd(v) else v for k, v in record.items()}


def _is_odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
