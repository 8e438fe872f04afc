"""Studies of a few methods, seeds and steps: their runs, statistics and files."""

import contextlib
import io
import json
import math
import multiprocessing
import operator
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from gac import cli
from gac.config import dump, save, to_yaml
from gac.errors import ConfigError, RunDirectoryError
from gac.parallel.run_lock import run_lock
from gac.study import runs
from gac.study.command import Arm, arm_config, parse_arm, unlike
from gac.study.results import cohens_d, interval, p_value, summary
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
        "against_baseline": {"difference": None, "ci95": None, "p": None, "cohens_d": None},
    }


@pytest.mark.parametrize("values", [(0.1, 0.3, 0.2, 0.5, -0.1), (0.02, 0.01, 0.03, 0.02, 0.02)])
def test_p_is_that_of_students_t(values):
    """Against the closed form for four degrees of freedom."""
    t = np.mean(values) / (np.std(values, ddof=1) / math.sqrt(5))
    expected = 1 - t / math.sqrt(t * t + 4) * (1 + 2 / (t * t + 4))
    assert p_value(values) == pytest.approx(expected, abs=2e-6)
    assert p_value([-x for x in values]) == p_value(values)
    assert p_value(values[:1]) is None


def test_an_interval_excludes_0_where_p_is_below_a_twentieth():
    rows = np.random.default_rng(0).normal(0.5, 1, (40, 6)).tolist()
    for row in rows:
        low, high = interval(row)
        assert (low > 0 or high < 0) == (p_value(row) < 0.05)


def test_cohens_d_by_hand():
    """Means 3 and 1; variances 1 and 3 with two and three degrees of freedom."""
    assert cohens_d([2, 3, 4], [-1, 0, 2, 3]) == pytest.approx(2 / math.sqrt((2 * 1 + 10) / 5))
    assert cohens_d([1.0], [2.0, 3.0]) is None
    assert cohens_d([1.0, 1.0], [1.0, 1.0]) is None


def test_arms_that_are_not_alike_are_named(task, tmp_path):
    configs = {
        name: tiny_config(task, tmp_path, method=name) for name in ("gac", "constant", "grpo")
    }
    tokens = {"gac": [100, 110], "constant": [101], "grpo": [120]}
    weights, budget = unlike(configs, tokens)
    assert "(gac phi, constant one)" in weights
    assert "gac:weight=one" in weights
    assert "grpo 120" in budget
    assert "budget_tokens" in budget
    del configs["constant"]
    assert unlike(configs, {"gac": [100], "grpo": [101]}) == []


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


class StudyRun(NamedTuple):
    """A finished `gac study` of three methods and two seeds, one of which fails."""

    folder: Path
    code: int
    printed: str
    results: dict[str, Any]

    def command(self, *methods: str) -> list[str]:
        fields = ["data.demo_field=null", "data.demos=null"]
        options = ["--seeds", "2", "--baseline", "dr", "--jobs", "1", "--discard", "--set", *fields]
        return ["study", str(self.folder / "run.yaml"), "--methods", *methods, *options]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Iterator[StudyRun]:
    folder = tmp_path_factory.mktemp("study")
    reward = "study_reward.py:digit_reward"
    config = tiny_config(write_tiny(folder), folder / "out", steps=2, reward=reward)
    (folder / "study_reward.py").write_text(STUDY_REWARD)
    save(config, folder / "run.yaml")
    methods = {"broken": {"name": "luffy"}, "low": "constant:mu=0.1"}  # no demonstrations
    with (folder / "run.yaml").open("a") as file:
        file.write(to_yaml({"methods": methods}))
    (folder / "out" / "grpo-0").mkdir(parents=True)
    (folder / "out" / "grpo-0" / "log.txt").write_text("stopped at its start\n")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setenv("OMP_NUM_THREADS", "3")
        command = StudyRun(folder, 0, "", {}).command("grpo", "broken", "dr@dr-grpo")
        code = cli.main(command)
        results = json.loads((folder / "out/study.json").read_text())
        yield StudyRun(folder, code, out.getvalue(), results)


@pytest.mark.slow(reason="trains several methods")
def test_a_failed_run_is_reported_and_does_not_stop_the_others(finished: StudyRun) -> None:
    out, results = finished.folder / "out", finished.results
    assert finished.code == 1
    assert f"{out}/broken-1: failed: ConfigError: data.demo_field=null: " in finished.printed
    assert results["methods"]["broken"]["final"] == [None, None]
    assert sorted(results["failed"]) == [f"{out}/broken-{seed}" for seed in (0, 1)]
    assert (out / "broken-0" / "log.txt").read_text().startswith("Traceback")
    page_text = (out / "study.html").read_text()
    assert "broken-0: failed" in page_text
    assert "data:image/svg+xml" in page_text


@pytest.mark.slow(reason="trains several methods")
def test_the_results_are_those_of_the_runs(finished: StudyRun) -> None:
    evals = (finished.folder / "out/grpo-1/eval.jsonl").read_text().splitlines()
    first, second = finished.results["methods"]["grpo"]["final"]
    assert first is not None
    assert second == json.loads(evals[-1])["accuracy"]
    assert finished.results["methods"]["dr"]["against_baseline"]["difference"] == 0


@pytest.mark.slow(reason="trains several methods")
def test_a_run_appends_to_its_log_and_discards_its_checkpoints(finished: StudyRun) -> None:
    folder = finished.folder / "out" / "grpo-0"
    log = (folder / "log.txt").read_text()
    assert log.startswith("stopped at its start\n")
    assert "\nscored\n" in log
    assert not (folder / "checkpoints").exists()
    assert not (folder / "report.html").exists()


@pytest.mark.slow(reason="trains several methods")
def test_one_job_runs_at_a_time(finished: StudyRun) -> None:
    outs = [Path(out) for out in re.findall(r"^(\S+): done \(", finished.printed, re.MULTILINE)]
    assert outs[0].name == "grpo-0"
    assert len(outs) == 4
    counts = re.findall(r" \((\d) of 6, \d{1,3} s\)$", finished.printed, re.MULTILINE)
    assert counts == [*"123456"]
    ends = [(out / "result.json").stat().st_mtime for out in outs]
    starts = [(out / "config.yaml").stat().st_mtime for out in outs]
    assert all(map(operator.le, ends, starts[1:]))


@pytest.mark.slow(reason="trains several methods")
def test_a_finished_run_is_not_repeated(finished: StudyRun, capsys) -> None:
    assert cli.main(finished.command("grpo", "dr@dr-grpo")) == 0
    assert "done" not in capsys.readouterr().out
    resumed = json.loads((finished.folder / "out/study.json").read_text())
    assert resumed["methods"]["grpo"] == finished.results["methods"]["grpo"]
    assert resumed["failed"] == {}


@pytest.mark.slow(reason="trains several methods")
def test_a_finished_run_with_other_settings_is_an_error(finished: StudyRun, capsys) -> None:
    assert cli.main([*finished.command("grpo", "dr@dr-grpo"), "steps=3"]) == 2
    message = r"grpo-0: .*finished run with a different steps.*delete"
    assert re.search(message, capsys.readouterr().err)
