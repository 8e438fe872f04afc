"""The parts of an evaluation, without a model: answers, settings, files, damaged results."""

from __future__ import annotations

import contextlib
import datetime
import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gac.config import ConfigError
from gac.data import DataConfig, Example
from gac.demo.task import make_tokenizer
from gac.errors import RunDirectoryError
from gac.evaluation import suite
from gac.evaluation import task as tasks
from gac.evaluation.config import EvalConfig, EvalSettings, EvalTask
from gac.evaluation.suite import Evaluator, Job, evaluate_single, read_samples, run_suite
from gac.evaluation.table import align_columns, markdown_table, results_lines
from gac.evaluation.task import Answer, generate_answers, split_of, summary
from gac.parallel.run_lock import run_lock
from gac.rewards.base import RowReward
from gac.rollouts.config import RolloutConfig
from gac.rollouts.engines import Engine
from gac.rollouts.generation import Completion, SamplingParams

WORDS = make_tokenizer()  # <pad>, <eos> and <unk> are 0 to 2; the digits are 3 to 12
EXAMPLES = [
    Example(f"row{i}", (5 + i, 6), "", None, None, {"level": i % 2}, source=f"s{i}")
    for i in range(5)
]


def answer(index: int, score: float | None, split: str | None = None) -> Answer:
    return Answer(index, f"row{index}", split, "text", 3 + index, score, index == 2)


def test_answers_by_hand(monkeypatch) -> None:
    """Rank 1 of 2 has the second of three batches."""
    calls = []
    responses = [(12, 1), (3, 1, 4), (), (1, 1, 9, 5)]  # "9", "01", "", "62"

    class Recorded(Engine):
        def generate(self, prompts, number):
            calls.append((torch.initial_seed(), self.params, prompts, number))
            return list(map(Completion, responses))

    def reward(texts, examples):
        assert texts == ["9", "01", "", "62"] and examples == [EXAMPLES[i] for i in (2, 2, 3, 3)]
        return [0.5, 0.25, None, 1.0]

    others = [answer(0, 1.0), answer(0, 0.5), answer(4, 0.0)]
    monkeypatch.setattr(tasks, "rank", lambda: 1)
    monkeypatch.setattr(tasks, "world_size", lambda: 2)
    monkeypatch.setattr(tasks, "gather", lambda own: [others, own])
    task = EvalTask(
        samples=2,
        temperature=0.7,
        top_p=0.9,
        max_completion_length=4,
        stop=("2",),
        batch=5,
        split_field="level",
    )
    before = torch.get_rng_state()
    engine = Recorded(RolloutConfig(), WORDS)
    assert generate_answers(engine, EXAMPLES, reward, task, 7) == [
        *others[:2],
        Answer(2, "row2", "0", "9", 2, 0.5, False),
        Answer(2, "row2", "0", "01", 3, 0.25, True),
        Answer(3, "row3", "1", "", 0, None, True),
        Answer(3, "row3", "1", "62", 4, 1.0, False),
        others[2],
    ]
    assert torch.equal(torch.get_rng_state(), before)
    prompts = [EXAMPLES[2].prompt, EXAMPLES[3].prompt]
    assert calls == [(7 * 2**32 + 2, SamplingParams(4, 0.7, 0.9, stop=("2",)), prompts, 2)]
    with pytest.raises(ValueError, match="zip"):  # a score is missing
        generate_answers(engine, EXAMPLES, lambda *_: [0.5], task, 7)


@pytest.mark.parametrize(
    ("batch", "samples", "sizes"), [(None, 2, [5]), (1, 2, [1] * 5), (8, 2, [4, 1]), (4, 1, [4, 1])]
)
def test_batches_have_their_own_seeds_and_at_least_one_prompt(
    monkeypatch, batch, samples, sizes
) -> None:
    calls = []

    class Recorded(Engine):
        def generate(self, prompts, number):
            calls.append((len(prompts), torch.initial_seed()))
            return [Completion((3, 1))] * len(prompts) * number

    task = EvalTask(batch=batch, samples=samples, temperature=1.0)
    answers = generate_answers(
        Recorded(RolloutConfig(), WORDS), EXAMPLES, lambda texts, _: range(len(texts)), task, 0
    )
    assert [a.score for a in answers] == list(range(5 * samples))  # in the order of generation
    assert [size for size, _ in calls] == sizes
    assert [seed for _, seed in calls] == list(range(0, 5, sizes[0]))


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


def without_intervals(row):
    return {k: v for k, v in row.items() if not k.startswith(("ci95", "prompts"))}


