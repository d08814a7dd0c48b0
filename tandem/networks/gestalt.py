"""Thought Gestalt: a document is read sentence by sentence, and each sentence leaves one vector, its thought.

One stack is both token decoder and sentence encoder. A row [BOS] x_1 .. x_n [EOS] is one sentence; a middle block's
state at [EOS] becomes the thought, and later sentences see earlier text only through the last M thoughts:

    sentence k     seed  x1  x2  x3  [EOS]        seed: the thought before, in place of [BOS]
                    |    |   |   |    |
    S  causal inside the sentence     |           S and C take turns
    C  reads thoughts k-M .. k-1      |           keys know the rank of a thought (oldest 0), values do not
    S                                 +--> r = W norm(v) + b, thought k = r / |r|
    C, S, ...
    head ->        x1   x2  x3  [EOS]             [EOS] is asked, and asks nothing

No gradient is cut: later losses train earlier thoughts, through chains of them back to the stream's first sentence.

Two phases. Only blocks 1 .. `thought_from` are recurrent: they go step by step, all streams side by side. The others,
the head and the loss then read all steps at once, as all thoughts are known. `gestalt_layout.py` has the packing.

Cost: gestalt_cost.py. With `recompute`, only the inputs of sentence steps and the states between the phases are kept
for the backward.
Baseline: `blocks: self, memory: 0, seed: false, hinge: 0` and documents of one sentence are the plain decoder.
Source: Modeling Language as a Sequence of Thoughts, arXiv 2512.25026; docs/gestalt.md has what it leaves open.
Letters: B streams, N tokens of a batch, q labels (N and an end for each sentence), P positions, R rows (sentences) of a
step, C width, M memory slots, V vocabulary; [EOS] ends a sentence (id V), [BOS] is id V + 1.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from tandem.corpus import (
    IGNORE,
    Batch,
    ScoringBatch,
    Segmentation,
    SentenceStreams,
    Store,
    StreamBatch,
    Streams,
    Tokenizer,
    open_sentences,
    scoring_streams,
)
from tandem.networks.decoder import Decoder
from tandem.networks.gestalt_blocks import MemoryBlock, ParallelBlock, SerialBlock, ThoughtHead, hinge, rank_table
from tandem.networks.gestalt_cost import GestaltCost
from tandem.networks.gestalt_layout import Layout
from tandem.networks.gestalt_reading import NO_DROPOUT, GestaltDropout, Reading
from tandem.networks.gestalt_session import GestaltSession
from tandem.networks.network import Network, padded
from tandem.nn.block import Block, BlockConfig
from tandem.nn.init import Embedding, Linear, initialise
from tandem.nn.norm import norm
from tandem.nn.rope import Rotation
from tandem.nn.spans import Span, causal
from tandem.recipe import Recipe, register

BLOCKS: dict[str, tuple[Callable[[BlockConfig, int], nn.Module], ...]] = {
    "alternate": (Block, MemoryBlock),
    "self_then_cross": (SerialBlock,),
    "parallel": (ParallelBlock,),
    "self": (Block,),
}


@register("network", "gestalt")
class Gestalt(Network):
    """Thought Gestalt (arXiv 2512.25026): sentence after sentence, with a memory of thoughts."""

    reads_sentences = reads_whole = rows_vary = True
    free = ("detach", "hinge", "reduction", "dropout", "streams")
    tokens_only = "reads sentences, and a bag of tokens would stand in two of them; take objective next_token"
    unwrapped = "reads every sentence as a row of its own, and a correction goes from token to token of one row"

    class Config(BlockConfig):
        depth: int = Field(12, ge=1)
        """Number of blocks."""
        tied: bool = True
        """The output matrix is the token table."""
        blocks: Literal["alternate", "self_then_cross", "parallel", "self"] = "alternate"
        """alternate: self- and cross-attention in turns; self_then_cross, parallel: both in every block, in series or
        side by side; self: no cross-attention, thoughts are positions before the sentence (memory: 0: no memory)."""
        memory: int = Field(40, ge=0)
        """M, thoughts that a sentence reads; 0: cross-attention adds exactly 0."""
        cap: int = Field(64, ge=1)
        """Most tokens of a sentence, document end included: that of corpus.sentences, or for spans that or more."""
        seed: bool = True
        """A sentence begins with the previous thought, not with [BOS]."""
        detach: bool = False
        """Cut the gradient of thoughts, in memory and in seeds: an ablation."""
        thought_from: int | None = Field(7, ge=1)
        """Block, counted from 1, whose state becomes the thought; null: the state after the final norm."""
        hinge: float = Field(0.01, ge=0)
        """Weight of the term that keeps |r| between 0.9 and 1.1."""
        reduction: Literal["steps", "tokens"] = "steps"
        """steps: the sum over sentence steps of the mean of each; tokens: one mean over all labels."""
        boundary_logits: Literal["eos", "all"] = "eos"
        """Which boundary tokens have a logit: [EOS], or also [BOS] and a pad, as in the authors' release."""
        dropout: GestaltDropout = GestaltDropout()
        """Dropout rates in training."""
        streams: Streams = Streams()
        """How text is cut into streams, and what changes during training."""
        moe: None = None
        """Mixtures of experts are not supported."""
        drops_inner: ClassVar[bool] = True

        def derive(self) -> dict[str, Any]:
            found = super().derive()
            plain = (self.key_heads or self.heads, self.head_width or found["head_width"], self.qk_norm)
            if plain != (self.heads, self.width // self.heads, False):
                raise ValueError("key_heads, head_width and qk_norm: leave them; memory has one head for each")
            if self.thought_from is not None and self.thought_from > self.depth:
                raise ValueError(f"thought_from {self.thought_from} is beyond depth {self.depth}; or null: the last")
            if self.width % 2:
                raise ValueError(f"width {self.width}: ranks of thoughts need an even number")
            return found

        @property
        def recurrent(self) -> bool:
            """Whether anything passes from one sentence to the next."""
            return self.memory > 0 or self.seed

        @property
        def thinks(self) -> bool:
            """Whether anything uses thoughts, the loss included."""
            return self.recurrent or self.hinge > 0

        @property
        def in_context(self) -> bool:
            return self.blocks == "self" and self.memory > 0

        @property
        def positions_of_row(self) -> int:
            return self.cap + 2 + (self.memory if self.in_context else 0)

    def __init__(self, config: Config, vocabulary: int, context: int, generator: torch.Generator | None = None):
        super().__init__(config, vocabulary, context)
        c = config
        self.end, self.begin = vocabulary, vocabulary + 1
        """Ids of [EOS] and [BOS]."""
        self.table = Embedding(padded(vocabulary + (c.boundary_logits == "all")), c.width)
        self.places = Embedding(c.positions_of_row, c.width) if c.positions == "learned" else None
        kinds = BLOCKS[c.blocks]
        self.stack = nn.ModuleList(kinds[layer % len(kinds)](c, layer) for layer in range(c.depth))
        self.norm = norm(c.norm, c.width, c.norm_eps, bias=c.bias, scale=c.width_ratio**-0.5)
        self.thought = ThoughtHead(c)
        self.output = None if c.tied else Linear(c.width, len(self.table.weight), bias=False, role="head")
        initialise(self, c.init, c.depth, generator)

    @classmethod
    def check(cls, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if isinstance(texts := recipe.corpus.texts, dict) and len(texts) > 1:  # told before any text is prepared
            yield "corpus.texts", "the streams of gestalt go by epochs, which a mixture has not; write texts as a list"
        cut, cap = recipe.corpus.sentences or Segmentation(), recipe.network.cap
        if cap < cut.longest:
            yield "network.cap", f"sentences have up to {cut.longest} tokens (corpus.sentences); make it {cut.longest}"
        elif cut.cap and cap > cut.cap:  # a session would wait for ends that training never saw so late
            reason = f"sentences have up to {cut.cap} tokens (corpus.sentences.cap); make it {cut.cap}"
            yield "network.cap", f"{reason}, or write corpus.sentences.cap: {cap}"

    @classmethod
    def tiny(cls) -> dict[str, Config]:
        shared: dict[str, Any] = {"width": 32, "heads": 4, "depth": 3, "cap": 7, "memory": 2, "thought_from": 1}
        shared["dropout"] = NO_DROPOUT
        paper = {"positions": "learned", "norm": "layer", "mlp": "gelu", "bias": True, "init": "xavier_qkv"}
        given: dict[str, dict[str, Any]] = {
            "alternate": {**paper, "depth": 4, "thought_from": 3},
            "alternate_begins": {"seed": False, "depth": 4, "thought_from": None, "tied": False},
            "serial": {"blocks": "self_then_cross"},
            "parallel": {"blocks": "parallel"},
            "in_context": {"blocks": "self", **paper},
        }
        return {name: cls.Config(**{**shared, **own}) for name, own in given.items()}

    @classmethod
    def degenerate(cls, config: Config) -> tuple[Any, Any, Callable[[str], str | None]]:
        plain = config.shared_with(BlockConfig) | {"depth": config.depth, "tied": config.tied, "positions": "adjacent"}
        cut = {"blocks": "self", "memory": 0, "seed": False, "hinge": 0.0, "cap": 1 << 20, "positions": "adjacent"}
        own = lambda name: None if name.startswith("thought.") else name
        return config.model_copy(update=cut), Decoder.Config(**plain), own

    def view(self, store: Store, seed: int, rows: int, context: int) -> SentenceStreams:
        return SentenceStreams(store, seed, rows, context, self.config.streams)

    def scoring(
        self, store: Store, context: int, rows: int, documents: Iterable[int] | None = None, whole: bool = True
    ) -> Iterator[ScoringBatch]:
        """Memory is empty at the first sentence of each document, or of each window."""
        return scoring_streams(store, context, rows, documents, whole)

    def prompt(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """The text's tokens with [EOS] after every sentence, as in training, but for full ones, which close by
        themselves; the last one stays open. A text without tokens is [EOS] alone, which closes nothing."""
        cut = self.segmentation or Segmentation(cap=min(Segmentation().longest, self.config.cap))
        *closed, last = (part.tolist() for part in open_sentences(text, tokenizer, cut))
        ended = (part if len(part) == self.config.cap else [*part, self.end] for part in closed)
        return [*itertools.chain.from_iterable(ended), *last] or [self.end]

    @property
    def shards(self) -> list[nn.Module]:
        """Empty: processes have different numbers of sentence steps, so weights are gathered once for all steps."""
        return []

    @property
    def head(self) -> Tensor:
        return self.output_weight[: self.vocabulary + (3 if self.config.boundary_logits == "all" else 1)]

    def unseeded(self) -> Self:
        """A copy that shares the weights; its sentences all begin with [BOS]; for analyses."""
        other = copy.copy(self)
        other.config = self.config.model_copy(update={"seed": False})
        return other

    @property
    def gates(self) -> dict[str, float]:
        """The gate of each block's cross-attention, by block counted from 1; for records and an analysis."""
        layers = self.reads_memory(range(self.config.depth))
        return {str(layer + 1): self.stack[layer].memory.gate.weight.item() for layer in layers}  # type: ignore[union-attr, arg-type]

    @property
    def depth_of_thought(self) -> int:
        """Number of blocks that run sentence step by sentence step."""
        return self.config.depth if self.config.thought_from is None else self.config.thought_from

    def reads_memory(self, layers: Iterable[int]) -> list[int]:
        """Those of the layers whose cross-attention has anything to read."""
        return [layer for layer in layers if self.config.memory and hasattr(self.stack[layer], "memory")]

    @property
    def ids(self) -> int:
        return self.vocabulary + 1

    # ---- two phases -----------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, batch: Batch | StreamBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Embeddings of tokens to the hidden states that predict.

        x (N, C) of a StreamBatch: hidden states (1, q, C) of its labels. x (B, T, C) of packed rows: (B, T, C), each
        predicting what follows its token. Packed rows do not say where sentences end, so these end after `cap` tokens,
        as in a session whose sentences nobody closes.
        """
        layout = self.layout(batch, x.device)
        if not layout.tokens:
            empty = self.touched(x.reshape(1, 0, x.shape[-1]), [self])
            return empty, {name: x.sum() for name in self.terms}
        reading = Reading(self, layout, batch)
        hidden, lengths = reading.run(x.flatten(0, -2))
        hidden = self.touched(hidden, self._idle(layout))
        if isinstance(batch, StreamBatch):
            return hidden[None], self._extra(lengths, layout, batch)
        return hidden[layout.after_tokens()].view_as(x), self._extra(lengths, layout, None)

    def layout(self, batch: Batch | StreamBatch, device: torch.device) -> Layout:
        c, lengths = self.config, self.sentence_lengths(batch)
        return Layout(lengths, memory=c.memory, in_context=c.in_context, recurrent=c.recurrent, device=device)

    def sentence_lengths(self, batch: Batch | StreamBatch) -> list[list[int]]:
        """Tokens of each sentence, by stream."""
        return batch.lengths if isinstance(batch, StreamBatch) else cut_rows(batch.starts, self.config.cap)

    def _idle(self, layout: Layout) -> list[nn.Module]:
        """Modules that this batch does not use."""
        idle: list[nn.Module] = [] if self.config.hinge else [self.thought]  # without it thoughts may be unused
        if not self.config.memory or len(layout.widths) < 2:
            idle += [block.memory for block in self.stack if hasattr(block, "memory")]  # type: ignore[misc]
        return idle

    # ---- the loss -------------------------------------------------------------------------------------------------

    @property
    def terms(self) -> dict[str, float]:
        return {"hinge": self.config.hinge, "thought_length": 0.0} if self.config.thinks else {}

    def _extra(self, lengths: Tensor | None, layout: Layout, batch: StreamBatch | None) -> dict[str, Tensor]:
        """Sums of the extra terms from |r| (sentences,) in batch order. Under `steps` a step's hinge is a mean, too."""
        if lengths is None:
            return {}
        terms = hinge(lengths)
        if batch is not None and self.config.reduction == "steps":
            rows = torch.tensor(batch.rows_at, dtype=terms.dtype)
            terms = terms * (rows.sum() / rows)[torch.from_numpy(layout.step)].to(terms.device)
        return {"hinge": terms.sum(), "thought_length": lengths.sum()}

    def count(self, batch: Batch | StreamBatch) -> dict[str, int]:
        sentences = sum(map(len, self.sentence_lengths(batch)))
        text = {"nll": len(batch.tokens), "end": sentences} if isinstance(batch, StreamBatch) else {}
        return text | dict.fromkeys(self.terms, sentences)

    def asked(self, hidden: Tensor, batch: Batch | StreamBatch, counts: dict[str, int]) -> tuple[Tensor, dict]:
        """Main loss: per sentence step sum(w ce) / sum(w) over the whole training step, w = `end_weight` where the
        label is [EOS], else 1; a micro-batch has its share of each. [EOD] is a token like any other."""
        if not isinstance(batch, StreamBatch):
            return super().asked(hidden, batch, counts)
        targets, is_end = batch.targets[0], batch.targets[0] == self.end
        slots = torch.stack((targets.masked_fill(is_end, IGNORE), targets.masked_fill(~is_end, IGNORE)), dim=1)
        rows, text = (torch.tensor(totals, dtype=torch.float64) for totals in (batch.rows_at, batch.tokens_at))
        mass = text + batch.end_weight * rows
        if self.config.reduction == "tokens":
            share = (1 / mass.sum()).expand(len(targets))
        else:
            share = 1 / mass[self.steps_of_labels(batch)]
        weights = torch.stack((share, batch.end_weight * share), dim=1).to(hidden.device)
        loss, sums = self.nll(hidden, slots[None], weights[None])
        return loss, {"nll": sums[0], "end": sums[1]}

    def steps_of_labels(self, batch: StreamBatch) -> Tensor:
        """(q,) int64 on the host: the sentence step of each label."""
        lengths = torch.tensor([n + 1 for stream in batch.lengths for n in stream], dtype=torch.long)
        steps = torch.tensor([t for stream in batch.lengths for t in range(len(stream))], dtype=torch.long)
        return steps.repeat_interleave(lengths)

    # ---- the rest of the contract ---------------------------------------------------------------------------------

    def as_plain(self, batch: Batch) -> Batch:
        """What the plain decoder reads in place of `batch`: [BOS] in front of every document; it fills up rows, too."""
        B, T = batch.starts.shape
        opened = (batch.starts == torch.arange(T)).cumsum(1)
        place, longest = torch.arange(T) + opened, T + int(opened.max())
        tokens = torch.full((B, longest), self.begin).scatter(1, place, batch.tokens)
        targets = torch.full((B, longest), IGNORE).scatter(1, place, batch.targets)
        starts = torch.where(tokens == self.begin, torch.arange(longest), 0).cummax(1).values
        return Batch(tokens, targets, starts, key=batch.key)

    def session(self, rows: int) -> GestaltSession:
        return GestaltSession(self, rows)

    def cost(self) -> GestaltCost:
        return GestaltCost.of(self)

    @classmethod
    def drawing(cls, config: Config, starts: list[int]) -> list[tuple[str, Span, int]]:
        """A text whose documents stand for sentences."""
        T, places = len(starts), torch.tensor([starts])
        sentence = (places == torch.arange(T)).long().cumsum(1) - 1
        thoughts = Span((sentence - config.memory).clamp_min(0), sentence)
        own = ("tokens of the sentence", causal(places), T)
        return [own, ("thoughts", thoughts, int(sentence.max()) + 1)] if config.memory else [own]

    def rotation(self, places: Tensor, like: Tensor) -> Rotation | None:
        return None if self.places is not None else Rotation.of(self.config, places, like)

    def ranks(self, layers: Iterable[int], like: Tensor) -> dict[int, Tensor]:
        """What ranks add to keys, (M, C), by layer."""
        layers = self.reads_memory(layers)
        if not layers:
            return {}
        table = rank_table(self.config.memory, self.config.width, like.device).to(like.dtype)
        return {layer: self.stack[layer].memory.ranks(table) for layer in layers}  # type: ignore[union-attr]


def cut_rows(starts: Tensor, cap: int) -> list[list[int]]:
    """Packed rows, given where each position's document starts (B, T), as streams of sentences of `cap` tokens."""
    found = []
    for row in starts.tolist():
        for _, document in itertools.groupby(row):
            full, rest = divmod(len(list(document)), cap)
            found.append([cap] * full + [rest])
    return found
