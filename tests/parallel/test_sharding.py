"""FSDP2 with the fused loss: no stale weights, the same samples."""

import dataclasses

import pytest
import torch
from torch.distributed.tensor import DTensor

from gac.methods import Mix
from gac.parallel import sharding
from gac.parallel.config import ParallelConfig
from gac.rollouts import engines, generation
from gac.rollouts.generation import generate
from gac.training import gradients
from gac.training.trainer import Trainer, train
from tests import ranks
from tests.parallel.test_distributed import FSDP, config, fixed_responses, resume
from tests.tiny import tiny_config

pytestmark = pytest.mark.dist


def losses(run_config, reshard):
    """Demonstration losses before and after two updates; a forward runs between each backward and
    its update.
    """
    engines.generate = fixed_responses
    trainer = Trainer(run_config)
    if not reshard:
        sharding.reshard = gradients.reshard = lambda model: None
    rows, forward = trainer.feed.demo_rows(0), trainer.gradients.forward
    ((_, batch, _, _),) = forward.batches(rows)
    demo_losses = []
    for trainer.step in range(2):
        step = trainer._assemble(rows, Mix(1.0))
        measured = trainer.gradients(step)
        demo_losses.append(measured.losses.demo)
        with torch.no_grad():  # without resharding, this leaves the root unit gathered
            forward._logprobs(trainer.model, batch)
        trainer._apply(step, measured)
        demo_losses.append(trainer.gradients.losses(step).demo)
    return demo_losses


def test_no_forward_uses_weights_from_before_the_update(task, tmp_path):
    run_config = config(task, tmp_path, loss={}, method={"name": "sft"})
    sharded = dataclasses.replace(run_config, parallel=ParallelConfig(mode="fsdp"))
    (single_process,) = ranks.run(losses, run_config, True, ranks=1)
    cases = {"resharded": (losses, sharded, True), "stale": (losses, sharded, False)}
    for rank in ranks.run(ranks.each, cases, ranks=2):
        assert rank["resharded"] == pytest.approx(single_process, rel=1e-5)
        stale = rank["stale"]
    assert stale[0] == pytest.approx(single_process[0], rel=1e-5)
    # the error that resharding prevents
    assert stale[1] != pytest.approx(single_process[1], rel=1e-3)


def greedy(run_config, prompts):
    """Greedy responses to this rank's prompts, one per prompt."""
    generation.SHRINK_AFTER = 1
    trainer = Trainer(run_config)
    for p in trainer.model.parameters():
        p.data.mul_(3)
    rank, count = trainer.accelerator.process_index, trainer.accelerator.num_processes
    own_prompts = [e.prompt for e in trainer.feed.prompts][:prompts][rank::count]
    before, gather = sharded(trainer.model), run_config.parallel.gather_for_rollouts
    with sharding.gathered(trainer.model, gather):
        assert sharded(trainer.model) == (before and not gather)
        responses = generate(
            trainer.accelerator.unwrap_model(trainer.model),
            trainer.tokenizer,
            own_prompts,
            max_completion_length=4 if rank else 12,
            temperature=0,
            batch=2,
            stop="0123456789",
        )
    assert sharded(trainer.model) == before
    return responses


def sharded(model):
    """Whether every weight is in shards, so that ranks may not forward independently."""
    in_shards = all(isinstance(p, DTensor) for p in model.parameters())
    assert sharding.in_lockstep(model) == in_shards
    return in_shards


def test_ranks_sample_the_responses_of_one_process(task, tmp_path):
    """Responses differ in length, and the ranks have 3 and 2 prompts; no rank may hang."""
    single_process = ranks.run(greedy, config(task, tmp_path), 5, ranks=1)[0]
    parallel = {g: {**FSDP, "gather_for_rollouts": g} for g in (True, False)}
    cases = {
        f"gather={g}": (greedy, config(task, tmp_path, parallel=parallel[g]), 5) for g in parallel
    }
    first, second = ranks.run(ranks.each, cases, ranks=2)
    assert len(single_process) == 5
    assert first == dict.fromkeys(cases, single_process[0::2])
    assert second == {key: [a[:4] for a in single_process[1::2]] for key in cases}


def test_sharded_run_end_to_end(task, tmp_path):
    """Rollouts, evaluation of a number of prompts that 3 does not divide, checkpoints, export."""
    run_config = tiny_config(
        task,
        tmp_path,
        steps=3,
        export=True,
        demo_batch_size=6,
        parallel={**FSDP, "allow_world_size_change": True},
        rollouts={"num_prompts": 3, "num_generations": 4, "max_completion_length": 5},
        eval={
            "data": {"prompts": str(task / "eval.jsonl")},
            "max_completion_length": 5,
            "every": 2,
        },
    )
    ranks.run(train, run_config, ranks=3)
    _, trained = ranks.run(resume, run_config, ranks=1)[0]  # after the last step
    from transformers import AutoModelForCausalLM

    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    assert all(torch.equal(exported[name], x) for name, x in trained.items())
