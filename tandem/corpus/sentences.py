"""Sentences: a view of documents as token offsets. The tokens are those of the store; none is added, moved or lost.

    text      Mr. Smith left. He said "No."   $        a splitter cuts characters (splitters.py), the store holds tokens
    tokens    Mr . Smith left . | He said "No ." $     $ ends the document, and belongs to its last sentence
    starts    0                   5

A sentence starts at the token with its first visible character. White space stays with the previous sentence, and so
does a token that holds text of two sentences. A sentence that is left without a token vanishes.

A sentence of more than `cap` tokens is cut in its middle half, after the strongest mark there (line break; end of a
sentence; `;` `:`; comma, bracket, dash; word; anywhere), among equals the one nearest to its middle. Parts that are
still too long are cut again, so no piece is shorter than a quarter of the cap. Then a sentence of fewer than three
tokens is joined to the previous one, or else to the next, if the sum fits the cap.

    segment(store, config)        made at first use, then opened: sentences/rules-1f0c.../ beside the tokens;
                                  interrupted, it goes on from the last SAVE tokens

Any number of segmentations can be kept beside one token store.
Cost: 0.3 MB of text per second and core with `rules`, spread over the cores that the process may use; memory is a few
batches of documents.
Source: Thought Gestalt caps at 64 tokens "with punctuation-aware fallback rules"; these rules are ours.
Letters: D documents, N tokens of a document, S sentences.
"""

import functools
import itertools
import json
import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, Field, ValidationError

from tandem.corpus.boundaries import SHORTEST, aligned, cap_lengths, mark, merge_lengths
from tandem.corpus.splitters import SAT_FOLDER, splitter, version_of
from tandem.corpus.store import Store, going_on, mistakes_leave_nothing
from tandem.corpus.tokenizer import Tokenizer, content_hash
from tandem.disk import replace_file, unmade
from tandem.machine import cores, end_with_parent
from tandem.recipe import Settings, UserError

FORMAT = 2
BATCH = 1 << 16
"""Tokens that one process splits at a time."""
SAVE = 1 << 20
"""Tokens after which an interrupted search can go on: a slow disk would hold up many cores by saving every batch."""

FOUND = "found.json"
"""What was found so far, while a segmentation is made."""

Progress = Callable[[int, int], object]
"""Called with tokens done and tokens in all."""


class Segmentation(Settings):
    """How documents are cut into sentences."""

    splitter: Literal["rules", "sat", "every", "given"] = "rules"
    """rules: pysbd; sat: Segment any Text; every: spans of `every` tokens; given: texts came as lists of sentences."""
    every: Annotated[int, Field(ge=1)] | None = None
    """Tokens of a span, for splitter every; the last span of a document may be shorter."""
    weights: Annotated[str, AfterValidator(os.path.expanduser)] | None = None
    """Folder with the model of Segment any Text, such as sat-3l-sm, in ONNX, and its tokenizer, for splitter sat."""
    threshold: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Probability above which splitter sat ends a sentence; 0.15 unless given."""
    cap: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of a sentence, document end included; 64 unless given. Spans of splitter every have none."""

    def derive(self) -> dict[str, Any]:
        owners = {"every": ("every",), "weights": ("sat",), "threshold": ("sat",), "cap": ("rules", "sat", "given")}
        for option, splitters in owners.items():
            if (value := getattr(self, option)) is not None and self.splitter not in splitters:
                raise ValueError(
                    f"{option} = {value}: only for splitter {', '.join(splitters)}; this is {self.splitter}"
                )
        if self.splitter == "every" and self.every is None:
            raise ValueError("splitter every needs every, the tokens of a span; write every: 25")
        if self.splitter == "sat" and not (self.weights and Path(self.weights).is_dir()):
            raise ValueError(
                f"splitter sat: weights = {self.weights} is no folder; give {SAT_FOLDER}, or take splitter rules"
            )
        return {"threshold": 0.15 if self.splitter == "sat" else None, "cap": None if self.splitter == "every" else 64}

    @property
    def longest(self) -> int:
        """Most tokens of a sentence, document end included: it joins the last span."""
        return self.cap or (self.every or 0) + 1

    @property
    def of_plain_text(self) -> "Segmentation":
        """The same for a text that comes without sentences, where splitter given becomes rules."""
        return self.model_copy(update={"splitter": "rules"}) if self.splitter == "given" else self


class Manifest(Settings):
    format: int
    segmentation: dict[str, Any]
    version: str
    """Of the package that split the text."""
    tokenizer: str
    """Hash of the store's tokenizer."""
    sentences: int
    counts: dict[str, int]
    """Boundaries found, sentences cut and merged, tokens with text of two sentences, lines cut by the pattern."""


