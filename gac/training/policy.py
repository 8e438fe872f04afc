"""The models of a run and their micro-batches, for training and for replay."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from gac import collectives
from gac.collectives import run_on_all_ranks
from gac.data.micro_batches import MicroBatches
from gac.models.causal_lm import make_model
from gac.models.config import ModelConfig
from gac.models.head import check_head, run_head
from gac.models.precision import compute_dtype
from gac.models.row_attention import attends_by_row, disable_row_attention, enable_row_attention
from gac.parallel import sharding
from gac.parallel.sharding import reshard
from gac.rows import Row, collate
from gac.train_config import OptimConfig, TrainConfig, kl_rollouts, loss_of
from gac.types import StepNeeds

from .gradients import Forward, Gradients
from .probes import local

logger = logging.getLogger(__name__)


def load_policy(config: TrainConfig, accelerator: Accelerator) -> nn.Module:
    """The policy with the run's initial weights, prepared for training on this rank."""
    return _build_model(config, config.model, accelerator, frozen=False)


def load_reference(config: TrainConfig, accelerator: Accelerator, kl: bool) -> nn.Module | None:
    """A frozen copy of the initial policy, or None if nothing needs it.

    Always None with adapters: the reference is then the model with its adapters disabled.
    kl: whether any step computes the KL.
    """
    sampling = config.method.sampling(config.rollouts.num_generations)
    needed = kl or sampling.from_reference or loss_of(config).reference
    if not needed or config.model.lora is not None:
        return None
    return load_frozen(config, config.model, accelerator)


def load_frozen(config: TrainConfig, source: ModelConfig, accelerator: Accelerator) -> nn.Module:
    """The model `source`, prepared for inference on this rank, without adapters."""
    model: Any = _build_model(config, source, accelerator, frozen=True)
    dtype = compute_dtype(model)
    if not sharding.units(model):  # FSDP gathers in this dtype
        for module in model.modules():  # autocast would round these weights in every forward
            if type(module) is nn.Linear and module is not model.get_output_embeddings():
                module.to(dtype)
    return model


def warn_of_rounding(model: nn.Module, lr: float) -> None:
    """Warn of the share of AdamW's updates, of size `lr`, that the weights' dtype rounds away."""
    lost = total = 0
    for p in (local(p.detach()) for p in model.parameters() if p.requires_grad):
        if p.dtype != torch.float32:
            lost += int(((p.float() - lr).to(p.dtype) == p).sum())
            total += p.numel()
    if total:
        logger.warning(
            "model.master_weights=false: at optim.lr=%g, rounding to bfloat16 drops %.1f%% of the "
            "updates of the weights; use master_weights=true, or a larger optim.lr",
            lr,
            100 * lost / total,
        )


def make_gradients(
    config: TrainConfig,
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase,
    model: nn.Module,
    reference: nn.Module | None,
    needs: StepNeeds,
    teacher: nn.Module | None = None,
) -> Gradients:
    """Build `Gradients`.

    needs: the union of the needs of all steps. teacher: its own model, which shares micro-batches.
    """
    forward = Forward(
        accelerator,
        model=model,
        reference=reference,
        temperature=config.rollouts.temperature,
        micro=_micro_batches(config, model, reference, teacher),
        pad_token=tokenizer.pad_token_id,
    )
    size = kl_rollouts(config)
    kl_sample_size = None if size is None else math.ceil(size / accelerator.num_processes)
    return Gradients(forward, loss_of(config), kl_sample_size, averages=needs.average > 0)


def _micro_batches(config: TrainConfig, *models: nn.Module | None) -> MicroBatches:
    """Micro-batching of the run: packed if `packing` allows it and every model supports it."""
    completions, tokens = config.rollouts.num_generations, config.max_tokens_per_micro_batch
    unit = config.method.sampling(completions).unit(completions)
    packed = tokens is not None and config.packing is not False
    packed = packed and all(_packs(model, config.packing) for model in models if model is not None)
    if tokens is not None:
        logger.info("micro-batches: %s rows", "packed" if packed else "padded")
    if config.packing and not packed:
        logger.warning(
            "packing=true: this model does not keep packed rows separate; padding rows of similar "
            "length instead"
        )
    return MicroBatches(config.micro_batch_size, tokens, packed, unit)


def _packs(model: nn.Module, forced: bool | None) -> bool:
    """Whether the model supports packing and attends row by row, or is `forced` to pack.

    A model that attends row by row, but not to packed rows, gets PyTorch's SDPA back.
    """
    packs = supports_packing(model) or (disable_row_attention(model) and supports_packing(model))
    reshard(model)
    return packs and (bool(forced) or attends_by_row(model))


def _build_model(
    config: TrainConfig, source: ModelConfig, accelerator: Accelerator, *, frozen: bool
) -> nn.Module:
    """Load a model on all ranks, in shards if the run is sharded, and prepare it.

    frozen: for inference only.
    """
    loading = sharding.sharded_loading(accelerator, config.parallel)
    model = run_on_all_ranks(lambda: make_model(source, config.seed, loading, training=True))
    if config.micro_batch_size is None and accelerator.device.type == "cpu":
        enable_row_attention(model)
    if loading is None:
        check_head(model)
    compute = compute_dtype(model)
    if frozen:
        model = sharding.prepare_frozen(model, accelerator, compute, loading)
    else:
        model = sharding.prepare(model, accelerator, config.parallel, compute, loading)
    if loading is not None:  # the check needs the weights of all ranks
        check_head(model)
        reshard(model)
    return model


