"""One process, two and four compute the same: losses, gradients, signals, weights."""

from __future__ import annotations

import random

import pytest
import torch
from torch.distributed.tensor import DTensor

from gac import experience
from gac.trainer import Trainer

from . import ranks
from .tiny import tiny_config, write_tiny

pytestmark = pytest.mark.dist
STEPS = 5


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def fixed_responses(model, tokenizer, prompts, *, samples, **_):
    """Of 1 to 6 tokens, drawn from the prompt alone: sampling depends on the number of ranks."""
    found = []
    for prompt in prompts:
        for i in range(samples):
            rng = random.Random(f"{prompt}/{i}")
            found.append(tuple(rng.randrange(3, 18) for _ in range(rng.randint(1, 6))))
    return found


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def five_steps(config, steps=STEPS):
    """Metrics of each step, gradients of the first, weights after the last, elements held here."""
    experience.generate = fixed_responses  # in a process of its own
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
    return tiny_config(task, out, **{
        "loss": {"kl_coef": 0.1, "entropy_coef": 0.01},
        "method": {"name": "gac", "update_every": 1},
        # AdamW divides rounding noise by itself where a gradient is 0; eps keeps that out
        "optim": {"lr": 1e-2, "warmup": 1, "clip": 0.5, "eps": 1e-4},
        **changes,
    })  # fmt: skip


@pytest.fixture(scope="module")
def alone(task, tmp_path_factory):
    """What one process finds, by configuration."""
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
            assert b[key] == pytest.approx(value, rel=2e-4, abs=2e-6), key
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
    assert sum(held) == total * count / shards  # it is really sharded, and nothing is held twice
    assert max(held) <= 0.6 * total or not parallel
