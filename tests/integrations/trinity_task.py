"""Run one rank of verl 0.8's own worker on a CPU, with Trinity's loss and batches."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from trinity.common.config import AlgorithmConfig, Config
from trinity.common.config_validator import AlgorithmConfigValidator
from trinity.common.experience import EID, Experience

from examples import trinity_cpu
from gac.integrations import trinity as gac_trinity
from tests.integrations.recording import full_weights, message_of, record_full_gradients


class Buffer:
    """A reader of experiences that are already in memory."""

    def __init__(self, rows: list[Experience]) -> None:
        self.rows = rows

    async def read(self) -> list[Experience]:
        return self.rows


def experiences(expert: bool, count: int) -> list[Experience]:
    """Random prompts and completions of different lengths."""
    generator = torch.Generator().manual_seed(5 + expert)
    out = []
    for i in range(count):
        prompt, length = (int(n) for n in torch.randint(2, 7, (2,), generator=generator))
        rollout_fields: dict[str, Any] = {}
        if not expert:
            rollout_fields = {
                "logprobs": -torch.rand(length, generator=generator) * 0.1 - 2.8,
                "reward": 1.0,
                "advantages": torch.randn((), generator=generator).expand(length).clone(),
            }
        out.append(
            Experience(
                eid=EID(task=i),
                tokens=torch.randint(3, 18, (prompt + length,), generator=generator),
                prompt_length=prompt,
                info={"model_version": 0},
                **rollout_fields,
            )
        )
    return out


def sample(step: int) -> list[Experience]:
    """The rows of one training step, sampled by the real strategy from in-memory buffers."""
    strategy = gac_trinity.GACSampleStrategy.__new__(gac_trinity.GACSampleStrategy)
    strategy.usual_exp_buffer = Buffer(experiences(False, 10))
    strategy.expert_exp_buffer = Buffer(experiences(True, 6))
    rows, _, _ = asyncio.run(strategy.sample(step))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3)).tolist()
    # shuffled: Trinity balances tokens over ranks, which mixes rollouts and demonstrations
    return [rows[i] for i in order]


def reference(row: Experience) -> torch.Tensor:
    """Made-up reference log-probs, derived from the row's tokens."""
    return -2.8 - 0.01 * row.tokens[row.prompt_length :].float() / 18


def batch(step: int, micro: int) -> TensorDict:
    """This rank's rows of a training step."""
    rows = sample(step)
    return trinity_cpu.batch(rows, [reference(row) for row in rows], micro)


def configuration(state: str) -> Config:
    """A minimal user configuration."""
    config = Config()
    config.algorithm.algorithm_type = "gac.integrations.trinity.GACAlgorithm"
    config.buffer.train_batch_size = 16
    config.checkpoint_job_dir = state
    return config


def algorithm(state: str, **options: Any) -> AlgorithmConfig:
    """The algorithm section of `configuration`, completed by Trinity's own validator."""
    config = configuration(state)
    config.algorithm.policy_loss_fn_args = {**gac_trinity.GACPolicyLoss.default_args(), **options}
    AlgorithmConfigValidator().validate(config)
    return config.algorithm


def worker(model: str, state: str, **options: Any) -> Any:
    """verl's worker with Trinity's loss from Trinity's algorithm configuration."""
    return trinity_cpu.make_worker(model, algorithm(state, **options), lr=1e-2)


def main(model: str, out: str, micro: str) -> None:
    """Run one rank: four steps, then the last two again with a worker that resumes."""
    dist.init_process_group("gloo")
    method = {"name": "gac", "update_every": 2}
    trainer = worker(model, f"{out}/state", method=method, kl_coef=0.05)
    gradients = record_full_gradients(trainer)

    def run(actor: Any, steps: range) -> list[dict[str, Any]]:
        logs = []
        for step in steps:
            metrics = trinity_cpu.step(actor, batch(step, int(micro)))
            logs.append({k: v for k, v in metrics.items() if "gac/" in k})
        return logs

    logs = run(trainer, range(1, 3))
    trainer.save_checkpoint(f"{out}/checkpoint")
    logs += run(trainer, range(3, 5))
    resumed = worker(model, f"{out}/state", method=method, kl_coef=0.05)
    resumed.load_checkpoint(f"{out}/checkpoint")
    repeated = run(resumed, range(3, 5))
    without_state = worker(model, f"{out}/nowhere", method=method)
    torch.save(
        {
            "gradient": gradients[0],
            "logs": logs,
            "repeated": repeated,
            "weights": [full_weights(actor) for actor in (trainer, resumed)],
            "error_message": message_of(FileNotFoundError, run, without_state, range(3, 4)),
        },
        Path(out) / f"rank{dist.get_rank()}.pt",
    )
    os._exit(0)  # a normal shutdown would hang: the failed step leaves collectives pending


if __name__ == "__main__":
    main(*sys.argv[1:])
