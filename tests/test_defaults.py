"""Defaults are part of the interface: a run without a setting must not change by accident."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from gac.config import keys
from gac.evaluation.suite import EvalConfig
from gac.methods import METHODS
from gac.rewards import REWARDS
from gac.training.run_config import TrainConfig

FILE = Path(__file__).with_name("defaults.txt")
PUBLIC = ("gac", "gac.control.solvers", "gac.data", "gac.report", "gac_kernels")
OTHERS = (BaseException, Enum)  # their constructors have no defaults of ours


def lines() -> Iterator[str]:
    """The defaults of all methods, configuration keys, rewards and public functions."""
    for method in METHODS.values():
        yield f"{method.name}: {method()!r}"
    for config in (TrainConfig, EvalConfig):
        for key in keys(config):
            if not key.section and "=" in key.kind:
                yield f"{config.__name__} {key.name}: {key.kind.partition(' = ')[2]}"
    functions = {f"reward {name}": reward for name, reward in REWARDS.items()}
    for name in PUBLIC:
        module = importlib.import_module(name)
        functions |= {f"{name}.{member}": getattr(module, member) for member in module.__all__}
    for name, function in functions.items():
        is_class = inspect.isclass(function) and not issubclass(function, OTHERS)
        if is_class or inspect.isfunction(function):
            parameters = inspect.signature(function).parameters.values()
            given = [f"{p.name}={p.default!r}" for p in parameters if p.default is not p.empty]
            yield f"{name}: {', '.join(given)}"


def test_defaults_have_not_changed() -> None:
    """If the change is on purpose, run `python -m tests.test_defaults` and mention it to users."""
    assert list(lines()) == FILE.read_text().splitlines()


if __name__ == "__main__":
    FILE.write_text("".join(f"{line}\n" for line in lines()))
