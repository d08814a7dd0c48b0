"""The networks of docs/adding_a_method.md keep the contract."""

import re
from pathlib import Path

import pytest

from tandem.recipe.settings import _registry
from tandem.testing.cases import cases
from tandem.testing.contract import CHECKS

PAGE = (Path(__file__).parents[2] / "docs/adding_a_method.md").read_text()


@pytest.fixture
def named(monkeypatch):
    monkeypatch.setitem(_registry, "network", dict(_registry["network"]))
    names = {"__name__": __name__}
    for source in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[:2]:
        exec(source, names)
    return {case.name: case for case in cases()}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", ["mine-", "sinks-"])
def test_its_networks(named, name, check):
    CHECKS[check](named[name])
