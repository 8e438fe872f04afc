"""Weighted sums of rewards, and rewards from Python callables."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .base import Reward, RowOutcome, RowReward, as_outcome, exited, location, time_limits

if TYPE_CHECKING:
    from gac.data import Example


class SumReward(Reward):
    """Weighted sum of rewards. A row fails if any term cannot score it."""

    name = "sum"

    def __init__(self, terms: Sequence[tuple[Reward, float]]) -> None:
        if not terms:
            raise ValueError("sum needs at least one term {reward: ..., weight: ...}")
        self._terms = tuple(terms)

    def outcomes(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> Sequence[RowOutcome]:
        for reward, _ in self._terms:
            reward.deadline = self.deadline
        columns = [reward.outcomes(completions, examples) for reward, _ in self._terms]
        return [self._add(row) for row in zip(*columns, strict=True)]

    def set_step(self, step: int) -> None:
        for reward, _ in self._terms:
            reward.set_step(step)

    def counts(self) -> dict[str, int]:
        """The terms' counts, summed by name."""
        total: dict[str, int] = {}
        for reward, _ in self._terms:
            for name, count in reward.counts().items():
                total[name] = total.get(name, 0) + count
        return total

    def close(self) -> None:
        for reward, _ in self._terms:
            reward.close()

    def _add(self, outcomes: Sequence[RowOutcome]) -> RowOutcome:
        total = 0.0
        for outcome, (_, weight) in zip(outcomes, self._terms, strict=True):
            value = as_outcome(outcome)
            if isinstance(value, Exception):
                return value
            total += weight * value
        return total


class CallableReward(RowReward):
    """Calls `function(completion, example, **options) -> number` on each row."""

    def __init__(self, name: str, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self.name = name
        self._function, self._options = function, options

    def score(self, completion: str, example: Example) -> float:
        return self._function(completion, example, **self._options)


class BatchCallableReward(CallableReward):
    """Calls `function(completions, examples, **options) -> numbers` on whole batches.

    If a batch raises, its rows are retried one at a time to isolate the failing ones.
    """

    def outcomes(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> Sequence[RowOutcome]:
        if not completions:
            return []
        try:
            with time_limits(self.deadline) as limit, limit:
                values = list(self._function(list(completions), list(examples), **self._options))
        except TimeoutError as error:
            return [error] * len(completions)
        except (Exception, SystemExit) as error:  # user code may raise anything
            if len(completions) == 1:
                return [exited(error) if isinstance(error, SystemExit) else error]
            return [
                self.outcomes([completion], [example])[0]
                for completion, example in zip(completions, examples, strict=True)
            ]
        if len(values) != len(completions):
            raise ValueError(
                f"reward {self.name!r} returned {len(values)} numbers for {len(completions)} rows"
            )
        return [as_outcome(value) for value in values]


def load_callable(name: str) -> Callable[..., Any]:
    """Import the callable named `package.module:function`.

    `path/file.py:function` loads a file. The path is relative to the current folder or to a folder
    in `sys.path`, such as that of the configuration file.

    Raises:
        ValueError: no such module or file, no such name in it, or not callable.
    """
    module_name, _, attribute = name.rpartition(":")
    try:
        if module_name.endswith(".py") or "/" in module_name:
            module = _load_file(name, module_name)
        else:
            module = importlib.import_module(module_name)
        found = getattr(module, attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its own imports is missing
        raise ValueError(
            f"reward {name!r}: no module {error.name!r}; give its file as `path/file.py:function`, "
            "or add its folder to PYTHONPATH"
        ) from error
    except AttributeError as error:
        raise ValueError(f"reward {name!r}: {module_name} has no {attribute!r}") from error
    if not callable(found):
        raise ValueError(f"reward {name!r}: {attribute} is not callable")
    return found


def _load_file(name: str, path: str) -> ModuleType:
    """Import the file of reward `name`, once."""
    folders = [Path(), *map(Path, reversed(sys.path))]  # the configuration's folder comes last
    file = next((file for folder in folders if (file := folder / path).is_file()), None)
    if file is None:
        raise ValueError(
            f"reward {name!r}: no file {path!r} in this folder or next to the configuration file"
        )
    module_name = f"reward_{file.stem}_{zlib.crc32(str(file.resolve()).encode()):08x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"reward {name!r}: {str(file)!r} is not a Python file")
    sys.modules[module_name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as raised:  # user code may raise anything
        error = exited(raised) if isinstance(raised, SystemExit) else raised
        del sys.modules[module_name]
        problem = f"{type(error).__name__}: {error}{location(error)}"
        raise ValueError(f"reward {name!r}: {problem}") from error
    return module
