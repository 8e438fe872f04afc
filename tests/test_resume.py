"""A run that is killed at any moment and resumed writes the same metrics as an uninterrupted run."""

from __future__ import annotations

import json
import random
import shutil

import pytest

from gac.training.trainer import train

from . import kills, ranks
from .tiny import metrics, tiny_config

RUN = {"steps": 8, "checkpoint_every": 2, "monitor_kl_every": 3}


def alone(work, *args):
    """Run in a single-threaded process, like every run here: sums over several threads round
    differently.
    """
    return ranks.run(work, *args, ranks=1)[0]


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory):
    """Metrics of an uninterrupted run, and its number of function calls and returns."""
    out = tmp_path_factory.mktemp("whole")
    calls = alone(kills.count_calls, tiny_config(task, out, **RUN))
    return metrics(out), calls


def test_twenty_kills_at_random_moments_change_nothing(task, tmp_path, whole):
    rng, config, kills_left = random.Random(0), tiny_config(task, tmp_path, **RUN), 20
    while kills_left:
        # early kills hit the setup; a finished run is deleted and started over, so that every kill
        # interrupts something
        if alone(kills.at_call, config, rng.randrange(whole[1])) is None:
            kills_left -= 1
        else:
            assert metrics(tmp_path) == whole[0]
            (tmp_path / "metrics.jsonl").unlink()
            shutil.rmtree(tmp_path / "checkpoints")
    alone(train, config)
    assert metrics(tmp_path) == whole[0]


def test_kill_while_a_checkpoint_is_being_written(task, tmp_path, whole):
    config = tiny_config(task, tmp_path, **RUN)
    checkpoints = tmp_path / "checkpoints"
    aside, final = checkpoints / ".writing-00000002", checkpoints / "step-00000002"
    for file in ("__0_0.distcp", ".metadata.tmp", "progress.json"):
        assert alone(kills.at_event, config, "open", f"{aside.name}/{file}") is None
        assert aside.exists() and not (aside / file).exists() and not final.exists()
    assert alone(kills.at_event, config, "os.rename", final.name) is None
    assert (aside / "progress.json").exists() and not final.exists()
    size = (aside / "__0_0.distcp").stat().st_size // 2
    assert alone(kills.at_byte, config, size) is None
    assert (aside / "__0_0.distcp").stat().st_size == size and not final.exists()
    alone(train, config)  # the partial checkpoint does not get in the way
    assert metrics(tmp_path) == whole[0]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"rollouts": {"prompts": 4, "completions": 4, "max_new_tokens": 5, "reuse": 3}},
            id="reused-rollouts",
        ),
        pytest.param({"dropout": True}, id="dropout"),
        pytest.param({"method": {"name": "sft"}}, id="no-rollouts"),
    ],
)
def test_a_kill_changes_nothing_with(task, tmp_path, whole, changes):
    """Other state that must survive across steps: old log-probs, dropout masks, the data position."""
    changes = {**RUN, **changes}
    folder = with_dropout(task, tmp_path / "task") if changes.pop("dropout", None) else task
    straight = alone(train, tiny_config(folder, tmp_path / "a", **changes))
    assert metrics(straight)[1]["grad_norm"] != whole[0][1]["grad_norm"]  # the option has an effect
    config = tiny_config(folder, tmp_path / "b", **changes)
    assert alone(kills.at_event, config, "os.rename", "step-00000006") is None
    assert len(metrics(tmp_path / "b")) == 6
    alone(train, config)
    assert metrics(tmp_path / "b") == metrics(straight)


def with_dropout(task, folder):
    """A copy of the task with attention dropout, so that dropout masks are sampled."""
    shutil.copytree(task, folder)
    path = folder / "init" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_dropout": 0.2}))
    return folder


def test_one_rank_killed_the_job_resumes_as_if_never(task, tmp_path):
    straight, cut = (
        tiny_config(task, tmp_path / name, **RUN, parallel={"timeout": 20}) for name in "ab"
    )
    ranks.run(train, straight, ranks=2)
    with ranks.job(kills.at_event, cut, "open", "-00000006/__1_0.distcp", "1", ranks=2) as both:
        survivor, killed = (one.result() for one in both)
    assert killed is None and "rank 1 is gone" in str(survivor.error)
    ranks.run(train, cut, ranks=2)
    assert metrics(tmp_path / "b") == metrics(tmp_path / "a")
