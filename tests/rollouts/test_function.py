"""`rollouts.function`: several turns, token masks, errors."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from examples import turns
from gac.data.micro_batches import MicroBatches
from gac.errors import ConfigError, RunError
from gac.methods.base import Loss
from gac.models.head import run_head
from gac.rollouts import Rollout
from gac.rollouts.config import RolloutConfig
from gac.rollouts.engines import Engine, RolloutFunction
from gac.rollouts.scoring import is_truncated
from gac.rows import Row, collate, count
from gac.training.gradients import Forward, Gradients, SampledKL
from gac.training.step import Rewards, Step
from gac.training.trainer import Trainer, train
from gac.types import Mix, StepNeeds
from gac_kernels import LossSpec
from tests import ranks
from tests.tiny import metrics, tiny_config
from tests.training.test_packing import make

RETURNED: Any = None
HERE = f"{__name__}:"


@pytest.mark.parametrize(
    "game",
    [
        pytest.param("guess", marks=pytest.mark.full(reason="the other example runs 12 steps")),
        "calculate",
    ],
)
def test_the_examples_learn(tmp_path, game: str) -> None:
    """A single guess wins at most a third of the games. The calculator is only called."""
    if game == "guess":
        before, after = turns.main(game, tmp_path)
        assert before < 0.4
        assert after >= 0.9
    else:
        train(replace(turns.config(game, tmp_path), steps=12))
    entries = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    completions = [c for e in entries for p in json.loads(e)["prompts"] for c in p["completions"]]
    several = [c for c in completions if "turns" in c]
    assert several
    assert all([learned for _, learned in c["turns"]] == [True, False, True] for c in several)


ROWS = [  # masks with a gap, at the start and at the end
    Row((5, 6, 7, 8, 9, 10), 2, False, 1.5, 0, mask=(True, False, False, True)),
    Row((7, 9, 11, 4, 3), 1, False, -0.5, 1, mask=(False, True, True, False)),
    Row((12, 5, 8), 1, False, 0.75, 2),
]
FLIPPED = [ROWS[0]._replace(mask=(True, True, False, True)), *ROWS[1:]]


def gradients(model, rows, micro, spec) -> tuple[Any, dict[str, Any], list[Any]]:
    """The measurements and the gradients of a step, and those of the hidden states."""
    forward = Forward(Accelerator(cpu=True), model, model, 1.0, micro, pad_token=0)
    step = Step(0, tuple(rows), Mix(0.0), count(rows), Rewards.of([1.0]), StepNeeds(kl=True), (), 1)
    hidden = []

    def keep(module: Any, args: Any, output: Any) -> None:
        if output.requires_grad:
            output.retain_grad()
            hidden.append(output)

    handle = model.model.norm.register_forward_hook(keep)
    model.zero_grad()
    measured = Gradients(forward, Loss(spec))(step)
    handle.remove()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    return measured, grads, [h.grad for h in hidden]


@pytest.mark.parametrize("reduction", ["sequence", "token"])
@pytest.mark.parametrize("micro", [MicroBatches(), MicroBatches(tokens=64, packed=True)])
def test_masked_tokens_have_no_loss(micro, reduction) -> None:
    """Against autograd over the log-probs of the learned tokens, each row alone."""
    model, spec = make("qwen2"), LossSpec(rollout_reduction=reduction, entropy_coef=0.1)
    measured, grads, hidden = gradients(model, ROWS, micro, spec)
    model.zero_grad()
    losses, tokens = [], []
    for row in ROWS:
        mask = torch.tensor(row.mask or [True] * row.loss_tokens)
        batch = collate([row._replace(mask=())], 0)
        values = run_head(model, **batch.model_inputs).logprobs(batch.targets)
        logps, entropy = (x.flatten()[row.start - 1 : len(row.ids) - 1][mask] for x in values)
        per_token = -row.advantage * logps - 0.1 * entropy
        losses.append(per_token.mean() if reduction == "sequence" else per_token.sum())
        tokens.append(len(logps))
    norm = len(ROWS) if reduction == "sequence" else sum(tokens)
    (sum(losses) / norm).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-4, atol=1e-6, msg=name)
    batch = collate(ROWS, 0, packed=micro.packed)
    live = (batch.targets != -100).flatten()
    assert int(live.sum()) == sum(tokens) == count(ROWS).rollout_tokens == 6
    (grad,) = hidden
    assert (grad.flatten(0, 1)[~live] == 0).all()
    assert (grad.flatten(0, 1)[live] != 0).any(1).all()
    assert float(measured.moments.kl) == pytest.approx(0, abs=1e-6)


def test_a_flipped_mask_is_noticed() -> None:
    model, spec = make("qwen2"), LossSpec()
    results = [gradients(model, rows, MicroBatches(), spec) for rows in (ROWS, FLIPPED)]
    (first, grads, _), (second, flipped, _) = results
    assert count(FLIPPED).rollout_tokens == 7
    assert abs(float(first.moments.entropy) - float(second.moments.entropy)) > 1e-4
    assert max(float((g - flipped[n]).norm() / g.norm()) for n, g in grads.items()) > 0.05


def test_log_probs_and_kl_are_those_of_the_learned_tokens() -> None:
    """The old log-probs, the sampled KL, and a step that `gac replay` reads."""
    model = make("qwen2")
    forward = Forward(Accelerator(cpu=True), model, model, 1.0, MicroBatches(), pad_token=0)
    full = forward.row_logprobs([row._replace(mask=()) for row in ROWS])
    logps = forward.row_logprobs(ROWS)
    for row, own, every in zip(ROWS, logps, full, strict=True):
        assert torch.equal(own, every[torch.tensor(row.mask)] if row.mask else every)
    step = Step(0, tuple(ROWS), Mix(0.0), count(ROWS), Rewards.of([1.0]), StepNeeds(kl=True), (), 1)
    assert Step.restore(step.plain()) == step
    assert sum(map(len, SampledKL(forward, step, 3).reference.values())) == 6


def two_turns(prompts, engine) -> list[Rollout]:
    """A first turn, a comment of the environment, and a second turn if the first is short."""
    first = engine.generate([p.prompt for p in prompts], max_completion_length=2)
    rollouts = []
    for prompt, ids in zip(prompts, first, strict=True):
        completion, mask = (*ids, 9), [1] * len(ids) + [0]
        if len(ids) < 2 or ids[0] % 2:
            (more,) = engine.generate([prompt.prompt + completion], max_completion_length=2)
            completion, mask = completion + more, mask + [1] * len(more)
        rollouts.append(Rollout(prompt.prompt, completion, mask, extra={"id": len(completion)}))
    return rollouts


def length_reward(completion: str, example: Any) -> float:
    return float(example.extra["id"] % 3)


def run_config(task: Path, out: Path, name: str = "two_turns", **changes: Any) -> Any:
    rollouts = {"num_prompts": 4, "num_generations": 4, "max_completion_length": 5}
    settings = {"reward": HERE + "length_reward", "method": "grpo", "eval": {}, **changes}
    return tiny_config(task, out, rollouts={**rollouts, "function": HERE + name}, **settings)


def test_a_run_is_resumed_exactly(task, tmp_path) -> None:
    """The number of calls of the engine depends on the samples."""
    train(run_config(task, tmp_path / "whole"))
    train(run_config(task, tmp_path / "parts", steps=2))
    train(run_config(task, tmp_path / "parts"))
    rows = metrics(tmp_path / "whole")
    assert len(rows) == 4
    assert any(row["grad_norm"] for row in rows)
    # without the comments
    assert all(r["sampled_tokens"] == round(16 * r["completions/mean_length"]) for r in rows)
    assert rows == metrics(tmp_path / "parts")


def whole_step(config) -> Any:
    trainer = Trainer(config)
    return {k: v for k, v in trainer._train_step().items() if "second" not in k}


@pytest.mark.dist
def test_ranks_call_the_engine_differently_often(task, tmp_path) -> None:
    """With sharded weights, every call needs all ranks."""
    parallel = {"mode": "fsdp", "gather_for_rollouts": False}
    first, second = ranks.run(
        whole_step, run_config(task, tmp_path / "run", parallel=parallel), ranks=2
    )
    assert repr(first) == repr(second)
    assert first["sampled_completions"] == 16


def returned(prompts, engine) -> Any:
    if isinstance(RETURNED, Exception):
        raise RETURNED
    return RETURNED


TOKENS = len(turns.make_tokenizer())
GOOD = Rollout([3, 4], [5, 6, 7], [1, 0, 1])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "returned a NoneType for 1 prompts: return a list with one Rollout"),
        ([GOOD, GOOD], "returned a list of 2 for 1 prompts"),
        ([(1, 2)], "rollout 0 is a tuple: return gac.rollouts.Rollout objects"),
        ([replace(GOOD, prompt_ids=[])], r"rollout 0 has prompt_ids=\(\): give at least one"),
        ([replace(GOOD, completion_ids="text")], "completion_ids='text': give a list of token"),
        (
            [replace(GOOD, completion_ids=[5, TOKENS, 6])],
            rf"_ids=\(5, {TOKENS}, 6\): {TOKENS} is not a token",
        ),
        ([replace(GOOD, prompt_ids=[3, -1])], "prompt_ids=.*-1 is not a token"),
        ([replace(GOOD, loss_mask=[1, 0])], r"loss_mask=\(1, 0\): give one number for each"),
        ([replace(GOOD, loss_mask=[1, 2, 0])], "loss_mask=.*use 0 and 1"),
        ([replace(GOOD, logps=["-", "-", "-"])], "logps=.*give a list of numbers"),
        ([replace(GOOD, logps=[-1.0])], r"logps=\(-1.0,\): give one number for each of the 3"),
        ([replace(GOOD, logps=[-1.0, 0.5, 2.0])], "logps=.*use log-probabilities"),
        ([replace(GOOD, reward=float("nan"))], "reward=nan: use a finite number, or None"),
        ([replace(GOOD, reward="1")], "reward='1': use a finite number, or None"),
        ([replace(GOOD, extra=3)], "extra=3: use a dict"),
        (ZeroDivisionError("no"), r"ZeroDivisionError: no \(.*test_function.py, line"),
    ],
)
def test_a_wrong_return_value_is_one_line(monkeypatch, value, message) -> None:
    monkeypatch.setitem(globals(), "RETURNED", value)
    engine = Engine(RolloutConfig(function=HERE + "returned"), turns.make_tokenizer())
    with pytest.raises(RunError, match=message) as error:
        engine.function(["prompt"], engine)
    assert "\n" not in str(error.value)
    assert "test_function:returned" in str(error.value)


def test_completions_are_cut_and_tensors_are_accepted(monkeypatch) -> None:
    ids = torch.tensor([5, 0, 60])  # the model has 61 tokens, more than the tokenizer
    rollout = Rollout(ids[:1], ids, torch.tensor([1, 0, 1]), logps=[torch.nan, torch.nan, -2.0])
    monkeypatch.setitem(globals(), "RETURNED", (rollout,))
    engine = Engine(RolloutConfig(max_completion_length=2), turns.make_tokenizer())
    engine.load(make("qwen2"))
    (cut,) = RolloutFunction(HERE + "returned")(["prompt"], engine)
    assert (cut.prompt_ids, cut.completion_ids, cut.loss_mask) == ((5,), (5, 0), (True, False))
    assert str(cut.logps) == "(nan, nan)"
    assert is_truncated(cut, {1}, 2)
    assert not is_truncated(cut, {1}, 3)
    assert is_truncated(replace(cut, loss_mask=(True, False, True)), {1}, 3)


def test_a_function_cannot_continue_demonstrations(task, tmp_path) -> None:
    with pytest.raises(ConfigError, match="rollouts.function='.*method 'uft' continue a demonstr"):
        run_config(task, tmp_path, method="uft")
    with pytest.raises(ConfigError, match="rollouts.function .*has no 'nothing'"):
        Trainer(run_config(task, tmp_path / "run", "nothing"))
