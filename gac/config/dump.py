"""Converts a configuration to plain YAML types and saves it."""

import dataclasses
import enum
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .types import ConfigError, choice_of
from .yaml_text import to_yaml


def dump(obj: Any) -> dict[str, Any]:
    """Convert a dataclass instance to plain YAML types, which `load` converts back."""
    hints = typing.get_type_hints(type(obj), include_extras=True)
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
    if dataclasses.is_dataclass(value):
        choice = choice_of(hint)
        if choice is None:
            return dump(value)
        names = [name for name, cls in choice.table().items() if cls is type(value)]
        if not names:
            raise ConfigError(f"{type(value).__name__} is not one of {', '.join(choice.table())}")
        return {"name": names[0], **dump(value)}
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value
