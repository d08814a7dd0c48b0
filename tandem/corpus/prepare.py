"""Preparing a corpus: texts in, two stores out, once.

    corpora/wiki-3f9c0a61d2b4/train        tokens, offsets, ... (store.py)
                             /validation   whole documents, chosen by a hash of their text or given as files

The folder's name holds a hash of all that decides its contents: the sources with their sizes and times of change,
the tokenizer, the split. So a second call opens what the first one wrote, and a changed file is prepared anew.
It is written beside its place and renamed when complete, under a lock: whoever comes second waits and opens it.

One thread reads, two encode in turn (the tokenizers library spreads each batch over all cores), documents keep
their order. Cost: encoding time; memory is a few batches, whatever the size of the corpus.
"""

import contextlib
import fcntl
import json
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from tandem.corpus.sources import Source, find_sources
from tandem.corpus.store import FORMAT, Store, StoreWriter
from tandem.corpus.tokenizer import Tokenizer, content_hash, load_tokenizer
from tandem.recipe import Settings, UserError, register

Progress = Callable[[int, int | None], None]
"""Called with bytes done and bytes in all, as the sources count them. Training a tokenizer is a first run through."""
Split = list[tuple[Source, float]]
"""Sources, each with the share of its documents that goes to validation: 1 for texts given as validation."""
SIDES = ("train", "validation")

BATCH = 1 << 21
"""Characters encoded at a time: enough for many cores, little enough for memory."""
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

    class Config(Settings):
        """The text of a run: where it comes from and how it becomes tokens."""

        texts: str | list[str] = "builtin"
        """"builtin", or paths: .txt, .md, .jsonl and .jsonl.gz files, folders of these, globs."""
        field: str = "text"
        """The key that holds the text in JSON lines."""
        validation: Annotated[float, Field(gt=0, lt=1)] | str | list[str] = 0.02
        """Share of documents held out, by a hash of their text; or paths of validation texts."""
        tokenizer: str = "bpe"
        """"bpe" trains one on the texts; "bytes"; or a path: tokenizer.json, or a folder with GPT-2's two files."""
        vocabulary: Annotated[int, Field(ge=257)] | None = None
        """Ids of a trained BPE, document end included; 4096 unless given."""
        folder: str = "corpora"
        """Where prepared corpora lie."""

        def derive(self) -> dict[str, Any]:
            return {"vocabulary": 4096} if self.tokenizer == "bpe" else {}

        @model_validator(mode="after")
        def _vocabulary_is_trained(self):
            if self.tokenizer != "bpe" and self.vocabulary is not None:
                raise ValueError(f"vocabulary = {self.vocabulary}: only a bpe trained here has a size to choose")
            return self


def prepare(config: Corpus.Config, progress: Progress = lambda done, total: None) -> Corpus:
    """Opens the corpus that a recipe describes, preparing it first if that was not done yet.

    Raises: UserError if a text or tokenizer can not be read, a split has no document, or a prepared store is damaged.
    """
    split = _split(config)
    tokenizer = None if config.tokenizer == "bpe" else load_tokenizer(config.tokenizer)
    sources = [(source.identity, share) for source, share in split]
    folder = _folder(config, split, [FORMAT, sources, tokenizer.hash if tokenizer else config.vocabulary])
    with _unprepared(folder) as is_new:
        if is_new:
            tokenizer = tokenizer or Tokenizer.train(_sample(split, progress), config.vocabulary or 0)
            write(folder, split, tokenizer, progress)
    return Corpus(*_opened(folder, SIDES))


def prepare_texts(
    config: Corpus.Config,
    key: str,
    texts: str | list[str],
    tokenizer: Tokenizer,
    progress: Progress = lambda done, total: None,
) -> Store:
    """One store of further texts to score, under the tokenizer of a corpus; prepared once and kept as a corpus is.

    `key` of the recipe names them; `config` says in which field they stand and where prepared ones lie.
    Raises: UserError as `prepare` does.
    """
    split: Split = [(source, 1.0) for source in find_sources(key, texts, config.field)]
    folder = _folder(config, split, [FORMAT, [source.identity for source, _ in split], tokenizer.hash])
    with _unprepared(folder) as is_new:
        if is_new:
            write(folder, split, tokenizer, progress, ("validation",), key)
    return _opened(folder, ("validation",))[0]


