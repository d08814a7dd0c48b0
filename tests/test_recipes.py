"""Every recipe that comes with Tandem can be read, and has a line that says what it is."""

import pytest

from tandem.recipe import load, recipes

SHIPPED = {name: path for name, path in recipes().items() if not name.startswith("studies/")}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_can_be_read(name):
    assert load(name).choice("network")
    assert SHIPPED[name].read_text("utf-8").startswith("# ")
