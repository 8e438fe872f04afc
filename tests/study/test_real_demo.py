"""`gac demo --real`: its task, its settings, and runs of the pretrained model if it is cached."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gac.cli import main
from gac.config import dump
from gac.demo import REAL_METHODS, real, real_task
from gac.report.reading import flatten


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_files_of_the_task_share_no_prompt_and_a_quarter_of_the_demonstrations_is_wrong(
    tmp_path: Path,
) -> None:
    real_task.write_task(tmp_path)
    parts = {name: read(tmp_path / f"{name}.jsonl") for name in ("prompts", "demos", "eval")}
    texts = [row["prompt"][1]["content"] for rows in parts.values() for row in rows]
    assert len(set(texts)) == len(texts) == 600
    for name in ("prompts", "eval"):
        kinds = [row["kind"] for row in parts[name]]
        assert kinds.count("sum") == kinds.count("code") == len(kinds) / 2
    assert {row["kind"] for row in parts["demos"]} == {"code"}
    wrong = sum(row["solution"] != row["answer"] for row in parts["demos"])
    assert 0.15 < wrong / 200 < 0.35
    assert all(re.fullmatch(r"[a-z]+-[a-z]+-\d\d", row["solution"]) for row in parts["demos"])
    for row in parts["eval"]:
        if row["kind"] == "sum":
            a, b = re.findall(r"\d+", row["prompt"][1]["content"])
            assert row["answer"] == str(int(a) + int(b))
    real_task.write_task(tmp_path / "again")
    assert read(tmp_path / "again" / "demos.jsonl") == parts["demos"]


@pytest.mark.parametrize(
    ("kind", "answer", "right", "wrong"),
    [
        ("code", "lamps-green-12", ["lamps-green-12", " lamps-green-12\n"], ["green-lamps-12", ""]),
        ("code", "lamps-green-12", [], ["lamps-green-12 lamps-green-12", "Lamps-Green-12"]),
        ("sum", "12", ["12", "4 + 8 = 12 tickets."], ["", "4 + 8", "112", "12 of 20"]),
    ],
)
def test_rewards(kind: str, answer: str, right: list[str], wrong: list[str]) -> None:
    example = SimpleNamespace(answer=answer, extra={"kind": kind}, truncated=False)
    assert [real_task.reward(text, example) for text in right] == [1.0] * len(right)
    assert [real_task.reward(text, example) for text in wrong] == [0.0] * len(wrong)


def test_a_response_that_was_cut_off_earns_nothing() -> None:
    """Its last number may be the beginning of another one."""
    example = SimpleNamespace(answer="12", extra={"kind": "sum"}, truncated=True)
    assert real_task.reward("That is 12", example) == 0.0


def test_runs_differ_only_in_their_method() -> None:
    first, second = (
        dict(flatten(dump(real.config(Path("o"), "m", name, 8)))) for name in REAL_METHODS
    )
    changed = {k for k in first if not k.startswith("method.") and second.get(k) != first[k]}
    assert changed == {"out", "run_name"}
    assert (first["out"], first["steps"], first["model.path"]) == ("o/constant-alarm", 8, "m")


def test_the_progress_is_one_line_for_each_change(tmp_path: Path, capsys: Any) -> None:
    runs = [real.config(tmp_path, "m", name, 8) for name in REAL_METHODS]
    progress = real.Progress(runs)
    progress()
    progress()
    (tmp_path / "grpo").mkdir()
    metrics = tmp_path / "grpo" / "metrics.jsonl"
    metrics.write_text('{"step": 3, "reward_mean": 0.25}\n')
    progress()
    metrics.write_text('{"step": 3, "reward_mean": 0.25}\n{"step": 4, "rew')  # being written
    progress()
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r" \(\d+ s\)", "", line) for line in lines] == [
        "constant-alarm 0/8, grpo 0/8",
        "constant-alarm 0/8, grpo 3/8, reward 0.25",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "2"], "--seeds=2 has no effect with --real: remove it"),
        (["--methods", "grop"], "--methods: unknown method 'grop'; did you mean 'grpo'?"),
        (["--steps", "0"], "--steps=0: use a number >= 1"),
    ],
)
def test_mistakes(tmp_path: Path, capsys: Any, arguments: list[str], message: str) -> None:
    assert main(["demo", "--out", str(tmp_path / "o"), *arguments, "--real"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_model_that_does_not_exist(tmp_path: Path, capsys: Any) -> None:
    missing = str(tmp_path / "no-model")
    assert main(["demo", "--out", str(tmp_path / "o"), "--real", missing]) == 2
    assert f"--real={missing!r}" in capsys.readouterr().err


def test_an_empty_name_of_a_model(tmp_path: Path, capsys: Any) -> None:
    assert main(["demo", "--out", str(tmp_path / "o"), "--real", ""]) == 2
    assert "--real is empty: give a folder" in capsys.readouterr().err


def test_every_answer_fits_the_length_of_a_response(cached_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(cached_model)
    codes = [
        f"{item}-{color}-10"  # a number has a token for each digit
        for item in real_task.ITEMS
        for color in real_task.COLORS
    ]
    longest = max(len(ids) for ids in tokenizer(codes, add_special_tokens=False)["input_ids"])
    assert longest + 1 <= real.LENGTH  # with the end of the turn


@pytest.mark.real
def test_a_demo_of_the_real_model_finishes_and_then_has_nothing_to_do(
    real_model: Path, tmp_path: Path, capsys: Any
) -> None:
    real_task.write_task(tmp_path / "task", prompts=12, demos=16, held_out=6)
    assert real.run_real(tmp_path, str(real_model), steps=2) == 0
    printed = capsys.readouterr().out
    assert "constant-alarm 2/2" in printed
    assert "grpo: done" in printed
    page = (tmp_path / "report.html").read_text()
    assert "Before and after" in page
    assert real.run_real(tmp_path, str(real_model), steps=2) == 0
    assert "done" not in capsys.readouterr().out
