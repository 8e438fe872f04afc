"""Groups runs that differ only in their seed under one label."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .reading import Run, flatten

# Keys in which repetitions of an experiment may differ.
REPETITION_KEYS = ("seed", "out")


@dataclass(frozen=True)
class Group:
    """Repetitions of one experiment."""

    label: str
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs if run.seed is not None]

    @property
    def splits(self) -> list[str]:
        return list(dict.fromkeys(split for run in self.runs for split in run.splits))

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(task for run in self.runs for task in run.tasks))


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs by their configuration without the seed, in order of first appearance.

    A run without a configuration forms its own group. The label is the run's `name` or its
    method's; groups with the same label are distinguished by the settings in which they differ.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        key = json.dumps(_identity(run), sort_keys=True, default=str)
        groups.setdefault(key if run.config else str(run.path), []).append(run)
    members = list(groups.values())
    labels = [_label(group[0]) for group in members]
    unique = [_unique_label(i, labels, members) for i in range(len(members))]
    return [Group(label, tuple(group)) for label, group in zip(unique, members, strict=True)]


def differences(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """Dotted key -> its value in each group (None where absent), for keys whose values differ."""
    settings = [_identity(group.runs[0]) for group in groups]
    keys = dict.fromkeys(key for setting in settings for key in setting)
    values = {key: [setting.get(key) for setting in settings] for key in keys}
    return {key: row for key, row in values.items() if any(item != row[0] for item in row)}


def _identity(run: Run) -> dict[str, Any]:
    """The settings except `seed` and `out`; in strings (such as paths), "seed0" becomes "seed*"."""
    leaves = [(k, v) for k, v in flatten(run.config) if k.split(".")[-1] not in REPETITION_KEYS]
    own_seed = re.compile(rf"(seed[-_=]?){run.seed}(?!\d)")
    return {k: own_seed.sub(r"\1*", v) if isinstance(v, str) else v for k, v in leaves}


def _label(run: Run) -> str:
    method = run.config.get("method")
    method_name = method.get("name") if isinstance(method, Mapping) else method
    own_seed = re.compile(rf"[-_. /]*seed[-_=]?{run.seed}(?!\d)")
    label = run.config.get("run_name") or method_name or run.path.resolve().name
    return own_seed.sub("", str(label)) or str(label)


def _unique_label(index: int, labels: Sequence[str], members: Sequence[Sequence[Run]]) -> str:
    """A group's label, with the settings that distinguish it from groups of the same label."""
    same_label = [i for i, label in enumerate(labels) if label == labels[index]]
    if len(same_label) == 1:
        return labels[index]
    groups = [Group(labels[i], tuple(members[i])) for i in same_label]
    position = same_label.index(index)
    settings = [
        f"{key.split('.')[-1]}={row[position]}"
        for key, row in differences(groups).items()
        if row[position] is not None and key != "run_name"
    ]
    short = [text for text in settings if len(text) <= 24]  # a path would make the label too long
    suffixes = short[:2] or [members[index][0].path.resolve().name]
    return f"{labels[index]} ({', '.join(suffixes)})"
