"""The scenarios of the studies: data that change during a run, and noisy rewards."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from gac.config import dump, load
from gac.demo import task
from gac.models.causal_lm import load_tokenizer
from gac.models.config import ModelConfig
from gac.training.feed import Feed
from gac.training.run_config import TrainConfig
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
    later = [row | {"from_step": 3} for row in task.wrong(demos, seed=0)]
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
        halves = [sharded.demo_rows(step) for sharded in ranks]
        assert [r for pair in zip(*halves, strict=True) for r in pair] == rows
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


def test_noise_depends_on_the_row_the_step_and_the_rank(monkeypatch):
    noisy = scenarios.NoisyReward("gac.demo.task:reward")
    rows = [SimpleNamespace(answer="5", id="x", extra={"flip": 0.35})] * 4000
    scores = {}
    for rank, step in ((0, 3), (0, 4), (1, 3)):
        monkeypatch.setenv("RANK", str(rank))
        noisy.set_step(step)
        scores[rank, step] = noisy(["5"] * 4000, rows)
        assert sum(scores[rank, step]) / 4000 == pytest.approx(0.65, abs=0.03)  # 4 standard errors
    assert len(set(map(tuple, scores.values()))) == 3
    noisy.set_step(3)
    assert noisy(["5"] * 2000, rows[:2000]) + noisy(["5"] * 2000, rows[2000:]) == scores[1, 3]
    exact = [SimpleNamespace(answer="5", id="x", extra={})] * 9
    assert noisy(["5"] * 9, exact) == [1.0] * 9


def test_a_noisy_run_resumes_and_evaluates_without_noise(tiny, tmp_path):
    prompts = jsonl(tiny / "prompts.jsonl")
    flipped = [row | {"from_step": 2, "flip": 1.0} for row in prompts]
    task.write_rows(tmp_path / "noisy.jsonl", [*prompts, *flipped])
    data = {"prompts": str(tmp_path / "noisy.jsonl"), "order": "tools.scenarios:Phases"}
    data |= {"demos": str(tiny / "demos.jsonl")}
    reward = {"name": "tools.scenarios:NoisyReward", "reward": "tests.tiny:digit_reward"}
    config = config_of(tiny, tmp_path / "whole", data=data, reward=reward)
    uninterrupted = Trainer(config)
    uninterrupted.run()
    Trainer(config_of(tiny, tmp_path / "plain", None)).run()
    rows, plain = metrics(tmp_path / "whole"), metrics(tmp_path / "plain")
    assert rows[:2] == plain[:2]
    # step 2 has the same weights and so the same responses, but every reward is flipped
    assert rows[2]["reward_mean"] == pytest.approx(1 - plain[2]["reward_mean"])
    assert rows[2]["demo_loss"] == plain[2]["demo_loss"]
    evaluations = [jsonl(tmp_path / name / "eval.jsonl")[0] for name in ("whole", "plain")]
    assert evaluations[0]["accuracy"] == evaluations[1]["accuracy"]
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


def test_variants_of_demonstrations() -> None:
    """Rows without a solution keep their place; every second solution of `half` is changed."""
    solved = [{"id": i, "solution": f"{i}.9'8.7."} for i in (9, 3, 5, 0)]
    rows = [solved[0], {"id": "none"}, *solved[1:]]
    variants = scenarios._variants(rows, seed=1)
    wrong, half = variants["wrong"], variants["half"]
    assert [row["id"] for row in wrong] == [9, "none", 3, 5, 0] and wrong[1] == rows[1]
    changed_rows = [a != b for a, b in zip(wrong, rows, strict=True)]
    assert changed_rows == [True, False, True, True, True]
    assert half == [rows[0], rows[1], wrong[2], rows[3], wrong[4]]
    mistaken = [row.get("solution") for row in variants["mistaken"]]
    assert mistaken == ["0.9'8.7.", None, "4.9'8.7.", "6.9'8.7.", "1.9'8.7."]


def random_base(out, steps, seeds, gate, data):
    """Replaces training of the base model, which the demo's tests cover, by a model of its size."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = out / f"{data}-{seeds[0]}"
    if not folder.exists():
        config = AutoConfig.from_pretrained(out / "task" / "init")
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        load_tokenizer(ModelConfig(str(out / "task" / "init"))).save_pretrained(folder)
    return folder


PHASES = {  # of a run of 40 steps: first step -> file
    "turn": {0: "plus", 16: "demos"},
    "late": {0: "wrong", 16: "demos"},
    "burst": {0: "demos", 16: "wrong", 20: "demos"},
    "sources": {4 * i: "plus" if i % 2 else "demos" for i in range(10)},
    "flicker": {
        0: "demos",
        **{n: "demos" if n % 4 else "wrong" for n in range(16, 40, 2)},
    },
    "spoil": {0: "demos", 16: "wrong"},
    "half": {0: "demos", 16: "half"},
    "mistaken": {0: "demos", 16: "mistaken"},
    **{name: {0: "demos"} for name in ("base", "second", "noisy", "sparse")},
    "wrong": {0: "wrong"},
}


def test_every_scenario_is_a_configuration_that_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scenarios, "make_base", random_base)
    assert scenarios.main(["--out", str(tmp_path), "--steps", "5", "--names", "second"]) == 0
    assert "second.yaml: same as base, but with another base model" in capsys.readouterr().out
    checksums = {p.stem: zlib.crc32(p.read_bytes()) for p in (tmp_path / "task").glob("*.jsonl")}
    assert checksums == CHECKSUMS
    configs = scenarios.write_scenarios(tmp_path, steps=5)
    assert configs == {n: load(TrainConfig, tmp_path / f"{n}.yaml") for n in scenarios.SCENARIOS}
    assert len({config.model.path for config in configs.values()}) == 3
    for name, phases in PHASES.items():
        for method, prefix in (("grpo", ""), ("luffy", "prompts_")):
            data = scenarios.scenario_config(tmp_path, Path("b"), name, 40, method).data
            if name == "noisy":
                rows = jsonl(data.prompts)
                assert [(row.get("from_step", 0), row.get("flip")) for row in rows] == (
                    [(0, None)] * 2000 + [(16, 0.35)] * 2000
                )
                continue
            rows = {n: jsonl(tmp_path / f"task/{prefix}{file}.jsonl") for n, file in phases.items()}
            expected = [row | {"from_step": n} for n, part in rows.items() for row in part]
            actual = jsonl(data.prompts if prefix else data.demos)
            assert [{"from_step": 0} | row for row in actual] == expected
            assert (data.order is None) == (len(phases) == 1)
    for name, method in (("late", "constant"), ("sparse", "constant"), ("spoil", "srft")):
        base = Path(configs[name].model.path)
        config = scenarios.scenario_config(tmp_path, base, name, 5, method)
        changes = ["steps=3", f"out={tmp_path}/run-{name}"]
        Trainer(load(TrainConfig, dump(config), changes)).run()
        evaluation = jsonl(tmp_path / f"run-{name}/eval.jsonl")[-1]
        assert evaluation["step"] == 3 and ("accuracy/+" in evaluation) == (name != "sparse")
