"""Thought Gestalt implemented literally: one stream, one sentence at a time. The reference for tests and benchmarks.

Nothing is packed, shared between steps or deferred: every sentence runs through all blocks, memory is projected again
for every sentence after its ranks are added, and the head reads one sentence at a time. No dropout.

Shapes: n + 2 positions of a sentence, F thoughts, C width, H heads, D head width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.corpus import StreamBatch
from tandem.networks.gestalt import Gestalt
from tandem.networks.gestalt_blocks import MemoryBlock, MemoryRead, ParallelBlock, SerialBlock, hinge, rank_table
from tandem.nn.rope import Rotation, rotate


@dataclass
class Sentence:
    """The outputs of one sentence: hidden states (n + 1, C) that predict, its thought (C,) and |r|."""

    hidden: Tensor
    thought: Tensor
    length: Tensor


def literal_loss(network: Gestalt, batch: StreamBatch) -> Tensor:
    """The loss of a step that consists of `batch` alone."""
    c = network.config
    mass = [tokens + batch.end_weight * rows for tokens, rows in zip(batch.tokens_at, batch.rows_at, strict=True)]
    total, targets, at, label = torch.zeros(()), batch.targets[0], 0, 0
    for stream in batch.lengths:
        memory: list[Tensor] = []
        for t, n in enumerate(stream):
            read = literal_sentence(network, batch.tokens[at : at + n], memory)
            asked = targets[label : label + n + 1]
            ce = F.cross_entropy((read.hidden @ network.head.T.to(read.hidden.dtype)).float(), asked, reduction="none")
            w = torch.where(asked == network.end, batch.end_weight, 1.0)
            rows, weight = (sum(batch.rows_at), sum(mass)) if c.reduction == "tokens" else (batch.rows_at[t], mass[t])
            total = total + (w * ce).sum() / weight + c.hinge * hinge(read.length) / rows
            memory.append(read.thought.detach() if c.detach else read.thought)
            at, label = at + n, label + n + 1
    return total


def literal_sentence(network: Gestalt, tokens: Tensor, thoughts: list[Tensor], closed: bool = True) -> Sentence:
    """Reads one sentence after all earlier thoughts of its stream; `closed`: [EOS] follows its tokens."""
    c, table = network.config, network.table.weight
    start = thoughts[-1] if c.seed and thoughts else table[network.begin]
    e = torch.cat((start[None].to(table.dtype), table[tokens], table[network.end][None][: int(closed)]))
    memory = thoughts[-c.memory :] if c.memory else []
    slots = len(memory) if c.in_context else 0
    if slots:
        e = torch.cat((torch.stack(memory).to(e.dtype), e))
    places = torch.arange(len(e))
    if c.in_context:
        places[slots:] += c.memory - slots
    x = e if network.places is None else e + network.places(places)
    rotation = Rotation.of(c, places, x) if network.places is None else None
    states = []
    for block in network.stack:
        x = _block(block, x, rotation, [] if slots else memory)
        states.append(x)
    hidden = network.norm(x)
    v = hidden[-1] if c.thought_from is None else states[c.thought_from - 1][-1]
    r = network.thought.project(network.thought.norm(v))
    r = r.to(torch.promote_types(r.dtype, torch.float32))
    return Sentence(hidden[slots : len(x) - int(closed)], r / r.norm().clamp_min(1e-12), r.norm())


def _block(block, x: Tensor, rotation: Rotation | None, memory: list[Tensor]) -> Tensor:
    if isinstance(block, MemoryBlock):
        x = x + _cross(block.memory, x, memory)
    elif isinstance(block, ParallelBlock):
        x = x + _own(block, x, rotation) + _cross(block.memory, x, memory)
    else:
        x = x + _own(block, x, rotation)
        if isinstance(block, SerialBlock):
            x = x + _cross(block.memory, x, memory)
    return x + block.mlp(block.mlp_norm(x))


def _own(block, x: Tensor, rotation: Rotation | None) -> Tensor:
    q, k, v = block.qkv(block.attention_norm(x)).unflatten(-1, (3, block.heads, -1)).unbind(1)
    if rotation is not None:
        q, k = (rotate(y[None], rotation.cos_TJ, rotation.sin_TJ, rotation.pairing)[0] for y in (q, k))
    return block.output(_attention(q, k, v, is_causal=True))


def _cross(read: MemoryRead, x: Tensor, memory: list[Tensor]) -> Tensor | float:
    if not memory:
        return 0.0  # not even the bias
    m, C = torch.stack(memory), x.shape[-1]
    ranked = m + rank_table(len(m), C).to(m.dtype)
    weight, bias = read.kv.weight.split(C), (None, None) if read.kv.bias is None else read.kv.bias.split(C)
    k, v = F.linear(ranked, weight[0], bias[0]), F.linear(m, weight[1], bias[1])
    q, k, v = (y.unflatten(-1, (read.heads, -1)) for y in (read.q(read.norm(x)), k, v))
    return read.gate.weight * read.output(_attention(q, k, v, is_causal=False))


def _attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    q, k, v = (y.transpose(0, 1)[None] for y in (q.to(v.dtype), k.to(v.dtype), v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)[0].transpose(0, 1).flatten(1)
