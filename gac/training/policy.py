"""Builds the models of a run and its `Gradients`, for training and for replay."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from accelerate import Accelerator
from torch import nn
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from gac.data.micro import MicroBatches
from gac.errors import ConfigError
from gac.methods.base import Loss, StepNeeds
from gac.models import row_attention
from gac.models.causal_lm import check_head, make_model
from gac.parallel import setup
from gac.parallel.collectives import run_on_all_ranks
from gac.parallel.setup import reshard
from gac.training.run_config import TrainConfig

from .forward import Forward
from .gradients import Gradients
from .packing_check import supports_packing

logger = logging.getLogger(__name__)


def loss_of(config: TrainConfig) -> Loss:
    """The run's loss; `loss.max_tokens` defaults to `rollouts.max_completion_length`.

    With rollouts from another engine, `rollouts.correction` is applied.
    """
    rollouts = config.rollouts
    longest = config.loss.max_tokens or rollouts.max_completion_length
    loss = config.method.loss(dataclasses.replace(config.loss, max_tokens=longest))
    from_reference = config.method.sampling(rollouts.num_generations).from_reference
    # the log-probs of a server are those at temperature 1 without truncation
    comparable = rollouts.temperature == 1 and rollouts.top_p == 1
    if rollouts.engine == "vllm" and comparable and not from_reference:
        spec = dataclasses.replace(
            loss.spec, correction=rollouts.correction, correction_max=rollouts.correction_max
        )
        loss = loss._replace(spec=spec)
    return loss


def load_policy(config: TrainConfig, accelerator: Accelerator) -> nn.Module:
    """The policy with the run's initial weights, prepared for training on this rank."""
    return _build_model(setup.prepare, config, accelerator)


def load_reference(config: TrainConfig, accelerator: Accelerator, kl: bool) -> nn.Module | None:
    """A frozen copy of the initial policy, or None if nothing needs it.

    Always None with adapters: the reference is then the model with its adapters disabled.
    kl: whether any step computes the KL.
    """
    sampling = config.method.sampling(config.rollouts.num_generations)
    needed = kl or sampling.from_reference or loss_of(config).reference
    if not needed or config.model.lora is not None:
        return None
    return _build_model(setup.prepare_frozen, config, accelerator)


def make_gradients(
    config: TrainConfig,
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase,
    model: nn.Module,
    reference: nn.Module | None,
    needs: StepNeeds,
) -> Gradients:
    """Build `Gradients`; `needs` is the union of the needs of all steps.

    Raises ConfigError if the loss or the model does not support the sketches that `needs` asks for.
    """
    if needs.sketch:
        _check_sketch(config, accelerator.unwrap_model(model))
    forward = Forward(
        accelerator,
        model,
        reference,
        config.rollouts.temperature,
        _micro_batches(config, model, reference),
        tokenizer.pad_token_id,
    )
    kl_sample_size = config.kl_sample_size and -(
        -config.kl_sample_size // accelerator.num_processes
    )
    return Gradients(forward, loss_of(config), kl_sample_size, averages=needs.average > 0)


def _check_sketch(config: TrainConfig, model: nn.Module) -> None:
    if loss_of(config).token is not None:
        raise ConfigError(
            f"signals: sketch requires the fused loss, which method {config.method.name!r} does "
            "not use; set method.signals: gradients"
        )
    if not model.plain_head:
        raise ConfigError(
            f"signals: sketch requires a plain linear head, which {type(model).__name__} does not "
            "have; set method.signals: gradients"
        )


def _micro_batches(config: TrainConfig, *models: nn.Module | None) -> MicroBatches:
    """Micro-batching of the run: packed if there is a token budget and every model supports it."""
    packed = config.max_tokens_per_micro_batch is not None
    for model in filter(None, models):
        if packed and not _supports_packing(model):
            packed = False
            logger.warning(
                "max_tokens_per_micro_batch=%s: this model does not keep packed rows separate; "
                "padding rows of similar length instead",
                config.max_tokens_per_micro_batch,
            )
        reshard(model)
    completions = config.rollouts.num_generations
    unit = config.method.sampling(completions).unit(completions)
    return MicroBatches(config.micro_batch_size, config.max_tokens_per_micro_batch, packed, unit)


def _supports_packing(model: nn.Module) -> bool:
    """Whether the model supports packing; if not, falls back to PyTorch's SDPA and tests again."""
    return supports_packing(model) or (row_attention.disable(model) and supports_packing(model))


def _build_model(
    prepare: Callable[..., nn.Module], config: TrainConfig, accelerator: Accelerator
) -> nn.Module:
    """Load the initial model on all ranks, in shards if the run is sharded, and `prepare` it."""
    loading = setup.sharded_loading(accelerator, config.parallel)
    model = run_on_all_ranks(lambda: make_model(config.model, config.seed, loading))
    may_pack = config.max_tokens_per_micro_batch is not None or config.micro_batch_size is None
    if may_pack and accelerator.device.type == "cpu":
        row_attention.enable(model)
    if loading is None:
        check_head(model)
    model = prepare(model, accelerator, config.parallel, config.mixed_precision, loading)
    if loading is not None:  # the check needs the weights of all ranks
        check_head(model)
        reshard(model)
    return model
