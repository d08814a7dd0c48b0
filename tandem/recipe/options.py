"""One section: from its nodes to typed Settings, or to one line for each mistake."""

import functools
import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from tandem.recipe.document import DEFAULT, DERIVED, Node, Origin, Problems, shown
from tandem.recipe.settings import SECTIONS, Settings, describe, did_you_mean, part_of, registered, settings_in

RECIPE = "a recipe"
"""The `name` of a recipe's own options, which are in no section; other options may be read without a section, too."""

VARIABLE = re.compile(r"\$\{(\w+)\}")
"""What stands for a variable of the environment, by its name."""

_ABOUT = re.compile(r"(\w+)( =|:) ")
"""How the reason of a section begins if it is about one of its options."""


def read_options(
    config: type[Settings], kind: str, name: str, node: Node, problems: Problems, beside: Sequence[str] = ()
) -> Settings | None:
    """The options of choice `name` in section `kind`, or None after adding to `problems`; `kind` may be empty.

    `beside`: further keys that are allowed here and read elsewhere.
    """
    count = len(problems)
    expanded = _expand(node, kind, problems)
    try:
        # As JSON, from which a strict tuple accepts a list, and a path accepts text.
        settings = config.model_validate_json(json.dumps(expanded))
    except ValidationError as invalid:
        for error in invalid.errors(include_url=False):
            problems.add(*_explain(error, config, kind, name, node, beside))
        return None
    return settings if len(problems) == count else None


def as_written(value: Any, written: Any) -> Any:
    """`value` with each `${NAME}` restored where `written` has it."""
    if isinstance(value, dict) and isinstance(written, dict):
        names = {substituted(key): key for key in written}
        return {names.get(key, key): as_written(value[key], written.get(names.get(key))) for key in value}
    if isinstance(value, list) and isinstance(written, list) and len(value) == len(written):
        return list(map(as_written, value, written))
    return written if isinstance(written, str) and VARIABLE.search(written) else value


def origins(settings: Settings, node: Node, prefix: str) -> Iterator[tuple[str, Origin]]:
    """Where each value was written; a value neither written nor equal to the default was derived."""
    for name, field in type(settings).model_fields.items():
        key, value, written = join(prefix, name), getattr(settings, name), node.at(name)
        if written and isinstance(value, Settings):
            yield from origins(value, written, key)
        elif written and (written.value is not None or value is None):
            yield key, written.origin
        else:
            yield key, DEFAULT if value == field.get_default(call_default_factory=True) else DERIVED


def join(*parts: str) -> str:
    """A dotted key."""
    return ".".join(filter(None, parts))


def _expand(node: Node, key: str, problems: Problems) -> Any:
    """The plain value, with every `${NAME}` replaced from the environment."""
    if isinstance(node.value, dict):
        plain, written = {}, {}
        for part, inner in node.value.items():
            name = _expand(Node(part, node.origin), key, problems)
            if (other := written.setdefault(name, part)) != part:
                problems.add(inner.origin, f"{key}: {shown(other)} and {shown(part)} name the same; keep one")
            plain[name if other == part else part] = _expand(inner, join(key, part), problems)
        return plain
    if isinstance(node.value, list):
        return [_expand(item, key, problems) for item in node.value]
    if not isinstance(node.value, str):
        return node.value
    for name in VARIABLE.findall(node.value):
        if name not in os.environ:
            reason = f"the environment has no {name}; set it (export {name}=...), or write the text out"
            problems.add(node.origin, f"{key} = {shown(node.value)}: {reason}")
    text = substituted(node.value)
    if text.encode(errors="ignore").decode() != text:  # names of files may be any bytes
        reason = "its value in the environment is not UTF-8; take one that is, such as a link with another name"
        problems.add(node.origin, f"{key} = {shown(node.value)}: {reason}")
        return node.value
    return text


def substituted(text: str) -> str:
    """The text with every `${NAME}` of the environment replaced; of other names it stays."""
    return VARIABLE.sub(lambda found: os.environ.get(found[1], found[0]), text)


def _explain(
    error: Any, config: type[Settings], kind: str, name: str, node: Node, beside: Sequence[str]
) -> tuple[Origin, str]:
    """One line for a pydantic error: key, value, what is wrong, what is allowed, what was meant."""
    field, key = FieldInfo.from_annotation(config), kind
    for part in error["loc"]:
        inner, below = part_of(field.annotation, part), node.at(part)
        if inner is None and below and error["type"] == "extra_forbidden":
            owner = settings_in(field.annotation)
            takes = [*(owner.model_fields if owner else []), *(beside if owner is config else [])]
            reason = f"no such key; {_nested(part, below, takes) or _meant(part, kind, name, key, takes)}"
            reason += f"{name if key == kind else key} takes {', '.join(takes)}"
            return below.origin, f"{join(key, part)} = {shown(below.plain())}: {reason}"
        if inner is None or (below is None and error["type"] != "missing"):
            break  # the branch of a union
        field, key, node = inner, join(key, str(part)), below or node
    allowed = describe(field.annotation, field.metadata)
    if error["type"] == "missing":
        description = f" ({' '.join(field.description.split())})" if field.description else ""
        return node.origin, f"{key}: required: {allowed}{description}"
    section = kind if name == kind else f"{kind} = {name}"
    subject = section if key == kind else f"{key} = {shown(node.plain())}"
    if error["type"] in ("value_error", "assertion_error"):
        reason = error["msg"].partition(", ")[2]
        about = _ABOUT.match(reason)  # an option below: the place is its own
        option = about and node.at(about[1])
        return (option.origin, join(key, reason)) if option else (node.origin, f"{subject}: {reason}")
    return node.origin, f"{subject}: must be {allowed}"


def _nested(unknown: str, node: Node, takes: list[str]) -> str:
    """Of a dotted key in a file: how to write it."""
    first, *parts = unknown.split(".")
    inner = functools.reduce(lambda text, part: f"{{{part}: {text}}}", reversed(parts), shown(node.plain()))
    return f"write {first}: {inner}; " if parts and first in takes else ""


def _meant(unknown: str, kind: str, name: str, key: str, takes: list[str]) -> str:
    """Where an unknown key belongs: in another choice, in another section, or here with another spelling."""
    for other in SECTIONS if kind or name == RECIPE else ():
        for choice, cls in registered(other).items():
            if unknown in cls.Config.model_fields:
                elsewhere = other == kind and choice != name
                return f"{choice} has it; " if elsewhere else f"did you mean {other}.{unknown}? "
    return did_you_mean(unknown, takes, f"{key}." if key else "")
