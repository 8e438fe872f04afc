"""Mistakes in the inputs of a run are found before any work."""

from __future__ import annotations

import logging

import pytest
from transformers import AutoConfig

from gac.config import ConfigError
from gac.data import Example
from gac.models.config import ModelConfig
from gac.rewards import RewardError, build_reward
from gac.training.startup import check_positions
from gac.training.trainer import Trainer
from tests.tiny import tiny_config, write_tiny

EXAMPLE = Example("row 1", (1,), "what?", None, None, {})


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("task"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size=0: use an integer >= 1"),
        ({"loss": {"clip_low": 2}}, r"loss.clip_low=2.*: use a number in \[0, 1\]"),
        ({"rollouts": {"num_generations": 1}}, "rollouts.num_generations=1: .*: use a number >= 2"),
        ({"eval": {"every": 2}}, "eval.every=2: there is nothing to evaluate: set eval.data"),
        ({"method": {"name": "grpo", "mu": 0.3}}, r"method.mu: unknown key 'mu'.* none"),
        ({"model": {"lora": {"rank": 0}}}, "model.lora: rank=0: use an integer >= 1"),
    ],
)
def test_invalid_values(task, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        tiny_config(task, tmp_path, **changes)


def model_with(task, tmp_path, **changes):
    """The tiny model with changed keys of its configuration."""
    from gac.demo.task import make_tokenizer

    config = AutoConfig.from_pretrained(task / "init")
    for name, value in changes.items():
        setattr(config, name, value)
    config.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    return {"path": str(tmp_path / "model"), "random_init": True}


def test_tokens_beyond_the_embedding(task, tmp_path):
    model = model_with(task, tmp_path, vocab_size=8)
    message = r"^model.path='.*/model': the tokenizer encodes .* as \d+, but .* has only 8 rows"
    with pytest.raises(ConfigError, match=message):
        Trainer(tiny_config(task, tmp_path / "run", model=model))


def test_rows_beyond_the_positions(task, tmp_path, caplog):
    model = model_with(task, tmp_path, max_position_embeddings=8)
    with caplog.at_level(logging.WARNING):
        Trainer(tiny_config(task, tmp_path / "run", model=model))
    assert "8 positions, but a prompt with its response may have" in caplog.text
    assert "tokens: lower eval.max_completion_length, unless" in caplog.text


def test_rows_beyond_learned_positions(tmp_path):
    AutoConfig.for_model("gpt2", n_positions=8).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    check_positions(config, 8, "this.key")
    with pytest.raises(ConfigError, match="8 positions, but .* 9 tokens: lower this.key"):
        check_positions(config, 9, "this.key")


REWARD = """\
import time

def equal(completion, example):
    return 1.0

def broken(completion, example):
    return 1 / 0

def slow(completion, example):
    time.sleep(10_000)
"""


def test_a_reward_in_a_file(tmp_path, monkeypatch):
    (tmp_path / "rw.py").write_text(REWARD)
    assert build_reward(f"{tmp_path}/rw.py:equal")([""], [EXAMPLE]) == [1.0]
    with pytest.raises(ValueError, match=r"no file '\./rw\.py' in this folder or next to"):
        build_reward("./rw.py:equal")
    monkeypatch.syspath_prepend(str(tmp_path))  # as `gac train FOLDER/run.yaml` does
    assert build_reward("./rw.py:equal")([""], [EXAMPLE]) == [1.0]
    with pytest.raises(
        RewardError, match=r"ZeroDivisionError: division by zero \(.*rw\.py, line 7"
    ):
        build_reward("rw.py:broken")([""], [EXAMPLE])
    (tmp_path / "bad.py").write_text("x = 1\ny = missing\n")
    with pytest.raises(ValueError, match=r"NameError: .*bad\.py, line 2"):
        build_reward("./bad.py:equal")


def test_a_reward_that_hangs(tmp_path):
    (tmp_path / "hangs.py").write_text(REWARD)
    reward = build_reward({"name": f"{tmp_path}/hangs.py:slow", "deadline": 0.2})
    with pytest.raises(RewardError, match=r"no result after 0\.2 s .*line 10.*prompt: 'what\?'"):
        reward(["x"], [EXAMPLE])
