"""The switch from bags to tokens, as the record of a run tells it: how high the loss jumps, and for how long.

    in bags         6.0 5.9 5.8
    in tokens                   7.1 6.0 5.6 5.4 5.2       jump 1.3 = 7.1 - 5.8, recovered at the third record
    a baseline      6.4 6.0 5.8 5.6 5.5 5.4 5.4 5.3       below it from the last record on

    tandem analyse transition runs/bags baseline=runs/next_token

The losses are those of single training steps, every tenth unless `log.every` says otherwise; the jump is as exact as
the steps around the switch are recorded. Before it, the loss asks for bags. The baseline is compared where it has spent
as many training FLOPs. Where there are experts, the load of the busiest is told on both sides.

Source: Token Superposition Training (arXiv 2605.06546; its authors' article tells of 1 to 2 nats and a few thousand
steps). Steps until the loss is below the baseline's are ours.
"""

import math
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from tandem.analysis.analysis import Analysis
from tandem.recipe import Settings, UserError, register
from tandem.training.folder import RunFolder, read_part

BAGS = "bag_nll"
"""Of steps in bags, their loss."""
LOAD = "load_max"
"""Of the busiest expert, 1 if it is even."""


def trailing_mean(values: np.ndarray, n: int) -> np.ndarray:
    """Mean of each value and the n - 1 before it, or as many as there are."""
    sums = np.concatenate([[0.0], values.cumsum()])
    end = np.arange(1, len(sums))
    start = np.maximum(end - n, 0)
    return (sums[end] - sums[start]) / (end - start)


def course(records: list[dict[str, Any]]) -> np.ndarray:
    """(3, R): the number of each recorded step, training FLOPs by then, and its loss in nats."""
    return np.array([(record["step"], record["flops"], _loss(record)) for record in records]).T


def phases(folder: RunFolder) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Records of the steps before a run's last phase, and of those in it. A loss that is no number is left out.

    Raises: UserError where there are none.
    """
    steps = [record for record in folder.records("step") if math.isfinite(_loss(record))]
    if not steps:
        raise UserError(f"{folder.path}: no step is recorded yet; train the run first")
    parts = groupby(steps, lambda record: record["phase"] == steps[-1]["phase"])
    *before, last = (list(part) for _, part in parts)
    return [*chain(*before)], last


def next_tokens(folder: RunFolder) -> list[dict[str, Any]]:
    """Records of the steps of a run that asked for next tokens all along.

    Raises: UserError where it is another, whose losses would not compare.
    """
    if (name := read_part(folder.recipe)["objective"]["name"]) != "next_token":
        raise UserError(
            f"analysis.baseline = {folder.path}: has objective {name}; give a run of next_token, on the same text"
        )
    return phases(folder)[1]


@register("analysis", "transition")
class Transition(Analysis):
    """How high the loss jumps where bags become tokens, and how long it takes to recover and to pass a baseline."""

    trained = reads_text = False

    class Config(Settings):
        baseline: str | None = None
        """Folder of a run that asked for next tokens all along; null: no comparison."""
        smooth: int = Field(20, ge=1)
        """Records in a mean; only the loss right after the switch is that of one step."""

    def measure(self, run: object) -> dict[str, Any]:
        """Loss, gradient norm and load on both sides of the switch; steps from there until the loss is as low as before
        it, and until it stays below the baseline's; null: not in this run."""
        assert self.folder is not None
        before, after = phases(self.folder)
        if not before or BAGS not in before[-1]["terms"]:
            raise UserError(
                f"{self.folder.path}: no step in bags is recorded before one in tokens; give a run that went from bags "
                "to tokens, with a log.every no greater than the steps of either"
            )
        n, curves = self.config.smooth, {"in bags": course(before), "in tokens": course(after)}
        (step, flops, loss), last, first = curves["in tokens"], before[-1], after[0]
        low, smooth = float(curves["in bags"][2, -n:].mean()), trailing_mean(loss, n)
        since_switch = step - first["phase"]
        record = {
            "switch": first["phase"],
            "loss_before": low,
            "loss_after": _loss(first),
            "jump": _loss(first) - low,
            "steps_to_recover": next((int(k) for k in since_switch[smooth <= low]), None),
            "norm_before": last["norm"],
            "norm_after": first["norm"],
        }
        if LOAD in first["terms"]:
            record |= {f"{LOAD}_before": last["terms"][LOAD], f"{LOAD}_after": first["terms"][LOAD]}
        if self.config.baseline is not None:
            baseline = RunFolder.open(Path(self.config.baseline))
            ours, theirs = self.folder.text, baseline.text
            if ours and theirs and ours[0] != theirs[0]:
                raise UserError(
                    f"analysis.baseline = {baseline.path}: was trained on other tokens than {self.folder.path}, whose "
                    "losses do not compare; give a run of next_token on the same text, under the same tokenizer"
                )
            curves["baseline"] = course(next_tokens(baseline))
            _, spent, reached = curves["baseline"]
            met = flops <= spent[-1]
            # A mean over more of the baseline than of the run would lag further behind its fall
            above = smooth >= trailing_mean(np.interp(flops, spent, reached), n)
            since = 1 + np.flatnonzero(above & met).max(initial=-1)
            record["steps_until_below"] = int(since_switch[since]) if met[since:].any() else None
        return record | {"curves": {name: curve.T.tolist() for name, curve in curves.items()}}

    def draw(self, record: dict[str, Any], axes: Any) -> None:
        """Losses by training FLOPs, thin as recorded, thick their means."""
        for number, (name, points) in enumerate(record["curves"].items()):
            _, flops, loss = np.array(points).T
            axes.plot(flops, loss, f"C{number}", linewidth=0.5, alpha=0.5)
            axes.plot(flops, trailing_mean(loss, self.config.smooth), f"C{number}", label=name)
        axes.set(xlabel="training FLOPs", ylabel="loss (nats)")
        axes.legend(frameon=False)


def _loss(record: dict[str, Any]) -> float:
    """The one that is trained on, which is recorded first."""
    return next(iter(record["terms"].values()))
