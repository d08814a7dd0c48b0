"""What the machine offers decides what is chosen, and what it lacks is named with its cure."""

import shutil

import pytest
import torch

from tandem.comparison.trained import open_trained
from tandem.recipe import UserError
from tandem.training import device
from tandem.training.device import COMPILE_AFTER_SECONDS, COMPILE_AFTER_STEPS, Training, choose_compile


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
        return choose_compile(Training.Config(compile=compile), torch.device(kind), None, COMPILE_AFTER_SECONDS)

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
    ("kind", "steps", "seconds", "few"),
    [
        ("cpu", COMPILE_AFTER_STEPS - 1, 1e4, f"{COMPILE_AFTER_STEPS - 1} steps"),
        ("cpu", COMPILE_AFTER_STEPS, COMPILE_AFTER_SECONDS, None),
        ("cpu", None, COMPILE_AFTER_SECONDS - 1, "about 119 s of work"),
        ("cuda", COMPILE_AFTER_STEPS, 1.0, None),
        ("cuda", None, 1.0, None),
    ],
)
def test_blocks_are_compiled_where_the_run_is_long(monkeypatch, kind, steps, seconds, few):
    monkeypatch.setattr(device.Path, "exists", lambda path: True)
    monkeypatch.setattr(device.shutil, "which", lambda name: name)
    found = choose_compile(Training.Config(), torch.device(kind), steps, seconds)
    reason = f"{few} are too few to earn it back" if few else "the run is long enough to earn it back"
    assert found == (few is None, reason)


def test_a_compiled_run_is_opened_without_a_compiler(trained, tmp_path, monkeypatch):
    copy = shutil.copytree(trained, tmp_path / "mine")
    recipe = (copy / "recipe.yaml").read_text()
    (copy / "recipe.yaml").write_text(recipe.replace("compile: auto", "compile: true"))
    assert recipe.count("compile: auto") == 1
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    assert open_trained(copy).compiled == (False, "asked for")


def test_who_opens_a_run_keeps_the_state_of_pytorchs_generator(trained):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    open_trained(trained)
    assert torch.equal(torch.get_rng_state(), before)
