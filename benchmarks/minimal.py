"""A training step as a careful person would write it by hand: the yardstick for the trainer's time, memory and losses.

The package's decoder (RMSNorm, SwiGLU, RoPE on adjacent pairs, tied table) with SDPA's causal flag and
F.cross_entropy over all logits, compiled per block, AdamW and clipping. It shares no code with it.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, C, heads, inner):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(C, eps=1e-6), nn.RMSNorm(C, eps=1e-6)
        self.qkv, self.out = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)
        self.up, self.down = nn.Linear(C, 2 * inner, bias=False), nn.Linear(inner, C, bias=False)

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def turn(x, cos, sin):
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


class Minimal(nn.Module):
    def __init__(self, vocabulary, depth, C, heads, inner, T):
        super().__init__()
        self.table = nn.Embedding(vocabulary, C)
        self.blocks = nn.ModuleList(Block(C, heads, inner) for _ in range(depth))
        self.norm = nn.RMSNorm(C, eps=1e-6)
        D = C // heads
        angle = torch.arange(T)[:, None] * torch.exp(-math.log(10_000) * torch.arange(0, D, 2) / D)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens, targets):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.table.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)


def copy_weights(minimal, decoder):
    """The initial weights of the package's decoder, so that both start from the same point."""
    with torch.no_grad():
        minimal.table.weight.copy_(decoder.table.weight[: minimal.table.num_embeddings])
        minimal.norm.weight.copy_(decoder.norm.weight)
        for mine, theirs in zip(minimal.blocks, decoder.blocks, strict=True):
            pairs = {
                "norm1": theirs.attention_norm,
                "norm2": theirs.mlp_norm,
                "qkv": theirs.qkv,
                "out": theirs.output,
                "up": theirs.mlp.up,
                "down": theirs.mlp.down,
            }
            for name, source in pairs.items():
                getattr(mine, name).weight.copy_(source.weight)


class Stepper:
    """model(tokens, targets) -> backward -> clip -> AdamW at the rates handed in."""

    def __init__(self, model, *, lr, weight_decay=0.1, dtype=torch.float32, compiled=False):
        self.model, self.dtype, self.lr = model, dtype, lr
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
        if compiled:
            for block in model.blocks:
                block.compile(fullgraph=True)

    def __call__(self, tokens, targets, multiplier=1.0):
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            loss = self.model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimiser.param_groups:
            group["lr"] = self.lr * multiplier
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return loss.item()
