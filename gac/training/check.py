"""Checks of a run's files and reward that need neither torch nor the model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gac.config import load_early
from gac.data.examples import DataConfig, load_references
from gac.data.source import SUFFIXES, read_rows
from gac.errors import ConfigError, MissingData, UserError, value_errors_as
from gac.rewards import build_reward

if TYPE_CHECKING:
    from gac.train_config import TrainConfig


def load_checked(file: Path, overrides: Sequence[str]) -> tuple[TrainConfig, list[str]]:
    """The configuration of a run, and the result of `check_inputs`."""
    config = load_early("gac.train_config", "TrainConfig", file, overrides)
    return config, check_inputs(config, file)


def check_inputs(config: TrainConfig, file: Path | None = None) -> list[str]:
    """Check that the files exist and can be read, and that the reward can score the first row.

    Args:
        config: the run.
        file: the configuration file, for the error message about a path that is relative to it.

    Returns:
        One line for each passed check.

    Raises:
        UserError: a check failed; the message names the key.
    """
    passed = []
    for key, source in {"model.path": config.model.path, **dict(_sources(config))}.items():
        _check_folder(key, source, file)
        if key != "model.path" and (path := Path(os.path.expandvars(source)).expanduser()).exists():
            rows = sum(1 for _ in read_rows(source)) if path.is_file() else 0
            passed.append(f"{key}: {rows or 'a folder of'} rows")
    with value_errors_as(ConfigError):
        reward = build_reward(config.reward)
    try:
        example, solution = load_references(replace(config.data, limit=1))[0]
    except (UserError, ValueError):  # no demonstration in the first row, or a source on the Hub
        return [*passed, "reward: imported"]
    try:
        [score] = reward([solution], [example])
    finally:
        reward.close()
    return [*passed, f"reward: {score} for the demonstration of the first row"]


def _sources(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """The key and the value of each data source."""
    parts: dict[str, DataConfig] = {"data": config.data, "eval.data": config.eval.data}
    parts |= {f"eval.tasks.{name}.data": task.data for name, task in config.eval.tasks.items()}
    for key, data in parts.items():
        named = {"prompts": data.prompts, "demos": data.demos}
        named |= {f"sources[{i}].path": source.path for i, source in enumerate(data.sources)}
        yield from ((f"{key}.{name}", value) for name, value in named.items() if value is not None)


def _check_folder(key: str, value: str, file: Path | None) -> None:
    """Raise MissingData for a file that does not exist, or exists only near the configuration."""
    expanded = os.path.expandvars(value)
    path = Path(expanded).expanduser()
    if not value or path.exists() or Path(expanded.partition(":")[0]).expanduser().is_dir():
        return
    near = file.resolve().parents[:3] if file else ()
    folder = next((f for f in near if not path.is_absolute() and (f / path).exists()), None)
    if folder is not None and file is not None:
        raise MissingData(
            f"{key}={value!r}: no such file or folder here; it exists in {folder}: paths are "
            f"relative to the folder in which gac runs, so run the command in {folder}"
        )
    if key != "model.path" and "$" not in value and value.endswith(SUFFIXES):
        raise MissingData(f"{key}={value!r}: no such file or folder")
