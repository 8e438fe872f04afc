"""Run configurations: YAML plus `key.sub=value` overrides into nested frozen dataclasses, and back.

The dataclasses live beside the code they configure; this package only knows how to fill them. Types
come from the annotations and every error names the key, the offending value and what is accepted.
"""

from gac.config.build import choose, load
from gac.config.dump import dump, save
from gac.config.help import describe, field_docs
from gac.config.types import Choice, ConfigError
from gac.config.yaml_text import YamlError, parse_yaml, to_yaml

__all__ = [
    "Choice",
    "ConfigError",
    "YamlError",
    "choose",
    "describe",
    "dump",
    "field_docs",
    "load",
    "parse_yaml",
    "save",
    "to_yaml",
]
