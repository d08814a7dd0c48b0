"""Reference numbers: those that the repository carries, or another set of the same layout.

    tests/golden/manifest.json       the files carried: size, hash, what they hold, who made them, how close we must be
    TANDEM_GOLDEN=FOLDER             read FOLDER/<paper> instead, or FOLDER itself where it is the paper's

A carried file that is missing is an error; of another set, whatever is missing is skipped by name.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

CARRIED = Path(__file__).parents[1] / "golden"
MANIFEST = json.loads((CARRIED / "manifest.json").read_text("utf-8"))


def folder(paper: str, first: str) -> Path:
    """Where the reference numbers of a paper are; `first` is a file that every set of them has."""
    if "TANDEM_GOLDEN" not in os.environ:
        return CARRIED / paper
    given = Path(os.environ["TANDEM_GOLDEN"])
    found = next((path for path in (given / paper, given) if (path / first).is_file()), None)
    assert found, f"TANDEM_GOLDEN = {given}: neither it nor its folder {paper} has {first}"
    return found


def load(paper: str, first: str, name: str) -> Any:
    """The contents of one file; skips the test where this set lacks it."""
    path = folder(paper, first) / name
    if not path.is_file():
        assert path.parent != CARRIED / paper or f"{paper}/{name}" not in MANIFEST, f"{path} is carried, but missing"
        pytest.skip(f"{name} is not in {path.parent}")
    return torch.load(path, weights_only=True)


def close(actual, expected, tolerance):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
