"""Stands in for pydantic in exported code: settings as config.json has them, checked when they were written.

A network may make others of them, by a constructor or as a copy; these are not checked.
"""

from collections.abc import Callable
from typing import Any, ClassVar, get_args, get_origin, get_type_hints


def Field(default: Any = None, *, default_factory: Callable[[], Any] | None = None, **bounds: Any) -> Any:
    """The default of an option."""
    return default if default_factory is None else default_factory()


class Settings:
    """Options by name, including options within options."""

    model_fields: ClassVar[dict[str, Any]] = {}
    """Names and types."""

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls)
        cls.model_fields = {name: hint for name, hint in hints.items() if get_origin(hint) is not ClassVar}

    def __init__(self, **values: Any):
        for name, hint in self.model_fields.items():
            value = values.get(name, getattr(type(self), name, None))
            inner = [cls for cls in (hint, *get_args(hint)) if isinstance(cls, type) and issubclass(cls, Settings)]
            setattr(self, name, inner[0](**value) if inner and isinstance(value, dict) else value)
        for name, value in self.derive().items():  # of settings that a network makes itself
            if getattr(self, name) is None:
                setattr(self, name, value)

    def derive(self) -> dict[str, Any]:
        return {}

    def model_copy(self, *, update: dict[str, Any]) -> "Settings":
        return type(self)(**vars(self) | update)

    def shared_with(self, other: "type[Settings]") -> dict[str, Any]:
        return {key: getattr(self, key) for key in other.model_fields}
