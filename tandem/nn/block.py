"""The one Transformer block of every network; the reader that it is given decides what it reads.

    x ──┬─ norm ─ q, k, v ─ reader ─ output ─┬─ + ──┬─ norm ─ mlp ─┬─ + ──
        └────────────────────────────────────┘      └──────────────┘

A reader maps the queries, keys and values of one layer to what the queries read: from spans over the sequence
in training, from a cache in decoding. A new architecture is a new reader, not a new block.

The work before the reader and the work after it are one compiled graph each (`project`, `finish`), shared by all
blocks of a network; the reader runs between them, outside, because its bounds are host integers of the batch.

Several streams of one text are rows of one x: a block sees more rows, and the reader knows which is which.

Shapes: B rows, T tokens, C width, H heads, G key heads, D head width.
"""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch._functorch.config
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from tandem.nn.dropout import dropped
from tandem.nn.init import Linear, Scheme, itself
from tandem.nn.mlp import MLP, MLPKind, inner_width
from tandem.nn.moe import Mixture, MixtureConfig, Routing
from tandem.nn.norm import NormKind, norm
from tandem.nn.rope import Rotation, rotate
from tandem.recipe import Settings


class BlockConfig(Settings):
    """Tandem's own block; the papers' recipes override its options."""

    width: int = Field(128, ge=1)
    """C, channels of the residual stream."""
    heads: int = Field(4, ge=1, le=10**9)
    """H, query heads."""
    key_heads: int | None = Field(None, ge=1)
    """G, key and value heads; null: as many as query heads. Must divide `heads`."""
    head_width: int | None = Field(None, ge=1, le=10**9)
    """D, channels of a head; null: width / heads."""
    mlp: MLPKind = "swiglu"
    """Position-wise network: swiglu, gelu (erf) or gelu_tanh."""
    mlp_width: int | None = Field(None, ge=1, le=10**9)
    """F, inner width; null: 8C/3 rounded up to a multiple of 64 for swiglu, 4C for gelu."""
    moe: MixtureConfig | None = None
    """A mixture of experts in place of the MLP, each expert as wide as the MLP would be; null: the MLP."""
    norm: NormKind = "rms"
    """rms or layer."""
    norm_eps: float = Field(1e-6, gt=0)
    """Added to the variance."""
    bias: bool = False
    """Biases in linears and LayerNorms (never in the output head)."""
    qk_norm: bool = False
    """RMSNorm over each head's query and key, before the rotation."""
    positions: Literal["adjacent", "halves", "learned"] = "adjacent"
    """Rotary pairs (adjacent or halves), or a learned table (learned): a row for each position of the context, in
    gestalt of a sentence."""
    rope_base: float = Field(10_000.0, gt=0)
    """Base of the rotary angles."""
    init: Scheme = "normal"
    """How parameters are drawn; see tandem/nn/init.py."""
    base_width: int | None = Field(None, ge=1)
    """C_0 of width transfer: initial deviations, logits and the optimiser's learning rates are scaled so that what was
    tuned at this width holds at `width`, with heads of the same width; null: no transfer; docs/width_transfer.md."""
    drops_inner: ClassVar[bool] = False
    """Whether a block that drops what it adds to x also drops the inner channels of its MLP."""

    def derive(self) -> dict[str, Any]:
        if self.head_width is None and self.width % self.heads:
            raise ValueError(
                f"width {self.width} is not a multiple of heads {self.heads}; change one, or set head_width"
            )
        if self.heads % (self.key_heads or self.heads):
            raise ValueError(f"key_heads {self.key_heads} does not divide heads {self.heads}")
        head_width = self.head_width or self.width // self.heads
        if self.positions != "learned" and head_width % 2:
            raise ValueError(f"rotary positions need an even head width, not {head_width}; or positions: learned")
        if self.moe is not None and (self.mlp != "swiglu" or self.bias):
            raise ValueError("moe: experts are swiglu without biases; leave mlp and bias")
        inner = inner_width(self.mlp, self.width)
        return {"key_heads": self.heads, "head_width": head_width, "mlp_width": inner}

    @property
    def derived(self) -> tuple[int, int, int]:
        """G, D and F, given or derived."""
        assert self.key_heads and self.head_width and self.mlp_width
        return self.key_heads, self.head_width, self.mlp_width

    @property
    def width_ratio(self) -> float:
        """C / C_0 of width transfer; 1 without."""
        return self.width / (self.base_width or self.width)


