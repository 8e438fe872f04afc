"""Reference implementation of the loss: plain PyTorch, any float dtype, gradients by autograd.

Kernels, tests, benchmarks and docs are checked against these functions. Half-precision inputs are
computed in float32, float32 in float32, float64 in float64.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .contract import IGNORE, MAX_LOG_RATIO, DemoWeight, LossOutput, LossSpec
from .inputs import BatchInputs
from .sketch import HeadSketch, Sides, per_sequence
from .tokens import Tokens, TokenTerms, finish, plan


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The dtype used to compute with inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def token_logprobs(
    logits: Tensor,  # [..., V]
    targets: Tensor,  # int64 [...]; -100 = no loss
    *,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution; 0 where there is no loss."""
    live = (targets != IGNORE).reshape(-1).nonzero().squeeze(1)
    rows = logits.reshape(-1, logits.shape[-1]).index_select(0, live)
    rows, y = rows.to(arithmetic(logits.dtype)), targets.reshape(-1).index_select(0, live)
    logps, entropy, _ = row_statistics(rows, y, temperature)
    blank = torch.zeros(targets.numel(), dtype=rows.dtype, device=rows.device)
    logps, entropy = (blank.index_copy(0, live, x).view(targets.shape) for x in (logps, entropy))
    return logps, entropy


def row_statistics(
    rows: Tensor,  # [M, V]
    targets: Tensor,  # int64 [M], valid token ids
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """logps, entropy and logsumexp of rows / temperature, [M] each."""
    z = rows / temperature
    lse = z.logsumexp(-1)
    lse = torch.where(
        lse == math.inf, math.nan, lse
    )  # +inf logits are an error, not a token of probability 1
    logps = z.gather(-1, targets[:, None]).squeeze(-1) - lse
    finite = z.masked_fill(
        z == -math.inf, 0
    )  # a masked token (-inf) adds 0 log 0 = 0 to the entropy
    entropy = lse - ((z - lse[:, None]).exp() * finite).sum(-1)
    return logps, entropy, lse


def token_terms(logps: Tensor, entropy: Tensor, tokens: Tokens, spec: LossSpec) -> TokenTerms:
    """The per-token formulas: differentiable in `logps` and `entropy` ([N] each)."""
    demo, a = tokens.demo, tokens.advantages
    old = logps.detach() if tokens.old is None else tokens.old
    ratio = (logps - old).clamp(max=MAX_LOG_RATIO).exp()
    low = -math.inf if spec.clip_low is None else 1 - spec.clip_low
    high = math.inf if spec.clip_high is None else 1 + spec.clip_high
    free, bound = ratio * a, ratio.detach().clamp(low, high) * a
    clipped = free > bound
    policy = -torch.where(clipped, bound, free)
    if spec.dual_clip is not None:
        ceiling = -spec.dual_clip * a
        beyond = (a < 0) & (policy > ceiling)
        policy, clipped = torch.where(beyond, ceiling, policy), clipped | beyond

    on_rollout = tokens.live & ~demo
    kl = torch.zeros_like(logps)
    if tokens.ref is not None:
        # elsewhere exp(-logp) may overflow, and its gradient would be 0 * inf
        d = torch.where(on_rollout, tokens.ref - logps, 0)
        kl = {"k1": lambda: -d, "k2": lambda: d * d / 2, "k3": lambda: d.exp() - d - 1}[
            spec.kl_estimator
        ]()
    rollout = policy - spec.entropy_coef * entropy
    if spec.kl_coef != 0:
        rollout = rollout + spec.kl_coef * kl

    loss = torch.where(on_rollout, rollout, 0) + torch.where(
        tokens.live & demo, _demonstration(logps, a, spec), 0
    )
    return TokenTerms(
        logps,
        entropy,
        loss,
        torch.where(on_rollout, kl, 0).detach(),
        (clipped & on_rollout).to(logps.dtype),
    )


def _demonstration(logps: Tensor, advantages: Tensor, spec: LossSpec) -> Tensor:
    p = logps.exp()
    q = p.detach()
    match spec.demo_weight:
        case DemoWeight.ONE:
            return -logps
        case DemoWeight.P:
            return -q * logps
        case DemoWeight.PHI:
            return -q * (1 - q) * logps
        case DemoWeight.SHAPED:
            return -advantages * p / (p + spec.demo_shape)
        case DemoWeight.TRUST:
            return -p / q.clamp(min=spec.demo_shape)


def token_gradients(
    logps: Tensor, entropy: Tensor, tokens: Tokens, spec: LossSpec, wanted: bool
) -> tuple[TokenTerms, tuple[Tensor, Tensor] | None]:
    """The detached terms and, if wanted, the gradients of sum(tokens.scale * loss) with respect to
    logps and entropy.
    """
    with torch.enable_grad():
        leaves = logps.detach().requires_grad_(), entropy.detach().requires_grad_()
        terms = token_terms(*leaves, tokens, spec)
        total = (tokens.scale * terms.loss).sum()
    upstream = None
    if wanted:
        d_logps, d_entropy = torch.autograd.grad(total, leaves, materialize_grads=True)
        upstream = d_logps, d_entropy
    return TokenTerms(*(x.detach() for x in terms)), upstream


def loss_from_logprobs(
    logps: Tensor,
    entropy: Tensor | None,
    inputs: BatchInputs,
    spec: LossSpec,
    moments: bool = True,
) -> LossOutput:
    """See `gac_kernels.loss_from_logprobs`; no checks."""
    dtype = arithmetic(logps.dtype)
    tokens = plan(inputs, spec, dtype)

    def flat(x: Tensor) -> Tensor:
        """Flatten to [N] with 0 where there is no loss, so that a nan there reaches no result or
        gradient.
        """
        return torch.where(tokens.live, x.reshape(-1).to(dtype), 0)

    known = torch.zeros_like(logps) if entropy is None else entropy
    terms = token_terms(flat(logps), flat(known), tokens, spec)
    if entropy is None:
        terms = terms._replace(entropy=torch.where(tokens.live, math.nan, terms.entropy))
    return loss_output(tokens, terms, inputs.targets.shape, moments)


def loss_output(
    tokens: Tokens, terms: TokenTerms, shape: torch.Size, moments: bool = True
) -> LossOutput:
    """Build a LossOutput for targets of `shape` from terms [N], whose `loss` is differentiable."""
    found = finish(tokens, terms, moments)
    return LossOutput(
        loss=found.loss,
        rollout_loss=found.rollout_loss.detach(),
        demo_loss=found.demo_loss.detach(),
        kl=found.kl,
        clip_fraction=found.clip_fraction,
        logps=terms.logps.detach().view(shape),
        entropy=terms.entropy.detach().view(shape),
        moments=found.moments,
    )


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
) -> LossOutput:
    """See `gac_kernels.fused_gac_loss`; same arguments, no checks."""
    inputs = BatchInputs(
        targets, advantages, is_demo, mu, old_logps, ref_logps, cu_seqlens, rollout_norm, demo_norm
    )
    tokens = plan(inputs, spec, arithmetic(logits.dtype))
    logps, entropy = token_logprobs(logits, targets, temperature=spec.temperature)
    terms = token_terms(logps.view(-1), entropy.view(-1), tokens, spec)
    return loss_output(tokens, terms, targets.shape, moments)


