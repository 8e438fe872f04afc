"""A named variant of a method: the same class with other defaults."""

from __future__ import annotations

import typing
from dataclasses import field, make_dataclass
from typing import Any, TypeVar

from .base import Method

M = TypeVar("M", bound=Method)


def preset(base: type[M], name: str, doc: str, **changes: Any) -> type[M]:
    """A frozen subclass of `base` under `name`; `changes` are its new defaults or attributes.

    Raises TypeError for a change that `base` has no field or class attribute for.
    """
    hints = typing.get_type_hints(base, include_extras=True)
    fields = base.__dataclass_fields__  # class variables are listed there, too
    defaults, attributes = [], {"name": name, "__doc__": doc, "__module__": base.__module__}
    for key, value in changes.items():
        if key not in hints:
            raise TypeError(f"{key}={value!r}: {base.__name__} has no such field or attribute")
        if key in fields and typing.get_origin(hints[key]) is not typing.ClassVar:
            defaults.append((key, hints[key], field(default=value)))
        else:
            attributes[key] = value
    title = "".join(part.capitalize() for part in name.split("-"))
    made = make_dataclass(title, defaults, bases=(base,), namespace=attributes, frozen=True)
    return typing.cast(type[M], made)
