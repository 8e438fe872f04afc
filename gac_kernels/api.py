"""The public calls: check the arguments, choose the backend, call.

Legend: N tokens, V vocabulary, H hidden size, B padded rows, T row length, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import backends, checks, reference
from .autograd import FusedLoss, TokenLogprobs, loss_output
from .contract import LossOutput, LossSpec
from .tokens import plan


def fused_gac_loss(
    logits: Tensor,
    targets: Tensor,
    advantages: Tensor,
    is_demo: Tensor,
    *,
    mu: float | Tensor = 0.5,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    spec: LossSpec = LossSpec(),  # noqa: B008 - frozen
    rollout_norm: float | Tensor | None = None,
    demo_norm: float | Tensor | None = None,
    moments: bool = True,
    overwrite: bool = False,
    backend: str = "auto",
) -> LossOutput:
    """The mixed loss (1 - mu) rollout_loss + mu demo_loss of a batch, and its statistics.

    Args:
        logits: [B, T, V], or packed [N, V]; float32, bfloat16 or float16, rows of any stride.
        targets: int64 [B, T] or [N], the token that each row of logits scores; -100 = no loss.
        advantages: [B] or [B, T]; packed: [S] or [N].
        is_demo: bool [B]; packed: [S]. True = demonstration.
        mu: weight of the demonstrations; a 0-d tensor is used where it lives.
        old_logps: like targets, log-probs of the sampling policy; None = on-policy.
        ref_logps: like targets, needed when `spec.kl_coef` is not 0.
        cu_seqlens: int32 [S + 1], where each packed sequence starts and the last one ends.
        spec: clip, KL, entropy, demonstration weight, reductions, temperature.
        rollout_norm, demo_norm: global count that divides the term; None = this batch's own.
        moments: False skips the statistics.
        overwrite: the gradient may take the logits' own storage; they are gone after the call.
        backend: "auto", "reference", "triton" or "native".

    Raises TypeError or ValueError naming the argument, RuntimeError for a backend that cannot run.
    Source: the paper's equations 1 to 9; arXiv 2402.03300 (GRPO), 2508.11408 (CHORD).
    """
    checks.rows("logits", logits, targets)
    checks.batch(
        logits, targets, advantages, is_demo, mu, old_logps, ref_logps, cu_seqlens, spec,
        rollout_norm, demo_norm,
    )  # fmt: skip
    chosen = backends.choose(backend, logits.device, logits.dtype)
    checks.values(targets, logits.shape[-1], cu_seqlens)
    batch = (targets, advantages, is_demo, mu, old_logps, ref_logps, cu_seqlens, spec,
             rollout_norm, demo_norm)  # fmt: skip
    if chosen.__name__.endswith(".reference"):
        names = ("mu", "old_logps", "ref_logps", "cu_seqlens", "spec", "rollout_norm", "demo_norm")
        keywords = dict(zip(names, batch[3:], strict=True))
        return reference.fused_gac_loss(logits, *batch[:3], moments=moments, **keywords)
    with torch.no_grad():
        tokens = plan(*batch)
    rows = logits if logits.dim() == 3 else logits[None]
    out = None
    if logits.requires_grad and torch.is_grad_enabled():
        out = rows.detach() if overwrite else torch.empty_like(rows)
    flat = FusedLoss.apply(rows, tokens, spec, chosen, moments, out)
    return loss_output(flat, targets.shape)


def token_logprobs(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, both differentiable.

    Args:
        logits: [B, T, V] or [N, V]; float32, bfloat16 or float16, rows of any stride.
        targets: int64 [B, T] or [N]; -100 gives 0 and no gradient.
        temperature: the logits are divided by it.
        backend: "auto", "reference", "triton" or "native".

    Returns (logps, entropy), float32, like targets; entropy in nats.
    """
    checks.rows("logits", logits, targets)
    checks.temperature(temperature)
    chosen = backends.choose(backend, logits.device, logits.dtype)
    checks.values(targets, logits.shape[-1])
    if chosen.__name__.endswith(".reference"):
        return reference.token_logprobs(logits, targets, temperature=temperature)
    rows = logits if logits.dim() == 3 else logits[None]
    logps, entropy = TokenLogprobs.apply(rows, targets.reshape(-1), temperature, chosen)
    return logps.view(targets.shape), entropy.view(targets.shape)
