"""A real verl actor on CPUs, one rank: FSDP2, its own engine, worker and configuration."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

os.environ["VERL_PLATFORM"] = "cpu"

from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_base import PlatformBase


class _Device(types.ModuleType):
    """What verl asks of torch.cuda, for the CPU."""

    @staticmethod
    def mem_get_info() -> tuple[int, int]:
        return 0, 1

    @staticmethod
    def get_device_name(*device: Any) -> str:
        return "CPU"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, lambda *args, **keywords: 0)


@platform_manager.PlatformRegistry.register(platform="cpu")
class CPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _Device("cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Any:
        yield

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None

    def _nothing(self, *args: Any, **keywords: Any) -> None:
        return None

    set_device = synchronize = manual_seed = manual_seed_all = _nothing
    set_allocator_settings = empty_cache = profiler_start = profiler_stop = _nothing


from hydra import compose, initialize_config_module  # noqa: E402 - after the platform
from tensordict import TensorDict  # noqa: E402 - after the platform
from verl.utils import tensordict_utils as tu  # noqa: E402 - after the platform
from verl.workers.engine import EngineRegistry  # noqa: E402 - after the platform
from verl.workers.engine.fsdp.transformer_impl import (  # noqa: E402 - after the platform
    FSDPEngineWithLMHead,
)
from verl.workers.engine_workers import ActorRolloutRefWorker  # noqa: E402 - after the platform

EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cpu"])(
    FSDPEngineWithLMHead
)
TEMPERATURE = 0.7


def rollouts(size: int = 8, vocabulary: int = 18) -> list[dict[str, Any]]:
    """Random prompts and responses of different lengths, with advantages."""
    draw = torch.Generator().manual_seed(11)
    out = []
    for i in range(size):
        prompt, response = (
            torch.randint(3, vocabulary, (int(n),), generator=draw)
            for n in torch.randint(2, 7, (2,), generator=draw)
        )
        mask = torch.ones(len(response), dtype=torch.int64)
        mask[1] = i % 3 != 0  # a token that a tool wrote
        out.append({
            "prompt": prompt, "response": response, "mask": mask,
            "advantage": torch.randn((), generator=draw).expand(len(response)).clone(),
            "old": -torch.rand(len(response), generator=draw) * 0.1 - 2.8,
            "ref": -torch.rand(len(response), generator=draw) * 0.1 - 2.8,
        })  # fmt: skip
    return out


def batch_of(rows: list[dict[str, Any]], **options: Any) -> TensorDict:
    """The rows as verl's trainer hands them to the actor."""

    def jagged(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    whole = [torch.cat([row["prompt"], row["response"]]) for row in rows]
    tensors = {
        "input_ids": jagged(whole),
        "position_ids": jagged([torch.arange(len(ids)) for ids in whole]),
        "prompts": jagged([row["prompt"] for row in rows]),
        "responses": jagged([row["response"] for row in rows]),
        "response_mask": jagged([row["mask"] for row in rows]),
        "loss_mask": jagged([row["mask"] for row in rows]),
        "advantages": jagged([row["advantage"] for row in rows]),
        "old_log_probs": jagged([row["old"] for row in rows]),
        "ref_log_prob": jagged([row["ref"] for row in rows]),
    }
    return tu.get_tensordict(tensors, {"temperature": TEMPERATURE, **options})


def actor(model: str, *overrides: str) -> Any:
    """The worker that verl's own configuration makes."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.model.use_remove_padding=false",
            "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
            "actor_rollout_ref.model.enable_gradient_checkpointing=false",
            "actor_rollout_ref.actor.strategy=fsdp2",
            "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32",
            "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
            "+actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32",
            "+actor_rollout_ref.actor.fsdp_config.mixed_precision.buffer_dtype=fp32",
            "actor_rollout_ref.actor.use_torch_compile=false",
            "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            "actor_rollout_ref.actor.optim.clip_grad=1e9",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
            *overrides,
        ])  # fmt: skip
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
    worker.init_model()
    return worker.actor


def gradients(trainer: Any) -> list[dict[str, torch.Tensor]]:
    """A list that receives the whole gradient of each optimiser step."""
    found: list[dict[str, torch.Tensor]] = []
    step = trainer.engine.optimizer_step

    def watched() -> Any:
        found.append({
            name: p.grad.full_tensor().clone()
            for name, p in trainer.engine.module.named_parameters()
        })  # fmt: skip
        return step()

    trainer.engine.optimizer_step = watched
    return found


def ours(demos: str, *overrides: str) -> list[str]:
    """Configuration alone: what a user adds to a command of verl's."""
    loss = "actor_rollout_ref.actor.policy_loss"
    return [
        f"{loss}._target_=gac.integrations.verl.GACPolicyLoss",
        f"+{loss}.demo_path={demos}",
        f"+{loss}.demo_batch=5",
        *overrides,
    ]


def run(worker: Any, rows: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Optimiser steps over the same rollouts; what ours logged in each."""
    logs = []
    for _ in range(steps):
        data = batch_of(rows, global_batch_size=8, mini_batch_size=8, epochs=1)
        metrics = tu.get(worker.train_mini_batch(data), "metrics")
        logs.append({k: v for k, v in metrics.items() if k.startswith("gac/")})
    return logs


def whole(worker: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().full_tensor() for n, p in worker.engine.module.named_parameters()}


def resumed(model: str, demos: str, out: str, *overrides: str) -> dict[str, Any]:
    """Four steps, saved after two, and the last two again from there."""
    options = ours(demos, *overrides)
    trainer = actor(model, *options)
    found, mixer = gradients(trainer), trainer.mixture.mixer
    draw, drawn = mixer.draw, []
    mixer.draw = lambda: drawn.append(draw()) or drawn[-1]
    rows = rollouts()[dist.get_rank() :: dist.get_world_size()]
    saved = str(Path(out) / "checkpoint")
    logs = run(trainer, rows, 2)
    trainer.save_checkpoint(saved)
    logs += run(trainer, rows, 2)
    again = actor(model, *options)
    again.load_checkpoint(saved)
    repeated = run(again, rows, 2)
    dist.barrier()
    (Path(saved) / "gac.json").unlink(missing_ok=True)
    dist.barrier()
    refusal = ""
    try:
        again.load_checkpoint(saved)
    except FileNotFoundError as error:
        refusal = str(error)
    return {
        "gradient": found[0], "drawn": drawn, "logs": logs, "repeated": repeated,
        "weights": whole(trainer), "again": whole(again), "refusal": refusal,
    }  # fmt: skip


def modes(model: str, demos: str, out: str, *names: str) -> dict[str, Any]:
    """The gradient of one step under each of verl's losses: alone, and mixed at mu = 0.3."""
    result = {}
    for name in names:
        mode = f"actor_rollout_ref.actor.policy_loss.loss_mode={name}"
        micro = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
        constant = "+actor_rollout_ref.actor.policy_loss.method={name:constant,mu:0.3}"
        pair = []
        for options in ([mode, micro], ours(demos, mode, micro, constant)):
            trainer = actor(model, *options)
            found = gradients(trainer)
            run(trainer, rollouts(), 1)
            pair.append(found[0])
        result[name] = tuple(pair)
    return result


if __name__ == "__main__":
    dist.init_process_group("gloo")
    job = {"resumed": resumed, "modes": modes}[sys.argv[1]]
    torch.save(job(*sys.argv[2:]), Path(sys.argv[4]) / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()
