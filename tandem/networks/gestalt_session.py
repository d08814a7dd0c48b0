"""Generation by Thought Gestalt: sentence by sentence, with the memory as state.

    prefill   x x x [EOS] x x x x [EOS] x x        closed sentences run to their thought, the last one stays open
    step      x                                    one position through all blocks
    step      [EOS]                                the sentence is closed: its thought is made and kept, and the logits
                                                   are those of the next sentence's first token

A sentence of `cap` tokens is closed by force, and [EOS] closes none without tokens. A text's tokens never contain
[EOS]; a prompt may, where its sentences are known to end. Rows may be at different sentences. A session keeps

    of a thought          keys and values of the C blocks (the thought itself where memory is in context)
    of an open position   keys and values of the S blocks, dropped as the sentence closes

Letters: B rows of the session, R of them that advance, P positions they read, packed row after row, M memory slots,
C width, V rows of the softmax.
"""

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tandem.networks.gestalt_layout import Rectangle, keys_and_values, planned, ranges
from tandem.networks.network import Ids, columns_of, opening
from tandem.nn.cache import rows_of_state
from tandem.nn.spans import Span, prefix, sent

if TYPE_CHECKING:
    from tandem.networks.gestalt import Gestalt


class GestaltSession:
    """By row: `held` positions of the open sentence, `slots` of these that are thoughts, `known` thoughts kept, and the
    sentences that were `closed_by_force`."""

    def __init__(self, network: "Gestalt", rows: int):
        self.network, self.rows = network, rows
        self.held, self.slots, self.known, self.closed_by_force = (np.zeros(rows, np.int64) for _ in range(4))
        self.seeds: list[Tensor | None] = [None] * rows
        """The last thought of each row."""
        self.own: dict[int, Tensor] = {}
        """Keys and values by layer, (2, B, H, positions, D)."""
        self.thoughts: dict[int, Tensor] = {}
        """Thoughts by layer of cross-attention, projected (B, M, 2C); in context, as they are, (B, M, C) under -1."""
        with torch.no_grad():
            self.ranks = network.ranks(range(network.config.depth), network.table.weight)
        self.logits = torch.empty(rows, len(network.head), device=network.table.weight.device)
        """Logits of what follows, by row."""

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Ids]) -> Tensor:
        cut = [self._cut(prompt) for prompt in opening(prompts, self.rows, bool(self.held.any()))]
        for t in range(max(len(closed) for closed, _ in cut)):
            rows = [row for row, (closed, _) in enumerate(cut) if t < len(closed)]
            self._close(rows, [cut[row][0][t] for row in rows])
        cap = self.network.config.cap
        self.closed_by_force += [sum(len(sentence) == cap for sentence in closed) for closed, _ in cut]
        self.logits = self._read(range(self.rows), self._fronts(range(self.rows)), [tail for _, tail in cut])
        return self.logits

    def _cut(self, prompt: list[int]) -> tuple[list[list[int]], list[int]]:
        """The closed sentences of a prompt, and the tokens of the open one."""
        closed, tail = [], []
        for token in prompt:
            if token != self.network.end:
                tail.append(token)
            elif not tail:  # a full sentence was closed already, and an empty one is none
                continue
            if token == self.network.end or len(tail) == self.network.config.cap:
                closed.append(tail)
                tail = []
        return closed, tail

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        if not self.held.any():  # no prompt: the text starts here
            self.logits = self._read(range(self.rows), self._fronts(range(self.rows)), [[]] * self.rows)
        for column in columns_of(tokens, self.rows).T.tolist():
            self.logits = self._one_each(column)
        return self.logits

    def _one_each(self, tokens: list[int]) -> Tensor:
        """Logits (B, V) after one more token in every row."""
        network, cap = self.network, self.network.config.cap
        going = [row for row, token in enumerate(tokens) if token != network.end]
        closing = [row for row, token in enumerate(tokens) if token == network.end and self._lengths[row]]
        logits = self.logits.clone()
        if going:
            logits[sent(np.array(going), logits.device)] = self._read(
                going, [None] * len(going), [[tokens[row]] for row in going]
            )
        full = [row for row in going if self._lengths[row] == cap]
        self.closed_by_force[full] += 1
        if ending := sorted([*closing, *full]):
            self._close(ending, None)
            logits[sent(np.array(ending), logits.device)] = self._read(ending, self._fronts(ending), [[]] * len(ending))
        return logits

    @property
    def _lengths(self) -> np.ndarray:
        """Tokens of each row's open sentence; thoughts in context, then a seed or [BOS], lie before them."""
        return self.held - self.slots - 1

    # ---- sentences --------------------------------------------------------------------------------------------------

    def _fronts(self, rows: Sequence[int]) -> list[Tensor]:
        """What the next sentence of each row starts with: thoughts in context, if any, then seed or [BOS]."""
        network = self.network
        begin = network.table.weight[network.begin][None]
        fronts = []
        for row in rows:
            n = int(self.known[row])
            slots = self.thoughts[-1][row, :n] if network.config.in_context and n else begin[:0]
            self.held[row], self.slots[row] = 0, len(slots)
            last = self.seeds[row]
            seed = last[None] if network.config.seed and last is not None else begin
            fronts.append(torch.cat((slots.to(begin.dtype), seed.to(begin.dtype))))
        return fronts

    def _close(self, rows: list[int], sentences: list[list[int]] | None) -> None:
        """Reads whole sentences, or the [EOS] of open ones, as far as the thought, and keeps the thought."""
        network, c = self.network, self.network.config
        fronts = self._fronts(rows) if sentences else [None] * len(rows)
        texts = [[*text, network.end] for text in sentences or [[]] * len(rows)]
        states, last = self._states(rows, fronts, texts, range(network.depth_of_thought))
        v = states[last]
        thoughts, _ = network.thought(network.norm(v) if c.thought_from is None else v)
        for i, row in enumerate(rows):
            self.seeds[row] = thoughts[i]
        if not c.memory:
            return
        parts = {-1: thoughts} if c.in_context else {
            layer: network.stack[layer].memory.project(thoughts) for layer in self.ranks  # type: ignore[union-attr]
        }  # fmt: skip
        for layer, new in parts.items():
            self.thoughts[layer] = self._pushed(self.thoughts.get(layer), rows, new)
        self.known[rows] = np.minimum(self.known[rows] + 1, c.memory)

    def _pushed(self, held: Tensor | None, rows: list[int], new: Tensor) -> Tensor:
        """Memory (B, M, ..) with one more thought in each of the rows, the oldest dropped where it was full; a new
        tensor, so that forks may share the old one."""
        M = self.network.config.memory
        kept = new.new_zeros(self.rows, M, new.shape[-1]) if held is None else held.clone()
        index, known = (sent(x, new.device) for x in (np.array(rows), self.known[rows]))
        older = kept[index]
        older = torch.where((known == M)[:, None, None], older.roll(-1, dims=1), older)
        older[torch.arange(len(rows), device=new.device), known.clamp_max(M - 1)] = new
        kept[index] = older
        return kept

    # ---- positions --------------------------------------------------------------------------------------------------

    def _read(self, rows: Sequence[int], fronts: Sequence[Tensor | None], texts: list[list[int]]) -> Tensor:
        """Logits (R, V) after reading these positions of some rows through all blocks."""
        network = self.network
        states, last = self._states(list(rows), fronts, texts, range(network.config.depth))
        hidden = network.norm(states[last])
        return (hidden @ network.head.T).float()

    def _states(
        self, rows: list[int], fronts: Sequence[Tensor | None], texts: list[list[int]], layers: range
    ) -> tuple[Tensor, Tensor]:
        """States (P, C) of each row's front and tokens after some blocks, and the index of each row's last one."""
        network = self.network
        device = network.table.weight.device
        tokens = network.embed(sent(np.array([t for text in texts for t in text], dtype=np.int64), device))
        parts = []
        for front, text in zip(fronts, tokens.split([len(text) for text in texts]), strict=True):
            parts += [text] if front is None else [front, text]
        lengths = np.array([len(text) + (0 if f is None else len(f)) for f, text in zip(fronts, texts, strict=True)])
        reader = SessionReader(self, np.array(rows), lengths)
        x = torch.cat(parts)
        if network.places is not None:
            x = x + network.places(reader.places)
        x = x[None]
        for layer in layers:
            x = network.stack[layer](x, reader)
        self.held[rows] += lengths
        return x[0], sent(np.cumsum(lengths) - 1, device)

    # ---- state ------------------------------------------------------------------------------------------------------

    def fork(self, rows: Tensor | None = None) -> "GestaltSession":
        kept = torch.arange(self.rows) if rows is None else rows.cpu()
        other = copy(self)
        other.rows = len(kept)
        counts = self.held, self.slots, self.known, self.closed_by_force
        other.held, other.slots, other.known, other.closed_by_force = (x[kept.numpy()] for x in counts)
        other.logits = rows_of_state(self.logits, kept)
        other.own = {layer: rows_of_state(kv, kept, dim=1) for layer, kv in self.own.items()}
        other.thoughts = {layer: rows_of_state(x, rows) for layer, x in self.thoughts.items()}
        other.seeds = [self.seeds[row] for row in kept]
        return other

    @property
    def bytes(self) -> int:
        own = sum(kv[:, 0, :, 0].nbytes * int(self.held.sum()) for kv in self.own.values())
        return own + sum(kept[0, 0].nbytes * int(self.known.sum()) for kept in self.thoughts.values())


