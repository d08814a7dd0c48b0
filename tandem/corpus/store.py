"""The store: a tokenised corpus as flat files, mapped into memory, never loaded.

    tokens.bin       d0 d0 d0 eos d1 d1 eos ...     uint16, or uint32 where the vocabulary needs it
    token_bytes.bin   4  1  2   0  7  3   0 ...     uint16: bytes of text behind each token, 0 for the document end
    offsets.bin       0            4        7 ...   int64: document i is tokens[offsets[i]:offsets[i + 1]]
    source_of.bin     0            1        ...     uint16, of a mixture: the source of each document
    given.bin         0     2      4        ...     int64, of texts given as sentences: where each sentence starts
    tokenizer.json   manifest.json                  what made it, and hashes of everything above

Anything else known about the text is a further file of token offsets beside these (sentences.py): tokens are
written only once. Opening checks every size, which catches a truncated copy; `tandem prepare RECIPE --verify`
reads every byte.
"""

import contextlib
import functools
import hashlib
import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Self, cast

import numpy as np
import pydantic

from tandem.corpus.files import BrokenOff
from tandem.corpus.tokenizer import Tokenizer, content_hash
from tandem.disk import flush
from tandem.recipe import Settings, UserError

FORMAT = 2
ARRAYS = ("tokens", "token_bytes", "offsets")
OPTIONAL = ("source_of", "given")
CHUNK = 1 << 24


class Manifest(Settings):
    format: int
    documents: int
    tokens: int
    bytes: int
    """Bytes of text, in UTF-8."""
    dtype: str = pydantic.Field(pattern="^uint(16|32)$")
    vocabulary: int
    eos: int
    sources: list[str]
    shares: dict[str, float] = {}
    """For a mixture: its sources as the recipe names them, with their shares of the tokens, which sum to 1."""
    given: int = 0
    """Number of sentences, if the texts came as lists of sentences."""
    trained_on: int = 0
    """Of held-out documents from texts of their own, those that stand in the training text too."""
    tokenizer: str
    """Hash of tokenizer.json."""
    fingerprint: str
    """Hash of all contents."""


