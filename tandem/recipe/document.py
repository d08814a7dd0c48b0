"""From files and overrides to one tree in which every value knows where it was written."""

import functools
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tandem.recipe.settings import UserError, did_you_mean, is_mapping


class Origin(NamedTuple):
    """Where a value comes from: a file and its line, or "default", "override", "derived"."""

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


DEFAULT, DERIVED, OVERRIDE = Origin("default"), Origin("derived"), Origin("override")


@dataclass(frozen=True)
class Node:
    """A value with its origin; `value` is a scalar, a list of nodes, or a dict of nodes."""

    value: Any
    origin: Origin
    dotted: bool = False
    """A mapping that stands for a dotted key, `a` of `a.b: 1`: what else `a` holds below it stays."""

    @classmethod
    def of(cls, value: Any, origin: Origin) -> "Node":
        """A plain value as a tree of one origin."""
        if isinstance(value, dict):
            value = {key: cls.of(inner, origin) for key, inner in value.items()}
        elif isinstance(value, list):
            value = [cls.of(inner, origin) for inner in value]
        return cls(value, origin)

    def under(self, keys: Sequence[str]) -> "Node":
        """This under a dotted key, given by its parts."""
        return functools.reduce(lambda node, key: Node({key: node}, self.origin, dotted=True), reversed(keys), self)

    def plain(self) -> Any:
        """The value alone."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        return [node.plain() for node in self.value] if isinstance(self.value, list) else self.value

    def at(self, *parts: str | int) -> "Node | None":
        """The entry of a mapping or the item of a list, below `parts` of such, where there is one."""
        node: Node | None = self
        for part in parts:
            held = node.value if node else None
            if isinstance(held, list) and isinstance(part, int):
                node = held[part] if part < len(held) else None
            else:
                node = held.get(part) if isinstance(held, dict) else None
        return node

    def over(self, base: "Node") -> "Node":
        """This on top of `base`: sections merge key by key, anything else replaces, an option that is a mapping too."""

        def merged(top: Node, base: Node, *above: str) -> Node:
            if not (isinstance(top.value, dict) and isinstance(base.value, dict)):
                return top
            if len(above) > 1 and is_mapping(*above[-2:]) and not top.dotted:
                return top
            mine = {key: merged(node, base.value.get(key, node), *above, key) for key, node in top.value.items()}
            return Node(base.value | mine, top.origin, top.dotted and base.dotted)

        return merged(self, base)


def shown(value: Any) -> str:
    """A value as a message quotes it: JSON, cut to 60 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Problems(list[tuple[Origin, str]]):
    """Everything wrong with a recipe, reported at once."""

    def add(self, origin: Origin, text: str) -> None:
        if (origin, text) not in self:  # a union reports each of its branches
            self.append((origin, text))

    def raise_any(self) -> None:
        if self:
            in_order = sorted(self, key=lambda problem: (problem[0] == OVERRIDE, problem[0]))
            raise UserError("\n".join(f"{origin}  {text}" for origin, text in in_order))


