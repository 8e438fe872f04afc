"""Data that changes during a run, and the demo scenarios that use it."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from gac.config import ConfigError, dump, load
from gac.data.shift import DemoShift, ShiftingOrder
from gac.demo import scenarios, task
from gac.models.causal_lm import ModelConfig, load_tokenizer
from gac.rewards import NoisyReward, RewardNoise, build_reward
from gac.training.feed import Feed
from gac.training.run_config import TrainConfig
from gac.training.trainer import Trainer
from tests.tiny import metrics, tiny_config, write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The tiny task with a second set of five demonstrations."""
    folder = write_tiny(tmp_path_factory.mktemp("tiny"))
    demos = [json.loads(line) for line in (folder / "demos.jsonl").read_text().splitlines()]
    task.write_rows(folder / "wrong.jsonl", task.wrong(demos, seed=0)[:5])
    return folder


def shifted(tiny, out, **changes):
    data = {
        "prompts": str(tiny / "prompts.jsonl"),
        "demos": str(tiny / "demos.jsonl"),
        "demo_shifts": [{"step": 3, "demos": str(tiny / "wrong.jsonl")}],
    }
    return tiny_config(tiny, out, **{"data": data, "steps": 6, "checkpoint_every": 1, **changes})


def test_demo_shift_happens_at_its_step_and_survives_a_resume(tiny, tmp_path):
    config = shifted(tiny, tmp_path)
    tokenizer = load_tokenizer(config.model)
    feed, ranks = Feed(config, tokenizer, 0, 1), [Feed(config, tokenizer, i, 2) for i in (0, 1)]
    data = dataclasses.replace(config.data, demo_shifts=None)
    plain = Feed(dataclasses.replace(config, data=data), tokenizer, 0, 1)
    demo_rows = []
    for step in range(6):
        rows = feed.demo_rows(step)
        assert len(rows) == 4
        halves = [sharded.demo_rows(step) for sharded in ranks]
        assert [r for pair in zip(*halves, strict=True) for r in pair] == rows
        if step < 3:
            assert rows == plain.demo_rows(step)
        demo_rows.append(rows)
        if step in (1, 3):  # before and after the change
            saved = json.loads(json.dumps(feed.state_dict()))
            feed = Feed(config, tokenizer, 0, 1)
            feed.load_state_dict(saved)
    wrong = {e.prompt + (e.demo or ()) for e in feed.demos[1]}
    right = {e.prompt + (e.demo or ()) for e in feed.demos[0]}
    assert all(row.ids in right - wrong for rows in demo_rows[:3] for row in rows)
    # 12 draws from 5 rows include every row
    assert {row.ids for rows in demo_rows[3:] for row in rows} == wrong
    with pytest.raises(ValueError, match="demo_shifts: .* 2 sets .* 1: resume with"):
        feed.load_state_dict(plain.state_dict())


def test_state_without_shifts_keeps_the_old_format():
    order = ShiftingOrder([0], [7], seed=1)
    assert [row for _, row in order.take(0, 3)] == [*order.orders[0]._permutation[:3]]
    assert order.state_dict() == order.orders[0].state_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"demo_shifts": [{"step": 0, "demos": "x"}]}}, "step=0: use a number >= 1"),
        (
            {"data": {"demo_shifts": [{"step": 5, "demos": "x"}, {"step": 5, "demos": "y"}]}},
            "demo_shifts: steps [5, 5] must",
        ),
        ({"reward_noise": {"rate": 1.5}}, "rate=1.5: use a number in [0, 1]"),
        ({"reward_noise": {"rate": 0.5, "start": -1}}, "start=-1: use a number >= 0"),
    ],
)
def test_invalid_shifts_and_noise_are_rejected(changes, message):
    with pytest.raises(ConfigError) as error:
        load(TrainConfig, changes)
    assert message in str(error.value)


def test_shifts_change_the_demos_of_the_sampled_prompts(tiny, tmp_path):
    """For methods that train on them; the file must have the same prompts."""
    rows = [json.loads(line) for line in (tiny / "demos.jsonl").read_text().splitlines()]
    later = tmp_path / "later.jsonl"
    task.write_rows(later, [row | {"solution": row["solution"][::-1]} for row in rows])
    shifts = [{"step": 2, "demos": str(later)}]
    data = {"prompts": str(tiny / "demos.jsonl"), "demo_shifts": shifts}
    config = shifted(tiny, tmp_path, method="luffy", data=data)
    tokenizer = load_tokenizer(config.model)
    feed, plain = Feed(config, tokenizer, 0, 1), Feed(config, tokenizer, 0, 1)
    plain.prompt_sets = plain.prompt_sets[:1]
    first, second = feed.prompt_sets
    for step in range(4):
        examples, expected = feed.examples(step), plain.examples(step)
        assert [e.prompt for e in examples] == [e.prompt for e in expected]
        assert all(e in (first, second)[step >= 2] for e in examples)
        more = feed.more_examples(1)[0]
        assert more in (first, second)[step >= 2] and plain.more_examples(1)
    assert feed.longest_row(9) >= max(len(e.prompt) + len(e.demo or ()) for e in second)
    task.write_rows(later, rows[1:])
    with pytest.raises(ValueError, match=r"demo_shifts: .*later.jsonl: .*'luffy'.* same prompts"):
        Feed(config, tokenizer, 0, 1)


