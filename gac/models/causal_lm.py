"""Loads any causal language model of transformers, with a forward that exposes its LM head."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from gac.errors import ConfigError, import_extra
from gac.models.adapters import (
    check_adapted,
    copy_weight,
    may_be_adapted,
    untie_adapted,
    untie_if_different,
)
from gac.models.chat import end_of_turn
from gac.models.config import ALL_LINEAR, LoraConfig, ModelConfig
from gac.models.head import check_head, patch_forward
from gac.models.precision import set_compute_dtype
from gac.models.pretrained import (
    base_folder,
    check_safetensors,
    has_adapters,
    meta_model,
    read_model,
)
from gac.models.source import check_model, check_tokenizer, one_line_errors
from gac.parallel.loading import ShardedLoading

logger = logging.getLogger(__name__)
DROPOUT = re.compile(r"dropout|_pdrop|layerdrop")  # in keys of a model's configuration
# families in which peft accepts no adapters on `out_proj` and `conv1d`
MAMBA = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer, with the end tokens of the model as `model_stops`.

    They are the end of a turn in the chat template, and those of the model's generation config. EOS
    becomes its padding token if it has none.
    """
    key, name = check_tokenizer(config)
    with one_line_errors(key, name):
        tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"{key}={name!r}: the tokenizer has no EOS token: set its eos_token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    ends = None
    with contextlib.suppress(OSError):  # a model without a generation config
        ends = GenerationConfig.from_pretrained(base_folder(config.path)).eos_token_id
    ends = [ends] if isinstance(ends, int) else ends or []
    tokenizer.model_stops = [end_of_turn(tokenizer), *ends]
    return tokenizer


def load_model(config: ModelConfig, seed: int = 0) -> Any:
    """Load the PreTrainedModel (or peft's wrapper of it) with its head attached, in training mode.

    Args:
        config: which model, and how to load it.
        seed: seed for initializing new weights and adapters.
    """
    model = make_model(config, seed)
    check_head(model)
    return model


def make_model(
    config: ModelConfig,
    seed: int,
    loading: ShardedLoading | None = None,
    training: bool = False,
) -> Any:
    """`load_model` without `check_head`.

    training: with `model.master_weights`, trainable weights are float32.
    loading: keeps this rank's shard of each loaded weight; the model then holds placeholders.
    """
    check_model(config)
    compute = getattr(torch, config.dtype)
    masters = training and config.master_weights and compute != torch.float32
    # peft's adapters are float32 in any case
    weights = torch.float32 if masters and config.lora is None else compute
    keywords: dict[str, Any] = {"dtype": weights}
    if config.attention:
        keywords["attn_implementation"] = config.attention
    torch.manual_seed(seed)
    with one_line_errors(config.key, config.path, config.attention):
        keywords["config"] = _training_config(config)
        if config.safetensors_only and not config.random_init:
            check_safetensors(config.key, config.path)
        if config.random_init:
            model = AutoModelForCausalLM.from_config(**keywords)
        else:
            with loading or contextlib.nullcontext():
                model = read_model(config.key, config.path, loading is not None, **keywords)
            for name, weight in model.named_parameters() if loading is None else ():
                if not weight.isfinite().all():
                    raise ConfigError(
                        f"{config.key}={config.path!r}: the weight {name} contains nan or inf: "
                        "copy or download the model again"
                    )
    untie_if_different(model)
    patch_forward(model)
    if masters:
        set_compute_dtype(model, compute, by_autocast=loading is None)
    model = apply_training_options(model, config, loading).train()
    if training and has_adapters(config.path):  # transformers loads them frozen
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.requires_grad_(True)
    if not config.keep_dropout:
        _disable_noise(model, config.lora)
    return model


