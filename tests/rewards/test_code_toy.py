"""The laptop example with code rewards: its data is valid, and training increases the reward."""

import json
import sys
from pathlib import Path

import pytest

from examples import code_toy
from gac.config import load
from gac.rewards.check import check
from gac.train_config import TrainConfig
from gac.training.trainer import train
from tests.tiny import metrics

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    code_toy.write_task(folder)
    return folder


def rows(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_train_and_held_out_are_disjoint_and_in_the_vocabulary(folder):
    train_rows, held_out = rows(folder, "train"), rows(folder, "held_out")
    assert len(train_rows) == 350
    assert len(held_out) == 82
    assert not {r["id"] for r in train_rows} & {r["id"] for r in held_out}
    tokenizer = code_toy.make_tokenizer()
    for row in train_rows:
        for text in (row["prompt"] + " =", row["answer"], row["solution"]):
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == text


def test_the_programs_earn_the_reward_and_half_of_the_demonstrations_do_not(folder):
    first = folder / "first.jsonl"  # `data.limit` would draw a sample
    first.write_text("".join((folder / "train.jsonl").read_text().splitlines(keepends=True)[:16]))
    data = [f"data.prompts={first}"]
    assert check(code_toy.CONFIG, [*data, "data.demo_field=null"]).failing == ()
    wrong = [row["id"] for row in rows(folder, "train")[:16] if row["solution"] != row["answer"]]
    failing = [row.row for row in check(code_toy.CONFIG, data).failing]
    # another operator can give the same results, as in "two plus two" and "two times two"
    assert set(failing) <= set(wrong)
    assert len(failing) >= len(wrong) - 1 >= 5


@pytest.mark.full(reason="seconds of training; test_mbpp trains with the same reward")
def test_training_earns_more_reward(folder, tmp_path):
    """A short version: 24 sentences, 16 programs per step. Other seeds also end above 0.4."""
    config = load(
        TrainConfig,
        code_toy.CONFIG,
        [
            f"out={tmp_path / 'run'}",
            f"model.path={folder / 'init'}",
            "data.limit=24",
            f"data.prompts={folder / 'train.jsonl'}",
            "eval.data.prompts=null",
            "eval.every=0",
            "export=false",
            "rollouts.num_prompts=4",
            "rollouts.num_generations=4",
            "steps=25",
            "checkpoint_every=25",
            "optim.lr=3e-3",
            "optim.warmup_steps=3",
        ],
    )
    earned = [row["reward_mean"] for row in metrics(train(config))]
    assert sum(earned[:5]) / 5 < 0.1
    assert sum(earned[-5:]) / 5 > 0.25
