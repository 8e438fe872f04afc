"""Groups runs that differ only in their seed under one label."""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .reading import Run, flatten

# Keys in which repetitions of an experiment may differ.
REPETITION_KEYS = ("seed", "out", "max_tokens_per_micro_batch")  # the last follows free memory
# Keys without which accuracies cannot be compared.
COMPARABLE = (
    r"model\.path|data\.(prompts|demos|sources)|"
    r"eval\.(?!(.*\.)?(every|batch|pass_at|split_field)$).*"
)


@dataclass(frozen=True)
class Group:
    """Repetitions of one experiment."""

    label: str
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs if run.seed is not None]

    @property
    def size(self) -> int:
        """Number of different seeds, or of runs if they did not record any."""
        return len(set(self.seeds)) or len(self.runs)

    @property
    def splits(self) -> list[str]:
        return list(dict.fromkeys(split for run in self.runs for split in run.splits))

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(task for run in self.runs for task in run.tasks))


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs by their configuration without the seed, in order of first appearance.

    A run without a configuration forms its own group. The label is the run's `run_name` or its
    folder, with at most two settings in which the groups differ.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        key = json.dumps(_identity(run), sort_keys=True)
        groups.setdefault(key if run.config else str(run.path), []).append(run)
    members = list(groups.values())
    labels = [_label(group) for group in members]
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
    leaves = [(k, v) for k, v in flatten(run.config) if k not in REPETITION_KEYS]
    own_seed = re.compile(rf"(seed[-_=]?){run.seed}(?!\d)")
    return {k: own_seed.sub(r"\1*", v) if isinstance(v, str) else v for k, v in leaves}


def caution(groups: Sequence[Group]) -> str:
    """A sentence if the runs differ in data, initial model or evaluation; else empty."""
    scored = all(  # by eval.reward, not by the training reward
        any(re.match(r"eval\.reward\b", k) and v for k, v in flatten(g.runs[0].config))
        for g in groups
    )
    pattern = COMPARABLE + ("" if scored else r"|reward(\..*)?")
    keys = [key for key in differences(groups) if re.fullmatch(pattern, key)]
    if not keys:
        return ""
    return f"These runs differ in {', '.join(keys)}: their accuracies do not rank their methods. "


def _label(runs: Sequence[Run]) -> str:
    """The name of the runs, without their seed, or what the names of their folders share."""
    names = [run.path.resolve().name for run in runs]
    shared = zip(*(re.findall(r"\d+|\D", name) for name in names), strict=False)
    folder = "".join(c[0] for c in itertools.takewhile(lambda c: len({*c}) == 1, shared))
    own_seed = re.compile(rf"[-_. /]*seed[-_=]?{runs[0].seed}(?!\d)")
    label = str(runs[0].config.get("run_name") or folder.rstrip("-_. ") or names[0])
    return own_seed.sub("", label) or label


def _unique_label(index: int, labels: Sequence[str], members: Sequence[Sequence[Run]]) -> str:
    """A group's label, with settings that distinguish it from those of the same or without name."""
    others = [i for i, label in enumerate(labels) if label == labels[index]]
    clash, run = len(others) > 1, members[index][0]
    if not clash and not run.config.get("run_name"):
        others = list(range(len(labels)))
    position = others.index(index)
    settings = [
        f"{key.removesuffix('.name').split('.')[-1]}={row[position]}"
        for key, row in differences([Group("", tuple(members[i])) for i in others]).items()
        if row[position] is not None and key != "run_name"
    ]
    short = [text for text in settings if len(text) <= 24]  # a path would make the label too long
    folder = run.path.resolve()
    unlike = folder.parent.name if folder.name == labels[index] else folder.name
    suffixes = short[:2] or ([unlike] if clash else [])
    return f"{labels[index]} ({', '.join(suffixes)})" if suffixes else labels[index]
