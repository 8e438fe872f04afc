"""The parts of an evaluation, without a model: answers, settings, files, damaged results."""

import gzip
import json
import logging
import re
from dataclasses import replace

import pytest
import torch

from gac.data import Example
from gac.demo.task import ALPHABET
from gac.errors import ConfigError
from gac.evaluation import suite
from gac.evaluation.config import EvalConfig, EvalTask
from gac.evaluation.demo_nll import demo_nll
from gac.evaluation.progress import Progress
from gac.evaluation.suite import read_samples, run_suite
from gac.evaluation.table import align_columns, markdown_table
from gac.evaluation.task import generate_answers, split_of, summary
from gac.rewards.base import RowReward
from gac.rollouts.engines import Engine
from gac.training.trainer import Trainer
from tests.evaluation.test_suite import answer
from tests.evaluation.test_suite import suite as suite_config
from tests.tiny import tiny_config

EXAMPLES = [
    Example(f"row{i}", (5 + i, 6), "", None, None, {"level": i % 2}, source=f"s{i}")
    for i in range(5)
]


def test_split_of() -> None:
    assert split_of(EvalTask(), EXAMPLES[1]) is None
    assert split_of(EvalTask(split_field="level"), EXAMPLES[1]) == "1"
    for extra, fields in (({}, "none"), ({"a": 1, "b": 2}, "a, b")):
        with pytest.raises(ConfigError, match=f"'kind' is not among .* row 'row1': {fields}$"):
            split_of(EvalTask(split_field="kind"), replace(EXAMPLES[1], extra=extra))


@pytest.mark.parametrize("scores", [(0.5, 2.0), (0.5, -1.0)])
def test_scores_outside_of_0_to_1_have_a_bootstrap_interval(scores) -> None:
    row = summary([answer(i, score) for i, score in enumerate(scores)], EvalTask())
    assert row["ci95"] == sorted(scores)


CLOSED: list[str] = []


class Labeled(RowReward):
    """A reward that records when it is closed."""

    def __init__(self, label: str = "own") -> None:
        self.label = label

    def score(self, completion, example) -> float:
        return 1.0

    def close(self) -> None:
        CLOSED.append(self.label)


@pytest.mark.parametrize(
    "text", ["{", "{}", "[]", '{"tasks": []}', '{"tasks": {"a": {}}}', '{"tasks": {"a": []}}']
)
def test_damaged_results_are_named(tmp_path, text) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ConfigError, match=r"results\.json: not a gac eval result"):
        suite._resume(EvalConfig(), tmp_path)


ROWS = [{"task": "a", **answer(i * i, i / 7)._asdict()} for i in range(99)]
PACKED = gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        PACKED[:-9],
        PACKED[:20] + bytes(200) + PACKED[220:],
        gzip.compress(b"{"),
        gzip.compress(b"{}"),
        gzip.compress(b'{"task": "a"}'),
        gzip.compress(b"[1]"),
        gzip.compress(b"1"),
    ],
    ids=["no gzip", "cut off", "damaged", "no JSON", "no task", "no answer", "list", "number"],
)
def test_damaged_samples_are_named(tmp_path, data) -> None:
    with pytest.raises(FileNotFoundError, match=r"no samples\.jsonl\.gz found"):
        read_samples(tmp_path)
    (tmp_path / "samples.jsonl.gz").write_bytes(PACKED)
    assert len(read_samples(tmp_path)["a"]) == 99
    (tmp_path / "samples.jsonl.gz").write_bytes(data)
    with pytest.raises(ConfigError, match=r"samples\.jsonl\.gz: not a gac eval result"):
        read_samples(tmp_path)


def test_tables_of_text() -> None:
    lines = [["", "a", ""], ["method", "mean", "n"], ["a|b", "1.25", "10"], ["b", "-", ""]]
    assert align_columns(lines).splitlines() == [
        "           a",
        "-" * 16,
        "method  mean   n",
        "a|b     1.25  10",
        "b          -",
    ]
    with pytest.raises(ValueError, match="zip"):
        align_columns([["a", "b"], ["c"]])
    assert markdown_table(lines[1], lines[2:]).splitlines() == [
        "| method | mean | n |",
        "| --- | --- | --- |",
        "| a\\|b | 1.25 | 10 |",
        "| b | - |  |",
    ]


def test_each_task_uses_its_own_reward_and_all_are_closed(task, tmp_path) -> None:
    CLOSED.clear()
    prompts = {"prompts": str(task / "eval.jsonl")}
    more = {"data": {**prompts, "limit": 3}, "reward": "tests.evaluation.test_eval_parts:Labeled"}
    more |= {"temperature": 1.0, "batch": 1, "samples": 2, "max_completion_length": 4}
    evaluation = {"data": prompts, "max_completion_length": 5, "tasks": {"more": more}}
    trainer = Trainer(tiny_config(task, tmp_path, eval=evaluation | {"stop": [*ALPHABET]}))
    state = torch.get_rng_state()
    row = trainer.evaluator(trainer.engine.load(trainer.model))
    assert torch.equal(torch.get_rng_state(), state)
    assert (row["prompts"], row["prompts/more"]) == (8, 3)
    assert row["accuracy/more"] == 1 > row["accuracy"]
    assert row["response_length/more"] <= 4
    assert 0 < row["seconds"] < 600
    assert (row["response_length"], row["truncated"]) == (1, 0)  # each token is a stop token
    _, job = trainer.evaluator.jobs.values()
    first, other = (
        [
            answer.response
            for answer in generate_answers(
                trainer.engine, job.examples[:1] * 2, job.reward, job.task, seed
            )
        ]
        for seed in (0, 1)
    )
    assert first[:2] != first[2:]
    assert first != other
    trainer.evaluator.close()
    assert CLOSED == ["own"]


