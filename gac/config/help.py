"""Help text for a configuration: every key with its type, default and docstring."""

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from typing import Any, NamedTuple

from gac.fields import Choice, choice_of, hints_of

from .convert import type_name
from .dump import to_plain
from .yaml_text import to_yaml

WIDTH = 96
MAX_INLINE_NAMES = 8  # a choice with at most this many names lists them on the key's own line


class Key(NamedTuple):
    """One configuration key as shown in the help."""

    name: str
    """Full dotted name, e.g. `optim.lr`."""
    kind: str
    """Type and default, in YAML notation, and what the key needs to have an effect."""
    doc: str
    """The field's docstring or, without one, the comment on its line."""
    choices: list[str]
    """Names of a choice with more than `MAX_INLINE_NAMES`, one line per family."""
    section: bool
    """Whether the keys that follow are nested under this one."""


def describe(cls: type, prefix: str = "") -> str:
    """Help text with one paragraph per key of the dataclass `cls`; nested keys as `key.sub`.

    prefix: prepended to every key, for a dataclass that is itself a field.
    """
    lines = []
    for key in keys(cls, prefix):
        lines += [""] * key.section + [f"{key.name}: {key.kind}"]
        if key.doc:
            lines.append(textwrap.indent(textwrap.fill(key.doc, WIDTH - 4), " " * 4))
        lines += [
            textwrap.fill(
                line,
                WIDTH,
                initial_indent=" " * 6,
                subsequent_indent=" " * 8,
                break_on_hyphens=False,
            )
            for line in key.choices
        ]
    return "\n".join(lines)


def keys(cls: type, prefix: str = "") -> list[Key]:
    """All keys of the dataclass `cls`: plain keys first, then each nested section."""
    return _keys(cls, None, f"{prefix}." if prefix else "")


def _field_docs(cls: type) -> dict[str, str]:
    """Field name -> its docstring or trailing comment, including inherited fields."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            docs |= _own_docs(base)
    return docs


def _own_docs(cls: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # defined at run time, so there is no source
        return {}
    lines = source.splitlines()
    [definition] = ast.parse(source).body
    body = typing.cast(ast.ClassDef, definition).body
    docs = {}
    for pair in itertools.pairwise([*body, None]):
        match pair:
            case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(doc))):
                pass
            case ast.AnnAssign(ast.Name(name), end_lineno=int(row), end_col_offset=column), _:
                doc = lines[row - 1][column:].partition("#")[2]
            case _:
                continue
        docs[name] = " ".join(doc.split())
    return docs


def _keys(cls: type, instance: Any, prefix: str) -> list[Key]:
    """Keys of `cls`; defaults are those of `cls`, or the values of `instance` if it is given."""
    hints = hints_of(cls)
    docs = _field_docs(cls)
    plain: list[Key] = []
    nested: list[Key] = []
    for field in dataclasses.fields(cls):
        hint, default = hints[field.name], _default(field, instance)
        name, nested_class = f"{prefix}{field.name}", _nested_class(hint)
        names, doc = _names(choice_of(hint)), docs.get(field.name, "")
        need = field.metadata.get("only_with")
        kind = _kind(hint, default) + (f" (only with {need})" if need else "")
        key = Key(name, kind, doc, names, nested_class is not None)
        if nested_class:
            nested_default = default if dataclasses.is_dataclass(default) else None
            nested += [key, *_keys(nested_class, nested_default, f"{name}.")]
        else:
            plain.append(key)
    return plain + nested


def _kind(hint: Any, default: Any) -> str:
    """Format the type and default of a key."""
    choice = choice_of(hint)
    if choice is None:
        kind = type_name(hint)
    elif len(choice.table()) <= MAX_INLINE_NAMES:
        kind = " | ".join(choice.table())
    else:
        kind = "one of the names below"
    if default is dataclasses.MISSING:
        return f"{kind}  (required)"
    if dataclasses.is_dataclass(default) and not choice:
        return kind
    return f"{kind} = {_inline(default, hint)}"


def _names(choice: Choice | None) -> list[str]:
    """The names of a long choice, grouped by family; none of a short one."""
    if choice is None or len(choice.table()) <= MAX_INLINE_NAMES:
        return []
    families: dict[str, list[str]] = {}
    for name, cls in choice.table().items():
        families.setdefault(choice.family(cls), []).append(name)
    return [f"{family}: {', '.join(names)}" for family, names in families.items()]


def _default(field: dataclasses.Field, instance: Any) -> Any:
    if instance is not None:
        return getattr(instance, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _nested_class(hint: Any) -> Any:
    """The dataclass of a nested field; None for a Choice, which is described by its names."""
    if choice_of(hint):
        return None
    return next(filter(dataclasses.is_dataclass, [hint, *typing.get_args(hint)]), None)


def _inline(default: Any, hint: Any) -> str:
    """Format a default as one line of YAML."""
    choice = choice_of(hint)
    if choice:
        return next(name for name, cls in choice.table().items() if cls is type(default))
    return to_yaml(to_plain(default, hint), inline=True)