class Sentences:
    """One segmentation of a store.

    Attributes:
        starts: (S,) int64, where each sentence starts in the tokens of the store; it ends where the next one starts.
        firsts: (D + 1,) int64, the first sentence of each document: those of i are firsts[i] .. firsts[i + 1] - 1.
        cap: most tokens of a sentence.

    Raises: UserError if a file is missing, or does not fit the manifest.
    """

    def __init__(self, store: Store, folder: Path):
        path = folder / "starts.bin"
        try:
            self.manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
            size = path.stat().st_size
        except FileNotFoundError as error:
            raise UserError(f"{error.filename} is missing; delete {folder}") from error
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise UserError(f"{folder / 'manifest.json'} does not read as one: {reason}; delete {folder}") from error
        if size != 8 * self.manifest.sentences:
            raise UserError(
                f"{path} does not hold the {self.manifest.sentences} sentences of its manifest; delete {folder}"
            )
        self.cap = Segmentation.model_construct(**self.manifest.segmentation).longest
        self.starts = np.memmap(path, np.int64, mode="r")
        self.firsts = np.searchsorted(self.starts, store.offsets)
        self._store = store

    @functools.cached_property
    def fingerprint(self) -> str:
        """The same for equal sentences, whatever found them."""
        return content_hash(self.starts.data)

    def document(self, i: int) -> np.ndarray:
        """Where the sentences of document i start, counted from its first token, (S,) int64."""
        return self.starts[self.firsts[i] : self.firsts[i + 1]] - self._store.offsets[i]


def segment(store: Store, config: Segmentation, progress: Progress = lambda done, total: None) -> Sentences:
    """Opens a segmentation of a store, making it first if necessary.

    Raises: UserError if the splitter is not installed, or cannot be used with this store.
    """
    version, options = version_of(config.splitter), config.model_dump()
    if config.weights:  # as for sources: hashing hundreds of megabytes would delay the opening of a segmentation
        files = sorted(path for path in Path(config.weights).iterdir() if path.is_file())
        options["weights"] = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    key = json.dumps([FORMAT, options, version, store.manifest.tokenizer]).encode()
    folder = store.folder / "sentences" / f"{config.splitter}-{content_hash(key)[:12]}"
    with unmade(folder, mark=FOUND) as partial:
        if partial:
            _write(partial, store, config, version, progress)
    return Sentences(store, folder)


def sentences_of(store: Store, progress: Progress = lambda done, total: None) -> Sentences:
    """The segmentation of a store as its corpus configures it (see `segment`); opened once."""
    if store.sentences is None:
        store.sentences = segment(store, store.segmentation or Segmentation(), progress)
    return store.sentences


def open_sentences(text: str, tokenizer: Tokenizer, config: Segmentation | None) -> list[np.ndarray]:
    """The tokens of each sentence of an unfinished text, int64, cut as in a store; `config` None: by the defaults.

    The last sentence stays open: it is never merged for being short. Splitter given becomes rules here.
    """
    config = (config or Segmentation()).of_plain_text
    (ids,), (sizes,) = tokenizer.encode_batch([text])
    lengths, _ = _lengths(config, [_Document(text, np.array(sizes), np.empty(0, np.int64))], ends=False)
    return np.split(ids.astype(np.int64), np.cumsum(lengths)[:-1])


def _write(folder: Path, store: Store, config: Segmentation, version: str, progress: Progress) -> None:
    """Makes a segmentation in a folder, from where an interrupted attempt left it."""
    if config.splitter != "every" and not store.tokenizer.is_lossless:
        raise UserError("corpus.sentences: this tokenizer changes the text, so sentences cannot be found again in its "
                        "tokens; take a byte-level one, with its decoder, or splitter every")  # fmt: skip
    if config.splitter == "given" and not len(store.given):
        raise UserError("corpus.sentences.splitter = given: the texts have none; corpus.field must name lists of texts")
    folder.mkdir(exist_ok=True)
    found = folder / FOUND
    documents, sentences, counts = json.loads(found.read_text()) if found.exists() else (0, 0, {})
    saved = store.offsets[documents]
    with mistakes_leave_nothing(found), going_on(folder / "starts.bin", 8 * sentences) as file:
        for first, last, lengths, counted in _segmented(store, config, documents):
            begin, end = store.offsets[[first, last]]
            assert lengths.sum() == end - begin, "sentences tile the documents"
            file.write((begin + np.cumsum(lengths) - lengths).tobytes())
            sentences, counts = sentences + len(lengths), dict(counted + Counter(counts))
            if end - saved >= SAVE or last == len(store):
                file.flush()
                os.fsync(file.fileno())
                replace_file(found, json.dumps([last, sentences, counts]).encode())
                saved = end
            progress(int(end), len(store.tokens))
    manifest = Manifest(
        format=FORMAT,
        segmentation=config.model_dump(),
        version=version,
        tokenizer=store.manifest.tokenizer,
        sentences=sentences,
        counts=counts,
    )
    (folder / "manifest.json").write_text(manifest.model_dump_json(indent=1), encoding="utf-8")


