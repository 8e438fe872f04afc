"""Pairs from responses: which are chosen, and a whole command with a tiny model."""

import json
from pathlib import Path

from gac.data import Example
from gac.evaluation.task import Answer
from research.preference_pairs import main, pairs
from tests.tiny import write_tiny


def example(number: int) -> Example:
    return Example(
        id=str(number),
        prompt=(1,),
        prompt_text="?",
        answer="1",
        demo=None,
        extra={"prompt": f"p{number}"},
    )


def answer(number: int, response: str, score: float | None, truncated: bool = False) -> Answer:
    return Answer(
        number=number,
        id=str(number),
        row="",
        split=None,
        prompt="?",
        reference="1",
        response=response,
        length=1,
        score=score,
        truncated=truncated,
    )


def test_the_first_complete_response_of_each_kind_counts() -> None:
    answers = [
        answer(0, "cut", 0.0, truncated=True),
        answer(0, "wrong", 0.0),
        answer(0, "also wrong", 0.5),
        answer(0, "dropped", None),
        answer(0, "right", 1.0),
        answer(0, "also right", 1.0),
    ]
    rows = [*pairs([example(0)], answers)]
    assert rows == [{"prompt": "p0", "chosen": "right", "rejected": "wrong"}]


def test_a_prompt_with_responses_of_one_kind_has_no_pair() -> None:
    answers = [answer(0, "wrong", 0.0), answer(1, "right", 1.0), answer(1, "cut", 0.0, True)]
    assert [*pairs([example(0), example(1)], answers)] == []


def write_config(folder: Path) -> Path:
    """A task with 32 samples of each of 16 prompts."""
    task = write_tiny(folder / "tiny")
    config = {
        "model": {"path": str(task / "init"), "random_init": True},
        "out": str(folder / "answers"),
        "reward": "tests.tiny:digit_reward",
        "tasks": {
            "sums": {
                "data": {"prompts": str(task / "prompts.jsonl"), "demo_field": None},
                "samples": 32,
                "temperature": 1.0,
                "max_completion_length": 3,
            }
        },
    }
    path = folder / "pairs.yaml"
    path.write_text(json.dumps(config))
    return path


def test_the_command_pairs_the_responses_of_a_model(tmp_path, capsys) -> None:
    assert main([str(write_config(tmp_path)), str(tmp_path / "pairs.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert 0 < len(rows) <= 16
    assert all(row["chosen"] != row["rejected"] for row in rows)
    assert f"{len(rows)} pairs of 16 prompts" in capsys.readouterr().out


def test_without_a_pair_no_file_is_written(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("research.preference_pairs.pairs", lambda examples, answers: [])
    config = write_config(tmp_path)
    assert main([str(config), str(tmp_path / "pairs.jsonl")]) == 1
    assert "no pairs of 16 prompts" in capsys.readouterr().out
    assert not (tmp_path / "pairs.jsonl").exists()
