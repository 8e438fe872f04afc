"""A named variant of a method: the same class with other defaults."""

from __future__ import annotations

import typing
from dataclasses import field, fields, make_dataclass
from typing import Any, TypeVar

from .base import Method

M = TypeVar("M", bound=Method)
_PRESETS: dict[str, type[Method]] = {}  # by name, for pickle


def preset(base: type[M], name: str, doc: str, **changes: Any) -> type[M]:
    """Create a frozen subclass of `base` called `name`.

    `changes` override its defaults or class attributes.

    Raises:
        TypeError: `base` has no such field or class attribute.
    """
    hints = typing.get_type_hints(base, include_extras=True)
    attributes: dict[str, Any] = {"name": name, "__doc__": doc, "__module__": base.__module__}
    defaults = []
    for key, value in changes.items():
        if key not in hints:
            raise TypeError(f"{key}={value!r}: {base.__name__} has no such field or attribute")
        if typing.get_origin(hints[key]) is not typing.ClassVar:
            defaults.append((key, hints[key], field(default=value)))
        else:
            attributes[key] = value
    attributes["__reduce__"] = _reduce_preset  # pickle could not find the class in its module
    title = "".join(part.capitalize() for part in name.split("-"))
    cls = make_dataclass(title, defaults, bases=(base,), namespace=attributes, frozen=True)
    _PRESETS[name] = cls
    return typing.cast(type[M], cls)


def _reduce_preset(method: Method) -> tuple[Any, ...]:
    """`__reduce__` of a preset: its name and field values."""
    values = {f.name: getattr(method, f.name) for f in fields(method)}
    return _restore, (type(method).name, values)


def _restore(name: str, values: dict[str, Any]) -> Method:
    return _PRESETS[name](**values)
