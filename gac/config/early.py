"""Finds a misspelled key in the source of a configuration class, without importing the class.

Its module needs torch, whose import takes more than a second of CPU time.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from gac.errors import ConfigError

from .convert import did_you_mean, join, unknown_name_message

ROOT = Path(__file__).parents[2]
Class = tuple[str, str]  # module and name of a class


def check_names(cls: Class, data: Mapping[str, Any], where: str = "") -> None:
    """Raise ConfigError for an unknown key that resembles a valid one.

    Other unknown keys, and those of a section whose class depends on a value (such as `method`),
    are left to `load`.
    """
    fields = declared_fields(*cls)
    for key, value in data.items():
        section = fields.get(key)
        if fields and key not in fields:
            reject_inner_key(key, {n: declared_fields(*s) for n, s in fields.items() if s}, where)
            if did_you_mean(str(key), fields):
                raise ConfigError(unknown_name_message(join(where, key), key, fields, "key"))
        if section is not None and isinstance(value, Mapping):
            check_names(section, value, join(where, key))


def reject_inner_key(key: str, sections: Mapping[str, Container[str]], where: str) -> None:
    """Raise ConfigError for the key of a section without its section: `lr` for `optim.lr`."""
    for name, fields in sections.items():
        if key in fields:
            inner = join(where, f"{name}.{key}")
            raise ConfigError(f"{join(where, key)}: unknown key; did you mean {inner!r}?")


def declared_fields(module: str, name: str) -> dict[str, Class | None]:
    """Fields of one of our classes by name; for a section, with the class of its value.

    Empty if the class is defined elsewhere.
    """
    file, home = _source(module)
    if file is None:
        return {}
    classes, origins = _definitions(file, home)
    if name not in classes:
        return declared_fields(*origins[name]) if name in origins else {}
    fields: dict[str, Class | None] = {}
    for base in classes[name].bases:
        if isinstance(base, ast.Name):
            fields |= declared_fields(module, base.id)
    for statement in classes[name].body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            hint = statement.annotation
            if isinstance(hint, ast.Subscript) and ast.unparse(hint.value) == "ClassVar":
                continue
            if isinstance(hint, ast.BinOp):  # `Section | None`
                hint = hint.left
            is_section = isinstance(hint, ast.Name) and declared_fields(module, hint.id)
            section = (module, hint.id) if is_section and isinstance(hint, ast.Name) else None
            fields[statement.target.id] = section
    return fields


def _source(module: str) -> tuple[Path | None, str]:
    """The file of one of our modules, and the package that its relative imports start from."""
    path = ROOT.joinpath(*module.split("."))
    if module.split(".")[0] not in ("gac", "gac_kernels"):
        return None, ""
    if path.is_dir():
        return path / "__init__.py", module
    return path.with_suffix(".py"), module.rpartition(".")[0]


@functools.cache
def _definitions(file: Path, package: str) -> tuple[dict[str, ast.ClassDef], dict[str, Class]]:
    """The classes that a file defines, and the modules from which it imports other names."""
    classes: dict[str, ast.ClassDef] = {}
    origins: dict[str, Class] = {}
    for node in ast.walk(ast.parse(file.read_text())):  # also below `if TYPE_CHECKING`
        if isinstance(node, ast.ClassDef):
            classes[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join(parents) if node.level else ""
            module = ".".join(filter(None, (base, node.module or "")))
            origins |= {alias.asname or alias.name: (module, alias.name) for alias in node.names}
    return classes, origins
