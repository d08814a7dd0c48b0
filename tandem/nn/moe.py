"""A mixture of experts in place of a block's MLP: many small networks, a few of them for each token.

A router gives every token a probability for each of E experts. The k likeliest process the token, and their outputs
are averaged, weighted by these probabilities. Parameters grow with E, work with k.

    p = softmax(router x)         x = 2 1 0 -1, k = 2:    0.731 expert_0(x) + 0.269 expert_1(x)
    y = sum over the k likeliest e of  p_e / (sum of these p) * down_e(silu(gate_e x) * up_e x)

No token is dropped: assignments are sorted by expert, and each expert reads its own, however many they are. To keep
all experts in use, each micro-batch adds a loss, with f_e the share of assignments and P_e the mean probability:

    balance = E sum_e f_e P_e     1 where both are even, E / k where k experts have everything

With one expert this is the MLP. Cost for one token: k 3 C F + C E multiply-adds; parameters E 3 C F + C E.
Source: Qwen3 technical report (128 experts, 8 active, no shared one); the balance loss is that of Switch Transformers.
Shapes: N tokens, E experts, k active, C width, F inner width of an expert.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from tandem.nn.init import Experts, Linear, itself
from tandem.recipe import Settings


class MixtureConfig(Settings):
    """A mixture of experts in every block."""

    experts: int = Field(ge=1)
    """E, experts of a block, each a swiglu of `mlp_width`."""
    active: int = Field(ge=1)
    """k, experts that read each token."""
    balance: float = Field(1e-3, ge=0)
    """Weight of the balance loss, a mean over blocks; it is taken over a micro-batch, and depends on its size."""

    def derive(self) -> dict[str, Any]:
        if self.active > self.experts:
            raise ValueError(f"active {self.active} is more than experts {self.experts}")
        return {}


class Routing(NamedTuple):
    """Where the router of one block sent the tokens of one pass."""

    share_E: Tensor
    """f_e, share of all assignments; without gradient."""
    probability_E: Tensor
    """P_e, mean over tokens."""


class Mixture(nn.Module):
    """E experts, k for each token; see above."""

    def __init__(self, config: MixtureConfig, width: int, inner: int):
        super().__init__()
        self.experts, self.active = config.experts, config.active
        self.router = Linear(width, self.experts, bias=False, role="router")
        self.up = Experts(self.experts, width, 2 * inner, role="experts", parts=(inner, inner))
        self.down = Experts(self.experts, inner, width, role="experts_out")

    def forward(self, x: Tensor, tell: Callable[[Routing], object] | None = None) -> Tensor:
        """(..., C) to (..., C); `tell` receives the routing."""
        x_NC = x.flatten(0, -2)
        with torch.autocast(x.device.type, enabled=False):
            # float32: in bfloat16 near ties fall to the wrong expert, and the balance loss sees rounded shares
            exact = torch.promote_types(x.dtype, torch.float32)
            p_NE = F.linear(x_NC.to(exact), itself(self.router).weight.to(exact)).softmax(-1)
        p_Nk, chosen_Nk = p_NE.topk(self.active)
        gate_Nk = p_Nk / p_Nk.sum(-1, keepdim=True)
        counts_E = torch.bincount(chosen_Nk.flatten(), minlength=self.experts)
        if tell is not None:
            tell(Routing(_shares(counts_E, exact), p_NE.mean(0)))

        by_expert = chosen_Nk.flatten().argsort(stable=True)
        read_MC = x_NC.repeat_interleave(self.active, 0)[by_expert]  # M = N k assignments
        y_MC = self._read(read_MC, counts_E.tolist())
        y_NkC = y_MC[by_expert.argsort()].unflatten(0, (-1, self.active))
        return (y_NkC * gate_Nk[..., None].to(y_NkC.dtype)).sum(1).view(x.shape)

    def _read(self, x_MC: Tensor, counts: list[int]) -> Tensor:
        """Applies every expert to its own rows, which are contiguous."""
        ys = []
        for rows, up, down in zip(x_MC.split(counts), self.up.weight.unbind(), self.down.weight.unbind(), strict=True):
            gate, h = F.linear(rows, up).chunk(2, dim=-1)
            ys.append(F.linear(F.silu(gate) * h, down))
        return torch.cat(ys)


def _shares(counts_E: Tensor, dtype: torch.dtype) -> Tensor:
    """Shares of the assignments of all processes in this micro-batch."""
    if dist.is_available() and dist.is_initialized():
        counts_E = counts_E.clone()  # this process goes on with its own
        dist.all_reduce(counts_E)
    return counts_E.to(dtype) / counts_E.sum()


def mixture_terms(routings: Sequence[Routing]) -> dict[str, Tensor]:
    """Means over blocks: the balance loss, and the load of the busiest and of the least busy expert, 1 being even."""
    experts = len(routings[0].share_E)
    share_BE, probability_BE = (torch.stack(column) for column in zip(*routings, strict=True))
    return {
        "balance": experts * (share_BE * probability_BE).sum(-1).mean(),
        "load_max": experts * share_BE.amax(-1).mean(),
        "load_min": experts * share_BE.amin(-1).mean(),
    }
