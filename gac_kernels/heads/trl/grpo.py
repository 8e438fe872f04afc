"""`FusedGRPOTrainer`: TRL's GRPO with our loss, computed in one pass without logits."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from gac_kernels import GradientFilter, LossOutput, LossSpec, fused_linear_gac_loss

from .head import LIGER, HeadInputs, HeadOutputs, head_override, installed, missing_hook

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

    B rollouts of at most K completion tokens.
    """

    targets: Tensor
    """int64 [B, K]; -100 without loss."""
    scored: Tensor
    """bool [B, K]: completion tokens whose log-probs TRL reads."""
    keywords: dict[str, Any]
    """Further arguments of `fused_linear_gac_loss`."""
    out: LossOutput | None = None
    surrogate: Tensor | None = None
    """Has the gradient of the loss; depends on the model's output, which FSDP2 and DDP watch."""

    def __call__(self, inputs: HeadInputs) -> HeadOutputs:
        """Compute the loss; return log-probs, each with the gradient of the loss, and entropies."""
        hidden, scored = inputs.hidden, self.scored
        rows, length = scored.shape
        compact = len(hidden) == int(scored.sum())  # TRL passes only tokens with a label
        if compact:
            padded = hidden.new_zeros(rows, length, hidden.shape[-1]).masked_scatter(
                scored[..., None], hidden
            )
        else:  # or every position of the prompt and the completion
            padded = hidden.view(rows, -1, hidden.shape[-1])[:, -length:]
        self.out = out = fused_linear_gac_loss(
            padded,
            inputs.weight,
            self.targets,
            bias=inputs.bias,
            softcap=inputs.softcap,
            logit_scale=inputs.logit_scale,
            **self.keywords,
        )
        logps = out.logps + (out.loss - out.loss.detach())
        if compact:
            return HeadOutputs(logps[scored], out.entropy[scored])
        before = (len(hidden) // rows - length, 0)
        pad = functools.partial(torch.nn.functional.pad, pad=before)
        return HeadOutputs(pad(logps).flatten(), pad(out.entropy).flatten())


class FusedGRPOMixin:
    """Computes GRPO's loss in one pass; must precede GRPOTrainer or its subclass in the bases.

    TRL computes its loss and metrics from detached log-probs, so their names and values are TRL's;
    the gradient comes from `fused_linear_gac_loss`. An option that the fused loss cannot express
    falls back to TRL's loss on top of the fused head, with one message that names the option.

    Args:
        gradient_filter: skip the vocabulary columns in which the gradient of the fused loss is
            negligible; `rollout_out.filter` reports it.
    """

    _request: FusedLoss | None = None
    _reported: tuple[str, ...] = ()
    gradient_filter: GradientFilter | None = None
    rollout_out: LossOutput | None = None
    """Output of the fused loss of the last micro-batch; None after a fallback to TRL's loss."""

    def __init__(
        self, *args: Any, gradient_filter: GradientFilter | None = None, **keywords: Any
    ) -> None:
        self.gradient_filter = gradient_filter
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
        return loss if surrogate is None else loss + (surrogate - surrogate.detach())

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
        with installed(), head_override(request):
            logps, entropy, *rest = score()
        if request.out is None:
            self._report("a model whose forward does not use TRL's LM head")
            return logps, entropy, *rest
        request.surrogate = logps.sum() / request.scored.sum().clamp(min=1)
        old = request.keywords["old_logps"]
        trained = request.targets != -100
        unread = torch.zeros_like(logps) if old is None else old  # ratio 1 where there is no loss
        return torch.where(trained, logps.detach(), unread), entropy.detach(), *rest

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
        scored = inputs["completion_mask"].bool()
        mask = scored & inputs["tool_mask"].bool() if "tool_mask" in inputs else scored
        advantages, old = inputs["advantages"], inputs.get("old_per_token_logps")
        spec: dict[str, Any] = {"temperature": self.temperature, **self._policy(old is not None)}
        keywords: dict[str, Any] = {"mu": 0.0, "old_logps": old}
        keywords["weights"] = self._weights(inputs, mask, old)
        if self.beta != 0:
            if self.args.use_bias_correction_kl:
                spec["use_bias_correction_kl"] = True
            spec["kl_coef"] = self.beta
            keywords["ref_logps"] = inputs["ref_per_token_logps"]
        norm = self._norm(inputs, mask)
        spec["rollout_reduction"] = "sequence" if self.loss_type in BY_SEQUENCE else "token"
        if self._entropy_bonus_enabled:
            spec["entropy_coef"] = self._entropy_bonus(mask, norm)
        return FusedLoss(
            inputs["completion_ids"].masked_fill(~mask, -100),
            scored,
            keywords
            | {
                "advantages": advantages.expand_as(mask) if advantages.dim() == 2 else advantages,
                "is_demo": torch.zeros(len(mask), dtype=torch.bool, device=mask.device),
                "rollout_norm": norm,
                "spec": LossSpec(**spec),
                "gradient_filter": self.gradient_filter,
            },
        )

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

    def _norm(self: Any, inputs: dict[str, Any], mask: Tensor) -> float:
        """The divisor of the loss, gradient accumulation included."""
        steps = self.current_gradient_accumulation_steps if self.model.training else 1.0
        if self.loss_type in BY_ACCUMULATION_WINDOW:
            tokens = (
                float(inputs["num_items_in_batch"].clamp(min=1)) / self.accelerator.num_processes
            )
            return (
                tokens * steps / self.args.steps_per_generation if self.model.training else tokens
            )
        if self.loss_type == "bnpo":
            return max(float(mask.sum()), 1.0) * steps
        length = self.max_completion_length if self.loss_type == "dr_grpo" else 1
        return len(mask) * length * steps

    def _entropy_bonus(self: Any, mask: Tensor, norm: float) -> float:
        """Convert TRL's coefficient of the mean entropy to that of the sum divided by `norm`."""
        if self.loss_type in BY_SEQUENCE:
            raise Inexpressible(f"entropy_coef with loss_type={self.loss_type}")
        active = not self.use_adaptive_entropy or (
            self._last_world_entropy <= self.args.entropy_target
        )
        steps = self.current_gradient_accumulation_steps if self.model.training else 1.0
        return active * self.entropy_coef * norm / (max(float(mask.sum()), 1.0) * steps)

    def _report(self: Any, option: str) -> None:
        if option not in self._reported:
            self._reported = (*self._reported, option)
            logger.warning(
                "%s: the fused loss does not support %s; using TRL's loss",
                type(self).__name__,
                option,
            )


class FusedGRPOTrainer(FusedGRPOMixin, GRPOTrainer):
    """GRPOTrainer whose loss is computed in one pass, without logits; see FusedGRPOMixin."""
