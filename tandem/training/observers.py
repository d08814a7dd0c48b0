"""What a run shows and records: apart from checkpoints, the only code of training that writes anything.

The loop calls observers; one of them is the log. The log receives records, dicts with `kind` and `step`:

    log.after_step(Step(...))                     {"kind": "step", "step": 1200, "terms": {"nll": 3.4}, ...}
    log.write({"kind": "sample", "step": 1200, "text": text}, text)    another kind, and how a terminal says it

Every record goes to every sink (training/sinks.py): JSON lines, which are the record of the run, and views of it.
A sink sees nothing but records, so nothing is shown that is not recorded.
"""

from dataclasses import asdict, dataclass
from typing import Protocol

from pydantic import Field

from tandem.recipe import Settings, register, require
from tandem.training.display import Display
from tandem.training.folder import RunFolder
from tandem.training.sinks import JsonLines, Record, Sink, TensorBoard, WandB

CLOCK_KEYS = frozenset(
    {"seconds", "training_seconds", "tokens_per_second", "flops_per_second", "seconds_left", "memory_bytes"}
)
"""Keys that depend on the clock or the machine; all others are equal, bit for bit, when a run is repeated."""


@dataclass(frozen=True)
class Step:
    """One optimisation step, as the loop reports it.

    step: steps finished.  steps: of the whole run.  phase: the first step of the phase (objectives/phases.py).
    terms: mean nats by name, the loss first.  norm: of the gradient before clipping.  lr: learning rate.
    tokens, flops, seconds: spent on training since step 0, in all processes that trained this run.
    tokens_per_second, flops_per_second: of this step, over all processes; recomputation is not counted.
    seconds_left: for the remaining FLOPs at this speed.
    memory_bytes: at the peak of the process that took most.
    spikes, skipped: steps so far that were spikes (training/progress.py), and those of them that updated nothing.
    """

    step: int
    steps: int
    phase: int
    terms: dict[str, float]
    norm: float
    lr: float
    tokens: int
    flops: float
    seconds: float
    tokens_per_second: float
    flops_per_second: float
    seconds_left: float
    memory_bytes: int
    spikes: int = 0
    skipped: int = 0


class Observer(Protocol):
    """Called by the loop after every step whose number `every` divides, and after the last."""

    @property
    def every(self) -> int: ...

    def after_step(self, step: Step) -> None: ...


@register("log")
class Log:
    """Record of the run: always JSON lines on disk, and what is shown of them."""

    class Config(Settings):
        every: int = Field(10, ge=1)
        """Steps between lines."""
        tensorboard: bool = False
        """Also write the record for TensorBoard."""
        wandb: str | None = Field(None, min_length=1)
        """Weights & Biases project that also gets the record; WANDB_MODE=offline keeps it on this machine."""

    def __init__(
        self, config: Config, folder: RunFolder, step: int = 0, display: Sink | None = None, writes: bool = True
    ):
        """`step`: where the run resumes; `display`: in place of the terminal; `writes`: false discards all records."""
        self.every = config.every
        self.sinks: list[Sink] = []
        if not writes:
            return
        self.sinks = [JsonLines(folder.metrics), display or Display()]
        if config.tensorboard:
            self.sinks.append(TensorBoard(folder, step))
        if config.wandb:
            self.sinks.append(WandB(folder, config.wandb))

    @staticmethod
    def require(config: Config) -> None:
        """Raises: UserError where a package that it writes with is not installed."""
        if config.tensorboard:
            require("tensorboard", "tensorboard")
        if config.wandb:
            require("wandb", "wandb")

    def after_step(self, step: Step) -> None:
        self.write({"kind": "step", **asdict(step)})

    def write(self, record: Record, text: str = "") -> None:
        assert {"kind", "step"} <= record.keys(), record  # a resumed run drops by step what it will record again
        for sink in self.sinks:
            sink.write(record, text)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_) -> None:
        self.close()
