"""Checkpoints that are whole or not there.

A process can die between any two instructions, and a disk can fill in the middle of a file. So a checkpoint is
written beside its place under a hidden name, flushed to the disk, and put in its place by one rename, which happens
at once or not at all. Older ones go only after that, hidden by a rename before they are deleted.

    checkpoints/step-00001200/          .step-00001200 while it is written or deleted
        network.safetensors             weights and buffers; a tied tensor once
        optimiser.pt                    the optimiser's state, read back as tensors and plain values only
        progress.json                   what else the run has to know, plain values
        manifest.json                   bytes and CRC-32 of these three, written last

Every byte is held against the manifest before it is used. A checkpoint that does not agree is refused by name: to
go on from an older one is for people to decide. A batch is a pure function of (seed, step), so with these three a
run goes on bit for bit.

Cost: for AdamW three times the bytes of the weights on disk; one of the files at a time is copied in memory.
"""

import io
import json
import os
import shutil
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from pydantic import Field
from torch import Tensor, nn

from tandem.recipe import Settings, UserError, register

NETWORK, OPTIMISER, PROGRESS = FILES = ("network.safetensors", "optimiser.pt", "progress.json")
MANIFEST = "manifest.json"


@register("checkpoint")
class Checkpoints:
    """When the state of a run is saved, and what is kept of it."""

    class Config(Settings):
        every: int = Field(500, ge=1)
        """Steps between checkpoints; the last step is always saved."""
        keep: int = Field(1, ge=1)
        """How many of the newest are kept."""
        milestones: list[int] = []
        """Steps whose checkpoints are never deleted; multiples of `every`."""

    @classmethod
    def check(cls, recipe: Any):
        for step in recipe.checkpoint.milestones:
            if step <= 0 or step % recipe.checkpoint.every:
                yield "checkpoint.milestones", f"{step} is no multiple of checkpoint.every, so it is never saved"


class SaveFailed(UserError):
    """The disk did not take a checkpoint; those before it stand."""


class Stateful(Protocol):
    """What an optimiser is to a checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> object: ...


def save(
    folder: Path,
    step: int,
    network: nn.Module,
    optimiser: Stateful,
    progress: Mapping[str, Any],
    keep: int,
    milestones: Collection[int] = (),
) -> Path:
    """Saves `step` in `folder`, then deletes all but the newest `keep` and the milestones; returns its path.

    A step that stands already is left as it is, the state of a run being a function of the step.
    Raises: SaveFailed when the disk is full or fails; everything that stood before still stands.
    """
    target = folder / f"step-{step:08d}"
    partial = _hidden(target)
    if target.exists():
        return target
    try:
        for leftover in folder.glob(".step-*"):  # of a process that was killed while it wrote or deleted
            shutil.rmtree(leftover)
        partial.mkdir(parents=True)
        manifest = {
            NETWORK: _write(partial / NETWORK, safetensors.torch.save(network.state_dict())),
            OPTIMISER: _write(partial / OPTIMISER, _pickled(optimiser.state_dict())),
            PROGRESS: _write(partial / PROGRESS, json.dumps(progress, indent=1).encode()),
        }
        _write(partial / MANIFEST, json.dumps(manifest, indent=1).encode())
        _flush(partial)
        partial.rename(target)
        _flush(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        left = standing(folder)
        raise SaveFailed(
            f"{target}: not saved ({error}); {f'{left[-1].name} still stands' if left else 'none stands yet'}. "
            "Make room on the disk, or lower checkpoint.keep, and start the same command again"
        ) from error
    for old in standing(folder)[:-keep]:
        if step_of(old) not in milestones:
            shutil.rmtree(old.rename(_hidden(old)), ignore_errors=True)  # what stays is swept by the next save
    return target


def standing(folder: Path) -> list[Path]:
    """All checkpoints in `folder` by step, unchecked."""
    return sorted((path for path in folder.glob("step-*") if path.name[5:].isdecimal()), key=step_of)


def step_of(path: Path) -> int:
    """The number of finished steps that a checkpoint holds."""
    return int(path.name.removeprefix("step-"))


def latest(folder: Path) -> Path | None:
    """The newest checkpoint in `folder`, every byte checked; None where there is none.

    Raises: UserError naming the file that is missing or not what was written, and the cure.
    """
    newest = standing(folder)[-1:]
    for path in newest:
        for name in FILES:
            _read(path, name)
    return newest[0] if newest else None


def restore(path: Path, network: nn.Module, optimiser: Stateful | None = None) -> dict[str, Any]:
    """Puts the checkpoint at `path` into `network` and, if given, `optimiser`, bit for bit; returns its progress.

    Raises: UserError where a file is damaged, or a name, shape or dtype is not that of the network.
    """
    weights = safetensors.torch.load(_read(path, NETWORK))
    _require_same(path / NETWORK, weights, network.state_dict())
    network.load_state_dict(weights)
    if optimiser is not None:
        state = torch.load(io.BytesIO(_read(path, OPTIMISER)), map_location="cpu", weights_only=True)
        try:
            optimiser.load_state_dict(state)
        except ValueError as error:
            raise UserError(f"{path / OPTIMISER}: this optimiser cannot take it: {error}") from error
    return json.loads(_read(path, PROGRESS))


def write_durably(path: Path, data: bytes) -> None:
    """Writes a file and returns once the disk has it."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _write(path: Path, data: bytes) -> dict[str, int]:
    """The manifest's entry of what was meant to be written, not of what the disk made of it."""
    write_durably(path, data)
    return _entry(data)


def _entry(data: bytes) -> dict[str, int]:
    return {"bytes": len(data), "crc32": zlib.crc32(data)}


def _pickled(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}")


def _flush(folder: Path) -> None:
    """The names in a folder reach the disk apart from what is in the files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, name: str) -> bytes:
    """The bytes of a file, which are those that its manifest tells of."""
    try:
        expected = json.loads((path / MANIFEST).read_bytes())[name]
        data = (path / name).read_bytes()
    except FileNotFoundError as error:
        raise _damaged(path, Path(error.filename).name, "missing") from None
    except (ValueError, LookupError, TypeError):  # not JSON, or not the JSON that was written
        raise _damaged(path, MANIFEST, "unreadable") from None
    if expected != _entry(data):
        raise _damaged(path, name, f"{_entry(data)}, while the manifest says {expected}")
    return data


def _damaged(path: Path, name: str, reason: str) -> UserError:
    others = [other.name for other in standing(path.parent) if other.name != path.name]
    cure = f"to go on from {others[-1]}" if others else "to start anew"
    return UserError(f"{path / name}: {reason}; this checkpoint is damaged. Delete the folder {path} {cure}")


def _require_same(file: Path, held: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """One UserError with a line for every tensor that is not alike in name, shape and dtype."""

    def form(tensors: dict[str, Tensor], name: str) -> str:
        if name not in tensors:
            return "absent"
        return f"{str(tensors[name].dtype).removeprefix('torch.')} {list(tensors[name].shape)}"

    different = [name for name in wanted | held if form(held, name) != form(wanted, name)]
    if different:
        lines = [f"  {name}: {form(held, name)}, in the network {form(wanted, name)}" for name in different]
        raise UserError("\n".join([f"{file}: not the weights of this network; use the recipe beside it", *lines]))
