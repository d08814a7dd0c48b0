"""Checkpoints that are complete or absent.

A process can die between any two instructions, and a disk can fill up in the middle of a file. So a checkpoint is
written beside its place under a hidden name, flushed to the disk, and put in its place by one atomic rename. Only then
is an older one removed, hidden by a rename before it is deleted; but those that a lower `keep` no longer asks for make
room first.

    checkpoints/step-00001200/          .step-00001200 while it is written or deleted
        __0_0.distcp, __1_0.distcp      pieces of weights, buffers and optimiser, by the process that wrote them
        .metadata                       which piece lies where (torch.distributed.checkpoint)
        progress.json                   what else the run has to know, plain values
        manifest.json                   bytes and CRC-32 of all these, written last

Every process writes what it alone holds and its share of what all hold, so any number of processes can resume from
what any other number wrote. All processes must see the folder; the first of them creates and renames it.

Every byte is checked against the manifest before it is used. A checkpoint that does not match is refused by name:
whether to resume from an older one is the user's decision. A batch is a pure function of (seed, step), so a run
resumes bit for bit, as long as the number of processes stays the same.

Cost: for AdamW three times the bytes of the weights on disk; each process also holds its own file in memory.
"""

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from tandem.disk import flush
from tandem.recipe import Recipe, Settings, UserError, parse_budget, register
from tandem.recipe.budget import BudgetText
from tandem.training import checked
from tandem.training.checked import MANIFEST, latest, standing, step_of  # noqa: F401 - latest
from tandem.training.optimiser import AdamW
from tandem.training.parallel import ALONE, Ranks

PROGRESS = "progress.json"


@register("checkpoint")
class Checkpoints:
    """When the state of a run is saved, and which checkpoints are kept."""

    class Config(Settings):
        every: int = Field(500, ge=1)
        """Steps between checkpoints; the last step is always saved."""
        keep: int = Field(1, ge=1)
        """How many of the newest checkpoints are kept; `--step` opens any of them."""
        branches: list[BudgetText] = []
        """Budgets of other runs of this recipe: where each of them parts from this one, a checkpoint is saved and kept
        for it to begin with (start.trunk)."""

    @classmethod
    def check(cls, recipe: Recipe):
        if any(parse_budget(text).unit == "seconds" for text in recipe.checkpoint.branches):
            yield "checkpoint.branches", "where a run of some seconds parts is not known before it; give another unit"


Form = tuple[torch.dtype, torch.Size]


class SaveFailed(UserError):
    """A checkpoint could not be written to the disk; earlier ones remain."""


def save(
    folder: Path,
    step: int,
    network: nn.Module,
    optimiser: AdamW,
    progress: Mapping[str, Any],
    keep: int,
    ranks: Ranks = ALONE,
    stay: Collection[int] = (),
) -> Path:
    """Saves `step` in `folder`, then deletes all but the newest `keep` and those of the steps in `stay`; returns its
    path.

    A step that is saved already is left as it is, because the state of a run is a function of the step.
    Raises: SaveFailed, in all processes, when the disk of any is full or fails; earlier checkpoints remain.
    """
    from tandem.training.stored import write_tensors

    target = folder / f"step-{step:08d}"
    partial = _hidden(target)
    if ranks.first(target.exists):
        return target

    def begin() -> None:
        for leftover in folder.glob(".step-*"):  # from a process killed while it wrote or deleted
            shutil.rmtree(leftover)
        _drop(folder, keep, stay)  # where `keep` was lowered because the disk is full
        partial.mkdir(parents=True)

    def finish() -> None:
        manifest[PROGRESS] = checked.write(partial / PROGRESS, json.dumps(progress, indent=1).encode())
        checked.write(partial / MANIFEST, json.dumps(manifest, indent=1).encode())
        flush(partial)
        partial.rename(target)
        flush(folder)

    try:
        ranks.first(begin)
        manifest = write_tensors(partial, _tensors(network, optimiser.state_dict()), ranks)
        ranks.first(finish)
    except OSError as error:
        if ranks.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        left = standing(folder)
        failed = SaveFailed(
            f"{target}: not saved ({error}); {f'{left[-1].name} still stands' if left else 'none stands yet'}. "
            "Make room on the disk, or lower checkpoint.keep, and start the same command again"
        )
        failed.is_told_elsewhere = not ranks.is_first
        raise failed from error
    if ranks.is_first:
        _drop(folder, keep, stay)
    return target


