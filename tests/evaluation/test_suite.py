"""`gac eval` with several tasks: results, resuming, comparing, processes."""

import functools
import gzip
import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gac import cli, evaluation
from gac.config import load
from gac.demo.task import make_tokenizer
from gac.errors import ConfigError, RunDirectoryError
from gac.evaluation.config import EvalTask
from gac.evaluation.estimates import accuracy_interval
from gac.evaluation.suite import (
    EvalConfig,
    Evaluator,
    _compare,
    _temporary_folder,
    evaluate_single,
    flat,
    read_samples,
    run_suite,
)
from gac.evaluation.table import results_lines
from gac.evaluation.task import Answer, summary
from gac.models.causal_lm import load_model
from gac.parallel.run_lock import run_lock
from gac.rewards import build_reward
from gac.rollouts.engines import Engine
from tests import ranks
from tests.tiny import tiny_config


def suite(task, out, data=None, **changes) -> EvalConfig:
    data = data or {"prompts": str(task / "eval.jsonl")}
    return load(
        EvalConfig,
        {
            "model": {"path": str(task / "init"), "random_init": True},
            "reward": "tests.tiny:digit_reward",
            "tasks": {
                "greedy": {
                    "data": data,
                    "max_completion_length": 5,
                    "split_field": "op",
                    "batch": None,
                },
                "sampled": {
                    "data": data,
                    "samples": 4,
                    "temperature": 1.0,
                    "batch": 8,
                    "max_completion_length": 5,
                    "pass_at": [1, 4],
                },
            },
            "out": str(out),
            **changes,
        },
    )


def test_results_follow_the_documented_format(task, tmp_path, monkeypatch):
    batches, sample = [], Engine.sample_rollouts
    monkeypatch.setattr(
        Engine, "sample_rollouts", lambda e, x, n: batches.append(sample(e, x, n)) or batches[-1]
    )
    path = tmp_path / "rows.jsonl"
    path.write_text((task / "eval.jsonl").read_text().replace('"prompt"', '"question"'))
    data = {"prompts": str(path), "prompt_field": "question"}
    results = run_suite(suite(task, tmp_path / "e", data))
    # all at once, or `batch` completions of 4 per prompt
    assert [len(rollouts) for rollouts in batches] == [8] * 5
    assert (tmp_path / "e" / "results.json").read_text() == json.dumps(results, indent=2) + "\n"
    greedy, sampled = results["tasks"]["greedy"], results["tasks"]["sampled"]
    assert (greedy["prompts"], greedy["samples"], sampled["samples"]) == (8, 1, 4)
    assert set(greedy["splits"]) == {"+", "-"}
    assert greedy["splits"]["+"]["prompts"] == 4
    assert set(sampled["pass_at"]) == {"1", "4"}
    assert greedy["ci95"][0] <= greedy["accuracy"] <= greedy["ci95"][1]
    rows = read_samples(tmp_path / "e")
    assert [len(rows[n]) for n in ("greedy", "sampled")] == [8, 32]
    assert [(a.number, a.id) for a in rows["greedy"]] == [(i, str(i)) for i in range(8)]
    assert len({answer.row for answer in rows["greedy"]}) == 8
    assert [a.length for a in rows["sampled"]] == [
        len(rollout.completion_ids) for rollouts in batches[1:] for rollout in rollouts
    ]
    assert sampled["accuracy"] == pytest.approx(sum(a.score for a in rows["sampled"]) / 32)
    assert sampled["truncated"] == sum(a.truncated for a in rows["sampled"]) / 32


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of the evaluations that have no `out`."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / f"gac-{os.getuid()}" / "evaluations"


