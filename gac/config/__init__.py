"""Run configurations: nested frozen dataclasses, read from YAML and `key.sub=value` overrides.

This package may import `errors`.
"""

from .build import choose, load, load_early
from .dump import dump, save, save_text
from .help import Key, describe, keys
from .types import Choice, ConfigError, check_effects, require_default, setting
from .yaml_text import YamlError, parse_yaml, read_yaml, to_yaml

__all__ = [
    "Choice",
    "ConfigError",
    "Key",
    "YamlError",
    "check_effects",
    "choose",
    "describe",
    "dump",
    "keys",
    "load",
    "load_early",
    "parse_yaml",
    "read_yaml",
    "require_default",
    "save",
    "save_text",
    "setting",
    "to_yaml",
]
