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


if __name__ == "__main__":
    dist.init_process_group("gloo")
    jobs = {"resumed": resumed, "modes": gradients_per_loss_mode}
    job = jobs[sys.argv[1]]
    torch.save(job(*sys.argv[2:]), Path(sys.argv[4]) / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()
