"""Sources: where documents come from, streamed one at a time.

    texts: builtin                              the English of Python's own documentation (builtin.py)
    texts: [notes, books/*.txt, wiki.jsonl.gz]  files, folders of them, globs (files.py)
    texts: hf:owner/name?split=train            a data set of the Hugging Face hub (hub.py)
    texts: {wiki/*.jsonl.gz: 0.7, notes: 0.3}   a mixture of these by shares of the tokens (order.py)

A source yields (document, bytes of the source read so far), so that progress is known without unpacking anything.
Only one document is held at a time; a text file is one document, so a corpus of gigabytes belongs in JSON lines or
parquet files.
"""

import glob
import os
from collections.abc import Iterable
from pathlib import Path

from tandem.corpus.builtin import Builtin
from tandem.corpus.files import KINDS, File
from tandem.corpus.hub import PREFIX, Hub
from tandem.recipe import UserError

ALLOWED = f'allowed are "builtin", {", ".join(KINDS)} files, folders of these, globs, and {PREFIX}owner/name'

Source = Builtin | File | Hub
"""Has a `name`, an `identity`, which changes whenever its documents may have changed, a `size` in bytes or None,
`check`, which raises UserError if it could not be read, `shards`, into how many parts it falls, `read`, which takes the
number of one, and `state`, which tells what `identity` does not: whether the documents are those of a while ago."""


def check_names(names: str | Iterable[str] | float) -> None:
    """Raises: UserError if the name of a data set on the hub is malformed."""
    for name in [names] if isinstance(names, str) else names if isinstance(names, Iterable) else []:
        if name.startswith(PREFIX):
            Hub.parse(name, fields=())


def find_sources(key: str, texts: str | list[str], field: str | list[str]) -> list[Source]:
    """The sources that the recipe's `key` names, files in sorted order within each folder and glob."""
    fields = (field,) if isinstance(field, str) else tuple(field)
    found: list[Source] = []
    for name in [texts] if isinstance(texts, str) else texts:
        if name == "builtin":
            found.append(Builtin())
        elif name.startswith(PREFIX):
            found.append(Hub.parse(name, fields))
        else:
            found += [File(path, fields) for path in _files(key, name)]
    if not found:
        raise UserError(f"{key}: names no text; {ALLOWED}")
    return found


def _matching(key: str, pattern: str) -> list[Path]:
    """Files by name, those behind links to folders included, hidden ones not.

    Raises: UserError for a link to nothing, which may stand for a folder or a text whose disk is not there.
    """
    found = sorted(map(Path, glob.glob(pattern, recursive=True)))
    for path in found:
        if path.is_symlink() and not path.exists() and (path.name.endswith(KINDS) or not path.suffix):
            raise UserError(f'{key}: "{path}" is a link to {os.readlink(path)}, which is not there; mend or remove it')
    return [path for path in found if path.is_file()]


def _files(key: str, name: str) -> list[Path]:
    if not name.strip():  # the path "" is the folder where the command runs
        raise UserError(f'{key} = "{name}": names no text; {ALLOWED}')
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        files = [p for p in _matching(key, f"{glob.escape(str(path))}/**") if p.name.endswith(KINDS)]
    else:
        files = [path] if path.is_file() else _matching(key, str(path))
    if not files:
        where = "" if path.is_absolute() else f" in {Path.cwd()}, where this command runs"
        raise UserError(f'{key} = "{name}": no such text found{where}; {ALLOWED}')
    for file in files:
        if not file.name.endswith(KINDS):
            raise UserError(f'{key} = "{file}": unknown kind of file "{file.suffix}"; {ALLOWED}')
    return files
