"""All tests of recipes run in a small house of their own; its module has a name that no other folder of tests has, by
which pydantic finds the docstrings of options."""

from house import house as house
