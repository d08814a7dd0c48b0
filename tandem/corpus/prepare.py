"""Preparing a corpus: texts in, two stores out, once.

    corpora/wiki-3f9c0a61d2b4/train        tokens, offsets, ... (store.py)
                             /validation   whole documents, chosen by a hash of their text or given as files

A mixture (`texts` with shares) is also one pair of stores, which record the source of every document (order.py).
The folder's name holds a hash of everything that decides its contents: the sources with their sizes and modification
times, the tokenizer, the split. So a second call opens what the first one wrote, and a changed file is prepared anew.
The folder is written under another name and renamed when complete, under a lock: a second process waits and opens it.
Interrupted, the same command goes on from the last SAVE characters; what it passes over is read again, but not encoded.
A mistake in the text, which has to be mended there and so makes other contents, leaves nothing.

One thread reads, two encode in turn (the tokenizers library spreads each batch over all cores), and documents keep
their order. Cost: encoding time; memory is a few batches, whatever the size of the corpus.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, field_validator

from tandem.corpus.boundaries import token_starts
from tandem.corpus.reading import BEGIN, SIDES, Batch, Part, Place, batches_of, documents_of, size_of
from tandem.corpus.sentences import Segmentation, in_turn
from tandem.corpus.sources import check_names, find_sources
from tandem.corpus.store import FORMAT, Store, StoreWriter, lost, mistakes_leave_nothing
from tandem.corpus.tokenizer import Tokenizer, content_hash, load_tokenizer
from tandem.disk import replace_file, unmade
from tandem.recipe import Settings, UserError, counted, register

Progress = Callable[[int, int | None], None]
"""Called with bytes done and bytes in all, as the sources count them; the latter is None if a source cannot tell.
Training a tokenizer takes a first pass over the training sources."""

WRITTEN = "written.json"
"""Up to where the texts have been written, while they are, and the state of their sources."""
SAMPLE = 1 << 25
"""Characters that a tokenizer is trained on: more hardly changes its merges."""


@register("corpus")
@dataclass(frozen=True)
class Corpus:
    """Two stores of whole documents under one tokenizer."""

    train: Store
    validation: Store

    @property
    def tokenizer(self) -> Tokenizer:
        return self.train.tokenizer

    @property
    def fingerprints(self) -> list[str]:
        """Those of both stores, then those of their sentences, where these were found."""
        stores = self.train, self.validation
        return [s.fingerprint for s in stores] + [s.sentences.fingerprint for s in stores if s.sentences is not None]

    class Config(Settings):
        """The text of a run: where it comes from and how it becomes tokens."""

        texts: str | list[str] | dict[str, Annotated[float, Field(gt=0)]] = "builtin"
        """"builtin", or paths: .txt, .md, .jsonl, .jsonl.gz, .jsonl.zst, .parquet and (WikiText) .tokens files, folders
        of these, globs; or hf:owner/name/config@revision?split=train. A .txt or .md file is one document, as is a line
        of JSON lines or a row of a table. A mapping from these to their shares of the tokens makes a mixture; shares
        are taken relative to their sum."""
        field: str | Annotated[list[str], Field(min_length=1)] = "text"
        """The key or column that holds the text in JSON lines, parquet files and data sets of the hub; of a list, the
        first that a record or file has."""
        validation: Annotated[float, Field(gt=0, lt=1)] | str | list[str] = 0.02
        """Share of documents held out, by a hash of their text; or paths of validation texts."""
        train_tokens: Annotated[int, Field(ge=1)] | None = None
        """Most tokens of training text: whole documents in one shuffled order, so fewer tokens are part of more; the
        rest is prepared, but not read. null: all."""
        tokenizer: str = "bpe"
        """"bpe" trains one on the texts; "bytes"; or a path: tokenizer.json, or a folder with GPT-2's two files."""
        vocabulary: Annotated[int, Field(ge=257)] | None = None
        """Ids of a trained BPE, document end included; 4096 unless given."""
        folder: str = "corpora"
        """Where prepared corpora are kept; hidden ones, .NAME.partial, are what interrupted preparations go on with."""
        sentences: Segmentation | None = None
        """How documents are cut into sentences, for networks that read sentences; null: by all the defaults."""

        def derive(self) -> dict[str, Any]:
            if self.train_tokens is not None and isinstance(self.texts, dict):
                reason = "only for texts without shares; write a list, or corpus.train_tokens=null"
                raise ValueError(f"train_tokens = {self.train_tokens}: {reason}")
            if self.tokenizer != "bpe" and self.vocabulary is not None:
                reason = "only a bpe trained here has a size to choose; write corpus.vocabulary=null"
                raise ValueError(f"vocabulary = {self.vocabulary}: {reason}")
            return {"vocabulary": 4096} if self.tokenizer == "bpe" else {}

        @field_validator("texts", "validation")
        @classmethod
        def _names_are_readable(cls, names):
            check_names(names)
            return names