class Store:
    """A prepared corpus of documents, read only.

    Attributes:
        tokens: all documents one after the other, each closed by `eos`.
        offsets: (documents + 1,) int64, where each document starts in `tokens`.
        token_bytes: bytes of text that each token covers, uint16.
        source_of: for a mixture, the source of each document, an index into `shares`; else empty.
        shares: for a mixture, the share of the tokens that is due to each source; else empty.
        given: where sentences start in `tokens`, if the texts came as lists of sentences; else empty.
        vocabulary: number of ids that a document can contain, `eos` included.
        fingerprint: the same for equal contents wherever they were prepared.
        segmentation: how its documents are cut into sentences, if they are (sentences.py); None: by the defaults.

    Raises: UserError if the folder is not a store, has another format, or a file does not fit the manifest.
    """

    def __init__(self, folder: str | Path, segmentation: Any = None):
        self.folder = folder = Path(folder)
        self.segmentation = segmentation
        self.sentences: Any = None
        """Opened at first use, by `sentences_of`."""
        self.most: int | None = None
        """Most tokens of it that a run reads, in whole documents (order.py); None: all."""
        try:
            self.manifest = manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
            tokenizer = content_hash((folder / "tokenizer.json").read_bytes())
        except FileNotFoundError as error:
            raise self._unusable(f"{Path(error.filename).name} is missing") from error
        except pydantic.ValidationError as error:
            raise self._unusable(f"manifest.json does not read as one: {error.errors()[0]['msg']}") from error
        if manifest.format != FORMAT:
            raise self._unusable(f"its format is {manifest.format}, this Tandem reads {FORMAT}")
        if tokenizer != manifest.tokenizer:
            raise self._unusable("tokenizer.json is not the one it was prepared with")
        self.tokens = self._mapped("tokens", manifest.dtype, manifest.tokens)
        self.token_bytes = self._mapped("token_bytes", "uint16", manifest.tokens)
        self.offsets = self._mapped("offsets", "int64", manifest.documents + 1)
        self.shares = list(manifest.shares.values())
        self.source_of = self._mapped("source_of", "uint16", manifest.documents if self.shares else 0)
        self.given = self._mapped("given", "int64", manifest.given)
        self.vocabulary, self.eos, self.fingerprint = manifest.vocabulary, manifest.eos, manifest.fingerprint

    def __len__(self) -> int:
        """Documents."""
        return self.manifest.documents

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, document end included, (documents,) int64."""
        return np.diff(self.offsets)

    def document(self, i: int) -> np.ndarray:
        """The tokens of document i, document end last."""
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    def fetch(self, documents: np.ndarray, firsts: np.ndarray, counts: np.ndarray) -> None:
        """Asks the system for tokens of documents, `counts` from the token `firsts` of each on, (D,) each.

        They are then read all at once, and nothing besides. Those of a file that is not in memory would else be read
        one document after the other as they are touched, with up to megabytes around each.
        """
        file = cast(mmap.mmap, self.tokens.base)
        begins = (self.offsets[documents] + firsts) * self.tokens.itemsize
        pages = begins // mmap.PAGESIZE * mmap.PAGESIZE
        lengths = begins - pages + counts * self.tokens.itemsize
        for page, length in zip(pages.tolist(), lengths.tolist(), strict=True):
            file.madvise(mmap.MADV_WILLNEED, page, length)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(self.folder / "tokenizer.json")

    def unknown(self, documents: np.ndarray) -> float:
        """Share of the bytes of these documents that the tokenizer does not know."""
        if self.tokenizer.unknown is None:
            return 0.0
        tokens = np.concatenate([self.document(i) for i in documents])
        sizes = np.concatenate([self.token_bytes[self.offsets[i] : self.offsets[i + 1]] for i in documents])
        held = sizes[tokens == self.tokenizer.unknown]
        return float(held.sum(dtype=np.int64) / max(1, sizes.sum(dtype=np.int64)))

    def verify(self) -> None:
        """Reads everything. Raises: UserError unless contents, manifest and vocabulary agree."""
        if fingerprint(self.folder) != self.fingerprint:
            raise self._unusable("its contents have changed since it was prepared")
        if (largest := int(self.tokens.max())) >= self.vocabulary:
            raise self._unusable(f"it holds id {largest}, but its vocabulary ends at {self.vocabulary - 1}")
        chunks = (self.tokens[i : i + CHUNK] for i in range(0, len(self.tokens), CHUNK))
        ends = sum(int((chunk == self.eos).sum()) for chunk in chunks)
        if ends != len(self) or (self.tokens[self.offsets[1:] - 1] != self.eos).any():
            raise self._unusable(f"id {self.eos} is not the end of every document and nothing else")

    def _mapped(self, name: str, dtype: str, count: int) -> np.ndarray:
        path = self.folder / f"{name}.bin"
        size, expected = path.stat().st_size if path.exists() else 0, count * np.dtype(dtype).itemsize
        if size != expected:
            raise self._unusable(f"{path.name} has {size} bytes where the manifest says {expected}")
        return np.memmap(path, dtype, mode="r") if count else np.zeros(0, dtype)

    def _unusable(self, what: str) -> UserError:
        cure = f"delete {self.folder.parent} and prepare the corpus again"
        return UserError(f"{self.folder} is not a usable corpus store: {what}; {cure}")


class StoreWriter:
    """Writes a store into a folder, batch by batch; it is complete once `close` has written the manifest.

    `begin`: what `save` returned, of an attempt that was interrupted and is gone on with; None: a new folder. As a
    context manager it closes its files, complete or not, so that nothing reaches them once another may write there.
    Raises: UserError if what was saved is no longer there.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        shares: dict[str, float] | None = None,
        begin: Sequence[int] | None = None,
    ):
        if begin is None:
            folder.mkdir(parents=True)
            (folder / "offsets.bin").write_bytes(np.zeros(1, np.int64).tobytes())
            tokenizer.to_file(folder / "tokenizer.json")
        self.folder, self.tokenizer, self.shares = folder, tokenizer, shares or {}
        self.dtype = np.dtype(np.uint16 if tokenizer.vocabulary <= 1 << 16 else np.uint32)
        self.documents, self.tokens, self.bytes, self.given = begin or (0, 0, 0, 0)
        sizes = {"tokens": self.tokens * self.dtype.itemsize, "token_bytes": 2 * self.tokens}
        sizes |= {"offsets": 8 * (self.documents + 1)}
        sizes |= {"source_of": 2 * self.documents} if self.shares else {}
        sizes |= {"given": 8 * self.given} if self.given else {}
        self._opened = contextlib.ExitStack()
        self._files = {name: self._open(name, size) for name, size in sizes.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _open(self, name: str, size: int) -> IO[bytes]:
        return self._opened.enter_context(going_on(self.folder / f"{name}.bin", size))

    def append(
        self,
        ids: Sequence[np.ndarray],
        sizes: Sequence[np.ndarray],
        sources: Sequence[int] = (),
        given: Sequence[np.ndarray | None] | None = None,
    ) -> None:
        """Adds documents, and writes the document end after each.

        Args: for each document its ids, the bytes of text that each covers, the number of its source if there are
            shares, and the tokens at which its sentences start if it came as a list of them.
        """
        lengths = np.array([len(i) + 1 for i in ids])
        ends = np.cumsum(lengths)
        is_text = np.ones(ends[-1], bool)
        is_text[ends - 1] = False
        tokens, token_bytes = np.full(ends[-1], self.tokenizer.eos, self.dtype), np.zeros(ends[-1], np.int64)
        tokens[is_text], token_bytes[is_text] = np.concatenate(ids), np.concatenate(sizes)
        if token_bytes.max() > np.iinfo(np.uint16).max:
            raise UserError(f"corpus.tokenizer: one token stands for {token_bytes.max()} bytes of text, 65535 fit")
        self._files["tokens"].write(tokens.tobytes())
        self._files["token_bytes"].write(token_bytes.astype(np.uint16).tobytes())
        self._files["offsets"].write((self.tokens + ends).tobytes())
        if self.shares:
            self._files["source_of"].write(np.array(sources, np.uint16).tobytes())
        begins = self.tokens + ends - lengths
        if given is not None and not self.given:  # earlier texts have one sentence each
            self._files["offsets"].flush()
            shutil.copyfile(self.folder / "offsets.bin", self.folder / "given.bin")
            self.given = self.documents
            self._files["given"] = self._open("given", 8 * self.given)
        if "given" in self._files:
            cuts = given or [None] * len(ids)
            starts = np.concatenate([b + ([0] if g is None else g) for b, g in zip(begins, cuts, strict=True)])
            self._files["given"].write(starts.tobytes())
            self.given += len(starts)
        self.documents += len(ids)
        self.tokens += len(tokens)
        self.bytes += int(token_bytes.sum())

    def save(self) -> list[int]:
        """Sees what was written so far onto the disk; returns from where to `begin`, should this be interrupted."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        flush(self.folder)
        return [self.documents, self.tokens, self.bytes, self.given]

    def close(self, sources: Sequence[str]) -> None:
        self._opened.close()
        manifest = Manifest(
            format=FORMAT,
            documents=self.documents,
            tokens=self.tokens,
            bytes=self.bytes,
            dtype=self.dtype.name,
            vocabulary=self.tokenizer.vocabulary,
            eos=self.tokenizer.eos,
            sources=list(sources),
            shares=self.shares,
            given=self.given,
            tokenizer=self.tokenizer.hash,
            fingerprint=fingerprint(self.folder),
        )
        (self.folder / "manifest.json").write_text(manifest.model_dump_json(indent=1), encoding="utf-8")


@contextlib.contextmanager
def going_on(path: Path, size: int) -> Iterator[IO[bytes]]:
    """A file to append to, after its first `size` bytes: what follows was written after the last save.

    Raises: UserError where it is shorter, as what was saved is gone.
    """
    with path.open("ab") as file:
        if file.tell() < size:
            raise lost(path)
        file.truncate(size)
        yield file


def lost(path: Path) -> UserError:
    """Of a file that an interrupted attempt saved and a later one finds damaged, and so lets go of: what to say."""
    return UserError(f"{path}: has lost what was saved of it; start the same command again, which begins anew")


@contextlib.contextmanager
def mistakes_leave_nothing(mark: Path) -> Iterator[None]:
    """Within it, errors that the same command cannot get over, as a text has to be mended, let go of what was written.

    What broke off is gone on with (`unmade`); what is damaged is not.
    """
    try:
        yield
    except UserError as error:
        if not isinstance(error, BrokenOff):
            mark.unlink(missing_ok=True)
        raise


def fingerprint(folder: Path) -> str:
    """Hash of all the contents of a store."""
    there = [name for name in OPTIONAL if (folder / f"{name}.bin").exists()]
    digests = []
    for name in (*(f"{name}.bin" for name in (*ARRAYS, *there)), "tokenizer.json"):
        with (folder / name).open("rb") as file:
            digests.append(hashlib.file_digest(file, "blake2b").digest())
    return content_hash(*digests)
