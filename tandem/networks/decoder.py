"""The plain decoder: every token reads all tokens before it in its document and predicts the next.

The baseline of all five methods, and the backbone they share. Its settings make it Tandem's own model, GPT-2
(learned positions, LayerNorm, GELU, biases) or a Llama / Qwen model (grouped keys, QK-norm, untied head).

    tokens [s, i+1)                 s: where the document of position i starts
    tokens [max(s, i-w+1), i+1)     with a window of w

Cost for one token of text: one multiply-add forward for each weight of blocks and head, 4 H D FLOPs a layer for each
token it reads, and 2 G D numbers of cache a layer.

Shapes: B rows, T tokens, C width, H heads, G key heads, D head width, V vocabulary.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from tandem.corpus import Batch
from tandem.networks.captured import FixedSteps
from tandem.networks.cost import Cost
from tandem.networks.network import Ids, Network, aligned, columns_of, opening, padded
from tandem.nn.attention import Source, attend, plan_attention
from tandem.nn.block import Block, BlockConfig, linear_work
from tandem.nn.cache import Cache, GraphCache, rows_of_state
from tandem.nn.dropout import Masks, Rates
from tandem.nn.init import Embedding, Linear, initialise
from tandem.nn.moe import MixtureConfig
from tandem.nn.norm import NormKind, final_norm
from tandem.nn.rope import Rotation
from tandem.nn.spans import Span, causal
from tandem.recipe import register

Watch = Callable[[str, int, Tensor, list[Source]], object]
"""Called with (stack, layer, q, sources) of all attention."""


@register("network", "decoder")
class Decoder(Network):
    """The plain next-token Transformer; the contained baseline of every method."""

    whole = False
    """Compute also what no score needs; analyses set it."""
    watch: Watch | None = None
    """Analyses set it on an instance."""
    free = ("dropout",)

    class Config(BlockConfig):
        depth: int = Field(6, ge=1)
        """Number of blocks."""
        window: int | None = Field(None, ge=1)
        """Tokens that a token may read, itself included; null: all of its document."""
        tied: bool = True
        """The output matrix is the token table."""
        final_norm: NormKind | None = None
        """Norm of the output: rms, or layer with weight, bias and eps 1e-5; null: as in blocks."""
        dropout: Annotated[float, Field(gt=0, lt=1)] | Rates | None = None
        """Rate at which training drops embeddings, attention weights, and what attention and MLP add; or a mapping of
        rates by what is dropped, whole tokens among it; null: nothing."""

        @property
        def reach(self) -> int | None:
            """Earlier tokens that a token may read; None: all of its document."""
            return None if self.window is None else self.window - 1

    def __init__(self, config: Config, vocabulary: int, context: int, generator: torch.Generator | None = None):
        super().__init__(config, vocabulary, context)
        c = config
        self.table = Embedding(padded(vocabulary), c.width)
        self.places = Embedding(self.widest, c.width) if c.positions == "learned" else None
        self.stack = nn.ModuleList(Block(c, layer) for layer in range(c.depth))
        self.norm = final_norm(c, c.width_ratio**-0.5)
        self.output = None if c.tied else Linear(c.width, padded(vocabulary), bias=False, role="head")
        initialise(self, c.init, c.depth, generator)

    @classmethod
    def tiny(cls) -> dict[str, Config]:
        gpt2 = {"positions": "learned", "norm": "layer", "mlp": "gelu", "bias": True, "init": "scaled"}
        qwen = {"key_heads": 2, "head_width": 6, "qk_norm": True, "positions": "halves", "tied": False, "base_width": 8}
        # The balance loss depends on how a step is cut; the contract requires that nothing does
        moe = {"moe": MixtureConfig(experts=4, active=2, balance=0.0), "mlp_width": 24, "tied": False}
        given: dict[str, dict[str, Any]] = {"house": {}, "gpt2": gpt2, "qwen": qwen}
        given |= {"windowed": {"window": 5}, "mixture": moe}
        return {name: cls.Config(width=32, heads=4, depth=2, **settings) for name, settings in given.items()}

    @classmethod
    def degenerate(cls, config: Config) -> tuple[Config, Config, Callable[[str], str | None]]:
        wide, plain = (config.model_copy(update={"window": window}) for window in (1 << 30, None))
        return wide, plain, lambda name: name

    @property
    def longest(self) -> int | None:
        return self.context if self.places is not None else None

    @property
    def widest(self) -> int:
        """Most positions that `context` tokens of a document take; where positions are learned, there are so many."""
        return self.context

    @property
    def stacks(self) -> dict[str, nn.ModuleList]:
        """By name, the blocks whose attention `watch` is told of; for analyses."""
        return {"decoder": self.blocks}

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the states in a block, in the order of their rows; for analyses."""
        return ("tokens",)

    def restricted(self, window: int) -> Self:
        """A copy that shares the weights; tokens read only `window` earlier tokens of the stream that persists."""
        other, given = copy.copy(self), self.config.window
        reads = window + 1 if given is None else min(window + 1, given)
        other.config = self.config.model_copy(update={"window": reads})
        return other

    def span(self, starts: Tensor, positions: Tensor | None = None) -> Span:
        """The span of tokens whose documents begin at `starts`."""
        return causal(starts, self.config.window, positions)

    def spans(self, starts: Tensor, positions: Tensor | None = None) -> Sequence[Span]:
        """All that they read, no key twice: of a network that reads more than one span, its own."""
        return (self.span(starts, positions),)

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        self.routings = []  # those of a pass that was interrupted
        reader = self.reader(x, batch)
        reader.masks = Masks.of(self.config.dropout, batch)
        x = reader.masks.enter(self.placed(x, batch), batch.tokens, self.vocabulary)
        hidden = self.norm(self.states(x, reader))
        return hidden, self.extra(batch)

    def placed(self, x: Tensor, batch: Batch) -> Tensor:
        """Embeddings plus positions, where these are learned: the input of the first block."""
        return x if self.places is None else self.at(x, torch.arange(x.shape[1]) - batch.starts)

    def at(self, x: Tensor, index: Tensor) -> Tensor:
        """x plus the learned positions `index` (B, T), on the host. Raises: ValueError where there are too few."""
        assert self.places is not None
        if index.numel() and int(index.max()) >= self.widest:
            raise ValueError(f"learned positions end at {self.widest} tokens; read or generate fewer")
        return x + self.places(index.to(x.device))

    def reader(self, x: Tensor, batch: Batch) -> Any:
        """The reader of all blocks, for any number of passes over a batch of embeddings shaped like `x`."""
        return SpanReader(self, self.spans(batch.starts), x)

    def states(self, x: Tensor, reader: Any) -> Tensor:
        """All blocks: the last one's output, before the final norm."""
        for block in self.stack:
            x = self.run_block(block, x, reader)
        return x

    def rotation(self, first: int | Tensor, length: int, like: Tensor) -> Rotation | None:
        """For columns first .. first + length: rotary scores depend on distances, so documents need no restart."""
        if self.config.positions == "learned":
            return None
        return Rotation.of(self.config, first + torch.arange(length, device=like.device), like)

    def session(self, rows: int) -> "DecoderSession":
        return DecoderSession(self, rows)

    def cost(self) -> Cost:
        c = self.config

        def read(n: int) -> int:
            """Tokens before index n that the query at n reads, and that the cache keeps for it."""
            return n if c.reach is None else min(n, c.reach)

        def pairs(n: int) -> int:
            short = min(n, read(n) + 1)  # queries that read all before them
            return short * (short + 1) // 2 + (n - short) * (read(n) + 1)

        return Cost(
            parameters=self.parameters_by_role(),
            linear=c.depth * linear_work(c),
            head=len(self.head) * c.width,
            pair=c.depth * c.heads * c.head_width,
            pairs=pairs,
            keys=lambda n: read(n) + 1,
            cache=lambda n: 2 * c.depth * c.key_heads * c.head_width * read(n),
        )

    @classmethod
    def drawing(cls, config: Config, starts: list[int]) -> list[tuple[str, Span, int]]:
        return [("tokens", causal(torch.tensor([starts]), config.window), len(starts))]


