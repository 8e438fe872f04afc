"""A CPU platform for verl 0.9. Import this module before any other verl module.

verl targets GPUs, but its engine, worker and losses run unchanged on a CPU once a CPU platform is
registered.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

os.environ["VERL_PLATFORM"] = "cpu"

from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_base import PlatformBase


class _Device(types.ModuleType):
    """The functions of torch.cuda that verl calls."""

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
    """A platform without accelerators."""

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
from verl.trainer.ppo.core_algos import get_adv_estimator_fn  # noqa: E402 - after the platform
from verl.utils import tensordict_utils as tu  # noqa: E402 - after the platform
from verl.workers.engine import EngineRegistry  # noqa: E402 - after the platform
from verl.workers.engine.fsdp.transformer_impl import (  # noqa: E402 - after the platform
    FSDPEngineWithLMHead,
)
from verl.workers.engine_workers import ActorRolloutRefWorker  # noqa: E402 - after the platform

EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cpu"])(
    FSDPEngineWithLMHead
)

# Disable options that need GPU kernels or are not supported on CPUs.
OPTIONS = [
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
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
]


def init_single_process() -> None:
    """Start a single-process group and set the environment variables that verl's workers read."""
    env = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    os.environ.update(env)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def actor(*overrides: str) -> Any:
    """The actor's training worker, built from verl's own configuration."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*OPTIONS, *overrides])
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
    worker.init_model()
    return worker.actor


def grpo_advantages(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """verl's GRPO advantages, one per rollout; `groups` holds the prompt index of each."""
    scores = torch.tensor(rewards)[:, None]
    grpo = get_adv_estimator_fn("grpo")
    advantages, _ = grpo(scores, torch.ones_like(scores), index=groups)
    return advantages.squeeze(1).tolist()


def batch(rows: Sequence[Mapping[str, Any]], temperature: float, **options: Any) -> TensorDict:
    """Pack rollouts in the format in which verl's trainer passes them to the actor.

    Args:
        rows: prompt [P] and response [R] token ids; mask, advantage, old and ref log-probs [R].
        temperature: at which the actor computes log-probs.
        options: verl's other batch options.
    """

    def jagged(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    sequences = [torch.cat([row["prompt"], row["response"]]) for row in rows]
    tensors = {
        "input_ids": jagged(sequences),
        "position_ids": jagged([torch.arange(len(ids)) for ids in sequences]),
        "prompts": jagged([row["prompt"] for row in rows]),
        "responses": jagged([row["response"] for row in rows]),
        "response_mask": jagged([row["mask"] for row in rows]),
        "loss_mask": jagged([row["mask"] for row in rows]),
        "advantages": jagged([row["advantage"] for row in rows]),
        "old_log_probs": jagged([row["old"] for row in rows]),
        "ref_log_prob": jagged([row["ref"] for row in rows]),
    }
    return tu.get_tensordict(tensors, {"temperature": temperature, **options})


def step(worker: Any, data: TensorDict) -> dict[str, Any]:
    """Take one optimizer step on `data`; returns the actor's metrics, a list of values per name."""
    return dict(tu.get(worker.train_mini_batch(data), "metrics"))
