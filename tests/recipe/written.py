"""Recipes as a user would write them, loaded in the small house of conftest.py."""

from pathlib import Path

import pytest

from tandem.recipe import UserError, load

BODY = """\
budget: 5e6 tokens
network:
  name: decoder
corpus:
  texts: [a.txt]
"""


def recipe(text=BODY, overrides=(), path="mine.yaml"):
    """Writes a recipe and loads it."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
    return load(path, overrides)


def complaint(*args, **kwargs):
    with pytest.raises(UserError) as caught:
        recipe(*args, **kwargs)
    return str(caught.value)
