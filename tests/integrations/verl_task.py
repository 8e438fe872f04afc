"""Run one rank of a verl actor on a CPU: FSDP2, with verl's own engine and configuration."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from examples import verl_cpu
from tests.integrations.recording import full_weights, message_of, record_full_gradients

TEMPERATURE = 0.7


def rollouts(size: int = 8, vocabulary: int = 18) -> list[dict[str, Any]]:
    """Random prompts and responses of different lengths, with advantages."""
    generator = torch.Generator().manual_seed(11)
    rows = []
    for i in range(size):
        prompt, response = (
            torch.randint(3, vocabulary, (int(n),), generator=generator)
            for n in torch.randint(2, 7, (2,), generator=generator)
        )
        mask = torch.ones(len(response), dtype=torch.int64)
        mask[1] = i % 3 != 0  # a token written by a tool
        rows.append(
            {
                "prompt": prompt,
                "response": response,
                "mask": mask,
                "advantage": torch.randn((), generator=generator).expand(len(response)).clone(),
                "old": -torch.rand(len(response), generator=generator) * 0.1 - 2.8,
                "ref": -torch.rand(len(response), generator=generator) * 0.1 - 2.8,
            }
        )
    return rows


def actor(model: str, *overrides: str) -> Any:
    """Build the worker from verl's own configuration."""
    return verl_cpu.actor(
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.optim.clip_grad=1e9",
        "actor_rollout_ref.actor.use_kl_loss=true",
        *overrides,
    )


def gac_overrides(demos: str, *overrides: str) -> list[str]:
    """The configuration overrides that a user adds to a verl command."""
    loss = "actor_rollout_ref.actor.policy_loss"
    return [
        f"{loss}._target_=gac.integrations.verl.GACPolicyLoss",
        f"+{loss}.demo_path={demos}",
        f"+{loss}.demo_batch=5",
        *overrides,
    ]


def run(worker: Any, rows: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Run optimizer steps over the same rollouts; return the gac metrics of each step."""
    logs = []
    for _ in range(steps):
        data = verl_cpu.batch(rows, TEMPERATURE, global_batch_size=8, mini_batch_size=8, epochs=1)
        metrics = verl_cpu.step(worker, data)
        logs.append({k: v for k, v in metrics.items() if k.startswith("gac/")})
    return logs


def resumed(model: str, demos: str, out: str, *overrides: str) -> dict[str, Any]:
    """Four steps with a checkpoint after two, then the last two again from that checkpoint."""
    options = gac_overrides(demos, *overrides)
    trainer = actor(model, *options)
    gradients, mixer = record_full_gradients(trainer), trainer.mixture.mixer
    draw, drawn_demos = mixer.draw, []
    mixer.draw = lambda: drawn_demos.append(draw()) or drawn_demos[-1]
    rows = rollouts()[dist.get_rank() :: dist.get_world_size()]
    saved = str(Path(out) / "checkpoint")
    logs = run(trainer, rows, 2)
    trainer.save_checkpoint(saved)
    logs += run(trainer, rows, 2)
    resumed_actor = actor(model, *options)
    resumed_actor.load_checkpoint(saved)
    repeated = run(resumed_actor, rows, 2)
    dist.barrier()
    (Path(saved) / "gac.json").unlink(missing_ok=True)
    dist.barrier()
    return {
        "gradient": gradients[0],
        "drawn_demos": drawn_demos,
        "logs": logs,
        "repeated": repeated,
        "weights": full_weights(trainer),
        "resumed": full_weights(resumed_actor),
        "error_message": message_of(FileNotFoundError, resumed_actor.load_checkpoint, saved),
    }


def gradients_per_loss_mode(model: str, demos: str, out: str, *names: str) -> dict[str, Any]:
    """The gradient of one step for each of verl's losses, unmixed and mixed at mu = 0.3."""
    result = {}
    for name in names:
        mode = f"actor_rollout_ref.actor.policy_loss.loss_mode={name}"
        micro = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
        constant = "+actor_rollout_ref.actor.policy_loss.method={name:constant,mu:0.3}"
        pair = []
        for options in ([mode, micro], gac_overrides(demos, mode, micro, constant)):
            trainer = actor(model, *options)
            gradients = record_full_gradients(trainer)
            run(trainer, rollouts(), 1)
            pair.append(gradients[0])
        result[name] = tuple(pair)
    return result


def gradients_per_distillation(model: str, demos: str, out: str, *names: str) -> dict[str, Any]:
    """The gradient of one step with verl's loss of a teacher, for each of its modes.

    Of verl's loss without the teacher, with it, and of the mixture at mu = 0.3.
    """
    from functools import partial

    from verl.trainer.distillation import distillation_ppo_loss
    from verl.workers.config import DistillationConfig, DistillationLossConfig
    from verl.workers.utils.losses import ppo_loss

    result = {}
    for name in names:
        micro = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
        constant = "+actor_rollout_ref.actor.policy_loss.method={name:constant,mu:0.3}"
        own = DistillationLossConfig(
            loss_mode=name, topk=3, distillation_loss_coef=0.5, use_policy_gradient=False
        )
        distillation = DistillationConfig(distillation_loss=own)
        found = []
        for mixed, taught in ((False, False), (False, True), (True, True)):
            trainer = actor(model, *(gac_overrides(demos, micro, constant) if mixed else [micro]))
            if mixed:  # the loss is set once more, as verl does with distillation
                trainer.engine.forward_backward_batch = trainer.mixture.engine_forward_backward
                given = trainer.mixture.policy_loss.keywords["config"]
            else:
                given = trainer.loss_fn.keywords["config"]
            loss = partial(ppo_loss, config=given)
            if taught:
                loss = partial(
                    distillation_ppo_loss, config=given, distillation_config=distillation
                )
            trainer.set_loss_fn(loss)
            gradients = record_full_gradients(trainer)
            data = verl_cpu.batch(
                rollouts(),
                TEMPERATURE,
                global_batch_size=8,
                mini_batch_size=8,
                epochs=1,
                distillation_use_topk=taught and own.loss_settings.use_topk,
            )
            if taught:
                add_teacher(data, own.topk if own.loss_settings.use_topk else 1)
            metrics = verl_cpu.step(trainer, data)
            found.append((gradients[0], metrics.get("gac/teacher_loss")))
        result[name] = found
    return result


def add_teacher(data: Any, k: int, vocabulary: int = 18) -> None:
    """Add a random teacher's log-probs of K tokens at each position, as verl's servers do."""
    generator = torch.Generator().manual_seed(5)
    logps, ids = [], []
    for row in data["input_ids"].unbind():
        top = torch.randn(len(row), vocabulary, generator=generator).log_softmax(-1).topk(k)
        logps.append(top.values)
        ids.append(top.indices)
    data["teacher_logprobs"] = torch.nested.as_nested_tensor(logps, layout=torch.jagged)
    data["teacher_ids"] = torch.nested.as_nested_tensor(ids, layout=torch.jagged)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    jobs = {
        "resumed": resumed,
        "modes": gradients_per_loss_mode,
        "distillation": gradients_per_distillation,
    }
    job = jobs[sys.argv[1]]
    torch.save(job(*sys.argv[2:]), Path(sys.argv[4]) / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()
