"""A loss inside the model's own forward, computed from the input of the LM head.

`attach_head(model)` lets `model(..., request=f)` return `f(head)`, where the head can compute the
fused loss from the hidden states without materializing the logits. The loss runs inside the model's
own forward, so that the hooks of DDP and FSDP work.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from gac.errors import ConfigError
from gac.models.row_attention import without_mask
from gac_kernels import (
    GradientFilter,
    LossOutput,
    TokenLossOutput,
    fused_gac_loss,
    fused_linear_gac_loss,
    fused_linear_token_loss,
    linear_token_logprobs,
    token_logprobs,
)

logger = logging.getLogger(__name__)
# function that replaces the LM head in the current forward; called with the head's input
_in_head: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar("_in_head", default=None)
MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
MULTIPLYING = ("hyperclovax",)  # `logits_scaling` of every other family is a divisor
DIVIDED_BEFORE_HEAD = ("minicpm3",)  # their `logits_scaling` divides the hidden states


@dataclass
class Head:
    """What a loss takes from the model: last hidden states and the head's weight, or logits."""

    hidden: Tensor | None  # [B, T, H]
    weight: Tensor | None = None  # [V, H]
    bias: Tensor | None = None  # [V]
    logits: Tensor | None = None  # [B, T, V]; for a model whose head is not linear
    scaling: tuple[float, float | None] = (1.0, None)
    """Scale and softcap of the logits; see `head_scaling`."""
    gradient_filter: GradientFilter | None = None

    def loss(self, targets: Tensor, *batch: Tensor, **keywords: Any) -> LossOutput:
        """Call `gac_kernels.fused_linear_gac_loss` with this head and the given arguments."""
        if self.logits is not None:
            return fused_gac_loss(self.logits, targets, *batch, overwrite=True, **keywords)
        assert self.hidden is not None and self.weight is not None
        keywords |= self._linear_keywords()
        return fused_linear_gac_loss(self.hidden, self.weight, targets, *batch, **keywords)

    def packed(self) -> Head:
        """This head with dimensions B and T flattened into one, for the loss's packed layout."""
        flat = [None if x is None else x.flatten(0, 1) for x in (self.hidden, self.logits)]
        return replace(self, hidden=flat[0], logits=flat[1])

    def detached(self) -> Head:
        """A detached copy, which stays valid after the forward, although FSDP frees the weights."""
        parts = {name: getattr(self, name) for name in ("hidden", "weight", "bias", "logits")}
        copies = {name: None if x is None else x.detach().clone() for name, x in parts.items()}
        return replace(self, **copies)

    def logprobs(self, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Log-probability of each target [B, T] and entropy, both differentiable."""
        if self.logits is not None:
            logps, entropy = token_logprobs(self.logits, targets, temperature=temperature)
            return logps, entropy
        assert self.hidden is not None and self.weight is not None
        keywords = {"temperature": temperature, **self._linear_keywords()}
        logps, entropy = linear_token_logprobs(self.hidden, self.weight, targets, **keywords)
        return logps, entropy

    def token_loss(
        self, targets: Tensor, function: Callable[..., Tensor], *inputs: Tensor, temperature: float
    ) -> TokenLossOutput:
        """Call `gac_kernels.fused_linear_token_loss`; the head must have hidden states."""
        assert self.hidden is not None and self.weight is not None
        keywords = {"temperature": temperature, **self._linear_keywords()}
        arguments = self.hidden, self.weight, targets, function
        return fused_linear_token_loss(*arguments, *inputs, **keywords)

    def scaled(self, outputs: Tensor) -> Tensor:
        """Logits from the outputs of the linear layer."""
        scale, softcap = self.scaling
        logits = outputs * scale
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def _linear_keywords(self) -> dict[str, Any]:
        scale, softcap = self.scaling
        return {
            "bias": self.bias,
            "logit_scale": scale,
            "softcap": softcap,
            "gradient_filter": self.gradient_filter,
        }


def head_scaling(config: Any) -> tuple[float, float | None]:
    """(scale, softcap) of a model's logits, read from its configuration.

    The logits are softcap * tanh(scale * x / softcap), or scale * x without a softcap, where x is
    the output of the LM head.
    """
    config = config.get_text_config(decoder=True)
    scale = 1.0
    for name in MULTIPLIERS:
        scale *= _number(config, name) or 1.0
    if config.model_type not in DIVIDED_BEFORE_HEAD and (
        value := _number(config, "logits_scaling")
    ):
        scale = scale * value if config.model_type in MULTIPLYING else scale / value
    return scale, _number(config, "final_logit_softcapping") or None  # 0 means none


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) else None


def attach_head(model: PreTrainedModel) -> bool:
    """Add the keyword `request` to a causal LM's forward.

    `model(input_ids, request=f)` calls `f` with a `Head` inside the forward, where FSDP has
    gathered the head's weight, and returns its result. Without `request` the forward is unchanged.
    The scale and the softcap of the logits are read from the configuration and then verified; a
    model that transforms its logits in another way falls back to a loss on its logits, with a
    warning.

    Returns:
        Whether the loss is computed from the hidden states; also stored as `model.plain_head`.

    Raises:
        ConfigError: the model is not causal.
    """
    patch_forward(model)
    return check_head(model)


def patch_forward(model: PreTrainedModel) -> None:
    """Add the keyword `request` to the model's forward.

    Do this before adding adapters or sharding the model; call `check_head` afterwards.
    """
    original, module = model.forward, model.get_output_embeddings()
    scaling = head_scaling(model.config)

    # `generate` inspects the signature of the model's forward
    @functools.wraps(type(model).forward)
    def forward(
        self: PreTrainedModel,
        *args: Any,
        request: Callable[[Head], Any] | None = None,
        **keywords: Any,
    ) -> Any:
        with autocast(self):
            if request is None:
                return original(*args, **keywords)
            with without_mask(keywords.get("cu_seq_lens_q") is not None):
                if not self.__dict__["plain_head"]:
                    logits = original(*args, **keywords, use_cache=False).logits
                    return request(Head(None, logits=logits))
                hidden = _head_input(original, *args, **keywords, use_cache=False)
            head = self.get_output_embeddings()
            columns = self.__dict__.get("gradient_filter")
            return request(Head(hidden, head.weight, head.bias, None, scaling, columns))

    model.forward = types.MethodType(forward, model)
    linear = type(module) is nn.Linear
    if linear:
        _patch_head(module)
    model.__dict__["plain_head"] = linear  # provisional, from the module's type only


def autocast(model: nn.Module) -> AbstractContextManager[Any]:
    """The precision in which a patched model computes; inside it, cast weights are cached."""
    dtype = next((d for m in model.modules() if (d := m.__dict__.get("autocast"))), None)
    device = next(model.parameters()).device.type
    return nullcontext() if dtype is None else torch.autocast(device, dtype)


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The dtype in which a patched model multiplies; its weights may have a higher precision."""
    patched = _patched_model(model)
    return patched.__dict__.get("compute_dtype") or patched.dtype


def set_compute_dtype(model: nn.Module, dtype: torch.dtype, by_autocast: bool = True) -> None:
    """Let a patched model multiply in `dtype`; FSDP casts the weights itself, without autocast."""
    patched = _patched_model(model)
    patched.__dict__["compute_dtype"] = dtype
    patched.__dict__["autocast"] = dtype if by_autocast else None


def set_gradient_filter(model: nn.Module, gradient_filter: GradientFilter | None) -> None:
    """Let the losses of a patched model filter their gradient.

    Raises ConfigError if the model does not have a plain linear head.
    """
    patched = _patched_model(model)
    if gradient_filter is not None and not patched.plain_head:
        raise ConfigError(
            f"gradient_filter={gradient_filter!r}: {type(patched).__name__} does not have a plain "
            "linear head; remove the key"
        )
    patched.__dict__["gradient_filter"] = gradient_filter


def _patch_head(module: nn.Linear) -> None:
    """Let `_in_head` replace the computation of the LM head."""
    original = type(module).forward  # not of the instance: a copy of the model has its own weight

    def forward(self: nn.Linear, hidden: Tensor) -> Tensor:
        replacement = _in_head.get()
        return original(self, hidden) if replacement is None else replacement(hidden)

    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign] # on purpose


