"""Studies of a few methods, seeds and steps: their runs, statistics and files."""

import contextlib
import json
import math
import multiprocessing
import operator
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from gac import cli
from gac.config import dump, save, to_yaml
from gac.errors import ConfigError, RunDirectoryError
from gac.parallel.run_lock import run_lock
from gac.study import runs
from gac.study.command import Arm, arm_config, parse_arm
from gac.study.results import interval, summary
from tests import ranks
from tests.tiny import tiny_config, write_tiny
from tests.waiting import wait_until


def test_parse_arm():
    aliases = {"low": {"name": "constant", "mu": 0.1}, "short": "constant:mu=0.2"}
    spec, own = "constant:mu=0.3,weight=phi", "my_method:Threshold"
    changes = "method.mu=0.3", "method.weight=phi"
    arms = {
        "gac": Arm("gac", "gac"),
        spec: Arm(spec, "constant", changes),
        f"low@{spec}": Arm("low", "constant", changes),
        "low": Arm("low", aliases["low"]),
        "short": Arm("short", "constant", ("method.mu=0.2",)),
        own: Arm(own, own),
        f"y@{own}:level=1": Arm("y", own, ("method.level=1",)),
        f"x@{own}:level=0.2,prior=a:b": Arm("x", own, ("method.level=0.2", "method.prior=a:b")),
    }
    assert {text: parse_arm(text, aliases) for text in arms} == arms
    for bad in ("", "gac:mu=1,nu", "@gac"):
        with pytest.raises(ConfigError, match="methods: "):
            parse_arm(bad)


def test_arm_config_sets_method_seed_and_folder(tmp_path):
    data = dump(tiny_config(write_tiny(tmp_path), tmp_path / "out"))
    config = arm_config(data, parse_arm("low@constant:mu=0.3"), 2, ["steps=7", f"out={tmp_path}/x"])
    assert (config.method.name, config.method.mu, config.seed) == ("constant", 0.3, 2)
    assert (config.steps, config.run_name, config.out) == (7, "low", f"{tmp_path}/x/low-2")
    assert arm_config(data, parse_arm("low@constant:mu=0.3"), 2, ["method.mu=0.7"]).method.mu == 0.7
    with pytest.raises(ConfigError, match="low: .*nope"):
        arm_config(data, parse_arm("low@constant:nope=1"), 0)


@pytest.mark.parametrize(("seeds", "quantile"), [(2, 12.706), (3, 4.303), (6, 2.571), (30, 2.045)])
def test_interval_coverage(seeds, quantile):
    """Over 400 samples of normal values."""
    rows = np.random.default_rng(1).normal(0.3, 2.0, (400, seeds))
    intervals = [interval(row) for row in rows]
    assert 0.92 < np.mean([low < 0.3 < high for low, high in intervals]) < 0.98
    assert np.subtract(*intervals[0]) == pytest.approx(
        -2 * quantile * rows[0].std(ddof=1) / math.sqrt(seeds), rel=1e-3
    )
    assert interval([0.5]) is None
    assert interval([0.5, 0.5]) == [0.5, 0.5]


def test_differences_are_paired_by_seed():
    rows = summary({"a": [0.1, 0.5, None, 0.9], "b": [0.2, 0.6, 0.3, 1.0], "none": [None] * 4}, "a")
    assert rows["b"]["against_baseline"]["difference"] == pytest.approx(0.1)
    assert rows["b"]["against_baseline"]["ci95"] == pytest.approx([0.1, 0.1])
    assert rows["b"]["mean"] == pytest.approx(0.525)
    assert rows["b"]["ci95"][0] < 0.525
    assert rows["a"]["against_baseline"]["difference"] == 0
    assert rows["none"] == {
        "final": [None] * 4,
        "mean": None,
        "ci95": None,
        "against_baseline": {"difference": None, "ci95": None},
    }


REWARDS = """
import os
import signal
from pathlib import Path
import torch
from tests.waiting import wait_until

started = Path(__file__).with_suffix(".started")

def stuck(completion, example):  # whatever signals it gets
    for number in 2 * (signal.SIGINT, signal.SIGHUP):
        os.kill(os.getpid(), number)  # Ctrl-C and a closed terminal are for the study
    started.touch()
    wait_until(lambda: False, "its end", 120)

def quick(completion, example):
    wait_until(started.exists, "the other run")
    assert torch.get_num_threads() == 1
    return 0.0
"""