def _folder(config: Corpus.Config, split: Split, decisive: list[Any]) -> Path:
    """Where texts lie once prepared: their first source's name, and a hash of all that decides the contents."""
    name = re.sub(r"\W+", "-", Path(split[0][0].name).name.split(".")[0]).strip("-") or "corpus"
    return Path(config.folder) / f"{name}-{content_hash(json.dumps(decisive).encode())[:12]}"


@contextlib.contextmanager
def _unprepared(folder: Path) -> Iterator[bool]:
    """Whether `folder` has still to be written, under the lock if so."""
    if folder.exists():
        yield False
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f"{folder.name}.lock")):
        yield not folder.exists()


def _opened(folder: Path, sides: Sequence[str]) -> list[Store]:
    try:
        return [Store(folder / side) for side in sides]
    except UserError as error:
        raise UserError(f"{error}; delete {folder} and prepare the corpus again") from error


def write(
    folder: Path,
    split: Split,
    tokenizer: Tokenizer,
    progress: Progress,
    sides: Sequence[str] = SIDES,
    key: str = "corpus",
) -> None:
    """Writes the stores of `sides` beside `folder`, then gives them its name. The caller holds the lock.

    `key`: what a message calls these texts.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by one that was killed: under the lock nobody is at it
    try:
        writers = {side: StoreWriter(partial / side, tokenizer) for side in sides}
        total = _size(split)
        for side, encoded, done in _encoded(tokenizer, _batches(_documents(split))):
            writers[side].append(*encoded)
            progress(done, total)
        for side, writer in writers.items():
            if not writer.documents:
                raise UserError(
                    f"{key}: no document is left for {side}, of {sum(w.documents for w in writers.values())}; "
                    "give more documents, another share, or other texts as corpus.validation"
                )
            writer.close([source.name for source, share in split if (share < 1 if side == "train" else share > 0)])
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _split(config: Corpus.Config) -> Split:
    texts = find_sources("corpus.texts", config.texts, config.field)
    if isinstance(config.validation, int | float):
        return [(source, config.validation) for source in texts]
    held_out = find_sources("corpus.validation", config.validation, config.field)
    return [(source, 0.0) for source in texts] + [(source, 1.0) for source in held_out]


def _size(split: Split) -> int:
    return sum(source.size for source, _ in split)


def _documents(split: Split) -> Iterator[tuple[str, str, int]]:
    """Yields (side, document, bytes read so far). The side depends on the text: copies never stand on both."""
    before = 0
    for source, share in split:
        for text, done in source.read():
            drawn = int.from_bytes(blake2b(text.encode(), digest_size=8).digest())
            yield SIDES[drawn < share * 2**64], text, before + done
        before += source.size


def _sample(split: Split, progress: Progress) -> Iterator[str]:
    """Training documents to SAMPLE characters, taken evenly from the whole of the texts."""
    taken, total = 0, _size(split)
    for side, text, done in _documents(split):
        if side == "train" and taken < SAMPLE * done / total:
            taken += len(text)
            yield text
        progress(done, total)


def _batches(documents: Iterable[tuple[str, str, int]]) -> Iterator[tuple[str, list[str], int]]:
    """Gathers the documents of each side, in order, to BATCH characters."""
    held: dict[str, list[str]] = {side: [] for side in SIDES}
    size, done = {side: 0 for side in SIDES}, 0
    for side, text, done in documents:
        held[side].append(text)
        size[side] += len(text)
        if size[side] >= BATCH:
            yield side, held[side], done
            held[side], size[side] = [], 0
    yield from ((side, texts, done) for side, texts in held.items() if texts)


def _encoded(tokenizer: Tokenizer, batches: Iterable[tuple[str, list[str], int]]):
    """Encodes batches in order, two at a time: while one becomes arrays in Python, the next keeps the cores busy."""
    pending = deque()
    with ThreadPoolExecutor(2) as pool:
        for side, texts, done in batches:
            pending.append((side, pool.submit(tokenizer.encode_batch, texts), done))
            if len(pending) > 2:
                side, encoded, done = pending.popleft()
                yield side, encoded.result(), done
        for side, encoded, done in pending:
            yield side, encoded.result(), done


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a file lock. The system releases it when its holder ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
