"""The decoder block of an encoder-decoder: it reads its own stream, then the encoder's latents of the context.

    x ──┬─ norm ─ q, k, v ─ reader ─ output ─┬─ + ──┬─ norm ─ q ─ reader ─ output ─┬─ + ──┬─ norm ─ mlp ─┬─ + ──
        └────────────────────────────────────┘      └─────────────────────────────┘      └──────────────┘
                                                            latents ─ k, v

An empty context adds only the output's bias, where there is one. Keys and values of the latents are projected once
for a text: the reader calls for them, in training for a whole batch, in decoding before the first token.

Cost: 4 C^2 more than a block: 2 C^2 for each generated token, 2 C^2 for each latent.
Shapes: B rows, T tokens, N latents, C width, H heads, G key heads, D head width.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from tandem.nn.block import Block, BlockConfig, Reader, current_parts, heads_of, linear_work
from tandem.nn.init import Linear
from tandem.nn.norm import norm
from tandem.nn.rope import Rotation


class CrossReader(Reader, Protocol):
    """A reader that also reads the context."""

    def cross(self, block: "CrossBlock", q: Tensor) -> Tensor:
        """What queries (B, H, T, D) read from the context, of the same shape."""
        ...


class CrossBlock(Block):
    """A block with attention to the context between its own attention and its MLP."""

    def __init__(self, config: BlockConfig, layer: int):
        super().__init__(config, layer)
        c, (G, D, _) = config, config.derived
        queries, keys = c.heads * D, G * D
        self.cross_norm = norm(c.norm, c.width, c.norm_eps, bias=c.bias)
        self.cross_q = Linear(c.width, queries, bias=c.bias, role="attention")
        self.cross_kv = Linear(c.width, 2 * keys, bias=c.bias, role="attention", parts=(keys, keys))
        self.cross_output = Linear(queries, c.width, bias=c.bias, role="attention_out")
        self.cross_q_norm = nn.RMSNorm(D, eps=c.norm_eps) if c.qk_norm else None
        self.cross_k_norm = nn.RMSNorm(D, eps=c.norm_eps) if c.qk_norm else None

    def forward(self, x: Tensor, reader: CrossReader) -> Tensor:
        """x (B, T, C) to (B, T, C)."""
        project, ask, finish = current_parts(self, reader)
        q, k, v = project(self, x, reader.rotation)
        x, q = ask(self, x, reader(self.layer, q, k, v), reader.rotation)
        return finish(self, x, reader.cross(self, q))

    @classmethod
    def parts(cls) -> tuple[Callable, ...]:
        return cls.project, cls.ask, cls.finish

    def ask(self, x: Tensor, y: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        """x plus what it read from its own stream, and its queries (B, H, T, D) to the context."""
        x = self.add(x, y)
        return x, heads_of(self.cross_q(self.cross_norm(x)), self.heads, x, self.cross_q_norm, rotation)

    def keys(self, latents: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        """Keys and values (B, G, N, D) of latents (B, N, C)."""
        k, v = self.cross_kv(latents).chunk(2, dim=-1)
        G = self.key_heads
        return heads_of(k, G, latents, self.cross_k_norm, rotation), heads_of(v, G, latents)

    def finish(self, x: Tensor, y: Tensor) -> Tensor:
        """Adds to x what it read from the context, y (B, H, T, D), then the MLP of the sum."""
        return self.think(x + self.cross_output(y.transpose(1, 2).flatten(-2)))


def cross_work(config: BlockConfig) -> tuple[int, int]:
    """Multiply-adds of one block for one generated token, and for one latent."""
    G, D, _ = config.derived
    return linear_work(config) + 2 * config.width * config.heads * D, 2 * config.width * G * D