class SpanReader:
    """Reads a whole batch at once: every layer uses the same spans, planned once."""

    def __init__(self, network: Any, spans: Sequence[Span], x: Tensor, stack: str = "decoder"):
        self.network, self.spans, self.stack, self.masks = network, spans, stack, Masks()
        self.rotation = network.rotation(0, x.shape[1], x)
        self.plan = plan_attention(spans, [x.shape[1]] * len(spans), device=x.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sources = [Source(k, v, span) for span in self.spans]
        if self.network.watch:
            self.network.watch(self.stack, layer, q, sources)
        return attend(q, sources, plan=self.plan, dropout=self.masks.rates.attention)


class DecoderSession(FixedSteps):
    """Caches of all layers. Prompts are aligned at their ends: row b begins at column pads[b]."""

    def __init__(self, network: Decoder, rows: int):
        self.network, self.rows = network, rows
        self.caches = [Cache(network.config.reach) for _ in network.blocks]
        self.columns = 0
        self.pads = torch.zeros(rows, dtype=torch.long)

    def keep_graph(self) -> None:
        """Makes gradients flow into the caches; to be called before the first column."""
        self.caches = [GraphCache(cache.window) for cache in self.caches]

    def fix(self, capacity: int) -> None:
        """After the prompt: moves the caches to fixed memory, for one token a row at a time, `capacity` in total.

        Raises: ValueError for networks whose steps need the host in between.
        """
        if self.network.places is not None:
            raise ValueError("learned positions are looked up from the host; a session of such a network is not fixed")
        if self.network.config.moe is not None:
            raise ValueError("the host decides how many tokens an expert reads; a session of a mixture is not fixed")
        self._stand_still(capacity)

    def _fixed_plan(self) -> Any:
        cache = self.caches[0]
        end = cache.index(self.columns - 1) + 1
        spans, keys = self._spans(1, end), cache.kv.shape[3]
        return plan_attention(spans, [keys] * len(spans), device=cache.kv.device, backend="triton")

    def prefill(self, prompts: Sequence[Ids]) -> Tensor:
        return self.step(self.align(prompts))

    def align(self, prompts: Sequence[Ids]) -> Tensor:
        """(B, T): the prompts, padded in front."""
        tokens, self.pads = aligned(opening(prompts, self.rows, self.columns > 0))
        return tokens

    @torch.inference_mode()  # not no_grad: a tenth less time for one token of a small network
    def step(self, tokens: Tensor) -> Tensor:
        return self.logits(self.states(self.enter(tokens)))

    def enter(self, tokens: Tensor) -> Tensor:
        """The input of the first block for the next tokens (B, n), learned positions included."""
        network = self.network
        tokens = columns_of(tokens, self.rows).to(network.table.weight.device)
        x = network.embed(tokens)
        if network.places is not None:
            columns = torch.arange(self.columns, self.columns + tokens.shape[1])
            x = network.at(x, (columns - self.pads[:, None]).clamp_min(0))
        return x

    def states(self, x: Tensor) -> Tensor:
        """The last block's output for the next columns (B, n, C), which enter the caches."""
        self._turn(x)
        return self.network.states(x, self)

    def _turn(self, x: Tensor) -> None:
        """Moves on to the columns of x: sets their positions, and has the first layer plan what they read."""
        if self.clock is not None:
            self.rotation = self.network.rotation(self.clock, x.shape[1], x)
        else:
            self.rotation = self.network.rotation(self.columns, x.shape[1], x)
            self.columns += x.shape[1]
            self.plan = None

    def logits(self, x: Tensor) -> Tensor:
        """Logits (B, V) of what follows the last column, float32."""
        return (self.network.norm(x[:, -1]) @ self.network.head.T).float()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = self.caches[layer]
        k, v = cache.append(k, v)
        if self.plan is None:
            spans, keys = self._spans(q.shape[2], k.shape[2]), k.shape[2]
            self.plan = plan_attention(spans, [keys] * len(spans), device=q.device)
        return attend(q, [Source(k, v, span) for span in self.plan.spans], plan=self.plan)

    def _spans(self, queries: int, end: int) -> Sequence[Span]:
        """The spans of the newest columns, which end at index `end`, over what the caches return."""
        starts = (self.pads[:, None] - (self.columns - end)).clamp(0, end)
        return self.network.spans(starts, torch.arange(end - queries, end))

    def fork(self, rows: Tensor | None = None) -> Self:
        pads = rows_of_state(self.pads, rows)
        other = type(self)(self.network, len(pads))
        other.caches = [cache.fork(rows) for cache in self.caches]
        other.columns, other.pads = self.columns, pads
        return other

    def join(self, others: Sequence[Self]) -> None:
        """Reads on from where others are, of equally many columns, whose rows become those of this one, in order."""
        self.caches = [Cache.joined(caches) for caches in zip(*(other.caches for other in others), strict=True)]
        self.columns, self.pads = others[0].columns, torch.cat([other.pads for other in others])

    @property
    def bytes(self) -> int:
        return sum(cache.bytes for cache in self.caches)
