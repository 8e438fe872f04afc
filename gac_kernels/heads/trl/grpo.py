"""`FusedGRPOTrainer`: TRL's GRPO with our loss, computed in one pass without logits."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from gac_kernels import LossOutput, fused_linear_gac_loss
from gac_kernels.contract import IGNORE

from .head import (
    LIGER,
    HeadInputs,
    HeadOutputs,
    head_override,
    installed,
    loss_spec,
    missing_hook,
    times,
    with_gradient,
)

logger = logging.getLogger(__name__)
# methods of GRPOTrainer that the fused loss replaces
REPLACED = ("_compute_loss", "_get_per_token_logps_and_entropies", "get_off_policy_mask")
BY_SEQUENCE = ("grpo", "sapo")  # mean over sequences of the token mean
BY_ACCUMULATION_WINDOW = ("dapo", "cispo", "vespo")  # divided by the window's number of tokens


class Inexpressible(Exception):
    """A TRL option that the fused loss cannot express; the message names it."""


@dataclass
class FusedLoss:
    """One call of the fused GRPO loss inside TRL's head: its inputs and, afterwards, its result.

    B rollouts of at most K completion tokens. On a GPU, TRL passes only the hidden states of
    completion tokens, which are then a packed batch; elsewhere it passes those of all positions.
    Their number tells, so that nothing is read from the device.
    """

    completion_ids: Tensor
    """int64 [B, K]."""
    scored: Tensor
    """[B, K]; not 0 for completion tokens, whose log-probs TRL reads."""
    trained: Tensor | None
    """[B, K]; 0 for completion tokens without a loss, such as those of a tool; None: no such."""
    keywords: dict[str, Any]
    """Further arguments of `fused_linear_gac_loss`, for a padded batch."""
    positions: int = 0
    """Tokens of a padded row, prompt included, that have a predecessor."""
    out: LossOutput | None = None
    surrogate: Tensor | None = None
    """Has the gradient of the loss; depends on the model's output, which FSDP2 and DDP watch."""

    def __call__(self, inputs: HeadInputs) -> HeadOutputs:
        """Compute the loss; return log-probs, whose sum has its gradient, and entropies."""
        if len(inputs.hidden) == len(self.scored) * self.positions:
            return self._padded(inputs)
        return self._packed(inputs)

    def _packed(self, inputs: HeadInputs) -> HeadOutputs:
        (rows, length), targets = self.scored.shape, inputs.targets
        index = self.scored.flatten().nonzero_static(size=len(targets)).squeeze(1)
        width = max(length, 1)
        starts = torch.arange(0, (rows + 1) * width, width, device=index.device)
        offsets = torch.searchsorted(index, starts)  # scored tokens before each row, and of all

        def packed(x: Tensor) -> Tensor:
            return x.flatten(0, 1).index_select(0, index)

        if self.trained is not None:
            targets = targets.masked_fill(packed(self.trained) == 0, IGNORE)
        keywords = {
            name: packed(x) if isinstance(x, Tensor) and x.dim() >= 2 else x
            for name, x in self.keywords.items()
        }
        out = self._loss(inputs, inputs.hidden, targets, cu_seqlens=offsets, **keywords)
        return HeadOutputs(with_gradient(out.logps, out.loss), out.entropy)

    def _padded(self, inputs: HeadInputs) -> HeadOutputs:
        (rows, length), size = self.scored.shape, inputs.hidden.shape[-1]
        mask = self.scored if self.trained is None else self.scored * self.trained
        targets = self.completion_ids.masked_fill(mask == 0, IGNORE)
        hidden = inputs.hidden.view(rows, self.positions, size)[:, -length:]
        out = self._loss(inputs, hidden, targets, **self.keywords)
        logps = with_gradient(out.logps, out.loss, self.scored.sum().clamp(min=1))
        pad = functools.partial(torch.nn.functional.pad, pad=(self.positions - length, 0))
        return HeadOutputs(pad(logps).flatten(), pad(out.entropy).flatten())

    def _loss(
        self, inputs: HeadInputs, hidden: Tensor, targets: Tensor, **keywords: Any
    ) -> LossOutput:
        self.out = fused_linear_gac_loss(
            hidden,
            inputs.weight,
            targets,
            bias=inputs.bias,
            softcap=inputs.softcap,
            logit_scale=inputs.logit_scale,
            **keywords,
        )
        return self.out


