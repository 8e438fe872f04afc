"""Fills nested frozen dataclasses from YAML and `key.sub=value` overrides."""

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from .types import (
    Choice,
    ConfigError,
    Override,
    convert_enum,
    convert_literal,
    convert_scalar,
    join,
    parse_value,
    short_repr,
    type_name,
    unknown_name_message,
)
from .yaml_text import read_yaml

T = TypeVar("T")
NULL_TEXTS = ("null", "none", "~", "")


def load(cls: type[T], source: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> T:
    """Read a YAML file or a mapping, apply `key.sub=value` overrides and build the dataclass `cls`.

    Keys that are absent keep the defaults of `cls`. Raises ConfigError for an unreadable file, an
    unknown or missing key, a value of the wrong type, or a value that `cls` itself rejects.
    """
    if isinstance(source, Mapping):
        data, origin = dict(source), ""
    else:
        data, origin = read_yaml(Path(source)), f"{source}: "
    for override in overrides:
        data = _with_override(data, override)
    try:
        return _build(cls, data, "")
    except ConfigError as error:
        raise ConfigError(f"{origin}{error}") from error.__cause__


def choose(table: Mapping[str, type], data: Any, where: str = "method", default: Any = None) -> Any:
    """Build one of several dataclasses: `data` is a name, or a mapping with `name` and fields.

    table: name -> dataclass. where: the configuration key, for error messages. default: instance
        whose fields are replaced if `data` has no `name`. Raises ConfigError.
    """
    if isinstance(data, tuple(table.values())):
        return data
    if isinstance(data, str):
        data = {"name": data}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: expected a name or a mapping with `name`, got {data!r}")
    fields = {key: value for key, value in data.items() if key != "name"}
    if "name" not in data:
        if default is None:
            raise ConfigError(f"{where}: `name` is missing; use one of {', '.join(table)}")
        return _build(type(default), fields, where, default)
    name = str(data["name"])
    if name not in table:
        raise ConfigError(unknown_name_message(join(where, "name"), name, table, "name"))
    return _build(table[name], fields, where)


def _with_override(data: dict[str, Any], override: str) -> dict[str, Any]:
    """A copy of `data` with one `key.sub=value` set, creating intermediate mappings as needed."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {override!r}: expected key=value or key.sub=value")
    result = node = dict(data)
    *parents, last = key.split(".")
    for parent in parents:
        child = node.get(parent)
        if isinstance(child, str):  # `method: gac` is short for `method: {name: gac}`
            child = {"name": child}
        if child is not None and not isinstance(child, Mapping):
            raise ConfigError(
                f"override {override!r}: {parent!r} is {short_repr(child)}, which has no keys"
            )
        node[parent] = dict(child or {})
        node = node[parent]
    node[last] = Override(text)
    return result


def _build(cls: type, data: Any, where: str, default: Any = None) -> Any:
    """Build `cls` from a mapping; its keys replace the fields of `default`, if there is one."""
    if isinstance(data, Override):
        data = parse_value(data, where)
    if isinstance(data, cls):
        return data
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: expected a mapping of {cls.__name__}, got {short_repr(data)}")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    hints = typing.get_type_hints(cls, include_extras=True)
    values = {}
    for key, value in data.items():
        if key not in fields:
            raise ConfigError(unknown_name_message(join(where, key), key, fields, "key"))
        inherited = _field_default(fields[key]) if default is None else getattr(default, key)
        values[key] = _convert(hints[key], value, join(where, key), inherited)
    required = [n for n, f in fields.items() if f.default is f.default_factory is MISSING]
    missing = [name for name in required if name not in values]
    if missing and default is None:
        raise ConfigError(f"{join(where, missing[0])}: missing; it has no default ({cls.__name__})")
    try:
        return cls(**values) if default is None else dataclasses.replace(default, **values)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:  # raised by the dataclass's own validation
        raise ConfigError(f"{where}: {error}" if where else str(error)) from error


def _convert(hint: Any, value: Any, where: str, default: Any = None) -> Any:
    """Convert `value` to the type `hint`, or raise ConfigError."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        choices = [annotation for annotation in args[1:] if isinstance(annotation, Choice)]
        if choices:
            if isinstance(value, Override) and value.lstrip().startswith("{"):
                value = parse_value(value, where)
            return choose(choices[0].table(), value, where, default)
        return _convert(args[0], value, where, default)
    if origin in (Union, types.UnionType):
        return _convert_union(args, value, where, default)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _build(hint, value, where, default if isinstance(default, hint) else None)
    if origin is Literal:
        return convert_literal(args, value, where)
    base = origin or hint
    if isinstance(base, type) and issubclass(base, (list, tuple, Sequence)) and base is not str:
        return _convert_sequence(base, args, value, where)
    if isinstance(base, type) and issubclass(base, Mapping):
        return _convert_mapping(args, value, where)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return convert_enum(hint, value, where)
    return convert_scalar(hint, value, where)


def _convert_union(args: tuple, value: Any, where: str, default: Any) -> Any:
    none_allowed = type(None) in args
    members = [member for member in args if member is not type(None)]
    null_text = isinstance(value, Override) and value.lower() in NULL_TEXTS
    if none_allowed and (value is None or null_text):
        return None
    if len(members) == 1:
        return _convert(members[0], value, where, default)
    if isinstance(value, Override):
        members.sort(key=lambda member: member is str)  # str accepts any text, so try it last
    exact = [member for member in members if member is type(value)]
    for member in exact + members:
        try:
            return _convert(member, value, where, default)
        except ConfigError:
            continue
    expected = " | ".join(map(type_name, args))
    raise ConfigError(f"{where}: expected {expected}, got {short_repr(value)}")


def _convert_sequence(base: type, args: tuple, value: Any, where: str) -> Any:
    if isinstance(value, Override):
        items = parse_value(value, where)
        value = items if isinstance(items, list) else [Override(v) for v in value.split(",")]
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where}: expected a list like [a, b], got {short_repr(value)}")
    if base is tuple and args and Ellipsis not in args:
        if len(value) != len(args):
            raise ConfigError(f"{where}: expected {len(args)} values, got {short_repr(value)}")
        hints: Sequence[Any] = args
    else:
        hints = [args[0] if args else Any] * len(value)
    converted = [
        _convert(hint, item, f"{where}[{i}]")
        for i, (hint, item) in enumerate(zip(hints, value, strict=True))
    ]
    return converted if base is list else tuple(converted)


def _convert_mapping(args: tuple, value: Any, where: str) -> dict:
    if isinstance(value, Override):
        value = parse_value(value, where)
    if not isinstance(value, Mapping):
        shown = short_repr(value)
        raise ConfigError(f"{where}: expected a mapping like {{key: value}}, got {shown}")
    key_hint, value_hint = args or (Any, Any)
    return {
        _convert(key_hint, key, where): _convert(value_hint, item, join(where, key))
        for key, item in value.items()
    }


def _field_default(field: dataclasses.Field) -> Any:
    if field.default is not MISSING:
        return field.default
    return None if field.default_factory is MISSING else field.default_factory()
