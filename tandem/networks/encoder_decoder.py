"""The encoder-decoder: one stack reads the context in both directions, another attends to it and writes what follows.

    document   a0 a1 a2 a3 a4 a5      the last block of a document, here from a3 on, is generated (Batch.blocks)

    encoder    a0 a1 a2               each reads all of a0 .. a2; a final norm gives the latents
    decoder    a3 a4 a5               a4 reads a3, a4 and, in a second attention, all latents; it is asked for a5

The encoder sees everything that it is given, so there is no likelihood of a whole text, only of an end given what comes
before it. Training is by span corruption (objectives/span_corruption.py) or prefix LM (objectives/prefix_lm.py).

    encoder, queries of the context       context [0, n)
    decoder, queries of position j        own [0, j + 1), then context [0, n)

The tokens of a batch are sorted into one row of contexts and one of generated tokens, whatever their lengths, and spans
keep documents apart: nothing is padded. Positions count from 0 on either side, and cross-attention is rotary as well.
With no encoder this *is* the plain decoder of `decoder_layers` blocks.

Cost: 12 C^2 per context token and encoder layer, 14 C^2 per generated token and decoder layer (16 C^2 of weights),
2 C^2 per latent and decoder layer. A session keeps 2 C numbers per token and decoder layer.
Source: the baseline of Block-Based Double Decoders (workshop AdaptFM, 2026), made a fair one; docs/encoder_decoder.md.
Shapes: B rows, T tokens, N tokens of context and M generated ones of a batch, C width, H heads, D head width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from tandem.corpus import Batch, generated_from, start_of_generation
from tandem.networks.cost import Cost, Parts
from tandem.networks.decoder import Decoder
from tandem.networks.network import Ids, Network, aligned, columns_of, opening, padded
from tandem.nn.attention import Plan, Source, attend, plan_attention
from tandem.nn.block import Block, BlockConfig, linear_work
from tandem.nn.cache import Cache, rows_of_state
from tandem.nn.cross import CrossBlock, cross_work
from tandem.nn.init import Embedding, initialise
from tandem.nn.norm import NormKind, final_norm
from tandem.nn.rope import Pairing, Rotation
from tandem.nn.spans import Span, causal
from tandem.recipe import UserError, register


@register("network", "encoder_decoder")
class EncoderDecoder(Network):
    """An encoder of the context and a decoder beside it; the baseline of the double decoder, made a fair one."""

    suffixes_only = (
        "reads in both directions what it is given, targets included; it can be asked for what follows a context "
        "alone: train it by objective span_corruption or prefix_lm, and score it with evaluation.prefix: true"
    )
    unwrapped = "reads a context in both directions, and a correction comes from the past alone"
    divides = rows_vary = True
    free = ("start", "decoder_positions")

    class Config(BlockConfig):
        encoder_layers: int = Field(4, ge=0)
        """Blocks that read the context; 0: the plain decoder."""
        decoder_layers: int = Field(1, ge=1)
        """Blocks that write; each also has attention to the context."""
        final_norm: NormKind | None = None
        """Norm of the latents and of the output: rms, or layer with weight, bias and eps 1e-5; null: as in blocks."""
        sentinels: int = Field(100, ge=0)
        """Ids beyond the tokenizer's that stand for spans cut out of a text."""
        start: Literal["last_token", "bos"] | Annotated[int, Field(ge=0)] = "last_token"
        """What generation starts from after a prompt: its last token, which then is not context; a spare id of the
        table (bos); or the id given."""
        decoder_positions: Literal["own", "offset"] = "own"
        """After a prompt, positions of generated tokens count from 0 (own) or continue the context's (offset)."""
        positions: Pairing = "adjacent"
        """How rotary positions pair the channels."""
        moe: None = None
        """Mixtures of experts are not supported."""

    def __init__(self, config: Config, vocabulary: int, context: int, generator: torch.Generator | None = None):
        super().__init__(config, vocabulary, context)
        c = config
        self.table = Embedding(padded(vocabulary, c.sentinels), c.width)
        if (self.first or 0) >= len(self.table.weight):
            raise UserError(f"network.start = {c.start}: the token table ends at id {len(self.table.weight) - 1}")
        decoder = CrossBlock if c.encoder_layers else Block
        depth = c.encoder_layers + c.decoder_layers
        self.stack = nn.ModuleList((Block if layer < c.encoder_layers else decoder)(c, layer) for layer in range(depth))
        self.latents_norm = final_norm(c) if c.encoder_layers else None
        self.norm = final_norm(c, c.width_ratio**-0.5)
        initialise(self, c.init, depth, generator)

    @classmethod
    def tiny(cls) -> dict[str, Config]:
        theirs = {"mlp": "gelu_tanh", "final_norm": "layer", "start": "bos", "decoder_positions": "offset"}
        grouped = {"key_heads": 2, "qk_norm": True, "bias": True, "positions": "halves", "decoder_layers": 2}
        given: dict[str, dict[str, Any]] = {"house": {}, "theirs": theirs, "grouped": grouped}
        shared: dict[str, Any] = {"width": 32, "heads": 4, "encoder_layers": 2, "sentinels": 5}
        return {name: cls.Config(**{**shared, **own}) for name, own in given.items()}

    @classmethod
    def degenerate(cls, config: Config) -> tuple[Config, Any, Callable[[str], str | None]]:
        alone = config.model_copy(update={"encoder_layers": 0, "sentinels": 0})
        own = alone.shared_with(BlockConfig)
        plain = Decoder.Config(**own, depth=config.decoder_layers, final_norm=config.final_norm)
        return alone, plain, lambda name: name

    @classmethod
    def drawing(cls, config: Config, starts: list[int]) -> list[tuple[str, Span, int]]:
        begins = torch.tensor([starts])
        halves = begins + torch.tensor([[starts.count(start) // 2 for start in starts]])
        return [
            ("context, the first half of a document, which all of it reads", Span(begins, halves), len(starts)),
            ("own tokens of the other half", causal(halves), len(starts)),
        ]

    # ---- a batch ----------------------------------------------------------------------------------------------------

    @property
    def head_with_sentinels(self) -> Tensor:
        """The rows of every id that span corruption predicts, and of the two spare ids in between."""
        return self.table.weight[: self.vocabulary + 2 + self.config.sentinels]

    @property
    def first(self) -> int | None:
        """The id from which generation starts; None: the last token of the prompt."""
        start = self.config.start
        return None if start == "last_token" else start_of_generation(self.vocabulary) if start == "bos" else start

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Hidden states (B, T, C) where tokens are generated, 0 in the context."""
        d, flat = self.divide(batch), x.flatten(0, 1)
        row = flat[None]  # what is picked from it is no view, for which the first block would be traced again
        generated = d.generated.to(x.device)
        y, places = row[:, generated], d.generated_places
        if not self.config.encoder_layers:
            reader = Reader(self.rotation(places, x), d.own)
        else:
            turned = self.rotation(d.context_places, x)
            latents = self.encode(row[:, d.context.to(x.device)], turned, d.read)
            if self.first is not None or self.config.decoder_positions == "offset":
                prompted = self.prompted(batch).flatten()[d.generated]
                if self.first is not None:
                    opens = ((places == 0) & prompted)[:, None].to(x.device)
                    y = torch.where(opens, self.table.weight[self.first].to(y.dtype), y)
                if self.config.decoder_positions == "offset":
                    places = places + prompted * (d.cross.hi - d.cross.lo)[0]
            reader = Reader(self.rotation(places, x), d.own, latents, turned, d.cross)
        hidden = self.decode(y, reader)[0].to(flat.dtype)
        return torch.zeros_like(flat).index_copy(0, generated, hidden).view_as(x), self.extra(batch)

    def divide(self, batch: Batch) -> "Division":
        """Which positions are context and which are generated. Raises: UserError where the batch does not say."""
        if not self.config.encoder_layers:
            return divide(batch.starts, batch.starts, False)
        if batch.blocks is None:
            raise UserError(f"network encoder_decoder {self.suffixes_only}")
        return divide(batch.starts, batch.blocks, self.prompted(batch) if self.first is not None else False)

    def prompted(self, batch: Batch) -> Tensor:
        """(B, T), whether a document continues a prompt; spans that were cut out begin with a start id instead."""
        assert batch.blocks is not None
        first = batch.tokens.cpu().gather(1, generated_from(batch.starts, batch.blocks))
        return first != start_of_generation(self.vocabulary)

    def encode(self, x: Tensor, rotation: Rotation, read: Span) -> Tensor:
        """Embeddings of contexts, all in one row or a row each, to latents of the same shape."""
        reader = Reader(rotation, read)
        for block in self.stack[: self.config.encoder_layers]:
            x = self.run_block(block, x, reader)
        assert self.latents_norm is not None
        return self.latents_norm(x)

    def decode(self, x: Tensor, reader: Any) -> Tensor:
        """Embeddings of generated tokens to the hidden states that predict the next ones."""
        for block in self.stack[self.config.encoder_layers :]:
            x = self.run_block(block, x, reader)
        return self.norm(x)

    def rotation(self, places: Tensor, like: Tensor) -> Rotation:
        return Rotation.of(self.config, places, like)

    def session(self, rows: int) -> "EncoderDecoderSession":
        return EncoderDecoderSession(self, rows)

    def cost(self) -> Cost:
        c = self.config
        G, D, _ = c.derived
        generated, latent = cross_work(c) if c.encoder_layers else (linear_work(c), 0)
        reading = c.encoder_layers * linear_work(c) + c.decoder_layers * latent
        reads = bool(c.encoder_layers)
        more = int(reads and self.first is not None)  # what generation starts from is not a token of the text

        def divided(parts: Parts) -> tuple[int, int]:
            context, tokens, continued = parts
            if not reads:
                context, tokens = 0, context + tokens
            elif continued:
                context += more
            pairs = c.encoder_layers * context**2 + c.decoder_layers * tokens * (2 * context + tokens + 1) // 2
            restored = 0 if continued else (len(self.head_with_sentinels) - self.vocabulary) * c.width * parts.generated
            return reading * context + c.decoder_layers * generated * tokens + restored, pairs

        return Cost(
            parameters=self.parameters_by_role(),
            linear=c.decoder_layers * generated,
            head=self.vocabulary * c.width,
            pair=c.heads * D,
            pairs=lambda n: divided(Parts(0, n))[1],
            keys=lambda n: c.decoder_layers * (n + 1 + more),
            cache=lambda n: 2 * c.decoder_layers * G * D * (n + more),
            prefill_linear=reading if reads else None,
            prefill_pairs=(lambda n: c.encoder_layers * n**2) if reads else None,
            held_back=1 - more if reads else None,
            divided=divided,
        )


@dataclass(frozen=True, eq=False)
class Division:
    """The positions of a batch, divided into context and generated ones, each concatenated over all documents.

    context, generated: (N,) and (M,), places among the B T positions.  context_places, generated_places: from 0 in
    each document.  read: what the encoder's queries read.  own, cross: what the decoder's read of either part.
    """

    context: Tensor
    generated: Tensor
    context_places: Tensor
    generated_places: Tensor
    read: Span
    own: Span
    cross: Span


def divide(starts: Tensor, blocks: Tensor, reads_all: Tensor | bool) -> Division:
    """Divides a batch: the last block of each document is generated, and what lies before it is context.

    reads_all: (B, T), where a start id replaces a document's first generated token, which then is context, too.
    """
    index = torch.arange(starts.shape[1])
    document = (index == starts).flatten().cumsum(0) - 1
    count = int(document[-1]) + 1 if len(document) else 0
    last = generated_from(starts, blocks).flatten()
    index = index.expand_as(starts).flatten()
    kinds = index < last + torch.as_tensor(reads_all).expand_as(starts).flatten(), index >= last
    context, generated = (document[kind] for kind in kinds)
    numbers = [torch.bincount(own, minlength=count) for own in (context, generated)]
    reading, writing = (number.cumsum(0) - number for number in numbers)

    def all_of(documents: Tensor) -> Span:
        first = reading[documents][None]
        return Span(first, first + numbers[0][documents])

    return Division(
        *(kind.nonzero()[:, 0] for kind in kinds),
        *(torch.arange(len(own)) - first[own] for own, first in ((context, reading), (generated, writing))),
        read=all_of(context),
        own=causal(writing[generated][None]),
        cross=all_of(generated),
    )


class Reader:
    """Reads all of a stack's positions at once and, in a decoder, the latents."""

    def __init__(
        self,
        rotation: Rotation,
        own: Span,
        latents: Tensor | None = None,
        turned: Rotation | None = None,
        cross: Span | None = None,
    ):
        self.rotation, self.latents, self.turned = rotation, latents, turned
        self.own = Planned(own, own.lo.shape[1])
        self.context = None if latents is None or cross is None else Planned(cross, latents.shape[1])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.own.read(q, k, v)

    def cross(self, block: CrossBlock, q: Tensor) -> Tensor:
        assert self.latents is not None and self.context is not None
        return self.context.read(q, *block.keys(self.latents, self.turned))


class Planned:
    """A span over so many keys, planned on first use."""

    def __init__(self, span: Span, keys: int):
        self.span, self.keys = span, keys
        self.plan: Plan | None = None

    def read(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not q.shape[2]:
            return q  # no queries
        self.plan = self.plan or plan_attention([self.span], [self.keys], device=q.device)
        return attend(q, [Source(k, v, self.span)], plan=self.plan)


class EncoderDecoderSession:
    """Keys and values of the context, projected once, and caches of what is generated.

    Contexts of unequal lengths are padded at the end, so that positions count from 0, or in front, where those of
    generated tokens continue them. Without an encoder there is no context, and prompts are aligned at their ends.
    """

    def __init__(self, network: EncoderDecoder, rows: int):
        self.network, self.rows = network, rows
        self.caches = [Cache() for _ in range(network.config.decoder_layers)]
        self.context: list[tuple[Tensor, Tensor]] = []
        self.lo = self.hi = self.pads = torch.zeros(rows, dtype=torch.long)
        self.columns = self.offset = 0

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Ids]) -> Tensor:
        network, texts = self.network, opening(prompts, self.rows, self.columns > 0)
        if not network.config.encoder_layers:
            tokens, self.pads = aligned(texts)
            return self.step(tokens)
        if network.first is None:
            self.read([text[:-1] for text in texts])
            return self.step(torch.tensor([text[-1] for text in texts]))
        self.read(texts)
        return self.step(torch.full((self.rows,), network.first))

    def read(self, contexts: list[list[int]]) -> None:
        """Encodes the contexts (B, N), and projects them for every layer."""
        network, goes_on = self.network, self.network.config.decoder_positions == "offset"
        tokens, pads = aligned(contexts, in_front=goes_on)
        N = tokens.shape[1]
        self.lo = pads if goes_on else torch.zeros_like(pads)
        self.hi, self.offset = self.lo + N - pads, N if goes_on else 0
        x = network.embed(tokens.to(network.table.weight.device))
        rotation = network.rotation(torch.arange(N), x)
        latents = network.encode(x, rotation, self.inside(N))
        decoder = network.stack[network.config.encoder_layers :]
        self.context = [block.keys(latents, rotation) for block in decoder]  # type: ignore[operator]

    def inside(self, queries: int) -> Span:
        """The span over every row's context, for so many queries."""
        return Span(self.lo[:, None].expand(-1, queries), self.hi[:, None])

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        network = self.network
        if network.config.encoder_layers and not self.context:
            raise ValueError("the encoder has read no prompt yet: prefill() comes before step()")
        x = network.embed(columns_of(tokens, self.rows).to(network.table.weight.device))
        n = x.shape[1]
        self.columns += n
        positions = torch.arange(self.columns - n, self.columns)
        self.rotation = network.rotation(self.offset + positions, x)
        self.own = Planned(causal(self.pads[:, None].expand(-1, n), positions=positions), self.columns)
        if self.context:
            self.planned = Planned(self.inside(n), self.context[0][0].shape[2])
        return (network.decode(x, self)[:, -1] @ network.head.T).float()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.own.read(q, *self.caches[layer - self.network.config.encoder_layers].append(k, v))

    def cross(self, block: CrossBlock, q: Tensor) -> Tensor:
        return self.planned.read(q, *self.context[block.layer - self.network.config.encoder_layers])

    def fork(self, rows: Tensor | None = None) -> "EncoderDecoderSession":
        other = EncoderDecoderSession(self.network, self.rows if rows is None else len(rows))
        other.caches = [cache.fork(rows) for cache in self.caches]
        other.context = [(rows_of_state(k, rows), rows_of_state(v, rows)) for k, v in self.context]
        other.lo, other.hi, other.pads = (rows_of_state(x, rows) for x in (self.lo, self.hi, self.pads))
        other.columns, other.offset = self.columns, self.offset
        return other

    @property
    def bytes(self) -> int:
        return sum(cache.bytes for cache in self.caches) + sum(k.nbytes + v.nbytes for k, v in self.context)