class _Document(NamedTuple):
    text: str
    sizes: np.ndarray
    """(N - 1,) bytes of text that each token covers, without the document end."""
    given: np.ndarray
    """(S,) the tokens at which its sentences start, if the texts came as sentences."""


def _segmented(store: Store, config: Segmentation, start: int) -> Iterator[tuple[int, int, np.ndarray, Counter[str]]]:
    """Yields, for runs of documents from `start` on, (first, last + 1, tokens of each of their sentences, counts)."""
    bounds = np.searchsorted(store.offsets, np.arange(store.offsets[start], len(store.tokens), BATCH))
    runs = list(itertools.pairwise(np.unique([*bounds, len(store)]).tolist()))
    if config.splitter != "rules" or len(runs) <= 1 or cores() == 1:
        for first, last in runs:
            yield first, last, *_lengths(config, _documents(store, config, first, last))
        return
    # Forked, because a spawned process would run a script without a main guard again. They start no threads.
    submit = lambda run: pool.submit(_found, config, *run)
    # They end with this process, however it ends, for they hold its locks as well.
    begin = store, signal.SIGKILL, os.getpid()
    with ProcessPoolExecutor(cores(), multiprocessing.get_context("fork"), _begun, begin) as pool:
        for run, found in in_turn(runs, submit, ahead=2 * cores()):
            yield *run, *found


def in_turn(jobs: Iterable[Any], submit: Callable[[Any], Future], ahead: int) -> Iterator[tuple[Any, Any]]:
    """Yields (job, its result) in order, while up to `ahead` further jobs are under way."""
    pending: deque[tuple[Any, Future]] = deque()
    for job in jobs:
        pending.append((job, submit(job)))
        if len(pending) > ahead:
            job, future = pending.popleft()
            yield job, future.result()
    yield from ((job, future.result()) for job, future in pending)


_inherited: list[Store] = []
"""The store, in a process that splits its documents."""


def _begun(store: Store, number: int, parent: int) -> None:
    _inherited.append(store)
    end_with_parent(number, parent)


def _found(config: Segmentation, first: int, last: int) -> tuple[np.ndarray, Counter[str]]:
    """`_lengths` of some documents. To turn tokens into text takes a twenty-fifth of the time of splitting it, so one
    process that did it for all others would keep no more than 25 cores busy."""
    return _lengths(config, _documents(_inherited[0], config, first, last))


def _documents(store: Store, config: Segmentation, first: int, last: int) -> list[_Document]:
    found = []
    for i in range(first, last):
        tokens = slice(store.offsets[i], store.offsets[i + 1] - 1)  # without the document end
        text = "" if config.splitter == "every" else store.tokenizer.decode(store.tokens[tokens])
        given = slice(*np.searchsorted(store.given, store.offsets[i : i + 2]))
        sizes = np.array(store.token_bytes[tokens])
        assert not text or sizes.sum() == len(text.encode()), "a byte-level tokenizer gives the text back"
        found.append(_Document(text, sizes, store.given[given] - store.offsets[i]))
    return found


def _lengths(config: Segmentation, documents: list[_Document], ends: bool = True) -> tuple[np.ndarray, Counter[str]]:
    """The tokens of each sentence of some documents, and counts; without `ends`, the last sentences stay open."""
    lengths, counts = [], Counter()
    for document, (starts, counted) in zip(documents, _starts(config, documents), strict=True):
        found = np.diff(starts, append=len(document.sizes) + 1).tolist()
        if config.cap:
            capped = cap_lengths(
                found, config.cap, functools.partial(mark, document.text.encode(), np.cumsum(document.sizes))
            )
            if not ends:
                capped[-1] = max(capped[-1], min(SHORTEST, config.cap))
            merged = merge_lengths(capped, config.cap)
            counted |= {"cut": sum(n > config.cap for n in found), "merged": len(capped) - len(merged)}
            found = merged
        counts.update(counted)
        lengths += found
    return np.array(lengths), counts


def _starts(config: Segmentation, documents: list[_Document]) -> Iterator[tuple[np.ndarray, dict[str, int]]]:
    """For each document, the tokens at which its sentences start, and counts."""
    if config.splitter == "every":
        for document in documents:
            yield np.arange(0, max(1, len(document.sizes)), config.every), {}
    elif config.splitter == "given":
        for document in documents:
            yield document.given, {}
    else:
        split = splitter(config.splitter, config.weights, config.threshold)
        for document, (pieces, changed) in zip(documents, split([d.text for d in documents]), strict=True):
            starts, shared = aligned(pieces, document.sizes)
            yield starts, {"boundaries": len(starts) - 1, "tokens of two": shared, "lines by pattern": changed}
