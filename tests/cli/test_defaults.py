"""Defaults are part of the interface: a run without a setting must not change by accident."""

# ruff: noqa: SIM905 - a list of words
from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from gac.config import keys
from gac.evaluation.config import EvalConfig
from gac.methods import METHODS
from gac.rewards import REWARDS
from gac.training.run_config import TrainConfig

FILE = Path(__file__).with_name("defaults.txt")
MODULES = """gac gac.control.alarm gac.control.alignment gac.control.checks gac.control.estimators
gac.control.evidence gac.control.gate gac.control.schedules gac.control.signals
gac.control.state gac.data.rows gac.evaluation.cells gac.evaluation.estimates
gac.evaluation.suite gac.methods.base gac.methods.token_loss gac.models.causal_lm gac.models.head
gac.rewards.build gac.rollouts.generation gac.rollouts.plan gac.training.export
gac_kernels gac_kernels.linear gac_kernels.projection gac_kernels.reference gac_kernels.sketch
gac_kernels.tokens gac_kernels.vocab_parallel""".split()
OTHERS = (BaseException, Enum)  # their constructors have no defaults of ours


def lines() -> Iterator[str]:
    """The defaults of all methods, configuration keys, rewards and public functions."""
    for method in METHODS.values():
        yield f"{method.name}: {method()!r}"
    for config in (TrainConfig, EvalConfig):
        for key in keys(config):
            if not key.section and "=" in key.kind:
                yield f"{config.__name__} {key.name}: {key.kind.partition(' = ')[2]}"
    for name, function in [*REWARDS.items(), *functions()]:
        parameters = inspect.signature(function).parameters.values()
        given = [f"{p.name}={p.default!r}" for p in parameters if p.default is not p.empty]
        if given:
            yield f"{name}: {', '.join(given)}"


def functions() -> Iterator[tuple[str, Any]]:
    for name in MODULES:
        module = importlib.import_module(name)
        for member, value in vars(module).items():
            own = getattr(value, "__module__", "") == name or member in vars(module).get(
                "__all__", ()
            )
            is_class = inspect.isclass(value) and not issubclass(value, OTHERS)
            if own and member[0] != "_" and (is_class or inspect.isfunction(value)):
                yield f"{name}.{member}", value


def test_defaults_have_not_changed() -> None:
    """If the change is on purpose, run `python -m tests.cli.test_defaults` and tell users."""
    changed = set(lines()) ^ set(FILE.read_text().splitlines())
    assert not changed, "defaults differ from tests/cli/defaults.txt"


if __name__ == "__main__":
    FILE.write_text("".join(f"{line}\n" for line in lines()))
