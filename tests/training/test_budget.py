"""The default micro-batches: packed rows, sized from the free memory, the same on resume."""

import dataclasses
import logging
import math
import shutil
from types import SimpleNamespace

import pytest
import torch

from gac.config import load
from gac.data.micro_batches import MicroBatches
from gac.faults import checkpoint
from gac.models import row_attention
from gac.train_config import TrainConfig
from gac.training import policy as budget
from gac.training.gradients import Forward
from gac.training.startup import find_checkpoint
from gac.training.trainer import Trainer, train
from tests import ranks
from tests.tiny import metrics, tiny_config
from tests.training.test_packing import make


def default_config(task, out, **changes):
    return tiny_config(task, out, micro_batch_size=None, eval={}, **changes)


def test_default_packs_rows(task, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # processes that share the memory
    with caplog.at_level(logging.INFO):
        packed = Trainer(default_config(task, tmp_path / "packed", method="gac"))
    assert packed.gradients.forward.micro.packed
    assert packed.config.max_tokens_per_micro_batch == 2048
    assert not packed.gradients.tracked  # moving averages, which this method does not use
    free = budget.free_memory(packed.accelerator.device)
    assert free <= budget.psutil.virtual_memory().total / 4
    for line in ("max_tokens_per_micro_batch=2048 (the maximum)", "micro-batches: packed rows"):
        assert caplog.text.count(line) == 1


def test_resumed_run_keeps_its_budget(task, tmp_path, monkeypatch):
    """A run is resumed bit for bit, although the free memory has changed."""
    memory = {"bytes": 6e5}
    monkeypatch.setattr(budget, "free_memory", lambda device: memory["bytes"])
    whole = train(default_config(task, tmp_path / "whole"))
    config = default_config(task, tmp_path / "resumed")
    out = train(dataclasses.replace(config, steps=2))
    memory["bytes"] = 1e12
    resumed = Trainer(config)
    assert (
        resumed.config.max_tokens_per_micro_batch == 64
    )  # 0.5 (6e5 - 3 weights) / 3e3 bytes per token
    resumed.run()
    assert metrics(out) == metrics(whole)
    shutil.copytree(out, tmp_path / "new", ignore=lambda *_: ["checkpoints"])
    for folder, advice in (("resumed", ", or resume it"), ("new", "")):
        used = dataclasses.replace(config, out=str(tmp_path / folder))
        with pytest.raises(ValueError, match=f"holds a run: choose another directory{advice}$"):
            find_checkpoint(used, resume=False)
    assert find_checkpoint(used, resume=True)[1] is None  # only the logs of its first steps
    for explicit in ({"micro_batch_size": 3}, {"max_tokens_per_micro_batch": 96}):
        changed = dataclasses.replace(config, **explicit)
        assert find_checkpoint(changed, True) == (
            changed,
            checkpoint.newest_checkpoint(out / "checkpoints"),
        )


def test_rows_that_exceed_a_small_budget_are_trained_alone(task, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(budget, "free_memory", lambda device: 0)
    trainer = Trainer(default_config(task, tmp_path / "run", method="dpo"))
    assert trainer.feed.unit == 2
    assert trainer.config.max_tokens_per_micro_batch == 1
    assert (
        f"max_tokens_per_micro_batch=1: rows may have up to {trainer.feed.longest_row(5)} tokens"
        in caplog.text
    )
    trainer._train_step()


@pytest.mark.parametrize(("kind", "most"), [("cpu", 2048), ("cuda", 16384), ("xpu", 16384)])
def test_the_budget_by_hand(task, tmp_path, monkeypatch, caplog, kind, most):
    """Half of the free memory, less 3 times that of 8 trained weights, at 10 bytes per token."""
    caplog.set_level(logging.INFO, "gac")
    lengths, config = [], default_config(task, tmp_path)
    monkeypatch.setattr(budget, "activation_bytes", lambda _, length: lengths.append(length) or 10)
    device = SimpleNamespace(device=torch.device(kind), unwrap_model=lambda model: model)
    model = torch.nn.ParameterList([torch.zeros(8), torch.zeros(99)])
    model[1].requires_grad_(False)
    for free, longest, tokens, reason in (
        (0, 1, 1, "0 GB are free"),
        (3 * 4 * 8 + 2 * 10 * 64, 64, 64, "1.3e-06 GB are free"),
        (3 * 4 * 8 + 2 * 10 * 64 - 1, 99, 32, "1.3e-06 GB are free"),
        (1e9, 65, most, "the maximum"),
    ):
        monkeypatch.setattr(budget, "free_memory", lambda _, free=free: free)
        chosen = budget.choose_micro_batches(config, device, model, longest)
        assert chosen == dataclasses.replace(config, max_tokens_per_micro_batch=tokens)
        assert f"max_tokens_per_micro_batch={tokens} ({reason})" in caplog.messages
        assert budget.choose_micro_batches(chosen, device, model, tokens) == chosen
    assert lengths == [1, 64, 64, 64]  # each is measured once
    (message,) = [text for text in caplog.messages if "a longer row is" in text]
    assert message.startswith("max_tokens_per_micro_batch=32: rows may have up to 99 tokens; ")


def test_the_free_memory_of_a_gpu(monkeypatch):
    """What the driver would give, and what PyTorch keeps but does not use."""
    for name, value in (("mem_get_info", (7, 99)), ("memory_reserved", 5), ("memory_allocated", 3)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert budget.free_memory(torch.device("cuda")) == 9


@pytest.mark.parametrize(("kind", "attention"), [("mamba", None), ("qwen3", "eager")])
def test_models_that_do_not_gain_from_packing_are_padded(kind, attention, caplog):
    """A recurrent model's rows affect each other; eager attention is quadratic in all tokens."""
    model = make(kind, attention)
    with caplog.at_level(logging.INFO, "gac"):
        assert budget._micro_batches(
            load(TrainConfig, {"max_tokens_per_micro_batch": 64}), model
        ) == MicroBatches(tokens=64, packed=False)
    (message,) = [r.getMessage() for r in caplog.records if r.name.startswith("gac")]
    assert message == "micro-batches: padded rows"


def test_reference_that_cannot_be_packed_is_padded_too(caplog):
    policy, reference = make("qwen3"), make("qwen3", "eager")
    config = load(TrainConfig, {"max_tokens_per_micro_batch": 64})
    assert row_attention.enable_row_attention(policy)
    assert budget._micro_batches(config, policy).packed
    assert not budget._micro_batches(config, policy, reference).packed
    changes = {"packing": False}, {"packing": True}, {"max_tokens_per_micro_batch": None}
    never, forced, rows = (dataclasses.replace(config, **change) for change in changes)
    assert not any(budget._micro_batches(own, policy).packed for own in (never, rows))
    assert budget._micro_batches(forced, policy, reference).packed
    assert not caplog.messages


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),  # on-policy: the ratio is 1, so no forward is needed but that of the gradient
        ({"rollouts": {"num_iterations": 2}}, ["row_logprobs in step 0, log-probs"]),
        (
            {"loss": {"kl_coef": 0.1}},
            [f"reference_logprobs in step {i}, gradients" for i in (0, 1)],
        ),
        # in the first step only: rows with and without a gradient
        ({"monitor_kl_every": 2}, 2 * ["reference_logprobs in step 0, gradients"]),
    ],
)
def test_logps_are_computed_only_where_they_are_used(
    two_layers, tmp_path, monkeypatch, changes, expected
):
    """In two GRPO steps, the old and the reference log-probs."""
    calls = []
    for name in ("row_logprobs", "reference_logprobs"):
        original = getattr(Forward, name)

        def recorded(self, *args, name=name, original=original):
            calls.append(f"{name} in {trainer.heartbeat.activity}")
            return original(self, *args)

        monkeypatch.setattr(Forward, name, recorded)
    rollouts = {
        "num_prompts": 4,
        "num_generations": 4,
        "max_completion_length": 5,
        **changes.get("rollouts", {}),
    }
    changes = changes | {"rollouts": rollouts, "method": "grpo", "eval": {}, "steps": 2}
    changes["seed"] = 2  # a group with equal rewards, so some rows have no gradient
    trainer = Trainer(tiny_config(two_layers, tmp_path, **changes))
    trainer.run()
    assert calls == expected
    assert not row_attention.attends_by_row(trainer.policy)
    assert (trainer.reference is not None) == ("reference_logprobs" in str(expected))


@pytest.mark.parametrize("layers", [1, 3])
def test_bytes_per_token_are_measured(layers):
    """At least the inputs of every layer's seven matrices; not the weights; linear in the rows."""
    model = make("qwen3", num_hidden_layers=layers, hidden_size=64, intermediate_size=256)
    measured = budget.activation_bytes(model, 16)
    inputs = 4 * layers * (6 * 64 + 256)
    assert 2 * inputs < measured < 6 * inputs
    assert math.isclose(measured, budget.activation_bytes(model, 64), rel_tol=0.1)
    assert budget.activation_bytes(model.requires_grad_(False), 16) == 1


def choose(task, out, rank_memory: dict[int, float]):
    from gac import collectives

    budget.free_memory = lambda device: rank_memory[collectives.rank()]
    trainer = Trainer(default_config(task, out, parallel={"mode": "fsdp"}, steps=2))
    trainer.run()
    return trainer.config.max_tokens_per_micro_batch, trainer.feed.balances


@pytest.mark.dist
def test_ranks_choose_the_same_budget(task, tmp_path):
    assert ranks.run(choose, task, tmp_path / "run", {0: 1e12, 1: 6e5}, ranks=2) == [(64, True)] * 2