def test_the_loss_of_held_out_demonstrations_by_hand(task, tmp_path) -> None:
    """Over tokens, of the rows that have a demonstration; tokens of tools do not count."""
    trainer = Trainer(
        tiny_config(task, tmp_path, eval={"data": {"prompts": str(task / "eval.jsonl")}})
    )
    model, pad = trainer.policy, trainer.tokenizer.pad_token_id
    examples = [
        Example(str(i), (5 + i, 6), "", None, demo, {}, demo_mask=mask)
        for i, (demo, mask) in enumerate(
            [((7, 8, 9), ()), (None, ()), ((7,), ()), ((4, 5, 6, 7), (True, False, False, True))]
        )
    ]
    total, count = 0.0, 0
    for example in examples:
        if example.demo:
            ids = torch.tensor([example.prompt + example.demo])
            logps = model(input_ids=ids).logits[0].log_softmax(-1)
            for i, token in enumerate(example.demo):
                if not example.demo_mask or example.demo_mask[i]:
                    total -= float(logps[1 + i, token])
                    count += 1
    assert count == 6
    assert demo_nll(model, examples, pad) == pytest.approx(total / count, rel=1e-5)
    assert demo_nll(model, examples[1:2], pad) is None
    row = trainer.evaluator(trainer.engine.load(model), tmp_path / "evals" / "a.jsonl.gz")
    (job,) = trainer.evaluator.jobs.values()
    assert row["demo_nll"] == pytest.approx(demo_nll(model, job.examples, pad))
    with gzip.open(tmp_path / "evals" / "a.jsonl.gz", "rt") as lines:
        saved = [json.loads(line) for line in lines]
    assert [x["prompt"] for x in saved] == [example.prompt_text for example in job.examples]
    assert [x["reference"] for x in saved] == [example.answer for example in job.examples]


class Stopped(KeyboardInterrupt):
    """The process is interrupted."""


def test_an_interrupted_task_continues_after_its_finished_batches(
    task, tmp_path, caplog, monkeypatch
) -> None:
    """A line that was being written when the process was killed is ignored."""
    calls, sample = [], Engine.sample_rollouts

    def interrupted(engine, examples, samples):
        calls.append([example.id for example in examples])
        if len(calls) == stop_at:
            raise Stopped
        return sample(engine, examples, samples)

    monkeypatch.setattr(Engine, "sample_rollouts", interrupted)
    counted = {"reward": "tests.tiny:CountedDigits"}
    config = suite_config(task, tmp_path / "cut", **counted)
    del config.tasks["greedy"]
    config.tasks["sampled"] = replace(config.tasks["sampled"], batch=4)  # one prompt in each
    stop_at = 4
    with pytest.raises(Stopped):
        run_suite(config)
    assert not (tmp_path / "cut" / "results.json").exists()
    (kept,) = (tmp_path / "cut" / "unfinished").iterdir()
    kept.write_text(kept.read_text() + '{"first": 3, "answ')
    calls, stop_at = [], 0
    with caplog.at_level(logging.INFO, "gac"):
        resumed = run_suite(config)["tasks"]["sampled"]
    assert calls == [[str(i)] for i in range(3, 8)]
    assert "sampled: continuing after 3 of 8 prompts" in caplog.text
    assert re.search(r"sampled: 4 of 8 prompts in \d+ s, about \d+ s left", caplog.text)
    assert not (tmp_path / "cut" / "unfinished").exists()
    whole = run_suite(replace(config, out=str(tmp_path / "whole")))["tasks"]["sampled"]
    assert resumed["seconds"] > 0
    assert {**resumed, "seconds": 0} == {**whole, "seconds": 0}
    assert resumed["counts"]["calls"] == 32
    assert read_samples(tmp_path / "cut") == read_samples(tmp_path / "whole")


def test_batches_of_other_settings_are_not_used(tmp_path) -> None:
    Progress(tmp_path, "a", {"seed": 0}).add(0, [answer(0, 1.0)], {"calls": 1})
    assert [*Progress(tmp_path, "a", {"seed": 0}).batches] == [0]
    for name, setting in (("b", {"seed": 0}), ("a", {"seed": 1})):
        assert not Progress(tmp_path, name, setting).batches


def test_finished_tasks_without_their_answers_name_out(tmp_path) -> None:
    (tmp_path / "results.json").write_text('{"tasks": {"a": {"setting": {}}}}')
    with pytest.raises(ConfigError, match=r"^out='.*': results.json has .* samples.jsonl.gz"):
        suite._resume(EvalConfig(out=str(tmp_path)), tmp_path)