def _drop(folder: Path, keep: int, stay: Collection[int]) -> None:
    """Deletes all checkpoints but the newest `keep` and those of the steps in `stay`."""
    for old in [path for path in standing(folder) if step_of(path) not in stay][:-keep]:
        shutil.rmtree(old.rename(_hidden(old)), ignore_errors=True)  # the next save removes what is left


def restore(path: Path, network: nn.Module, optimiser: AdamW | None = None, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Loads the checkpoint at `path` into `network` and, if given, `optimiser`, bit for bit; returns its progress.

    Raises: UserError where a file is damaged, or a name, shape or dtype differs from the network's or the optimiser's.
    """
    from tandem.training.stored import Saved

    with ranks.together():
        saved = Saved(path)
        progress = read_progress(path)
        wanted = _tensors(network, {})
        _require_same(path, "weights of this network", NETWORK, saved.held, wanted)
    state: dict[str, Any] = {}
    if optimiser is not None:
        if any(name.startswith(OPTIMISER) for name in saved.held):  # none before the first step
            _prime(network, optimiser)  # only after all agree: Muon's processes exchange weights
        state = optimiser.state_dict()
        wanted = _tensors(network, state)
        with ranks.together():
            _require_same(path, "state of this optimiser", OPTIMISER, saved.held, wanted)
    saved.load(wanted, ranks)
    if optimiser is not None:
        optimiser.load_state_dict(state)
    return progress


def read_progress(path: Path) -> dict[str, Any]:
    """What `save` was given as progress. Raises: UserError where the checkpoint is damaged."""
    return json.loads(checked.read(path, PROGRESS))


NETWORK, OPTIMISER = "network.", "optimiser."
"""Prefixes of the names of tensors."""


def _tensors(network: nn.Module, optimiser_state: dict[str, Any]) -> dict[str, Any]:
    """All tensors by name, not copied. An optimiser's group settings are left out; they come from the recipe."""
    found = {NETWORK + name: tensor for name, tensor in network.state_dict().items()}

    def walk(above: str, node: Any) -> None:
        if isinstance(node, Tensor):
            found[above] = node
        elif isinstance(node, dict):
            for key, value in node.items():
                if key != "param_groups":
                    walk(f"{above}.{key}", value)
        else:
            raise TypeError(f"{above} = {node!r}: a checkpoint takes tensors of an optimiser's state, nothing else")

    walk(OPTIMISER.removesuffix("."), optimiser_state)
    return found


def _prime(network: nn.Module, optimiser: AdamW) -> None:
    """Creates the state of an optimiser that has taken no step, by a step at rate 0 before weights are loaded."""
    if not optimiser.state_dict()["state"]:
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimiser.step(0.0)
        for parameter in network.parameters():
            parameter.grad = None


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}")


def _require_same(path: Path, what: str, prefix: str, held: Mapping[str, Form], wanted: dict[str, Tensor]) -> None:
    """Raises: UserError with a line for every tensor under `prefix` that differs in name, shape or dtype."""

    def named(forms: Mapping[str, Form]) -> dict[str, str]:
        return {
            name.removeprefix(prefix): f"{str(dtype).removeprefix('torch.')} {list(shape)}"
            for name, (dtype, shape) in forms.items()
            if name.startswith(prefix)
        }

    here, asked = named(held), named({name: (tensor.dtype, tensor.shape) for name, tensor in wanted.items()})
    if different := [name for name in asked | here if here.get(name) != asked.get(name)]:
        lines = [f"  {n}: {here.get(n, 'absent')}, in this run {asked.get(n, 'absent')}" for n in different]
        cure = "bring back the recipe.yaml, or the version of Tandem, of this run, or begin another. It differs in"
        raise UserError("\n".join([f"{path}: not the {what} as recipe.yaml describes it now; {cure}", *lines]))
