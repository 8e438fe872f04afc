"""The study of adaptive mu: its cells, its exact evaluation, its program and its statistics."""

import itertools
import math
import random
import string
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Tokenizer

from gac.config import load
from gac.data import DataConfig, load_prompts
from gac.demo.task import model_config, write_rows
from gac.models.causal_lm import load_model
from gac.models.config import ModelConfig
from gac.models.head import run_head
from gac.rollouts.generation import generate
from gac.rows import Row, collate
from research import adaptive_run
from research.adaptive_model import frozen_of, inference, reduce_vocabulary
from research.adaptive_run import Run, Study
from research.adaptive_task import (
    CELLS,
    CODE,
    SUMS,
    AnswerReward,
    held_out,
    regimes,
    rows,
)

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
    settings = {"evaluated": 30, "steps": STEPS, "first": 1}
    return Study(str(folder), SUMS, folder / "results", changes, **settings)


def test_the_program_trains_evaluates_and_continues(study, monkeypatch):
    """Every kind of arm; a run that has a row is not repeated, and a torn line is."""
    arms = ("0.02-0.98", "gac", "constant-alarm", "gac-paper", "sft", "grpo")
    todo = [Run("noisy-rewards", arm, 0) for arm in arms]
    todo += [Run("bad-demonstrations", f"yoked-{arm}", 0) for arm in adaptive_run.YOKED]
    adaptive_run.execute_all(study.execute, iter(todo), study.results, math.inf)
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
    adaptive_run.execute_all(study.execute, iter(todo), study.results, math.inf)
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
    plain = load_model(load(ModelConfig, {"path": study.model})).eval()
    for name, weight in study.loaded.named_parameters():
        assert weight.requires_grad == ("lora_" in name)
        if "lora_B" in name:
            weight.data.zero_()  # the model is the pretrained one again
    prompts = [example.prompt for example in load_prompts(_data(tmp_path, study), study.tokenizer)]
    settings = {"temperature": 0.0, "max_completion_length": SUMS.length}
    written = generate(plain, study.tokenizer, prompts, **settings)
    texts = [study.tokenizer.decode(ids) for ids in written]
    usable = [
        i for i, text in enumerate(texts) if len(text) == SUMS.length and text == text.strip()
    ]
    assert len(usable) >= 10
    for i in usable[::2]:
        study.problems[i] |= {"answer": texts[i], "solution": texts[i]}
    answers = [row["answer"] for row in study.problems]
    expected = [answer == text for answer, text in zip(answers, texts, strict=True)]
    assert study.correct() == expected
    assert len(usable[::2]) <= sum(expected) < len(expected)


def test_frozen_layers_compute_each_row_once_and_the_same(study):
    """Rows that are known, new, or known but for a last token that predicts nothing."""
    study.execute(Run("stationary", "sft", 0))
    model, frozen = study.loaded, frozen_of(study.loaded)
    known = [(5, 6, 7, 8), (5, 6, 7, 9)]
    longer, new = [(5, 6, 7, 8, 4), (5, 6, 7, 9, 3)], [(9, 8, 7, 6, 5)]

    def hidden(rows):
        batch = collate([Row(row, 1, False) for row in rows], 0)
        return run_head(model, **batch.model_inputs).hidden

    frozen.known.clear()
    expected = hidden(longer + new)
    frozen.known.clear()
    with inference(model):
        hidden(known)
    calls = []
    handle = frozen.layers[0].register_forward_hook(lambda *args: calls.append(len(args[2])))
    torch.testing.assert_close(hidden(longer + new)[:2, :-1], expected[:2, :-1])
    torch.testing.assert_close(hidden(new), expected[2:])
    assert calls == [1]
    with inference(model):
        torch.testing.assert_close(hidden(longer), expected[:2])
    handle.remove()
    assert calls == [1, 2]


