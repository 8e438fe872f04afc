"""Builds the runs of a study from a configuration and method specifications."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gac.config import ConfigError, load, read_yaml
from gac.train_config import TrainConfig

HELP = (
    "NAME or package.module:Class, NAME:key=value,key.sub=value, LABEL@NAME:..., or a key of the "
    "file's `methods:`"
)


@dataclass(frozen=True)
class Arm:
    """One method of a study."""

    label: str
    """Name in tables and in the run's folder name."""
    method: Any
    """Value of the configuration key `method`: a name or a mapping."""
    changes: tuple[str, ...] = ()
    """Overrides `method.key=value`."""


def parse_arm(text: str, aliases: Mapping[str, Any] | None = None) -> Arm:
    """Parse an arm specification, see HELP. Raises ConfigError if it is invalid."""
    aliases = aliases or {}
    if text in aliases:
        alias = aliases[text]
        if isinstance(alias, Mapping):
            return Arm(text, alias)
        arm = parse_arm(str(alias))
        return Arm(text, arm.method, arm.changes)
    label, at, spec = text.rpartition("@")
    name, *parts = spec.split(":")
    if parts and "=" not in parts[0]:  # package.module:Class
        name = f"{name}:{parts.pop(0)}"
    settings = ":".join(parts)
    changes = [change for change in settings.split(",") if change]
    if not name or (at and not label) or not all("=" in change for change in changes):
        raise ConfigError(f"methods: invalid specification {text!r}; use {HELP}")
    label = label or spec
    if "/" in label:
        raise ConfigError(
            f"methods: {text!r}: the label {label!r} is used as a folder name and must not contain "
            "'/'; write LABEL@NAME:..."
        )
    return Arm(label, name, tuple(f"method.{change}" for change in changes))


def read_study(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a configuration file: its keys other than `methods`, and the aliases under `methods`."""
    data = read_yaml(path)
    aliases = data.pop("methods", None) or {}
    if not isinstance(aliases, Mapping):
        raise ConfigError(f"{path}: methods: expected `label: method` lines, got {aliases!r:.60}")
    return data, {str(label): method for label, method in aliases.items()}


def arm_config(
    data: Mapping[str, Any], arm: Arm, seed: int, overrides: Sequence[str] = ()
) -> TrainConfig:
    """Configuration of an arm's run with one seed; each run has its own subfolder of `out`.

    data: a TrainConfig as plain types. overrides: `key=value` for every run, applied after the
        arm's own.

    Raises ConfigError; the message names the arm.
    """
    try:
        plain, changes = {**data, "method": arm.method}, [*arm.changes, *overrides]
        shared = load(TrainConfig, plain, [*changes, f"seed={seed}"])
    except ConfigError as error:
        raise ConfigError(f"{arm.label}: {error}") from error
    if shared.eval.data.prompts is None:
        raise ConfigError("eval.data.prompts: missing; a study compares held-out accuracies")
    return replace(shared, run_name=arm.label, out=f"{shared.out}/{arm.label}-{seed}")
