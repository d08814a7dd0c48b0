"""How a class declares its options, and the registry in which a recipe finds the class by name."""

import difflib
import functools
import importlib
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo

SECTIONS = (  # in the order in which a recipe is written
    *("corpus", "network", "start", "objective", "batch", "optimiser", "schedule"),
    *("training", "evaluation", "sampling", "checkpoint", "log"),
)


class UserError(ValueError):
    """An error that a user can cause and fix. The command prints it without a traceback and exits with `exit_code`."""

    exit_code = 2

    is_told_elsewhere = False
    """True if another process of the same run prints it."""


class Settings(BaseModel):
    """Options: frozen, strict, without unknown keys, every field described by the text under it.

    A field derived from others is declared `X | None = None` and computed by `derive`: it is filled in when the
    Settings object is built, before the subclass's validators run, and stays None only if `derive` leaves it so.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def derive(self) -> dict[str, Any]:
        """Values for the fields left None, from those given. Raises: ValueError where these contradict each other."""
        return {}

    def shared_with(self, other: "type[Settings]") -> dict[str, Any]:
        """Values of the fields that another class declares; this class must have all of them."""
        return {key: getattr(self, key) for key in other.model_fields}

    @model_validator(mode="after")
    def _fill_derived(self) -> "Settings":
        for key in type(self).model_fields:  # NumPy and PyTorch hold 64 bits, and fail far from what names the key
            if isinstance(value := getattr(self, key), int) and value >= 1 << 63:
                raise ValueError(f"{key} = {value}: must be below 2^63")
        for key, value in self.derive().items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)  # frozen for everyone else
        return self


# The registry ----------------------------------------------------------------------------------------------------

Class = TypeVar("Class", bound=type)
_registry: dict[str, dict[str | None, type]] = {}
_default_names: dict[str, str | None] = {}


def register(kind: str, name: str | None = None, default: bool = False) -> Callable[[Class], Class]:
    """Class decorator: `name` in section `kind` of a recipe builds this class, whose options are its `Config`.

    Args:
        kind: a section of the recipe (SECTIONS), or any other word under which things are found by name.
        name: the choice, as written after `name:`; None for a section with one implementation.
        default: taken where a recipe makes no choice.
    Raises: TypeError where the class declares no options or the name is taken.
    """

    def add(cls: Class) -> Class:
        config = getattr(cls, "Config", None)
        if kind in SECTIONS and not (isinstance(config, type) and issubclass(config, Settings)):
            raise TypeError(f"{cls.__qualname__} needs an inner `class Config(Settings)` to be in a recipe")
        choices = _registry.setdefault(kind, {})
        taken = choices.get(name)
        if taken and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"{kind} {name or ''} is {taken.__module__}.{taken.__qualname__} already")
        choices[name] = cls
        if default:
            _default_names[kind] = name
        return cls

    return add


def register_all() -> None:
    """Import every part of Tandem that registers classes, so that a recipe means the same whatever was imported before.

    Called when a recipe is read, not when `tandem.recipe` is imported, which all of these parts do.
    """
    for part in ("corpus", "networks", "objectives", "training", "evaluation", "generation", "analysis"):
        importlib.import_module(f"tandem.{part}")
    plugins()


@functools.cache
def plugins() -> list[str]:
    """Import what other packages register: modules named by entry points of the group "tandem". Returns the packages,
    with their versions."""
    found = entry_points(group="tandem")
    for entry in found:
        try:
            entry.load()
        except Exception as error:
            error.add_note(f"while importing {entry.value}, an entry point of {entry.dist and entry.dist.name}")
            raise
    return sorted({f"{entry.dist.name} {entry.dist.version}" for entry in found if entry.dist})


def registered(kind: str) -> dict[str, type]:
    """The classes of a kind by name; a class registered without a name goes by the name of the kind."""
    return {name or kind: cls for name, cls in _registry.get(kind, {}).items()}


def default_name(kind: str) -> str | None:
    """The choice taken where a recipe makes none; None where it must choose, or has no choice."""
    return _default_names.get(kind)


def is_choice(kind: str) -> bool:
    """True if a recipe makes a choice in this section, with `name:`."""
    return bool(registered(kind)) and None not in _registry[kind]


def is_mapping(section: str, option: str) -> bool:
    """Whether some choice in a section has this option as a mapping of data, such as a mixture, whose keys are not
    options."""
    register_all()
    choices = registered(section).values() if section in SECTIONS else ()
    fields = (cls.Config.model_fields.get(option) for cls in choices)
    return any(field is not None and part_of(field.annotation, "any key") for field in fields)


def require(module: str, extra: str) -> ModuleType:
    """Import a module that only the optional dependencies `extra` install.

    Raises: UserError with the command that installs it. A module that is installed but broken raises its own error.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise UserError(f"{module} is not installed; pip install 'tandem-lm[{extra}]' brings it") from error


