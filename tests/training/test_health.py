"""Machine choices come with reasons; what a machine lacks is said."""

import shutil
from pathlib import Path

import pytest
import torch

from tandem.recipe import UserError
from tandem.training import device
from tandem.training.device import Training, choose_compile, choose_device, choose_precision

CPU = torch.device("cpu")


def test_a_named_device_never_falls_back(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"training\.device = cuda"):
        choose_device(Training.Config(device="cuda"))
    assert choose_device(Training.Config()).reason == "no CUDA device"


@pytest.mark.parametrize(("flags", "dtype"), [({"avx512_bf16"}, torch.bfloat16), ({"avx2"}, torch.float32)])
def test_precision_follows_the_processor(monkeypatch, flags, dtype):
    monkeypatch.setattr(device, "cpu_flags", lambda: flags)
    assert choose_precision(Training.Config(), CPU).value == dtype
    assert choose_precision(Training.Config(precision="float32"), CPU) == (torch.float32, "asked for")


def test_compiling_needs_a_compiler_and_a_run_that_earns_it_back(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/" + name)
    monkeypatch.setattr(Path, "exists", lambda path: True)
    assert choose_compile(Training.Config(), CPU, 100_000).value is True
    assert choose_compile(Training.Config(), CPU, None).value is True
    assert choose_compile(Training.Config(), CPU, 10).value is False
    monkeypatch.setattr(Path, "exists", lambda path: path.name != "Python.h")
    assert "python3-dev" in choose_compile(Training.Config(), CPU, None).reason
    monkeypatch.setattr(shutil, "which", lambda name: None)
    chosen = choose_compile(Training.Config(), CPU, 100_000)
    assert chosen.value is False and "compiler" in chosen.reason
    assert choose_compile(Training.Config(compile=True), CPU, 10).value is True
