"""The network of docs/adding_a_method.md keeps the contract."""

import re
from pathlib import Path

import pytest

from tandem.recipe.settings import _registry
from tandem.testing.cases import cases
from tandem.testing.contract import CHECKS

PAGE = (Path(__file__).parents[2] / "docs/adding_a_method.md").read_text()


@pytest.fixture
def case(monkeypatch):
    monkeypatch.setitem(_registry, "network", dict(_registry["network"]))
    source = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    exec(source, {"__name__": __name__})
    (case,) = (case for case in cases() if case.name.startswith("mine-"))
    return case


@pytest.mark.parametrize("check", CHECKS)
def test_its_network(case, check):
    CHECKS[check](case)
