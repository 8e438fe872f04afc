"""The overhead benchmark: what it compares and prints."""

import dataclasses
import json

import numpy as np
import pytest

import bench.overhead as overhead
from bench.overhead import bare, configuration, measure, per_step, save, summary
from gac.train_config import TrainConfig


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(overhead, "ROUNDS", 1)
    config = configuration(tmp_path, None, [], 8, 1)
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
    assert mus == [config.method.mu] * 2 * overhead.REPEATS


def stored(tmp_path, monkeypatch, *cases):
    """What `save` stores for cases of 1% overhead per two cycles."""
    monkeypatch.setattr(overhead, "RESULTS", tmp_path)
    monkeypatch.setattr(overhead, "copy_out", lambda path: None)
    times = {"sampling": 1.0, "bare": 1.0, "method": 1.01, **dict.fromkeys(overhead.PARTS, 0.0)}
    for method, changes in cases:
        keys = {"method": method, "set": changes, "times": 1, "rollouts": 16, "kl_rollouts": 2}
        save(keys, summary([[times] * 10] * 2))
    return json.loads((tmp_path / "overhead.json").read_text())["cases"]


def test_the_last_line(monkeypatch, tmp_path, capsys):
    (row,) = stored(tmp_path, monkeypatch, ("gac", []))
    assert capsys.readouterr().out.splitlines()[-1] == "overhead 0.50 % [0.50, 0.50]"
    assert row["overhead"]["ms"] == 10.0
    assert row["commit"]
    assert row["date"]


def test_what_other_work_adds_to_a_cycle_is_trimmed():
    """Steps differ, such as those that measure; cycles do not."""
    times = np.tile([1.0, 1.0, 5.0], (10, 1))
    times[3], times[6] = 100, 0
    assert per_step(times) == pytest.approx(7 / 3)


def test_the_table_has_every_case_once_in_its_order(monkeypatch, tmp_path):
    changed = ["method.alpha_every=refresh"]
    cases = [("gac-paper", []), ("gac-paper", changed), ("gac", []), ("gac", [])]
    lines = overhead.table(stored(tmp_path, monkeypatch, *cases)).splitlines()[2:]
    names = [line.split(" | ")[0].strip("| ") for line in lines]
    assert names[:3] == ["`gac`", "`gac-paper`, `method.alpha_every=refresh`", "`gac-paper`"]
    assert all("0.50 [0.50, 0.50]" in line for line in lines[:3])
    assert len(names) == len(overhead.CASES)
    assert all("not measured" in line for line in lines[3:])


@pytest.mark.parametrize("case", overhead.CASES, ids=str)
def test_every_case_of_the_table_is_a_valid_run(tmp_path, case):
    method, changes = case
    assert configuration(tmp_path, method, changes, 8, 1).method.name == method
