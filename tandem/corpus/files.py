"""Files of documents, streamed one document at a time.

    .txt .md                      one document each
    .tokens                       WikiText: an article a document
    .jsonl .jsonl.gz .jsonl.zst   one document per line, the text in `field`
    .parquet                      one document per row, the text in column `field`

The text of a line or row may be a list of texts: the sentences of the document (splitter "given", sentences.py).
A file yields (document, bytes of it read so far), so progress is known without unpacking anything; a row of a parquet
file counts as its share of the bytes. Documents without a visible character are left out.
Memory: one document; for a parquet file, a few hundred rows of the one column.
"""

import gzip
import io
import json
import os
import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from tandem.recipe import UserError, require

Text = str | list[str]
"""A document: its text, or the list of its sentences, which joined make up the text."""

WHOLE = (".txt", ".md")
ARTICLES = (".tokens",)
LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
ROWS = (".parquet",)
KINDS = WHOLE + LINES + ROWS + ARTICLES

BUFFER = 1 << 18
"""Bytes of unpacked text read at a time."""
ROWS_READ = 256
"""Rows turned into Python texts at a time."""


class BrokenOff(UserError):
    """A text could not be read on, for a reason that may pass."""


@dataclass(frozen=True)
class File:
    """One file as a source (sources.py); the first of `fields` that it has is the key or column that holds the text."""

    path: Path
    fields: tuple[str, ...]
    shards: ClassVar[int] = 1
    state: ClassVar[str] = ""

    @property
    def name(self) -> str:
        """The path as text; bytes of it that are not UTF-8, which a manifest cannot hold, are spelled out."""
        return os.fsencode(self.path).decode(errors="backslashreplace")

    @property
    def identity(self) -> str:
        """Path, size and modification time: hashing gigabytes would delay the opening of a prepared corpus."""
        stat = self.path.stat()
        return " ".join([f"{self.path.resolve()} {stat.st_size} {stat.st_mtime_ns}", "\n".join(self.fields)])

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def check(self) -> None:
        """Raises: UserError if the reader of this kind of file is not installed, or there is no such column."""
        if self._is(ROWS):
            self._parquet()
        elif self.path.suffix == ".zst":
            require("pyarrow", "text")

    def read(self, shard: int = 0) -> Iterator[tuple[Text, int]]:
        """Yields (document, bytes of the file read so far)."""
        readers = {WHOLE: self._whole, ARTICLES: self._articles, LINES: self._lines, ROWS: self._rows}
        documents = next(reader for kind, reader in readers.items() if self._is(kind))()
        try:
            for text, done in documents:
                if is_visible(text):
                    yield text, done
        except OSError as error:
            raise self._unread("cannot be read", error) from error

    def _unread(self, what: str, error: Exception) -> UserError:
        """Of a file that was not read to its end: what to say, by whether the disk is at fault or its contents."""
        if isinstance(error, OSError) and error.errno:
            return BrokenOff(f"{self.path}: cannot be read ({error.strerror}); see to that, or leave it out")
        return UserError(f"{self.path}: {what} ({error}); fetch it again")

    def _is(self, kind: tuple[str, ...]) -> bool:
        return self.path.name.endswith(kind)

    def _whole(self) -> Iterator[tuple[str, int]]:
        data = self.path.read_bytes()
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise UserError(f"{self.path}:{line}: not UTF-8 ({error.reason}); convert the file") from error
        yield text, len(data)

    def _articles(self) -> Iterator[tuple[str, int]]:
        """A title opens an article; lines before the first title and white space at line ends are dropped."""
        article: list[str] = []
        done = 0
        with self.path.open("rb") as raw:
            for number, data in enumerate(raw, 1):
                try:
                    line = data.decode("utf-8" if number > 1 else "utf-8-sig").rstrip()
                except UnicodeDecodeError as error:
                    raise UserError(f"{self.path}:{number}: not UTF-8 ({error.reason}); convert the file") from error
                if article and is_title(line):
                    yield "\n".join(article), done
                    article = []
                if article or is_title(line):
                    article.append(line)
                done += len(data)
        if not article:
            cure = "a file of another layout needs another ending, such as .txt"
            raise UserError(f'{self.path}: no line reads as the title of an article, " = Title = "; {cure}')
        yield "\n".join(article), done

    def _lines(self) -> Iterator[tuple[Text, int]]:
        number = 0
        with self.path.open("rb") as raw:
            try:
                for number, line in enumerate(self._unpacked(raw), 1):
                    if not line.isspace():
                        yield self._text_of(line, number), raw.tell()
            except (EOFError, zlib.error, OSError) as error:
                raise self._unread(f"damaged after line {number}", error) from error

    def _unpacked(self, raw: BinaryIO) -> Any:
        if self.path.suffix == ".gz":
            return gzip.GzipFile(fileobj=raw)
        if self.path.suffix == ".zst":  # not zstandard, whose reader accepts a truncated file as whole
            return io.BufferedReader(require("pyarrow", "text").CompressedInputStream(raw, "zstd"), BUFFER)
        return raw

    def _text_of(self, line: bytes, number: int) -> Text:
        where = f"{self.path}:{number}"
        try:
            record = json.loads(line.decode("utf-8-sig"))  # an editor may have written a byte order mark
        except (ValueError, RecursionError) as error:
            raise UserError(
                f'{where}: not a JSON line ({error}); each must read {{"{self.fields[0]}": "..."}}'
            ) from error
        if not isinstance(record, dict):
            raise UserError(f"{where}: {missing('field', self.fields, [type(record).__name__])}")
        field = present("field", self.fields, record, where)
        return checked(record[field], f'{where}: field "{field}"')

    def _parquet(self) -> tuple[Any, str]:
        """The open file and the name of its texts. Raises: UserError where it is damaged or has no such column."""
        arrow, parquet = require("pyarrow", "text"), require("pyarrow.parquet", "text")
        try:
            file = parquet.ParquetFile(self.path, buffer_size=BUFFER)  # else a whole row group is read at once
        except (arrow.ArrowException, OSError) as error:
            raise self._unread("not a parquet file, or cut short", error) from error
        return file, present("column", self.fields, file.schema_arrow.names, str(self.path))

    def _rows(self) -> Iterator[tuple[Text, int]]:
        row, size = 0, self.size
        file, field = self._parquet()
        with file:
            rows = file.metadata.num_rows
            try:
                for batch in file.iter_batches(ROWS_READ, columns=[field]):
                    for value in batch.column(0):
                        text = checked(value.as_py(), f'{self.path}: row {row + 1}: column "{field}"')
                        row += 1
                        yield text, size * row // rows
            except UnicodeDecodeError as error:
                reason = f'column "{field}" is not UTF-8 ({error.reason})'
                raise UserError(f"{self.path}: row {row + 1}: {reason}") from error
            except (require("pyarrow", "text").ArrowException, OSError) as error:
                raise self._unread(f"damaged after row {row}", error) from error


