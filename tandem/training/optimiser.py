"""AdamW in groups by role: matrices and tables decay, norms and biases do not.

Groups come from what a parameter is for (nn/init.py), not from its shape or name, so a vector that belongs to the
token table decays with it and a gate that happens to be a matrix does not.

The rate of a group is the step's rate, times `lr_scale` for its part of the network, and for hidden matrices times
C_0 / C where the network uses width transfer. Decay is the coefficient times the group's rate, and shrinks with it.
Source: Block-Based Double Decoders, the paper's maximal-update parametrisation; docs/width_transfer.md.
"""

import math
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from tandem.nn.init import DECAYED, HIDDEN, roles, width_ratio
from tandem.recipe import Settings, UserError, did_you_mean, register

Decay = Annotated[float, Field(ge=0, lt=1)]


@register("optimiser", "adamw", default=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    class Config(Settings):
        lr: float = Field(1e-3, gt=0)
        """Peak learning rate."""
        betas: tuple[Decay, Decay] = (0.9, 0.95)
        """Decay of the two running means."""
        eps: float = Field(1e-8, gt=0)
        """Added to the root of the second mean."""
        weight_decay: float = Field(0.1, ge=0)
        """Weight decay of matrices and tables, times the learning rate of their group."""
        lr_scale: dict[str, Annotated[float, Field(gt=0)]] = {}
        """Factor on the learning rate of a part of the network, by the part's name; `plan` lists groups."""
        max_norm: float | None = Field(1.0, gt=0)
        """Gradients are clipped to this norm; null: never."""
        spike: float = Field(6.0, gt=0)
        """A step is a spike when its loss or norm lies more than this many standard deviations above the usual."""
        skip_spikes: bool = False
        """A spike updates neither weights nor moments; its batch and its place in the schedule are still used up."""

    def __init__(self, config: Config, network: nn.Module):
        self.config = config
        self.parameters = list(network.parameters())
        self.inner = self.inner_optimiser(network)

    def inner_optimiser(self, network: nn.Module) -> torch.optim.Optimizer:
        c = self.config
        return torch.optim.AdamW(groups(network, c), lr=c.lr, betas=c.betas, eps=c.eps, fused=True)

    def clip(self) -> Tensor:
        """Clips the gradients to the norm `max_norm`; returns the norm before clipping, on the device."""
        return nn.utils.clip_grad_norm_(self.parameters, self.config.max_norm or math.inf)

    def step(self, multiplier: float, update: bool = True) -> float:
        """One update, if `update`, at `multiplier` times the peak rate; clears the gradients; returns the rate."""
        rate = self.config.lr * multiplier
        if update:
            for group in self.inner.param_groups:
                group["lr"] = rate * group["scale"]
            self.inner.step()
        self.inner.zero_grad(set_to_none=True)
        return rate

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


def groups(network: nn.Module, config: AdamW.Config) -> list[dict[str, Any]]:
    """Every parameter in one group: those of equal decay and equal `scale`, the ratio of their rate to the step's.

    Raises: UserError where `lr_scale` names a part that the network does not have.
    """
    role, parts = roles(network), [name for name, _ in network.named_children()]
    for part in config.lr_scale.keys() - set(parts):
        near = did_you_mean(part, parts)
        raise UserError(f"optimiser.lr_scale.{part}: no such part of this network; {near}parts: {', '.join(parts)}")
    found: dict[tuple[bool, float], list[Tensor]] = {}
    for name, parameter in network.named_parameters():
        scale = config.lr_scale.get(name.partition(".")[0], 1.0)
        if role[name] in HIDDEN:
            scale /= width_ratio(network)
        found.setdefault((role[name] in DECAYED, scale), []).append(parameter)
    return [
        {"params": held, "weight_decay": config.weight_decay if decayed else 0.0, "scale": scale}
        for (decayed, scale), held in sorted(found.items(), key=lambda item: item[0], reverse=True)
    ]
