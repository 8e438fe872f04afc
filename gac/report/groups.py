"""Groups runs that differ only in their seed under one label."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
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


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Group runs by their configuration without the seed, in order of first appearance.

    A run without a configuration forms its own group. The label is the first run's `run_name` or
    its folder. Give runs a `run_name` if their folders do not say how they differ.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        key = json.dumps(_identity(run), sort_keys=True)
        groups.setdefault(key if run.config else str(run.path), []).append(run)
    members = list(groups.values())
    labels = _unique_labels([group[0] for group in members])
    return [Group(label, tuple(group)) for label, group in zip(labels, members, strict=True)]


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


def _label(run: Run) -> str:
    """The run's name, or that of its folder, without the seed."""
    name = str(run.config.get("run_name") or run.path.resolve().name)
    own_seed = rf"[-_. /]*seed[-_=]?{run.seed}(?!\d)|[-_ ]{run.seed}$"
    return re.sub(own_seed, "", name) or name


def _unique_labels(runs: Sequence[Run]) -> list[str]:
    """A label for each run; the folder follows a label that several runs share."""
    labels = [_label(run) for run in runs]
    return [
        label if labels.count(label) == 1 else f"{label} ({_unlike(run.path, label)})"
        for label, run in zip(labels, runs, strict=True)
    ]


def _unlike(path: Path, label: str) -> str:
    """The name of the folder, or of its parent if the folder has the label's name."""
    folder = path.resolve()
    return folder.parent.name if folder.name == label else folder.name
