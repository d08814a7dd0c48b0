"""State-Prediction Separation: one stream remembers, the other predicts.

A Transformer asks one vector both to predict the next token and to be remembered by every later one. Here token i
enters twice. Its input x_i stays readable to the end of the document; its prediction p_i, which starts as one learned
vector, emits token i+1 and is forgotten after `window` tokens. Both run through the same blocks at the same position.

    window 2      x0  x1  x2  x3       x3 reads inputs x0 .. x3 and predictions p1, p2
                  p0  p1  p2  p3       p3 reads inputs x0 .. x3 and predictions p1, p2, p3, and emits token 4

Three choices span the family: which stream persists, how long the other stays readable, which one is read out.

    persistent   window  read          the paper's name
    inputs       64      predictions   SPS
    inputs       null    predictions   2x Memory: nothing is forgotten
    predictions  64      predictions   Delayed State: an extra step, but one stream does both jobs
    predictions  64      inputs        Reverse SPS: the other stream persists
    inputs       0       inputs        Standard: nothing reads a prediction, so none is made; the plain decoder

The streams are rows of one tensor, inputs first: every matrix product serves both at once, and attention takes them as
two groups of queries over the same keys. No sequence of 2T tokens is built. In the last block the stream that is not
read out is projected to keys and values and goes no further.

Cost: in training nearly twice the decoder's products and pairs; in decoding its cache plus `window` entries a layer.
Source: State-Prediction Separation (arXiv 2607.01218), eq. 3 to 5; docs/sps.md.
Shapes: B rows, T tokens, C width, H heads, G key heads, D head width, N keys of a stream.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from tandem.corpus import Batch
from tandem.networks.cost import Cost
from tandem.networks.decoder import Decoder, DecoderSession
from tandem.networks.network import columns_of
from tandem.nn.attention import Backend, Groups, Plan, attend_rows, plan_attention
from tandem.nn.block import linear_work
from tandem.nn.cache import Cache, GraphCache, append_each
from tandem.nn.dropout import Masks
from tandem.nn.init import Embedding, initialise
from tandem.nn.moe import MixtureConfig
from tandem.nn.rope import Pairing
from tandem.nn.spans import Span, causal
from tandem.recipe import register

Stream = Literal["inputs", "predictions"]
Streams = Tensor | tuple[Tensor, ...]
"""Both streams as rows of one tensor, or a tensor for each."""


@register("network", "sps")
class SPS(Decoder):
    """State-Prediction Separation: a stream that remembers and a stream that predicts, through the same blocks."""

    stacks = None  # its reader, which has two streams, tells no `watch`

    class Config(Decoder.Config):
        persistent: Stream = "inputs"
        """The stream whose keys stay readable to the end of the document."""
        window: int | None = Field(64, ge=0)
        """Tokens for which the other stream's keys stay readable after their own; null: to the end of the document."""
        read: Stream = "predictions"
        """The stream from which the next token is read."""
        predict_in_vocabulary: bool = False
        """The vector that predictions start from is a row of the token table, and the softmax runs over all rows of the
        table, as in the authors' code; otherwise it is a parameter of its own."""
        start_from_token: bool = False
        """A prediction starts from its token's embedding beside the learned vector. Not in the paper, whose predictions
        have to learn first to read the current word (docs/sps.md)."""
        positions: Pairing = "adjacent"
        """How rotary positions pair the channels."""
        dropout: None = None
        """Two streams are trained without dropout."""

        def derive(self) -> dict[str, Any]:
            if self.start_from_token and len(self.streams) == 1:
                cure = "write start_from_token: false, or read: predictions"
                raise ValueError(f"start_from_token: no prediction is made where nothing reads one; {cure}")
            return super().derive()

        @property
        def streams(self) -> tuple[Stream, ...]:
            """The streams in use: where nothing reads a prediction, none is made."""
            unread = self.inputs_alone and self.read == "inputs"
            return ("inputs",) if unread else ("inputs", "predictions")

        @property
        def inputs_alone(self) -> bool:
            """Whether inputs read no prediction, and so are the plain decoder's states."""
            return self.persistent == "inputs" and self.window == 0

        @property
        def reach(self) -> None:
            """The stream that persists is read from the start of the document."""

    def __init__(self, config: Config, vocabulary: int, context: int, generator: torch.Generator | None = None):
        super().__init__(config, vocabulary, context, generator)
        self.state_window: int | None = None
        own = len(config.streams) > 1 and not config.predict_in_vocabulary
        self.predict = Embedding(1, config.width, like=len(self.table.weight)) if own else None
        if self.predict is not None:
            initialise(self.predict, config.init, config.depth, generator)

    @classmethod
    def tiny(cls) -> dict[str, Config]:
        grouped = {"key_heads": 2, "qk_norm": True, "bias": True, "tied": False}
        given: dict[str, dict[str, Any]] = {
            "separated": {"window": 3},
            "side_read": {"window": 0, "moe": MixtureConfig(experts=4, active=2, balance=0.0), "mlp_width": 24},
            "two_x_memory": {"window": None, "base_width": 16, **grouped},
            "delayed_state": {"window": 3, "persistent": "predictions"},
            "delayed_state_0": {"window": 0, "persistent": "predictions", **grouped},
            "reverse_sps": {"window": 3, "persistent": "predictions", "read": "inputs"},
            "reverse_sps_0": {"window": 0, "persistent": "predictions", "read": "inputs"},
            "standard": {"window": 0, "read": "inputs"},
            "start_from_token": {"window": 3, "start_from_token": True},
        }
        return {name: cls.Config(width=32, heads=4, depth=2, **settings) for name, settings in given.items()}

    @classmethod
    def degenerate(cls, config: Config) -> tuple[Config, Decoder.Config, Callable[[str], str | None]]:
        standard = {"persistent": "inputs", "window": 0, "read": "inputs", "predict_in_vocabulary": False}
        plain = config.shared_with(Decoder.Config)
        plain["window"] = None
        return config.model_copy(update=standard), Decoder.Config(**plain), lambda name: name

    @property
    def streams(self) -> tuple[Stream, ...]:
        return self.config.streams

    @property
    def head(self) -> Tensor:
        if self.config.predict_in_vocabulary:
            return self.output_weight
        return super().head

    def first_predictions(self, x: Tensor) -> Tensor:
        """(B, T, C): what the predictions beside the inputs x start from."""
        vector = self.table.weight[self.vocabulary] if self.predict is None else self.predict.weight[0]
        return x + vector if self.config.start_from_token else vector.expand_as(x)

    def restricted(self, window: int) -> Self:
        other = copy.copy(self)
        other.state_window = window
        return other

    def span(self, starts: Tensor, positions: Tensor | None = None) -> Span:
        return causal(starts, None if self.state_window is None else self.state_window + 1, positions)

    def reader(self, x: Tensor, batch: Batch) -> Any:
        return super().reader(x, batch) if len(self.streams) == 1 else StreamReader(self, batch.starts, x)

    def states(self, x: Tensor, reader: Any) -> Tensor:
        """All blocks: the last one's output for the stream that is read out, before the final norm."""
        if len(self.streams) == 1:
            return super().states(x, reader)
        inputs, predictions = slice(len(x)), slice(len(x), None)
        read = inputs if self.config.read == "inputs" else predictions
        x = torch.cat((x, self.first_predictions(x)))
        *others, last = self.stack
        for block in others:
            x = self.run_block(block, x, reader)
        if self.whole:
            return self.run_block(last, x, reader)[read]
        return self.run_block(last, x, reader, read)

    def session(self, rows: int) -> DecoderSession:
        return DecoderSession(self, rows) if len(self.streams) == 1 else StreamSession(self, rows)

    def cost(self) -> Cost:
        c, plain = self.config, replace(super().cost(), head=self.head.numel())
        if len(c.streams) == 1:
            return plain
        G, D, _ = c.derived

        def recent(n: int) -> int:
            """Keys before index n, of the stream that does not persist, that are read at n."""
            return n if c.window is None else min(n, c.window)

        def keys(n: int) -> int:
            inputs = n + 1 + recent(n)
            predictions = inputs + 1
            return c.depth * (inputs + predictions) - (inputs if c.read == "predictions" else predictions)

        unread = linear_work(c) - c.width * 2 * G * D  # of the last block, for the stream that is not read out
        return Cost(
            parameters=plain.parameters,
            linear=2 * plain.linear - unread,
            head=plain.head,
            pair=c.heads * D,
            pairs=lambda n: sum(map(keys, range(n))),
            keys=keys,
            cache=lambda n: 2 * c.depth * G * D * (n + recent(n)),
            prefill_linear=plain.linear if c.inputs_alone else None,
            prefill_pairs=(lambda n: c.depth * plain.pairs(n)) if c.inputs_alone else None,
            held_back=1 if c.inputs_alone else None,
        )

    @classmethod
    def drawing(cls, config: Config, starts: list[int]) -> list[tuple[str, Span, int]]:
        spans = stream_spans(config, torch.tensor([starts]))
        return [
            (f"{source} that {query} read", span, len(starts))
            for source, groups in zip(config.streams, spans, strict=True)
            for query, span in zip(config.streams, groups, strict=True)
        ]


