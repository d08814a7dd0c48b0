"""Data sets of the Hugging Face hub as sources, streamed into the store without being kept.

    hf:owner/name                                     the only configuration, split "train"
    hf:owner/name/config@revision?split=validation    revision: a branch, a tag, or the commit that fixes the text

A prepared corpus is identified by this name: without a revision, it stays as it was when it was prepared, whatever
changes on the hub. Needs the extra `hub`; proxies, mirrors and tokens are those of `datasets`.
Cost: the download; training a tokenizer on it reads its beginning once more. An interrupted preparation goes on in the
shard, which is a file of the data set, in which it was, unless the data set has changed: then it begins anew.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tandem.corpus.files import BrokenOff, Text, checked, is_visible, parts_of, present
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
        return " ".join([self.name, "\n".join(self.fields)])

    def check(self) -> None:
        """Raises: UserError if `datasets` is not installed, or finds no such data set, split or column."""
        columns = self._data.column_names
        if columns is not None:
            present("column", self.fields, columns, self.name)

    @property
    def shards(self) -> int:
        """Files of the split, which is read one after the other."""
        return self._data.num_shards

    def read(self, shard: int = 0) -> Iterator[tuple[Text, int]]:
        """Yields (document, bytes of text read so far) of a shard."""
        done = 0
        for row, record in enumerate(self._records(shard), 1):
            where = f"{self.name}: {self._row(shard, row)}"
            field = present("column", self.fields, record, where)
            text = checked(record[field], f'{where}: column "{field}"')
            done += sum(len(part.encode()) for part in parts_of(text))
            if is_visible(text):
                yield text, done

    def _row(self, shard: int, row: int) -> str:
        return f"row {row} of shard {shard + 1}" if self.shards > 1 else f"row {row}"

    def _records(self, shard: int) -> Iterator[dict[str, Any]]:
        row = 0
        try:
            for record in self._data.shard(self.shards, shard):
                row += 1
                yield record
        except Exception as error:  # each of the packages below has its own for a lost connection or a damaged file
            told = f"broke off after {self._row(shard, row)} ({str(error).strip() or type(error).__name__})"
            cure = "start the same command again, which goes on there; where that ends alike, the data set is damaged"
            raise BrokenOff(f"{self.name}: {told}; {cure}") from error

    @property
    def state(self) -> str:
        """The commit of the data set; of a local folder, a hash."""
        return self._opened[0]

    @property
    def _data(self) -> Any:
        return self._opened[1]

    @functools.cached_property
    def _opened(self) -> tuple[str, Any]:
        datasets = require("datasets", "hub")
        try:
            builder = datasets.load_dataset_builder(self.repository, self.config, revision=self.revision)
            return builder.hash, builder.as_streaming_dataset(split=self.split)
        except (OSError, ValueError) as error:  # no network; no such data set, configuration or split
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"{self.name}: cannot be opened: {first}") from error
