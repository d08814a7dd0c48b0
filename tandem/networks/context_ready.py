"""The Context-Ready Transformer: every token enters already in context, so fewer blocks are needed.

In a plain decoder a token enters as its bare embedding e_t. Here a small network F corrects the embedding with h_(t-1),
the last block's output at the previous token; the model is a recurrent network over positions:

    c_t = F(norm(h_(t-1) + e_t))      h_t = blocks(e_t + c_t; caches)      logits_t = head(norm(h_t))      h_0 = 0

and yet it trains in parallel. Pass k runs the blocks over the whole row with the corrections of the previous pass:

    x(k) = e + c(k-1)      z(k) = blocks(x(k))      c(k)_t = F(norm(z(k)_(t-1) + e_t))      c(0) = 0

    blocks = identity, F(norm(u)) = u / 2, e = 1:      K  z(K)                         positions equal to streaming
                                                       1  1    1    1      1           0
    Corrections are replaced, never added up, so       2  1.5  2    2      2           1
    each pass makes one more position exact; only      3  1.5  2.25 2.5    2.5         2
    the last pass is asked for tokens.                 4  1.5  2.25 2.625  2.75        3

One pass is the plain decoder, bit for bit. K is fixed, or drawn for every step, the same for all its micro-batches and
processes. `unroll: bptt` walks the row position by position instead and trains through the whole recurrence.

Scores are those of streaming, which is what a session does: passes are added until no correction at a position or
before it moves by more than `tolerance`. Each position is decided by itself, so a score depends on the past alone.
With `score_passes: K`, scores and sessions are those of the network in K passes, which is another model.

Cost: K passes of the blocks and K - 1 corrections, each 8 C^2 multiply-adds, to train; one of each to decode a token.
Source: The Context-Ready Transformer (arXiv 2606.27538), which may be under a pending patent: docs/context_ready.md.
Shapes: B rows, T tokens, C width, K passes.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tandem.corpus import Batch
from tandem.networks.context_ready_session import ContextReadySession, PassesSession
from tandem.networks.correction import Correction, CorrectionConfig, Passes, plus
from tandem.networks.cost import Cost
from tandem.networks.decoder import Decoder
from tandem.networks.network import Network, compute_dtype
from tandem.networks.sps import SPS
from tandem.nn.dropout import Masks
from tandem.nn.init import initialise
from tandem.nn.spans import Span, sent
from tandem.recipe import UserError, register

WALKED = 8  # from this many rows on, a CPU is faster streaming them side by side than in passes (docs/log.md)


@register("network", "context_ready")
class ContextReady(Network):
    """A few wide blocks behind a correction from the token before (arXiv 2606.27538); defaults are the paper's."""

    Wrapped: ClassVar[type[Decoder]] = Decoder
    free = ("dropout", "passes", "passes_min", "score_passes", "unroll", "correction_init", "prefill", "tolerance")

    class Config(CorrectionConfig, Decoder.Config): ...

    def __init__(self, config: Config, vocabulary: int, context: int, generator: torch.Generator | None = None):
        super().__init__(config, vocabulary, context)
        self.wrapped = self.Wrapped(self._plain(config), vocabulary, context, generator)
        self.correction = Correction(config)
        initialise(self.correction, config.init, config.depth, generator)
        if config.correction_init == "zero":
            self.correction.zero()

    @classmethod
    def check(cls, recipe: Any) -> Iterator[tuple[str, str]]:
        if recipe.network.unroll != "bptt":
            return
        if recipe.training.recompute:
            yield "training.recompute", "position by position (network.unroll: bptt) there is no pass to recompute"
        if recipe.network.dropout:
            yield "network.dropout", "position by position (network.unroll: bptt) nothing is dropped; take passes"
        if recipe.network.moe:
            yield (
                "network.moe",
                "experts share the load of a pass, and position by position (unroll: bptt) there is none",
            )

    @classmethod
    def _plain(cls, config: Any) -> Any:
        """The settings of the wrapped network."""
        return cls.Wrapped.Config(**config.shared_with(cls.Wrapped.Config))

    @classmethod
    def tiny(cls) -> dict[str, Config]:
        # As many passes as the longest text has tokens: then training equals streaming.
        exact: dict[str, Any] = {"passes": 20, "passes_min": None, "depth": 1}
        two: dict[str, Any] = {"passes": 2, "score_passes": 2, "passes_min": None, "depth": 2, "prefill": "converge"}
        bptt: dict[str, Any] = {"unroll": "bptt", "depth": 2, "window": 5, "positions": "learned", "base_width": 8}
        shared: dict[str, Any] = {"width": 32, "heads": 4, "prefill": "stream", "tolerance": 1e-12}
        return {name: cls.Config(**shared | own) for name, own in (("passes", exact), ("two", two), ("bptt", bptt))}

    @classmethod
    def degenerate(cls, config: Config) -> tuple[Config, Any, Callable[[str], str | None]]:
        wrapped, plain, own = cls.Wrapped.degenerate(cls._plain(config))
        theirs = wrapped.shared_with(cls.Wrapped.Config)
        one = config.model_copy(update={**theirs, "passes": 1, "passes_min": None, "unroll": "passes"})
        return one, plain, lambda name: own(name[8:]) if name.startswith("wrapped.") else None

    @classmethod
    def drawing(cls, config: Config, starts: list[int]) -> list[tuple[str, Span, int]]:
        return cls.Wrapped.drawing(cls._plain(config), starts)

    @property
    def longest(self) -> int | None:
        return self.wrapped.longest

    @property
    def blocks(self) -> nn.ModuleList:
        return self.wrapped.blocks

    @property
    def shards(self) -> list[nn.Module]:
        return list(self.blocks)[: -1 if self.config.correction == "tied" else None]  # its MLP is also called alone

    @property
    def head(self) -> Tensor:
        return self.wrapped.head

    def embed(self, tokens: Tensor) -> Tensor:
        return self.wrapped.embed(tokens)

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        self.wrapped.routings = []  # recomputing the previous corrections has reported them again
        e = self.wrapped.placed(x, batch)
        K = self._drawn(batch.key)
        z = self._walk(e, batch) if K is None else self._pass(e, batch, K)
        return self.touched(self.wrapped.norm(z), [self.correction] if K == 1 else []), self.wrapped.extra(batch)

    def read(self, batch: Batch, x: Tensor | None = None, passes: Passes | None = None) -> Tensor:
        """As `Network.read`; `passes` replaces the settings'."""
        e = self.wrapped.placed(self.embed(batch.tokens) if x is None else x, batch)
        asked: Passes = passes or self.config.score_passes
        walks = asked == "stream" and e.device.type == "cpu" and len(e) >= WALKED and not torch.is_grad_enabled()
        z = self._walk(e, batch) if walks else self._pass(e, batch, asked)
        self.wrapped.routings = []  # no loss asks for them, and they would keep the whole graph
        return self.wrapped.norm(z)

    def _drawn(self, key: int | None) -> int | None:
        """K of the step of this key; None: it goes position by position."""
        c = self.config
        if c.unroll == "bptt":
            return None
        if c.passes_min is None or key is None:
            return c.passes
        return int(torch.randint(c.passes_min, c.passes + 1, (), generator=torch.Generator().manual_seed(key)))

    def _pass(self, e: Tensor, batch: Batch, passes: Passes) -> Tensor:
        """The last block's output (B, T, C) in the last of K passes."""
        reader = self.wrapped.reader(e, batch)
        reader.masks = Masks.of(self.config.dropout, batch)
        e = reader.masks.enter(e, batch.tokens, self.vocabulary)  # once for all passes
        c, reader.masks.turn = self.corrected(e, reader, batch.starts, passes)
        return self.wrapped.states(plus(e, c), reader)

    def corrected(self, e: Tensor, reader: Any, starts: Tensor, passes: Passes) -> tuple[Tensor | None, int]:
        """(c(K-1), which enters the last pass, None for K = 1; K)."""
        if passes == "stream":
            return self._converged(e, reader, starts)
        c = None
        for c in islice(self.corrections(e, reader, starts), passes - 1):  # noqa: B007 - the last one
            pass
        return c, passes

    def corrections(self, e: Tensor, reader: Any, starts: Tensor) -> Iterator[Tensor]:
        """c(1), c(2), ... without end, each computed on demand."""
        first, c, k = _first(starts, e.device), None, 0
        while True:
            k += 1
            c = self.recomputed(self.next, e, c, reader, first, k)  # of a pass, only its corrections are kept
            yield c

    def next(self, e: Tensor, c: Tensor | None, reader: Any, first: Tensor, k: int = 0) -> Tensor:
        """c(k) from c(k-1): one pass of the blocks, one correction."""
        x, reader.masks.turn = plus(e, c), k
        h = self.carry(x, self.wrapped.states(x, reader))
        c = self.correct(h.roll(1, dims=1), e, first)
        return c if self.config.correction == "block_head" else reader.masks.drop(c, "correction", k)

    def carry(self, x: Tensor, z: Tensor) -> Tensor:
        """What is handed to the next position: the last block's output z, or what the blocks added to x."""
        return z - x if self.config.correction == "block_head" else z

    def correct(self, h: Tensor, e: Tensor, first: Tensor) -> Tensor:
        """c of positions with embeddings e, from what the positions before them carry."""
        return self.correction(h, e, first, self.blocks[-1].mlp)

    def _converged(self, e: Tensor, reader: Any, starts: Tensor) -> tuple[Tensor, int]:
        """Corrections of streaming, within the tolerance, and the passes they took, at most T + 1.

        A position stops when it and all before it in its document have converged: later tokens and other rows have no
        influence.
        """
        T, first = e.shape[1], _first(starts, e.device)
        begins = starts.clamp_max(T - 1).to(e.device).expand(e.shape[:2])
        c, moving, K = torch.zeros_like(e), e.new_ones(e.shape[:2], dtype=torch.bool), 1
        while K <= T and moving.any():
            new = self.next(e, c, reader, first)
            moved = moving & (movement(e, new, c) > self.config.tolerance)
            c = torch.where(moving[..., None], new, c)
            count = moved.cumsum(1)
            moving = moving & (count > (count - moved.long()).gather(1, begins))
            K += 1
        return c, K

    def _walk(self, e: Tensor, batch: Batch) -> Tensor:
        """The last block's output (B, T, C) in streaming; in training, all of it is in the autograd graph."""
        session = ContextReadySession(self, len(e))
        if torch.is_grad_enabled():
            session.inner.keep_graph()
        z = []
        for t in range(e.shape[1]):
            session.inner.pads = batch.starts[:, t]
            z.append(session.advance(e[:, t : t + 1]))
        return torch.cat(z, dim=1)

    def session(self, rows: int) -> "ContextReadySession":
        return (ContextReadySession if self.config.score_passes == "stream" else PassesSession)(self, rows)

    def start_from(self, other: Network) -> None:
        """Also starts from a trained network of the wrapped kind, and then computes its function bit for bit."""
        if type(other) is type(self):
            return super().start_from(other)
        if not self.config.has_own_network:
            raise UserError(
                f"network.correction = {self.config.correction}: has no matrix that could be zero, so a trained "
                "network cannot be converted to it; take add, token_blind or concat"
            )
        self.wrapped.start_from(other)
        self.correction.zero()

    def cost(self, passes: int | None = None) -> Cost:
        """`passes`: K in place of its mean. With `prefill: converge`, only one of a prompt's passes is counted."""
        c, work = self.config, self.correction.work()
        # A prompt costs what decoding its tokens does, even where the wrapped network reads inputs alone
        inner = replace(self.wrapped.cost(), prefill_linear=None, prefill_pairs=None, held_back=None)
        K = 1 if c.unroll == "bptt" else passes or (c.passes + (c.passes_min or c.passes)) / 2
        # S, P: passes of a token in decoding, and of one of a prompt; s, p: its corrections
        streams = c.score_passes == "stream"
        S, s = (1, 1) if streams else (c.score_passes, c.score_passes - 1)
        P, p = (c.prefill, c.prefill - 1) if streams and isinstance(c.prefill, int) else (S, s)
        return replace(
            inner,
            parameters=self.parameters_by_role(),
            linear=S * inner.linear + s * work,
            keys=lambda n: S * inner.keys(n),
            cache=lambda n: S * (inner.cache(n) + c.width),
            passes=K,
            training_linear=K * inner.linear + (K - 1 if c.unroll == "passes" else 1) * work,
            prefill_linear=P * inner.linear + p * work,
            prefill_pairs=lambda n: P * inner.pairs(n),
        )

    def cost_of(self, key: int) -> Cost:
        return self.cost(self._drawn(key))