def stream_spans(
    config: SPS.Config, starts: Tensor, positions: Tensor | None = None, state_window: int | None = None
) -> tuple[Groups, ...]:
    """Eq. 5: which of each stream's keys the queries of each stream read.

    Args:
        starts: (B, T), where the document of each query begins; the window ends there, too.
        positions: (T,) of the queries, where they are not 0 .. T - 1 (decoding).
        state_window: how many earlier tokens of the stream that persists a query may read; None: all.
    """
    i = torch.arange(starts.shape[-1]) if positions is None else positions
    if len(config.streams) == 1:
        return ((causal(starts, None, i),),)
    kept, recent = (
        starts if reach is None else torch.maximum(starts, i - reach) for reach in (state_window, config.window)
    )
    x_lo, p_lo = (kept, recent) if config.persistent == "inputs" else (recent, kept)
    x_span = Span(x_lo, i + 1)
    return (x_span, x_span), (Span(p_lo, i), Span(p_lo, i + 1))  # x_i comes before p_i and never reads it


class Reading:
    """Attention over the keys of both streams, with queries of both or, in the last block, of the one read out."""

    def __init__(
        self,
        network: SPS,
        spans: tuple[Groups, ...],
        keys: tuple[int, ...],
        device: torch.device,
        backend: Backend = "auto",
    ):
        read = network.streams.index(network.config.read)
        ways = spans, tuple(groups[read] for groups in spans)
        self.both, self.one = (plan_attention(way, keys, device=device, backend=backend) for way in ways)

    def __call__(self, q: Tensor, k: Streams, v: Streams) -> Tensor:
        """q of 2B rows, inputs first, or of B; k and v likewise, or of each stream."""
        rows = len(k) // 2 if isinstance(k, Tensor) else len(k[0])
        return attend_rows(q, k, v, plan=self.both if len(q) > rows else self.one)


