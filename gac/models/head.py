"""The input of a causal LM's head: the losses are computed from it, without the logits.

`run_head(model, ...)` returns a `Head`, which computes the fused losses from the hidden states,
without materializing the logits.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from gac.errors import ConfigError
from gac_kernels import (
    DivergenceOutput,
    LossOutput,
    TokenLossOutput,
    fused_gac_loss,
    fused_linear_divergence,
    fused_linear_gac_loss,
    fused_linear_token_loss,
    linear_token_logprobs,
    token_logprobs,
)
from gac_kernels.heads.transformers import Record
from gac_kernels.projection import Projection

from .precision import autocast, compute_dtype, patched_model
from .row_attention import without_mask

logger = logging.getLogger(__name__)
LOGIT_ROWS = 512  # rows of given logits that are copied at once
# whether the LM head of the current forward only records what the model does with its logits
_recording = ContextVar("_recording", default=False)


@dataclass
class Head:
    """Inputs of a loss from the model: last hidden states and the head's weight, or logits."""

    hidden: Tensor | None  # [B, T, H]
    weight: Tensor | None = None  # [V, H]
    bias: Tensor | None = None  # [V]
    logits: Tensor | None = None  # [B, T, V]; for a model whose head is not linear
    scaling: tuple[float, float | None] = (1.0, None)
    """Scale and softcap: z = softcap * tanh(scale * x / softcap), or scale * x without a softcap,
    where z are the logits and x is the output of the linear layer."""
    autocast: torch.dtype | None = None
    """Dtype of autocast in the forward pass; None: autocast was off."""

    def loss(self, targets: Tensor, *batch: Tensor, **keywords: Any) -> LossOutput:
        """The fused loss, with the arguments of `gac_kernels.fused_linear_gac_loss`.

        targets: [B, T], or [N] for the packed layout.
        """
        if self.logits is not None:
            logits = self.logits.view(*targets.shape, -1)
            return fused_gac_loss(logits, targets, *batch, overwrite=True, **keywords)
        return self._linear(fused_linear_gac_loss, targets, *batch, **keywords)

    def logprobs(self, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Log-probability of each target [B, T] and entropy, both differentiable."""
        if self.logits is not None:
            logps, entropy = token_logprobs(self.logits, targets, temperature=temperature)
            return logps, entropy
        return self._linear(linear_token_logprobs, targets, temperature=temperature)[:2]

    @torch.no_grad()
    def top_logprobs(
        self, positions: Tensor, k: int, temperature: float = 1.0, vocabulary: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probs [M, K] and ids [M, K] of the `k` most probable tokens: 2 M H V FLOPs.

        Args:
            positions: int64 [M], indices into the flattened positions of the batch.
            k: K, at most V.
            temperature: the logits are divided by it.
            vocabulary: number of tokens that may follow, the first ones; None: all V.
        """
        logps = torch.empty(len(positions), k, device=positions.device)
        ids = torch.empty_like(logps, dtype=torch.int64)
        start = 0
        for block in self._logit_blocks(positions):
            scaled = self.scaled(block[:, :vocabulary]) / temperature
            top, span = scaled.topk(k), slice(start, start + len(block))
            logps[span] = top.values - scaled.logsumexp(-1, keepdim=True)
            ids[span] = top.indices
            start += len(block)
        return logps, ids

    def _logit_blocks(self, positions: Tensor) -> Iterator[Tensor]:
        """Outputs [., V] of the linear layer at `positions` [M], in float32 or better."""
        if self.logits is not None:
            for part in positions.split(LOGIT_ROWS):
                yield self.logits.flatten(0, 1)[part].float()
            return
        assert self.hidden is not None
        assert self.weight is not None
        rows = self.hidden.flatten(0, 1)[positions]
        projection = Projection(self.weight, self.bias, self.autocast or rows.dtype)
        for part in projection.operand(rows).split(projection.block):
            yield projection.logits(part)

    def token_loss(
        self, targets: Tensor, function: Callable[..., Tensor], *inputs: Tensor, temperature: float
    ) -> TokenLossOutput:
        """Call `gac_kernels.fused_linear_token_loss`; the head must have hidden states."""
        return self._linear(
            fused_linear_token_loss, targets, function, *inputs, temperature=temperature
        )

    def divergence(
        self, targets: Tensor, teacher: Head, divergence: str, **keywords: Any
    ) -> DivergenceOutput:
        """The divergence from a teacher's distributions, by `fused_linear_divergence`.

        targets: [B, T]; -100 = no loss. teacher: with hidden states of the same positions. A longer
        vocabulary of its head is cut: its padding.
        """
        assert self.weight is not None
        assert teacher.hidden is not None
        assert teacher.weight is not None
        size = len(self.weight)
        operands = teacher.hidden.view(*targets.shape, -1), teacher.weight[:size]
        scale, softcap = teacher.scaling

        def function(hidden: Tensor, weight: Tensor, targets: Tensor, **given: Any) -> Any:
            return fused_linear_divergence(hidden, weight, *operands, targets=targets, **given)

        return self._linear(
            function,
            targets,
            divergence=divergence,
            teacher_bias=None if teacher.bias is None else teacher.bias[:size],
            teacher_logit_scale=scale,
            teacher_softcap=softcap,
            **keywords,
        )

    def scaled(self, outputs: Tensor) -> Tensor:
        """Logits from the outputs of the linear layer."""
        scale, softcap = self.scaling
        logits = outputs * scale
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def _linear(
        self, function: Callable[..., Any], targets: Tensor, *arguments: Any, **keywords: Any
    ) -> Any:
        """A function of `gac_kernels` of these hidden states and this weight."""
        assert self.hidden is not None
        hidden, (scale, softcap) = self.hidden.view(*targets.shape, -1), self.scaling
        keywords |= {"bias": self.bias, "logit_scale": scale, "softcap": softcap}
        on = self.autocast is not None
        with torch.autocast(hidden.device.type, dtype=self.autocast, enabled=on):
            return function(hidden, self.weight, targets, *arguments, **keywords)


def run_head(model: nn.Module, **inputs: Any) -> Head:
    """Run a patched model, or a wrapper of one, up to its LM head."""
    x, scaling, dtype = model(**inputs, until_head=True)
    if scaling is None:
        return Head(None, logits=x)
    patched = patched_model(model)
    layer = patched.get_output_embeddings()
    linear = Record(((x, layer, 1.0),), dtype).linear()  # gathers weights that are sharded
    assert linear is not None  # without operations
    _, weight, keywords = linear
    return Head(x, weight, bias=keywords["bias"], logits=None, scaling=scaling, autocast=dtype)


def attach_head(model: PreTrainedModel) -> bool:
    """Let `run_head` run a causal LM.

    The model's own forward is recorded: what it does with its logits shows their scale and their
    softcap. A model that transforms its logits in another way falls back to a loss on its logits,
    with a warning.

    Returns:
        Whether the loss is computed from the hidden states; also stored as `model.plain_head`.

    Raises:
        ConfigError: the model is not causal.
    """
    patch_forward(model)
    return check_head(model)


def patch_forward(model: PreTrainedModel) -> None:
    """Add the keyword `until_head` to the model's forward.

    `model(..., until_head=True)` returns the input of the LM head, the scaling of the logits (see
    `Head`) and the dtype of autocast; or, if the head is not plain, the logits, None and None. Do
    this before adding adapters or sharding the model; call `check_head` afterwards.
    """
    original, module = model.forward, model.get_output_embeddings()

    # `generate` inspects the signature of the model's forward
    @functools.wraps(type(model).forward)
    def forward(
        self: PreTrainedModel, *args: Any, until_head: bool = False, **keywords: Any
    ) -> Any:
        with autocast(self):
            if not until_head:
                return original(*args, **keywords)
            token = _recording.set(self.__dict__["plain_head"])
            try:
                with without_mask(keywords.get("cu_seq_lens_q") is not None):
                    logits = original(*args, **keywords, use_cache=False).logits
            finally:
                _recording.reset(token)
        linear = logits.linear() if isinstance(logits, Record) else None
        if linear is None:
            return logits.full() if isinstance(logits, Record) else logits, None, None
        hidden, _, scaling = linear
        return hidden, (scaling["logit_scale"], scaling["softcap"]), logits.autocast

    model.forward = types.MethodType(forward, model)
    linear = type(module) is nn.Linear
    if linear:
        _patch_head(module)
    model.__dict__["plain_head"] = linear  # provisional, from the module's type only


def _patch_head(module: nn.Linear) -> None:
    """Let the LM head return a `Record` in place of logits while `_recording`."""
    original = type(module).forward  # not of the instance: a copy of the model has its own weight

    def forward(self: nn.Linear, hidden: Tensor) -> Any:
        if not _recording.get():
            # cast for TRL's cast_lm_head_to_fp32; contiguous because `generate` passes the last
            # token's slice of the prompt, on which oneDNN's bfloat16 product is 300 times slower
            return original(self, hidden.to(self.weight.dtype).contiguous())
        kind = hidden.device.type
        on = torch.is_autocast_enabled(kind)
        return Record(((hidden, self, 1.0),), torch.get_autocast_dtype(kind) if on else None)

    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign] # on purpose


def check_head(model: nn.Module) -> bool:
    """Verify that a patched model is causal, and find out whether its LM head is plain.

    See `attach_head`. Stores and returns `plain_head`. Call it on every rank of a sharded model.
    """
    patched = patched_model(model)
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            ids = torch.arange(4, device=next(model.parameters()).device)[None]
            _check_causal(model, ids)
            plain = run_head(model, input_ids=ids).logits is None
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


def _check_causal(model: nn.Module, ids: Tensor) -> None:
    """Raise ConfigError if the logits of a token depend on later tokens."""
    other = ids.clone()
    other[0, -1] = ids[0, 0]
    first, second = (
        model(input_ids=x, use_cache=False).logits[0, :-1].float() for x in (ids, other)
    )
    rounding = 1e-4 if compute_dtype(model) == torch.float32 else 2e-2
    if (first - second).abs().max() > first.abs().max() * rounding:
        raise ConfigError(
            f"model type {patched_model(model).config.model_type!r} is an encoder: its output for "
            "a token depends on later tokens; give a decoder-only language model"
        )
