"""Block-Based Double Decoders: one stack reads the context once, a shallower one writes from its latents.

A causal context stack leaves one latent for every token. A causal generation stack reads the tokens of its own block
and, for everything before the block, the latents alone, in one softmax. Block boundaries are random
(corpus/partition.py), so one packed row trains both stacks with a loss at every token:

    tokens    t0 t1 | t2 t3 t4 | t5        b: where the block of position i begins     s: where its document does
    context   t4 reads tokens t0 .. t4     [s, i+1)
    own       t4 reads tokens t2 .. t4     [max(b, s), i+1)      in the generation stack, which starts from embeddings
    latents   t4 reads latents h0, h1      [s, max(b, s))        empty in the first block of a document

Keys of own tokens and of latents come from the same projection, rotated by the same absolute positions. In generation
the prompt is context except for its last token, which opens a block that lasts until `commit` or `extend`. The cache
holds the generation stack's keys and values alone: a third of the plain decoder's where a third of the blocks write.

A batch that names its blocks (`Batch.blocks`, see corpus/partition.py) is read in these, in training and in scores;
`prompt_blocks` makes those of a prefix and its continuation, one boundary for each document. Without a boundary the
context stack is idle and the generation stack is a plain decoder with as many blocks; with `sink`, it still reads the
latent of a document's first token.

Cost: in training about the plain decoder's with all blocks, plus 2 C^2 multiply-adds for each generation block; in
decoding that of the generation blocks alone.
Source: Alexander et al., Block-Based Double Decoders (AdaptFM workshop, ICML 2026); docs/double_decoder.md.
Shapes: B rows, T tokens, C width, H heads, G key heads, D head width, P partitions of a score.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from tandem.corpus import IGNORE, Batch
from tandem.corpus.partition import PartitionConfig, scoring_blocks, training_blocks
from tandem.networks.cost import Cost
from tandem.networks.decoder import Decoder, SpanReader, Watch
from tandem.networks.double_decoder_session import DoubleDecoderSession, Keep
from tandem.networks.network import Network, padded
from tandem.nn.attention import Plan, Source, attend, plan_attention, scores
from tandem.nn.block import Block, BlockConfig, current_parts, heads_of, linear_work
from tandem.nn.head import token_nll
from tandem.nn.init import Embedding, Linear, initialise, itself
from tandem.nn.moe import MixtureConfig
from tandem.nn.norm import NormKind, final_norm
from tandem.nn.rope import Pairing, Rotation
from tandem.nn.spans import Span, causal
from tandem.recipe import register

TILE = 192
"""Most queries of a tile: 0.534 T^2 pairs where the cheapest tiles visit 0.565, in the same time (T 2,048, CPU)."""


@register("network", "double_decoder")
class DoubleDecoder(Network):
    """A stack that reads the context once and a shallower one that writes (Block-Based Double Decoders)."""

    watch: Watch | None = None
    """As `Decoder.watch`."""

    divides = True
    free = ("context_loss", "partition", "score_partitions")

    class Config(BlockConfig):
        context_layers: int = Field(4, ge=1)
        """Blocks of the stack that reads the context."""
        generation_layers: int = Field(2, ge=1)
        """Blocks of the stack that writes; its cache is all that generation holds."""
        tied: bool = True
        """The output matrix is the token table."""
        shared_kv: bool = True
        """Latents are projected to keys and values by the matrix of own tokens; otherwise by one of their own."""
        sink: bool = False
        """The first block of a document may read the latent of the document's first token, as in the authors' code."""
        mixing: Literal["softmax", "biased"] = "softmax"
        """softmax: one over both sources; biased: two, merged by (log-sum-exp + bias) x temperature, bias and
        temperature learned for every head (authors' code, off in the paper; slow)."""
        document_mask: bool = True
        """In training, a document reads nothing of those before it in its row. In scores, no document ever does."""
        final_norm: NormKind | None = None
        """Norm of the latents and of the output: rms, or layer with weight, bias and eps 1e-5; null: as in blocks."""
        context_loss: float = Field(0.0, ge=0)
        """Weight of a next-token loss of the context stack by itself, through the same head."""
        partition: PartitionConfig = PartitionConfig()
        """Where blocks begin."""
        score_partitions: int = Field(4, ge=1)
        """P: a text's score is the mean of its nats under this many partitions, fixed in advance."""
        positions: Pairing = "adjacent"
        """How rotary positions pair the channels."""

        def derive(self) -> dict[str, Any]:
            if not self.document_mask and self.partition.scope == "document":
                raise ValueError("document_mask = false: reads a row as one document; take partition.scope: row")
            return super().derive()

    def __init__(self, config: Config, vocabulary: int, context: int, generator: torch.Generator | None = None):
        super().__init__(config, vocabulary, context)
        c = config
        self.table = Embedding(padded(vocabulary), c.width)
        self.context_stack = Stack(c, [Block(c, layer) for layer in range(c.context_layers)])
        generation: list[Block] = [GenerationBlock(c, layer) for layer in range(c.generation_layers)]
        self.generation_stack = Stack(c, generation, scale=c.width_ratio**-0.5)
        self.output = None if c.tied else Linear(c.width, padded(vocabulary), bias=False, role="head")
        for part in self.children():
            initialise(part, c.init, len(part.blocks) if isinstance(part, Stack) else 1, generator)

    @classmethod
    def tiny(cls) -> dict[str, Config]:
        # Texts are short: the context is read only if the first block ends early
        early: dict[str, Any] = {"min_context": 3}
        authors = {"sink": True, "mixing": "biased", "final_norm": "layer", "init": "xavier", "context_loss": 0.2}
        grouped = {"key_heads": 2, "head_width": 6, "qk_norm": True, "positions": "halves", "tied": False}
        moe = {"moe": MixtureConfig(experts=4, active=2, balance=0.0), "mlp_width": 24}
        given: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "blocks": (early, {}),
            "every_token": ({"strategy": "every_token"}, {"shared_kv": False, **grouped}),
            "authors": (early | {"scope": "row", "shared": True}, authors),
            "mixture": (early | {"align": 2}, moe),
        }
        shared: dict[str, Any] = {"width": 32, "heads": 4, "context_layers": 2, "score_partitions": 1}
        return {
            name: cls.Config(**shared, **own, partition=PartitionConfig(**partition))
            for name, (partition, own) in given.items()
        }

    @classmethod
    def check(cls, recipe: Any) -> Iterator[tuple[str, str]]:
        if recipe.network.partition.align >= recipe.batch.context:
            yield "network.partition.align", f"no block can begin at a multiple of it in rows of {recipe.batch.context}"

    @classmethod
    def degenerate(cls, config: Config) -> tuple[Config, Decoder.Config, Callable[[str], str | None]]:
        single = config.partition.model_copy(update={"strategy": "single"})
        whole = {"partition": single, "sink": False, "context_loss": 0.0}
        own = config.shared_with(BlockConfig)
        plain = Decoder.Config(**own, depth=config.generation_layers, tied=config.tied, final_norm=config.final_norm)
        return config.model_copy(update=whole), plain, _name_in_decoder

    @property
    def blocks(self) -> nn.ModuleList:
        return nn.ModuleList([*self.context_stack.blocks, *self.generation_stack.blocks])

    @property
    def stacks(self) -> dict[str, nn.ModuleList]:
        """As `Decoder.stacks`."""
        return {"context": self.context_stack.blocks, "generation": self.generation_stack.blocks}

    # ---- both stacks ------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        starts, self.routings = batch.starts, []
        if not self.config.document_mask and batch.key is not None:
            starts = torch.zeros_like(starts)
        latents = self.latents(x, starts)
        hidden = self.generated(x, latents, starts, self.partition(batch, starts))
        extra = self.extra(batch)
        if self.config.context_loss:
            extra["context_nll"] = self.nll(latents * self.config.width_ratio**-0.5, next_of(batch))[0]
        return hidden, extra

    def latents(self, x: Tensor, starts: Tensor) -> Tensor:
        """The context stack's latent of every token, (B, T, C)."""
        x = x.to(self.context_stack.device)
        return self.context_stack(x, SpanReader(self, [causal(starts)], x, "context"), self.run_block)

    def generated(self, x: Tensor, latents: Tensor, starts: Tensor, blocks: Tensor) -> Tensor:
        """Hidden states (B, T, C) of the generation stack, whose blocks begin at `blocks` (B, T)."""
        x, latents = (given.to(self.generation_stack.device) for given in (x, latents))
        return self.generation_stack(x, BlockReader(self, latents, starts, blocks, x), self.run_block)

    def partition(self, batch: Batch, starts: Tensor | None = None, number: int = 0) -> Tensor:
        """(B, T): where blocks begin, as the batch says, else drawn for its step, else by a score's `number`."""
        c, starts = self.config.partition, batch.starts if starts is None else starts
        if batch.blocks is not None:
            return batch.blocks
        if batch.key is not None:
            return training_blocks(c, starts, batch.key, batch.row)
        return scoring_blocks(c, starts, batch.tokens.cpu(), self.context, number)

    def read(self, batch: Batch, x: Tensor | None = None) -> Tensor:
        """As `Network.read`, under the first of the partitions that scores use."""
        x = self.embed(batch.tokens) if x is None else x
        hidden = self.generated(x, self.latents(x, batch.starts), batch.starts, self.partition(batch, number=0))
        self.routings = []  # no loss asks for them, and they would keep the whole graph
        return hidden

    def score(self, batch: Batch, x: Tensor | None = None) -> Tensor:
        """As `Network.score`: the mean over P partitions, or under the blocks that the batch names.

        Each partition gives probabilities; the mean of their logarithms estimates that of a randomly drawn partition.
        """
        x = self.embed(batch.tokens) if x is None else x
        is_drawn = batch.blocks is None and self.config.partition.strategy == "random_uniform"
        P = self.config.score_partitions if is_drawn else 1
        latents, targets, nats = self.latents(x, batch.starts), batch.targets.flatten(), 0
        for number in range(P):
            hidden = self.generated(x, latents, batch.starts, self.partition(batch, number=number))
            nats = nats + token_nll(hidden.flatten(0, 1), self.head, targets)
        self.routings = []
        return (nats / P).view_as(batch.targets)  # type: ignore[union-attr]

    @property
    def terms(self) -> dict[str, float]:
        own = {"context_nll": self.config.context_loss} if self.config.context_loss else {}
        return super().terms | own

    def count(self, batch: Batch) -> dict[str, int]:
        own = {"context_nll": int((next_of(batch) != IGNORE).sum())} if self.config.context_loss else {}
        return super().count(batch) | own

    def rotation(self, first: int | Tensor, length: int, like: Tensor) -> Rotation:
        """For columns first .. first + length: scores depend on distances, so documents need no restart."""
        return Rotation.of(self.config, first + torch.arange(length, device=like.device), like)

    def session(self, rows: int, keep: Keep = "generation", swap: str | None = None) -> DoubleDecoderSession:
        """`keep`: what is held for contexts that grow or are reused; `swap`: the device on which the stacks take
        turns. See double_decoder_session.py."""
        return DoubleDecoderSession(self, rows, keep, swap)

    def cost(self) -> Cost:
        """With `sink`, a session keeps one latent more than this counts while its prompt has a single token."""
        c = self.config
        G, D, _ = c.derived
        L_c, L_g, work = c.context_layers, c.generation_layers, linear_work(c)
        head, latents = self.vocabulary * c.width, L_g * c.width * 2 * G * D
        return Cost(
            parameters=self.parameters_by_role(),
            linear=L_g * work,
            head=head,
            pair=c.heads * D,
            pairs=lambda n: (L_c + L_g) * n * (n + 1) // 2,
            keys=lambda n: L_g * (n + 1),
            cache=lambda n: 2 * L_g * G * D * n,
            training_linear=(L_c + L_g) * work + latents + (head if c.context_loss else 0),
            prefill_linear=L_c * work + latents,
            prefill_pairs=lambda n: L_c * n * (n + 1) // 2,
            held_back=1,
        )

    @classmethod
    def drawing(cls, config: Config, starts: list[int]) -> list[tuple[str, Span, int]]:
        s = torch.tensor([starts if config.document_mask else [0] * len(starts)])
        # A key whose splits make an instructive picture
        own, latents = block_spans(s, training_blocks(config.partition, s, key=131), config.sink)
        titles = "tokens that the context stack reads", "own tokens", "latents that the generation stack reads"
        return [(title, span, len(starts)) for title, span in zip(titles, (causal(s), own, latents), strict=True)]


