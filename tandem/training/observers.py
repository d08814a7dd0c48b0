"""What a run shows and leaves: the only code of training that writes anything.

The loop calls observers; one of them is the log. What the log is told is a record, a dict with `kind` and `step`:

    log.after_step(Step(...))                     {"kind": "step", "step": 1200, "terms": {"nll": 3.4}, ...}
    log.write({"kind": "sample", "step": 1200, "text": text}, text)    another kind, and how a terminal says it

Every record goes to every sink: JSON lines, which are the record of the run, and views of it (terminal, TensorBoard).
A sink sees nothing but records, so nothing is shown that is not recorded.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from tandem.recipe import Settings, UserError, register, require
from tandem.training.display import Display
from tandem.training.folder import RunFolder

Record = dict[str, Any]

CLOCK_KEYS = frozenset({"seconds", "tokens_per_second", "memory_bytes"})
"""Keys of what is read off the clock or the machine; all else is equal, bit for bit, when a run is repeated."""


@dataclass(frozen=True)
class Step:
    """One optimisation step, as the loop tells it.

    step: steps finished.  steps: of the whole run; None where that is not known.
    terms: mean nats by name, the loss first.  norm: of the gradient before clipping.  lr: learning rate.
    tokens, flops, seconds: spent on training since step 0, in all processes that trained this run.
    tokens_per_second: now.  memory_bytes: at the peak of the process that took most.
    """

    step: int
    steps: int | None
    terms: dict[str, float]
    norm: float
    lr: float
    tokens: int
    flops: float
    seconds: float
    tokens_per_second: float
    memory_bytes: int


class Observer(Protocol):
    """What the loop calls: after every step that `every` divides, and after the last."""

    @property
    def every(self) -> int: ...

    def after_step(self, step: Step) -> None: ...

    def close(self) -> None: ...


class Sink(Protocol):
    """Where records go. `text` is what a terminal shows of a record that is not a step; empty: nothing."""

    def write(self, record: Record, text: str = "") -> None: ...

    def close(self) -> None: ...


@register("log")
class Log:
    """Record of the run: JSON lines on disk always, and what is shown of them."""

    class Config(Settings):
        every: int = Field(10, ge=1)
        """Steps between lines."""
        tensorboard: bool = False
        """Write the same for TensorBoard, too."""

    def __init__(
        self, config: Config, folder: RunFolder, step: int = 0, display: Sink | None = None, writes: bool = True
    ):
        """`step`: where the run goes on from; `display`: in place of the terminal; `writes`: or is told and silent."""
        self.every = config.every
        self.sinks: list[Sink] = []
        if not writes:
            return
        self.sinks = [JsonLines(folder.metrics), display or Display()]
        if config.tensorboard:
            self.sinks.append(TensorBoard(folder.tensorboard, step))

    def after_step(self, step: Step) -> None:
        self.write({"kind": "step", **asdict(step)})

    def write(self, record: Record, text: str = "") -> None:
        assert {"kind", "step"} <= record.keys(), record  # a run that goes on drops by step what it will record again
        for sink in self.sinks:
            sink.write(record, text)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_) -> None:
        self.close()


class JsonLines:
    """One JSON object a line, appended by one write: a process that is killed loses at most the line it is writing.

    Floats are written so that they read back bit for bit. JSON knows neither nan nor inf: such a value is null, and
    named in `not_finite`, as in {"norm": null, "not_finite": {"norm": "inf"}}.
    """

    def __init__(self, path: Path):
        self.path = path
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115

    def write(self, record: Record, text: str = "") -> None:
        odd = {key: repr(value) for key, value in leaves(record) if _is_odd(value)}
        line = json.dumps(_finite(record) | {"not_finite": odd} if odd else record, ensure_ascii=False, allow_nan=False)
        data = line.encode() + b"\n"
        try:
            while data:  # a disk that is nearly full takes a part, and refuses the rest
                data = data[self.file.write(data) :]
        except OSError as error:
            raise UserError(
                f"{self.path}: not written ({error}); the last checkpoint stands. "
                "Make room on the disk and start the same command again"
            ) from error

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """Every number of every record as a scalar, `kind/key`; what lies after `step` from before is hidden."""

    def __init__(self, folder: Path, step: int):
        require("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, record: Record, text: str = "") -> None:
        for key, value in leaves(record):
            if isinstance(value, int | float) and key != "step":
                self.writer.add_scalar(f"{record['kind']}/{key.replace('.', '/')}", value, record["step"])

    def close(self) -> None:
        self.writer.close()


def leaves(record: Record, above: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in a record that is not a mapping itself."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _finite(record: Record) -> Record:
    """The record with null in place of what is not finite."""
    return {k: _finite(v) if isinstance(v, dict) else None if _is_odd(v) else v for k, v in record.items()}


def _is_odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
