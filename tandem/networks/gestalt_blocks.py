"""What Thought Gestalt adds to Tandem's block: cross-attention over thoughts, and the head that makes them.

    S     self-attention, MLP                     the house block (nn/block.py)
    C     cross-attention, MLP                    MemoryBlock
    SC    self-attention, cross-attention, MLP    SerialBlock: the second norm reads what the first has added
    P     self- and cross-attention, MLP          ParallelBlock: both read the input of the block

Cross-attention over thoughts m_j, of rank r among those that are visible (oldest first):

    keys W_k (m_j + P_r) + b_k      values W_v m_j + b_v      increment  g O(attend(q; keys, values))

P_r is added to keys alone. As W_k (m + P_r) = W_k m + W_k P_r, a thought is projected once (`MemoryRead.project`) and a
table of M rows is added by rank (`MemoryRead.ranks`): eviction shifts the ranks and projects nothing again.

Shapes: P positions, packed, one row (1, P, C); H heads, D head width, C width, M slots, R rows (sentences).
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.nn.block import Block, BlockConfig, Reader, current_parts
from tandem.nn.dropout import dropped
from tandem.nn.init import Linear, itself
from tandem.nn.mlp import MLP
from tandem.nn.norm import norm
from tandem.nn.rope import Rotation


class Memory(Reader, Protocol):
    """A reader that also reads thoughts from memory."""

    filled: Tensor
    """(P,) bool: positions of sentences that have a memory."""

    def remember(self, layer: int, q: Tensor) -> Tensor:
        """What the queries (1, H, P, D) of a layer read of the thoughts, of the same shape; 0 where there are none."""
        ...


class Gate(nn.Module):
    """One number that multiplies what is read from memory; initially 1."""

    role = "gate"

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class MemoryRead(nn.Module):
    """Cross-attention over thoughts: pre-norm, gated."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        c, C = config, config.width
        self.heads = c.heads
        self.norm = norm(c.norm, C, c.norm_eps, bias=c.bias)
        self.q = Linear(C, C, bias=c.bias, role="attention")
        self.kv = Linear(C, 2 * C, bias=c.bias, role="attention", parts=(C, C))
        self.output = Linear(C, C, bias=c.bias, role="attention_out")
        self.gate = Gate()

    def project(self, thoughts: Tensor) -> Tensor:
        """Thoughts (.., C) to keys, the rank left out, and values (.., 2C)."""
        return self.kv(thoughts.to(self.kv.weight.dtype))  # thoughts are float32 at least

    def ranks(self, table: Tensor) -> Tensor:
        """What ranks add to keys: P (M, C) to (M, C)."""
        return F.linear(table, itself(self.kv).weight[: table.shape[1]])

    def ask(self, x: Tensor) -> Tensor:
        """x (1, P, C) to queries (1, H, P, D)."""
        return self.q(self.norm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def increment(self, y: Tensor, filled: Tensor, drop: float = 0.0) -> Tensor:
        """What y (1, H, P, D), read from memory, adds to x; exactly 0, bias included, where memory is empty."""
        read = self.gate(self.output(y.transpose(1, 2).flatten(-2)))
        return dropped(read.masked_fill(~filled[:, None], 0.0), drop)

    def forward(self, x: Tensor, layer: int, reader: Memory, drop: float) -> Tensor:
        return self.increment(reader.remember(layer, self.ask(x)), reader.filled, drop)


class MemoryBlock(nn.Module):
    """C: cross-attention over thoughts, unless memory has no slots, then the MLP; `kernels`, when set, are the compiled
    (ask, finish)."""

    kernels: tuple[Callable, ...] | None = None

    def __init__(self, config: Any, layer: int):
        super().__init__()
        c = config
        self.layer, self.drops_inner, self.slots = layer, c.drops_inner, c.memory
        self.memory = MemoryRead(c)
        self.mlp_norm = norm(c.norm, c.width, c.norm_eps, bias=c.bias)
        self.mlp = MLP(c.mlp, c.width, c.derived[2], bias=c.bias)

    def forward(self, x: Tensor, reader: Memory, *, drop: float = 0.0) -> Tensor:
        """x (1, P, C) to (1, P, C)."""
        if not self.slots:
            return self.think(x, drop)
        ask, finish = current_parts(self, reader)
        y = reader.remember(self.layer, ask(self, x))
        return finish(self, x, y, reader.filled, drop)

    @classmethod
    def parts(cls) -> tuple[Callable, ...]:
        return cls.ask, cls.finish

    def ask(self, x: Tensor) -> Tensor:
        return self.memory.ask(x)

    def finish(self, x: Tensor, y: Tensor, filled: Tensor, drop: float = 0.0) -> Tensor:
        return self.think(x + self.memory.increment(y, filled, drop), drop)

    def think(self, x: Tensor, drop: float = 0.0) -> Tensor:
        """x plus the MLP of x."""
        return x + dropped(self.mlp(self.mlp_norm(x), drop * self.drops_inner), drop)


class SerialBlock(Block):
    """SC."""

    def __init__(self, config: BlockConfig, layer: int):
        super().__init__(config, layer)
        self.memory = MemoryRead(config)

    def forward(self, x: Tensor, reader: Memory, *, drop: float = 0.0) -> Tensor:
        x = self.read(x, reader, drop)
        return self.think(x + self.memory(x, self.layer, reader, drop), drop)

    def read(self, x: Tensor, reader: Memory, drop: float) -> Tensor:
        """x plus the output of self-attention."""
        q, k, v = current_parts(self, reader)[0](self, x, reader.rotation)
        return self.add(x, reader(self.layer, q, k, v), drop)


class ParallelBlock(SerialBlock):
    """P."""

    def forward(self, x: Tensor, reader: Memory, *, drop: float = 0.0) -> Tensor:
        return self.think(self.read(x, reader, drop) + self.memory(x, self.layer, reader, drop), drop)


class ThoughtHead(nn.Module):
    """The thought of a sentence from its state v at [EOS]:  r = W norm(v) + b,  thought = r / |r|."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        c = config
        self.norm = norm(c.norm, c.width, c.norm_eps, bias=c.bias)
        self.project = Linear(c.width, c.width, bias=True, role="thought")

    def forward(self, v: Tensor, drop: float = 0.0) -> tuple[Tensor, Tensor]:
        """v (R, C) to thoughts (R, C) and |r| (R,), float32 at least, autocast or not."""
        exact = torch.promote_types(v.dtype, torch.float32)
        with torch.autocast(v.device.type, enabled=False):
            u = dropped(self.norm(v), drop).to(exact)
            project = itself(self.project)
            r = F.linear(u, project.weight.to(exact), project.bias.to(exact))
        length = torch.linalg.vector_norm(r, dim=-1)
        return r / length.clamp_min(1e-12)[:, None], length


def hinge(length: Tensor) -> Tensor:
    """Squared distance of |r| from [0.9, 1.1]: without it |r|, on which no forward value depends, drifts."""
    return (0.9 - length).clamp_min(0) ** 2 + (length - 1.1).clamp_min(0) ** 2


def rank_table(slots: int, width: int, device: torch.device | str = "cpu") -> Tensor:
    """P (M, C): sine and cosine interleaved, of angle r 10000^(-2j/C), scaled to length 1 like a thought."""
    angles = Rotation(torch.arange(slots, device=device), width, dtype=torch.float64)
    table = torch.stack((angles.sin_TJ, angles.cos_TJ), dim=-1).flatten(1)
    return (table / (width / 2) ** 0.5).float()
