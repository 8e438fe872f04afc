"""The public calls: check the arguments, choose the backend, call.

Legend: N tokens, V vocabulary, H hidden size, B padded rows, T row length, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import backends, checks, ops, reference
from .autograd import FusedLinearLoss, FusedLoss, LinearLogprobs, TokenLogprobs, loss_output
from .contract import LossOutput, LossSpec
from .linear import Needs


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
        mu: weight of the demonstrations; a 0-d tensor is used where it lives. Under torch.compile
            use a tensor: a new number compiles anew.
        old_logps: like targets, log-probs of the sampling policy; None = on-policy.
        ref_logps: like targets, needed when `spec.kl_coef` is not 0.
        cu_seqlens: int32 [S + 1], where each packed sequence starts and the last one ends.
        spec: clip, KL, entropy, demonstration weight, reductions, temperature.
        rollout_norm, demo_norm: global count that divides the term; None = this batch's own.
        moments: False skips the statistics.
        overwrite: the gradient may take the logits' own storage; they are gone after the call.
            No effect on rows that share memory (an expanded tensor has no room for their
            gradients), nor under torch.compile, which plans its own memory.
        backend: "auto", "reference", "triton" or "native".

    Raises TypeError or ValueError naming the argument, RuntimeError for a backend that cannot run.
    Source: the paper's equations 1 to 9; arXiv 2402.03300 (GRPO), 2508.11408 (CHORD).
    """
    checks.rows("logits", logits, targets)
    checks.batch(
        logits, targets, advantages, is_demo, mu, old_logps, ref_logps, cu_seqlens, spec,
        rollout_norm, demo_norm,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        return ops.fused_loss(
            logits, None, None, targets, advantages, is_demo, mu, old_logps, ref_logps, cu_seqlens,
            rollout_norm, demo_norm, spec=spec, moments=moments, backend=backend,
            compute=logits.dtype,
        )  # fmt: skip
    chosen = backends.choose(backend, logits.device, logits.dtype)
    checks.values(targets, logits.shape[-1], cu_seqlens)
    if chosen.__name__.endswith(".reference"):
        return reference.fused_gac_loss(
            logits, targets, advantages, is_demo, mu=mu, old_logps=old_logps, ref_logps=ref_logps,
            cu_seqlens=cu_seqlens, spec=spec, rollout_norm=rollout_norm, demo_norm=demo_norm,
            moments=moments,
        )  # fmt: skip
    with torch.no_grad():
        tokens = chosen.plan(
            targets, advantages, is_demo, mu, old_logps, ref_logps, cu_seqlens, spec,
            rollout_norm, demo_norm,
        )  # fmt: skip
    rows = logits if logits.dim() == 3 else logits[None]
    out = None
    if logits.requires_grad and torch.is_grad_enabled():
        out = rows.detach() if overwrite and _apart(rows) else torch.empty_like(rows)
    flat = FusedLoss.apply(rows, tokens, spec, chosen, moments, out)
    return loss_output(flat, targets.shape)


def _apart(x: Tensor) -> bool:
    """Whether no two elements of `x` share their memory, as those of an expanded tensor do."""
    span = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride < span:
            return False
        span += stride * (size - 1)
    return True


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
    if torch.compiler.is_compiling():
        return ops.token_logprobs(logits, None, None, targets, temperature, backend, logits.dtype)
    chosen = backends.choose(backend, logits.device, logits.dtype)
    checks.values(targets, logits.shape[-1])
    if chosen.__name__.endswith(".reference"):
        return reference.token_logprobs(logits, targets, temperature=temperature)
    rows = logits if logits.dim() == 3 else logits[None]
    logps, entropy = TokenLogprobs.apply(rows, targets.reshape(-1), temperature, chosen)
    return logps.view(targets.shape), entropy.view(targets.shape)


def fused_linear_gac_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantages: Tensor,
    is_demo: Tensor,
    *,
    bias: Tensor | None = None,
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
    chunk_bytes: int | None = None,
) -> LossOutput:
    """`fused_gac_loss` of the logits hidden @ weight.T + bias, which never exist as a whole.

    Gradients are made in the forward (6 N H V FLOPs in all); rows without a loss enter no GEMM,
    rows whose gradient is known to be 0 the forward GEMM only, a frozen weight costs no GEMM.
    Under autocast the operands are rounded to its dtype and gradients reach float32 weights in
    float32. Needs a plain weight: under FSDP call it inside the module's forward.

    Args:
        hidden: [B, T, H], or packed [N, H]; float32, bfloat16 or float16, rows of any stride.
        weight: [V, H], hidden's dtype (any under autocast).
        bias: [V], or None.
        overwrite: accepted as in `fused_gac_loss`; there are no logits to overwrite.
        chunk_bytes: memory for the logits in flight; None = 128 MiB on a CPU, 960 MiB on a GPU.

    The other arguments, the result and the errors are those of `fused_gac_loss`.
    """
    compute = _check_head(hidden, weight, targets, bias, chunk_bytes)
    checks.batch(
        hidden, targets, advantages, is_demo, mu, old_logps, ref_logps, cu_seqlens, spec,
        rollout_norm, demo_norm,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        return ops.fused_loss(
            hidden, weight, bias, targets, advantages, is_demo, mu, old_logps, ref_logps,
            cu_seqlens, rollout_norm, demo_norm, spec=spec, moments=moments, backend=backend,
            compute=compute, chunk_bytes=chunk_bytes,
        )  # fmt: skip
    exact = reference.arithmetic(compute)
    chosen = backends.choose(backend, hidden.device, exact)
    checks.values(targets, weight.shape[0], cu_seqlens)
    with torch.no_grad():
        tokens = chosen.plan(
            targets, advantages, is_demo, mu, old_logps, ref_logps, cu_seqlens, spec,
            rollout_norm, demo_norm, exact,
        )  # fmt: skip
    learning = torch.is_grad_enabled()
    needs = Needs(*(x is not None and x.requires_grad and learning for x in (hidden, weight, bias)))
    flat = FusedLinearLoss.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, tokens, spec, chosen, moments, needs,
        compute, chunk_bytes,
    )  # fmt: skip
    return loss_output(flat, targets.shape)


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    backend: str = "auto",
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` of the logits hidden @ weight.T + bias, which never exist as a whole.

    The backward recomputes the logits of the rows that have an upstream gradient (8 N H V FLOPs).

    Args:
        hidden: [B, T, H] or [N, H]; float32, bfloat16 or float16, rows of any stride.
        weight: [V, H], hidden's dtype (any under autocast); bias: [V] or None.
        targets: int64 [B, T] or [N]; -100 gives 0 and no gradient.
        temperature: the logits are divided by it.
        chunk_bytes: as in `fused_linear_gac_loss`.

    Returns (logps, entropy), float32, like targets; entropy in nats.
    """
    compute = _check_head(hidden, weight, targets, bias, chunk_bytes)
    checks.temperature(temperature)
    if torch.compiler.is_compiling():
        return ops.token_logprobs(
            hidden, weight, bias, targets, temperature, backend, compute, chunk_bytes
        )
    chosen = backends.choose(backend, hidden.device, reference.arithmetic(compute))
    checks.values(targets, weight.shape[0])
    logps, entropy = LinearLogprobs.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, targets.reshape(-1), temperature,
        chosen, compute, chunk_bytes,
    )  # fmt: skip
    return logps.view(targets.shape), entropy.view(targets.shape)


def _check_head(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, chunk_bytes: int | None
) -> torch.dtype:
    """Check the linear inputs; the dtype of their product: autocast's, else hidden's."""
    checks.rows("hidden", hidden, targets)
    autocast = hidden.dtype != torch.float64 and torch.is_autocast_enabled(hidden.device.type)
    checks.head(weight, bias, hidden, autocast)
    if chunk_bytes is not None and chunk_bytes < 1:
        raise ValueError(f"chunk_bytes={chunk_bytes!r}: use a number of bytes > 0, or None")
    return torch.get_autocast_dtype(hidden.device.type) if autocast else hidden.dtype
