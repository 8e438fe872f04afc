"""Killed at any moment and started again, a run writes what an uninterrupted one does."""

from __future__ import annotations

import json
import random
import shutil
import time

import pytest

from gac.training.trainer import train

from . import ranks
from .tiny import metrics, tiny_config, write_tiny

RUN = {"steps": 12, "checkpoint_every": 2, "monitor_kl_every": 3}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def finish(config):
    """In a process of one thread, as all of them: sums over threads round differently."""
    return ranks.run(train, config, ranks=1)[0]


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    started = time.perf_counter()
    finish(tiny_config(task, out, **RUN))
    return metrics(out), time.perf_counter() - started


def test_twenty_kills_at_random_moments_change_nothing(task, tmp_path, whole):
    rng, config, kills = random.Random(0), tiny_config(task, tmp_path, **RUN), 0
    while kills < 20:
        ((process, _),) = ranks.start(train, config)
        # early kills hit the set-up; finished runs start over, so that every kill hits something
        if ranks.kill(process, after=rng.uniform(0, whole[1])):
            kills += 1
        else:
            assert metrics(tmp_path) == whole[0]
            (tmp_path / "metrics.jsonl").unlink()
            for path in sorted((tmp_path / "checkpoints").rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
    finish(config)
    assert metrics(tmp_path) == whole[0]


def test_kill_while_a_checkpoint_is_being_written(task, tmp_path, whole):
    config = tiny_config(task, tmp_path, **RUN)
    for step in (2, 6):
        aside = tmp_path / "checkpoints" / f".writing-{step:08d}"
        ((process, _),) = ranks.start(train, config)
        deadline = time.monotonic() + 60
        while not (aside / "__0_0.distcp").exists():
            assert process.is_alive() and time.monotonic() < deadline
            time.sleep(0.0002)
        assert ranks.kill(process)
        if not (tmp_path / "checkpoints" / f"step-{step:08d}").exists():
            assert aside.exists()  # the half-written one is left, and is in nobody's way
    finish(config)
    assert metrics(tmp_path) == whole[0]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"rollouts": {"prompts": 4, "completions": 4, "max_new_tokens": 5,
                                   "reuse": 3}}, id="reused-rollouts"),
        pytest.param({"dropout": True}, id="dropout"),
        pytest.param({"method": {"name": "sft"}}, id="no-rollouts"),
    ],
)  # fmt: skip
def test_a_kill_changes_nothing_with(task, tmp_path, whole, changes):
    """What else could carry state across steps: old log-probs, dropout masks, the data position."""
    changes = {**RUN, "steps": 8, **changes}
    folder = with_dropout(task, tmp_path / "task") if changes.pop("dropout", None) else task
    straight = finish(tiny_config(folder, tmp_path / "a", **changes))
    assert metrics(straight)[1]["grad_norm"] != whole[0][1]["grad_norm"]  # it is another run
    config = tiny_config(folder, tmp_path / "b", **changes)
    ((process, _),) = ranks.start(train, config)
    while not (tmp_path / "b" / "checkpoints" / "step-00000004").exists() and process.is_alive():
        time.sleep(0.001)
    ranks.kill(process)
    finish(config)
    assert metrics(tmp_path / "b") == metrics(straight)


def with_dropout(task, folder):
    """The same task with attention dropout, so that masks are drawn."""
    shutil.copytree(task, folder)
    path = folder / "init" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_dropout": 0.2}))
    return folder


def test_one_rank_killed_the_job_resumes_as_if_never(task, tmp_path):
    straight, cut = (
        tiny_config(task, tmp_path / name, **RUN, parallel={"timeout": 20}) for name in "ab"
    )
    ranks.run(train, straight, ranks=2)
    jobs = ranks.start(train, cut, ranks=2)
    while not (tmp_path / "b" / "checkpoints" / "step-00000004").exists():
        time.sleep(0.001)
    assert ranks.kill(jobs[1][0])
    survivor = ranks.collect(jobs[0][1], timeout=60)
    jobs[0][0].join()
    assert "rank 1 is gone" in str(survivor.error)
    ranks.run(train, cut, ranks=2)
    assert metrics(tmp_path / "b") == metrics(tmp_path / "a")
