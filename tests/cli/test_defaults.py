"""Defaults are part of the interface: a run without a setting must not change by accident."""

import inspect
from collections.abc import Iterator
from pathlib import Path

from gac.config import keys
from gac.evaluation.config import EvalConfig
from gac.methods import METHODS
from gac.rewards import REWARDS
from gac.train_config import TrainConfig

FILE = Path(__file__).with_name("defaults.txt")


def lines() -> Iterator[str]:
    """The defaults of all methods, configuration keys and rewards."""
    for method in METHODS.values():
        yield f"{method.name}: {method()!r}"
    for config in (TrainConfig, EvalConfig):
        for key in keys(config):
            if "=" in key.kind:
                yield f"{config.__name__} {key.name}: {key.kind.partition(' = ')[2] or key.kind}"
    for name, function in REWARDS.items():
        parameters = inspect.signature(function).parameters.values()
        given = [f"{p.name}={p.default!r}" for p in parameters if p.default is not p.empty]
        if given:
            yield f"{name}: {', '.join(given)}"


def test_defaults_have_not_changed() -> None:
    """If the change is on purpose, run `python -m tests.cli.test_defaults` and tell users."""
    changed = set(lines()) ^ set(FILE.read_text().splitlines())
    assert not changed, "defaults differ from tests/cli/defaults.txt"


if __name__ == "__main__":
    FILE.write_text("".join(f"{line}\n" for line in lines()))
