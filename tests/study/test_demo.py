"""The demo: its task, a small end-to-end run, and recovery after a kill."""

from __future__ import annotations

import random
import subprocess
import sys
from types import SimpleNamespace

import pytest

from gac.demo import run, task
from tests.waiting import wait_until


def test_correct_responses_are_rewarded():
    """38 + 47 = 85 with one carry: the example from the module's docstring."""
    assert task.prompt(38, 47, "+") == "+87340000="
    assert task.response(38, 47, "+") == "5'8.0.0."
    assert task.response(1, 2, "-") == "9'9'9'9'"  # -1 modulo 10^4
    gold = SimpleNamespace(answer="5'8.0.0.")
    assert task.reward("5'8.0.0.", gold) == 1
    assert task.reward("5.8'0'0.", gold) == 1  # inner marks may be wrong
    assert task.reward("5'8.0.0'", gold) == 0  # the last mark must not
    assert task.reward("5'7.0.0.", gold) == 0
    assert task.reward("5'8.0.", gold) == 0


def test_every_response_agrees_with_arithmetic():
    rng = random.Random(0)
    for _ in range(200):
        a, b, op = task.problem(rng, rng.choice("+-"))
        digits = task.response(a, b, op)[::2]
        assert int(digits[::-1]) == (a + b if op == "+" else a - b) % 10_000


def test_forgetful_demonstrations_are_often_wrong():
    rows = task.rows(random.Random(0), ["-"] * 256, {"-": 0.3})
    golds = [SimpleNamespace(answer=row["answer"]) for row in rows]
    correct = sum(task.reward(r["solution"], g) for r, g in zip(rows, golds, strict=True))
    assert 0.4 < correct / 256 < 0.8


def test_tokenizer_round_trip():
    tokenizer = task.make_tokenizer()
    text = "+87340000=5'8.0.0."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer(text)["input_ids"]) == len(text)


SMALL = """
import sys
from pathlib import Path
from gac.demo import run
run.BASE_ACCURACY = (0.0, 1.0)  # a base model of a few steps
run.run_demo(Path(sys.argv[1]), methods=["sft", "gac"], steps=6, base_steps=12, jobs=2)
"""


@pytest.mark.full(reason="trains the demo")
def test_a_demo_that_is_killed_finishes_and_then_has_nothing_to_do(tmp_path, monkeypatch, capsys):
    """The runs end with their parent, so that the next demo can resume them."""
    command = [sys.executable, "-c", SMALL, str(tmp_path)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **quiet)
    started = (tmp_path / "gac-0" / "metrics.jsonl").exists
    try:
        wait_until(lambda: started() or process.poll() is not None, "a step of gac-0", 240)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(60)
    monkeypatch.setattr(run, "BASE_ACCURACY", (0.0, 1.0))
    assert run.run_demo(tmp_path, ["sft", "gac"], steps=6, base_steps=12, jobs=2) == 0
    printed = capsys.readouterr().out
    assert "report.html" in printed and "base model, seed 0" in printed
    assert "gac-0: done" in printed
    for folder in (tmp_path, tmp_path / "gac-0"):  # the report of all runs, and that of one run
        assert (folder / "report.html").stat().st_size > 100_000
        assert list((folder / "plots").glob("*.svg"))

    assert run.run_demo(tmp_path, ["sft", "gac"], steps=6, base_steps=12, jobs=2) == 0
    assert "done" not in capsys.readouterr().out
