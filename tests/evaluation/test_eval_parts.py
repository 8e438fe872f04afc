"""The parts of an evaluation, without a model: answers, settings, files, damaged results."""

import gzip
import json
from dataclasses import replace

import pytest
import torch

from gac.data import Example
from gac.demo.task import ALPHABET
from gac.errors import ConfigError
from gac.evaluation import suite
from gac.evaluation.config import EvalConfig, EvalTask
from gac.evaluation.suite import read_samples
from gac.evaluation.table import align_columns, markdown_table
from gac.evaluation.task import generate_answers, split_of, summary
from gac.rewards.base import RowReward
from gac.training.trainer import Trainer
from tests.evaluation.test_suite import answer
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
    with pytest.raises(ConfigError, match=r"no samples\.jsonl\.gz found"):
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
