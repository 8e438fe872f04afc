"""Loads any transformers causal LM, with a forward that exposes its LM head.

`attach_head(model)` lets `model(..., request=f)` return `f(head)`, where the head can compute the
fused loss from the hidden states without materializing the logits. The loss runs inside the model's
own forward, so that the hooks of DDP and FSDP work.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from gac.errors import ConfigError, import_extra
from gac.models.pretrained import TOKENIZERS, WEIGHTS, check_files, check_source, one_line_errors
from gac.models.row_attention import without_mask
from gac.models.weights import meta_model, read_model
from gac.parallel.sharded_loading import ShardedLoading
from gac_kernels import (
    LossOutput,
    fused_gac_loss,
    fused_linear_gac_loss,
    linear_token_logprobs,
    token_logprobs,
)

logger = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters through peft (needs the extra `lora`)."""

    rank: int = 16
    """Rank of the adapters."""
    alpha: int = 32
    """LoRA alpha; the adapters are scaled by alpha / rank."""
    dropout: float = 0.0
    """Dropout on the adapters' input."""
    targets: tuple[str, ...] | None = None
    """Names of the modules that get adapters; null: peft's choice for the model."""


@dataclass(frozen=True)
class ModelConfig:
    """Which model to train, and how to load it."""

    path: str = ""
    """A folder with a transformers model, or the name of one on the Hub."""
    tokenizer: str | None = None
    """Folder or name of the tokenizer; null: the model's."""
    dtype: str = "float32"
    """Dtype of the weights: float32 or bfloat16."""
    random_init: bool = False
    """Take only the configuration from `path` and initialize the weights randomly."""
    attention: str | None = None
    """transformers' attn_implementation, e.g. sdpa or flash_attention_2; null: its default."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward: less memory, more time."""
    lora: LoraConfig | None = None
    """Train adapters only; null: all weights."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: use one of {', '.join(DTYPES)}")


@dataclass
class Head:
    """Inputs of a loss from the last layer: hidden states and the head's weight, or logits."""

    hidden: Tensor | None  # [B, T, H]
    weight: Tensor | None = None  # [V, H]
    bias: Tensor | None = None  # [V]
    logits: Tensor | None = None  # [B, T, V]; for a model whose head is not plain linear

    def loss(self, targets: Tensor, *batch: Tensor, **keywords: Any) -> LossOutput:
        """`gac_kernels.fused_linear_gac_loss` on this head; same arguments after the weight."""
        if self.logits is not None:
            return fused_gac_loss(self.logits, targets, *batch, overwrite=True, **keywords)
        assert self.hidden is not None and self.weight is not None
        return fused_linear_gac_loss(
            self.hidden, self.weight, targets, *batch, bias=self.bias, **keywords
        )

    def packed(self) -> Head:
        """The same head over [B T, ...] tokens, for the packed layout of the loss."""
        flat = [None if x is None else x.flatten(0, 1) for x in (self.hidden, self.logits)]
        return Head(flat[0], self.weight, self.bias, flat[1])

    def detached(self) -> Head:
        """A detached copy, valid after the forward, when FSDP frees the gathered weights."""
        parts = (self.hidden, self.weight, self.bias, self.logits)
        return Head(*(None if x is None else x.detach().clone() for x in parts))

    def logprobs(self, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Log-probability of each target [B, T] and entropy, both differentiable."""
        if self.logits is not None:
            return token_logprobs(self.logits, targets, temperature=temperature)
        assert self.hidden is not None and self.weight is not None
        return linear_token_logprobs(
            self.hidden, self.weight, targets, bias=self.bias, temperature=temperature
        )


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer; EOS becomes its padding token if it has none."""
    key = "model.tokenizer" if config.tokenizer else "model.path"
    name = config.tokenizer or config.path
    check_source(key, name)
    remedy = "set model.tokenizer to a folder with one, or its name on the Hub"
    check_files(key, name, "tokenizer", remedy, *TOKENIZERS)
    with one_line_errors(key, name):
        tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"{key}={name!r}: the tokenizer has no EOS token: set its eos_token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
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


def make_model(config: ModelConfig, seed: int, loading: ShardedLoading | None = None) -> Any:
    """`load_model` without `check_head`.

    loading: keeps this rank's shard of each loaded weight; the model then holds placeholders.
    """
    check_source("model.path", config.path)
    remedy = "give a folder written by transformers' save_pretrained"
    check_files("model.path", config.path, "model", remedy, "config.json", "adapter_config.json")
    keywords: dict[str, Any] = {"dtype": DTYPES[config.dtype]}
    if config.attention:
        keywords["attn_implementation"] = config.attention
    torch.manual_seed(seed)
    if not config.random_init:
        remedy = "give a folder with weights, or set model.random_init=true"
        check_files("model.path", config.path, "weights", remedy, *WEIGHTS)
    with one_line_errors("model.path", config.path):
        if config.random_init:
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(config.path), **keywords
            )
        else:
            with loading or contextlib.nullcontext():
                model = read_model("model.path", config.path, loading is not None, **keywords)
    _patch_forward(model)
    return apply_training_options(model, config).train()