def test_evaluations_during_training(task, monkeypatch) -> None:
    """The main task uses the run's reward, the other its own; both use the run's seed."""
    calls = []

    def generate(engine, examples, reward, eval_task, seed):
        calls.append((len(examples), reward.label, eval_task.max_completion_length, seed))
        return [answer(1, len(calls) / 4)]

    monkeypatch.setattr(suite, "generate_answers", generate)
    clock = iter((10.0, 12.5))
    monkeypatch.setattr(suite, "time", SimpleNamespace(perf_counter=clock.__next__))
    CLOSED.clear()
    prompts = str(task / "eval.jsonl")
    more = EvalTask(
        DataConfig(prompts=prompts, limit=3),
        reward="tests.evaluation.test_eval_parts:Labeled",
        max_completion_length=5,
    )
    settings = EvalSettings(
        DataConfig(prompts=prompts), max_completion_length=6, tasks={"more": more}
    )
    loaded = []
    engine = SimpleNamespace(tokenizer=WORDS, load=loaded.append)
    evaluator = Evaluator(settings, engine, Labeled("run"), 9)
    assert evaluator and not Evaluator(EvalSettings(), engine, Labeled(), 0)
    row = evaluator("model")
    assert loaded == ["model"] and calls == [(8, "run", 6, 9), (3, "own", 5, 9)]
    assert row["prompts"] == row["prompts/more"] == 1
    assert without_intervals(row) == {
        "accuracy": 0.25,
        "response_length": 4.0,
        "truncated": 0.0,
        "accuracy/more": 0.5,
        "response_length/more": 4.0,
        "truncated/more": 0.0,
        "seconds": 2.5,
    }
    evaluator.close()
    assert CLOSED == ["run", "own"]
    only_more = replace(settings, data=DataConfig())
    assert list(Evaluator(only_more, engine, Labeled(), 0).jobs) == ["more"]


def test_tasks_run_with_one_model_and_close_their_rewards(task, monkeypatch) -> None:
    calls: list = []
    loaded: list = []

    def generate(*arguments):
        calls.append(arguments)
        return [answer(0, 1.0)]

    def load_model(*arguments):
        calls.append(arguments)
        return SimpleNamespace(to=lambda device: f"model on {device}")

    def record(name, job, run) -> None:
        assert run(job) == [answer(0, 1.0)]
        if name == "b":
            raise KeyError("b")

    monkeypatch.setattr(suite, "load_tokenizer", lambda model: WORDS)
    monkeypatch.setattr(suite, "load_model", load_model)
    monkeypatch.setattr(Engine, "load", lambda self, model: loaded.append(model))
    monkeypatch.setattr(suite, "generate_answers", generate)
    CLOSED.clear()
    own = EvalTask(DataConfig(prompts=str(task / "eval.jsonl"), limit=2))
    config = EvalConfig(reward=Labeled("a"), seed=5)
    with pytest.raises(KeyError):
        suite._run_tasks(config, "cpu", {"a": own, "b": own, "c": own}, record)
    assert calls.pop(0) == (config.model, 5)
    for engine, examples, reward, eval_task, seed in calls:
        assert (engine.tokenizer, len(examples), seed) == (WORDS, 2, 5)
        assert eval_task is own and reward is config.reward
    assert len(calls) == 2 and CLOSED == ["a"] * 3 and loaded == ["model on cpu"]


def test_errors_of_the_model_are_errors_of_the_configuration(monkeypatch) -> None:
    def fail(model: object) -> None:
        raise ValueError("no such model")

    monkeypatch.setattr(suite, "load_tokenizer", fail)
    with pytest.raises(ConfigError, match="no such model"):
        suite._run_tasks(EvalConfig(), "cpu", {}, lambda *_: None)


def test_the_setting_of_a_task_has_all_that_affects_its_answers() -> None:
    since = {"name": "math", "since": datetime.date(2024, 5, 6)}
    config = EvalConfig(reward=since, seed=4)
    own = suite._setting(config, EvalTask(reward="exact", samples=3, temperature=0.5))
    assert (own["reward"], own["seed"], own["samples"], own["temperature"]) == ("exact", 4, 3, 0.5)
    assert own["model"]["dtype"] == "float32" and own["data"]["prompt_field"] == "prompt"
    default = suite._setting(config, EvalTask())
    assert default["reward"] == {"name": "math", "since": "2024-05-06"}