class Reader(Protocol):
    """What the queries of layer `layer` read; y has the shape of q, (B, H, T, D). k and v may have more rows."""

    rotation: Rotation | None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Block(nn.Module):
    """Pre-norm attention and MLP; `kernels`, when set, are the compiled (project, finish, project_apart)."""

    kernels: tuple[Callable, ...] | None = None

    def __init__(self, config: BlockConfig, layer: int):
        super().__init__()
        c, (G, D, inner) = config, config.derived
        self.layer, self.heads, self.key_heads, self.drops_inner = layer, c.heads, G, c.drops_inner
        self.attention_norm = norm(c.norm, c.width, c.norm_eps, bias=c.bias)
        queries, keys = c.heads * D, G * D
        self.qkv = Linear(c.width, queries + 2 * keys, bias=c.bias, role="attention", parts=(queries, keys, keys))
        self.q_norm = nn.RMSNorm(D, eps=c.norm_eps) if c.qk_norm else None
        self.k_norm = nn.RMSNorm(D, eps=c.norm_eps) if c.qk_norm else None
        self.output = Linear(queries, c.width, bias=c.bias, role="attention_out")
        self.mlp_norm = norm(c.norm, c.width, c.norm_eps, bias=c.bias)
        self.mlp = Mixture(c.moe, c.width, inner) if c.moe else MLP(c.mlp, c.width, inner, bias=c.bias)

    def forward(
        self,
        x: Tensor,
        reader: Reader,
        asking: slice | None = None,
        *,
        drop: float = 0.0,
        tell: Callable[[Routing], object] | None = None,
    ) -> Tensor:
        """x (B, T, C) to (B, T, C).

        With `asking`, only those rows are updated; the others serve as keys and values alone. `drop` is the dropout
        rate of what is added to x. A mixture of experts reports its routing to `tell`.
        """
        project, finish, project_apart, *_ = current_parts(self, reader)
        if asking is None:
            q, k, v = project(self, x, reader.rotation)
        else:
            everything, x = x, x[asking]
            q, k, v = project_apart(self, x, everything, reader.rotation)
        y = reader(self.layer, q, k, v)
        if isinstance(self.mlp, Mixture):  # never compiled: how many tokens an expert reads depends on the tokens
            x = self.add(x, y, drop)
            return x + dropped(self.mlp(self.mlp_norm(x), tell), drop)
        return finish(self, x, y, drop)

    @classmethod
    def parts(cls) -> tuple[Callable, ...]:
        """The functions before and after the reader, to be compiled."""
        return cls.project, cls.finish, cls.project_apart

    def project(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, C) to q (B, H, T, D), k and v (B, G, T, D); q and k are rotated to their positions."""
        H, G = self.heads, self.key_heads
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (H + 2 * G, -1))
        qk, v = qkv.split((H + G, G), dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.to(x.dtype).split((H, G), dim=-2)  # float32 also under mixed precision, like every norm
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=-2)
        q, k = turned(qk, rotation, v.dtype).split((H, G), dim=1)
        return q, k, v.transpose(1, 2)

    def project_apart(
        self, asking: Tensor, everything: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Like `project`, with q from the rows `asking` alone, k and v from `everything`."""
        H, G, qkv = self.heads, self.key_heads, itself(self.qkv)
        rows, bias = qkv.parts[0], qkv.bias
        parts = ((qkv.weight[:rows], asking), (qkv.weight[rows:], everything))
        biases = (None, None) if bias is None else (bias[:rows], bias[rows:])
        q, kv = (F.linear(self.attention_norm(x), w, b) for (w, x), b in zip(parts, biases, strict=True))
        k, v = kv.chunk(2, dim=-1)
        q = heads_of(q, H, asking, self.q_norm, rotation)
        return q, heads_of(k, G, everything, self.k_norm, rotation), heads_of(v, G, everything)

    def finish(self, x: Tensor, y: Tensor, drop: float = 0.0) -> Tensor:
        """Adds to x the output of attention, y (B, H, T, D), then the MLP of the sum."""
        return self.think(self.add(x, y, drop), drop)

    def add(self, x: Tensor, y: Tensor, drop: float = 0.0) -> Tensor:
        """x plus the projected output of attention."""
        return x + dropped(self.output(y.transpose(1, 2).flatten(-2)), drop)

    def think(self, x: Tensor, drop: float = 0.0) -> Tensor:
        """x plus the MLP of x."""
        return x + dropped(self.mlp(self.mlp_norm(x), drop * self.drops_inner), drop)


def heads_of(
    flat: Tensor, heads: int, stream: Tensor, norm: nn.Module | None = None, rotation: Rotation | None = None
) -> Tensor:
    """A projection of `stream`, (B, T, H D), as heads (B, H, T, D), normed where there is a norm, and rotated."""
    split = flat.unflatten(-1, (heads, -1))
    if norm is not None:
        split = norm(split.to(stream.dtype))  # float32 also under mixed precision, like every norm
    return turned(split, rotation, flat.dtype)


def turned(heads: Tensor, rotation: Rotation | None, dtype: torch.dtype) -> Tensor:
    """Heads (B, T, H, D) rotated to their positions, as (B, H, T, D)."""
    if rotation is not None:
        heads = rotate(heads, rotation.cos_TJ, rotation.sin_TJ, rotation.pairing)
    return heads.transpose(1, 2).to(dtype)


def current_parts(block: Any, reader: Any = None) -> tuple[Callable, ...]:
    """The functions of a block; compiled ones serve training and fixed sessions, as other work comes in many shapes."""
    has_one_shape = torch.is_grad_enabled() or getattr(reader, "clock", None) is not None
    return (block.kernels if has_one_shape else None) or block.parts()


def compile_blocks(blocks: Iterable[Any], backend: str, dynamic: bool = False) -> None:
    """Gives all `blocks` of a kind the same compiled graphs: parameters are inputs of the graph, not part of it.

    `dynamic`: one graph serves rows of any length.
    """
    # As newer PyTorch does by default (2.13, not 2.11): a backward expects gradients with the strides of their tensors,
    # which those of attention have, and copies any others.
    torch._functorch.config.guess_tangent_strides_as_outputs = True
    torch._dynamo.config.specialize_float = True  # they never change; as inputs, `dynamic` would trace everything twice
    for kind in {type(block) for block in blocks}:
        kernels = tuple(torch.compile(f, fullgraph=True, dynamic=dynamic, backend=backend) for f in kind.parts())
        for block in blocks:
            if type(block) is kind:
                block.kernels = kernels


def linear_work(config: BlockConfig) -> int:
    """Multiply-adds of one block for one token, without attention pairs."""
    G, D, _ = config.derived
    return config.width * (2 * config.heads + 2 * G) * D + mlp_work(config)


def mlp_work(config: BlockConfig) -> int:
    """Multiply-adds of a block's MLP for one token; in a mixture, those of the router and the active experts."""
    if config.moe is not None:
        return config.width * (3 * config.moe.active * config.derived[2] + config.moe.experts)
    return (3 if config.mlp == "swiglu" else 2) * config.width * config.derived[2]
