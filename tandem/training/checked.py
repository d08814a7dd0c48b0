"""Checkpoints on the disk: which stand, and files of which every byte is checked against the manifest before use."""

import json
import zlib
from pathlib import Path
from typing import Any

from tandem.disk import write_durably
from tandem.recipe import UserError

MANIFEST = "manifest.json"


def standing(folder: Path) -> list[Path]:
    """All checkpoints in `folder` by step, unchecked."""
    return sorted((path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()), key=step_of)


def step_of(path: Path) -> int:
    """The number of finished steps that a checkpoint holds."""
    return int(path.name.removeprefix("step-"))


def latest(folder: Path, step: int | None = None) -> Path | None:
    """The newest checkpoint in `folder`, or that of `step`, unchecked; None where there is none."""
    return next((path for path in reversed(standing(folder)) if step in (None, step_of(path))), None)


def write(path: Path, data: bytes) -> dict[str, int]:
    """Writes a file; returns the manifest's entry, of the data as intended, not of what the disk made of it."""
    write_durably(path, data)
    return _entry(data)


def _entry(data: bytes) -> dict[str, int]:
    return {"bytes": len(data), "crc32": zlib.crc32(data)}


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


def read(path: Path, name: str) -> bytes:
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