def test_a_reduced_vocabulary_leaves_the_logits_of_its_tokens(study, tmp_path):
    texts = ["1+7", "ab"]
    reduce_vocabulary(study.model, tmp_path, texts)
    tokenizers = [PreTrainedTokenizerFast.from_pretrained(path) for path in (study.model, tmp_path)]
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (study.model, tmp_path)]
    ids = [tokenizer.encode("b7+1") for tokenizer in tokenizers]
    kept = tokenizers[0].convert_tokens_to_ids(
        tokenizers[1].convert_ids_to_tokens(range(len(tokenizers[1])))
    )
    assert [kept[i] for i in ids[1]] == ids[0]
    full, reduced = (
        m(input_ids=torch.tensor([i])).logits for m, i in zip(models, ids, strict=True)
    )
    torch.testing.assert_close(reduced, full[..., kept])
    assert models[1].generation_config.eos_token_id == tokenizers[1].eos_token_id
    with pytest.raises(ValueError, match="tokens change"):
        reduce_vocabulary(study.model, tmp_path, ["1 -- 7"])


def _data(folder, study):
    write_rows(folder / "prompts.jsonl", study.problems)
    return load(DataConfig, {"prompts": str(folder / "prompts.jsonl"), "template": SUMS.template})


@pytest.mark.parametrize("cell", CELLS)
def test_the_regimes_of_a_cell(cell):
    steps = CELLS[cell].task.steps
    found = [regimes(cell, seed, steps) for seed in range(100)]
    assert not any(second[0] for second in found)
    changes = [sum(a != b for a, b in itertools.pairwise(second)) for second in found]
    if CELLS[cell].changes == "bursts":
        assert {sum(second) for second in found} == {steps // 2}
        assert set(changes) <= {3, 4}
        return
    assert set(changes) == {1}
    starts = {second.index(True) for second in found}
    expected = {"once": {4, 5, 6, 7, 8}, "late": set(range(14, 22)), "never": {steps // 2}}
    assert starts == expected[CELLS[cell].changes]


@pytest.mark.parametrize("task", [SUMS, CODE])
def test_rows_are_paired_and_held_out(task):
    """Cells share the problems of a seed; only the solutions of the bad regime differ."""
    excluded = {row["prompt"] for row in held_out(task, task.evaluated)}
    good = rows(task, "demos", 1, 50, [False, False], excluded)
    mixed = rows(task, "demos", 1, 50, [False, True], excluded)
    assert len(excluded) == task.evaluated
    assert not excluded & {row["prompt"] for row in good}
    assert [row["prompt"] for row in good] == [row["prompt"] for row in mixed]
    assert good[:50] == mixed[:50]
    assert all(row["solution"] != row["answer"] for row in mixed[50:])
    assert all(row["solution"] == row["answer"] for row in good)


def test_the_answers_of_the_tasks():
    """`draw` is random, so the right answers are computed again from the prompts."""
    rng = random.Random(0)
    for prompt, answer, wrong in (SUMS.draw(rng) for _ in range(20)):
        assert int(answer) == sum(map(int, prompt.split(" + ")))
        assert wrong == answer[1] + answer[0]
    for prompt, answer, wrong in (CODE.draw(rng) for _ in range(20)):
        assert answer == prompt[:2].translate(str.maketrans("12345", "34512"))
        assert wrong == prompt[:2].translate(str.maketrans("12345", "45123"))


def test_noise_replaces_rewards_by_coins_that_do_not_depend_on_the_answers():
    reward, right = AnswerReward([0.0, 1.0], seed=3), SimpleNamespace(answer="42")
    reward.set_step(0)
    assert reward.outcomes(["42", "43", "42."], [right] * 3) == [1.0, 0.0, 0.0]
    reward.set_step(1)
    coins = reward.outcomes(["42"] * 400, [right] * 400)
    assert coins == reward.outcomes(["7"] * 400, [right] * 400)
    assert 160 < sum(coins) < 240
