"""Sessions of context-ready networks: by the recurrence, or in K passes.

    streaming     h: one vector a text           x_t = e_t + F(norm(h + e_t))
    K passes      h(1) .. h(K-1) of each text    x_t(1) = e_t,  x_t(k) = e_t + F(norm(h(k-1) + e_t))

Shapes: B rows, T tokens, C width, K passes.
"""

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from tandem.corpus import Batch
from tandem.networks.correction import plus
from tandem.networks.network import Ids, columns_of, opening
from tandem.nn.cache import rows_of_state

if TYPE_CHECKING:
    from tandem.networks.context_ready import ContextReady


class ContextReadySession:
    """The wrapped network's session, and what the last column carries (B, 1, C)."""

    def __init__(self, network: "ContextReady", rows: int):
        self.network = network
        self.inner = network.wrapped.session(rows)
        self.carry: Tensor | None = None
        self.state: tuple[Tensor, ...] = ()  # as in DecoderSession
        self.passes: int | None = None  # passes that the prompt took; None: read token by token

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Ids]) -> Tensor:
        network, how, tokens = self.network, self.network.config.prefill, self.inner.align(prompts)
        e = self.inner.enter(tokens)
        if how == "stream":
            return self._walked(e)
        batch = Batch(tokens, tokens, self.inner.pads[:, None].expand_as(tokens))
        asked = "stream" if how == "converge" else how
        c, self.passes = network.corrected(e, network.wrapped.reader(e, batch), batch.starts, asked)
        x = plus(e, c)  # what enters the blocks in the last pass
        z = self.inner.states(x)
        self.carry = network.carry(x, z)[:, -1:]
        return self._logits(z)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        return self._walked(self.inner.enter(tokens))

    def _walked(self, e: Tensor) -> Tensor:
        z = [self.advance(e[:, i : i + 1]) for i in range(e.shape[1])]
        return self._logits(z[-1])

    def _logits(self, z: Tensor) -> Tensor:
        return self.inner.logits(z)

    def advance(self, e: Tensor) -> Tensor:
        """The last block's output for the next column, whose embeddings e (B, 1, C) are corrected first."""
        begins = self.inner.columns <= self.inner.pads  # on the host, and false after the prompt
        first = begins[:, None, None].to(e.device) if begins.any() else torch.zeros_like(e[..., :1], dtype=torch.bool)
        x = self._corrected(torch.zeros_like(e) if self.carry is None else self.carry, e, first)
        z = self.inner.states(x)
        carry = self.network.carry(x, z)
        self.carry = self.state[0].copy_(carry) if self.state else carry  # a graph reads where it has written
        return z

    def _corrected(self, h: Tensor, e: Tensor, first: Tensor) -> Tensor:
        """What enters the blocks at the next column, from what the last one carries."""
        return e + self.network.correct(h, e, first)

    def fix(self, capacity: int) -> None:
        """As DecoderSession.fix."""
        assert self.carry is not None
        self.inner.fix(capacity)
        self.ready, self.carry = self.inner.ready, self.carry.clone()
        self.state = (self.carry,)

    def fork(self, rows: Tensor | None = None) -> Self:
        other = copy(self)
        other.inner, other.state = self.inner.fork(rows), ()
        other.carry = None if self.carry is None else rows_of_state(self.carry, rows)
        return other

    @property
    def bytes(self) -> int:
        return self.inner.bytes + (0 if self.carry is None else self.carry.nbytes)


class PassesSession(ContextReadySession):
    """Generation in K passes: the model that `score_passes: K` scores.

    A pass of a token starts from what the pass before it carried from the token before. So all passes of a token are
    made at once, as rows of the wrapped session, and each has caches of its own:

        row k B + b     text b in pass k, 0 .. K - 1; the logits are those of the last B rows
    """

    def __init__(self, network: "ContextReady", rows: int):
        self.rows = rows
        self.K: int = network.config.score_passes
        super().__init__(network, self.K * rows)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Ids]) -> Tensor:
        texts = opening(prompts, self.rows, self.inner.columns > 0)
        if self.network.config.prefill == "stream":
            return super().prefill(texts * self.K)
        self.passes, read, carried, h = self.K, [], [], None
        for _ in range(self.K):  # each pass over the prompts fills its own caches
            read.append(inner := self.network.wrapped.session(self.rows))
            x = e = inner.enter(inner.align(texts))
            if h is not None:
                first = torch.arange(e.shape[1]) <= inner.pads[:, None]
                x = e + self.network.correct(h.roll(1, dims=1), e, first[..., None].to(e.device))
            z = inner.states(x)
            h = self.network.carry(x, z)
            carried.append(h[:, -1:])
        self.inner.join(read)
        self.carry = torch.cat(carried)
        return self._logits(z)

    def step(self, tokens: Tensor) -> Tensor:
        return super().step(columns_of(tokens, self.rows).repeat(self.K, 1))

    def _logits(self, z: Tensor) -> Tensor:
        return super()._logits(z[-self.rows :])

    def _corrected(self, h: Tensor, e: Tensor, first: Tensor) -> Tensor:
        B = self.rows
        return torch.cat((e[:B], super()._corrected(h[:-B], e[B:], first[B:])))

    def fork(self, rows: Tensor | None = None) -> Self:
        if rows is None:
            return super().fork()
        other = super().fork(torch.cat([rows + k * self.rows for k in range(self.K)]))
        other.rows = len(rows)
        return other
