"""Tensors of all processes in one folder of checked files, by torch.distributed.checkpoint.

Its import takes a second, so it waits until something is saved or loaded.
"""

import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tandem.recipe import UserError
from tandem.training import checked
from tandem.training.parallel import Ranks


def write_tensors(folder: Path, tensors: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Writes the tensors of all processes; returns the manifest's entries. Raises OSError in all if it fails in one."""
    written = _CheckedFiles()
    writer = dcp.FileSystemWriter(folder, sync_files=False)  # they are flushed as they are closed
    writer.fs = written
    with _told(ranks):
        dcp.save(tensors, storage_writer=writer, no_dist=ranks.count == 1)
    return {name: entry for entries in ranks.gather(written.manifest) for name, entry in entries.items()}


class Saved:
    """The tensors in `path`. Raises: UserError where the file that describes them is damaged."""

    def __init__(self, path: Path):
        self.reader = dcp.FileSystemReader(path)
        self.reader.fs = _CheckedFiles()
        held = self.reader.read_metadata().state_dict_metadata
        self.held = {
            name: (found.properties.dtype, found.size)
            for name, found in held.items()
            if isinstance(found, TensorStorageMetadata)
        }
        """Dtype and shape of each by name."""

    def load(self, wanted: dict[str, Tensor], ranks: Ranks) -> None:
        """Reads `wanted` in place. Raises: in all processes, UserError where a file is damaged for one, OSError where
        one cannot read it."""
        with _told(ranks):
            dcp.load(wanted, storage_reader=self.reader, no_dist=ranks.count == 1)


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
            yield io.BytesIO(checked.read(path.parent, path.name))
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
            self.manifest[self.path.name] = checked.write(self.path, self.getvalue())
        super().close()


@contextmanager
def _told(ranks: Ranks) -> Iterator[None]:
    """Raises: of the errors of all processes the first that is no bug, or interrupt; else PyTorch's, which holds them.

    PyTorch's warning that there is only one process, which it gives even with `no_dist`, is not shown.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield
        except dcp.CheckpointException as failed:
            for error, _ in failed.failures.values():
                if isinstance(error, (UserError, OSError, MemoryError, torch.OutOfMemoryError, KeyboardInterrupt)):
                    error.is_told_elsewhere = not ranks.is_first  # type: ignore[union-attr]
                    raise error from None
            raise