# YAML ------------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict = {}

    def compose_node(self, parent, index):
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None):
            reason = "a recipe has no aliases and no tags; use extends"
            raise yaml.MarkedYAMLError(problem=reason, problem_mark=event.start_mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or 1.2 would read as something else."""

    def ignore_aliases(self, data):
        return True


# The core schema of YAML 1.2 (section 10.3.2) without inf and nan, which no option takes. PyYAML alone follows 1.1,
# where `no` is a boolean, `1:30` is 90, `010` is 8 and `6e-4` is text.
_DIGITS = list("-+.0123456789")
_NO_TEXT = re.compile("[\0\ud800-\udfff]")  # only an escape in double quotes can write these
for _tag, _pattern, _first in (
    ("null", r"(~|null|Null|NULL|)", ["~", "n", "N", ""]),
    ("bool", r"(true|True|TRUE|false|False|FALSE)", list("tTfF")),
    ("int", r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)", _DIGITS),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", _DIGITS),
):
    for _end in (_Loader, _Dumper):
        _end.add_implicit_resolver("tag:yaml.org,2002:" + _tag, re.compile(_pattern + r"\Z"), _first)


def _scalar(tag: str, text: str) -> Any:
    match tag.rpartition(":")[2]:
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            return int(text, 0 if text[1:2] in ("o", "x") else 10)
        case "float":
            number = float(text)
            return int(number) if number.is_integer() and "e" in text.lower() else number  # 2e6 tokens are a count
    return text


def parse(text: str, source: Origin, problems: Problems, quoted: str = "", above: str = "") -> Node:
    """Read one YAML document; if a key is written twice, the first counts and the second is added to `problems`.

    Messages have `above` before a key. Raises: UserError where the text is not YAML, with `quoted` before the reason.
    """

    def place(mark: yaml.Mark) -> Origin:
        return source if source == OVERRIDE else Origin(source.source, mark.line + 1)

    def convert(node: yaml.Node, origin: Origin, above: str) -> Node:
        if isinstance(node, yaml.SequenceNode):
            return Node([convert(item, place(item.start_mark), above) for item in node.value], origin)
        if not isinstance(node, yaml.MappingNode):
            if _NO_TEXT.search(node.value):
                raise UserError(f"{origin}  {quoted}cannot be read: no text has a NUL or half a surrogate pair")
            try:
                return Node(_scalar(node.tag, node.value), origin)
            except ValueError:  # Python reads no more than sys.get_int_max_str_digits()
                raise UserError(f"{origin}  {quoted}cannot be read: a number of {len(node.value)} digits") from None
        mapping: dict[str, Node] = {}
        for key, value in node.value:
            name, here = str(key.value), place(key.start_mark)
            if not isinstance(key, yaml.ScalarNode):
                written = text[key.start_mark.index : key.end_mark.index]
                problems.add(here, f"{above}{written}: a key must be text, not a list or a mapping")
            elif name in mapping:
                problems.add(here, f"{above}{name}: written twice, first at {mapping[name].origin}")
            else:
                mapping[name] = convert(value, here, f"{above}{name}.")
        return Node(mapping, origin)

    try:
        root = yaml.compose(text, _Loader)
        return convert(root, place(root.start_mark), above) if root else Node(None, source)
    except RecursionError:
        raise UserError(f"{source}  {quoted}cannot be read: nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        origin = place(error.problem_mark) if error.problem_mark else source
        reason = " ".join(filter(None, (error.context, error.problem)))
        cure = "; put text that has any of , [ ] { } : # in quotes of its own" if quoted else ""
        raise UserError(f"{origin}  {quoted}cannot be read: {reason}{cure}") from None
    except yaml.reader.ReaderError as error:
        raise UserError(
            f"{source}  {quoted}cannot be read: character {error.position} is not allowed in YAML"
        ) from None


def to_yaml(values: dict[str, Any]) -> str:
    """YAML that `parse` reads back as the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


# Files and overrides ---------------------------------------------------------------------------------------------


def recipes() -> dict[str, Path]:
    """All recipes by name, such as `decoder/tiny`: those in ./recipes, then those that come with Tandem."""
    package = Path(__file__).parents[1]
    shipped = package / "recipes" if (package / "recipes").is_dir() else package.parent / "recipes"
    found: dict[str, Path] = {}
    for folder in (Path("recipes"), shipped):
        for path in sorted(folder.rglob("*.yaml")):
            found.setdefault(path.relative_to(folder).with_suffix("").as_posix(), path)
    return found


def is_path(reference: str) -> bool:
    """Whether a reference is the path of a recipe, not its name."""
    return reference.endswith((".yaml", ".yml"))


def names_recipe(reference: str) -> bool:
    """Whether a recipe has this name, or it is a path."""
    return is_path(reference) or reference in recipes()


def is_study(layers: Iterable[Node]) -> bool:
    """Whether the trees of files are those of a study: it has arms or a grid, a recipe has neither."""
    return any(layer.at("arms") or layer.at("grid") for layer in layers)


def find(reference: str, beside: Path = Path()) -> Path:
    """The file of a recipe, given as a path (ends in .yaml or .yml, relative to `beside`) or as a name.

    Raises: UserError naming the nearest match.
    """
    if is_path(reference):
        wanted = beside / reference
        if wanted.is_file():
            return wanted
        files = (path.name for path in wanted.parent.glob("*.y*ml") if path.is_file())
        what, near = "file", did_you_mean(wanted.name, files)
    else:
        named = recipes()
        if reference in named:
            return named[reference]
        near_by = f"{reference}.yaml", f"{reference}.yml", f"{reference.rstrip('/')}/recipe.yaml"  # the last: of a run
        files = [name for name in near_by if (beside / name).is_file()]
        what, near = "recipe", f"did you mean {files[0]}? " if files else did_you_mean(reference, named)
    raise UserError(f"{shown(reference)}: no such {what}; {near}`tandem show` lists recipes")


def _read(path: Path, problems: Problems) -> Node:
    source = Origin(os.path.relpath(path) if path.absolute().is_relative_to(Path.cwd()) else str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{source}  cannot be read: byte {error.start} is not UTF-8") from None
    except OSError as error:
        raise UserError(f"{source}  cannot be read: {error.strerror}") from None
    root = parse(text, source, problems)
    if not isinstance(root.value, dict | None):
        raise UserError(f"{root.origin}  a recipe is a mapping of sections, such as `network: {{name: decoder}}`")
    return Node(root.value or {}, source)


def read_chain(reference: str, problems: Problems) -> list[Node]:
    """A recipe and all that it extends, the most general first.

    Raises: UserError where one is missing or extends itself.
    """
    path, layers, seen = find(reference), [], []
    while True:
        layers.insert(0, root := _read(path, problems))
        seen.append(path.resolve())
        parent = root.value.pop("extends", None)
        if parent is None:
            return layers
        if not isinstance(parent.value, str):
            raise UserError(f"{parent.origin}  extends: must be the name or the path of one recipe")
        try:
            path = find(parent.value, path.parent)
        except UserError as error:
            raise UserError(f"{parent.origin}  extends = {error}") from None
        if path.resolve() in seen:
            reason = "this recipe is among those that it extends"
            raise UserError(f"{parent.origin}  extends = {shown(parent.value)}: {reason}")


def names_study(reference: str) -> bool:
    """Whether a study has this name, with its `studies/`, or this file holds one. Raises: UserError as `read_chain`."""
    return reference.startswith("studies/") or (is_path(reference) and is_study(read_chain(reference, Problems())))


def read_overrides(overrides: Iterable[str], problems: Problems) -> Node:
    """Read overrides `section.key=value` with YAML values; if a key is given twice, the later value counts."""
    tree, said = Node({}, OVERRIDE), ""
    for override in [overrides] if isinstance(overrides, str) else overrides:
        key, equals, text = override.partition("=")
        parts = key.strip().split(".")
        said = override if equals else f"{said} {override}".strip()
        if not equals or not all(parts):
            cure = f'; if it is of the value before it, quote both: "{said}"' if not equals and "=" in said else ""
            problems.add(OVERRIDE, f"{override}: write section.key=value, such as network.depth=4{cure}")
            continue
        if parts == ["extends"]:
            problems.add(OVERRIDE, f"{override}: a recipe says in its file what it extends")
            continue
        tree = parse(text, OVERRIDE, problems, f"{override}: ", f"{key.strip()}.").under(parts).over(tree)
    return tree
