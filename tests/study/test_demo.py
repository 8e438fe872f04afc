"""The demo: its task and a small end-to-end run."""

import random
from types import SimpleNamespace

import pytest

from gac.demo import run, task


def test_correct_responses_are_rewarded():
    """38 + 47 = 85 with one carry: the example from the module's docstring."""
    assert task.prompt(38, 47, "+") == "+87340000="
    assert task.response(38, 47, "+") == "5'8.0.0."
    assert task.response(1, 2, "-") == "9'9'9'9'"  # -1 modulo 10^4
    gold = SimpleNamespace(answer="5'8.0.0.")
    # inner marks may be wrong, the last one must not
    texts = "5'8.0.0.", "5.8'0'0.", "5'8.0.0'", "5'7.0.0.", "5'8.0."
    assert [task.reward(text, gold) for text in texts] == [1, 1, 0, 0, 0]


def test_every_response_agrees_with_arithmetic():
    rng = random.Random(0)
    for _ in range(200):
        a, b, op = task.problem(rng, rng.choice("+-"))
        assert int(task.response(a, b, op)[::2][::-1]) == (a + b if op == "+" else a - b) % 10_000


def test_forgetful_demonstrations_are_often_wrong():
    rows = task.rows(random.Random(0), ["-"] * 256, {"-": 0.3})
    golds = [SimpleNamespace(answer=row["answer"]) for row in rows]
    correct = sum(task.reward(r["solution"], g) for r, g in zip(rows, golds, strict=True))
    assert 0.4 < correct / 256 < 0.8


@pytest.mark.full(reason="trains the demo")
def test_a_demo_finishes_and_then_has_nothing_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "BASE_ACCURACY", (0.0, 1.0))
    assert run.run_demo(tmp_path, ["sft", "gac"], steps=6, base_steps=12, jobs=2) == 0
    printed = capsys.readouterr().out
    assert "report.html" in printed
    assert "base model, seed 0" in printed
    assert "gac-0: done" in printed
    for folder in (tmp_path, tmp_path / "gac-0"):  # the report of all runs, and that of one run
        assert (folder / "report.html").stat().st_size > 100_000
        assert list((folder / "plots").glob("*.svg"))

    assert run.run_demo(tmp_path, ["sft", "gac"], steps=6, base_steps=12, jobs=2) == 0
    assert "done" not in capsys.readouterr().out
