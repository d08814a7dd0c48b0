"""Task files: what `tandem evaluate RUN --tasks` accepts, by name.

A file is one of three things; those of this package are in tasks/.

    task: piqa                         a task of the evaluation harness, in its own YAML
    dataset_path: json
    dataset_kwargs: {data_files: {test: "${TANDEM_DATA}/eval/piqa_val.jsonl.gz"}}
    ...

    texts:                             texts to score by the ruler (likelihood.py)
      brown: ${TANDEM_DATA}/ood/brown.jsonl.gz

    tasks: [piqa, hf:sciq]             a set of others

`${NAME}` is taken from the environment. `hf:NAME` is a task that ships with the harness and reads its data from the
hub; a name that ends in .yaml is a file of your own. Files are data: tags that run code are refused.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tandem.recipe import UserError, did_you_mean
from tandem.recipe.options import VARIABLE, substituted

FOLDER = Path(__file__).parent / "tasks"
HUB = "hf:"


@dataclass(frozen=True)
class TaskFile:
    """A task of the harness: its name, where it is written, its settings (none for one of the hub), its data."""

    name: str
    where: str
    config: dict[str, Any] = field(default_factory=dict)
    data: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Texts:
    """Texts to score, by name: paths as in corpus.texts; the name of the file, and where it is."""

    name: str
    where: str
    texts: dict[str, str | list[str]]


def read_tasks(names: str) -> list[TaskFile | Texts]:
    """The tasks and texts that comma-separated names stand for, each once.

    Raises: UserError naming a file that cannot be read, with the line if it is known, or two that would be kept as one.
    """
    found: dict[str, TaskFile | Texts] = {}
    kept: dict[str, tuple[str, str]] = {}  # file of a record -> where its task or text is written, and its name
    for read in (read for name in filter(None, map(str.strip, names.split(","))) for read in _read(name, ())):
        found[read.where] = read
        for name in read.texts if isinstance(read, Texts) else [read.name.removeprefix(HUB)]:
            file = file_of(name)
            where, other = kept.setdefault(file, (read.where, name))
            if (where, other) != (read.where, name):
                raise UserError(
                    f"--tasks {names}: {other} of {where} and {name} of {read.where} would both be kept as "
                    f"tasks/{file}.json; rename one, or leave one out"
                )
    if not found:
        raise UserError(f"--tasks {names!r}: names no task; there are {', '.join(shipped())}")
    return list(found.values())


def file_of(name: str) -> str:
    """The name of a record's files, without their endings."""
    return re.sub("[/:]", "-", name)


def shipped() -> list[str]:
    """Names of the task files of this package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def _read(name: str, above: tuple[str, ...]) -> Iterator[TaskFile | Texts]:
    if name.startswith(HUB):
        yield TaskFile(name, name)
        return
    if name in above:
        raise UserError(f"--tasks {name}: this set contains itself, by {' -> '.join([*above, name])}")
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not path.is_file():
        near = did_you_mean(name, shipped())
        raise UserError(
            f"--tasks {name}: no such task; {near}there are {', '.join(shipped())}, NAME.yaml for a file of your own, "
            f"and {HUB}NAME for a task of the harness that reads the hub"
        )
    content = _expanded(_parsed(path), path)
    if "tasks" in content:
        for other in content["tasks"]:
            yield from _read(other, (*above, name))
    elif "texts" in content:
        yield Texts(path.stem, str(path), {str(name): paths for name, paths in content["texts"].items()})
    else:
        yield _task(path, content)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is written twice, of which PyYAML would keep the second value."""

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for number, key in enumerate(keys):
            if key.value in [other.value for other in keys[:number]]:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is written twice", problem_mark=key.start_mark)
        return node


def _parsed(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text("utf-8"), _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no UTF-8; a day that no month has
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UserError(f"{where}: cannot be read: {getattr(error, 'problem', None) or error}") from error
    given = content if isinstance(content, dict) else {}
    texts, tasks = given.get("texts"), given.get("tasks")
    is_names = lambda names: isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    is_one = [
        isinstance(given.get("task"), str),
        isinstance(texts, dict) and texts and all(isinstance(p, str) or is_names(p) for p in texts.values()),
        is_names(tasks),
    ]
    if sum(map(bool, is_one)) != 1:
        raise UserError(
            f"{path}: no task file; it needs `task: NAME` with the harness's settings, or `texts: {{NAME: PATH}}`, or "
            "`tasks: [NAME, ...]`"
        )
    return given


def _expanded(value: Any, path: Path) -> Any:
    """The value with every `${NAME}` taken from the environment."""
    if isinstance(value, dict):
        return {key: _expanded(inner, path) for key, inner in value.items()}
    if isinstance(value, list):
        return [_expanded(inner, path) for inner in value]
    if not isinstance(value, str):
        return value
    for name in VARIABLE.findall(value):
        if name not in os.environ:
            raise UserError(
                f"{path}: {value!r}: the environment has no {name}; set it to the folder that holds the data "
                f"(export {name}=...), or write a file of your own with the path in it"
            )
    return substituted(value)


def _task(path: Path, content: dict[str, Any]) -> TaskFile:
    if "include" in content:
        raise UserError(f"{path}: include = {content['include']}: a task file holds all of its task; copy it in")
    given = content.get("dataset_kwargs")
    data = tuple(Path(name) for name in _names(given.get("data_files") if isinstance(given, dict) else None))
    for file in data:
        if not file.is_file():
            raise UserError(f"{path}: dataset_kwargs.data_files names {file}, and there is no such file")
    return TaskFile(content["task"], str(path), content, data)


def _names(files: Any) -> Iterator[str]:
    """Names of local files, from what the harness accepts: a name, a list of names, or either by split."""
    if isinstance(files, str) and "://" not in files:
        yield files
    elif isinstance(files, list | dict):
        for inner in files.values() if isinstance(files, dict) else files:
            yield from _names(inner)
