"""The study of a teacher: its runs, its exact evaluation and its tables."""

import json
import math
import string

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Tokenizer

from research import teacher_results, teacher_run
from research.adaptive_run import execute_all, finished
from research.adaptive_task import SUMS
from research.teacher_run import ARMS, Run, Study, divergence


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A random model of six layers that reads and writes characters, and a student of five."""
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("models")
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokens = [*special.values(), *string.printable[:94], "Ġ", "Ċ"]
    tokenizer = Qwen2Tokenizer({token: i for i, token in enumerate(tokens)}, [], **special)
    tokenizer.save_pretrained(folder / "teacher")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "teacher")
    teacher_run.write_student(folder / "teacher", folder / "student", dropped=(1,))
    changes = {"optim": {"lr": 1e-2, "warmup_steps": 0}}
    return Study(folder, changes=changes, evaluated=30, steps=4, every=2)


def test_every_arm_runs_and_a_finished_one_is_not_repeated(study, tmp_path):
    todo = [Run(experiment, arm, 1e-3, 0) for experiment in ARMS for arm in ARMS[experiment]]
    execute_all(study.execute, iter(todo), tmp_path, math.inf)
    rows = finished(tmp_path)
    assert [teacher_run.key(row) for row in rows] == todo
    for row in rows:
        assert [c["step"] for c in row["curve"]] == [0, 2, 4]
        is_sft = row["arm"] == "sft"
        assert all((x is None) == is_sft for x in row["teacher_loss"])
    before = [row["curve"][0] for row in rows]
    assert before[:4] == [before[0]] * 4
    assert before[4:] == [before[4]] * 2
    assert before[0]["reverse_kl/sums"] > 0
    assert before[4]["reverse_kl/sums"] == 0
    execute_all(study.execute, iter(todo), tmp_path, math.inf)
    assert finished(tmp_path) == rows


def test_distillation_brings_the_student_closer(study):
    row = study.execute(Run("opd", "opd", 1e-3, 1))
    first, *_, last = row["curve"]
    assert last["reverse_kl/sums"] < first["reverse_kl/sums"]
    again = study.execute(Run("opd", "opd", 1e-3, 1))
    assert again["curve"] == row["curve"]


def test_the_divergence_of_an_answer_is_exact():
    g = torch.Generator().manual_seed(0)
    p, q = (torch.randn(3, SUMS.length, 5, generator=g).double().log_softmax(-1) for _ in range(2))
    expected = sum(
        math.exp(p[i, j, v]) * (p[i, j, v] - q[i, j, v])
        for i in range(3)
        for j in range(SUMS.length)
        for v in range(5)
    )
    assert divergence(p, q) == pytest.approx(float(expected) / (3 * SUMS.length))


def test_the_tables_are_those_of_the_rows(monkeypatch):
    """Of arms with all seeds only; differences are paired."""
    seeds, lr = range(3), teacher_run.LRS[0]
    monkeypatch.setattr(teacher_results, "SEEDS", seeds)
    monkeypatch.setattr(teacher_results, "LEAST", 3)

    def row(arm: str, seed: int, accuracy: float) -> dict:
        names = [
            f"{kind}/{task}"
            for kind in ("accuracy", "reverse_kl")
            for task in ("sums", *teacher_results.OTHER)
        ]
        curve = [
            {"step": t, **dict.fromkeys(names, x)}
            for t, x in ((0, 0.5), (teacher_run.STEPS, accuracy))
        ]
        run = Run("sdft", arm, lr, seed)
        return {**run._asdict(), "curve": curve, "cpu_seconds": 60, "commit": "abc"}

    rows = [row("sft", s, 0.5 + 0.01 * s) for s in seeds]
    rows += [row("sdft", s, 0.6 + 0.01 * s) for s in seeds]
    table = teacher_results.sdft_table(rows)
    assert "| before | 50.0 |" in table
    assert f"| `sdft` minus `sft`, learning rate {lr:g} | +10.0 [+10.0, +10.0] |" in table
    own = 100 * np.array([0.5, 0.51, 0.52])
    half = 4.302652729749464 * own.std(ddof=1) / 3**0.5
    assert f"| {own.mean():.1f} [{51 - half:.1f}, {51 + half:.1f}] |" in table
    assert "sdft" not in teacher_results.sdft_table(rows[:-1]).split("`sft`")[1]
    assert teacher_results.progress(rows) == (
        "6 runs, 2 reported arms, 6 CPU minutes; code: abc.\n"
    )


def test_the_page_is_that_of_the_stored_rows():
    assert teacher_results.main(["--check"]) == 0


def test_stored_rows_have_every_column():
    for row in finished(teacher_run.RESULTS):
        assert json.dumps(row)
        assert row["commit"]
        assert len(row["curve"]) == 1 + teacher_run.STEPS // teacher_run.EVERY
