"""Files and folders that are there whole or not at all, and locks that one process holds at a time."""

import contextlib
import errno
import fcntl
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TextIO

from tandem.recipe import UserError


def write_durably(path: Path, data: bytes) -> None:
    """Writes a file and returns once the disk has it. Raises: OSError, which names the file."""
    try:
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)  # only errors of `open` have it
        raise


def replace_file(path: Path, data: bytes) -> None:
    """Replaces a file as a whole or not at all, whatever happens meanwhile: the disk has the old one or the new one."""
    partial = path.with_name(f".{path.name}")
    write_durably(partial, data)
    partial.replace(path)


def flush(path: Path) -> None:
    """Returns once the disk has a file or, for a folder, its names, which reach it apart from the files' contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def made(path: Path, what: str) -> Path:
    """The folder of `what`, made where it is missing. Raises: UserError where nothing can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UserError(f"{path}: cannot be the folder of {what} ({error.strerror})") from None
    return path


def _flock(file: IO[Any], wait: bool) -> None:
    """Locks an open file for this process; the system releases it when the file is closed, however its holder ends.

    Raises: BlockingIOError where another process has it, unless told to `wait`; UserError where there are no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError as error:
        raise UserError(
            f"{file.name}: cannot be locked ({error.strerror}), and so two processes might write here at once; "
            "take a folder on a file system with locks, or mount this one with them (Lustre: -o flock)"
        ) from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a file lock, once no other process does."""
    with path.open("w") as file:
        _flock(file, wait=True)
        yield


def lock(path: Path) -> TextIO | None:
    """The file at `path`, locked until it is closed or the process ends; None where another process has it.

    It contains the id and the machine of the process that locked it last.
    """
    file = open(path, "a+")  # noqa: SIM115
    try:
        _flock(file, wait=False)
    except BlockingIOError:
        file.close()
        return None
    file.truncate(0)
    file.write(f"{os.getpid()} on {platform.node()}")
    file.flush()
    return file


@contextlib.contextmanager
def unmade(folder: Path, key: str = "corpus.folder", mark: str | None = None) -> Iterator[Path | None]:
    """Yields a path to write to, which is renamed to `folder` when the block ends; None if `folder` exists already.

    One process writes, under a lock, and the others wait. An interrupted attempt leaves nothing behind, unless it wrote
    a file called `mark`, by which the next one goes on from what is there; `folder` will not have it.
    Raises: UserError if the disk is full, or something cannot be read or written; `key` is set to have it elsewhere.
    """
    if folder.exists():
        yield None
        return
    partial = folder.with_name(f".{folder.name}.partial")

    def clear() -> None:
        if mark is None or not (partial / mark).exists():
            shutil.rmtree(partial, ignore_errors=True)  # under the lock, nobody uses it

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{folder.name}.lock")):
            if folder.exists():
                yield None
                return
            clear()
            try:
                yield partial
                partial.rename(folder)
                if mark is not None:
                    (folder / mark).unlink(missing_ok=True)
            finally:
                clear()
    except OSError as error:
        cure = f"make {folder.parent} writable, make room on a full disk, or name another {key} where that can be set"
        raise UserError(f"{folder}: not made ({error}); {cure}") from error
