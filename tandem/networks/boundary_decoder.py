"""The plain decoder with sentence boundaries in its text: the fair baselines for sentence memory.

    tokens   every token reads its document, boundary tokens included
    gist     it reads its own sentence, and of earlier ones their [EOS] alone: one softmax over two sources

    query i of sentence k, which starts at a_k      own positions [a_k, i + 1);  gathered [EOS] [first sentence, k)

The boundaries are ids of the softmax, [EOS] = V and [BOS] = V + 1, trained as labels like any token. Scores count them
separately (evaluation/likelihood.py). Without them (sentences: null) this is the plain decoder. A session reads those
that a prompt has, and generation draws them like any token but does not show them.
A boundary takes a position like any token. Learned positions are as many as `context` tokens and their boundaries can
take, 3 `context` + 1, of which ordinary text trains little more than a third; generation ends at `context` tokens.
Source: the baselines "GPT-2 + sentence boundaries" and "GPT-2 + gist masking" of Thought Gestalt (arXiv 2512.25026);
the mask follows the paper's text, because the authors' code states that theirs tested the gist flag of queries.
Cost: that of the plain decoder on its rows, boundaries included; with gist, training counts sentences of SENTENCE
tokens, while prompts and sessions count as one open sentence.
Letters: B rows, T positions, N keys, E gathered ends, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from tandem.corpus import (
    Batch,
    BoundaryRows,
    PackedRows,
    ScoringBatch,
    Store,
    Tokenizer,
    open_sentences,
    scoring_boundary_rows,
    widest_row,
)
from tandem.networks.cost import SENTENCE, Cost
from tandem.networks.decoder import Decoder, DecoderSession
from tandem.networks.network import columns_of
from tandem.nn.attention import Plan, Source, attend, plan_attention
from tandem.nn.cache import rows_of_state
from tandem.nn.dropout import Masks
from tandem.nn.spans import Span
from tandem.recipe import Recipe, register


@register("network", "boundary_decoder")
class BoundaryDecoder(Decoder):
    """The plain decoder on rows with sentence boundaries, or with gist masking by sentences."""

    reads_sentences = True
    tokens_only = "reads sentence boundaries, and bags would straddle them; take network decoder"

    class Config(Decoder.Config):
        sentences: Literal["tokens", "gist"] | None = "tokens"
        """tokens: boundaries are tokens like any other; gist: of earlier sentences, only the ends are read; null: no
        boundaries."""
        moe: None = None
        """Mixtures of experts are not supported: rows are padded, and padding would count in their balance."""

    @classmethod
    def check(cls, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if recipe.network.sentences == "gist" and recipe.network.window is not None:
            yield "network.window", "with sentences: gist a token reads its own sentence and the ends before it"

    @classmethod
    def tiny(cls) -> dict[str, Config]:
        gpt2 = {"positions": "learned", "norm": "layer", "mlp": "gelu", "bias": True, "init": "scaled"}
        gist: dict[str, Any] = {"sentences": "gist"}
        given: dict[str, dict[str, Any]] = {"tokens": {}, "gist": gist, "learned": {**gist, **gpt2}}
        return {name: cls.Config(width=32, heads=4, depth=2, **own) for name, own in given.items()}

    @classmethod
    def degenerate(cls, config: Config) -> tuple[Config, Any, Callable[[str], str | None]]:
        plain = Decoder.Config(**config.shared_with(Decoder.Config))
        return config.model_copy(update={"sentences": None}), plain, lambda name: name

    @classmethod
    def drawing(cls, config: Config, starts: list[int]) -> list[tuple[str, Span, int]]:
        if config.sentences != "gist":
            return super().drawing(config, starts)
        begins = torch.tensor([starts])
        i = torch.arange(len(starts))
        own, index, ends = gist_spans(begins, torch.maximum(begins, i - i % 3)[None, 0])
        return [("own sentence", own, len(starts)), ("ends of sentences", ends, index.shape[1])]

    def prompt(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """The text's tokens with sentence boundaries, as in training; the last sentence stays open."""
        if self.config.sentences is None:
            return super().prompt(tokenizer, text)
        first, *others = open_sentences(text, tokenizer, self.segmentation)
        end, begin = self.vocabulary, self.vocabulary + 1
        return [begin, *first.tolist(), *(token for part in others for token in (end, begin, *part.tolist()))]

    @property
    def widest(self) -> int:
        return self.context if self.config.sentences is None else widest_row(self.context)

    @property
    def head(self) -> Tensor:
        spare = 0 if self.config.sentences is None else 2
        return self.output_weight[: self.vocabulary + spare]

    def view(self, store: Store, seed: int, rows: int, context: int) -> PackedRows:
        made = PackedRows if self.config.sentences is None else BoundaryRows
        return made(store, seed, rows, context)

    def scoring(
        self, store: Store, context: int, rows: int, documents: Iterable[int] | None = None, whole: bool = True
    ) -> Iterator[ScoringBatch]:
        if self.config.sentences is None:
            return super().scoring(store, context, rows, documents)
        return scoring_boundary_rows(store, context, rows, documents)

    @property
    def ids(self) -> int:
        return len(self.head)

    def reader(self, x: Tensor, batch: Batch) -> Any:
        sentences = getattr(batch, "sentences", None)
        if self.config.sentences != "gist" or sentences is None:  # a document without boundaries is one sentence
            return super().reader(x, batch)
        return GistReader(self, batch.starts, sentences, x)

    def session(self, rows: int) -> DecoderSession:
        return (GistSession if self.config.sentences == "gist" else DecoderSession)(self, rows)

    def cost(self) -> Cost:
        plain = super().cost()
        if self.config.sentences != "gist":
            return plain
        return replace(plain, pairs=gist_pairs, prefill_pairs=plain.pairs)


