"""What checks compare: values, gradients, and the loss of a step.

EXACT   1e-9    same formula, other shapes or order of summation, in float64
FLOAT   1e-4    logits of a session, which are float32
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tandem.corpus import Batch
from tandem.networks.network import Network

EXACT, FLOAT = 1e-9, 1e-4


def close(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Raises: AssertionError naming `what`, where shapes differ or values differ by more than `tolerance`."""
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    off = (actual - expected).abs().max().item() if actual.numel() else 0.0
    if not off <= tolerance:  # NaN is off, too
        raise AssertionError(f"{what}: off by {off:.3g}, at most {tolerance:.0e} allowed")


def same_gradients(actual: Network, expected: Network, what: str, own: Callable[[str], str | None] = str) -> None:
    """Checks that gradients are equal; `own` maps the parameter names of `actual` to those of `expected`."""
    theirs = dict(expected.named_parameters())
    for name, parameter in actual.named_parameters():
        if (other := own(name)) is not None:
            actual_grad, expected_grad = parameter.grad, theirs[other].grad
            assert actual_grad is not None and expected_grad is not None, f"{what}: {name} has no gradient"
            close(actual_grad.to(expected_grad.device), expected_grad, EXACT, f"{what}: gradient of {name}")


def backward(network: Network, objective: Any, batches: list[Batch]) -> Tensor:
    """Loss of one step over micro-batches, its gradients left on the parameters.

    Raises: AssertionError where the training loop could not record what the objective returns.
    """
    counts: dict[str, int] = {}
    for batch in batches:
        for name, count in objective.count(network, batch).items():
            counts[name] = counts.get(name, 0) + count
    network.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        loss, sums = objective.loss(network, batch, counts)
        left_out, uncounted = network.terms.keys() - sums.keys(), sums.keys() - counts.keys()
        assert not left_out, f"the loss leaves out the network's {sorted(left_out)}: end it with network.add_extra"
        assert not uncounted, f"the loss records {sorted(uncounted)}, which `count` does not count"
        kept = [name for name, value in sums.items() if value.requires_grad]
        assert not kept, f"the loss records {kept} with a gradient: detach them"
        loss.backward()
        total = total + loss.detach()
    return total