@register("network", "context_ready_sps")
class ContextReadySPS(ContextReady):
    """State-Prediction Separation behind a correction, made from the stream that is read and added to inputs alone."""

    Wrapped = SPS

    class Config(CorrectionConfig, SPS.Config): ...

    @classmethod
    def tiny(cls) -> dict[str, Config]:
        exact: dict[str, Any] = {"passes": 20, "passes_min": None, "depth": 1}
        two: dict[str, Any] = {"passes": 2, "score_passes": 2, "passes_min": None, "depth": 2, "prefill": "converge"}
        bptt: dict[str, Any] = {"unroll": "bptt", "depth": 1, "persistent": "predictions", "read": "inputs"}
        shared: dict[str, Any] = {"width": 32, "heads": 4, "window": 3, "prefill": "stream", "tolerance": 1e-12}
        return {name: cls.Config(**shared | own) for name, own in (("passes", exact), ("two", two), ("bptt", bptt))}

    def carry(self, x: Tensor, z: Tensor) -> Tensor:
        assert isinstance(self.wrapped, SPS)
        return super().carry(x if self.wrapped.config.read == "inputs" else self.wrapped.first_predictions(x), z)


def movement(e: Tensor, c: Tensor, before: Tensor) -> Tensor:
    """(B, T): max over channels of |c - before|; 0 where it is no more than rounding of e + c."""
    moved, rounding = (c - before).abs().amax(-1), 2 * torch.finfo(compute_dtype(e)).eps * (e + c).abs().amax(-1)
    return moved.where(moved > rounding, 0)


def _first(starts: Tensor, device: torch.device) -> Tensor:
    """(B, T, 1): True where no earlier position carries anything: at a document's start (and before it)."""
    return sent((torch.arange(starts.shape[1]) <= starts)[..., None].numpy(), device)
