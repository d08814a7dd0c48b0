"""Sentence streams: runs of sentences of one document, read one sentence after the other with memory carried along.

    document of 7 sentences, S = 3      0 1 2 | 3 4 | 5 6          ceil(7 / 3) streams, nearly equal, longer first
    corpus of D tokens, E steps an epoch
    documents    d2 ........ d0 ............. d1 ...               the house order of (seed, epoch)
    step         |    0    |    1    |    2    |                   a stream is of the step floor(c E / D), where c
                                                                   tokens of the epoch lie before it

The tokens are those of the packed view, and in the first epoch a step reads the same text as a packed step, up to one
stream and half a step: E is rounded, and every epoch adds as much, so compare by tokens, not by steps. Since E does not
depend on S, everything that changes during training (S, the weight of sentence ends, dropout) is a closed form of
the step. A document uses the S of the step in which it begins: it is cut once, so no sentence is lost where S grows.

A step's streams are sorted by their number of sentences, longest first, and dealt in turn to micro-batches and
processes: those that are still alive at a sentence step come first.
Source: Thought Gestalt (arXiv 2512.25026) has the curriculum and the weights; batches are ours.
Letters: D tokens of the corpus, E steps of an epoch, S sentences of a stream, N tokens of a batch, V vocabulary.
"""

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from tandem.corpus.order import Order
from tandem.corpus.sentences import sentences_of
from tandem.corpus.store import Store
from tandem.corpus.views import ScoringBatch, Window, moved, windows
from tandem.recipe import Settings, UserError

Moment = Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, le=1)]
Counted = Moment | Annotated[str, Field(pattern=r"^\d+ steps$")]


class Streams(Settings):
    """How a run reads sentence streams; the defaults are the paper's."""

    sentences: int = Field(30, ge=1)
    """S, the most sentences in a stream, when training begins."""
    grow: int = Field(12, ge=0)
    """Sentences by which S grows."""
    every: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, le=1)] = 5
    """How often S grows: after so many epochs (a whole number), or after this share of the run."""
    end_weight: float = Field(0.05, ge=0)
    """Weight of a sentence end in the loss from `end_weight_from` on; before that it is 1."""
    end_weight_from: Moment = 1
    """When `end_weight` applies: after so many epochs, or after this share of the run."""
    half_dropout_from: Counted = 2000
    """When dropout of tokens and thoughts rises from 0 to half its rate: sentence steps (each step counts as S), a
    share of the run, or optimisation steps ("2000 steps")."""
    full_dropout_from: Counted = 7000
    """When dropout of tokens and thoughts reaches its full rate; in the same units."""


@dataclass(frozen=True)
class StreamBatch:
    """Streams of sentences with their targets.

    Attributes:
        tokens: (N,) int64 on any device, stream after stream, sentence after sentence; document ends are among them,
            boundary tokens are not.
        targets: (1, N + sentences) int64: the tokens of each sentence, then its end, V.
        lengths: for each stream, the tokens of each sentence; streams with more sentences come first.
        documents: the document of each stream, a number in the store.
        offsets: the token of its document at which each stream starts.
        rows_at, tokens_at: for each sentence step t, the number of streams with a sentence t, and its tokens, for the
            whole step. This batch may be a part of it, with fewer sentence steps, or without any stream.
        end_weight: weight of a sentence end in the loss.
        dropout: multiplier of the rates of token and thought dropout.
        key: random key of this step; None: nothing is drawn at random.
        document_end: the id that closes a document, the only token that is never dropped.
    """

    tokens: Tensor
    targets: Tensor
    lengths: list[list[int]]
    documents: list[int]
    offsets: list[int]
    rows_at: list[int]
    tokens_at: list[int]
    end_weight: float = 1.0
    dropout: float = 1.0
    key: int | None = None
    document_end: int | None = None

    def keyed(self, key: int, part: int) -> "StreamBatch":
        """As `Batch.keyed`; what is drawn depends on the first stream here, not on `part`."""
        return replace(self, key=key)

    def to(self, device: torch.device | str) -> "StreamBatch":
        """Moves tokens and targets; everything else is integers on the host."""
        return replace(self, tokens=moved(self.tokens, device), targets=moved(self.targets, device))


class Stream(NamedTuple):
    document: int
    offset: int
    """Token of the document at which it starts."""
    lengths: list[int]
    """Tokens of its sentences."""