def _head_input(forward: Callable[..., Any], *args: Any, **keywords: Any) -> Tensor:
    """The input of the LM head in `forward`; the head itself is not computed."""
    inputs: list[Tensor] = []

    def capture(hidden: Tensor) -> Tensor:
        inputs.append(hidden)
        return hidden.new_empty(*hidden.shape[:-1], 0)  # empty: what follows the head costs nothing

    token = _in_head.set(capture)
    try:
        forward(*args, **keywords)
    finally:
        _in_head.reset(token)
    (hidden,) = inputs
    return hidden


def check_head(model: nn.Module) -> bool:
    """Verify that a patched model is causal, and find out whether its LM head is plain.

    See `attach_head`. Stores and returns `plain_head`. Call it on every rank of a sharded model.
    """
    patched = _patched_model(model)
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            _check_causal(model, patched)
            plain = patched.__dict__["plain_head"] and _verified_head(model, patched)
    except ConfigError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        problem = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model type {patched.config.model_type!r} does not work as a causal language model of "
            f"text ({type(error).__name__}: {problem}); give a decoder-only language model"
        ) from error
    finally:
        for module in training:
            module.training = True
    patched.__dict__["plain_head"] = plain
    if not plain:
        logger.warning(
            "the head of %s is not a plain linear layer: the loss is computed from the full "
            "[tokens, vocabulary] logits, which requires more memory",
            type(patched).__name__.removeprefix("FSDP"),
        )
    return plain