def prepare(config: Corpus.Config, progress: Progress = lambda done, total: None) -> Corpus:
    """Opens the corpus that a recipe describes, preparing it first if necessary.

    Raises: UserError if a text or tokenizer cannot be read, a split has no document, or a prepared store is damaged.
    """
    parts, shares = _parts(config)
    tokenizer = None if config.tokenizer == "bpe" else load_tokenizer(config.tokenizer)
    sources = [(part.source.identity, part.held_out) for part in parts]
    decisive: list[Any] = [FORMAT, sources, tokenizer.hash if tokenizer else config.vocabulary]
    decisive += [shares, [part.number for part in parts]] if shares else []
    folder = _folder(config, parts, decisive)
    with unmade(folder, mark=WRITTEN) as partial:
        if partial:
            _check(parts)
            with mistakes_leave_nothing(partial / WRITTEN):
                tokenizer = tokenizer or _trained(partial, parts, shares, config.vocabulary or 0, progress)
                write(partial, parts, shares, tokenizer, progress)
            if not isinstance(config.validation, int | float):
                _count_trained_on(*(Store(partial / side) for side in SIDES))
    train, validation = (Store(folder / side, config.sentences) for side in SIDES)
    train.most = config.train_tokens
    return Corpus(train, validation)


def _count_trained_on(train: Store, validation: Store) -> None:
    """Writes into the manifest of `validation` how many of its documents are in `train`, too."""

    def digests(store: Store, documents: Iterable[int]) -> Iterator[bytes]:
        return (blake2b(store.document(i).tobytes(), digest_size=16).digest() for i in documents)

    held_out = [*digests(validation, range(len(validation)))]
    alike = digests(train, np.flatnonzero(np.isin(train.lengths, validation.lengths)))
    stand_in_train = {*held_out}.intersection(alike)  # one by one: the training text may have many millions
    count = sum(digest in stand_in_train for digest in held_out)
    manifest = validation.manifest.model_copy(update={"trained_on": count})
    (validation.folder / "manifest.json").write_text(manifest.model_dump_json(indent=1), encoding="utf-8")


def prepare_texts(
    config: Corpus.Config,
    key: str,
    texts: str | list[str],
    tokenizer: Tokenizer,
    progress: Progress = lambda done, total: None,
) -> Store:
    """One store of further texts to score, with the tokenizer of a corpus; prepared once and kept, as a corpus is.

    `key` is the recipe's key that names them; `config` gives the field of the texts and the folder of prepared ones.
    Raises: UserError as `prepare` does.
    """
    parts = [Part(source, 1.0, 0) for source in find_sources(key, texts, config.field)]
    folder = _folder(config, parts, [FORMAT, [part.source.identity for part in parts], tokenizer.hash])
    with unmade(folder, mark=WRITTEN) as partial:
        if partial:
            _check(parts)
            with mistakes_leave_nothing(partial / WRITTEN):
                write(partial, parts, {}, tokenizer, progress, ("validation",), key)
    return Store(folder / "validation", config.sentences)


def _folder(config: Corpus.Config, parts: list[Part], decisive: list[Any]) -> Path:
    """The folder of prepared texts: their first source's name, and a hash of everything that decides the contents."""
    name = re.sub(r"\W+", "-", Path(parts[0].source.name).name.split(".")[0])[:40].strip("-") or "corpus"
    return Path(os.path.expanduser(config.folder)) / f"{name}-{content_hash(json.dumps(decisive).encode())[:12]}"


def _check(parts: list[Part]) -> None:
    """Raises what would keep texts from being read, before any of them is."""
    for part in parts:
        part.source.check()


def _trained(
    folder: Path, parts: list[Part], shares: dict[str, float], vocabulary: int, progress: Progress
) -> Tokenizer:
    """A BPE trained on the texts, or by the attempt that is gone on with."""
    if not (folder / WRITTEN).exists():
        return Tokenizer.train(_sample([part for part in parts if part.held_out < 1], shares, progress), vocabulary)
    kept = folder / SIDES[0] / "tokenizer.json"
    try:
        return Tokenizer.from_file(kept)
    except UserError as error:
        raise lost(kept) from error


