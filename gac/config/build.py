"""Fills nested frozen dataclasses from YAML and `key.sub=value` overrides."""

import contextlib
import dataclasses
import enum
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from gac.errors import ConfigError
from gac.fields import NoEffect, choice_of, hints_of
from gac.imports import find_user_code, load_object

from .convert import (
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
from .early import check_names, reject_inner_key
from .yaml_text import read_yaml

T = TypeVar("T")
NULL_TEXTS = ("null", "none", "~", "")


def load(cls: type[T], source: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> T:
    """Read a YAML file or a mapping, apply `key.sub=value` overrides and build the dataclass `cls`.

    Keys that are absent keep the defaults of `cls`. Raises ConfigError for an unreadable file, an
    unknown or missing key, a value of the wrong type, or a value that `cls` itself rejects.
    """
    data, origin = _read(source, overrides)
    with _origin_named(origin, overrides):
        return _build(cls, data, "")


def load_early(name: str, file: Path | None, overrides: Sequence[str]) -> Any:
    """`load` the class `module:Class`; a misspelled key is found before its import."""
    find_user_code(file)
    data, origin = _read(file or {}, overrides)
    with _origin_named(origin, overrides):
        module, _, class_name = name.partition(":")
        check_names((module, class_name), data)
    return load(getattr(import_module(module), class_name), file or {}, overrides)


def _read(source: Path | Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The data with all overrides, and the file's name for error messages."""
    if isinstance(source, Mapping):
        data, origin = dict(source), ""
    else:
        data, origin = read_yaml(Path(source)), f"{source}: "
    for override in overrides:
        data = _with_override(data, override)
    return data, origin


@contextlib.contextmanager
def _origin_named(origin: str, overrides: Sequence[str]) -> Iterator[None]:
    """Let an error begin with the file or with `--set`, wherever its key was given."""
    try:
        yield
    except ConfigError as error:
        keys = [re.escape(override.partition("=")[0].strip()) for override in overrides]
        overridden = any(re.match(rf"{key}(?![\w-])", str(error)) for key in keys)
        raise ConfigError(f"{'--set ' if overridden else origin}{error}") from error.__cause__


def choose(table: Mapping[str, type], data: Any, where: str = "method", default: Any = None) -> Any:
    """Build one of several dataclasses: `data` is a name, or a mapping with `name` and fields.

    A name `package.module:Class` imports the user's own dataclass, and `package.module:function` a
    function, which has no fields.

    table: name -> dataclass. where: the configuration key, for error messages. default: instance
        whose fields are replaced if `data` has no `name`. Raises ConfigError.
    """
    if dataclasses.is_dataclass(data) or callable(data):
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
    if ":" in name:
        chosen: Any = load_object(name, where)
        if not isinstance(chosen, type) and not fields:
            return chosen
        if not dataclasses.is_dataclass(chosen):
            kind = "a class" if isinstance(chosen, type) else f"a function, without {min(fields)!r}"
            raise ConfigError(f"{where}: {name!r} is {kind}; use a dataclass")
        return _build(chosen, fields, where)
    if name not in table:
        raise ConfigError(unknown_name_message(join(where, "name"), name, table, "name"))
    return _build(table[name], fields, where)


def _with_override(data: dict[str, Any], override: str) -> dict[str, Any]:
    """A copy of `data` with one `key.sub=value` set, creating intermediate mappings as needed."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {override}: use KEY=VALUE, e.g. --set steps=100")
    result = node = dict(data)
    *parents, last = key.split(".")
    for parent in parents:
        child = node.get(parent)
        child = parse_value(child, parent) if isinstance(child, Override) else child
        if isinstance(child, str):  # `method: gac` is short for `method: {name: gac}`
            child = {"name": child}
        if child is not None and not isinstance(child, Mapping):
            raise ConfigError(
                f"--set {override}: {parent} is {short_repr(child)}, which has no keys"
            )
        node[parent] = node = dict(child or {})
    node[last] = Override(text)
    return result


def _build(cls: Any, data: Any, where: str, default: Any = None) -> Any:
    """Build `cls` from a mapping; its keys replace the fields of `default`, if it is a `cls`."""
    default = default if isinstance(default, cls) else None
    if isinstance(data, Override):
        data = parse_value(data, where)
    if isinstance(data, cls):
        return data
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{where}: expected a mapping like {{key: value}}, got {short_repr(data)}"
        )
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = hints_of(cls)
    values = {}
    for key, value in data.items():
        if key not in fields:
            sections = {
                name: getattr(field.default, "__dataclass_fields__", ())
                for name, field in fields.items()
            }
            reject_inner_key(key, sections, where)
            raise ConfigError(unknown_name_message(join(where, key), key, fields, "key"))
        inherited = _field_default(fields[key]) if default is None else getattr(default, key)
        values[key] = convert(hints[key], value, join(where, key), inherited)
    required = [n for n, f in fields.items() if f.default is f.default_factory is MISSING]
    missing = [name for name in required if name not in values]
    if missing and default is None:
        raise ConfigError(f"{join(where, missing[0])} is required")
    try:
        return cls(**values) if default is None else dataclasses.replace(default, **values)
    except NoEffect as error:
        raise ConfigError(str(error.inside(where))) from error
    except (TypeError, ValueError) as error:  # raised by the dataclass's own validation
        # an error that begins with a field, like `lr=0`, becomes one of the dotted key
        dot = "." if re.split(r"\W", str(error))[0] in fields else ": "
        raise ConfigError(f"{where}{dot}{error}" if where else str(error)) from error


def convert(hint: Any, value: Any, where: str, default: Any = None) -> Any:
    """Convert `value` to the type `hint`, or raise ConfigError."""
    origin, args, choice = get_origin(hint), get_args(hint), choice_of(hint)
    if choice is not None:
        if isinstance(value, Override):
            value = parse_value(value, where)
        return choose(choice.table(), value, where, default)
    if origin is Annotated:
        return convert(args[0], value, where, default)
    if origin in (Union, types.UnionType):
        return _convert_union(args, value, where, default)
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, where, default)
    if origin is Literal:
        return convert_literal(args, value, where)
    if origin is tuple:
        return _convert_tuple(args, value, where)
    if origin is Mapping:
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
    # str accepts any text, so it comes last, but a text is not a list of one
    is_text = isinstance(value, Override) and not ("," in value or value.startswith("["))
    for member in sorted(members, key=lambda member: member is str):
        if is_text and str in members and get_origin(member) is tuple:
            continue
        try:
            return convert(member, value, where, default)
        except ConfigError:
            if len(members) == 1:
                raise
    expected = " | ".join(map(type_name, args))
    raise ConfigError(f"{where}: expected {expected}, got {short_repr(value)}")


def _convert_tuple(args: tuple, value: Any, where: str) -> tuple:
    if isinstance(value, Override):
        items = parse_value(value, where)
        value = items if isinstance(items, list) else [*map(Override, re.split(r", *", value))]
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where}: expected a list like [a, b], got {short_repr(value)}")
    hints = args[:1] * len(value) if Ellipsis in args else args
    if len(value) != len(hints):
        raise ConfigError(f"{where}: expected {len(hints)} values, got {short_repr(value)}")
    return tuple(convert(hints[i], item, f"{where}[{i}]") for i, item in enumerate(value))


def _convert_mapping(args: tuple, value: Any, where: str) -> dict:
    if isinstance(value, Override):
        value = parse_value(value, where)
    if not isinstance(value, Mapping):
        shown = short_repr(value)
        raise ConfigError(f"{where}: expected a mapping like {{key: value}}, got {shown}")
    key_hint, value_hint = args
    return {
        convert(key_hint, key, where): convert(value_hint, item, join(where, key))
        for key, item in value.items()
    }


def _field_default(field: dataclasses.Field) -> Any:
    if field.default is not MISSING:
        return field.default
    return None if field.default_factory is MISSING else field.default_factory()