class FusedGRPOMixin:
    """Computes GRPO's loss in one pass; must precede GRPOTrainer or its subclass in the bases.

    TRL computes its loss and metrics from detached log-probs, so their names and values are TRL's;
    the gradient comes from `fused_linear_gac_loss`. An option that the fused loss cannot express
    falls back to TRL's loss on top of the fused head, with one message that names the option.
    """

    _request: FusedLoss | None = None
    _reported: tuple[str, ...] = ()
    rollout_out: LossOutput | None = None
    """Output of the fused loss of the last micro-batch; None after a fallback to TRL's loss."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        if not isinstance(self, GRPOTrainer):
            raise TypeError(
                f"{type(self).__name__} is not a GRPOTrainer: FusedGRPOMixin computes only GRPO's "
                "loss; for other TRL trainers, call apply_fused_head()"
            )
        super().__init__(*args, **keywords)
        if getattr(self.args, "use_liger_kernel", False):
            raise ValueError(LIGER.format(type(self).__name__))

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        host: Any = super()
        self._request = request = None  # also after an error in the last micro-batch
        if torch.is_grad_enabled():
            try:
                self._check_host(host)
                self._request = request = self._fused_loss(inputs)
            except Inexpressible as reason:
                self._report(str(reason))
        loss = host._compute_loss(model, inputs)
        self.rollout_out = request.out if request else None
        surrogate = request.surrogate if request else None
        return loss if surrogate is None else with_gradient(loss, surrogate)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, *args: Any, **keywords: Any
    ) -> Any:
        host: Any = super()
        score = functools.partial(
            host._get_per_token_logps_and_entropies,
            *(model, input_ids, attention_mask, *args),
            **keywords,
        )
        if missing_hook():
            return score()
        request = self._request if torch.is_grad_enabled() else None
        if request is None:
            with installed():
                return score()
        request.positions = input_ids.shape[1] - 1
        with installed(), head_override(request):
            logps, entropy, *rest = score()
        if request.out is None:
            self._report("a model whose forward does not use TRL's LM head")
            return logps, entropy, *rest
        request.surrogate, logps = logps.sum(), logps.detach()
        if request.trained is not None:  # ratio 1 where there is no loss
            old = request.keywords["old_logps"]
            unread = torch.zeros_like(logps) if old is None else old
            logps = torch.where(request.trained == 0, unread, logps)
        return logps, entropy.detach(), *rest

    @staticmethod
    def _check_host(host: Any) -> None:
        """Raise Inexpressible if TRL lacks the fused head or one of `REPLACED` is overridden."""
        if reason := missing_hook():
            raise Inexpressible(reason)
        for name in REPLACED:
            method = getattr(host, name, None)
            function: Any = getattr(method, "__func__", method)
            if function is not getattr(GRPOTrainer, name, None):
                raise Inexpressible(
                    f"the loss of a subclass, {getattr(function, '__qualname__', name)}"
                )

    def _fused_loss(self: Any, inputs: dict[str, Any]) -> FusedLoss:
        """Convert TRL's loss of a micro-batch to a FusedLoss.

        Raises:
            Inexpressible: an option has no counterpart in the fused loss; the message names it.
        """
        if "pixel_values" in inputs:
            raise Inexpressible("images")
        scored, trained = inputs["completion_mask"], inputs.get("tool_mask")
        mask = scored if trained is None else scored * trained
        advantages, old = inputs["advantages"], inputs.get("old_per_token_logps")
        spec: dict[str, Any] = {"temperature": self.temperature, **self._policy(old is not None)}
        keywords: dict[str, Any] = {"old_logps": old}
        if self.beta != 0:
            if self.args.use_bias_correction_kl:
                spec["use_bias_correction_kl"] = True
            spec["kl_coef"] = self.beta
            keywords["ref_logps"] = inputs["ref_per_token_logps"]
        spec["rollout_reduction"] = "sequence" if self.loss_type in BY_SEQUENCE else "token"
        norm, weights = self._norm(inputs, mask), self._weights(inputs, mask, old)
        if self._entropy_bonus_enabled:
            spec["entropy_coef"], norm, weights = self._entropy_bonus(mask, norm, weights)
        keywords |= {
            "advantages": advantages.expand_as(mask) if advantages.dim() == 2 else advantages,
            "weights": weights,
            "rollout_norm": norm,
            "spec": loss_spec(**spec),
        }
        return FusedLoss(inputs["completion_ids"], scored, trained, keywords)

    def _policy(self: Any, off_policy: bool) -> dict[str, Any]:
        """The fields of `LossSpec` for the loss type and the ratio."""
        if self.top_entropy_quantile < 1:
            raise Inexpressible("top_entropy_quantile")
        spec: dict[str, Any] = {}
        if self.importance_sampling_level == "sequence":
            spec["importance_sampling_level"] = "sequence"
        low, high = self.epsilon_low, self.epsilon_high
        match self.loss_type:
            case "grpo" | "bnpo" | "dr_grpo" | "dapo" | "luspo":
                spec |= {"clip_low": low, "clip_high": high}
                if self.args.delta is not None:
                    if self.args.delta < 1 + high or self.args.delta <= 1:
                        raise Inexpressible(
                            f"delta={self.args.delta} below 1 + epsilon_high, or not above 1"
                        )
                    spec["dual_clip"] = self.args.delta
            case "cispo":
                spec |= {"policy_loss": "cispo", "clip_low": None, "clip_high": high - 1}
            case "sapo":
                taus = (self.args.sapo_temperature_pos, self.args.sapo_temperature_neg)
                spec |= {"policy_loss": "sapo", "sapo_tau": taus}
            case "vespo" if not off_policy:
                spec["policy_loss"] = "reinforce"
            case _:
                raise Inexpressible(f"loss_type={self.loss_type}")
        return spec

    def _weights(
        self: Any, inputs: dict[str, Any], mask: Tensor, old: Tensor | None
    ) -> Tensor | None:
        """Factors of the policy term, known before the forward pass."""
        if self.off_policy_mask_threshold is not None and (
            old is not None or "sampling_per_token_logps" in inputs
        ):
            raise Inexpressible("off_policy_mask_threshold")
        advantages = inputs["advantages"]
        if self.loss_type == "vespo":
            names = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
            return self.get_gamma_weights(
                advantages=advantages if advantages.dim() == 2 else advantages[:, None],
                log_ratio_per_token=torch.zeros(mask.shape, device=mask.device),
                mask=mask,
                importance_sampling_ratio=inputs.get("importance_sampling_ratio"),
                **{name: getattr(self.args, f"vespo_{name}") for name in names},
            ).expand(mask.shape)
        if self.use_vllm and self.vllm_importance_sampling_correction:
            return inputs["importance_sampling_ratio"].expand(mask.shape)
        return None

    def _norm(self: Any, inputs: dict[str, Any], mask: Tensor) -> float | Tensor:
        """The divisor of the loss, gradient accumulation included; 0 only without any token."""
        if self.loss_type in BY_ACCUMULATION_WINDOW:
            share = 1 / self.accelerator.num_processes
            if self.model.training:
                share *= _micro_batches(self) / self.args.steps_per_generation
            return times(inputs["num_items_in_batch"], share)
        if self.loss_type == "bnpo":
            return times(mask.sum(), _micro_batches(self))
        length = self.max_completion_length if self.loss_type == "dr_grpo" else 1
        return len(mask) * length * _micro_batches(self)

    def _entropy_bonus(
        self: Any, mask: Tensor, norm: float | Tensor, weights: Tensor | None
    ) -> tuple[float, float | Tensor, Tensor | None]:
        """The coefficient of TRL's bonus, the mean entropy of the tokens with a loss.

        Returns it with the divisor of the whole loss and the weights of the policy term. The fused
        loss has one divisor. It becomes that of the entropy, and the weights give the policy term
        its own; a KL term has no weights, so that the host has to read the number of tokens.
        """
        if self.loss_type in BY_SEQUENCE:
            raise Inexpressible(f"entropy_coef with loss_type={self.loss_type}")
        if self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target:
            return 0.0, norm, weights
        if self.loss_type == "bnpo":  # divides both by the number of tokens
            return self.entropy_coef, norm, weights
        tokens = times(mask.sum().clamp(min=1), _micro_batches(self))
        if self.beta != 0:
            return self.entropy_coef * float(norm) / float(tokens), norm, weights
        share = (tokens / norm).nan_to_num(posinf=0)  # no token at all
        weights = share.expand(mask.shape) if weights is None else share * weights
        return self.entropy_coef, tokens, weights.to(torch.float32)

    def _report(self: Any, option: str) -> None:
        if option not in self._reported:
            self._reported = (*self._reported, option)
            logger.warning(
                "%s: the fused loss does not support %s; using TRL's loss",
                type(self).__name__,
                option,
            )


def _micro_batches(trainer: Any) -> float:
    """The number of micro-batches over which TRL averages the loss."""
    return trainer.current_gradient_accumulation_steps if trainer.model.training else 1.0


class FusedGRPOTrainer(FusedGRPOMixin, GRPOTrainer):
    """GRPOTrainer whose loss is computed in one pass, without logits; see FusedGRPOMixin."""