# Words for messages ----------------------------------------------------------------------------------------------

_TYPES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    Path: "a path",
    NoneType: "null",
    Any: "anything",
}
_BOUNDS = {
    **{"ge": ">= {}", "gt": "> {}", "le": "<= {}", "lt": "< {}", "multiple_of": "divisible by {}"},
    **{"min_length": "of length >= {}", "max_length": "of length <= {}", "pattern": "matching {}"},
}


def did_you_mean(word: str, words: Iterable[str], prefix: str = "") -> str:
    """A hint to put before the list of allowed words: "did you mean network.window? ", or nothing. For tiny,
    decoder/tiny is the nearest of all."""
    known = list(words)
    parts = [other for other in known if other.endswith(f"/{word}") or word.endswith(f"/{other}")]
    near = parts or difflib.get_close_matches(word, known, n=1)
    return f"did you mean {prefix}{near[0]}? " if near else ""


def counted(number: int, things: str) -> str:
    """A number of things whose name ends in s or es: "1 document", "1 process", "1,200 documents"."""
    return f"{number:,} {things if number != 1 else things[: -2 if things.endswith('sses') else -1]}"


def describe(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """A type and its bounds in words: "a whole number >= 0 or null", "one of tiled, dense"; "tiled, dense or null"."""
    kind, args = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        field = FieldInfo.from_annotation(annotation)
        return describe(field.annotation, field.metadata)
    if kind in (Union, UnionType):
        parts = [describe(arg, () if arg is NoneType else metadata) for arg in args]
        return " or ".join(part.removeprefix("one of ") for part in parts)
    items = ""
    if kind is Literal:
        words = "one of " + ", ".join(map(str, args))
    elif kind is dict:
        words, items = "a mapping", f", each value {describe(args[1])}"
    elif kind is list or (kind is tuple and ... in args):
        words, items = "a list", f", each item {describe(args[0])}"
    elif kind is tuple:
        words = "a list of " + ", then ".join(map(describe, args))
    elif isinstance(annotation, type) and issubclass(annotation, Settings):
        words = "a mapping of " + ", ".join(annotation.model_fields)
    else:
        words = _TYPES.get(annotation, str(annotation))
    bounds = [form.format(getattr(m, b)) for m in metadata for b, form in _BOUNDS.items() if hasattr(m, b)]
    return f"{words} {' and '.join(bounds)}".strip() + items


def settings_in(annotation: Any) -> type[Settings] | None:
    """The Settings class within a type: `Rope` in `Rope | None` and in `list[Rope]`."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return annotation
    return next(filter(None, map(settings_in, get_args(annotation))), None)


def part_of(annotation: Any, part: str | int) -> FieldInfo | None:
    """The field of Settings, item of a list or value of a mapping that `part` names; None for anything else."""
    kind, args = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return part_of(args[0], part)
    if kind in (Union, UnionType):
        return next(filter(None, (part_of(arg, part) for arg in args)), None)
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return annotation.model_fields.get(str(part))
    if kind is dict:
        return FieldInfo.from_annotation(args[1])
    if kind in (list, tuple) and isinstance(part, int):
        return FieldInfo.from_annotation(args[part if kind is tuple and ... not in args else 0])
    return None
