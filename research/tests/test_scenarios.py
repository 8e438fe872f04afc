"""The scenarios of the signal measurements."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

from gac.config import dump, load
from gac.demo import task
from gac.study.command import Arm, arm_config
from gac.train_config import TrainConfig
from gac.training.trainer import Trainer
from research import scenarios
from research.validate_signals import LARGER
from tests.tiny import metrics


def jsonl(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_wrong_demonstrations_keep_their_form():
    rows = task.rows(random.Random(0), ["-"] * 64, {"-": 0.3})
    corrupted = scenarios.wrong(rows, seed=0)
    assert [r["solution"][1::2] for r in corrupted] == [r["solution"][1::2] for r in rows]
    rewards = [task.reward(r["solution"], SimpleNamespace(answer=r["answer"])) for r in corrupted]
    assert sum(rewards) == 0
    assert scenarios.wrong(rows, seed=0) == corrupted != scenarios.wrong(rows, seed=1)


def test_the_settings_of_the_signal_measurements_train(tmp_path, monkeypatch):
    monkeypatch.setattr(scenarios, "make_base", lambda out, steps: out / "task" / "init")
    configs = scenarios.write_scenarios(tmp_path, steps=4)
    assert (configs["base"].data.order, configs["base"].eval.every) == (None, 1)
    rows = jsonl(configs["spoil"].data.demos)
    assert [row.get("from_step", 0) for row in rows] == [0] * 256 + [1] * 256
    changes = ["model.random_init=true", f"out={tmp_path}/run", "method=constant-alarm", "eval={}"]
    Trainer(load(TrainConfig, dump(configs["spoil"]), changes)).run()
    assert len(metrics(tmp_path / "run")) == 4


def test_the_settings_with_a_pretrained_model_are_valid(tmp_path, monkeypatch):
    monkeypatch.setenv("GAC_DATA", str(tmp_path))
    configs = scenarios.real_scenarios(tmp_path, model="a/model", steps=3)
    arm = Arm("mu", {"name": "constant", "mu": 0.5})
    runs = [arm_config(dump(config), arm, 0, LARGER) for config in configs.values()]
    assert [config.rollouts.max_completion_length for config in runs] == [12, 4]
