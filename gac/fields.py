"""The fields of a frozen dataclass of options: their valid values, and when a key has an effect."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from gac.errors import is_count, is_real, require


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


class NoEffect(ValueError):
    """A key is set, but none of the keys that would give it an effect."""

    def __init__(self, key: str, value: Any, needs: Sequence[str]) -> None:
        self.key, self.value, self.needs = key, value, needs
        super().__init__(_no_effect(key, value, f"without {' or '.join(needs)}"))

    def inside(self, section: str) -> "NoEffect":
        """The error for a configuration that is the value of the key `section`; "": of no key."""
        prefix = f"{section}." if section else ""
        needs = [f"{prefix}{need}" for need in self.needs]
        return NoEffect(f"{prefix}{self.key}", self.value, needs)


def check_effects(config: Any, prefix: str = "", missing: Sequence[str] = ()) -> None:
    """Raise NoEffect for a key that is set although what it needs for an effect is not.

    config: a dataclass; its `setting`s are checked, also those of nested dataclasses.
    prefix: prepended to the names of its keys.
    missing: alternatives, one of which a key around `config` needs.
    """
    for item in fields(config):
        key, value, lacks = f"{prefix}{item.name}", getattr(config, item.name), missing
        for need in filter(None, item.metadata.get("only_with", "").split(", ")):
            if not any(_holds(config, *choice.split("=")) for choice in need.split(" or ")):
                lacks = [f"{prefix}{choice}" for choice in need.split(" or ")]
        if is_dataclass(value):
            check_effects(value, f"{key}.", lacks)
        elif lacks and value != item.default:
            raise NoEffect(key, value, lacks)


def require_default(config: Any, name: str, key: str, why: str) -> None:
    """Raise ValueError unless the field `name`, the configuration's `key`, has its default."""
    value, default = getattr(config, name), type(config).__dataclass_fields__[name].default
    if value != default:
        raise ValueError(_no_effect(key, value, why))


def _no_effect(key: str, value: Any, why: str) -> str:
    return f"{key}={getattr(value, 'value', value)!r} has no effect {why}: remove the key"


def _holds(config: Any, name: str, text: str | None = None) -> bool:
    value = getattr(config, name)
    return bool(value) if text is None else text in (str(value), f"{value}.0")


def choice_of(hint: Any) -> Choice | None:
    """The Choice in an annotation; None if there is no Choice."""
    return next((arg for arg in get_args(hint) if isinstance(arg, Choice)), None)