def gist_pairs(n: int) -> int:
    """Keys read by all of n positions of a document of typical sentences: own ones, and the ends of those before."""
    m = SENTENCE + 2
    full, rest = divmod(n, m)
    own = full * m * (m + 1) // 2 + rest * (rest + 1) // 2
    return own + m * full * (full - 1) // 2 + rest * full


def gist_spans(starts: Tensor, sentences: Tensor, queries: int | None = None) -> tuple[Span, Tensor, Span]:
    """The spans of positions whose documents and sentences start at `starts` and `sentences`, both (B, N).

    Args:
        queries: how many of the last positions are queries; None: all.
    Returns: the span over positions, the gathered positions (B, E), the span over these.
    """
    B, N = sentences.shape
    i = torch.arange(N)
    is_end = torch.zeros(B, N + 1, dtype=torch.bool)  # the position before a start is an end; the last one never is
    is_end[:, : N - 1] = sentences[:, 1:] == i[1:]
    before = is_end.long().cumsum(1) - is_end.long()  # ends before a position
    E = int(is_end.sum(1).max())
    index = torch.zeros(B, E + 1, dtype=torch.long)
    index.scatter_(1, torch.where(is_end, before, E), torch.arange(N + 1).expand(B, -1))
    asking = slice(None if queries is None else N - queries, None)
    own = Span(sentences[:, asking], i[asking] + 1)
    return own, index[:, :E], Span(before.gather(1, starts)[:, asking], before.gather(1, sentences)[:, asking])


def read_gist(q: Tensor, k: Tensor, v: Tensor, index: Tensor, plan: Plan, dropout: float = 0.0) -> Tensor:
    """One softmax over keys (B, G, N, D) and those of them at the positions `index` (B, E) of each row."""
    (own,), (ends,) = plan.spans
    B, G, _, D = k.shape
    at = index[:, None, :, None].to(k.device).expand(B, G, -1, D)
    sources = [Source(k, v, own), Source(k.gather(2, at), v.gather(2, at), ends)]
    return attend(q, sources, plan=plan, dropout=dropout)


class GistReader:
    """Reads the query's own sentence and the ends of earlier ones in its document."""

    def __init__(self, network: BoundaryDecoder, starts: Tensor, sentences: Tensor, x: Tensor):
        self.rotation, self.masks = network.rotation(0, x.shape[1], x), Masks()
        own, self.index, ends = gist_spans(starts, sentences)
        self.plan = plan_attention([own, ends], [x.shape[1], self.index.shape[1]], device=x.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return read_gist(q, k, v, self.index, self.plan, self.masks.rates.attention)


class GistSession(DecoderSession):
    """Keeps all positions, and reads what gist masking allows; every [BOS] begins a sentence."""

    def __init__(self, network: BoundaryDecoder, rows: int):
        super().__init__(network, rows)
        self.sentences = torch.empty(rows, 0, dtype=torch.long)
        """(B, N): where the sentence of each column starts."""

    def fix(self, capacity: int) -> None:
        raise ValueError("the host finds the ends of sentences that a token reads; a session with gist is not fixed")

    def enter(self, tokens: Tensor) -> Tensor:
        tokens = columns_of(tokens, self.rows)
        columns = torch.arange(self.columns, self.columns + tokens.shape[1])
        begun = torch.where(tokens.cpu() == self.network.vocabulary + 1, columns, 0)
        last = self.sentences[:, -1:] if self.columns else self.pads[:, None]
        new = torch.cat((last, begun), dim=1).cummax(1).values[:, 1:]
        self.sentences = torch.cat((self.sentences, torch.where(columns < self.pads[:, None], columns, new)), dim=1)
        return super().enter(tokens)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = self.caches[layer].append(k, v)
        if self.plan is None:
            starts = torch.minimum(self.pads[:, None].expand_as(self.sentences), self.sentences)
            own, self.index, ends = gist_spans(starts, self.sentences, q.shape[2])
            self.plan = plan_attention([own, ends], [k.shape[2], self.index.shape[1]], device=q.device)
        return read_gist(q, k, v, self.index, self.plan)

    def fork(self, rows: Tensor | None = None) -> "GistSession":
        other = super().fork(rows)
        other.sentences = rows_of_state(self.sentences, rows)
        return other

    def join(self, others: Sequence[Self]) -> None:
        super().join(others)
        self.sentences = torch.cat([other.sentences for other in others])
