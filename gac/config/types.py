"""Shared by the configuration modules: the error, field annotations, type names and scalar
conversion.
"""

import difflib
import enum
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from gac.errors import ConfigError

from .yaml_text import YamlError, parse_yaml

MANY = 40  # longer lists of valid names are abbreviated in errors
TRUE_WORDS, FALSE_WORDS = ("true", "yes", "on"), ("false", "no", "off")


@dataclass(frozen=True)
class Choice:
    """Marks a field as one of several dataclasses: `Annotated[Method, Choice(lambda: METHODS)]`.

    In YAML such a field is `{name: gac, ema_decay: 0.95}`, or just `gac` for all defaults: `name`
    picks the class, the remaining keys are its fields.
    """

    table: Callable[[], Mapping[str, type]]
    """Returns name -> dataclass; a function, so that the table can be imported lazily."""
    family: Callable[[type], str] | None = None
    """Returns the heading under which the help lists a class; None: one list without headings."""


class Override(str):
    """The text of a `key=value` override, which is converted to the field's type."""


def choice_of(hint: Any) -> Choice | None:
    """The Choice in an annotation, also inside an optional; None if there is none."""
    if get_origin(hint) is Annotated:
        return next((mark for mark in get_args(hint)[1:] if isinstance(mark, Choice)), None)
    if get_origin(hint) in (Union, types.UnionType):
        return next(filter(None, map(choice_of, get_args(hint))), None)
    return None


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
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return " | ".join(member.name.lower() for member in hint)
    base = origin or hint
    if isinstance(base, type) and issubclass(base, Mapping):
        return "mapping"
    if isinstance(base, type) and issubclass(base, Sequence) and base is not str:
        items = [type_name(arg) for arg in args if arg is not Ellipsis]
        fixed = base is tuple and Ellipsis not in args
        return f"[{', '.join(items)}]" if fixed else f"list of {', '.join(items)}"
    return {str: "text", Path: "path", Any: "text | mapping"}.get(
        hint, getattr(hint, "__name__", str(hint))
    )


def nearest(word: str, valid: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def unknown_word(where: str, key: Any, valid: Mapping[str, Any], noun: str) -> str:
    near = nearest(str(key), valid)
    listed = ", ".join(valid)
    if len(valid) > MANY:
        few = difflib.get_close_matches(str(key), list(valid), n=8, cutoff=0.0)
        listed = f"{', '.join(few)} and {len(valid) - len(few)} more; the help lists them"
    return f"{where}: unknown {noun} {str(key)!r}{near or '.'} Valid {noun}s: {listed}"


def join(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)


def short(value: Any) -> str:
    text = repr(str(value)) if isinstance(value, Override) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def parsed(text: str, where: str) -> Any:
    try:
        return parse_yaml(str(text))
    except YamlError as error:
        raise ConfigError(f"{where}: {str(text)!r} is not valid YAML: {error}") from error


def without_overrides(value: Any) -> Any:
    if isinstance(value, Override):
        return parsed(value, "override")
    if isinstance(value, Mapping):
        return {key: without_overrides(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_overrides(item) for item in value]
    return value


def convert_scalar(hint: Any, value: Any, where: str) -> Any:
    convert = {str: _as_str, Path: _as_path, bool: _as_bool, int: _as_int, float: _as_float}
    if hint not in convert:
        return without_overrides(value)  # Any, object and types that have no YAML equivalent
    if isinstance(value, Override) and hint not in (str, Path):
        value = parsed(value, where)
    try:
        return convert[hint](value)
    except (TypeError, ValueError, OverflowError):
        expected = {str: "text", Path: "a path", bool: "true or false", int: "a whole number"}
        hint_text = expected.get(hint, "a number")
        quote = " (put it in quotes)" if hint is str and not isinstance(value, dict | list) else ""
        raise ConfigError(f"{where}: expected {hint_text}{quote}, got {short(value)}") from None


def _as_str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return str(value)


def _as_path(value: Any) -> Path:
    return Path(value)


def _as_bool(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in TRUE_WORDS + FALSE_WORDS:
        return value.lower() in TRUE_WORDS
    if not isinstance(value, bool):
        raise TypeError
    return value


def _as_float(value: Any) -> float:
    if isinstance(value, bool) or value is None:
        raise TypeError
    return float(value)


def _as_int(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    if isinstance(value, int):
        return value
    number = float(value)  # 1e3 is a whole number too
    if not math.isfinite(number) or number != int(number):
        raise ValueError
    return int(number)


def convert_literal(options: tuple, value: Any, where: str) -> Any:
    candidates = [value, parsed(value, where)] if isinstance(value, Override) else [value]
    for option in options:
        if any(option == item and type(option) is _plain_type(item) for item in candidates):
            return option
    listed = ", ".join(map(str, options))
    near = nearest(str(value), map(str, options))
    raise ConfigError(f"{where}: {short(value)} is not one of {listed}{near}")


def convert_enum(hint: type[enum.Enum], value: Any, where: str) -> enum.Enum:
    if isinstance(value, hint):
        return value
    for member in hint:
        if str(value).lower() in (member.name.lower(), str(member.value).lower()):
            return member
    names = [member.name.lower() for member in hint]
    near = nearest(str(value).lower(), names)
    raise ConfigError(f"{where}: {short(value)} is not one of {', '.join(names)}{near}")


def _plain_type(value: Any) -> type:
    return str if isinstance(value, Override) else type(value)
