"""Data sets of the Hugging Face hub as sources, streamed into the store without being kept.

    hf:owner/name                                     the only configuration, split "train"
    hf:owner/name/config@revision?split=validation    revision: a branch, a tag, or the commit that fixes the text

A prepared corpus is identified by this name: without a revision, it stays as it was when it was prepared, whatever
changes on the hub. Needs the extra `hub`; proxies, mirrors and tokens are those of `datasets`.
Cost: the download; training a tokenizer on it reads its beginning once more.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tandem.corpus.files import Text, checked, is_visible, parts_of, present
from tandem.recipe import UserError, require

PREFIX = "hf:"
_SYNTAX = re.compile(
    r"hf:(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<config>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?(?:\?split=(?P<split>\w+))?"
)


@dataclass(frozen=True)
class Hub:
    """One split of a data set; the first of `fields` that it has is the column that holds the text."""

    name: str
    repository: str
    config: str | None
    revision: str | None
    split: str
    fields: tuple[str, ...]
    size: None = None
    """Bytes: unknown, because not every data set states them."""

    @classmethod
    def parse(cls, name: str, fields: tuple[str, ...]) -> "Hub":
        """Reads the name of a data set. Raises: UserError with the syntax."""
        if not (found := _SYNTAX.fullmatch(name)):
            raise UserError(f'"{name}" does not read as hf:owner/name/config@revision?split=train')
        return cls(name, found["repository"], found["config"], found["revision"], found["split"] or "train", fields)

    @property
    def identity(self) -> str:
        return f"{self.name} {' '.join(self.fields)}"

    def check(self) -> None:
        """Raises: UserError if `datasets` is not installed, or finds no such data set, split or column."""
        columns = self._open().column_names
        if columns is not None:
            present("column", self.fields, columns, self.name)

    def read(self) -> Iterator[tuple[Text, int]]:
        """Yields (document, bytes of text read so far)."""
        done = 0
        for row, record in enumerate(self._records(), 1):
            field = present("column", self.fields, record, f"{self.name}: row {row}")
            text = checked(record[field], f'{self.name}: row {row}: column "{field}"')
            done += sum(len(part.encode()) for part in parts_of(text))
            if is_visible(text):
                yield text, done

    def _records(self) -> Iterator[dict[str, Any]]:
        records, row = self._open(), 0
        try:
            for record in records:
                row += 1
                yield record
        except (OSError, ValueError) as error:  # a lost connection; a damaged file
            raise UserError(f"{self.name}: broke off after row {row} ({error}); prepare the corpus again") from error

    def _open(self) -> Any:
        datasets = require("datasets", "hub")
        try:
            return datasets.load_dataset(
                self.repository, self.config, split=self.split, revision=self.revision, streaming=True
            )
        except (OSError, ValueError) as error:  # no network; no such data set, configuration or split
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"{self.name}: cannot be opened: {first}") from error
