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

import io
import json
import os
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tandem.disk import flush, write_durably
from tandem.recipe import Settings, UserError, register
from tandem.training.optimiser import AdamW
from tandem.training.parallel import ALONE, Ranks

PROGRESS, MANIFEST = "progress.json", "manifest.json"


@register("checkpoint")
class Checkpoints:
    """When the state of a run is saved, and which checkpoints are kept."""

    class Config(Settings):
        every: int = Field(500, ge=1)
        """Steps between checkpoints; the last step is always saved."""
        keep: int = Field(1, ge=1)
        """How many of the newest checkpoints are kept; `--step` opens any of them."""


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
) -> Path:
    """Saves `step` in `folder`, then deletes all but the newest `keep`; returns its path.

    A step that is saved already is left as it is, because the state of a run is a function of the step.
    Raises: SaveFailed, in all processes, when the disk of any is full or fails; earlier checkpoints remain.
    """
    target = folder / f"step-{step:08d}"
    partial = _hidden(target)
    if ranks.first(target.exists):
        return target

    def begin() -> None:
        for leftover in folder.glob(".step-*"):  # from a process killed while it wrote or deleted
            shutil.rmtree(leftover)
        _drop(folder, keep)  # where `keep` was lowered because the disk is full
        partial.mkdir(parents=True)

    def finish() -> None:
        manifest[PROGRESS] = _write(partial / PROGRESS, json.dumps(progress, indent=1).encode())
        _write(partial / MANIFEST, json.dumps(manifest, indent=1).encode())
        flush(partial)
        partial.rename(target)
        flush(folder)

    try:
        ranks.first(begin)
        manifest = _write_tensors(partial, _tensors(network, optimiser.state_dict()), ranks)
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
        _drop(folder, keep)
    return target


def _drop(folder: Path, keep: int) -> None:
    """Deletes all checkpoints but the newest `keep`."""
    for old in standing(folder)[:-keep]:
        shutil.rmtree(old.rename(_hidden(old)), ignore_errors=True)  # the next save removes what is left


def standing(folder: Path) -> list[Path]:
    """All checkpoints in `folder` by step, unchecked."""
    return sorted((path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()), key=step_of)


def step_of(path: Path) -> int:
    """The number of finished steps that a checkpoint holds."""
    return int(path.name.removeprefix("step-"))


def latest(folder: Path, step: int | None = None) -> Path | None:
    """The newest checkpoint in `folder`, or that of `step`, unchecked; None where there is none."""
    return next((path for path in reversed(standing(folder)) if step in (None, step_of(path))), None)


