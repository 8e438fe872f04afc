"""Run configurations: nested frozen dataclasses, read from YAML and `key.sub=value` overrides."""

from gac.errors import ConfigError
from gac.fields import (
    Checked,
    Choice,
    Count,
    Decay,
    Natural,
    NonNegative,
    Number,
    Positive,
    PositiveShare,
    Share,
    Valid,
    check_effects,
    expand_paths,
    expanded,
    number,
    one_of,
    require_default,
    setting,
)

from .build import choose, convert, load, load_early
from .dump import dump, save, save_text
from .help import Key, describe, keys
from .yaml_text import YamlError, parse_yaml, read_yaml, to_yaml

__all__ = [
    "Checked",
    "Choice",
    "ConfigError",
    "Count",
    "Decay",
    "Key",
    "Natural",
    "NonNegative",
    "Number",
    "Positive",
    "PositiveShare",
    "Share",
    "Valid",
    "YamlError",
    "check_effects",
    "choose",
    "convert",
    "describe",
    "dump",
    "expand_paths",
    "expanded",
    "keys",
    "load",
    "load_early",
    "number",
    "one_of",
    "parse_yaml",
    "read_yaml",
    "require_default",
    "save",
    "save_text",
    "setting",
    "to_yaml",
]