@pytest.fixture
def steps(monkeypatch) -> list:
    """What `run_suite` does, with a reward that counts and answers that are given."""
    done: list = []
    answers = {"a": [answer(0, 1.0), answer(1, 0.5)], "b": [answer(2, 0.25)]}
    answers[""] = [answer(0, 1.0, "easy"), answer(3, 0.0, "hard")]

    def run_tasks(config, device, unfinished, record) -> None:
        with pytest.raises(RunDirectoryError) if config.tasks else contextlib.nullcontext():
            run_lock(Path(config.out)).__enter__()
        done.append((device, *unfinished))
        for name, eval_task in unfinished.items():
            reward = SimpleNamespace(counts=lambda: {"timeouts": 3})
            record(name, Job(eval_task, (), reward), lambda job, name=name: answers[name])

    save_text = suite.save_text

    def save(path, text) -> None:
        assert len(read_samples(path.parent)) == len(json.loads(text)["tasks"])
        save_text(path, text)

    wait = SimpleNamespace(device="cpu", wait_for_everyone=lambda: done.append("wait"))
    monkeypatch.setattr(suite, "_make_accelerator", lambda config: wait)
    monkeypatch.setattr(suite, "_run_tasks", run_tasks)
    monkeypatch.setattr(suite, "save_text", save)
    monkeypatch.setattr(suite.setup, "leave", lambda: done.append("leave"))
    clock = iter((10.0, 12.5, 20.0, 20.75))
    monkeypatch.setattr(suite, "time", SimpleNamespace(perf_counter=clock.__next__))
    return done


def test_a_suite_by_hand(tmp_path, steps, monkeypatch) -> None:
    data = DataConfig(prompts="rows.jsonl")
    both = {"a": EvalTask(data), "b": EvalTask(data, max_completion_length=5)}
    first = run_suite(EvalConfig(tasks={"a": both["a"]}, out=str(tmp_path / "e")))
    config = EvalConfig(tasks=both, out=str(tmp_path / "e"))
    results = run_suite(config)
    assert results["tasks"]["a"] == first["tasks"]["a"]
    for name, seconds in (("a", 2.5), ("b", 0.75)):
        answers = read_samples(tmp_path / "e" / "results.json")[name]
        own = {"counts": {"timeouts": 3}, "seconds": seconds}
        own["setting"] = suite._setting(config, both[name])
        assert results["tasks"][name] == summary(answers, both[name]) | own
    assert steps == ["wait", ("cpu", "a"), "leave", "wait", ("cpu", "b"), "leave"]
    with pytest.raises(ConfigError, match="holds task 'a' with different settings"):
        run_suite(replace(config, seed=1))
    other = tmp_path / "other"
    other.mkdir()
    suite._write(other, {"tasks": {"a": {}}}, {"a": [answer(1, 0.25)]})
    compared = run_suite(config, other)
    assert steps[6:] == ["wait", "leave"] and "against" not in compared["tasks"]["b"]
    against = {"results": str(other), "difference": 0.25, "ci95": None, "prompts": 1}
    assert compared["tasks"]["a"]["against"] == against
    assert json.loads((tmp_path / "e" / "results.json").read_text()) == compared
    # samples of a task without results, as after an interruption, are not kept
    only_a = {"tasks": {"a": first["tasks"]["a"]}}
    (tmp_path / "e" / "results.json").write_text(json.dumps(only_a))
    run_suite(EvalConfig(tasks={"a": both["a"]}, out=str(tmp_path / "e")), other)
    assert list(read_samples(tmp_path / "e")) == ["a"]
    assert list(run_suite(replace(config, tasks={}))["tasks"]) == ["a"]


def test_a_single_task_by_hand(tmp_path, steps) -> None:
    settings = EvalSettings(DataConfig(prompts="rows.jsonl"))
    row = evaluate_single(EvalConfig(settings=settings, out=str(tmp_path)))
    assert row["prompts"] == 2 and row["ci95"] == pytest.approx([0.094531, 0.905469], abs=1e-6)
    assert without_intervals(row) == {
        "accuracy": 0.5,
        "accuracy/easy": 1.0,
        "accuracy/hard": 0.0,
        "response_length": 4.5,
        "truncated": 0.0,
    }
    assert steps == [("cpu", ""), "leave"]


def test_only_rank_0_writes_results_and_only_numbers(tmp_path, monkeypatch) -> None:
    with pytest.raises(ValueError, match="JSON"):
        suite._write(tmp_path, {"tasks": {"a": math.nan}}, {})
    monkeypatch.setattr(suite.collectives, "rank", lambda: 1)
    suite._write(tmp_path / "none", {}, {})


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


def test_a_comparison_without_shared_prompts_is_a_dash() -> None:
    row = {"accuracy": 0.5, "ci95": None, "prompts": 4, "samples": 2, "dropped": 1}
    row |= {"truncated": 0.125, "splits": {}, "pass_at": {}}
    row["against"] = {"difference": None, "ci95": None, "prompts": 0}
    assert results_lines({"tasks": {"a": row}})[1][-1] == "-"
