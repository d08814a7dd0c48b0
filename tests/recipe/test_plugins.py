"""Classes of other packages are found by the entry points that these install."""

import sys

import pytest

from tandem.recipe import configure, plugins, register_all, registered, settings
from tandem.testing.cases import shipped
from tandem.training.folder import environment

MINE = """
from tandem.networks.decoder import Decoder
from tandem.recipe import register


@register("network", "mine")
class Mine(Decoder):
    pass
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package with an entry point, seen by this test alone."""
    known = tmp_path / "lab_methods-1.0.dist-info"
    known.mkdir()
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-methods\nVersion: 1.0\n")
    (known / "entry_points.txt").write_text("[tandem]\nmine = lab_methods\n")
    (tmp_path / "lab_methods.py").write_text(MINE)
    register_all()
    monkeypatch.setitem(settings._registry, "network", dict(settings._registry["network"]))
    monkeypatch.syspath_prepend(tmp_path)
    plugins.cache_clear()
    yield tmp_path
    plugins.cache_clear()
    sys.modules.pop("lab_methods", None)


def test_a_class_of_another_package_can_be_named_in_a_recipe(installed):
    assert "mine" not in registered("network")
    assert configure("network", "mine", ["network.depth=2"]).depth == 2
    assert registered("network")["mine"].__module__ == "lab_methods"
    assert "mine" not in shipped()
    assert "lab-methods 1.0" in environment()["plugins"]


def test_a_package_that_cannot_be_imported_is_named(installed):
    (installed / "lab_methods.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name") as raised:
        plugins()
    assert raised.value.__notes__ == ["while importing lab_methods, an entry point of lab-methods"]
