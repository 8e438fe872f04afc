"""Chooses the micro-batches of a run that does not set their size."""

from __future__ import annotations

import dataclasses
import logging
import math
import os

import psutil
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from gac.data.rows import Row, collate
from gac.models import row_attention
from gac.parallel import collectives
from gac.parallel.setup import reshard
from gac.train_config import TrainConfig

from .packing_check import supports_packing
from .probes.parts import local

logger = logging.getLogger(__name__)
# Tokens per forward. On a CPU, more would need more memory without being faster; the number for
# GPUs has not been measured. Fixed, so that results depend on the machine only if memory is scarce.
MOST = {"cpu": 2048, "cuda": 16384}
SHARE = 0.5  # of the free memory; the rest is for sampling, the loss and temporary tensors
SAMPLE = 64  # tokens per row in the measurement of the memory per token


def choose_micro_batches(
    config: TrainConfig,
    accelerator: Accelerator,
    policy: nn.Module,
    reference: nn.Module | None,
    longest: int,
    unit: int,
) -> TrainConfig:
    """`config` with `max_tokens_per_micro_batch` or `micro_batch_size` set, the same on all ranks.

    Rows are packed if packed rows agree with separate ones and attention is computed row by row;
    otherwise packing would cost more than padding.

    Args:
        longest: tokens of the longest possible row.
        unit: number of rows that are never split.
    """
    if config.micro_batch_size is not None or config.max_tokens_per_micro_batch is not None:
        return config
    packed = all(packs_by_row(model) for model in (policy, reference) if model is not None)
    free = free_memory(accelerator.device)
    parameters = [local(p).nbytes for p in policy.parameters() if p.requires_grad]
    free = max(free - 3 * sum(parameters), 0)  # gradients and AdamW's two moments come later
    per_token = activation_bytes(accelerator.unwrap_model(policy), min(longest, SAMPLE))
    fitting = -collectives.largest([-SHARE * free / per_token])[0]
    most = MOST.get(accelerator.device.type, MOST["cuda"])
    # a power of two, so that runs with similar memory have the same results
    tokens = min(most, 2 ** int(math.log2(max(fitting, 1))))
    reason = "the maximum" if tokens == most else f"{free / 1e9:.2g} GB are free"
    if packed:
        tokens = max(tokens, longest * unit)
        logger.info("max_tokens_per_micro_batch=%d, with packed rows (%s)", tokens, reason)
        return dataclasses.replace(config, max_tokens_per_micro_batch=tokens)
    rows = max(tokens // longest, unit)
    logger.info(
        "micro_batch_size=%d, with padded rows (%s): this model does not keep packed rows "
        "separate, or does not compute their attention row by row",
        rows,
        reason,
    )
    return dataclasses.replace(config, micro_batch_size=rows)


def packs_by_row(model: nn.Module) -> bool:
    """Whether the model supports packed rows and computes their attention row by row."""
    if supports_packing(model):
        reshard(model)
        return row_attention.is_by_row(model)
    reshard(model)
    row_attention.disable(model)
    return False


def free_memory(device: torch.device) -> float:
    """Bytes that this process may still allocate on `device`."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def activation_bytes(model: nn.Module, length: int) -> float:
    """Bytes per token that the forward pass of rows of `length` tokens keeps for the backward."""
    device = next(model.parameters()).device

    def kept(rows: int) -> int:
        sizes: list[int] = []

        def save(x: Tensor) -> Tensor:
            sizes.append(x.nbytes)
            return x

        batch = collate([Row((1,) * length, 1, False)] * rows, 0, device)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
            model(**batch.model_inputs, request=lambda head: head.logprobs(batch.targets))
        reshard(model)
        return sum(sizes)

    return max((kept(2) - kept(1)) / length, 1.0)  # the difference contains no weights
