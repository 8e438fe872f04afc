"""The study of adaptive mu: its cells, its exact evaluation, its program and its statistics."""

import itertools
import math
import random
import string
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Tokenizer

from gac.config import load
from gac.data import DataConfig, load_prompts
from gac.demo.task import model_config, write_rows
from gac.rollouts.generation import generate
from research import adaptive_run
from research.adaptive_run import Run, Study
from research.adaptive_task import CELLS, TEMPLATE, SumReward, held_out, regimes, rows, wrong

STEPS = 4


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A random model of two layers that reads and writes characters."""
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("model")
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokens = [*special.values(), *string.printable[:94], "Ġ", "Ċ"]
    tokenizer = Qwen2Tokenizer({token: i for i, token in enumerate(tokens)}, [], **special)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = model_config(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    lora = adaptive_run.LORA | {"target_modules": r".*layers\.1\..*_proj"}
    changes = {"model": {"path": str(folder), "lora": lora}}
    return Study(str(folder), folder / "results", changes, evaluated=30, steps=STEPS, first=1)


def test_the_program_trains_evaluates_and_continues(study, monkeypatch):
    """Every kind of arm; a run that has a row is not repeated, and a torn line is."""
    arms = ("0.02-0.98", "gac", "constant-alarm", "gac-paper", "sft", "grpo")
    todo = [Run("noisy-rewards", arm, 0) for arm in arms]
    todo += [Run("bad-demonstrations", f"yoked-{arm}", 0) for arm in adaptive_run.YOKED]
    adaptive_run.execute_all(study, iter(todo), math.inf)
    found = {adaptive_run.key(row): row for row in adaptive_run.finished(study.results)}
    assert list(found) == todo
    second = regimes("noisy-rewards", 0, STEPS)
    assert found[todo[0]]["mu"] == [0.98 if noisy else 0.02 for noisy in second]
    for arm in adaptive_run.YOKED:
        yoked = found[Run("bad-demonstrations", f"yoked-{arm}", 0)]
        assert yoked["mu"] == found[Run("noisy-rewards", arm, 0)]["mu"]
    assert len(set(found[Run("noisy-rewards", "gac", 0)]["mu"])) == STEPS
    log = study.results / "runs.jsonl"
    log.write_text(log.read_text()[:-9])
    executed = []
    monkeypatch.setattr(study, "execute", lambda run: executed.append(run) or found[run])
    adaptive_run.execute_all(study, iter(todo), math.inf)
    assert executed == todo[-1:]
    assert [adaptive_run.key(row) for row in adaptive_run.finished(study.results)] == todo


def test_a_repeated_run_is_equal(study):
    run = Run("bad-demonstrations", "0.5-0.5", 3)
    first, again = study.execute(run), study.execute(run)
    timing = {"cpu_seconds", "training_cpu_seconds", "seconds", "date"}
    assert {k: v for k, v in first.items() if k not in timing} == {
        k: v for k, v in again.items() if k not in timing
    }


def test_the_exact_evaluation_equals_greedy_decoding(study, tmp_path):
    """Half of the answers are what the model writes."""
    study.execute(Run("stationary", "sft", 0))
    prompts = [example.prompt for example in load_prompts(_data(tmp_path, study), study.tokenizer)]
    written = generate(
        study.loaded, study.tokenizer, prompts, temperature=0.0, max_completion_length=2
    )
    texts = [study.tokenizer.decode(ids, skip_special_tokens=True) for ids in written]
    usable = [i for i, text in enumerate(texts) if len(text) == 2 and text == text.strip()]
    assert len(usable) >= 10
    expected = [False] * len(texts)
    for i in usable[::2]:
        study.problems[i] |= {"answer": texts[i], "solution": texts[i]}
        expected[i] = True
    study.inputs = None
    assert study.correct() == [
        row["answer"] == text for row, text in zip(study.problems, texts, strict=True)
    ]
    assert sum(study.correct()) >= sum(expected)


def _data(folder, study):
    write_rows(folder / "prompts.jsonl", study.problems)
    return load(DataConfig, {"prompts": str(folder / "prompts.jsonl"), "template": TEMPLATE})


@pytest.mark.parametrize("cell", CELLS)
def test_the_regimes_of_a_cell(cell):
    found = [regimes(cell, seed, 12) for seed in range(40)]
    assert not any(second[0] for second in found)
    changes = [sum(a != b for a, b in itertools.pairwise(second)) for second in found]
    if cell == "noisy-rewards":
        assert {sum(second) for second in found} == {6}
        assert set(changes) <= {3, 4}
        return
    assert set(changes) == {1}
    starts = {second.index(True) for second in found}
    assert starts == ({6} if cell == "stationary" else {4, 5, 6, 7, 8})


def test_rows_are_paired_and_held_out():
    """Cells share the problems of a seed; only the solutions of the bad regime differ."""
    problems = held_out(500)
    excluded = {row["prompt"] for row in problems}
    bad = [False, True]
    good = rows("demos", 1, 50, [False, False], excluded)
    mixed = rows("demos", 1, 50, bad, excluded)
    assert len(excluded) == 500
    assert not excluded & {row["prompt"] for row in good}
    assert [row["prompt"] for row in good] == [row["prompt"] for row in mixed]
    assert good[:50] == mixed[:50]
    assert all(row["solution"] != row["answer"] for row in mixed[50:])
    assert all(row["solution"] == row["answer"] for row in good)
    assert wrong("57") == "75"


def test_noise_replaces_rewards_by_coins_that_do_not_depend_on_the_answers():
    reward, right = SumReward([0.0, 1.0], seed=3), SimpleNamespace(answer="42")
    reward.set_step(0)
    assert reward.outcomes(["42", "43", "42."], [right] * 3) == [1.0, 0.0, 0.0]
    reward.set_step(1)
    coins = reward.outcomes(["42"] * 400, [right] * 400)
    assert coins == reward.outcomes(["7"] * 400, [right] * 400)
    assert 160 < sum(coins) < 240
