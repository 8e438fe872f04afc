"""Trinity's loss and batches in verl 0.8's own worker on CPUs, one rank."""

from __future__ import annotations

import asyncio
import logging
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
from trinity.trainer.verl.losses import build_trinity_loss
from trinity.trainer.verl.utils import to_data_proto
from verl.trainer.config import CheckpointConfig
from verl.utils import attention_utils
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.padding import left_right_2_no_padding

from gac.integrations import trinity as ours

EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cpu"])(
    FSDPEngineWithLMHead
)
for name in ("max_memory_allocated", "max_memory_reserved", "empty_cache", "memory_allocated",
             "memory_reserved", "reset_peak_memory_stats"):  # fmt: skip
    if not hasattr(torch.cpu, name):
        setattr(torch.cpu, name, lambda *args, **keywords: 0)
torch.cpu.mem_get_info = lambda *args: (0, 1)  # type: ignore[attr-defined] - for verl's log
torch.cpu.get_device_name = lambda *args: "CPU"  # type: ignore[attr-defined] - as above


def _unpad(states: torch.Tensor, mask: torch.Tensor) -> tuple[Any, ...]:
    """flash-attn's unpad_input, which verl imports from a package that needs a GPU."""
    lengths = mask.sum(1, dtype=torch.int32)
    where = mask.flatten().nonzero().flatten()
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return states.flatten(0, 1)[where], where, ends, int(lengths.max())


attention_utils._get_attention_functions = lambda: (None, None, None, _unpad)


class Buffer:
    """A reader of experiences that are already in memory."""

    def __init__(self, rows: list[Experience]) -> None:
        self.rows = rows

    async def read(self) -> list[Experience]:
        return self.rows


def experiences(expert: bool, count: int) -> list[Experience]:
    """Random prompts and completions of different lengths."""
    draw = torch.Generator().manual_seed(5 + expert)
    out = []
    for i in range(count):
        prompt, length = (int(n) for n in torch.randint(2, 7, (2,), generator=draw))
        known: dict[str, Any] = {}
        if not expert:
            known = {
                "logprobs": -torch.rand(length, generator=draw) * 0.1 - 2.8, "reward": 1.0,
                "advantages": torch.randn((), generator=draw).expand(length).clone(),
            }  # fmt: skip
        out.append(Experience(
            eid=EID(task=i), tokens=torch.randint(3, 18, (prompt + length,), generator=draw),
            prompt_length=prompt, info={"model_version": 0}, **known,
        ))  # fmt: skip
    return out


def sample(step: int) -> list[Experience]:
    """A training step's rows, by the real strategy, over buffers in memory."""
    strategy = ours.GACSampleStrategy.__new__(ours.GACSampleStrategy)
    strategy.usual_exp_buffer = Buffer(experiences(False, 10))
    strategy.expert_exp_buffer = Buffer(experiences(True, 6))
    rows, _, _ = asyncio.run(strategy.sample(step))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3)).tolist()
    return [rows[i] for i in order]  # Trinity balances the ranks' tokens: kinds are mixed


def reference(row: Experience) -> torch.Tensor:
    """Log-probs of a reference policy, made up from the row's tokens."""
    return -2.8 - 0.01 * row.tokens[row.prompt_length :].float() / 18


def batch(step: int, micro: int) -> TensorDict:
    """This rank's part of a training step as Trinity hands it to the actor."""
    rows = sample(step)
    data = to_data_proto(rows, 0, None, logging.getLogger("trinity"))
    data.batch["old_log_probs"] = data.batch["rollout_log_probs"]
    ref = torch.zeros_like(data.batch["old_log_probs"])
    for i, row in enumerate(rows):
        ref[i, : len(row.tokens) - row.prompt_length] = reference(row)
    data.batch["ref_log_prob"] = ref
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = left_right_2_no_padding(data.to_tensordict()[rank::ranks].contiguous())
    tu.assign_non_tensor(
        found, global_batch_size=len(rows), mini_batch_size=len(rows), epochs=1, temperature=1.0,
        calculate_entropy=False, micro_batch_size_per_gpu=micro, use_dynamic_bsz=False,
    )  # fmt: skip
    return found


def configuration(state: str) -> Config:
    """A user's configuration as far as it matters here."""
    config = Config()
    config.algorithm.algorithm_type = "gac.integrations.trinity.GACAlgorithm"
    config.buffer.train_batch_size = 16
    config.checkpoint_job_dir = state
    return config


def algorithm(state: str, **options: Any) -> AlgorithmConfig:
    """The algorithm's part of it, as Trinity's own validator completes it."""
    config = configuration(state)
    config.algorithm.policy_loss_fn_args = {**ours.GACPolicyLoss.default_args(), **options}
    AlgorithmConfigValidator().validate(config)
    return config.algorithm


def worker(model: str, state: str, **options: Any) -> TrainingWorker:
    """verl's worker with Trinity's loss from Trinity's algorithm configuration."""
    single = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=model, use_remove_padding=False, enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2", model_dtype="fp32", mixed_precision=single, use_torch_compile=False,
            use_dynamic_bsz=False, micro_batch_size_per_gpu=2,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, clip_grad=1e9, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )  # fmt: skip
    made = TrainingWorker(config=config)
    made.reset()
    made.set_loss_fn(build_trinity_loss(algorithm(state, **options)))
    return made


def main(model: str, out: str, micro: str) -> None:
    """One rank: four steps, and the last two again by a worker that starts from the second."""
    dist.init_process_group("gloo")
    method = {"name": "gac", "update_every": 2}
    made = worker(model, f"{out}/state", method=method, kl_coef=0.05)
    gradients: list[dict[str, torch.Tensor]] = []
    move = made.engine.optimizer_step

    def watched() -> Any:
        named = made.engine.module.named_parameters()
        gradients.append({n: p.grad.full_tensor().clone() for n, p in named})
        return move()

    made.engine.optimizer_step = watched

    def run(trainer: Any, steps: range) -> list[dict[str, Any]]:
        logs = []
        for step in steps:
            metrics = tu.get(trainer.train_mini_batch(batch(step, int(micro))), "metrics")
            logs.append({k: v for k, v in metrics.items() if "gac/" in k})
        return logs

    logs = run(made, range(1, 3))
    made.save_checkpoint(f"{out}/checkpoint")
    logs += run(made, range(3, 5))
    again = worker(model, f"{out}/state", method=method, kl_coef=0.05)
    again.load_checkpoint(f"{out}/checkpoint")
    repeated = run(again, range(3, 5))
    lost = worker(model, f"{out}/nowhere", method=method)
    refusal = ""
    try:
        run(lost, range(3, 4))
    except FileNotFoundError as error:
        refusal = str(error)
    whole = [
        {n: p.detach().full_tensor() for n, p in each.engine.module.named_parameters()}
        for each in (made, again)
    ]
    torch.save(
        {"gradient": gradients[0], "logs": logs, "repeated": repeated, "weights": whole,
         "refusal": refusal},
        Path(out) / f"rank{dist.get_rank()}.pt",
    )  # fmt: skip
    os._exit(0)  # an engine that failed within a step leaves collectives behind


if __name__ == "__main__":
    main(*sys.argv[1:])
