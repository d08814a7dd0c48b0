"""Every recipe that comes with Tandem can be read and its network built, and has a line that says what it is."""

import subprocess
import sys

import pytest
import torch

from tandem.recipe import load, recipes

SHIPPED = {name: path for name, path in recipes().items() if not name.startswith("studies/")}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_can_be_read_and_built(name):
    recipe = load(name)
    with torch.device("meta"):
        network = recipe.choice("network")(recipe.network, recipe.corpus.vocabulary or 256, recipe.batch.context)
    assert network.cost().total_parameters
    first = SHIPPED[name].read_text("utf-8").splitlines()[0]
    assert first.startswith("# ") and first.endswith("."), "`tandem show` lists the first line alone"


def test_a_recipe_means_the_same_whatever_was_imported_before():
    code = """
import sys
import tandem.recipe
assert "torch" not in sys.modules
import tandem.networks, tandem.training
print(tandem.recipe.load("decoder/tiny").fingerprint)
"""
    told = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert told.strip() == load("decoder/tiny").fingerprint
