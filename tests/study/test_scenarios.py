"""Data that change during a run."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from gac.config import dump, load
from gac.demo import task
from gac.models.causal_lm import load_tokenizer
from gac.train_config import TrainConfig
from gac.training.feed import Feed
from gac.training.trainer import Trainer
from tests.tiny import metrics, tiny_config, write_tiny
from tools import scenarios


def jsonl(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The tiny task, with other demonstrations from step 3 on."""
    folder = write_tiny(tmp_path_factory.mktemp("tiny"))
    demos = jsonl(folder / "demos.jsonl")
    later = [row | {"from_step": 3} for row in scenarios.wrong(demos, seed=0)]
    task.write_rows(folder / "changing.jsonl", [*demos, *later])
    return folder


def config_of(tiny, out, order="tools.scenarios:Phases", **changes):
    data = {
        "prompts": str(tiny / "prompts.jsonl"),
        "demos": str(tiny / ("changing.jsonl" if order else "demos.jsonl")),
        "order": order,
    }
    return tiny_config(tiny, out, **{"data": data, "steps": 6, "checkpoint_every": 1, **changes})


def test_rows_change_at_their_step_on_every_rank_and_after_a_resume(tiny, tmp_path):
    config, plain = config_of(tiny, tmp_path), config_of(tiny, tmp_path, None)
    tokenizer = load_tokenizer(config.model)
    feed, ranks = Feed(config, tokenizer, 0, 1), [Feed(config, tokenizer, i, 2) for i in (0, 1)]
    plain = Feed(plain, tokenizer, 0, 1)
    right, wrong = (
        {e.prompt + e.demo for e in part} for part in (feed.demos[:12], feed.demos[12:])
    )
    for step in range(6):
        rows, before = feed.demo_rows(step), plain.demo_rows(step)
        assert [
            r
            for pair in zip(*[sharded.demo_rows(step) for sharded in ranks], strict=True)
            for r in pair
        ] == rows
        if step < 3:
            assert rows == before
        assert {row.ids for row in rows} <= (right if step < 3 else wrong)
        assert [row.ids[: row.start] for row in rows] == [row.ids[: row.start] for row in before]
        if step in (1, 3):
            saved = json.loads(json.dumps(feed.state_dict()))
            feed = Feed(config, tokenizer, 0, 1)
            feed.load_state_dict(saved)
    with pytest.raises(ValueError, match="sets of sizes"):
        scenarios.Phases([*feed.demos[:5], *feed.demos[12:]], 0)


def test_prompts_bring_other_demonstrations(tiny, tmp_path):
    data = {"prompts": str(tiny / "changing.jsonl"), "order": "tools.scenarios:Phases"}
    config = config_of(tiny, tmp_path, method="luffy", data=data)
    feed = Feed(config, load_tokenizer(config.model), 0, 1)
    for step in range(5):
        for example in (*feed.examples(step), *feed.more_examples(1)):
            assert example.extra.get("from_step", 0) == 3 * (step >= 3)


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
