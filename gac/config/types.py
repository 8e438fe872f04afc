"""Field annotations, type names and scalar conversion for the configuration modules."""

import difflib
import enum
import functools
import os
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from gac.errors import ConfigError, is_count, is_real, require

from .yaml_text import YamlError, parse_yaml

MAX_LISTED_NAMES = 40  # longer lists, as that of the methods, are abbreviated in errors
TRUE_TEXTS, FALSE_TEXTS = ("true", "yes", "on"), ("false", "no", "off")


@dataclass(frozen=True)
class Choice:
    """Marks a field as one of several dataclasses: `Annotated[Method, Choice(lambda: METHODS)]`.

    In YAML such a field is `{name: gac, ema_decay: 0.95}`, or just `gac` for all defaults. `name`
    selects the class; the other keys are its fields.
    """

    table: Callable[[], Mapping[str, type]]
    """Returns name -> dataclass; a function, so that the table can be imported lazily."""
    family: Callable[[type], str] = lambda cls: "names"
    """Returns the heading under which the help lists a class."""


class Valid(NamedTuple):
    """The valid values of a field, as part of its annotation; see `Checked`."""

    use: str
    """How an error describes them."""
    accepts: Callable[[Any], bool]


def number(use: str, accepts: Callable[[float], bool] = lambda x: True) -> Valid:
    """Finite numbers that `accepts` accepts."""
    return Valid(use, lambda x: is_real(x) and accepts(x))


def one_of(*values: Any) -> Valid:
    """One of some values."""
    return Valid(f"one of {', '.join(map(str, values))}", lambda x: x in values)


Number = Annotated[float, number("a finite number")]
NonNegative = Annotated[float, number("a number >= 0", lambda x: x >= 0)]
Positive = Annotated[float, number("a number > 0", lambda x: x > 0)]
Share = Annotated[float, number("a number in [0, 1]", lambda x: 0 <= x <= 1)]
PositiveShare = Annotated[float, number("a number in (0, 1]", lambda x: 0 < x <= 1)]
Decay = Annotated[float, number("a number in [0, 1)", lambda x: 0 <= x < 1)]
Natural = Annotated[int, Valid("an integer >= 0", is_count)]
Count = Annotated[int, Valid("an integer >= 1", functools.partial(is_count, minimum=1))]


class Checked:
    """Base class of dataclasses whose values must be valid by the annotations of their fields."""

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not valid; None is left to the type."""
        cls: Any = type(self)  # mypy does not see that a class can be hashed
        for name, valid in _conditions(cls):
            value = getattr(self, name)
            require(value is None or valid.accepts(value), name, value, valid.use)


@functools.cache
def hints_of(cls: Any) -> dict[str, Any]:
    """The annotation of each field of a dataclass."""
    return get_type_hints(cls, include_extras=True)


@functools.cache
def _conditions(cls: Any) -> list[tuple[str, Valid]]:
    """Each condition in the annotations of `cls`, with the name of its field."""
    return [
        (name, extra)
        for name, hint in hints_of(cls).items()
        for part in (hint, *get_args(hint))
        for extra in getattr(part, "__metadata__", ())
        if isinstance(extra, Valid)
    ]


def setting(default: Any, *, only_with: str = "", may_change: bool = False) -> Any:
    """A field of a configuration.

    Args:
        default: the value if the key is absent.
        only_with: when the key has an effect: "a=x or b, c" means if the field `a` of the same
            class is x or `b` is set, and `c` is set. See `check_effects`.
        may_change: whether a run may resume with another value of the key, or of its subkeys.
    """
    return field(default=default, metadata={"only_with": only_with, "may_change": may_change})


def expanded(path: str) -> str:
    """`path` with `~` and `$NAME` expanded."""
    # a Path would lose a leading ./, and fail for an unknown user
    return os.path.expanduser(os.path.expandvars(path))  # noqa: PTH111


def expand_paths(config: Any, *names: str) -> None:
    """Expand `~` and `$NAME` in the fields `names` of a configuration, in place."""
    for name in names:
        value = getattr(config, name)
        object.__setattr__(config, name, value and expanded(value))


def check_effects(config: Any, prefix: str = "", missing: str = "") -> None:
    """Raise ValueError for a key that is set although what it needs for an effect is not.

    config: a dataclass; its `setting`s are checked, also those of nested dataclasses.
    prefix: prepended to the names of its keys. missing: what a key around `config` needs.
    """
    for item in fields(config):
        key, value, lacks = f"{prefix}{item.name}", getattr(config, item.name), missing
        for need in filter(None, item.metadata.get("only_with", "").split(", ")):
            if not any(_holds(config, *choice.split("=")) for choice in need.split(" or ")):
                lacks = prefix + need.replace(" or ", f" or {prefix}")
        if is_dataclass(value):
            check_effects(value, f"{key}.", lacks)
        elif lacks:
            require_default(config, item.name, key, f"without {lacks}")


def require_default(config: Any, name: str, key: str, why: str) -> None:
    """Raise ValueError unless the field `name`, the configuration's `key`, has its default."""
    value, default = getattr(config, name), type(config).__dataclass_fields__[name].default
    if value != default:
        raise ValueError(
            f"{key}={getattr(value, 'value', value)!r} has no effect {why}: remove the key"
        )


def _holds(config: Any, name: str, text: str | None = None) -> bool:
    value = getattr(config, name)
    return bool(value) if text is None else text in (str(value), f"{value}.0")


class Override(str):
    """The text of a `key=value` override, which is converted to the field's type."""


def choice_of(hint: Any) -> Choice | None:
    """The Choice in an annotation; None if there is no Choice."""
    return next((arg for arg in get_args(hint) if isinstance(arg, Choice)), None)


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