def write(
    folder: Path,
    parts: list[Part],
    shares: dict[str, float],
    tokenizer: Tokenizer,
    progress: Progress,
    sides: Sequence[str] = SIDES,
    key: str = "corpus",
) -> None:
    """Writes the stores of `sides` into `folder`, or the rest of them; messages call these texts `key`."""
    by_side = {side: [p for p in parts if (p.held_out < 1 if side == "train" else p.held_out > 0)] for side in sides}
    shares_of = {side: shares if all(part.held_out < 1 for part in by_side[side]) else {} for side in sides}
    mark = folder / WRITTEN
    states = [part.source.state for part in parts]
    new = BEGIN, dict.fromkeys(sides), states
    try:
        place, written, before = json.loads(mark.read_text()) if mark.exists() else new
        changed = [part.source.name for part, old, new in zip(parts, before, states, strict=True) if old != new]
    except ValueError as error:  # damaged, or of another version
        raise lost(mark) from error
    if changed:
        cure = "start the same command again, which begins anew"
        raise UserError(f"{changed[0]}: has changed since its preparation was interrupted; {cure}")
    total = size_of(parts)
    with ExitStack() as stack:
        writers = {
            side: stack.enter_context(StoreWriter(folder / side, tokenizer, shares_of[side], written[side]))
            for side in sides
        }

        def save(place: Place) -> None:
            written = {side: writer.save() for side, writer in writers.items()}
            replace_file(mark, json.dumps([place, written, states]).encode())

        begin = Place(*place)
        save(begin)
        batches = batches_of(documents_of(parts, begin, lambda done: progress(done, total)))
        for (documents, done, place), (ids, sizes) in _encoded(tokenizer, batches):
            side, numbers = documents[0].side, [document.number for document in documents]
            given = [
                token_starts(document.sentences, size) if document.sentences else None
                for document, size in zip(documents, sizes, strict=True)
            ]
            writers[side].append(ids, sizes, numbers, given if any(g is not None for g in given) else None)
            if place:
                save(place)
            progress(done, total)
        _close(writers, by_side, key)
    if shares:
        found = np.unique(Store(folder / SIDES[0]).source_of)
        for number, name in enumerate(shares):
            if number not in found:
                raise UserError(f'corpus.texts: "{name}" has no document to train on; take it out of the mixture')


def _close(writers: dict[str, StoreWriter], by_side: dict[str, list[Part]], key: str) -> None:
    for side, writer in writers.items():
        if not writer.documents:
            raise _none_left(side, by_side[side], sum(w.documents for w in writers.values()), key)
        writer.close([part.source.name for part in by_side[side]])


def _none_left(side: str, parts: list[Part], documents: int, key: str) -> UserError:
    """Of a side without documents: its texts hold none, or none of the `documents` of both sides fell to it."""
    if documents and any(0 < part.held_out < 1 for part in parts):
        of = f"{counted(documents, 'documents')} (a text file is one, as is a line of .jsonl; equal ones count as one)"
        share = "another share, " if documents > 1 else ""  # no share divides one
        cure = f"give more of them, {share}or other texts as corpus.validation"
        return UserError(f"{key}: no document is left for {side}, of {of}; {cure}")
    key = {"train": "corpus.texts", "validation": "corpus.validation"}[side] if key == "corpus" else key
    names = ", ".join(part.source.name for part in parts[:3]) + (", ..." if len(parts) > 3 else "")
    return UserError(f"{key}: there is no text in {names}; write some there, or name other texts")


def _parts(config: Corpus.Config) -> tuple[list[Part], dict[str, float]]:
    """The sources of both sides and, for a mixture, the shares by name, which sum to 1."""
    share = config.validation if isinstance(config.validation, int | float) else 0.0
    # Sorted by name: recipes that differ only in the order of a mapping are one recipe, so they need one corpus.
    mixture = dict(sorted(config.texts.items())) if isinstance(config.texts, dict) else {}
    groups = [[name] for name in mixture] or [[] if isinstance(config.texts, dict) else config.texts]
    parts = [
        Part(source, share, number)
        for number, names in enumerate(groups)
        for source in find_sources("corpus.texts", names, config.field)
    ]
    if not isinstance(config.validation, int | float):
        parts += [Part(source, 1.0, 0) for source in find_sources("corpus.validation", config.validation, config.field)]
    first: dict[str, str] = {}
    for part in parts:
        key, identity = "corpus.texts" if part.held_out < 1 else "corpus.validation", part.source.identity
        if identity in first:
            raise UserError(f'"{part.source.name}" stands in {first[identity]} and again in {key}; name it once')
        first[identity] = key
    return parts, {name: share / sum(mixture.values()) for name, share in mixture.items()}


def _sample(parts: list[Part], shares: dict[str, float], progress: Progress) -> Iterator[str]:
    """Training documents of about SAMPLE characters, of a mixture each source by its share, taken evenly from the whole
    of the texts, or from their beginning if their size is unknown."""
    before, total = 0, size_of(parts)
    for number, share in enumerate(shares.values() or [1.0]):
        of_source = [part for part in parts if part.number == number]
        size, taken, done = size_of(of_source), 0, 0
        for side, _, text, _, done, _ in documents_of(of_source):
            due = SAMPLE * share * done / size if size else SAMPLE * share
            if side == "train" and taken < due:
                taken += len(text)
                yield text
            elif size is None and taken >= due:
                break
            progress(before + done, total)
        before += done


def _encoded(tokenizer: Tokenizer, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Any]]:
    """Encodes batches in order, two at a time: while one becomes arrays in Python, the next keeps the cores busy."""
    submit = lambda batch: pool.submit(tokenizer.encode_batch, [document.text for document in batch.documents])
    with ThreadPoolExecutor(2) as pool:
        yield from in_turn(batches, submit, ahead=2)