def restore(path: Path, network: nn.Module, optimiser: AdamW | None = None, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Loads the checkpoint at `path` into `network` and, if given, `optimiser`, bit for bit; returns its progress.

    Raises: UserError where a file is damaged, or a name, shape or dtype differs from the network's or the optimiser's.
    """
    with ranks.together():
        reader = dcp.FileSystemReader(path)
        reader.fs = _CheckedFiles()
        index = reader.read_metadata()
        progress = read_progress(path)
        wanted = _tensors(network, {})
        _require_same(path, "weights of this network", NETWORK, index, wanted)
        state: dict[str, Any] = {}
        if optimiser is not None:
            if any(name.startswith(OPTIMISER) for name in index.state_dict_metadata):  # none before the first step
                _prime(network, optimiser)
            state = optimiser.state_dict()
            wanted = _tensors(network, state)
            _require_same(path, "state of this optimiser", OPTIMISER, index, wanted)
    try:
        with _in_silence():
            dcp.load(wanted, storage_reader=reader, no_dist=ranks.count == 1)
    except dcp.CheckpointException as failed:
        raise _cause(failed, UserError, ranks) from None
    if optimiser is not None:
        optimiser.load_state_dict(state)
    return progress


def read_progress(path: Path) -> dict[str, Any]:
    """What `save` was given as progress. Raises: UserError where the checkpoint is damaged."""
    return json.loads(_read(path, PROGRESS))


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


class _CheckedFiles(FileSystem):
    """Files that torch.distributed.checkpoint reads and writes, as durable and checked as all files here.

    A file is written in one piece when it is closed, durably, and entered in `manifest`; it is checked when read.
    """

    def __init__(self) -> None:
        self.manifest: dict[str, Any] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        path = Path(path)
        if "r" in mode:
            yield io.BytesIO(_read(path.parent, path.name))
        else:
            with _Written(path, self.manifest) as stream:
                yield stream

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.manifest[Path(new_path).name] = self.manifest.pop(Path(path).name)


class _Written(io.BytesIO):
    def __init__(self, path: Path, manifest: dict[str, Any]):
        super().__init__()
        self.path, self.manifest = path, manifest

    def close(self) -> None:
        if not self.closed:
            self.manifest[self.path.name] = _write(self.path, self.getvalue())
        super().close()


def _write_tensors(folder: Path, tensors: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Writes the tensors of all processes; returns the manifest's entries. Raises OSError in all if it fails in one."""
    written = _CheckedFiles()
    writer = dcp.FileSystemWriter(folder, sync_files=False)  # they are flushed as they are closed
    writer.fs = written
    try:
        with _in_silence():
            dcp.save(tensors, storage_writer=writer, no_dist=ranks.count == 1)
    except dcp.CheckpointException as failed:
        raise _cause(failed, OSError, ranks) from None
    return {name: entry for entries in ranks.gather(written.manifest) for name, entry in entries.items()}


@contextmanager
def _in_silence() -> Iterator[None]:
    """Without PyTorch's warning that there is only one process, which it gives even with `no_dist`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _cause(failed: dcp.CheckpointException, kind: type[Exception], ranks: Ranks) -> BaseException:
    """The first error of `kind`, or interrupt, among those of all processes, else `failed`, which holds all of them."""
    for error, _ in failed.failures.values():
        if isinstance(error, (kind, KeyboardInterrupt)):
            if isinstance(error, UserError):
                error.is_told_elsewhere = not ranks.is_first
            return error
    return failed


def _write(path: Path, data: bytes) -> dict[str, int]:
    """Writes a file; returns the manifest's entry, of the data as intended, not of what the disk made of it."""
    write_durably(path, data)
    return _entry(data)


def _entry(data: bytes) -> dict[str, int]:
    return {"bytes": len(data), "crc32": zlib.crc32(data)}


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}")


def _manifest(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise _damaged(path, MANIFEST, "missing") from None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _damaged(path, MANIFEST, "unreadable")
    return found


def _read(path: Path, name: str) -> bytes:
    """The bytes of a file, checked against the manifest."""
    expected = _manifest(path).get(name)
    try:
        data = (path / name).read_bytes()
    except FileNotFoundError:
        raise _damaged(path, name, "missing") from None
    if expected != _entry(data):
        raise _damaged(path, name, _difference(len(data), expected))
    return data


def _difference(size: int, expected: object) -> str:
    """How a file of `size` bytes differs from its entry in the manifest, which may be anything."""
    saved = expected.get("bytes") if isinstance(expected, dict) else None
    if not isinstance(saved, int):
        return f"not described in {MANIFEST}"
    return f"{size:,} bytes, of {saved:,} that were saved" if size != saved else "not the contents that were saved"


def _damaged(path: Path, name: str, reason: str) -> UserError:
    others = [other.name for other in standing(path.parent) if other.name != path.name]
    cure = f"to go on from {others[-1]}" if others else "to start anew"
    return UserError(f"{path / name}: {reason}; this checkpoint is damaged. Delete {path} {cure}")


def _require_same(path: Path, what: str, prefix: str, index: Metadata, wanted: dict[str, Tensor]) -> None:
    """Raises: UserError with a line for every tensor under `prefix` that differs in name, shape or dtype."""

    def form(dtype: torch.dtype, shape: torch.Size) -> str:
        return f"{str(dtype).removeprefix('torch.')} {list(shape)}"

    def named(forms: dict[str, str]) -> dict[str, str]:
        return {name.removeprefix(prefix): form for name, form in forms.items() if name.startswith(prefix)}

    stored = {n: t for n, t in index.state_dict_metadata.items() if isinstance(t, TensorStorageMetadata)}
    held = named({name: form(tensor.properties.dtype, tensor.size) for name, tensor in stored.items()})
    asked = named({name: form(tensor.dtype, tensor.shape) for name, tensor in wanted.items()})
    if different := [name for name in asked | held if held.get(name) != asked.get(name)]:
        lines = [f"  {n}: {held.get(n, 'absent')}, in this run {asked.get(n, 'absent')}" for n in different]
        cure = "bring back the recipe.yaml, or the version of Tandem, of this run, or begin another. It differs in"
        raise UserError("\n".join([f"{path}: not the {what} as recipe.yaml describes it now; {cure}", *lines]))
