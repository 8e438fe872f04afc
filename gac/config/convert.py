"""Converts the values of a configuration to the types of its fields, and names those types."""

import difflib
import enum
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from gac.errors import ConfigError

from .yaml_text import YamlError, parse_yaml

MAX_LISTED_NAMES = 40  # longer lists, as that of the methods, are abbreviated in errors
TRUE_TEXTS, FALSE_TEXTS = ("true", "yes", "on"), ("false", "no", "off")


class Override(str):
    """The text of a `key=value` override, which is converted to the field's type."""


def type_name(hint: Any) -> str:
    """Format an annotation for the help: `float | null`, `list of int`, `a | b`."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return type_name(args[0])
    if origin in (Union, types.UnionType):
        return " | ".join(map(type_name, args))
    if origin is Literal:
        return " | ".join(map(str, args))
    if hint is type(None):
        return "null"
    if origin is Mapping:
        return "mapping"
    if origin is tuple:
        if Ellipsis in args:
            return f"list of {type_name(args[0])}"
        return f"[{', '.join(map(type_name, args))}]"
    if issubclass(hint, enum.Enum):
        return " | ".join(member.name.lower() for member in hint)
    return {str: "text", Any: "text | mapping"}.get(hint, hint.__name__)


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """`; did you mean 'x'?` with the closest valid name, or an empty string."""
    matches = difflib.get_close_matches(name.lower(), list(valid), cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def unknown_name_message(where: str, key: Any, valid: Mapping[str, Any], noun: str) -> str:
    """Error message for a key or name that is not in `valid`."""
    suggestion = did_you_mean(str(key), valid)
    listed = ", ".join(valid) or f"none ({where.rpartition('.')[0] or 'it'} has no {noun}s)"
    if len(valid) > MAX_LISTED_NAMES:
        closest = difflib.get_close_matches(str(key), list(valid), n=8, cutoff=0.5)
        listed = (
            f"{', '.join(closest)}{'; ' if closest else ''}`gac methods` lists all {len(valid)}"
        )
    return f"{where}: unknown {noun} {str(key)!r}{suggestion or '.'} Valid {noun}s: {listed}"


def join(where: str, key: Any) -> str:
    """The dotted key of a nested `key`."""
    return f"{where}.{key}" if where else str(key)


def short_repr(value: Any) -> str:
    """`repr(value)`, cut to 60 characters."""
    text = repr(str(value)) if isinstance(value, Override) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def parse_value(text: str, where: str) -> Any:
    """Parse the value of an override as YAML. Raises ConfigError."""
    try:
        return parse_yaml(str(text))
    except YamlError as error:
        raise ConfigError(f"{where}: {str(text)!r} is not valid YAML: {error}") from error


def parse_overrides(value: Any, where: str) -> Any:
    """`value` with every nested Override parsed as YAML."""
    if isinstance(value, Override):
        return parse_value(value, where)
    if isinstance(value, Mapping):
        return {key: parse_overrides(item, join(where, key)) for key, item in value.items()}
    return value


def convert_scalar(hint: Any, value: Any, where: str) -> Any:
    """Convert `value` to `hint`; if `hint` is no scalar type, only parse overrides in `value`."""
    convert: dict[Any, Callable[[Any], Any]] = {
        str: _as_str,
        bool: _as_bool,
        int: _as_int,
        float: _as_float,
    }
    if hint not in convert:
        return parse_overrides(value, where)  # Any, object and types that have no YAML equivalent
    if isinstance(value, Override) and (hint is not str or value.lower() in ("null", "~")):
        value = parse_value(value, where)
    try:
        return convert[hint](value)
    except (TypeError, ValueError, OverflowError):
        kind = {str: "text", bool: "true or false", int: "a whole number"}.get(hint, "a number")
        if hint is str and not isinstance(value, dict | list | None):
            kind += " (put it in quotes)"
        raise ConfigError(
            f"{where}: null is not allowed: give {kind}"
            if value is None
            else f"{where}: expected {kind}, got {short_repr(value)}"
        ) from None


def _as_str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return str(value)


def _as_bool(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in TRUE_TEXTS + FALSE_TEXTS:
        return value.lower() in TRUE_TEXTS
    if not isinstance(value, bool):
        raise TypeError
    return value


def _as_float(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)


def _as_int(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    if isinstance(value, int):
        return value
    number = float(value)  # 1e3 is a whole number too
    if number != int(number):
        raise ValueError
    return int(number)


def convert_literal(options: tuple, value: Any, where: str) -> Any:
    """The literal in `options` that equals `value`. Raises ConfigError if there is none."""
    if value in options:
        return options[options.index(value)]  # `value` may be an Override
    listed = ", ".join(map(str, options))
    suggestion = did_you_mean(str(value), map(str, options))
    raise ConfigError(f"{where}: {short_repr(value)} is not one of {listed}{suggestion}")


def convert_enum(hint: type[enum.Enum], value: Any, where: str) -> enum.Enum:
    """The member of `hint` whose name or value is `value`. Raises ConfigError if there is none."""
    if isinstance(value, hint):
        return value
    for member in hint:
        if str(value).lower() in (member.name.lower(), str(member.value).lower()):
            return member
    names = [member.name.lower() for member in hint]
    suggestion = did_you_mean(str(value).lower(), names)
    raise ConfigError(f"{where}: {short_repr(value)} is not one of {', '.join(names)}{suggestion}")
