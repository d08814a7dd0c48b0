"""Sources: where documents come from, streamed one at a time.

    texts: builtin                          the English of Python's own documentation (builtin.py)
    texts: [notes, books/*.txt]             folders and globs; a .txt or .md file is one document
    texts: [wiki-00.jsonl.gz]               JSON lines, plain or gzipped: one document per line, in `field`

A source yields (document, bytes of the source read so far), so that progress is known without unpacking anything.
Only one document is held at a time; a text file is one document, so a corpus of gigabytes belongs in JSON lines.
Documents without a visible character are left out.
"""

import glob
import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tandem.corpus.builtin import Builtin
from tandem.recipe import UserError

TEXT = (".txt", ".md")
LINES = (".jsonl", ".jsonl.gz")
ALLOWED = f'allowed are "builtin", {", ".join(TEXT + LINES)} files, folders of these and globs'


@dataclass(frozen=True)
class File:
    """One file; `field` is the key that holds the text of a JSON line."""

    path: Path
    field: str

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def identity(self) -> str:
        """Path, size and time of change: hashing gigabytes would keep a prepared corpus from opening at once."""
        stat = self.path.stat()
        return f"{self.path.resolve()} {stat.st_size} {stat.st_mtime_ns} {self.field}"

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def read(self) -> Iterator[tuple[str, int]]:
        """Yields (document, bytes of the file read so far)."""
        documents = self._lines() if self.path.name.endswith(LINES) else self._whole()
        return ((text, done) for text, done in documents if text and not text.isspace())

    def _whole(self) -> Iterator[tuple[str, int]]:
        data = self.path.read_bytes()
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise UserError(f"{self.path}:{line}: not UTF-8 ({error.reason}); convert the file") from error
        yield text, len(data)

    def _lines(self) -> Iterator[tuple[str, int]]:
        number = 0
        with self.path.open("rb") as raw:
            try:
                for number, line in enumerate(gzip.GzipFile(fileobj=raw) if self.path.suffix == ".gz" else raw, 1):
                    if not line.isspace():
                        yield self._text_of(line, number), raw.tell()
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise UserError(f"{self.path}: damaged after line {number} ({error}); fetch it again") from error

    def _text_of(self, line: bytes, number: int) -> str:
        where = f"{self.path}:{number}"
        try:
            record = json.loads(line.decode())
        except ValueError as error:
            raise UserError(f'{where}: not a JSON line ({error}); each must read {{"{self.field}": "..."}}') from error
        if not isinstance(record, dict) or self.field not in record:
            there = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise UserError(f'{where}: no field "{self.field}" in it (found: {there}); corpus.field names it')
        text = record[self.field]
        if not isinstance(text, str):
            raise UserError(f'{where}: field "{self.field}" holds {json.dumps(text)[:40]}, not a text')
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, UTF-8 can not
            raise UserError(f'{where}: field "{self.field}" is not Unicode text ({error.reason})') from error
        return text


Source = Builtin | File
"""Has a `name`, an `identity`, which changes whenever its documents may have changed, `size` in bytes, and `read`."""


def find_sources(key: str, texts: str | list[str], field: str) -> list[Source]:
    """The sources that the recipe's `key` names, files in sorted order within each folder and glob."""
    found: list[Source] = []
    for name in [texts] if isinstance(texts, str) else texts:
        found.extend([Builtin()] if name == "builtin" else [File(path, field) for path in _files(key, name)])
    if not found:
        raise UserError(f"{key} = []: names no text; {ALLOWED}")
    return found


def _files(key: str, name: str) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(TEXT + LINES))
    else:
        files = [path] if path.is_file() else [Path(p) for p in sorted(glob.glob(name, recursive=True))]
    if not files:
        raise UserError(f'{key} = "{name}": no such text found; {ALLOWED}')
    for file in files:
        if not file.name.endswith(TEXT + LINES):
            raise UserError(f'{key} = "{file}": unknown kind of file "{file.suffix}"; {ALLOWED}')
    return files
