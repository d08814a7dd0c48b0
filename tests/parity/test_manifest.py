"""The reference numbers that the repository carries are those that it names, and few."""

import hashlib

import pytest
from golden import CARRIED, MANIFEST


@pytest.mark.parametrize("name", MANIFEST)
def test_a_carried_file_is_the_one_that_was_made(name):
    content = (CARRIED / name).read_bytes()
    assert len(content) == MANIFEST[name]["bytes"]
    assert hashlib.sha256(content).hexdigest() == MANIFEST[name]["sha256"]


def test_nothing_else_is_carried_and_all_of_it_is_small():
    files = {path.relative_to(CARRIED).as_posix() for path in CARRIED.glob("*/*")}
    assert files == set(MANIFEST)
    assert sum(entry["bytes"] for entry in MANIFEST.values()) <= 12e6
