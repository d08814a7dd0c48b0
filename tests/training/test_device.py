"""What the machine offers decides what is chosen, and what it lacks is named with its cure."""

import shutil

import pytest
import torch

from tandem.comparison.trained import open_trained
from tandem.recipe import UserError
from tandem.training import device
from tandem.training.device import COMPILE_AFTER_STEPS, Training, choose_compile


@pytest.mark.parametrize(
    ("kind", "key", "there", "missing"),
    [
        ("cpu", "CXX", ["g++"], r"no C\+\+ compiler; install g\+\+ to compile"),
        ("cuda", "CC", ["gcc"], "no C compiler; install gcc to compile"),
        ("cuda", "CC", ["clang"], "no C compiler; install gcc to compile"),
    ],
)
def test_blocks_are_compiled_where_the_device_finds_its_compiler(monkeypatch, kind, key, there, missing):
    def choose(compile):
        return choose_compile(Training.Config(compile=compile), torch.device(kind), steps=None)

    monkeypatch.setattr(device.Path, "exists", lambda path: True)
    monkeypatch.setattr(device.shutil, "which", lambda name: name if name in there else None)
    monkeypatch.delenv(key, raising=False)
    assert choose("auto").value and choose(True) == (True, "asked for")
    monkeypatch.setenv(key, "mine")
    assert not choose("auto").value and choose(False) == (False, "asked for")
    with pytest.raises(UserError, match=f"training.compile = true: {missing}, or write auto"):
        choose(True)
    there.append("mine")
    assert choose("auto").value
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__file__", "/a b/torch/__init__.py")
        assert choose("auto").value == (kind != "cpu")
    monkeypatch.setattr(device.Path, "exists", lambda path: False)
    assert choose("auto") == (False, "no Python headers; install python3-dev to compile")


@pytest.mark.parametrize(
    ("steps", "compiled"), [(COMPILE_AFTER_STEPS - 1, False), (COMPILE_AFTER_STEPS, True), (None, True)]
)
def test_blocks_are_compiled_from_so_many_steps_on(monkeypatch, steps, compiled):
    monkeypatch.setattr(device.Path, "exists", lambda path: True)
    monkeypatch.setattr(device.shutil, "which", lambda name: name)
    found = choose_compile(Training.Config(), torch.device("cpu"), steps)
    assert found == (
        compiled,
        "the run is long enough to earn it back" if compiled else f"{steps} steps are too few to earn it back",
    )


def test_a_compiled_run_is_opened_without_a_compiler(trained, tmp_path, monkeypatch):
    copy = shutil.copytree(trained, tmp_path / "mine")
    recipe = (copy / "recipe.yaml").read_text()
    (copy / "recipe.yaml").write_text(recipe.replace("compile: auto", "compile: true"))
    assert recipe.count("compile: auto") == 1
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    assert open_trained(copy).compiled == (False, "asked for")