def test_a_single_task_is_kept_only_with_out(task, tmp_path, monkeypatch, cache):
    """Its columns are those of eval.jsonl in training."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    single = suite(
        task,
        "e",
        tasks={},
        eval={"data": {"prompts": str(task / "eval.jsonl")}, "max_completion_length": 5},
    )
    printed = evaluate_single(replace(single, out=None))
    assert not any(Path().iterdir())
    assert not any(cache.iterdir())
    kept = evaluate_single(single)
    row = json.loads(Path("e/results.json").read_text())["tasks"]["eval"]
    assert printed == kept == flat(row)
    assert printed["accuracy"] == row["accuracy"]
    again = evaluate_single(replace(single, out="f"), against=Path("e/results.json"))
    assert again["against"]["difference"] == 0


def test_a_single_task_without_out_continues_after_an_interruption(
    task, tmp_path, monkeypatch, cache
):
    model = shutil.copytree(task / "init", tmp_path / "model")
    config = suite(
        task,
        None,
        model={"path": str(model), "random_init": True},
        tasks={},
        eval={
            "data": {"prompts": str(task / "eval.jsonl")},
            "max_completion_length": 5,
            "batch": 2,
        },
    )
    config = replace(config, out=None)
    expected = evaluate_single(config)
    sampled = []

    def interrupted(engine, examples, number, sample=Engine.sample_rollouts):
        if len(sampled) == 2:
            raise KeyboardInterrupt
        sampled.append(len(examples))
        return sample(engine, examples, number)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Engine, "sample_rollouts", interrupted)
        evaluate_single(config)
    assert len([*cache.iterdir()]) == 1
    (model / "config.json").touch()  # another model in the same folder: nothing is reused
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Engine, "sample_rollouts", interrupted)
        sampled.clear()
        evaluate_single(config)
    assert sampled == [2, 2]
    batches, sample = [], Engine.sample_rollouts
    monkeypatch.setattr(
        Engine, "sample_rollouts", lambda e, x, n: batches.append(len(x)) or sample(e, x, n)
    )
    assert evaluate_single(config) == expected
    assert batches == [2, 2]
    assert len([*cache.iterdir()]) == 1  # of the first interruption, whose model is gone


def test_an_evaluation_without_out_depends_on_the_files_that_it_names(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = Path(shutil.copytree(task, "data"))
    Path("rewards").mkdir()
    files = [data / "init" / "config.json", data / "eval.jsonl"]
    files += [Path("reward.py"), Path("rewards/own.py")]
    for file in files[2:]:
        file.write_text("def score(completion, example): return 1.0")
    rows = {"prompts": str(data / "eval.jsonl"), "template": "long " * 900 + "{prompt}"}
    rewards = ["reward.py:score", {"name": "sum", "terms": [{"reward": "rewards.own:score"}]}]
    configs = [
        replace(suite(data, None, tasks={}, eval={"data": rows}), out=None, reward=reward)
        for reward in (*rewards, "math")
    ]
    folders = [_temporary_folder(config) for config in configs]
    assert len({*folders}) == 3
    assert [_temporary_folder(config) for config in configs] == folders
    changes = []
    for file in files:
        before = [_temporary_folder(config) for config in configs]
        file.write_text(file.read_text() + " ")
        after = [_temporary_folder(config) for config in configs]
        changes.append([a != b for a, b in zip(after, before, strict=True)])
    both, own, other = [True] * 3, [True, False, False], [False, True, False]
    assert changes == [both, both, own, other]


def test_finished_tasks_are_not_run_again(task, tmp_path):
    config = suite(task, tmp_path / "e")
    first = run_suite(config)
    path = tmp_path / "e" / "results.json"
    unfinished = json.loads(path.read_text())
    del unfinished["tasks"]["sampled"]  # as if the run had been interrupted before this task
    path.write_text(json.dumps(unfinished))
    resumed = run_suite(config)
    seconds = {n: r.pop("seconds") for n, r in first["tasks"].items()}
    assert resumed["tasks"]["greedy"].pop("seconds") == seconds["greedy"]
    assert resumed["tasks"]["sampled"].pop("seconds") != seconds["sampled"]
    assert resumed["tasks"] == first["tasks"]
    assert all(0 < s < 600 for s in seconds.values())
    for change in (
        {"reward": "exact"},
        {"seed": 1},
        {"model": replace(config.model, dtype="bfloat16")},
        {"tasks": {"greedy": replace(config.tasks["greedy"], max_completion_length=6)}},
        {"tasks": {"greedy": replace(config.tasks["greedy"], reward="exact")}},
    ):
        with pytest.raises(ConfigError, match="holds task 'greedy' with different settings"):
            run_suite(replace(config, **change))
    config.tasks.pop("greedy")  # its results are kept, and its settings are no longer checked
    assert set(run_suite(config)["tasks"]) == {"greedy", "sampled"}
    with run_lock(tmp_path / "e"), pytest.raises(RunDirectoryError, match="in use by"):
        run_suite(config)


def run_where_only_the_first_writes(config):
    if os.environ["RANK"] != "0":
        evaluation.suite.save_text = None
    run_suite(config)
    assert not torch.distributed.is_initialized()


def test_two_processes_match_one(task, tmp_path, caplog):
    counted = {"reward": "tests.tiny:CountedDigits"}
    run_suite(suite(task, tmp_path / "one", **counted))
    ranks.run(run_where_only_the_first_writes, suite(task, tmp_path / "two", **counted), ranks=2)
    one, two = (read_samples(tmp_path / name) for name in ("one", "two"))
    assert one == two
    one, two = (
        json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two")
    )
    for row in (*one["tasks"].values(), *two["tasks"].values()):
        del row["seconds"]
    assert one == two
    assert one["tasks"]["sampled"]["counts"] == {"calls": 32, "never": 0}
    assert ": 32 calls in this process" in caplog.text  # the reward is closed


def test_comparison_is_paired_by_prompt(task, tmp_path, monkeypatch):
    seeds = []
    load = lambda *call: (seeds.append(call[1]), load_model(*call))[1]  # noqa: E731 - a spy
    monkeypatch.setattr("gac.evaluation.suite.load_model", load)
    load_model(suite(task, "").model).save_pretrained(tmp_path / "model")
    model = {"path": str(tmp_path / "model"), "tokenizer": str(task / "init")}
    one = suite(task, tmp_path / "e", model=model)
    del one.tasks["greedy"]
    run_suite(one)
    data = {"prompts": str(task / "eval.jsonl"), "template": "={prompt}"}
    other = suite(task, tmp_path / "f", data, model=model, seed=3)
    rows = run_suite(other, tmp_path / "e")["tasks"]
    result = rows["sampled"]["against"]
    mine, theirs = (read_samples(tmp_path / n)["sampled"] for n in "fe")
    # the seed is that of the sampling
    assert "against" not in rows["greedy"]
    assert seeds == [0, 3]
    assert mine != theirs
    assert result["prompts"] == 8
    assert result["difference"] == pytest.approx(
        sum(a.score - b.score for a, b in zip(mine, theirs, strict=True)) / 32
    )
    assert result["ci95"][0] <= result["difference"] <= result["ci95"][1]
    assert all(row["against"] for row in run_suite(other, tmp_path / "f")["tasks"].values())
    assert "against" not in run_suite(other, tmp_path / "e")["tasks"]["greedy"]
    del other.tasks["sampled"]
    for folder, problem in (
        ("", "no samples.jsonl.gz"),
        ("e", r"has results for \['sampled'\], not"),
    ):
        with pytest.raises(ConfigError, match=f"^--against='.*': {problem}"):
            run_suite(other, tmp_path / folder)


def answer(index: int, score: float | None, split: str | None = None, of: int = 0) -> Answer:
    name, row = f"row{of or index}", f"hash{index}"
    texts = "prompt", "reference", "text"
    return Answer(index, name, row, split, *texts, 3 + index, score, index == 2)


def test_summary_by_hand():
    task = EvalTask(samples=2, temperature=1.0, pass_at=(1, 2))
    result = summary(
        [
            answer(0, 1.0),
            answer(0, 0.0),
            answer(1, 0.0),
            answer(1, 0.0),
            answer(2, 1.0),
            answer(2, None),
        ],
        task,
    )
    assert result["accuracy"] == pytest.approx((0.5 + 0 + 1) / 3)
    # the third prompt has one scored answer: it counts for pass@1 only
    assert result["pass_at"] == pytest.approx({"1": 0.5, "2": 0.5})
    assert (result["prompts"], result["dropped"]) == (3, 1)
    assert (result["response_length"], result["truncated"]) == (4.0, 2 / 6)
    assert result["ci95"] == list(accuracy_interval([0.5, 0.0, 1.0]))
    # a partial score does not count as solved
    assert summary([answer(0, 0.5), answer(0, 1.0)], task)["pass_at"] == {"1": 0.5, "2": 1.0}
    beyond = summary([answer(0, 2.0), answer(1, -1.0)], EvalTask())
    assert beyond["accuracy"] == 0.5
    assert beyond["ci95"] == [-1.0, 2.0]
    empty = summary([answer(0, None)], task)
    assert empty["accuracy"] is None
    assert empty["ci95"] is None
    assert empty["dropped"] == 1


@pytest.mark.parametrize(("prefix", "tail"), [("", ""), ("logic", "/logic")])
def test_columns_by_hand(prefix, tail):
    task = EvalTask(samples=2, temperature=1.0, pass_at=(2,))
    row = flat(
        summary(
            [answer(0, 1.0, "b"), answer(0, 0.0, "b"), answer(1, 0.0, "a"), answer(1, 0.0, "a")],
            task,
            1.5,
        ),
        prefix,
    )
    assert row.pop(f"prompts{tail}") == 2
    assert len(row.pop(f"ci95{tail}")) == 2
    assert row == {
        f"accuracy{tail}": 0.25,
        f"accuracy{tail}/a": 0.0,
        f"accuracy{tail}/b": 0.5,
        f"pass@2{tail}": 0.5,
        f"response_length{tail}": 3.5,
        f"truncated{tail}": 0.0,
        f"demo_nll{tail}": 1.5,
    }


def test_comparison_uses_only_shared_prompts():
    mine = [answer(1, 0.0), answer(2, 1.0), answer(2, 0.5), answer(3, None), answer(4, 1.0)]
    theirs = [answer(0, 1.0), answer(3, 1.0), answer(2, 0.25), answer(1, 1.0)]
    theirs += [answer(5, 0.0, of=2), answer(2, 0.25)]  # ids may repeat, and so may prompts
    for answers, difference, ci95, prompts in (
        (mine, -0.25, [-1.0, 0.5], 2),
        (mine[:1], -1.0, None, 1),
        (mine[3:4], None, None, 0),
    ):
        expected = {"difference": difference, "ci95": ci95, "prompts": prompts}
        assert _compare("t", answers, theirs, "e") == {"results": "e", **expected}
    with pytest.raises(ConfigError, match="--against='e': task 't' has none of the same prompts"):
        _compare("t", mine[4:], theirs, "e")


def test_the_table_by_hand():
    part = {"accuracy": 0.25, "ci95": None, "prompts": 3}
    row = {"accuracy": 0.5, "ci95": [0.25, 0.75], "prompts": 4, "samples": 2, "dropped": 1}
    row |= {"truncated": 0.125, "splits": {}}
    against = {"difference": -0.1, "ci95": [-0.2, 0.0], "prompts": 4}
    a = {**row, "pass_at": {"1": 0.5, "2": 1.0}, "splits": {"easy": part}}
    b = {**row, "pass_at": {}}
    assert results_lines({"tasks": {"a": a, "b": b}})[1:] == [
        ["a", "50.0", "[25.0, 75.0]", "@1 50.0  @2 100.0", "4 x 2", "12.5", "1"],
        ["  easy", "25.0", "-", "", "3", "", ""],
        ["b", "50.0", "[25.0, 75.0]", "-", "4 x 2", "12.5", "1"],
    ]
    none = {"difference": None, "ci95": None, "prompts": 0}
    rows = {"a": a | {"against": against}, "b": b, "c": b | {"against": none}}
    head, first, easy, *others = results_lines({"tasks": rows})
    assert head[-1] == "difference"
    assert first[-1] == "-10.0 [-20.0, +0.0], 4 shared"
    assert easy[3:] == ["", "3", "", "", ""]
    assert [row[-1] for row in others] == ["-", "-"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval": {"data": {"prompts": "x.jsonl"}}}, "are both set"),
        ({"tasks": {"a": {}}}, "tasks.a.data.prompts is missing"),
        ({"tasks": {"a": {"samples": 2, "pass_at": [3]}}}, "pass_at=3: use"),
        ({"tasks": {"a": {"pass_at": [0]}}}, "pass_at=0: use"),
        ({"tasks": {"a": {"top_p": 0.0}}}, "top_p=0.0: use"),
        ({"tasks": {"a": {"top_p": 0.9}}}, "top_p=0.9 has no effect"),
        ({"tasks": {"a": {"samples": 2}}}, "samples=2 at temperature=0"),
        (
            {"tasks": {"a": {"data": {"order": "a:b"}}}},
            "data.order='a:b': use the default: an eval",
        ),
        ({"tasks": {"a": {"sampels": 2}}}, "did you mean 'samples'"),
        ({"tasks": {"a": {"top_p": 2.0}}}, "top_p=2.0: use a number in"),
        ({"eval": {"every": 5}}, "eval.every and eval.tasks apply only to training"),
        ({"eval": {"tasks": {"a": {}}}}, "eval.every and eval.tasks apply only"),
    ],
)
def test_mistakes_name_the_key(task, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        suite(task, tmp_path, **changes)


@pytest.mark.parametrize("name", ["", " a", "a/b", "a\nb"])
def test_invalid_task_names_are_rejected(task, tmp_path, name):
    tasks = {name: {"data": {"prompts": str(task / "eval.jsonl")}}}
    message = f"tasks.{name!r}: invalid task name"
    for load_it in (
        lambda: suite(task, tmp_path, tasks=tasks),
        lambda: tiny_config(task, tmp_path, eval={"tasks": tasks}),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            load_it()


def test_task_name_that_collides_with_a_split_is_rejected(task, tmp_path):
    """Both would be logged as accuracy/NAME. Split names may contain a slash, as those of extra
    tasks do.
    """
    data = {"prompts": str(task / "eval.jsonl")}
    for split, name in (("op", "+"), (None, "+"), ("op", "train"), ("op", "seconds")):
        settings = tiny_config(
            task,
            tmp_path,
            eval={"data": data, "split_field": split, "tasks": {name: {"data": data}}},
        ).eval
        make = functools.partial(
            Evaluator, settings, make_tokenizer(), build_reward("tests.tiny:digit_reward"), 0
        )
        if (split, name) == ("op", "+"):
            with pytest.raises(ConfigError, match=r"^eval.tasks.\+: .* split '\+' of the first"):
                make()
        else:
            make().close()


def test_an_absent_split_field_names_the_row(task, tmp_path):
    tasks = {
        "a": {
            "data": {"prompts": str(task / "eval.jsonl")},
            "split_field": "kind",
            "max_completion_length": 2,
        }
    }
    with pytest.raises(ConfigError, match="tasks.a: split_field='kind' is not among the fields"):
        run_suite(suite(task, tmp_path, tasks=tasks))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": "mth"}, "tasks.a: unknown reward 'mth'; did you mean 'math'"),
        ({"data": {"prompts": "no.jsonl"}}, "^tasks.a: data.prompts='no.jsonl': no such"),
        ({"stop": ["two"]}, "^tasks.a: stop='two' is 0 tokens"),
        ({"function": "json:none"}, "^tasks.a: function 'json:none': json has no 'none'"),
    ],
)
def test_loading_errors_name_the_task(task, tmp_path, change, message):
    plain = {"data": {"prompts": str(task / "eval.jsonl")}, "max_completion_length": 2}
    with pytest.raises(ConfigError, match=message):
        run_suite(suite(task, tmp_path, tasks={"a": plain | change}))


def test_unusable_output_folder_is_rejected_early(task, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="out=.*cannot be written"):
        run_suite(suite(task, tmp_path / "file"))
    given = [f"model.path={task / 'init'}", f"eval.data.prompts={task / 'eval.jsonl'}"]
    given += [
        "model.random_init=true",
        "reward=tests.tiny:digit_reward",
        f"out={tmp_path / 'out'}",
        "eval.max_completion_length=5",
    ]
    assert cli.main(["eval", "--against", str(tmp_path), "--set", *given]) == cli.USAGE
    assert "no samples.jsonl.gz found" in capsys.readouterr().err
    assert cli.main(["eval", "--set", *given]) == cli.OK  # a single task is also saved to `out`
    row = json.loads(capsys.readouterr().out)
    assert read_samples(tmp_path / "out").keys() == {"eval"}
    saved = json.loads((tmp_path / "out" / "results.json").read_text())["tasks"]["eval"]
    assert saved["accuracy"] == row["accuracy"]
    assert saved["ci95"] == row["ci95"]
    assert cli.main(["eval", "--against", str(tmp_path / "out"), "--set", *given]) == cli.OK
    assert json.loads(capsys.readouterr().out)["against"]["difference"] == 0.0


def test_command_prints_a_table_and_keeps_the_results(task, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "suite.yaml"
    path.write_text(
        f"model: {{path: {task / 'init'}, random_init: true}}\n"
        "reward: tests.tiny:digit_reward\n"
        "tasks:\n"
        "  digits:\n"
        f"    data: {{prompts: {task / 'eval.jsonl'}}}\n"
        "    max_completion_length: 5\n"
        "    split_field: op\n"
    )
    assert cli.main(["eval", str(path)]) == cli.OK
    text = capsys.readouterr().out
    assert "digits" in text
    assert "95% interval" in text
    assert "  +" in text
    assert cli.main(["eval", str(path), "--against", "evals"]) == cli.OK
    assert "+0.0 [+0.0, +0.0], 8 shared" in capsys.readouterr().out
    with gzip.open(tmp_path / "evals" / "samples.jsonl.gz", "rt") as lines:
        row = json.loads(next(lines))
    assert set(row) == {"task", *Answer._fields}
    assert not math.isnan(row["score"])
