"""One, two and four processes compute the same losses, gradients, signals and weights."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from torch.distributed.tensor import DTensor

from gac.data.rows import Row
from gac.methods import Mix
from gac.rollouts import engines
from gac.training.trainer import Trainer

from . import ranks
from .tiny import digit_reward, tiny_config

pytestmark = pytest.mark.dist
STEPS = 5


def fixed_responses(model, tokenizer, prompts, *, samples, **_):
    """Fake generation: 1 to 6 tokens that depend only on the prompt, because real sampling depends
    on the number of ranks.
    """
    found = []
    for prompt in prompts:
        for i in range(samples):
            rng = random.Random(f"{prompt}/{i}")
            found.append(tuple(rng.randrange(3, 18) for _ in range(rng.randint(1, 6))))
    return found


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def five_steps(config, steps=STEPS):
    """Train; return each step's metrics, the first step's gradients, the final weights and the
    number of elements on this rank.
    """
    engines.generate = fixed_responses  # runs in its own process
    trainer = Trainer(config)
    grads: list[dict[str, torch.Tensor]] = []

    def record(*_):
        named = trainer.model.named_parameters()
        grads.append(
            {n.removeprefix("module."): whole(p.grad) for n, p in named if p.requires_grad}
        )

    trainer.optimizer.register_step_pre_hook(record)
    rows = []
    for _ in range(steps):
        rows.append(trainer._train_step())
        trainer.step += 1
    named = {n.removeprefix("module."): p for n, p in trainer.model.named_parameters()}
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in named.values())
    return rows, grads[0], {n: whole(p) for n, p in named.items()}, held


def config(task, out, **changes):
    return tiny_config(
        task,
        out,
        **{
            "loss": {"kl_coef": 0.1, "entropy_coef": 0.01},
            "method": {"name": "gac", "update_every": 1},
            # where a gradient is 0, AdamW would normalize rounding noise to full-size updates; eps
            # prevents that
            "optim": {"lr": 1e-2, "warmup": 1, "clip": 0.5, "eps": 1e-4},
            **changes,
        },
    )


@pytest.fixture(scope="module")
def alone(task, tmp_path_factory):
    """Single-process results, cached by configuration."""
    found: dict[str, object] = {}

    def get(**changes):
        key = repr(sorted(changes.items()))
        if key not in found:
            made = config(task, tmp_path_factory.mktemp("alone"), **changes)
            found[key] = ranks.run(five_steps, made, ranks=1)[0]
        return found[key]

    return get


def assert_same(one, many):
    for a, b in zip(one[0], many[0], strict=True):
        assert a["skipped"] == b["skipped"] == 0 and a["tokens"] == b["tokens"]
        for key, value in a.items():
            if key in ("sampling_seconds", "responses_per_second"):  # wall-clock time
                continue
            if value is not None:
                value = pytest.approx(value, rel=2e-4, abs=2e-6, nan_ok=True)
            assert b[key] == value, key
    for which, rtol in ((1, 1e-4), (2, 1e-4)):
        assert one[which].keys() == many[which].keys() and one[which]
        for name, x in one[which].items():
            torch.testing.assert_close(many[which][name], x, rtol=rtol, atol=3e-6, msg=name)


FSDP = {"mode": "fsdp"}


@pytest.mark.parametrize(
    ("count", "parallel", "micro_batch"),
    [
        pytest.param(2, {}, None, id="ddp-2"),
        pytest.param(4, {}, 3, id="ddp-4-accumulated"),
        pytest.param(2, FSDP, None, id="fsdp-2"),
        pytest.param(4, FSDP, None, id="fsdp-4"),
        pytest.param(2, FSDP, 3, id="fsdp-2-accumulated"),
        pytest.param(2, {**FSDP, "defer_reduce": True}, 3, id="fsdp-2-deferred"),
        pytest.param(4, {**FSDP, "replicas": 2}, None, id="hsdp-2x2"),
    ],
)
def test_any_number_of_processes_computes_the_same(
    task, tmp_path, alone, count, parallel, micro_batch
):
    made = config(task, tmp_path, parallel=parallel, micro_batch=micro_batch)
    many = ranks.run(five_steps, made, ranks=count)
    for rank in many:
        assert_same(alone(), rank)
    total, held = alone()[3], [rank[3] for rank in many]
    shards = count // parallel.get("replicas", 1) if parallel else 1
    assert sum(held) == total * count / shards  # the model is really sharded, without duplicates
    assert max(held) <= 0.6 * total or not parallel


def untied(task, folder):
    """The same model with an untied LM head."""
    shutil.copytree(task, folder)
    path = folder / "init" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))
    return folder


def half_constant(completion, example):
    """Every second prompt has a constant reward, so its rows get a forward pass but no backward
    pass.
    """
    return 1.0 if int(example.id) % 2 else digit_reward(completion, example)


@pytest.mark.parametrize(
    ("parallel", "changes"),
    [
        pytest.param(FSDP, {"untied": True}, id="fsdp-untied-head"),
        pytest.param(FSDP, {"lora": {"rank": 4}}, id="fsdp-adapters"),
        pytest.param({}, {"lora": {"rank": 4}}, id="ddp-adapters"),
        pytest.param(FSDP, {"gradient_checkpointing": True}, id="fsdp-recomputed-layers"),
        pytest.param(FSDP, {"reuse": 2}, id="fsdp-reused-rollouts"),
        pytest.param(FSDP, {"method": "pcgrad"}, id="fsdp-gram"),
        pytest.param(
            FSDP, {"method": "pcgrad", "silent": True}, id="fsdp-gram-and-zero-gradient-rows"
        ),
        pytest.param({}, {"method": "cagrad"}, id="ddp-gram"),
        pytest.param({**FSDP, "replicas": 2}, {"method": "mgda"}, id="hsdp-gram"),
        pytest.param(FSDP, {"method": "moco"}, id="fsdp-tracked-gradients"),
        pytest.param(FSDP, {"method": "famo"}, id="fsdp-loss-after-the-update"),
    ],
)
def test_any_kind_of_training_computes_the_same(task, tmp_path, parallel, changes):
    changes = dict(changes)
    folder = untied(task, tmp_path / "task") if changes.pop("untied", None) else task
    if changes.get("lora"):
        pytest.importorskip("peft", reason="needs the extra `lora`")
    rollouts = {"prompts": 4, "completions": 4, "max_new_tokens": 5, "reuse": 1}
    rollouts["reuse"] = changes.pop("reuse", 1)
    made = {"rollouts": rollouts}
    if changes.pop("silent", False):
        made |= {"reward": "tests.test_distributed:half_constant", "loss": {}}
    if "method" in changes:
        made["method"] = {"name": changes.pop("method")}
    made["model"] = {"path": str(folder / "init"), "random_init": True, **changes}
    one = ranks.run(five_steps, config(folder, tmp_path / "one", **made), ranks=1)[0]
    count = 2 * parallel.get("replicas", 1)
    spread = config(folder, tmp_path / "many", parallel=parallel, **made)
    for rank in ranks.run(five_steps, spread, ranks=count):
        assert_same(one, rank)


def test_bfloat16_arithmetic_stays_close(task, tmp_path, alone):
    made = config(task, tmp_path, parallel=FSDP, mixed_precision="bf16")
    rows, grads, _, _ = ranks.run(five_steps, made, 1, ranks=2)[0]
    assert rows[0]["demo_loss"] == pytest.approx(alone()[0][0]["demo_loss"], rel=0.03)
    for name, exact in alone()[1].items():
        assert grads[name].dtype == torch.float32  # reduced in float32 into float32 shards
        error = (grads[name] - exact).norm() / exact.norm()
        assert 0 < error < 0.05, name


def shares(config, spread):
    """Signals, losses and gradients for rows distributed unevenly; spread[i] is the rank of row i."""
    engines.generate = fixed_responses
    trainer = Trainer(config)
    rank, count = trainer.accelerator.process_index, trainer.accelerator.num_processes
    examples = trainer.feed.prompts
    rows = []
    for i in range(len(spread)):
        ids = examples[i].prompt + fixed_responses(None, None, [examples[i].prompt], samples=1)[0]
        advantage = 0.0 if i % 2 else (-1.0) ** (i // 2) * (1 + i)
        rows.append(Row(ids, len(examples[i].prompt), i % 2 == 1, advantage))
    mine = [row for row, owner in zip(rows, spread, strict=True) if owner % count == rank]
    step = trainer._assemble(mine, Mix(0.4))
    assert step.needs.kl
    found = trainer.gradients(step)
    named = trainer.model.named_parameters()
    grads = {n.removeprefix("module."): whole(p.grad) for n, p in named}
    return found.moments.signals(), found.losses, grads


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "spread",
    [
        pytest.param([0] * 8, id="a-rank-without-rows"),
        pytest.param([0, 1] * 4, id="rollouts-and-demonstrations-on-different-ranks"),
        pytest.param([1, 0, 0, 0, 1, 0, 0, 0], id="a-rank-without-demonstrations"),
        pytest.param([0, 0, 0, 0, 0, 0, 0, 1], id="seven-rows-and-one"),
    ],
)
def test_uneven_ranks_compute_the_same(task, tmp_path, mode, spread):
    made = {"micro_batch": 2, "rollouts": {"prompts": 4, "completions": 4, "max_new_tokens": 6}}
    one = ranks.run(shares, config(task, tmp_path / "one", **made), spread, ranks=1)[0]
    made["parallel"] = {"mode": mode}
    for rank in ranks.run(shares, config(task, tmp_path / "two", **made), spread, ranks=2):
        assert rank[0] == pytest.approx(one[0], rel=1e-5)
        assert rank[1] == pytest.approx(one[1], rel=1e-5)
        for name, x in one[2].items():
            torch.testing.assert_close(rank[2][name], x, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_checkpoint_loads_on_another_number_of_processes(task, tmp_path, alone, before, after):
    made = config(task, tmp_path, parallel={**FSDP, "resize": True})
    ranks.run(save_at, made, 3, ranks=before)
    for rank in ranks.run(go_on, made, ranks=after):
        names = ("mu", "demo_loss", "rollout_loss", "grad_norm", "sft_variance")
        for a, b in zip(alone()[0][3:], rank[0], strict=True):
            assert [b[n] for n in names] == pytest.approx([a[n] for n in names], rel=2e-4)
        for name, x in alone()[2].items():
            torch.testing.assert_close(rank[1][name], x, rtol=1e-4, atol=3e-6, msg=name)


def save_at(config, steps):
    engines.generate = fixed_responses
    trainer = Trainer(config)
    for _ in range(steps):
        trainer._train_step()
        trainer.step += 1
    trainer._save()


def go_on(config):
    engines.generate = fixed_responses
    trainer = Trainer(config)
    rows = []
    while trainer.step < STEPS:
        rows.append(trainer._train_step())
        trainer.step += 1
    return rows, {n: whole(p) for n, p in trainer.model.named_parameters()}
