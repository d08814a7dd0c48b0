"""What a parameter is for (its role) and how it is initialised.

A role says how a parameter is drawn, whether weight decay applies to it, and under what name its count is reported.
The module that holds the parameter has the role, so that no rule has to guess from shapes or names:

    embedding   head   attention   attention_out   mlp   mlp_out   router   experts   experts_out   thought   decay
    norm        bias   gate                                                                                  do not

Schemes: Tandem's own (`normal`) and those with which the papers' results were obtained.
"""

import functools
import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

Scheme = Literal[
    "normal", "scaled", "scaled_attention", "xavier", "per_matrix", "per_matrix_scaled", "xavier_qkv", "torch"
]

EXPERTS = {"experts", "experts_out"}
"""Roles of parameters that stack many matrices, (E, outputs, inputs)."""
HIDDEN = {"attention", "attention_out", "mlp", "mlp_out", "router", "thought"} | EXPERTS
"""Roles of matrices that read hidden states: the wider the network, the more their products add up."""
DECAYED = HIDDEN | {"embedding", "head"}
ROLES = DECAYED | {"norm", "bias", "gate"}


class Linear(nn.Linear):
    """nn.Linear with a role; `parts` are the row counts of the matrices stacked in it.

    `fused`: row counts of what `xavier` draws as one matrix, as in the authors' code; by default all rows together.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool, role: str, parts: tuple[int, ...] = ()):
        super().__init__(inputs, outputs, bias=bias)
        self.role = role
        self.parts = parts or (outputs,)
        self.fused: tuple[int, ...] = (outputs,)


def itself(linear: Linear) -> Linear:
    """A matrix whose weight is read here, as only some of its rows are wanted, or other precision.

    Raises: TypeError where another module was put in its place, as adapters do: what it adds would be lost.
    """
    if not isinstance(linear, Linear):
        raise TypeError(
            f"{type(linear).__name__} in place of a Linear whose weight this network reads itself: what it adds would "
            "be lost; leave this matrix as it is, or change its weight (torch.nn.utils.parametrize)"
        )
    return linear


class Experts(nn.Module):
    """E matrices of one shape as one parameter, (E, outputs, inputs); `parts` and `fused` of each as in `Linear`."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, role: str, parts: tuple[int, ...] = ()):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.role = role
        self.parts = parts or (outputs,)
        self.fused: tuple[int, ...] = (outputs,)


class Embedding(nn.Embedding):
    """nn.Embedding with a role."""

    role = "embedding"

    def __init__(self, rows: int, width: int, like: int | None = None):
        """like: rows of the table that these are drawn like, where a scheme goes by the shape; None: their own."""
        super().__init__(rows, width)
        self.like = rows if like is None else like


def roles(network: nn.Module) -> dict[str, str]:
    """Role of every parameter by its name; a tied parameter appears once."""
    found: dict[int, str] = {}
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False):
            role: Any = "norm" if isinstance(module, nn.RMSNorm | nn.LayerNorm) else getattr(module, "role", None)
            if role not in ROLES:
                told = f"{type(module).__name__}.{name} has {f'role {role!r}' if role else 'no role'}"
                raise AssertionError(f"{told}: give its module one of {', '.join(sorted(ROLES))}")
            if name == "bias" and role != "norm":
                role = "bias"
            found.setdefault(id(parameter), role)
    return {name: found[id(parameter)] for name, parameter in network.named_parameters()}


def width_ratio(module: nn.Module) -> float:
    """C / C_0 where `module.config` asks for width transfer (docs/width_transfer.md), else 1."""
    return getattr(getattr(module, "config", None), "width_ratio", 1.0)


@torch.no_grad()
def initialise(network: nn.Module, scheme: Scheme, depth: int, generator: torch.Generator | None) -> None:
    """Draws every parameter of `network` anew, in the order of its modules; generator None: from PyTorch's own.

    normal            N(0, 0.02) everywhere: the house
    scaled            and both residual outputs of a block N(0, 0.02 / sqrt(2 depth)): GPT-2
    scaled_attention  only the attention output so: State-Prediction Separation, authors' code
    xavier            uniform, gain sqrt(2), stacked matrices drawn as one, table too: Block-Based Double Decoders
    per_matrix        as xavier, but stacked matrices each by itself, and q, k and v with gain 1
    per_matrix_scaled  and both residual outputs of a block divided by sqrt(2 depth)
    xavier_qkv        q, k and v each uniform on their own shape, the rest normal: Thought Gestalt, release
    torch             PyTorch's own for linears, N(0, 1) for tables: Context-Ready Transformer, author

    Norm weights are 1 and norm biases 0; other biases are 0 in all schemes but `torch`. Under width transfer, fixed
    deviations of hidden matrices shrink as 1 / sqrt(width), like those that a scheme derives from the shape.
    """
    shrink = width_ratio(network) ** -0.5
    draw = functools.partial(_draw_matrix, scheme=scheme, depth=depth, shrink=shrink, generator=generator)
    for module in network.modules():
        if isinstance(module, nn.RMSNorm | nn.LayerNorm):
            nn.init.ones_(module.weight)
            if isinstance(bias := getattr(module, "bias", None), torch.Tensor):
                nn.init.zeros_(bias)
        elif isinstance(module, Embedding):
            draw(module.weight, module.role, (len(module.weight),), rows=module.like)
        elif isinstance(module, Linear):
            if module.bias is not None:
                bound = 1 / math.sqrt(module.in_features) if scheme == "torch" else 0.0
                nn.init.uniform_(module.bias, -bound, bound, generator=generator)
            draw(module.weight, module.role, module.fused if scheme == "xavier" else module.parts)
        elif isinstance(module, Experts):
            for matrix in module.weight:
                draw(matrix, module.role, module.fused if scheme == "xavier" else module.parts)


def _draw_matrix(
    weight: Tensor,
    role: str,
    parts: tuple[int, ...],
    scheme: Scheme,
    depth: int,
    shrink: float,
    generator: torch.Generator | None,
    rows: int | None = None,
) -> None:
    if scheme == "torch" and role == "embedding":
        nn.init.normal_(weight, generator=generator)
    elif scheme == "torch":
        bound = 1 / math.sqrt(weight.shape[1])
        nn.init.uniform_(weight, -bound, bound, generator=generator)
    elif scheme in ("xavier", "per_matrix", "per_matrix_scaled"):
        gain = 1.0 if scheme != "xavier" and role == "attention" else math.sqrt(2)
        if scheme == "per_matrix_scaled" and role in ("attention_out", "mlp_out", "experts_out"):
            gain /= math.sqrt(2 * depth)
        if rows is not None:
            gain *= math.sqrt(sum(weight.shape) / (rows + weight.shape[1]))
        for part in weight.split(parts):
            nn.init.xavier_uniform_(part, gain=gain, generator=generator)
    elif scheme == "xavier_qkv" and role == "attention":
        for part in weight.split(parts):
            nn.init.xavier_uniform_(part, generator=generator)
    else:
        shrunk = {"scaled": ("attention_out", "mlp_out", "experts_out"), "scaled_attention": ("attention_out",)}
        deviation = 0.02 / math.sqrt(2 * depth) if role in shrunk.get(scheme, ()) else 0.02
        nn.init.normal_(weight, 0.0, deviation * (shrink if role in HIDDEN else 1.0), generator=generator)
