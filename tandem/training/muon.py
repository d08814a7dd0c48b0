"""Muon: hidden matrices are updated by their orthogonalised momentum, everything else by AdamW.

The momentum of a matrix has few large singular values, so a plain step moves in few directions. Muon keeps the
directions and sets the values near 1 (Jordan et al. 2024); times 0.2 sqrt(max(rows, columns)) the update has the root
mean square of AdamW's, so that learning rates carry over (Liu et al. 2025, "Muon is Scalable", eq. 4).

    B <- m B + (1 - m) G        U = (1 - m) G + m B        W <- (1 - lr decay) W - lr 0.2 sqrt(max(A, N)) NS(U)

A matrix is one in the paper's sense: q, k and v, stacked in the rows of one parameter, are three (`Linear.parts`), and
a stack of experts (E, A, N) is E. torch.optim.Muon treats every two-dimensional parameter as one matrix, hence this
file; where both mean the same matrix, they agree (tests/training/test_muon.py).

Many processes: a sharded parameter keeps its shard of momentum. The update is gathered, orthogonalised in every
process, and sharded again, so that the result does not depend on the number of processes. (On shards
torch.optim.Muon adds partial products in bfloat16: updates came out wrong by a tenth on two processes, torch 2.13.)
Cost: A x N, A <= N, takes about 4 A^2 N + 2 A^3 FLOPs per iteration, whatever the batch; half of AdamW's state.
Shapes: A rows, N columns, E experts.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from tandem.nn.init import HIDDEN, roles
from tandem.recipe import Recipe, register
from tandem.training.optimiser import AdamW, groups
from tandem.training.parallel import cut_like, whole

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic in `orthogonalised`: the steepest at zero that keep singular values within 0.7 to 1.2 (Jordan)."""

ITERATIONS = 5


@register("optimiser", "muon")
class Muon(AdamW):
    """Orthogonalised momentum for hidden matrices, AdamW for tables, head, norms, biases and gates."""

    class Config(AdamW.Config):
        momentum: float = Field(0.95, ge=0, lt=1)
        """Decay of the running mean of a matrix's gradients; `betas` and `eps` are AdamW's."""

    config: Config

    @classmethod
    def check(cls, recipe: Recipe) -> Iterator[tuple[str, str]]:
        given = {"optimiser.lr_scale": recipe.optimiser.lr_scale}
        given["network.base_width"] = (recipe.network.base_width or recipe.network.width) != recipe.network.width
        for key in (key for key, is_given in given.items() if is_given):
            yield key, f"muon sets the size of its updates itself; leave {key}, or take optimiser.name=adamw"

    def inner_optimiser(self, network: nn.Module) -> torch.optim.Optimizer:
        c = self.config
        stacked = _matrices(network)
        own = {"weight_decay": c.weight_decay, "momentum": c.momentum, "scale": 1.0}
        own_groups = [own | {"params": p, "parts": parts} for parts, p in stacked.items()]
        hidden = {id(parameter) for parameters in stacked.values() for parameter in parameters}
        for group in groups(network, c):
            if rest := [p for p in group["params"] if id(p) not in hidden]:
                own_groups.append(group | {"params": rest})
        return MuonAdamW(own_groups, lr=c.lr, betas=c.betas, eps=c.eps, fused=True)


class MuonAdamW(torch.optim.AdamW):
    """Muon for the groups that have `momentum`, AdamW for the others: one state, one set of groups."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None, "gradients are there already"
        for group in self.param_groups:
            for parameter in group["params"] if "momentum" in group else ():
                if parameter.grad is not None:
                    self._move(parameter, group)
                    parameter.grad = None  # AdamW skips a parameter without a gradient
        super().step()

    def _move(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["step"] = torch.zeros((), device=gradient.device)  # on loading, AdamW expects it in every state
            state["momentum_buffer"] = torch.zeros_like(gradient)
        state["step"] += 1
        mean = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(mean, group["momentum"])  # Nesterov's look-ahead: the gradient counts once more
        moved = [_scaled(part) for part in whole(update).split(group["parts"], dim=-2)]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(cut_like(torch.cat(moved, dim=-2), parameter), alpha=-group["lr"])


def orthogonalised(matrix_AN: Tensor) -> Tensor:
    """U V^T of matrix = U S V^T, nearly: singular values come to lie within about 0.7 to 1.2. In bfloat16.

    Newton-Schulz: X <- a X + (b X X^T + c (X X^T)^2) X acts on every singular value as a x + b x^3 + c x^5.
    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
    """
    a, b, c = COEFFICIENTS
    tall = matrix_AN.shape[0] > matrix_AN.shape[1]
    x = matrix_AN.bfloat16().T if tall else matrix_AN.bfloat16()
    x = x / x.norm().clamp(min=1e-7)  # no singular value exceeds the Frobenius norm; the quintic diverges above 1
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _scaled(update: Tensor) -> Tensor:
    """An update with the root mean square of AdamW's, about 0.2; for a stack of experts, matrix by matrix."""
    if update.ndim > 2:
        return torch.stack([_scaled(matrix) for matrix in update])
    return orthogonalised(update).to(update.dtype) * (0.2 * math.sqrt(max(update.shape)))


def _matrices(network: nn.Module) -> dict[tuple[int, ...], list[Tensor]]:
    """Hidden matrices by the row counts of the matrices stacked in each."""
    role = roles(network)
    found: dict[tuple[int, ...], list[Tensor]] = {}
    for name, parameter in network.named_parameters():
        if role[name] in HIDDEN and parameter.ndim > 1:
            module = network.get_submodule(name.rpartition(".")[0])
            parts: Any = getattr(module, "parts", (parameter.shape[-2],))
            found.setdefault(parts, []).append(parameter)
    return found
