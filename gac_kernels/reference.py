"""Reference implementation of the loss: plain PyTorch, any float dtype, gradients by autograd.

Kernels, tests, benchmarks and docs are checked against these functions. Half-precision inputs are
computed in float32, float32 in float32, float64 in float64.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .contract import IGNORE, MAX_LOG_RATIO, MORE_OUTPUTS, DemoWeight, LossOutput, LossSpec
from .inputs import BatchInputs
from .sketch import HeadSketch, SketchFactors, per_sequence
from .tokens import Tokens, TokenTerms, plan, reduce, token_factor, with_factors


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the arithmetic on inputs of `dtype`: float32 or better."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def token_logprobs(
    logits: Tensor,  # [..., V]
    targets: Tensor,  # int64 [...]; -100 = no loss
    *,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    outputs: Sequence[str] = (),
) -> tuple[Tensor, ...]:
    """See `gac_kernels.token_logprobs`; same arguments, no checks."""
    live = (targets != IGNORE).reshape(-1).nonzero().squeeze(1)
    rows = logits.reshape(-1, logits.shape[-1]).index_select(0, live)
    rows, y = rows.to(compute_dtype(logits.dtype)), targets.reshape(-1).index_select(0, live)
    temperature, softcap = fold_scale(logit_scale, temperature, softcap)
    logps, entropy, _, *more = row_statistics(rows, y, temperature, softcap, bool(outputs))
    zeros = torch.zeros(targets.numel(), dtype=rows.dtype, device=rows.device)

    def spread(x: Tensor) -> Tensor:
        return zeros.to(x.dtype).index_copy(0, live, x).view(targets.shape)

    named = dict(zip(MORE_OUTPUTS, more, strict=False))
    return spread(logps), spread(entropy), *(spread(named[name]) for name in outputs)


def fold_scale(
    logit_scale: float, temperature: float, softcap: float | None
) -> tuple[float, float | None]:
    """The temperature and softcap that give the same logits without `logit_scale`."""
    return temperature / logit_scale, None if softcap is None else softcap / logit_scale


def scale_logits(x: Tensor, temperature: float, softcap: float | None) -> Tensor:
    """Compute softcap * tanh(x / softcap) / temperature; infinities are not capped."""
    if softcap is not None:
        x = torch.where(x.isinf(), x, softcap * torch.tanh(x / softcap))
    return x / temperature


def cap_slope(capped: Tensor, softcap: float) -> Tensor:
    """The derivative of `scale_logits` at temperature 1, from its result; 0 at infinities."""
    return 1 - (capped / softcap).masked_fill(capped.isinf(), 1) ** 2


def row_statistics(
    rows: Tensor,  # [M, V]
    targets: Tensor,  # int64 [M], valid token ids
    temperature: float,
    softcap: float | None = None,
    more: bool = False,
) -> tuple[Tensor, ...]:
    """Compute logps, entropy and logsumexp of the scaled rows, and MORE_OUTPUTS if `more`.

    Each is [M]; the last one, is_top1, is bool, the others float.
    """
    z = scale_logits(rows, temperature, softcap)
    lse = z.logsumexp(-1)
    # +inf logits are an error, not a token of probability 1
    lse = torch.where(lse == math.inf, math.nan, lse)
    logps = z.gather(-1, targets[:, None]).squeeze(-1) - lse
    # a masked vocabulary entry (-inf) adds 0 log 0 = 0 to the entropy
    finite = z.masked_fill(z == -math.inf, 0)
    entropy = lse - ((z - lse[:, None]).exp() * finite).sum(-1)
    if not more:
        return logps, entropy, lse
    with torch.no_grad():
        is_top1 = z.argmax(-1) == targets  # the first of equal logits
        extra = (2 * (z - lse[:, None])).logsumexp(-1), z.mean(-1), is_top1
    return logps, entropy, lse, *extra


def token_terms(logps: Tensor, entropy: Tensor, tokens: Tokens, spec: LossSpec) -> TokenTerms:
    """Apply the per-token formulas; differentiable in `logps` and `entropy` ([N] each)."""
    demo, a, on_rollout = tokens.demo, tokens.advantages, tokens.rollout
    ratio, _ = _ratio(logps, tokens, spec)
    policy, clipped = _policy(logps, ratio, a, spec)
    kl = torch.zeros_like(logps)
    if tokens.ref is not None:
        # elsewhere exp(-logp) may overflow, and its gradient would be 0 * inf
        d = torch.where(on_rollout, tokens.ref - logps, 0)
        kl = _kl(d, spec.kl_estimator)
    demonstration = _demonstration(logps, a, spec)
    factor = token_factor(logps.detach(), tokens, spec)
    if factor is not None:
        # a token of weight 0 has no loss, even if its log-probability is -inf
        infinite = (factor == 0) & (logps == -math.inf)
        policy, demonstration = (
            torch.where(infinite, 0, factor * x) for x in (policy, demonstration)
        )
    rollout = policy - spec.entropy_coef * entropy
    if spec.kl_coef != 0:
        rollout = rollout + spec.kl_coef * (ratio * kl if spec.use_bias_correction_kl else kl)
    loss = torch.where(on_rollout, rollout, 0) + torch.where(tokens.live & demo, demonstration, 0)
    kl = torch.where(on_rollout, kl, 0).detach()
    return TokenTerms(logps, entropy, loss, kl, (clipped & on_rollout).to(logps.dtype))


def _ratio(logps: Tensor, tokens: Tokens, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """The probability ratio to the sampling policy, and whether it is clamped (MAX_LOG_RATIO)."""
    old = logps.detach() if tokens.old is None else tokens.old
    log_ratio = logps - old
    if spec.importance_sampling_level == "sequence":
        log_ratio = tokens.rollout_mean(log_ratio)
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp(), log_ratio > MAX_LOG_RATIO


def _policy(logps: Tensor, ratio: Tensor, a: Tensor, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """The policy term of each token, and whether it was clipped."""
    low = -math.inf if spec.clip_low is None else 1 - spec.clip_low
    high = math.inf if spec.clip_high is None else 1 + spec.clip_high
    bounded = ratio.detach().clamp(low, high)
    match spec.policy_loss:
        case "clip":
            unclipped_objective, clipped_objective = ratio * a, bounded * a
            clipped = unclipped_objective > clipped_objective
            policy = -torch.where(clipped, clipped_objective, unclipped_objective)
            if spec.dual_clip is not None:
                limit = -spec.dual_clip * a
                dual_clipped = (a < 0) & (policy > limit)
                policy, clipped = torch.where(dual_clipped, limit, policy), clipped | dual_clipped
            return policy, clipped
        case "sapo":
            tau = _sapo_tau(a, spec)
            return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * a, torch.zeros_like(a).bool()
        case "cispo":
            coefficient, clipped = bounded * a, bounded != ratio
        case _:
            coefficient, clipped = a, torch.zeros_like(a).bool()
    # 0 log 0 = 0
    return -torch.where(coefficient == 0, 0, coefficient * logps), clipped


def _sapo_tau(a: Tensor, spec: LossSpec) -> Tensor:
    return torch.full_like(a, spec.sapo_tau[1]).masked_fill(a > 0, spec.sapo_tau[0])


def _kl(d: Tensor, estimator: str) -> Tensor:
    """The KL estimator of each token from d = ref - logp."""
    match estimator:
        case "k1":
            return -d
        case "k2":
            return d * d / 2
        case "k3":
            return d.expm1() - d
        case _:
            raise AssertionError(f"unknown KL estimator {estimator!r}")


def _demonstration(logps: Tensor, advantages: Tensor, spec: LossSpec) -> Tensor:
    """The demonstration loss of each token."""
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
    logps: Tensor, entropy: Tensor, tokens: Tokens, spec: LossSpec, need_grad: bool
) -> tuple[TokenTerms, tuple[Tensor, Tensor] | None]:
    """Compute the detached terms and, if `need_grad`, the gradients of sum(tokens.scale * loss).

    The gradients are with respect to logps and entropy, [N] each.
    """
    with torch.no_grad():
        terms = token_terms(logps, entropy, tokens, spec)
        if not need_grad:
            return terms, None
        d_entropy = torch.where(tokens.rollout, tokens.scale * -spec.entropy_coef, 0)
        return terms, (token_derivatives(logps, tokens, spec, tokens.scale), d_entropy)


def token_derivatives(
    logps: Tensor, tokens: Tokens, spec: LossSpec, upstream: Tensor | float
) -> Tensor:
    """Derivatives of sum(upstream * loss) with respect to logps, in closed form, [N].

    They equal autograd's of `token_terms`, which is not available inside a custom operator.
    `upstream` [N] is constant over the rollout tokens of a sequence. Tokens without a loss have no
    meaningful value.
    """
    a, p, c = tokens.advantages, logps.exp(), spec.demo_shape
    ratio, overflows = _ratio(logps, tokens, spec)
    _, clipped = _policy(logps, ratio, a, spec)
    factor = token_factor(logps, tokens, spec)
    weighted = upstream * torch.ones_like(logps) if factor is None else upstream * factor
    zero = torch.zeros_like(logps)

    through_ratio, direct = zero, zero
    match spec.policy_loss:
        case "clip":
            through_ratio = torch.where(clipped, 0, -weighted * a)
        case "sapo":
            tau = _sapo_tau(a, spec)
            gate = torch.sigmoid(tau * (ratio - 1))
            through_ratio = -4 * weighted * a * gate * (1 - gate)
        case "cispo":
            low = -math.inf if spec.clip_low is None else 1 - spec.clip_low
            high = math.inf if spec.clip_high is None else 1 + spec.clip_high
            direct = -weighted * ratio.clamp(low, high) * a
        case _:
            direct = -weighted * a
    if spec.kl_coef != 0 and tokens.ref is not None:
        d, kl_upstream = torch.where(tokens.rollout, tokens.ref - logps, 0), upstream * spec.kl_coef
        if spec.use_bias_correction_kl:
            through_ratio = through_ratio + kl_upstream * _kl(d, spec.kl_estimator)
            kl_upstream = kl_upstream * ratio
        match spec.kl_estimator:
            case "k1":
                d_kl = kl_upstream * torch.ones_like(d)
            case "k2":
                d_kl = -kl_upstream * d
            case _:
                d_kl = -kl_upstream * d.expm1()
        direct = direct + d_kl
    through_ratio = torch.where(overflows, 0, through_ratio * ratio)
    if spec.importance_sampling_level == "sequence":
        through_ratio = tokens.rollout_mean(through_ratio)

    match spec.demo_weight:
        case DemoWeight.ONE:
            demonstration = -weighted
        case DemoWeight.P:
            demonstration = weighted * -p
        case DemoWeight.PHI:
            demonstration = weighted * (-p * (1 - p))
        case DemoWeight.SHAPED:
            total = p + c
            demonstration = (weighted / total * -a - weighted * (-a * p / total / total)) * p
        case DemoWeight.TRUST:
            demonstration = -(weighted / p.clamp(min=c)) * p
    return torch.where(tokens.rollout, through_ratio + direct, demonstration)


def linearize(
    tokens: Tokens, spec: LossSpec, logps: Tensor | None = None
) -> tuple[Tokens, LossSpec]:
    """Rewrite tokens and options so that the policy term has gradient -A (A: new advantages).

    The total gradient stays the same. If a loss couples the tokens of a sequence, their
    coefficients are computed here for the whole batch, so that row kernels can process each token
    on its own. Without `logps` [N], the coefficients must not depend on them (see `coupling`), and
    the KL is left to the row kernels.
    """
    without_kl = replace(spec, kl_coef=0.0)
    if logps is None:
        derivatives = token_derivatives(torch.zeros_like(tokens.scale), tokens, without_kl, 1.0)
    else:
        derivatives = token_derivatives(logps, tokens, spec, 1.0)
        spec = without_kl
    advantages = torch.where(tokens.demo, tokens.advantages, -derivatives)
    scale = tokens.scale
    if tokens.factor is not None:
        scale = torch.where(tokens.demo, scale * tokens.factor, scale)
    tokens = tokens._replace(
        advantages=advantages, scale=scale, old=None, factor=None, rollout_logps=None
    )
    # on-policy, the gradient of "clip" is -A
    return tokens, replace(
        spec, policy_loss="clip", clip_low=None, clip_high=None, importance_sampling_level="token"
    )


class Coupling(enum.Enum):
    """How the gradient of a token depends on the other tokens of its sequence."""

    NONE = enum.auto()
    KNOWN = enum.auto()  # through numbers that are known in advance
    CURRENT = enum.auto()  # through their current log-probabilities


def coupling(tokens: Tokens, spec: LossSpec) -> Coupling:
    """Determine the coupling; only CURRENT requires a pass over the logits in advance."""
    through_ratio = spec.policy_loss in ("clip", "sapo")
    has_kl_ratio = spec.use_bias_correction_kl and spec.kl_coef != 0
    if tokens.rollout_logps is not None and spec.correction.startswith("sequence"):
        return Coupling.CURRENT
    if spec.importance_sampling_level == "token":
        return Coupling.NONE
    if tokens.old is not None and (spec.policy_loss != "reinforce" or has_kl_ratio):
        return Coupling.CURRENT
    if has_kl_ratio or (through_ratio and tokens.rollout_logps is not None):
        return Coupling.CURRENT
    return Coupling.KNOWN if through_ratio else Coupling.NONE


def loss_from_logprobs(
    logps: Tensor,
    entropy: Tensor | None,
    inputs: BatchInputs,
    spec: LossSpec,
    moments: bool = True,
) -> LossOutput:
    """See `gac_kernels.loss_from_logprobs`; no checks."""
    dtype = compute_dtype(logps.dtype)
    tokens = with_factors(plan(inputs, spec, dtype), inputs, spec)

    def flat(x: Tensor) -> Tensor:
        """Flatten to [N] with 0 where there is no loss: a nan there must not reach the results."""
        return torch.where(tokens.live, x.reshape(-1).to(dtype), 0)

    entropy_or_zero = torch.zeros_like(logps) if entropy is None else entropy
    terms = token_terms(flat(logps), flat(entropy_or_zero), tokens, spec)
    if entropy is None:
        terms = terms._replace(entropy=torch.where(tokens.live, math.nan, terms.entropy))
    return loss_output(tokens, terms, inputs.targets.shape, moments)


def loss_output(
    tokens: Tokens, terms: TokenTerms, shape: torch.Size, moments: bool = True
) -> LossOutput:
    """Reduce terms [N] to a LossOutput with a differentiable `loss`; shape: that of the targets."""
    summary = reduce(tokens, terms, moments)
    return LossOutput(
        loss=summary.loss,
        rollout_loss=summary.rollout_loss.detach(),
        demo_loss=summary.demo_loss.detach(),
        kl=summary.kl,
        clip_fraction=summary.clip_fraction,
        logps=terms.logps.detach().view(shape),
        entropy=terms.entropy.detach().view(shape),
        moments=summary.moments,
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
    weights: Tensor | None = None,
    rollout_logps: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    moments: bool = True,
) -> LossOutput:
    """See `gac_kernels.fused_gac_loss`; same arguments, no checks."""
    inputs = BatchInputs(
        *(targets, advantages, is_demo, mu, old_logps, ref_logps, cu_seqlens),
        *(rollout_norm, demo_norm, weights, rollout_logps),
    )
    tokens = with_factors(plan(inputs, spec, compute_dtype(logits.dtype)), inputs, spec)
    logps, entropy = token_logprobs(
        logits,
        targets,
        temperature=spec.temperature,
        logit_scale=logit_scale,
        softcap=softcap,
    )
    terms = token_terms(logps.view(-1), entropy.view(-1), tokens, spec)
    return loss_output(tokens, terms, targets.shape, moments)


def linear_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute hidden [..., H] times weight [V, H], plus bias, never rounded below float32."""
    dtype = compute_dtype(hidden.dtype)
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
    """Sketch [S, k, k] from the dense gradient of the logits, with both projections as matrices."""
    spec = keywords.get("spec", LossSpec())
    fields = {k: v for k, v in keywords.items() if k in BatchInputs._fields}
    inputs = BatchInputs(*args, **fields)
    tokens = with_factors(plan(inputs, spec, compute_dtype(logits.dtype)), inputs, spec)
    scaling = {k: v for k, v in keywords.items() if k in ("logit_scale", "softcap")}
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        logps, entropy = token_logprobs(leaf, args[0], temperature=spec.temperature, **scaling)
        terms = token_terms(logps.view(-1), entropy.view(-1), tokens, spec)
        (grad,) = torch.autograd.grad((tokens.scale * terms.loss).sum(), leaf)
    flat = grad.flatten(0, -2)
    vocab_projection = sketch.vocabulary(flat.shape[1]).to(flat)
    hidden_signs = sketch.hidden_signs(hidden.shape[-1], torch.device("cpu")).to(flat)
    rows = hidden.detach().flatten(0, -2).to(flat).masked_fill(~tokens.live[:, None], 0)
    factors = SketchFactors(flat @ vocab_projection.T, rows @ hidden_signs.T)
    return per_sequence(factors, tokens, spec, None)


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, ...]:
    """See `gac_kernels.linear_token_logprobs`; materializes all [N, V] logits."""
    return token_logprobs(linear_logits(hidden, weight, bias), targets, **keywords)
