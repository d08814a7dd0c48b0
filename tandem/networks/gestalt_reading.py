"""One pass of Thought Gestalt over a batch of streams, in two phases: see gestalt.py and gestalt_layout.py.

Letters: N tokens, q labels, P packed positions, R rows (sentences) of a step, C width.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from tandem.corpus import Batch, StreamBatch
from tandem.networks.gestalt_layout import Layout, PackedReader, Rows, gathered
from tandem.networks.network import compute_dtype
from tandem.nn.dropout import drawn, dropped, tokens_dropped
from tandem.nn.spans import sent
from tandem.recipe import Settings

if TYPE_CHECKING:
    from tandem.networks.gestalt import Gestalt


ROUND = 16
"""Positions of a call are padded to a multiple of this in bfloat16 on a CPU: oneDNN generates code for every new size
of a product, and keeps that of the last 1,024 (docs/log.md)."""


class GestaltDropout(Settings):
    """Dropout rates, used in training alone; those of tokens and thoughts are warmed up (network.streams)."""

    residual: float = Field(0.1, ge=0, le=1)
    """Rate for embeddings, for what attention and MLP add, and for the MLP's inner channels."""
    attention: float = Field(0.2, ge=0, le=1)
    """Rate for attention weights of both kinds."""
    token: float = Field(0.15, ge=0, le=1)
    """Rate for whole text tokens: the vector, its position included, is set to 0."""
    thought: float = Field(0.15, ge=0, le=1)
    """Rate for what the thought head projects."""


NO_DROPOUT = GestaltDropout(residual=0.0, attention=0.0, token=0.0, thought=0.0)