class StreamReader:
    """Reads a whole batch at once: every layer uses the same spans, planned once."""

    def __init__(self, network: SPS, starts: Tensor, x: Tensor):
        T, self.masks = x.shape[1], Masks()
        self.rotation = network.rotation(0, T, x)
        spans = stream_spans(network.config, starts, state_window=network.state_window)
        self.read = Reading(network, spans, (T, T), x.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.read(q, k, v)


class StreamSession(DecoderSession):
    """`caches` hold the stream that persists, `rings` the last `window` entries of the other.

    A step takes the pair (x_i, p_i) through every block in one pass over the weights and the keys. Where inputs read no
    prediction, only the last of several tokens has one.
    """

    network: SPS

    def __init__(self, network: SPS, rows: int):
        super().__init__(network, rows)
        self.rings: list[Any] = [Cache(network.config.window) for _ in network.blocks]

    def keep_graph(self) -> None:
        super().keep_graph()
        self.rings = [GraphCache(ring.window) for ring in self.rings]

    def fix(self, capacity: int) -> None:
        super().fix(capacity)
        self.rings = self._fixed(self.rings, capacity)

    def _fixed_plan(self) -> Any:
        stores = self._stores(0)
        ends = tuple(store.index(self.columns - 1) + 1 for store in stores)
        kv = [store.kv for store in stores]
        return self._reading(1, ends, tuple(x.shape[3] for x in kv), kv[0].device, "triton")

    def _plans(self, plan: Any) -> tuple[Plan, ...]:
        return plan.both, plan.one

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        tokens = columns_of(tokens, self.rows)
        if self.network.config.inputs_alone and tokens.shape[1] > 1:
            x, tokens = self.enter(tokens[:, :-1]), tokens[:, -1:]
            self._turn(x)
            Decoder.states(self.network, x, self)
        return super().step(tokens)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(k) == self.rows:  # inputs alone
            return super().__call__(layer, q, k, v)
        stores = self._stores(layer)
        keys, values = zip(*append_each(stores, k.chunk(2), v.chunk(2)), strict=True)
        if self.plan is None:
            ends = tuple(x.shape[2] for x in keys)
            self.plan = self._reading(q.shape[2], ends, ends, q.device)
        return self.plan(q, keys, values)

    def _stores(self, layer: int) -> tuple[Any, Any]:
        """The cache of the inputs, then that of the predictions."""
        stores = self.caches[layer], self.rings[layer]
        return stores[::-1] if self.network.config.persistent == "predictions" else stores

    def _reading(
        self,
        queries: int,
        ends: tuple[int, ...],
        keys: tuple[int, ...],
        device: torch.device,
        backend: Backend = "auto",
    ) -> Reading:
        """How the newest columns, which end at index `ends` of each store, read what the stores return."""
        spans = []
        for source, end in enumerate(ends):
            first = self.columns - end  # column of the store's first entry
            starts, columns = (self.pads[:, None] - first).clamp(0, end), torch.arange(end - queries, end)
            reach = self.network.state_window
            spans.append(stream_spans(self.network.config, starts.expand(-1, queries), columns, reach)[source])
        return Reading(self.network, tuple(spans), keys, device, backend)

    def fork(self, rows: Tensor | None = None) -> Self:
        other = super().fork(rows)
        other.rings = [ring.fork(rows) for ring in self.rings]
        return other

    def join(self, others: Sequence[Self]) -> None:
        super().join(others)
        self.rings = [Cache.joined(rings) for rings in zip(*(other.rings for other in others), strict=True)]

    @property
    def bytes(self) -> int:
        return super().bytes + sum(ring.bytes for ring in self.rings)