def load_meta_model(config: ModelConfig) -> Any:
    """The model on the meta device: without weight values and adapters."""
    return meta_model(config.path, dtype=DTYPES[config.dtype])


def apply_training_options(model: Any, config: ModelConfig) -> Any:
    """Enable gradient checkpointing and add adapters, as `config` says; returns the model."""
    if config.gradient_checkpointing:
        # newer releases of transformers 5 renamed the method
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        model.config.use_cache = False
    return model if config.lora is None else _add_lora(model, config.lora)


def _add_lora(model: Any, config: LoraConfig) -> Any:
    peft = import_extra("peft", "model.lora")
    model.enable_input_require_grads()  # needed by gradient checkpointing
    return peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            target_modules=list(config.targets) if config.targets else None,
            task_type="CAUSAL_LM",
        ),
    )


def attach_head(model: PreTrainedModel) -> bool:
    """Add the keyword `request` to a causal LM's forward.

    `model(input_ids, request=f)` calls `f` with a `Head` inside the forward, where FSDP has
    gathered the head's weight, and returns its result. Without `request` the forward is unchanged.
    Whether the head is a plain linear layer is tested on a few tokens; a model with a scaled or
    soft-capped head falls back to its logits, with a warning.

    Returns:
        Whether the head is a plain linear layer; also stored as `model.plain_head`.
    """
    _patch_forward(model)
    return check_head(model)


def _patch_forward(model: PreTrainedModel) -> None:
    """Add `request` to the model's forward. Call it before adding adapters or sharding.

    Call `check_head` afterwards.
    """
    original = model.forward

    # `generate` inspects the signature of the model's forward
    @functools.wraps(type(model).forward)
    def forward(
        self: PreTrainedModel,
        *args: Any,
        request: Callable[[Head], Any] | None = None,
        **keywords: Any,
    ) -> Any:
        if request is None:
            return original(*args, **keywords)
        with without_mask(keywords.get("cu_seq_lens_q") is not None):
            if not self.__dict__["plain_head"]:
                logits = original(*args, **keywords, use_cache=False).logits
                return request(Head(None, logits=logits))
            hidden = self.get_decoder()(*args, **keywords, use_cache=False).last_hidden_state
        head = self.get_output_embeddings()
        return request(Head(hidden, head.weight, head.bias))

    model.forward = types.MethodType(forward, model)
    plain = type(model.get_output_embeddings()) is nn.Linear and hasattr(model, "get_decoder")
    model.__dict__["plain_head"] = plain  # provisional, from the module types only


def check_head(model: nn.Module) -> bool:
    """Test whether a patched model's head is a plain linear layer, and store it as `plain_head`.

    See `attach_head`. Call it on every rank of a sharded model.
    """
    patched = _patched_model(model)
    plain = patched.__dict__["plain_head"] and _plain_head(model)
    patched.__dict__["plain_head"] = plain
    if not plain:
        logger.warning(
            "the head of %s is not a plain linear layer: the loss falls back to its logits, which "
            "need memory for [tokens, vocabulary]",
            type(patched).__name__.removeprefix("FSDP"),
        )
    return plain


def _patched_model(model: nn.Module) -> Any:
    """The patched model inside any wrappers."""
    return next(m for m in model.modules() if "plain_head" in m.__dict__)


@torch.no_grad()
def _plain_head(model: nn.Module) -> bool:
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    vocab_size = _patched_model(model).get_output_embeddings().out_features
    ids = torch.arange(4, device=device)[None] % vocab_size

    def linear(head: Head) -> Tensor:
        assert head.hidden is not None and head.weight is not None
        return functional.linear(head.hidden, head.weight, head.bias)

    logits = model(input_ids=ids, use_cache=False).logits
    expected = model(input_ids=ids, request=linear).to(logits.dtype)
    model.train(was_training)
    return torch.allclose(logits, expected, rtol=1e-3, atol=1e-5)


def stop_tokens(tokenizer: PreTrainedTokenizerBase, extra: Sequence[str] = ()) -> list[int]:
    """Token ids that end a response: EOS, and each string in `extra`, which must be one token."""
    ids = [tokenizer.eos_token_id]
    for text in extra:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) != 1:
            raise ConfigError(
                f"stop={text!r} is {len(tokens)} tokens: use a string that is a single token"
            )
        ids.append(tokens[0])
    return ids