def test_reward_noise_starts_at_its_step_and_is_reproducible():
    correct = build_reward("gac.demo.task:reward")
    noisy = [NoisyReward(correct, RewardNoise(0.35, start=3), seed=0, rank=rank) for rank in (0, 1)]
    texts, gold = ["5"] * 4000, [SimpleNamespace(answer="5", id="x")] * 4000
    assert noisy[0](texts, gold) == [1.0] * 4000  # step 0
    scores = {}
    for step in (2, 3, 4):
        for rank, reward in enumerate(noisy):
            reward.set_step(step)
            scores[step, rank] = reward(texts, gold)
    assert scores[2, 0] == [1.0] * 4000
    assert sum(scores[3, 0]) / 4000 == pytest.approx(0.65, abs=0.03)  # 4 standard errors
    assert len({tuple(scores[key]) for key in [(3, 0), (3, 1), (4, 0)]}) == 3
    noisy[0].set_step(3)
    assert noisy[0](texts[:2000], gold[:2000]) + noisy[0](texts[2000:], gold[2000:]) == scores[3, 0]
    low = NoisyReward(correct, RewardNoise(1.0, low=-1.0), seed=0)
    assert low(texts[:1], gold[:1]) == [-1.0]


def test_run_with_shift_and_noise_resumes_and_evaluates_without_noise(tiny, tmp_path):
    changes = {"reward_noise": {"rate": 1.0, "start": 2, "high": 1.0}}
    config = shifted(tiny, tmp_path / "whole", **changes)
    uninterrupted = Trainer(config)
    uninterrupted.run()
    rows = metrics(tmp_path / "whole")
    plain = shifted(tiny, tmp_path / "plain", data=dump(tiny_config(tiny, tmp_path))["data"])
    Trainer(plain).run()
    plain_rows = metrics(tmp_path / "plain")
    assert rows[:2] == plain_rows[:2]
    # step 2 has the same weights and so the same responses, but every reward is flipped
    assert rows[2]["reward_mean"] == pytest.approx(1 - plain_rows[2]["reward_mean"])
    assert rows[2]["demo_loss"] == plain_rows[2]["demo_loss"]
    first = (
        json.loads((tmp_path / name / "eval.jsonl").read_text().splitlines()[0])["accuracy"]
        for name in ("whole", "plain")
    )
    assert len(set(first)) == 1

    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for step in (5, 6):
        shutil.rmtree(tmp_path / "cut" / "checkpoints" / f"step-0000000{step}", ignore_errors=True)
    resumed = Trainer(dataclasses.replace(config, out=str(tmp_path / "cut")))
    resumed.run()
    assert metrics(tmp_path / "cut") == rows and resumed.state == uninterrupted.state


def test_wrong_demonstrations_keep_their_form():
    rows = task.rows(random.Random(0), ["-"] * 64, {"-": 0.3})
    corrupted = task.wrong(rows, seed=0)
    assert [r["solution"][1::2] for r in corrupted] == [r["solution"][1::2] for r in rows]
    rewards = [task.reward(r["solution"], SimpleNamespace(answer=r["answer"])) for r in corrupted]
    assert sum(rewards) == 0 and task.wrong(rows, seed=0) == corrupted != task.wrong(rows, seed=1)


# published studies used these data
CHECKSUMS = {
    "base": 1868863722,
    "demos": 2005498281,
    "eval": 3017796143,
    "eval_minus": 4091659920,
    "half": 3188872494,
    "mistaken": 3533848275,
    "plus": 1270013421,
    "prompts": 1462050546,
    "prompts_demos": 2342051441,
    "prompts_half": 2589341699,
    "prompts_mistaken": 4134503372,
    "prompts_plus": 3169402353,
    "prompts_wrong": 4060914412,
    "sparse": 1299374803,
    "wrong": 1728335522,
}


def random_base(out, steps, seeds, gate, data):
    """Replaces training of the base model, which the demo's tests cover, by a model of its size."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = out / f"{data}-{seeds[0]}"
    if not folder.exists():
        config = AutoConfig.from_pretrained(out / "task" / "init")
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        load_tokenizer(ModelConfig(str(out / "task" / "init"))).save_pretrained(folder)
    return folder


def test_every_scenario_is_a_configuration_that_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scenarios, "make_base", random_base)
    assert scenarios.main(["--out", str(tmp_path), "--steps", "5"]) == 0
    assert "spoil.yaml: demonstrations whose digits are random" in capsys.readouterr().out
    checksums = {p.stem: zlib.crc32(p.read_bytes()) for p in (tmp_path / "task").glob("*.jsonl")}
    assert checksums == CHECKSUMS
    configs = {name: load(TrainConfig, tmp_path / f"{name}.yaml") for name in scenarios.SCENARIOS}
    shift = configs["spoil"].data.demo_shifts
    assert shift == (DemoShift(2, str(tmp_path / "task/wrong.jsonl")),)
    assert configs["late"].data.demo_shifts == (DemoShift(2, str(tmp_path / "task/demos.jsonl")),)
    assert configs["noisy"].reward_noise == RewardNoise(0.35, start=2)
    assert len({config.model.path for config in configs.values()}) == 3
    for name, method in (("late", "constant"), ("sparse", "constant"), ("spoil", "srft")):
        base = Path(configs[name].model.path)
        config = scenarios.scenario_config(tmp_path, base, name, 5, method)
        changes = ["steps=3", f"out={tmp_path}/run-{name}"]
        Trainer(load(TrainConfig, dump(config), changes)).run()
        evaluation = json.loads((tmp_path / f"run-{name}/eval.jsonl").read_text().splitlines()[-1])
        assert evaluation["step"] == 3 and ("accuracy/+" in evaluation) == (name != "sparse")
