"""Reads and writes YAML 1.2: 1e-4 is a number, `off` is text, and a duplicate key is an error."""

import math
import re
from pathlib import Path
from typing import Any

import yaml

from gac.errors import ConfigError

YamlError = yaml.YAMLError

# YAML 1.2's floats: PyYAML follows 1.1, where 1e-4 is text because it has no dot.
_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.inf$|^\.nan$")
_BOOL = re.compile(r"^(true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?[0-9]+$")
_REPLACED = tuple(f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float", "timestamp"))


class _Loader(yaml.SafeLoader):
    """Loads scalars by the rules of YAML 1.2."""


class _Dumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or 1.2 would read back as another type."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfF"))
    _kind.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict:
    seen = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        single = isinstance(key_node, yaml.ScalarNode)
        if not single or key in seen:
            problem = (
                f"duplicate key {key!r}"
                if single
                else "put a key that begins with [ or { in quotes"
            )
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))  # 010 is ten, not octal eight


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", _int)


def parse_yaml(text: str) -> Any:
    """Parse one YAML document. Raises YamlError, which gives the line and column."""
    return yaml.load(text, Loader=_Loader)  # a SafeLoader: builds plain types only


def read_yaml(path: Path, named_in: str = "") -> dict[str, Any]:
    """Read a YAML file of `key: value` lines; {} if it is empty.

    The optional key `base` names another file, relative to this one; the other keys override its
    values. Raises ConfigError if a file cannot be read or contains anything else.

    named_in: if this is a base, the file and the key that name it, for the error message.
    """
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except IsADirectoryError as error:
        example = next(iter(sorted(path.glob("*.yaml"))), path / "run.yaml")
        raise ConfigError(f"{path} is a folder: give a YAML file, e.g. {example}") from error
    except FileNotFoundError as error:
        raise ConfigError(
            f"{named_in}: no such file"
            if named_in
            else f"CONFIG.yaml={str(path)!r}: no such file: give the path of a configuration, or "
            "create one with `gac init DIR`"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except (YamlError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(data, dict | None):
        raise ConfigError(f"{path}: expected `key: value` lines, got {data!r:.60}")
    data = data or {}
    base = data.pop("base", None)
    if base is None:
        return data
    if named_in:
        raise ConfigError(f"{path}: base={base!r}: a base file must not set `base` itself")
    return _merged(read_yaml(path.parent / str(base), f"{path}: base={base!r}"), data)


def _merged(base: Any, changes: Any) -> Any:
    """`base` with `changes`: mappings are merged key by key, other values are replaced."""
    if not (isinstance(base, dict) and isinstance(changes, dict)):
        return changes
    return base | {key: _merged(base.get(key), value) for key, value in changes.items()}


def to_yaml(data: Any, inline: bool = False) -> str:
    """Format plain types as YAML that `parse_yaml` reads back unchanged; key order is kept.

    inline: flow style on one line, `[a, b]` and `{key: value}`.
    """
    text = yaml.dump(
        data,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=math.inf if inline else 100,
        default_flow_style=inline,
    )
    return text.removesuffix("\n...\n").rstrip() if inline else text