def parts_of(text: Text) -> list[str]:
    """The texts that make up a document."""
    return [text] if isinstance(text, str) else text


def is_visible(text: Text) -> bool:
    """Whether a document has a character that is not white space; one without is left out."""
    return any(part and not part.isspace() for part in parts_of(text))


def missing(what: str, fields: tuple[str, ...], found: Iterable[str]) -> str:
    """Of a key or column that a line or row does not have: what to say."""
    names = " or ".join(f'"{field}"' for field in fields)
    return f"no {what} {names} in it (found: {', '.join(found)}); corpus.field names it, several as a list"


def present(what: str, fields: tuple[str, ...], found: Collection[str], where: str) -> str:
    """The first of `fields` that was found. Raises: UserError that begins with `where` if none was."""
    if (field := next((field for field in fields if field in found), None)) is None:
        raise UserError(f"{where}: {missing(what, fields, found)}")
    return field


def checked(value: Any, where: str) -> Text:
    """Returns the value if it is a document. Raises: UserError that begins with `where` if it is not."""
    if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(part, str) for part in value)):
        shown = json.dumps(value, default=str)[:40]
        raise UserError(f"{where} holds {shown}, not a text; leave it out, or name another field")
    try:
        for part in parts_of(value):
            part.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, UTF-8 cannot
        raise UserError(f"{where} is not Unicode text ({error.reason})") from error
    return value


def is_title(line: str) -> bool:
    """Whether a line of WikiText opens an article: " = Title = " does, " = = Section = = " does not."""
    marks = "".join(line.split())
    return len(marks) > 2 and marks.count("=") == 2 and marks[0] == marks[-1] == "="