# Tokens per forward. On a CPU, more would need more memory without being faster; the number for
# GPUs has not been measured. Fixed, so that results depend on the machine only if memory is scarce.
MOST = {"cpu": 2048, "cuda": 16384}
SHARE = 0.5  # of the free memory; the rest is for sampling, the loss and temporary tensors
SAMPLE = 64  # tokens per row in the measurement of the memory per token


def choose_micro_batches(
    config: TrainConfig, accelerator: Accelerator, policy: nn.Module, longest: int
) -> TrainConfig:
    """`config` with `max_tokens_per_micro_batch` or `micro_batch_size` set, the same on all ranks.

    longest: tokens of the longest possible row.
    """
    tokens = config.max_tokens_per_micro_batch
    if tokens is None and config.micro_batch_size is None:
        free = free_memory(accelerator.device)
        parameters = [local(p).nbytes for p in policy.parameters() if p.requires_grad]
        free = max(free - 3 * sum(parameters), 0)  # gradients and AdamW's two moments come later
        per_token = activation_bytes(accelerator.unwrap_model(policy), min(longest, SAMPLE))
        fitting = -collectives.largest([-SHARE * free / per_token])[0]
        most = MOST.get(accelerator.device.type, MOST["cuda"])
        # a power of two, so that runs with similar memory have the same results
        tokens = min(most, 2 ** int(math.log2(max(fitting, 1))))
        reason = "the maximum" if tokens == most else f"{free / 1e9:.2g} GB are free"
        logger.info("max_tokens_per_micro_batch=%d (%s)", tokens, reason)
        config = dataclasses.replace(config, max_tokens_per_micro_batch=tokens)
    if tokens is not None and tokens < longest:
        logger.warning(
            "max_tokens_per_micro_batch=%d: rows may have up to %d tokens; a longer row is a "
            "micro-batch of its own and needs more memory",
            tokens,
            longest,
        )
    return config


def memory_advice(config: TrainConfig, activity: str, step: int, longest: int) -> str:
    """Where a run ran out of memory, and the keys to lower.

    activity: that of the heartbeat. step: the number of steps taken. longest: as in
        `choose_micro_batches`.
    """
    if activity.endswith("evaluation"):
        return (
            f"in the evaluation after step {step}: lower eval.batch, eval.max_completion_length or "
            "eval.data.max_prompt_tokens, or those of the task in eval.tasks"
        )
    rollouts = config.rollouts
    if activity.endswith("rollouts") and rollouts.engine != "vllm":
        unit = "size" if rollouts.generation_batch_tokens is None else "tokens"
        key = "paged.num_blocks" if rollouts.engine == "paged" else f"generation_batch_{unit}"
        return (
            f"while sampling for step {step + 1}: lower rollouts.{key}, "
            "rollouts.max_completion_length or data.max_prompt_tokens"
        )
    by_rows = config.micro_batch_size is not None
    key = "micro_batch_size" if by_rows else "max_tokens_per_micro_batch"
    return (
        f"in step {step + 1}: rows have up to {longest} tokens: lower data.max_prompt_tokens, "
        f"data.max_demo_tokens, rollouts.max_completion_length or {key}"
    )


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
            run_head(model, **batch.model_inputs).logprobs(batch.targets)
        reshard(model)
        return sum(sizes)

    return max((kept(2) - kept(1)) / length, 1.0)  # the difference contains no weights


# Largest change that counts as rounding, relative to the effect of neighbors that a row can see.
# For tiny float32 models of all families it is at most 1e-5 or, if a convolution or a recurrent
# state passes from row to row, at least 1e-3.
FLOAT32, LOWER_PRECISION = 1e-4, 0.05
ROW = (1, 2, 3, 0, 1, 3, 2, 1)
NEIGHBORS = ((2, 1, 0, 3, 3), (0, 3, 2, 2, 1))


@torch.no_grad()
def supports_packing(model: nn.Module) -> bool:
    """Whether a prepared model treats each packed row as if it were the only one.

    The log-probs of a row must agree, up to rounding, with those of the row alone, whichever row it
    is packed with. Rounding is small compared to the effect of the same neighbors when the row can
    see them, as parts of one long row. In lower precision, rounding could hide the effect of a
    convolution, so models with a convolution are then not packed.
    """
    precise: list[bool] = []  # whether each forward computed in float32
    training = [module for module in model.modules() if module.training]
    device = next(model.parameters()).device

    def row_logps(*rows: tuple[int, ...], packed: bool = True) -> Tensor:
        batch = collate([Row(ids, 1, False) for ids in rows], 0, device, packed)
        head = run_head(model, **batch.model_inputs)
        values = head.weight if head.logits is None else head.logits
        assert values is not None
        precise.append(values.dtype == torch.float32 and head.autocast is None)
        logps = head.logprobs(batch.targets)[0].flatten()
        return logps[-len(ROW) : -1]  # only those that predict tokens of ROW from tokens of ROW

    for module in training:
        module.training = False
    try:
        packed = [row_logps(neighbor, ROW) for neighbor in NEIGHBORS]
        visible = [row_logps(neighbor + ROW) for neighbor in NEIGHBORS]
        alone = row_logps(ROW, packed=False)  # positions may be counted in another way
    except (TypeError, ValueError, NotImplementedError):
        return False  # the forward does not accept row bounds
    finally:
        for module in training:
            module.training = True
    effect = _distance(*visible)
    leaks = _distance(*packed), _distance(packed[0], alone), _distance(packed[1], alone)
    if all(precise):
        return bool(max(leaks) <= FLOAT32 * effect)
    convolution = any(isinstance(module, nn.Conv1d) for module in model.modules())
    return not convolution and bool(max(leaks) <= LOWER_PRECISION * effect)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().max()


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; vectors (norms, biases) are not decayed."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(  # fused: one kernel, and no copies of the weights' size
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )
