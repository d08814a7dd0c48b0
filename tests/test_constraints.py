"""The versions that `make` installs agree with what torch asks for: its build for CUDA asks for one triton exactly."""

from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

LINES = (Path(__file__).parents[1] / "constraints.txt").read_text().splitlines()
PINNED = dict(line.split("#")[0].strip().split("==") for line in LINES if not line.startswith("#"))


@pytest.mark.skipif(metadata.version("torch").partition("+")[0] != PINNED["torch"], reason="another torch than pinned")
def test_what_torch_asks_for_is_what_is_pinned():
    asked = [Requirement(line) for line in metadata.requires("torch") or []]
    checked = [r for r in asked if r.name in PINNED and (not r.marker or r.marker.evaluate({"extra": ""}))]
    assert "sympy" in [r.name for r in checked]
    for requirement in checked:
        version = PINNED[requirement.name]
        assert requirement.specifier.contains(version), f"torch needs {requirement}; constraints.txt has {version}"