class SessionReader:
    """Reads the caches of the rows that advance, after appending their new positions."""

    def __init__(self, session: GestaltSession, rows: np.ndarray, lengths: np.ndarray):
        network, c = session.network, session.network.config
        self.session, self.device = session, network.table.weight.device
        before, R, L = session.held[rows], len(rows), int(lengths.max())
        self.index = sent(rows, self.device)
        self.row = sent(np.repeat(rows, lengths), self.device)
        column = ranges(before, lengths)
        self.column = sent(column, self.device)
        slots = np.repeat(session.slots[rows], lengths)
        in_front = column < slots
        places = np.where(in_front, column, column - slots + (c.memory if c.in_context else 0))
        self.places = sent(places, self.device)
        self.rotation = network.rotation(self.places, network.table.weight)
        known = np.zeros_like(rows) if c.in_context else session.known[rows]
        self.filled = sent(np.repeat(known > 0, lengths), self.device)
        cell = np.repeat(np.arange(R), lengths) * L + ranges(np.zeros_like(lengths), lengths)
        self.rect = Rectangle(R, L, sent(cell, self.device))
        reads = before[:, None] + np.minimum(np.arange(L) + 1, lengths[:, None])
        self.most, self.memory = int(reads.max()), int(known.max(initial=0))
        own = Span(torch.zeros(R, L, dtype=torch.long), torch.from_numpy(reads))
        self.own = planned(own, self.most, self.device)
        self.remembered = planned(prefix(torch.from_numpy(known), L), self.memory, self.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = self.session.own
        if layer not in own:
            H, D = k.shape[1], k.shape[3]
            own[layer] = k.new_zeros(2, self.session.rows, H, self.session.network.config.positions_of_row, D)
        kv = own[layer]
        kv[:, self.row, :, self.column] = torch.stack((k[0], v[0])).permute(2, 0, 1, 3)
        k, v = kv[:, self.index, :, : self.most]
        return self.rect.read(q, k, v, self.own)

    def remember(self, layer: int, q: Tensor) -> Tensor:
        if not self.memory:
            return torch.zeros_like(q)
        kept = self.session.thoughts[layer][self.index, : self.memory]
        k, v = keys_and_values(kept, self.session.ranks[layer].to(kept.dtype), q.shape[1])
        return self.rect.read(q, k, v, self.remembered)
