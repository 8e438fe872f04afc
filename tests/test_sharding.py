"""FSDP2 under the fused loss: the head is gathered once, stale weights are never used, and sampling
matches one process.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gac.config import ConfigError
from gac.methods import Mix
from gac.parallel import setup
from gac.parallel.setup import ParallelConfig, make_accelerator
from gac.rollouts import engines
from gac.rollouts.generation import generate
from gac.training import gradients
from gac.training.trainer import Trainer, train

from . import ranks
from .test_distributed import FSDP, config, fixed_responses, whole
from .tiny import tiny_config

pytestmark = pytest.mark.dist


class Traffic(TorchDispatchMode):
    """Counts the elements of each kind of collective, measured on its unsharded tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [x for x in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(x)]
            kind = func._schema.name.removeprefix("c10d::").strip("_").removesuffix("_base")
            self.elements.setdefault(kind, []).append(max((x.numel() for x in tensors), default=0))
        return func(*args, **(kwargs or {}))


def traffic(made):
    """Collectives issued while computing the gradient of a batch of demonstrations, and the sizes
    of the model's FSDP units.
    """
    trainer = Trainer(made)
    step = trainer._assemble(trainer.feed.demo_rows(0), Mix(1.0))
    trainer.gradients(step)  # the first call installs hooks
    trainer.optimizer.zero_grad()
    setup.reshard(trainer.model)
    with Traffic() as found:
        trainer.gradients(step)
    layers = [sum(p.numel() for p in m.parameters()) for m in trainer.model.model.layers]
    total = sum(p.numel() for p in trainer.model.parameters())
    return found.elements, layers, total - sum(layers)


@pytest.mark.parametrize("defer", [False, True])
def test_head_is_gathered_once_per_micro_batch(task, tmp_path, defer):
    made = config(
        task,
        tmp_path,
        loss={},
        method={"name": "sft"},
        demo_batch=12,
        micro_batch=3,
        parallel={**FSDP, "defer_reduce": defer},
    )
    (elements, layers, root), _ = ranks.run(traffic, made, ranks=2)
    padded = lambda n: n == pytest.approx(root, rel=0.02)  # noqa: E731 - to whole rows per rank
    gathers, reductions = elements["allgather"], elements["reduce_scatter"]
    large = [n for n in gathers if n > 100]  # the small ones agree on the number of micro-batches
    assert sum(map(padded, large)) == 2  # embedding, norm and head: one gather per micro-batch
    # each layer: gathered for the forward and again for the backward
    assert sum(large) == pytest.approx(2 * (root + 2 * sum(layers)), rel=0.02)
    assert sum(reductions) == pytest.approx((1 if defer else 2) * (root + sum(layers)), rel=0.02)


def losses(made, reshard):
    """Demonstration losses before and after two updates, with a forward pass between each backward
    and its update.
    """
    engines.generate = fixed_responses
    trainer = Trainer(made)
    if not reshard:
        setup.reshard = gradients.reshard = lambda model: None
    rows = trainer.feed.demo_rows(0)
    found = []
    for _ in range(3):
        step = trainer._assemble(rows, Mix(1.0))
        measured = trainer.gradients(step)
        found.append(measured.losses.demo)
        trainer.gradients.row_logprobs(
            rows
        )  # without resharding, this would leave the root unit gathered
        trainer._apply(step, measured)
        trainer.step += 1
    return found


def test_no_forward_uses_weights_from_before_the_update(task, tmp_path):
    made = config(task, tmp_path, loss={}, method={"name": "sft"})
    sharded = dataclasses.replace(made, parallel=ParallelConfig(mode="fsdp"))
    (alone,) = ranks.run(losses, made, True, ranks=1)
    for found in ranks.run(losses, sharded, True, ranks=2):
        assert found == pytest.approx(alone, rel=1e-5)
    stale = ranks.run(losses, sharded, False, ranks=2)[0]
    assert stale[0] == pytest.approx(alone[0], rel=1e-5)
    assert stale[1] != pytest.approx(alone[1], rel=1e-3)  # the error that resharding prevents


def greedy(made, prompts):
    """Greedy responses to this rank's share of the prompts."""
    trainer = Trainer(made)
    rank, count = trainer.accelerator.process_index, trainer.accelerator.num_processes
    mine = [e.prompt for e in trainer.feed.prompts][:prompts][rank::count]
    with setup.gathered(trainer.model, made.parallel):
        return generate(
            trainer.accelerator.unwrap_model(trainer.model),
            trainer.tokenizer,
            mine,
            max_new_tokens=4 if rank else 12,
            temperature=0,
            batch=1,
        )


@pytest.mark.parametrize("gather", [True, False])
def test_ranks_sample_what_one_process_samples(task, tmp_path, gather):
    """Responses differ in length, and the ranks have 3 and 2 prompts; no rank may hang."""
    alone = ranks.run(greedy, config(task, tmp_path), 5, ranks=1)[0]
    made = config(task, tmp_path, parallel={**FSDP, "gather_for_rollouts": gather})
    first, second = ranks.run(greedy, made, 5, ranks=2)
    assert (len(first), len(second)) == (3, 2)
    assert first == alone[0::2]
    assert second == [a[:4] for a in alone[1::2]]


def test_sharded_run_goes_through_the_whole_life_of_a_run(task, tmp_path):
    """Rollouts, evaluation with a prompt count that is not divisible by 3, checkpoints and export."""
    made = tiny_config(
        task,
        tmp_path,
        steps=3,
        export=True,
        demo_batch=6,
        parallel={**FSDP, "resize": True},
        rollouts={"prompts": 3, "completions": 4, "max_new_tokens": 5},
        eval={"data": {"prompts": str(task / "eval.jsonl")}, "max_new_tokens": 5, "every": 2},
    )
    ranks.run(train, made, ranks=3)
    trained = ranks.run(weights, made, ranks=1)[0]
    from transformers import AutoModelForCausalLM

    plain = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    assert all(torch.equal(plain[name], x) for name, x in trained.items())


def weights(made):
    return {n: whole(p) for n, p in Trainer(made).model.named_parameters()}


def test_accelerates_own_flag_is_refused(monkeypatch):
    """Otherwise it would be silently ignored on CPUs."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="parallel.mode=fsdp shards the model"):
        make_accelerator(ParallelConfig(), "no", (), ".")


def test_replicas_must_divide_the_ranks(task, tmp_path):
    made = config(task, tmp_path, parallel={**FSDP, "replicas": 2})
    for message in ranks.errors(Trainer, made, ranks=3):
        assert "parallel.replicas=2: use a divisor of 3 ranks" in message


def test_indivisible_batches_name_the_key(task, tmp_path):
    for message in ranks.errors(Trainer, config(task, tmp_path, demo_batch=3), ranks=2):
        assert "demo_batch=3: use a multiple of the 2 processes" in message


def prepare_without_layers():
    accelerator, sharded = make_accelerator(ParallelConfig(), "no", (), "."), ParallelConfig("fsdp")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    arrival = setup.arriving(accelerator, sharded)
    return setup.prepare(model, accelerator, sharded, "no", arrival)


def test_unknown_layers_are_refused():
    for message in ranks.errors(prepare_without_layers, ranks=2):
        assert "Sequential could not be sharded" in message