def linear_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden [..., H] times weight [V, H], never rounded below float32."""
    dtype = arithmetic(hidden.dtype)
    logits = hidden.to(dtype) @ weight.to(dtype).T
    return logits if bias is None else logits + bias.to(dtype)


def fused_linear_gac_loss(
    hidden: Tensor,
    weight: Tensor,
    *args: Tensor,
    bias: Tensor | None = None,
    sketch: HeadSketch | None = None,
    **keywords: Any,
) -> LossOutput:
    """See `gac_kernels.fused_linear_gac_loss`; materializes all [N, V] logits."""
    logits = linear_logits(hidden, weight, bias)
    out = fused_gac_loss(logits, *args, **keywords)
    if sketch is None:
        return out
    return out._replace(sketch=_head_sketch(sketch, hidden, logits, args, keywords))


def _head_sketch(
    sketch: HeadSketch,
    hidden: Tensor,
    logits: Tensor,
    args: tuple[Tensor, ...],
    keywords: dict[str, Any],
) -> Tensor:
    """[S, k, k] from the dense gradient of the logits, with both projections as matrices."""
    spec = keywords.get("spec", LossSpec())
    inputs = {k: v for k, v in keywords.items() if k in BatchInputs._fields}
    tokens = plan(BatchInputs(*args, **inputs), spec, arithmetic(logits.dtype))
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        logps, entropy = token_logprobs(leaf, args[0], temperature=spec.temperature)
        terms = token_terms(logps.view(-1), entropy.view(-1), tokens, spec)
        (grad,) = torch.autograd.grad((tokens.scale * terms.loss).sum(), leaf)
    flat = grad.flatten(0, -2)
    projections = (
        sketch.vocabulary(flat.shape[1]),
        sketch.hidden_signs(hidden.shape[-1], torch.device("cpu")),
    )
    of_words, of_hidden = (x.to(flat) for x in projections)
    rows = hidden.detach().flatten(0, -2).to(flat).masked_fill(~tokens.live[:, None], 0)
    return per_sequence(Sides(flat @ of_words.T, rows @ of_hidden.T), tokens, spec, None)


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """See `gac_kernels.linear_token_logprobs`; materializes all [N, V] logits."""
    return token_logprobs(linear_logits(hidden, weight, bias), targets, temperature=temperature)
