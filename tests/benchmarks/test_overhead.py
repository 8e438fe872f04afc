"""The overhead benchmark: what it compares and prints."""

import dataclasses
import json

import pytest

import bench.overhead as overhead
from bench.overhead import CycleTimes, bare, configuration, measure, save, summary
from gac.train_config import TrainConfig


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(overhead, "ROUNDS", 1)
    config = configuration(tmp_path, None, None, 8, 1)
    return dataclasses.replace(
        config, rollouts=dataclasses.replace(config.rollouts, max_completion_length=4)
    )


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