@pytest.mark.slow(reason="starts a fork server")
def test_no_run_outlives_its_study(task, tmp_path, monkeypatch):
    """Neither one that is stuck when its study is interrupted, nor one whose study is killed."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # there are more jobs than cores
    monkeypatch.setattr(runs, "STOP_SECONDS", 3.0)
    (tmp_path / "rewards.py").write_text(REWARDS)
    outs = {"stuck": "stuck", "quick": "quick", "last": "stuck"}
    configs = [
        tiny_config(task, tmp_path / "runs" / out, reward=f"{tmp_path}/rewards.py:{name}", steps=1)
        for out, name in outs.items()
    ]
    with pytest.raises(SystemExit, match="quick: done"):
        runs.run_all(configs[:2], 99, report=True, log=sys.exit)
    assert "stopping after this step" in (tmp_path / "runs" / "stuck" / "log.txt").read_text()
    assert (tmp_path / "runs/quick/report.html").exists()
    assert "OMP_NUM_THREADS" not in os.environ
    wait_until(lambda: not multiprocessing.active_children(), "the end of the other run")
    with ranks.job(runs.run_all, configs[2:], 1, ranks=1) as (study,):
        wait_until((tmp_path / "runs" / "last" / "config.yaml").exists, "the last run")
        assert study.kill()

    def ended():
        with contextlib.suppress(RunDirectoryError), run_lock(tmp_path / "runs" / "last"):
            return True

    wait_until(ended, "the end of the last run")


STUDY_REWARD = """
import torch
from tests import tiny

def digit_reward(completion, example):
    print("scored")
    assert torch.get_num_threads() == 3
    return tiny.digit_reward(completion, example)
"""


@pytest.mark.slow(reason="trains several methods")
def test_gac_study_reports_failures_and_resumes(tmp_path, monkeypatch, capsys, no_images):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    config = tiny_config(
        write_tiny(tmp_path), tmp_path / "out", steps=2, reward="study_reward.py:digit_reward"
    )
    (tmp_path / "study_reward.py").write_text(STUDY_REWARD)
    path = tmp_path / "run.yaml"
    save(config, path)
    broken = {"broken": {"name": "luffy"}}  # needs demonstrations, which are missing
    path.write_text(path.read_text() + to_yaml({"methods": {**broken, "low": "constant:mu=0.1"}}))
    fields = ["data.demo_field=null", "data.demos=null"]
    study_command = ["study", str(path), "--methods"]
    options = ["--seeds", "2", "--baseline", "dr", "--jobs", "1", "--discard", "--set", *fields]
    arguments = [*study_command, "grpo", "broken", "dr@dr-grpo", *options]
    logs = [tmp_path / "out" / run / "log.txt" for run in ("grpo-0", "broken-0")]
    logs[0].parent.mkdir(parents=True)
    logs[0].write_text("stopped at its start\n")
    assert cli.main(arguments) == 1
    printed = capsys.readouterr().out
    assert f"{tmp_path}/out/broken-1: failed: ConfigError: data.demo_field=null: " in printed
    results = json.loads((tmp_path / "out/study.json").read_text())
    assert results["methods"]["broken"]["final"] == [None, None]
    assert sorted(results["failed"]) == [f"{tmp_path}/out/broken-{seed}" for seed in (0, 1)]
    evals = (tmp_path / "out/grpo-1/eval.jsonl").read_text().splitlines()
    finals = results["methods"]["grpo"]["final"]
    assert finals[0] is not None
    assert finals[1] == json.loads(evals[-1])["accuracy"]
    assert results["methods"]["dr"]["against_baseline"]["difference"] == 0
    first, failed = (log.read_text() for log in logs)
    assert first.startswith("stopped at its start\n")
    assert "\nscored\n" in first
    assert failed.startswith("Traceback")
    absent = [tmp_path / "out/grpo-0" / name for name in ("checkpoints", "report.html")]
    assert not any(path.exists() for path in absent)
    outs = [Path(out) for out in re.findall(r"^(\S+): done \(", printed, re.MULTILINE)]
    assert outs[0].name == "grpo-0"
    assert len(outs) == 4
    assert re.findall(r" \((\d) of 6, \d{1,3} s\)$", printed, re.MULTILINE) == [*"123456"]
    ends, starts = (
        [(out / f).stat().st_mtime for out in outs] for f in ("result.json", "config.yaml")
    )
    assert all(map(operator.le, ends, starts[1:]))  # one job at a time
    page_text = (tmp_path / "out/study.html").read_text()
    assert "broken-0: failed" in page_text
    assert "data:image/svg+xml" in page_text

    assert cli.main([*study_command, "grpo", "dr@dr-grpo", *options]) == 0
    assert "done" not in capsys.readouterr().out  # nothing was left to run
    resumed = json.loads((tmp_path / "out/study.json").read_text())
    assert resumed["methods"]["grpo"] == results["methods"]["grpo"]
    assert resumed["failed"] == {}

    assert cli.main([*study_command, "grpo", "--set", *fields, "steps=3"]) == 2
    assert re.search(
        r"grpo-0: .*finished run with a different steps.*delete", capsys.readouterr().err
    )
