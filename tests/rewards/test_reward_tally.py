"""A reward's dropped rows and counters appear in the metrics and the log, and the reward is closed
when the run ends.
"""

import logging

import pytest

from gac.rewards import Reward, RewardError
from gac.rewards.base import Tally, closing_reward
from gac.training.trainer import train
from tests.tiny import metrics, tiny_config


class Flaky(Reward):
    """Cannot score every fifth row; counts its calls."""

    name = "flaky"
    instances: list["Flaky"] = []  # noqa: RUF012 - the run creates the instance, the test inspects it

    def __init__(self) -> None:
        self.rows = self.calls = self.closed = 0
        self.instances.append(self)

    def outcomes(self, completions, examples):
        self.calls += 1
        scores = []
        for _ in completions:
            self.rows += 1
            scores.append(ValueError("no score") if self.rows % 5 == 0 else self.rows % 2)
        return scores

    def counts(self):
        return {"calls": self.calls}

    def close(self):
        self.closed += 1


def run(task, out, caplog, on_error):
    Flaky.instances.clear()
    reward = {"name": "tests.rewards.test_reward_tally:Flaky", "on_error": on_error}
    with caplog.at_level(logging.WARNING, "gac"):
        train(tiny_config(task, out, reward=reward, eval={"data": {"prompts": None}}))


def test_counts_are_logged_per_step_and_at_the_end(task, tmp_path, caplog):
    run(task, tmp_path / "run", caplog, "drop")
    (reward,) = Flaky.instances
    rows = metrics(tmp_path / "run")
    assert [row["rewards_calls"] for row in rows] == [1, 1, 1, 1]
    assert [row["rewards_dropped"] for row in rows] == [3] * 4  # every fifth of 16 rows per step
    assert reward.dropped == 12
    assert reward.closed == 1
    assert "reward flaky: 12 dropped, 4 calls" in caplog.text


def test_failed_run_logs_counts_and_closes_the_reward(task, tmp_path, caplog):
    with pytest.raises(RewardError, match="'flaky'.*no score.*on_error: drop"):
        run(task, tmp_path / "run", caplog, "raise")
    (reward,) = Flaky.instances
    assert reward.closed == 1
    assert "reward flaky: 1 calls" in caplog.text


def test_events_before_the_tally_and_other_names():
    reward, counts = Flaky(), {"old": 3}
    reward.dropped, reward.counts = 2, lambda: counts
    tally = Tally(reward)
    counts |= {"old": 4, "new": 5}
    assert tally.new_counts() == {"rewards_dropped": 0, "rewards_old": 1, "rewards_new": 5}
    reward.dropped = 9
    assert tally.new_counts() == {"rewards_dropped": 7, "rewards_old": 0, "rewards_new": 0}


def test_a_reward_is_closed_even_if_its_counts_fail():
    reward = Flaky()
    with closing_reward(reward):
        reward.counts = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError), closing_reward(reward):
            pass
        reward.counts = dict
    assert reward.closed == 2
