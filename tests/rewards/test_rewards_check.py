"""`gac rewards check` lists the rows whose own solution does not earn the reward."""

import gzip
import json
import logging
import sys

import pytest

from gac.cli import main
from gac.errors import ConfigError
from gac.rewards import RowReward
from gac.rewards.check import check

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

GOOD = "def add(a, b):\n    return a + b\n"
BAD = "def add(a, b):\n    return a - b\n"
CRASHES = "import os; print(1, flush=True); os.abort()"
TESTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(-1, 1) == 0"]


class Length(RowReward):
    """The number of characters, up to 9."""

    closed = 0

    def score(self, completion, example):
        return [0, 1, 2, 3, 4, 5, 6, 7, 8, 9][len(completion)]

    def close(self):
        Length.closed += 1


def write_rows(path, *rows):
    """The settings of data with these rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"prompts": str(path), "demo_field": "answer"}


@pytest.fixture
def config(tmp_path):
    rows = [
        {"id": "good", "prompt": "add", "answer": GOOD, "tests": TESTS},
        {"id": "wrong", "prompt": "add", "answer": BAD, "tests": TESTS},
        {"id": "broken", "prompt": "add", "answer": GOOD, "tests": ["assert ("]},
        {"id": "case", "prompt": "echo", "answer": CRASHES, "cases": [["", "2"]]},
    ]
    data = tmp_path / "rows.jsonl.gz"
    with gzip.open(data, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    path = tmp_path / "train.yaml"
    path.write_text(
        f"data: {{prompts: {data}, demo_field: answer}}\n"
        "reward: code\nmodel:\n  path: none\nsteps: 5\n"
    )
    return path


def test_check_names_the_rows_whose_solution_fails(config):
    report = check(config)
    assert report.rows == 4
    assert [failing.row for failing in report.failing] == ["wrong", "broken", "case"]
    wrong, broken, case = (failing.reason for failing in report.failing)
    assert wrong.startswith(
        "the row's own answer fails: test 1 (assert add(1, 2) == 3): AssertionError"
    )
    assert "test 1 is not valid Python" in broken
    assert "wrote b'1\\n', expected b'2'" in case


def test_rows_that_a_constant_passes_are_weak(tmp_path):
    add = {"prompt": "add", "answer": GOOD}
    rows = [
        {"id": "wrong", "prompt": "echo", "answer": "print(2)", "cases": [["1", "1"]]},
        {"id": "empty", "prompt": "nothing", "answer": "pass", "cases": [["1", ""]]},
        add | {"id": "list", "tests": ["assert add([], []) == []"]},
        add | {"id": "weak", "tests": ["assert add(0, 0) == 0"]},
        add | {"id": "any", "tests": ["add"]},
        add | {"id": "fine", "tests": TESTS},
        {"id": "case", "prompt": "echo", "answer": "print(int(input()))", "cases": [["1", "1"]]},
        {"id": "body", "prompt": "def add(a, b):\n    'Add.'", "answer": "\n    return a + b"}
        | {"entry_point": "add", "tests": ["def check(f): assert f(0, 0) == 0"]},
    ]
    data = write_rows(tmp_path / "rows.jsonl", *rows)
    code = {"name": "code", "partial": True}
    terms = [{"reward": code}, {"reward": {"name": "format", "pattern": "x"}, "weight": 0}]
    for reward, scores, failed, weak in (
        (code, "", "", ""),
        ({"sum": terms}, "code scores 0: ", "term 'code': ", "code: "),
    ):
        result = check({"data": data, "reward": reward})
        assert list(map(str, (*result.failing, *result.weak))) == [
            f"wrong: scores 0; {scores}case 1 (b'1'): wrote b'2\\n', expected b'1' (ended, 0)",
            f"any: {failed}the row's own answer fails: the tests never use the program",
            f"empty: weak: {weak}an empty program passes",
            f"list: weak: {weak}a program that always returns [] passes",
            f"weak: weak: {weak}a program that always returns 0 passes",
            f"case: weak: {weak}print(1) passes",
            f"body: weak: {weak}a program that always returns 0 passes",
        ]


def test_check_on_the_command_line(config, capsys, caplog):
    caplog.set_level(logging.ERROR, "gac")
    assert main(["rewards", "check", str(config)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("wrong: the row's own answer fails")
    assert printed[-1] == "1 of 4 rows pass (1 crashes)"
    assert str(config.parent) in sys.path  # where rewards are found
    assert logging.getLogger("gac").level == logging.INFO
    less = "reward={sum: [{reward: code, weight: 0.75}]}"
    command = ["rewards", "check", str(config), "--set", "data.where={id: good}"]
    assert [main(command), main([*command, less])] == [0, 1]
    assert capsys.readouterr().out == "1 of 1 rows pass\ngood: scores 0.75\n0 of 1 rows pass\n"


def test_check_reads_evaluation_files_and_names_what_is_missing(config, capsys):
    data = {
        "prompts": str(config.parent / "rows.jsonl.gz"),
        "where": {"id": "good"},
        "demo_field": None,
    }
    path = data["prompts"]
    several = {"sources": [{"path": path, "name": "a"}, {"path": path}], "prompts": None}
    assert check({"eval": {"data": data}, "reward": "code"}).rows == 1
    assert check({"data": {**data, **several}, "reward": "code"}).rows == 2
    assert not check({"eval": {"data": data, "reward": "code"}, "reward": "choice"}).failing
    tasks = {"own": {"data": data, "reward": "code"}, "shared": {"data": data, "reward": None}}
    assert check({"tasks": tasks, "reward": "code"}).failing == ()
    report = check({"tasks": tasks, "reward": {"name": "code", "tests_field": "none"}})
    assert report.rows == 2
    assert [failing.task for failing in report.failing] == ["shared"]
    assert main(["rewards", "check", str(config), "--set", "reward=cod"]) == 2
    assert "unknown reward 'cod'; did you mean 'code'?" in capsys.readouterr().err
    config.write_text("reward: code")
    assert main(["rewards", "check", str(config)]) == 2
    assert "has no data: set data.prompts" in capsys.readouterr().err


def test_only_reference_solutions_are_scored(tmp_path, capsys):
    """A row with only an answer is left out: a bare answer is not a response to the prompt."""
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "is 2"}]
    rows = [{"prompt": "1+2=", "answer": "3"}, {"messages": messages, "answer": "2"}]
    data, path = tmp_path / "rows.jsonl", tmp_path / "run.yaml"
    write_rows(data, *rows)
    path.write_text(f"data: {{prompts: {data}}}\nreward: {{name: format, pattern: 'is .*'}}\n")
    result = check(path)
    assert (result.rows, result.failing) == (1, ())
    # unlike the evaluation data, the training data are checked; the reward is `math` by default
    result = check({"data": {"prompts": str(data)}, "eval": {"data": {"prompts": "absent.jsonl"}}})
    assert (result.rows, result.failing) == (1, ())
    write_rows(data, rows[0])
    assert main(["rewards", "check", str(path)]) == 2
    assert "dropped: 1 without 'solution'); set data.demo_field" in capsys.readouterr().err


def test_the_failures_of_all_tasks_are_counted(tmp_path):
    row = {"id": "crash", "prompt": "add", "answer": "import os; os.abort()", "tests": TESTS}
    task = {"data": write_rows(tmp_path / "rows.jsonl", row)}
    result = check({"tasks": {"a": task, "b": task}, "reward": "code"})
    assert [(failed.task, failed.row) for failed in result.failing] == [
        ("a", "crash"),
        ("b", "crash"),
    ]
    assert (result.rows, result.counts["crashes"]) == (2, 2)


def test_rewards_have_a_threshold_and_are_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(Length, "closed", 0)
    rows = [{"id": text[:4], "prompt": "p", "answer": text} for text in ("ab", "abc", "long" * 3)]
    data = write_rows(tmp_path / "rows.jsonl", *rows)
    part = {"data": data, "reward": "tests.rewards.test_rewards_check:Length"}
    result = check(part, min_reward=3)
    assert [str(failed) for failed in result.failing] == [
        "ab: scores 2",
        "long: list index out of range",
    ]
    result = check({"tasks": {"a": part, "b": part}}, ["data.where={id: ab}"], min_reward=2.5)
    assert result.rows == 2
    assert Length.closed == 3
    assert list(map(str, result.failing)) == ["a: ab: scores 2", "b: ab: scores 2"]
    for wrong, message in (
        ({"tasks": {"a": part | {"reward": "mth"}}}, "a: unknown reward 'mth'"),
        (part | {"reward": "mth"}, "unknown reward 'mth'"),
        ({"tasks": {"a": {"reward": "math"}}}, "tasks.a has no data"),
        ({"tasks": {"a": 3}}, "tasks.a has no data"),
        ({"reward": "math"}, "the configuration has no data"),
    ):
        with pytest.raises(ConfigError) as error:
            check(wrong)
        assert str(error.value).startswith(message)


def test_solutions_are_graded_after_the_reasoning_markers_of_the_tokenizer(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({c: i for i, c in enumerate("0123456789 ")}, [])),
        eos_token="<eos>",
        additional_special_tokens=["[THINK]", "[/THINK]"],
    )
    tokenizer.save_pretrained(tmp_path / "model")
    row = {"id": "row", "prompt": "2+3=", "answer": "5", "solution": "[THINK]7[/THINK]5"}
    data = write_rows(tmp_path / "rows.jsonl", row) | {"demo_field": "solution"}
    run = {"data": data, "reward": "exact", "model": {"path": str(tmp_path / "model")}}
    assert check(run).failing == ()
    assert check({"tasks": {"a": {"data": data}}, **run}).failing == ()
    assert check({"eval": {"data": data}, "reward": "exact", "model": run["model"]}).failing == ()
    other = {"path": "none", "tokenizer": str(tmp_path / "model")}
    assert check({**run, "model": other}).failing == ()
    [failing] = check(run, ["model.path=absent"]).failing  # not on this machine
    assert str(failing) == "row: scores 0"
    assert check({**run, "reward": {"name": "exact", "reasoning": False}}).failing == (failing,)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"model\.path=.*empty.*: the folder has no tokenizer"):
        check(run, [f"model.path={tmp_path / 'empty'}"])
