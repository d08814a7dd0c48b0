"""The text of `tandem show`: what there is to choose from."""

import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from tandem.recipe.document import find, names_recipe, recipes
from tandem.recipe.resolve import load
from tandem.recipe.settings import (
    SECTIONS,
    Settings,
    UserError,
    default_name,
    describe,
    did_you_mean,
    is_choice,
    register_all,
    registered,
    settings_in,
)

KINDS = (*SECTIONS, "analysis")
"""What can be looked up: sections of a recipe, and analyses of a run."""


def overview() -> str:
    """Every section with its choices, every recipe."""
    register_all()
    rows: list[tuple[str, str]] = []
    for kind in KINDS:
        if is_choice(kind):
            rows += [(kind, "one of"), *_choices(kind)]
        else:
            rows += [(kind, _first_line(cls)) for cls in registered(kind).values()]
    named = recipes()
    studies = [name for name in named if name.startswith("studies/")]
    for title, names in ("recipes", [name for name in named if name not in studies]), ("studies", studies):
        rows += [("", ""), (title, "")] if names else []
        rows += [(f"  {name}", _comment(named[name])) for name in names]
    return f"{columns(rows)}\n\n`tandem show` with one of these names tells more."


def explain(name: str, overrides: Iterable[str] = ()) -> str:
    """A section, a choice with its options, or a recipe with the origin of each value.

    Raises: UserError for an unknown name, for overrides of anything but a recipe, and for mistakes in the recipe.
    """
    if names_recipe(name):
        path = find(name)
        title = f"{path}  {_comment(path)}".rstrip()
        recipe = load(name, overrides)
        return "\n\n".join([title, columns(recipe.table()), *recipe.notes])
    register_all()
    if overrides:
        raise UserError(f"{name} {' '.join(overrides)}: only a recipe takes overrides")
    if name in KINDS and is_choice(name):
        return columns([(f"{name}.name", "one of"), *_choices(name)])
    found = [(kind, registered(kind)[name]) for kind in KINDS if name in registered(kind)]
    if not found:
        known = [*KINDS, *recipes(), *(choice for kind in KINDS for choice in registered(kind))]
        raise UserError(f"{name}: nothing has this name; {did_you_mean(name, known)}`tandem show` lists what there is")
    return "\n\n".join(_explain_class(kind, name, cls) for kind, cls in found)


def _explain_class(kind: str, name: str, cls: Any) -> str:
    title = f"{kind}.name: {name}" if is_choice(kind) else kind
    # An analysis says at the head of its file what the numbers of its record are.
    head = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "") if kind == "analysis" else ""
    return "\n\n".join(filter(None, (title, _text(cls), _text(cls.Config), columns(_options(cls.Config, kind)), head)))


def _options(config: type[Settings], prefix: str) -> Iterator[tuple[str, ...]]:
    """For each option its key with the default, and what it takes; below, its description and its nested options."""
    for name, field in config.model_fields.items():
        key, takes = f"{prefix}.{name}", describe(field.annotation, field.metadata)
        if field.is_required():
            yield key, f"required: {takes}"
        else:
            default = to_jsonable_python(field.get_default(call_default_factory=True))
            yield f"{key} = {json.dumps(default)}", takes
        for line in (field.description or "").splitlines():
            yield (f"    {line}",)
        if inner := settings_in(field.annotation):
            yield from _options(inner, key)


def _choices(kind: str) -> list[tuple[str, str]]:
    mark = {default_name(kind): "(default) "}
    return [(f"  {name}", mark.get(name, "") + _first_line(cls)) for name, cls in registered(kind).items()]


def _text(cls: type) -> str:
    """The class's own docstring, not an inherited one."""
    return inspect.cleandoc(cls.__doc__ or "")


def _first_line(cls: Any) -> str:
    return next(iter((_text(cls.Config) or _text(cls)).splitlines()), "")


def _comment(path: Path) -> str:
    """The first line of a recipe, if it is a comment; errors in a file are reported when it is loaded."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            first = lines.readline()
    except OSError:
        return ""
    return first.lstrip("# ").strip() if first.startswith("#") else ""


def columns(rows: Iterable[Sequence[str]], right: bool = False) -> str:
    """Rows in aligned columns, flush left, without padding after the last cell; or, with `right`, all but the first
    column flush right."""
    rows, widths = list(rows), {}
    for i, cell in (pair for row in rows for pair in enumerate(row if right else row[:-1])):
        widths[i] = max(widths.get(i, 0), len(cell))
    pad = lambda i, cell: cell.rjust(widths[i]) if right and i else cell.ljust(widths.get(i, 0))
    return "\n".join("  ".join(pad(i, cell) for i, cell in enumerate(row)).rstrip() for row in rows)