def _patched_model(model: nn.Module) -> Any:
    """The patched model inside any wrappers."""
    return next(m for m in model.modules() if "plain_head" in m.__dict__)


def _rounding(model: nn.Module) -> float:
    """Largest relative difference that counts as rounding in a patched model."""
    dtype = model.__dict__.get("compute_dtype") or model.dtype
    return 1e-4 if dtype == torch.float32 else 2e-2


def _check_causal(model: nn.Module, patched: Any) -> None:
    """Raise ConfigError if the logits of a token depend on later tokens."""
    ids = torch.arange(4, device=next(model.parameters()).device)[None]
    other = ids.clone()
    other[0, -1] = ids[0, 0]
    first, second = (
        model(input_ids=x, use_cache=False).logits[0, :-1].float() for x in (ids, other)
    )
    scale = first.abs().max()
    if (first - second).abs().max() > scale * _rounding(patched):
        raise ConfigError(
            f"model type {patched.config.model_type!r} is an encoder: its output for a token "
            "depends on later tokens; give a decoder-only language model"
        )


def _verified_head(model: nn.Module, patched: Any) -> bool:
    """Whether the logits are the output of the LM head, transformed as the configuration says.

    The head's output is replaced by numbers of all magnitudes that logits can have, so that a
    softcap is detected even if this model's own logits are small.
    """
    ids = torch.arange(4, device=next(model.parameters()).device)[None]
    ramps: list[Tensor] = []

    def ramp(hidden: Tensor) -> Tensor:
        size = (*hidden.shape[:-1], patched.get_output_embeddings().out_features)
        values = torch.linspace(-300, 300, size[-1], device=hidden.device, dtype=hidden.dtype)
        ramps.append(values.expand(size))
        return values.repeat(*size[:-1], 1)

    token = _in_head.set(ramp)
    try:
        logits = model(input_ids=ids, use_cache=False).logits.float()
    finally:
        _in_head.reset(token)
    if len(ramps) != 1 or ramps[0].shape != logits.shape:
        return False
    expected = Head(None, scaling=head_scaling(patched.config)).scaled(ramps[0].float())
    if not torch.allclose(logits, expected, rtol=_rounding(patched)):
        return False
    try:
        return bool(model(input_ids=ids, request=lambda head: head.hidden.shape[:2] == ids.shape))
    except (IndexError, RuntimeError):  # code after the head needs the logits
        return False
