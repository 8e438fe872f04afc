"""Groups without signal, resampling, overlong responses and readable samples."""

import json
import logging
import re
from pathlib import Path

import pytest

from gac.rollouts import sampling
from gac.training.columns import EVALUATION, METRICS
from gac.training.trainer import Trainer
from tests.tiny import digit_reward, metrics, tiny_config
from tools.reference_pages import metrics_tables


def constant(completion, example):
    return 1.0


def only_additions_vary(completion, example):
    """Every subtraction has the same reward for all its rollouts."""
    digits = sum(c.isdigit() for c in completion) / max(len(completion), 1)
    return digits if example.prompt_text.startswith("+") else 0.5


def run(task, tmp_path, rollouts=None, **changes):
    settings = {
        "num_prompts": 4,
        "num_generations": 4,
        "max_completion_length": 5,
        **(rollouts or {}),
    }
    Trainer(tiny_config(task, tmp_path / "run", rollouts=settings, eval={}, **changes)).run()
    return metrics(tmp_path / "run")


def test_frac_reward_zero_std_are_counted_and_warned_about(task, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        rows = run(task, tmp_path, reward="tests.rollouts.test_groups:constant", steps=11)
    assert {row["frac_reward_zero_std"] for row in rows} == {1.0}
    warning = (
        "for 10 steps, every rollout since the start or resume has had the reward 1, so only the"
    )
    assert caplog.text.count(warning) == 1


def test_prompts_without_signal_are_replaced(task, tmp_path):
    reward = "tests.rollouts.test_groups:only_additions_vary"
    plain = run(task, tmp_path / "plain", reward=reward)
    again = run(task, tmp_path / "again", reward=reward, rollouts={"dynamic_sampling_retries": 3})
    assert any(row["frac_reward_zero_std"] > 0 for row in plain)
    assert all(row["resampled_prompts"] == 0 for row in plain)
    assert sum(row["resampled_prompts"] for row in again) > 0
    assert [r["sampled_completions"] for r in again] == [
        16 + 4 * row["resampled_prompts"] for row in again
    ]


def test_prompts_are_numbered_as_in_a_single_process(task, tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "world_size", lambda: 3)
    monkeypatch.setattr(sampling, "rank", lambda: 2)
    trainer = Trainer(tiny_config(task, tmp_path, eval={}))
    rollouts = trainer.sampler(trainer.model, trainer.feed.examples(0), 0)
    assert [row.unit for row in rollouts.rows] == [unit for unit in (2, 5, 8, 11) for _ in range(4)]
    assert [row.sequence for row in rollouts.rows] == list(range(16))
    assert all(type(row.unit) is int for row in rollouts.rows)


def test_overlong_responses(task, tmp_path):
    plain = run(task, tmp_path / "plain", steps=1)
    assert 0 < plain[0]["completions/clipped_ratio"] <= 1
    skipped = run(
        task, tmp_path / "skipped", steps=1, rollouts={"mask_truncated_completions": True}
    )
    assert skipped[0]["reward_mean"] == plain[0]["reward_mean"]
    assert skipped[0]["completions/mean_length"] == plain[0]["completions/mean_length"]
    assert skipped[0]["tokens"] < plain[0]["tokens"]
    soft = run(task, tmp_path / "soft", steps=1, rollouts={"overlong_tokens": 2})
    assert soft[0]["reward_mean"] < plain[0]["reward_mean"]


def test_samples_of_text(task, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="gac"):
        run(
            task,
            tmp_path,
            rollouts={"num_iterations": 2, "log_samples_every": 1, "print_samples": True},
        )
    lines = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert [entry["step"] for entry in entries] == [1, 3]
    (first, _) = entries[0]["prompts"]
    assert len(first["completions"]) == 4
    assert "text" in first["completions"][0]
    assert first["prompt"] in caplog.text


def test_rewards_by_source(task, tmp_path):
    sources = [
        {"path": str(task / "prompts.jsonl"), "name": "a", "weight": 3},
        {"path": str(task / "eval.jsonl"), "name": "b"},
    ]
    data = {"sources": sources, "demos": str(task / "demos.jsonl")}
    for row in run(task, tmp_path, data=data, steps=2):
        assert "demo_nll/" not in row
        assert row["reward_mean"] == pytest.approx(
            (3 * row["reward_mean/a"] + row["reward_mean/b"]) / 4
        )


def whole(completion, example):
    """1 for about half of the completions."""
    return float(sum(map(ord, completion)) % 2)


def test_terms_of_the_reward_and_solved_prompts(task, tmp_path):
    terms = [
        {"reward": "tests.tiny:digit_reward", "weight": 0.5},
        {"reward": "tests.rollouts.test_groups:whole", "weight": 2.0},
        {"reward": "tests.rollouts.test_groups:whole", "weight": -0.5},
    ]
    rollouts = {"num_generations": 2, "log_sample_prompts": 4, "log_samples_every": 1}
    rows = run(task, tmp_path, reward={"sum": terms}, rollouts=rollouts)
    samples = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    for row, line in zip(rows, map(json.loads, samples), strict=True):
        groups = [[c["reward"] for c in p["completions"]] for p in line["prompts"]]
        assert row["frac_solved"] == sum(min(group) >= 1 for group in groups) / 4
        assert row["frac_unsolved"] == sum(max(group) < 1 for group in groups) / 4
        texts = [c["text"] for p in line["prompts"] for c in p["completions"]]
        names = ("tests.tiny:digit_reward", *(f"{whole.__module__}:whole-{n}" for n in (1, 2)))
        for name, reward in zip(names, (digit_reward, whole, whole), strict=True):
            mean = sum(reward(text, None) for text in texts) / 8
            assert row[f"reward/{name}"] == pytest.approx(mean)
    assert len({row["frac_unsolved"] for row in rows}) > 1


METHODS_WITH_COLUMNS = [
    "constant-alarm",
    "amft",
    "mgda",
    {"name": "gac-gated", "update_every": 1},
]


@pytest.mark.parametrize("method", METHODS_WITH_COLUMNS, ids=str)
def test_every_column_is_documented(task, tmp_path, method):
    Trainer(tiny_config(task, tmp_path / "run", method=method, steps=2)).run()
    for file, columns in (("metrics", METRICS), ("eval", EVALUATION)):
        known = re.sub("[A-Z]{4,}", ".+", re.escape(", ".join(columns))).replace(r",\ ", "|")
        for line in (tmp_path / "run" / f"{file}.jsonl").read_text().splitlines():
            assert [name for name in json.loads(line) if not re.fullmatch(known, name)] == []
    page = Path(__file__).resolve().parents[2] / "docs" / "reference" / "index.md"
    assert metrics_tables() in page.read_text()
