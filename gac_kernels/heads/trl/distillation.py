"""The divergence of TRL's DistillationTrainer in one pass, without logits.

The trainer takes its loss from one function, `_chunked_divergence_loss` of its module, which
`apply_fused_head` replaces. TRL's own computes the logits of both models twice, three times for the
Jensen-Shannon divergence; ours computes them once.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gac_kernels import fused_linear_divergence

HOOK = "_chunked_divergence_loss"


def distillation_module() -> ModuleType | None:
    """The module of TRL's trainer, or None if the installed version has no such loss."""
    try:
        import trl.trainer.distillation_trainer as module
    except ImportError:
        return None
    return module if hasattr(module, HOOK) else None


def divergence_loss(
    student_hidden_states: Tensor,
    teacher_hidden_states: Tensor,
    student_lm_head_weight: Tensor,
    teacher_lm_head_weight: Tensor,
    completion_mask: Tensor,
    beta: float,
    num_items_in_batch: Tensor | int | None = None,
    student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the loss, the sum of the student's entropies and the number of valid tokens.

    The arguments are those of TRL: hidden states [B, T, H], heads [V, H], and a mask [B, T] of the
    tokens with a loss. `beta` is 0 for forward KL, 1 for reverse KL, and otherwise the teacher's
    share in the mixture of the Jensen-Shannon divergence.
    """
    from trl.trainer.utils import maybe_gather_lm_head_ctx

    gather: Any = maybe_gather_lm_head_ctx  # of DeepSpeed's ZeRO-3; also takes None
    student = student_hidden_states, student_lm_head_weight, student_lm_head_bias
    teacher = teacher_hidden_states, teacher_lm_head_weight, teacher_lm_head_bias
    valid = completion_mask != 0
    count = valid.sum()
    if num_items_in_batch is None:
        divisor = count.clamp(min=1)
    else:
        divisor = torch.as_tensor(num_items_in_batch, device=count.device)
    with gather(*student[1:]), gather(*teacher[1:]):
        hidden, weight, bias = _operands(*student)
        teacher_hidden, teacher_weight, teacher_bias = _operands(*teacher)
        with torch.autocast(hidden.device.type, enabled=False):
            out = fused_linear_divergence(
                hidden,
                weight,
                teacher_hidden,
                teacher_weight,
                targets=torch.where(valid, 0, -100),
                divergence="forward_kl" if beta == 0 else "reverse_kl" if beta == 1 else "jsd",
                beta=beta if 0 < beta < 1 else 0.5,  # otherwise unused
                token_weights=(1 / divisor.float()).expand(valid.shape),
                temperature=temperature,
                bias=bias,
                teacher_bias=teacher_bias,
                logit_scale=student_logit_scale,
                softcap=student_final_logit_softcapping,
                teacher_logit_scale=teacher_logit_scale,
                teacher_softcap=teacher_final_logit_softcapping,
            )
    return out.loss, out.entropy.sum(), count


def _operands(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of a head in the dtype of the computation, gathered from FSDP's shards."""
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    return (
        hidden.to(dtype),
        _whole(weight).to(dtype),
        None if bias is None else _whole(bias).to(dtype),
    )


def _whole(parameter: Any) -> Tensor:
    """A parameter that FSDP2 may have sharded; its gradient is reduced in the backward pass."""
    sharded = hasattr(parameter, "full_tensor")
    return parameter.full_tensor() if sharded else parameter
