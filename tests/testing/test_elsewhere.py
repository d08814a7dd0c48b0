"""The make-believe device refuses what CUDA refuses, and allows what CUDA allows."""

import os

import pytest
import torch

from tandem.testing.elsewhere import elsewhere, forked

REFUSED = {
    "sum": lambda there: there + torch.ones(3),
    "write to the host": lambda there: torch.zeros(3).add_(there[0]),
    "number of the host": lambda there: torch.zeros(()).add_(there.sum()),
    "values of the host": lambda there: there.index_put_((torch.tensor([1]),), torch.ones(1, 3)),
    "indices elsewhere": lambda there: torch.zeros(4)[torch.tensor([1]).to(there.device)],
}


def mix(name):
    with elsewhere() as device:
        there = torch.ones(4, 3, device=device)
        there[torch.tensor([1])] = 2 * there[torch.tensor([0])] + torch.tensor(3.0)
        assert there.device == device and there.cpu().tolist() == [[1.0] * 3, [5.0] * 3, [1.0] * 3, [1.0] * 3]
        assert torch.zeros(3).copy_(there[1]).sum() == 15
        with pytest.raises(RuntimeError, match=r"tensors of two devices: .* on elsewhere:0"):
            REFUSED[name](there)


def make():
    with elsewhere() as device:
        for make in (torch.tensor, torch.as_tensor):
            made = make([1.0, 2.0], dtype=torch.float64, device=device)
            assert (made.device, made.dtype, made.tolist()) == (device, torch.float64, [1.0, 2.0])
            assert make([1.0], device="cpu").device.type == make([1.0]).device.type == "cpu"


def test_tensors_are_made_there_from_lists():
    forked(make)


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_of_two_devices_do_not_mix(name):
    forked(mix, name)


def test_what_a_fork_raises_is_told():
    with pytest.raises(AssertionError, match="KeyError: 'nothing'"):
        forked({}.__getitem__, "nothing")
    with pytest.raises(AssertionError, match="the process ended"):
        forked(os._exit, 1)
