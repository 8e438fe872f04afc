"""Converts a configuration to plain YAML types and saves it."""

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gac.errors import ConfigError
from gac.fields import Choice, choice_of, hints_of
from gac.imports import import_name

from .yaml_text import to_yaml


def dump(obj: Any) -> dict[str, Any]:
    """Convert a dataclass instance to plain YAML types, which `load` converts back."""
    cls: Any = type(obj)  # mypy does not see that a class can be hashed
    hints = hints_of(cls)
    names = (field.name for field in dataclasses.fields(obj))
    return {name: to_plain(getattr(obj, name), hints[name]) for name in names}


def save(obj: Any, path: Path) -> None:
    """Write `dump(obj)` to `path` as YAML, atomically."""
    save_text(path, to_yaml(dump(obj)))


def save_text(path: Path, text: str) -> None:
    """Write a text file atomically: readers see the old file or the complete new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def to_plain(value: Any, hint: Any = None) -> Any:
    """Convert `value` to plain YAML types; add `name` if `hint` declares a choice."""
    choice = choice_of(hint)
    if choice is not None and callable(value) and not dataclasses.is_dataclass(value):
        return _name(value, choice)
    if dataclasses.is_dataclass(value):
        return (
            dump(value) if choice is None else {"name": _name(type(value), choice), **dump(value)}
        )
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def _name(value: Any, choice: Choice) -> str:
    """The name of a class or function in a configuration."""
    names = [name for name, cls in choice.table().items() if cls is value]
    name = names[0] if names else import_name(value)
    if name is None:
        listed = ", ".join(choice.table())
        raise ConfigError(f"{value.__name__} is not one of {listed}, and cannot be imported")
    return name