class Reading:
    """One pass over a batch of streams, in two phases."""

    def __init__(self, network: "Gestalt", layout: Layout, batch: Batch | StreamBatch):
        self.network, self.layout, self.batch = network, layout, batch
        c = network.config
        self.key, rates, warmed = None, NO_DROPOUT, 0.0
        if isinstance(batch, StreamBatch) and batch.key is not None and torch.is_grad_enabled():
            # Micro-batches of a step share its key but must not share masks, so the text is part of the key here
            self.key, rates, warmed = (batch.key, *batch.documents[:1], *batch.offsets[:1]), c.dropout, batch.dropout
        self.rounds = layout.device.type == "cpu" and compute_dtype(network.table.weight) == torch.bfloat16
        self.residual, self.attention = rates.residual, rates.attention
        self.token, self.thought = warmed * rates.token, warmed * rates.thought

    def run(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Embeddings (N, C) to hidden states (q, C), and |r| (sentences,), both in the order of the batch."""
        network, layout = self.network, self.layout
        self.whole_rotation = network.rotation(torch.arange(network.config.positions_of_row), x)
        self.ranks = network.ranks(range(network.config.depth), x)
        states, thoughts, lengths = self._sentence_steps(x)
        hidden = torch.cat(self._later_blocks(states, thoughts))
        if lengths is None:
            return hidden[layout.order], None
        sentences = sent(np.concatenate(layout.sentences).argsort(), x.device)
        return hidden[layout.order], lengths[sentences]

    # ---- phase 1: sentence step by sentence step ------------------------------------------------------------------

    def _sentence_steps(self, x: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """By step, states that later blocks continue and thoughts that later sentences read; |r| of all sentences."""
        network, layout, c = self.network, self.layout, self.network.config
        layers = network.reads_memory(range(network.depth_of_thought))
        projected: dict[int, list[Tensor]] = {layer: [] for layer in layers}
        states, thoughts, lengths, seed = [], [], [], None
        for t, rest in enumerate(self._embedded(x)):
            R, n = layout.widths[t], layout.filled(t)
            held = {layer: [p[:R] for p in projected[layer][t - n : t]] for layer in layers}
            slots = [m[:R] for m in thoughts[t - n : t]] if c.in_context else []
            seeds = seed if c.seed and t else None
            state, thought, length = network.recomputed(self._sentence_step, t, rest, seeds, held, slots)
            states.append(state)
            if thought is None:
                continue
            lengths.append(length)
            if t + 1 == len(layout.widths) or not c.recurrent:
                continue
            seed = (thought.detach() if c.detach else thought)[: layout.widths[t + 1]]
            thoughts.append(seed)
            for layer in layers:
                projected[layer].append(network.stack[layer].memory.project(seed))  # type: ignore[union-attr]
        return states, thoughts, torch.cat(lengths) if lengths else None

    def _embedded(self, x: Tensor) -> list[Tensor]:
        """Embeddings of each step, with positions: tokens, then ends."""
        network, layout, batch = self.network, self.layout, self.batch
        with drawn(self.key, x.device, "embedding"):
            rest = gathered(torch.cat((x, network.table.weight[network.end][None])), layout.rest)
            sizes = [int(layout.lengths[of].sum()) + len(of) for of in layout.sentences]
            if network.places is not None:
                # what is neither start nor slot in a step
                own = [rows.places[-size:] for rows, size in zip(layout.steps, sizes, strict=True)]
                rest = rest + network.places(torch.cat(own))
            if self.token and isinstance(batch, StreamBatch):
                text = torch.cat((batch.tokens != batch.document_end, batch.tokens.new_zeros(1, dtype=torch.bool)))  # type: ignore
                rest = tokens_dropped(rest, self.token, text[layout.rest])
            return list(dropped(rest, self.residual).split(sizes))

    def _sentence_step(
        self, t: int, rest: Tensor, seed: Tensor | None, held: dict[int, list[Tensor]], slots: list[Tensor]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(positions without ends (P - R, C), thoughts (R, C), |r| (R,)) of one step."""
        network, rows, R = self.network, self.layout.steps[t], self.layout.widths[t]
        with drawn(self.key, rest.device, "sentences", t):
            start = network.table.weight[network.begin].expand(R, -1) if seed is None else seed.to(rest.dtype)
            front = torch.cat((torch.stack(slots, dim=1).flatten(0, 1).to(rest.dtype), start)) if slots else start
            if network.places is not None:
                front = front + network.places(rows.places[: len(front)])
            x = torch.cat((dropped(front, self.residual), rest))
            reader = self._reader(rows)
            for layer, thoughts in held.items():
                if thoughts:
                    reader.thoughts[layer] = torch.stack(thoughts, dim=1), self.ranks[layer]
            x = self._blocks(range(network.depth_of_thought), x, reader)
            if network.config.thought_from is None:
                x = network.norm(x)
            if not network.config.thinks:
                return x[:-R], None, None
            return x[:-R], *network.thought(x[-R:], self.thought)

    # ---- phase 2: all steps at once -------------------------------------------------------------------------------

    def _later_blocks(self, states: list[Tensor], thoughts: list[Tensor]) -> list[Tensor]:
        """Hidden states (P, C) of every chunk."""
        network, layout = self.network, self.layout
        if network.config.thought_from is None:
            return states
        layers = network.reads_memory(range(network.depth_of_thought, network.config.depth))
        every = torch.cat(thoughts) if thoughts and layers else None
        projected = {layer: network.stack[layer].memory.project(every) for layer in layers if every is not None}  # type: ignore[union-attr]
        return [
            network.recomputed(self._chunk, i, [states[t] for t in group], projected)
            for i, group in enumerate(layout.groups)
        ]

    def _chunk(self, i: int, states: list[Tensor], projected: dict[int, Tensor]) -> Tensor:
        network, rows = self.network, self.layout.chunks[i]
        with drawn(self.key, states[0].device, "chunk", i):
            reader = self._reader(rows)
            if rows.windows.shape[1]:
                for layer, every in projected.items():
                    reader.thoughts[layer] = gathered(every, rows.windows), self.ranks[layer]
            layers = range(network.depth_of_thought, network.config.depth)
            return network.norm(self._blocks(layers, torch.cat(states), reader))

    # ---- both -----------------------------------------------------------------------------------------------------

    def _blocks(self, layers: range, x: Tensor, reader: PackedReader) -> Tensor:
        """x (P, C) through some blocks."""
        P = len(x)
        x = F.pad(x[None], (0, 0, 0, len(reader.filled) - P))  # not a view, which the first block would be traced for
        for layer in layers:
            x = self.network.stack[layer](x, reader, drop=self.residual)
        return x[0, :P]

    def _reader(self, rows: Rows) -> PackedReader:
        more = -len(rows.places) % ROUND if self.rounds else 0
        return PackedReader(rows, self.whole_rotation, self.attention, more)
