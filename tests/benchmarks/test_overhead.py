"""The overhead benchmark counts everything that a method adds to a step."""

from __future__ import annotations

import dataclasses
import json

import pytest

import bench.overhead as overhead
from bench.overhead import CycleTimes, bare, configuration, measure, save, summary
from gac.train_config import TrainConfig
from gac.training.gradients import Gradients
from gac.training.trainer import Trainer
from gac_kernels import TokenMoments


class Clock:
    """A clock that only the calls below advance, so that the result is exact."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self.patch = 0.0, monkeypatch.setattr
        self.patch(overhead, "clock", lambda: self.seconds)

    def charge(self, owner: object, name: str, seconds: float) -> None:
        """Let each call of `owner.name` take `seconds`; a loss only with statistics."""
        inner = getattr(owner, name)

        def charged(*args, **keywords):
            if keywords.get("moments", True):
                self.seconds += seconds
            return inner(*args, **keywords)

        self.patch(owner, name, charged)


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(overhead, "ROUNDS", 1)
    config = configuration(tmp_path, None, None, 8, 1)
    rollouts = dataclasses.replace(config.rollouts, max_completion_length=4)
    return dataclasses.replace(config, rollouts=rollouts)


@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [
        (type(TrainConfig().method), "mix", 1),  # host
        (TokenMoments, "all_reduce", 1),  # collective
        (overhead.gac.models.head, "fused_linear_gac_loss", 3),  # kernel: 16 + 4 rows, by 8
    ],
)
def test_two_percent_more_are_measured(config, monkeypatch, owner, name, calls):
    clock = Clock(monkeypatch)
    clock.charge(Trainer, "_sample", 50.0)
    clock.charge(Gradients, "__call__", 50.0)
    clock.charge(owner, name, 2.0 / calls)
    result = summary(measure(config, cycles=2, steps=1))["overhead"]
    assert result["percent"] == pytest.approx(2.0)
    assert result["ci95"] == pytest.approx([2.0, 2.0])


def test_the_default_is_measured_against_the_same_mu(config, monkeypatch):
    assert config.method == TrainConfig().method
    mus = []
    monkeypatch.setattr(
        overhead, "bare", lambda trainer, rows, mu: mus.append(mu) or bare(trainer, rows, mu)
    )
    measure(config, cycles=1, steps=1)
    assert mus == [config.method.mu] * 2


def test_the_last_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(overhead, "RESULTS", tmp_path)
    monkeypatch.setattr(overhead, "copy_out", lambda path: None)
    times = CycleTimes(sampling=1.0, bare=1.0, method=1.01, **dict.fromkeys(overhead.PARTS, 0.0))
    save("a case", summary([times, times]))
    assert capsys.readouterr().out.splitlines()[-1] == "overhead 0.50 % [0.50, 0.50]"
    assert json.loads((tmp_path / "overhead.json").read_text())["a case"]["overhead"]["ms"] == 1.0
