"""Replaces Trinity-RFT 0.6's trainer on a CPU: builds verl 0.8's worker and the worker's batches.

Trinity's `VERLTrainer` requires a GPU, but the loss, the batches and verl's worker do not.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from trinity.common.experience import Experience
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

EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cpu"])(
    FSDPEngineWithLMHead
)
CUDA_FUNCTIONS = """max_memory_allocated max_memory_reserved memory_allocated memory_reserved
reset_peak_memory_stats empty_cache"""  # functions of torch.cuda that verl calls
for name in CUDA_FUNCTIONS.split():
    if not hasattr(torch.cpu, name):
        setattr(torch.cpu, name, lambda *args, **keywords: 0)
torch.cpu.mem_get_info = lambda *args: (0, 1)  # type: ignore[attr-defined] - for verl's log
torch.cpu.get_device_name = lambda *args: "CPU"  # type: ignore[attr-defined] - as above


def _unpad(states: torch.Tensor, mask: torch.Tensor) -> tuple[Any, ...]:
    """Replacement for flash-attn's unpad_input; verl imports it from a package that needs a GPU."""
    lengths = mask.sum(1, dtype=torch.int32)
    where = mask.flatten().nonzero().flatten()
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return states.flatten(0, 1)[where], where, ends, int(lengths.max())


attention_utils._get_attention_functions = lambda: (None, None, None, _unpad)


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


def make_worker(model: str, algorithm: Any, lr: float) -> TrainingWorker:
    """verl's training worker with the loss that Trinity builds from `algorithm`."""
    float32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=model,
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            model_dtype="fp32",
            mixed_precision=float32,
            use_torch_compile=False,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=2,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=lr, clip_grad=1e9, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )
    worker = TrainingWorker(config=config)
    worker.reset()
    worker.set_loss_fn(build_trinity_loss(algorithm))
    return worker


def batch(rows: Sequence[Experience], references: Sequence[torch.Tensor], micro: int) -> TensorDict:
    """This rank's rows of a training step, in the format that Trinity passes to the actor.

    Args:
        rows: all rows of the step.
        references: for each row, the log-probs [R] of its completion under the reference policy.
        micro: rows per micro-batch.
    """
    data = to_data_proto(list(rows), 0, None, logging.getLogger("trinity"))
    data.batch["old_log_probs"] = data.batch["rollout_log_probs"]
    ref = torch.zeros_like(data.batch["old_log_probs"])
    for i, logps in enumerate(references):
        ref[i, : len(logps)] = logps
    data.batch["ref_log_prob"] = ref
    rank, ranks = dist.get_rank(), dist.get_world_size()
    packed = left_right_2_no_padding(data.to_tensordict()[rank::ranks].contiguous())
    tu.assign_non_tensor(
        packed,
        global_batch_size=len(rows),
        mini_batch_size=len(rows),
        epochs=1,
        temperature=1.0,
        calculate_entropy=False,
        micro_batch_size_per_gpu=micro,
        use_dynamic_bsz=False,
    )
    return packed


def step(worker: TrainingWorker, data: TensorDict) -> dict[str, Any]:
    """Take one optimizer step on `data`; returns the actor's metrics, a list of values per name."""
    return dict(tu.get(worker.train_mini_batch(data), "metrics"))
