"""Studies on a few methods, seeds and steps: what they run, keep and write."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from gac import cli
from gac.config import ConfigError, dump, save, to_yaml
from gac.demo import run
from gac.study.arms import Arm, arm_config, parse_arm
from gac.study.results import interval, summary
from tools import methods_study as study
from tools.methods_table import page

from .tiny import tiny_config, write_tiny


@pytest.mark.slow
def test_study_runs_once_and_summarises_its_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "GATE", (0.0, 1.0))
    monkeypatch.setattr(study, "GRID", (0.3,))
    arguments = [
        "--out",
        str(tmp_path / "runs"),
        "--methods",
        "constant",
        "dft",
        "luffy",
        "--seeds",
        "2",
        "--steps",
        "2",
        "--base-steps",
        "3",
        "--jobs",
        "2",
        "--results",
        str(tmp_path / "r.json"),
    ]
    assert study.main(arguments) == 0
    first = json.loads((tmp_path / "r.json").read_text())
    rows = {row["name"]: row for row in first["rows"]}
    assert list(rows) == ["dft", "constant", "luffy", "best constant in hindsight (mu=0.3)"]
    assert rows["luffy"]["demos"] == "prompt" and rows["constant"]["demos"] == "apart"
    finals = [
        json.loads((tmp_path / f"runs/luffy-{seed}/eval.jsonl").read_text().splitlines()[-1])
        for seed in (0, 1)
    ]
    mean = sum(final["accuracy"] for final in finals) / 2
    assert rows["luffy"]["accuracy"][0] == pytest.approx(mean, abs=1e-4)
    assert f"| `luffy` | same | {100 * mean:.1f} ± " in page(first)

    capsys.readouterr()
    assert study.main(arguments) == 0
    assert " of " not in capsys.readouterr().out  # nothing was left to run
    assert json.loads((tmp_path / "r.json").read_text()) == first


def test_rows_that_were_not_asked_for_stay_if_the_setting_is_the_same(tmp_path):
    path, setting = tmp_path / "r.json", {"steps": 2, "seeds": 1}
    hindsight = [{"name": f"{study.HINDSIGHT} (mu={mu})"} for mu in (0.1, 0.3)]
    old = [{"name": "sft", "x": 1}, {"name": "gac", "x": 1}, hindsight[0]]
    path.write_text(json.dumps({"setting": setting, "rows": old}))
    new = [{"name": "gac", "x": 2}, {"name": "grpo"}, hindsight[1]]
    assert study.merged(new, path, setting) == [old[0], new[1], new[0], hindsight[1]]
    with pytest.raises(ValueError, match="give the same steps"):
        study.merged(new, path, {**setting, "steps": 3})


def test_specifications_of_methods():
    assert parse_arm("gac") == Arm("gac", "gac")
    spec = "constant:mu=0.3,weight=phi"
    assert parse_arm(spec) == Arm(spec, "constant", ("method.mu=0.3", "method.weight=phi"))
    assert parse_arm(f"low@{spec}") == Arm("low", "constant", parse_arm(spec).changes)
    aliases = {"low": {"name": "constant", "mu": 0.1}, "short": "constant:mu=0.2"}
    assert parse_arm("low", aliases) == Arm("low", aliases["low"])
    assert parse_arm("short", aliases) == Arm("short", "constant", ("method.mu=0.2",))
    for bad in ("", "gac:mu", "@gac", "a/b@gac"):
        with pytest.raises(ConfigError, match="methods: "):
            parse_arm(bad)


def test_a_run_of_a_study_is_the_configuration_with_method_seed_and_folder(tmp_path):
    data = dump(tiny_config(write_tiny(tmp_path), tmp_path / "out"))
    config = arm_config(data, parse_arm("low@constant:mu=0.3"), 2, ["steps=7", f"out={tmp_path}/x"])
    assert (config.method.name, config.method.mu, config.seed) == ("constant", 0.3, 2)
    assert (config.steps, config.name, config.out) == (7, "low", f"{tmp_path}/x/low-2")
    with pytest.raises(ConfigError, match="low: .*nope"):
        arm_config(data, parse_arm("low@constant:nope=1"), 0)


def test_intervals_cover_the_mean_about_as_often_as_they_say():
    """Coverage over 400 samples of 30 normal values; a percentile bootstrap falls slightly short of
    95 %.
    """
    draws = np.random.default_rng(1).normal(0.3, 2.0, (400, 30))
    ends = [interval(row) for row in draws]
    assert 0.90 < np.mean([low < 0.3 < high for low, high in ends]) < 0.97
    width = np.mean([high - low for low, high in ends])
    assert width == pytest.approx(2 * 1.96 * 2.0 / math.sqrt(30), rel=0.1)
    assert interval([0.5]) is None and interval([0.5, 0.5]) == [0.5, 0.5]


def test_differences_are_paired_by_seed():
    finals = {"a": [0.1, 0.5, None, 0.9], "b": [0.2, 0.6, 0.3, 1.0], "none": [None] * 4}
    rows = summary(finals, "a")
    assert rows["b"]["against_baseline"]["difference"] == pytest.approx(0.1)
    assert rows["b"]["against_baseline"]["ci95"] == pytest.approx([0.1, 0.1])
    assert rows["b"]["mean"] == pytest.approx(0.525) and rows["b"]["ci95"][0] < 0.525
    assert rows["a"]["against_baseline"]["difference"] == 0
    assert rows["none"] == {
        "final": [None] * 4,
        "mean": None,
        "ci95": None,
        "against_baseline": {"difference": None, "ci95": None},
    }


@pytest.mark.slow
def test_gac_study_names_what_fails_and_goes_on_from_what_is_done(tmp_path, capsys):
    config = tiny_config(
        write_tiny(tmp_path), tmp_path / "out", steps=2, reward="tests.tiny:digit_reward"
    )
    path = tmp_path / "run.yaml"
    save(config, path)
    broken = {"broken": {"name": "luffy"}}  # it needs demonstrations, which are missing
    path.write_text(path.read_text() + to_yaml({"methods": {**broken, "low": "constant:mu=0.1"}}))
    fields = ["data.demo_field=null", "data.demos=null"]
    arguments = [
        "study",
        str(path),
        "--methods",
        "grpo",
        "broken",
        "dr@dr-grpo",
        "--seeds",
        "2",
        "--baseline",
        "dr",
        "--discard",
        "--set",
        *fields,
    ]
    assert cli.main(arguments) == 1
    printed = capsys.readouterr().out
    assert f"{tmp_path}/out/broken-1: failed: ValueError: data.prompts" in printed
    found = json.loads((tmp_path / "out/study.json").read_text())
    assert found["methods"]["broken"]["final"] == [None, None]
    assert sorted(found["failed"]) == [f"{tmp_path}/out/broken-{seed}" for seed in (0, 1)]
    evals = (tmp_path / "out/grpo-1/eval.jsonl").read_text().splitlines()
    assert found["methods"]["grpo"]["final"][1] == json.loads(evals[-1])["accuracy"]
    assert found["methods"]["dr"]["against_baseline"]["difference"] == 0
    assert not (tmp_path / "out/grpo-0/checkpoints").exists()
    page_text = (tmp_path / "out/study.html").read_text()
    assert "broken-0: failed" in page_text and "data:image/png" in page_text

    assert cli.main([*arguments[:2], "--methods", "grpo", "dr@dr-grpo", *arguments[6:]]) == 0
    assert "done" not in capsys.readouterr().out  # nothing was left to run
    again = json.loads((tmp_path / "out/study.json").read_text())
    assert again["methods"]["grpo"] == found["methods"]["grpo"] and again["failed"] == {}

    assert cli.main([*arguments[:2], "--methods", "grpo", "--set", *fields, "steps=3"]) == 2
    assert "grpo-0: holds a finished run with another steps" in capsys.readouterr().err