def _training_config(config: ModelConfig) -> Any:
    """The model's configuration, without dropout and router losses.

    Raises ConfigError unless the model is a causal language model.
    """
    model_config = AutoConfig.from_pretrained(base_folder(config.path))
    if type(model_config) not in AutoModelForCausalLM._model_mapping:
        raise ConfigError(
            f"{config.key}={config.path!r}: model type {model_config.model_type!r} is not a causal "
            "language model, the only kind that this trainer supports; give a decoder-only model"
        )
    quantized = getattr(model_config, "quantization_config", None)
    if quantized is not None:
        raise ConfigError(
            f"{config.key}={config.path!r}: the weights are quantized "
            f"({quantized.get('quant_method')}), and QLoRA is not supported: give the "
            "unquantized model, with model.lora and dtype: bfloat16 to save memory"
        )
    parts = {id(part): part for part in (model_config, model_config.get_text_config(decoder=True))}
    for part in parts.values():
        if getattr(part, "output_router_logits", False):
            part.output_router_logits = False
            logger.warning(
                "%s: output_router_logits is set, but the router's load-balancing loss is not part "
                "of the training loss: ignoring it",
                config.path,
            )
        noise = {
            name: value
            for name, value in vars(part).items()
            if DROPOUT.search(name) and isinstance(value, float) and value > 0
        }
        if noise and config.keep_dropout:
            logger.warning(
                "model.keep_dropout=true: training uses %s, but sampling does not, so the "
                "importance ratio and the KL contain noise",
                ", ".join(f"{name}={value:g}" for name, value in noise.items()),
            )
        for name in noise if not config.keep_dropout else ():
            setattr(part, name, 0.0)
    return model_config


def _disable_noise(model: nn.Module, lora: LoraConfig | None) -> None:
    """Put all modules in eval mode: a model's configuration cannot turn off all kinds of noise.

    Gradient checkpointing works in training mode only. The dropout of adapters has its own key.
    """
    for module in model.modules():
        adapter_dropout = lora is not None and lora.dropout > 0 and isinstance(module, nn.Dropout)
        module.training = (
            adapter_dropout or getattr(module, "gradient_checkpointing", False) is True
        )
    if lora is not None and lora.dropout > 0:
        logger.warning(
            "model.lora.dropout=%g: sampling has no dropout, so the importance ratio and the KL "
            "contain noise",
            lora.dropout,
        )


def load_meta_model(config: ModelConfig) -> Any:
    """The model on the meta device: without weight values or adapters."""
    return meta_model(config.path, dtype=getattr(torch, config.dtype))


def apply_training_options(
    model: Any, config: ModelConfig, loading: ShardedLoading | None = None
) -> Any:
    """Enable gradient checkpointing and add adapters, as `config` says; returns the model.

    loading: has the values of the model's weights, if they are placeholders.
    """
    if config.gradient_checkpointing:
        # newer releases of transformers 5 renamed the method
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        model.config.use_cache = False
    if config.lora is None:
        return model
    adapted = _add_lora(model, config.lora)
    check_adapted(model)
    untie_adapted(model, copy_weight if loading is None else loading.copy)
    return adapted


def _add_lora(model: Any, config: LoraConfig) -> Any:
    peft = import_extra("peft", "model.lora")
    targets = (
        list(config.target_modules)
        if isinstance(config.target_modules, tuple)
        else config.target_modules
    )
    special = [name for name, module in model.named_modules() if not may_be_adapted(name, module)]
    if model.config.model_type in MAMBA:
        special += ["out_proj", "conv1d"]
    try:
        with warnings.catch_warnings():
            # of adapters on a tied weight, which `untie_adapted` handles
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings")
            return peft.get_peft_model(
                model,
                peft.LoraConfig(
                    r=config.rank,
                    lora_alpha=config.alpha,
                    lora_dropout=config.dropout,
                    target_modules=targets,
                    exclude_modules=special if targets == ALL_LINEAR else None,
                    task_type="CAUSAL_LM",
                ),
            )
    except (ValueError, re.error) as error:
        linear = {
            n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)
        }
        raise ConfigError(
            f"model.lora.target_modules={targets!r}: {' '.join(str(error).split())[:200]}; use "
            f"{ALL_LINEAR}, or some of {', '.join(sorted(linear))}"
        ) from error
