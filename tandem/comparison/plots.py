"""Loss curves: as a picture, and as one line of text for a terminal.

The data are the run's records (training/observers.py): records of kind "step" against the tokens trained on, raw as a
thin line and smoothed as a thick one, and records of kind "likelihood", measured on held-out text, as points.
"""

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tandem.disk import replace_file
from tandem.recipe import require
from tandem.training.display import loss_of

BARS = "▁▂▃▄▅▆▇█"


def plot_losses(name: str, records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the loss of a run against tokens of text, as a PNG at `path`; nothing where no step is recorded."""
    if not (steps := [record for record in records if record["kind"] == "step"]):
        return
    judged = [record for record in records if record["kind"] == "likelihood"]
    tokens = [record["tokens"] for record in steps]
    losses = [loss_of(record) for record in steps]
    with picture(path) as axes:
        axes.plot(tokens, losses, "C0", linewidth=0.6, alpha=0.3)
        means = smoothed_by_phase([record["phase"] for record in steps], losses)
        axes.plot(tokens, means, "C0", linewidth=1.6, label="training")
        if judged:
            numbers = [0, *(record["step"] for record in steps)]
            at = np.interp([record["step"] for record in judged], numbers, [0, *tokens])
            nats = [record.get("of_curve", record)["nats_per_token"] for record in judged]
            axes.plot(at, nats, "o", color="C0", markeredgecolor="white", markersize=6, label="held out")
        axes.set_xlabel("tokens of text trained on")
        axes.set_ylabel("loss (nats per token)")
        axes.xaxis.set_major_formatter(require("matplotlib.ticker", "plots").EngFormatter())
        axes.set_title(drawable(name))
        axes.legend(frameon=False)


def smoothed_by_phase(phases: Sequence[int], losses: Sequence[float]) -> np.ndarray:
    """Centred means over a fiftieth of each phase, with shorter windows at its ends. A trailing mean would lag."""
    means = []
    for part in np.split(np.array(losses, dtype=float), np.flatnonzero(np.diff(phases)) + 1):
        window = np.ones(len(part) // 50 | 1)
        means.append(np.convolve(part, window, "same") / np.convolve(np.ones(len(part)), window, "same"))
    return np.concatenate(means)


@contextlib.contextmanager
def picture(path: Path) -> Iterator[Any]:
    """Axes to draw on, written as a PNG at the end; a title is taken as it is, without formulas.

    Raises: UserError where matplotlib is missing.
    """
    figure = require("matplotlib.figure", "plots").Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.title.set_parse_math(False)  # numbers of logarithmic axes are formulas
    yield axes
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(written := io.BytesIO(), format="png")
    replace_file(path, written.getvalue())


def drawable(name: str) -> str:
    """A file's name without what no font has: bytes that are not Unicode."""
    return name.encode(errors="replace").decode()


def sparkline(values: Sequence[float]) -> str:
    """At most 60 bars, each the mean of its share of `values`, from the lowest ▁ to the highest █."""
    means = [float(np.mean(share)) for share in np.array_split(values, min(60, len(values)))]
    low, high = min(means), max(means)
    height = (high - low) / len(BARS) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((mean - low) / height))] for mean in means)