class Stack(nn.Module):
    """Blocks, and the norm of the last one's output."""

    def __init__(self, config: Any, blocks: list[Block], scale: float = 1.0):
        super().__init__()
        self.config, self.blocks = config, nn.ModuleList(blocks)
        self.norm = final_norm(config, scale)

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device  # type: ignore[return-value]

    def forward(self, x: Tensor, reader: Any, run: Callable[..., Tensor]) -> Tensor:
        for block in self.blocks:
            x = run(block, x, reader)
        return self.norm(x)


class GenerationBlock(Block):
    """Tandem's block; its own projection turns latents, as they are, into keys and values."""

    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        keys = 2 * self.key_heads * config.head_width
        self.qkv.fused = (self.qkv.out_features - keys, keys)
        self.kv = None
        if not config.shared_kv:
            parts = (keys // 2, keys // 2)
            self.kv = Linear(config.width, keys, bias=config.bias, role="attention", parts=parts)
        self.mixing = Mixing(config.heads) if config.mixing == "biased" else None

    def keys_of(self, latents: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Keys and values (B, G, T, D) of latents (B, T, C), which are not normed again."""
        return current_parts(self)[-1](self, latents, rotation)

    @classmethod
    def parts(cls) -> tuple[Callable, ...]:
        return *super().parts(), cls.project_latents

    def project_latents(self, latents: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        if self.kv is None:
            qkv = itself(self.qkv)
            queries, bias = qkv.parts[0], qkv.bias
            kv = F.linear(latents, qkv.weight[queries:], None if bias is None else bias[queries:])
        else:
            kv = self.kv(latents)
        (k, v), G = kv.chunk(2, dim=-1), self.key_heads
        return heads_of(k, G, latents, self.k_norm, rotation), heads_of(v, G, latents)

    def read(self, q: Tensor, own: Source, latents: Source, plan: Plan | None = None) -> Tensor:
        """One softmax over own tokens and latents, or a mixture of two."""
        return attend(q, [own, latents], plan=plan) if self.mixing is None else self.mixing(q, own, latents)


class Mixing(nn.Module):
    """Attention over each of two sources, merged by their biased log-sum-exps; dense, for comparison with its authors.

    y = w y_own + (1 - w) y_latents,  w = sigmoid(a_own - a_latents),  a = (lse + bias) temperature
    """

    role = "bias"

    def __init__(self, heads: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2 * heads))  # of each head for own tokens, then for latents
        self.temperature = nn.Parameter(torch.ones(heads))

    def forward(self, q: Tensor, own: Source, latents: Source) -> Tensor:
        (y, a), (z, b) = (_weighed(q, source) for source in (own, latents))
        empty = b.isneginf()  # where no latents are read: nothing of them, forward and backward
        bias_own, bias_latents = self.bias[:, None].chunk(2)
        b = b.masked_fill(empty, 0)  # never -inf times a parameter: its gradient would be NaN
        difference = ((a + bias_own) - (b + bias_latents)) * self.temperature[:, None]
        w = difference.masked_fill(empty, torch.inf).sigmoid()[..., None]
        return (w * y + (1 - w) * z).to(q.dtype)


# ---- readers --------------------------------------------------------------------------------------------------------


def next_of(batch: Batch) -> Tensor:
    """(B, T), the token that follows each position in its document, asked for or not; of bags the first slot."""
    targets = batch.targets if batch.targets.ndim == 2 else batch.targets[..., 0]
    if batch.blocks is None:
        return targets
    # Prefix LM asks for nothing before its break points, where all latents lie that are read
    goes_on = batch.starts[:, 1:] != torch.arange(1, targets.shape[1])
    follows = batch.tokens[:, 1:].where(goes_on.to(targets.device), IGNORE)
    return targets.where(targets != IGNORE, F.pad(follows, (0, 1), value=IGNORE))


def block_spans(starts: Tensor, blocks: Tensor, sink: bool) -> tuple[Span, Span]:
    """The spans of the generation stack over own tokens and over latents; starts and blocks (B, T)."""
    b = torch.maximum(blocks, starts)
    return causal(b), Span(starts, torch.maximum(b, starts + 1) if sink else b)


class BlockReader:
    """Reads a whole batch at once in the generation stack: own tokens of a block, latents of all before it."""

    def __init__(self, network: DoubleDecoder, latents: Tensor, starts: Tensor, blocks: Tensor, x: Tensor):
        T = x.shape[1]
        self.rotation = network.rotation(0, T, x)
        self.blocks, self.latents, self.watch = network.generation_stack.blocks, latents, network.watch
        self.spans = block_spans(starts, blocks, network.config.sink)
        self.plan = plan_attention(self.spans, [T, T], device=x.device, most=TILE)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        block = self.blocks[layer]
        assert isinstance(block, GenerationBlock)
        own, latents = self.spans
        sources = [Source(k, v, own), Source(*block.keys_of(self.latents, self.rotation), latents)]
        if self.watch:
            self.watch("generation", layer, q, sources)
        return block.read(q, *sources, plan=self.plan)


def _weighed(q: Tensor, source: Source) -> tuple[Tensor, Tensor]:
    """(values weighed by a softmax over the source alone (B, H, T, D), its log-sum-exp (B, H, T)), dense.

    Where a query reads nothing: 0 and -inf, both without gradient.
    """
    score, v = scores(q, [source])
    empty = score.isneginf().all(-1)
    score = score.masked_fill(empty[..., None], 0)
    y = (score.softmax(-1) @ v).masked_fill(empty[..., None], 0)
    return y, score.logsumexp(-1).masked_fill(empty, -torch.inf)


def _name_in_decoder(name: str) -> str | None:
    """A parameter's name in the plain decoder that the generation stack is without a context; None: it has none."""
    stack, _, own = name.partition(".")
    if stack == "generation_stack":
        return None if ".kv." in own or ".mixing." in own else own.replace("blocks.", "stack.", 1)
    return None if stack == "context_stack" else name