class SentenceStreams:
    """The streams of a store, step by step, for a run of `steps` steps.

    Args: rows, context: their product is the tokens of a step.
    """

    def __init__(self, store: Store, seed: int, rows: int, context: int, settings: Streams):
        self.store, self.sentences, self.order = store, sentences_of(store), Order(store, seed)
        self.rows, self.settings, self.steps = rows, settings, 0
        assert len(self.order.sources) == 1, "a mixture has no epochs"  # networks refuse it as the recipe is read
        self.tokens = int(self.order.epoch(0).ends[-1])
        """D."""
        self.per_epoch = max(1, (2 * self.tokens + rows * context) // (2 * rows * context))
        """E = floor(D / tokens of a step + 1/2)."""
        self.context = max(1, round(self.tokens / (self.per_epoch * rows)))
        """Mean tokens of a row, which is what it costs: E steps share the text evenly."""
        self._latest: tuple[int, list[Stream]] | None = None

    def of_run(self, steps: int) -> "SentenceStreams":
        """The same streams for a run of this many steps, to which settings given as a share of the run refer."""
        other = copy.copy(self)
        other.steps, other._latest = steps, None
        return other

    @property
    def words(self) -> str:
        last = self.most_sentences(max(0, self.steps - 1))
        return f"streams of {self.settings.sentences} sentences" + (
            f", {last} at the end" if self.settings.grow else ""
        )

    def require(self) -> None:
        """Raises: UserError if a step of the run could be left without a stream."""
        S, cap = self.most_sentences(max(0, self.steps - 1)), self.sentences.cap
        if S * cap * self.per_epoch > self.tokens:
            grows = self.settings.grow and isinstance(self.settings.every, int)  # with epochs
            shorter = "a smaller budget, " if grows else ""
            raise UserError(
                f"network.streams: streams of {S} sentences of up to {cap} tokens do not fit the "
                f"{self.tokens // self.per_epoch} tokens of a step (batch.rows x batch.context), so a step might be "
                f"left without any; take a larger batch, fewer sentences, {shorter}or a smaller corpus.sentences.cap"
            )

    # ---- what changes on the way ---------------------------------------------------------------------------------

    def most_sentences(self, step: int) -> int:
        """S."""
        return self.settings.sentences + self.settings.grow * (step // self._stage)

    def end_weight(self, step: int) -> float:
        return 1.0 if step < self._in_steps(self.settings.end_weight_from) else self.settings.end_weight

    def dropout(self, step: int) -> float:
        """Multiplier of the rates."""
        return (
            self._passed(step, self.settings.half_dropout_from) + self._passed(step, self.settings.full_dropout_from)
        ) / 2

    def sentence_steps(self, step: int) -> int:
        """Those of all steps before this one, each of which counts as its S."""
        grown, rest = divmod(step, self._stage)
        c = self.settings
        return step * c.sentences + c.grow * (self._stage * grown * (grown - 1) // 2 + rest * grown)

    def _passed(self, step: int, moment: int | float | str) -> bool:
        if isinstance(moment, str):
            return step >= int(moment.removesuffix(" steps"))
        if isinstance(moment, float):
            return step >= self._in_steps(moment)
        return self.sentence_steps(step) >= moment

    @property
    def _stage(self) -> int:
        """Steps after which S grows; a share of a run of unknown length is never over.

        A share is rounded up, because otherwise the last steps of a run would be a stage of their own.
        """
        every = self.settings.every
        if isinstance(every, int):
            return every * self.per_epoch
        return max(1, math.ceil(round(every * self.steps, 6))) if self.steps else 1 << 62

    def _in_steps(self, moment: int | float) -> int:
        """A whole number counts epochs, a float is a share of the run, rounded."""
        return moment * self.per_epoch if isinstance(moment, int) else round(moment * self.steps)

    # ---- what is read --------------------------------------------------------------------------------------------

    def read(self, step: int) -> int:
        """Tokens of text before the streams of `step`."""
        epoch = step // self.per_epoch
        begin = next((begin for begin, _ in self._streams(step, self.tokens)), self.tokens)
        return epoch * self.tokens + begin

    def batch(self, step: int, part: int = 0, parts: int = 1) -> StreamBatch:
        """The streams of a step, or those dealt to one of `parts`; together they are the same for any `parts`."""
        streams = self._streams_of(step)
        read = [(stream.document, stream.offset, sum(stream.lengths)) for stream in streams[part::parts]]
        self.store.fetch(*np.array(read, np.int64).reshape(-1, 3).T)
        made = stream_batch(self.store, streams[part::parts])
        rows_at, tokens_at = stream_totals(streams)
        return replace(
            made, rows_at=rows_at, tokens_at=tokens_at, end_weight=self.end_weight(step), dropout=self.dropout(step)
        )

    def _streams_of(self, step: int) -> list[Stream]:
        """Those of a step, most sentences first; kept for the next call, as all micro-batches are dealt from them."""
        if self._latest is None or self._latest[0] != step:
            end = -(-(step % self.per_epoch + 1) * self.tokens // self.per_epoch)
            self._latest = step, sorted((s for _, s in self._streams(step, end)), key=lambda s: -len(s.lengths))
        return self._latest[1]

    def _streams(self, step: int, end: int) -> Iterator[tuple[int, Stream]]:
        """Yields (tokens of the epoch before it, stream), in order, from where `step` begins to token `end`."""
        epoch, k = divmod(step, self.per_epoch)
        documents, ends = self.order.epoch(epoch)
        low = -(-k * self.tokens // self.per_epoch)
        for place in range(int(np.searchsorted(ends, low, side="right")), len(documents)):
            document = int(documents[place])
            begin = int(ends[place] - self.store.lengths[document])
            if begin >= end:
                return
            S = self.most_sentences(epoch * self.per_epoch + begin * self.per_epoch // self.tokens)
            lengths = np.diff(self.sentences.document(document), append=self.store.lengths[document])
            for stream in streams_of(lengths, document, S):
                if low <= begin + stream.offset < end:
                    yield begin + stream.offset, stream


def streams_of(lengths: np.ndarray, document: int, most: int) -> Iterator[Stream]:
    """Cuts a document, given the tokens of its sentences, into nearly equal streams of at most `most` sentences."""
    begins = np.cumsum(lengths) - lengths
    for part in np.array_split(np.arange(len(lengths)), -(-len(lengths) // most)):
        yield Stream(document, int(begins[part[0]]), lengths[part].tolist())


def stream_batch(store: Store, streams: list[Stream]) -> StreamBatch:
    """A batch of these streams alone."""
    tokens, targets, end = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [store.vocabulary]
    for document, offset, lengths in streams:
        text = store.document(document)[offset : offset + sum(lengths)].astype(np.int64)
        tokens.append(text)
        targets += [np.append(sentence, end) for sentence in np.split(text, np.cumsum(lengths)[:-1])]
    return StreamBatch(
        torch.from_numpy(np.concatenate(tokens)),
        torch.from_numpy(np.concatenate(targets))[None],
        [stream.lengths for stream in streams],
        [stream.document for stream in streams],
        [stream.offset for stream in streams],
        *stream_totals(streams),
        document_end=store.eos,
    )


def stream_totals(streams: list[Stream]) -> tuple[list[int], list[int]]:
    """`rows_at` and `tokens_at` of a StreamBatch."""
    steps = range(max((len(stream.lengths) for stream in streams), default=0))
    alive = [[stream.lengths[t] for stream in streams if len(stream.lengths) > t] for t in steps]
    return [len(lengths) for lengths in alive], [sum(lengths) for lengths in alive]


def scoring_streams(
    store: Store, context: int, rows: int, documents: Iterable[int] | None = None, whole: bool = True
) -> Iterator[ScoringBatch]:
    """Batches that ask every token of the documents once, and every sentence end but the last of each: whole documents,
    each one stream; else windows of `context` tokens that overlap by half, each a stream with nothing before it.

    A batch has at most `rows` x `context` tokens, or one longer document.
    """
    chosen = range(len(store)) if documents is None else documents
    asked = ((i, 0, int(store.lengths[i]) - 1, 0) for i in chosen) if whole else windows(store, context, chosen)
    held, size = [], 0
    for window in asked:
        length = window[2] + 1 - window[1]
        if held and size + length > rows * context:
            yield _asking(store, held)
            held, size = [], 0
        held.append(window)
        size += length
    if held:
        yield _asking(store, held)


def _asking(store: Store, held: list[Window]) -> ScoringBatch:
    """Streams from the first token of each window to its last target; sentences are cut at the window's edges."""
    found = []
    for i, first, last, asked in held:
        starts = sentences_of(store).document(i)
        lengths = np.diff(starts[(starts > first) & (starts <= last)], prepend=first, append=last + 1)
        place = np.arange(first, last + 1)
        fresh = (place > asked) | (place == 0)
        ends = np.cumsum(lengths)
        certain = last + 1 not in starts  # the last sentence end of the document, or a sentence that goes on
        closes = fresh[ends - 1] & (np.arange(len(ends)) < len(ends) - certain)
        document = np.insert(np.where(fresh, i, -1), ends, np.where(closes, i, -1))
        found.append((Stream(int(i), int(first), lengths.tolist()), document, np.insert(place, ends, -1)))
    found.sort(key=lambda each: -len(each[0].lengths))
    streams, *columns = zip(*found, strict=True)
    return ScoringBatch(
        stream_batch(store, list(streams)), *(torch.from_numpy(np.concatenate(column))[None] for column in columns)
    )
