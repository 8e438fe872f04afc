"""Reference implementation of the loss: plain PyTorch, any float dtype, gradients by autograd.

Kernels, tests, benchmarks and docs are checked against these functions. Half-precision inputs are
computed in float32, float32 in float32, float64 in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .checks import complete
from .contract import (
    IGNORE,
    MAX_LOG_RATIO,
    MORE_OUTPUTS,
    DemoWeight,
    DivergenceOutput,
    LossOutput,
    LossSpec,
    compute_dtype,
)
from .tokens import (
    BatchInputs,
    Scaling,
    Tokens,
    TokenTerms,
    Upstream,
    bound_for_float16,
    plan,
    reduce,
    split_columns,
    stack_columns,
    temperature_per_token,
    token_factor,
    with_factors,
    with_teacher_loss,
)

# Probability of the rest below which its logarithm is constant
LEAST_REST = 1e-30


def token_logprobs(
    logits: Tensor,  # [..., V]
    targets: Tensor,  # int64 [...]; -100 = no loss
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    outputs: Sequence[str] = (),
) -> tuple[Tensor, ...]:
    """See `gac_kernels.token_logprobs`; same arguments, no checks."""
    if isinstance(temperature, Tensor):
        temperature = temperature_per_token(temperature, targets, compute_dtype(logits.dtype))
    cap = None if softcap is None else softcap / logit_scale
    scaling = Scaling(temperature / logit_scale, cap)
    logps, entropy, _, *more = row_stats(
        logits, targets.reshape(-1), scaling, more_outputs=len(outputs) > 0
    )
    results = logps, entropy, *select_outputs(more, outputs)
    return tuple(x.view(targets.shape) for x in results)


def row_stats(
    logits: Tensor,  # [..., V]
    targets: Tensor,  # int64 [N]; -100 = no loss
    scaling: Scaling,
    *,
    more_outputs: bool = False,
) -> tuple[Tensor, ...]:
    """`row_statistics` of the rows with a loss, and 0 elsewhere: [N] each, differentiable."""
    live = (targets != IGNORE).nonzero().squeeze(1)
    rows = logits.flatten(0, -2).index_select(0, live).to(compute_dtype(logits.dtype))
    stats = row_statistics(rows, targets[live], scaling.at(live), more_outputs=more_outputs)
    zeros = torch.zeros(targets.shape, dtype=rows.dtype, device=rows.device)
    return tuple(zeros.index_copy(0, live, x.to(zeros.dtype)) for x in stats)


def select_outputs(more: Sequence[Tensor], outputs: Sequence[str]) -> list[Tensor]:
    """The requested ones of all MORE_OUTPUTS; `is_top1` as bool."""
    named = dict(zip(MORE_OUTPUTS, more, strict=False))
    return [named[name] != 0 if name == "is_top1" else named[name] for name in outputs]


def scale_logits(x: Tensor, scaling: Scaling) -> Tensor:
    """softcap * tanh(x / softcap) / temperature of rows x [M, V]; infinities are not capped."""
    temperature, softcap = scaling
    if softcap is not None:
        x = torch.where(x.isinf(), x, softcap * torch.tanh(x / softcap))
    return x / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)


def row_statistics(
    rows: Tensor,  # [M, V]
    targets: Tensor,  # int64 [M]; logp is nan outside [0, V)
    scaling: Scaling,
    *,
    more_outputs: bool = False,
) -> tuple[Tensor, ...]:
    """Compute logps, entropy and logsumexp of the scaled rows, and MORE_OUTPUTS if `more_outputs`.

    Each is [M]; the last one, is_top1, is bool, the others float.
    """
    z = scale_logits(rows, scaling)
    lse = z.logsumexp(-1)
    # +inf logits are an error, not a token of probability 1
    lse = torch.where(lse == math.inf, math.nan, lse)
    inside = (targets >= 0) & (targets < z.shape[1])
    target = z.gather(-1, torch.where(inside, targets, 0)[:, None]).squeeze(-1)
    logps = torch.where(inside, target, math.nan) - lse
    log_p = z.log_softmax(-1)  # accurate where p is near 1, unlike z - lse
    # a masked vocabulary entry (-inf) adds 0 log 0 = 0 to the entropy
    entropy = -(log_p.exp() * log_p.masked_fill(z == -math.inf, 0)).sum(-1)
    if not more_outputs:
        return logps, entropy, lse
    with torch.no_grad():
        # the first of equal logits; no target is the largest of a row with nan
        is_top1 = (z.argmax(-1) == targets) & ~logps.isnan()
        extra = (2 * log_p).logsumexp(-1), z.mean(-1), is_top1
    return logps, entropy, lse, *extra


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    targets: Tensor | None = None,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    token_weights: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
) -> DivergenceOutput:
    """See `gac_kernels.fused_linear_divergence`; same arguments, no checks, all logits."""
    shape, dtype = hidden.shape[:-1], compute_dtype(hidden.dtype)
    live = (torch.zeros(shape, device=hidden.device) if targets is None else targets) != IGNORE
    if isinstance(temperature, Tensor):
        temperature = temperature.to(hidden.device, dtype).reshape(len(temperature), -1)
        temperature = temperature.expand(shape)[live] if len(shape) > 1 else temperature[live, 0]

    def log_probs(
        x: Tensor, w: Tensor, b: Tensor | None, scale: float, cap: float | None
    ) -> Tensor:
        z = scale * torch.nn.functional.linear(
            x[live].to(dtype), w.to(dtype), None if b is None else b.to(dtype)
        )
        return scale_logits(z, Scaling(temperature, cap)).log_softmax(-1)

    log_q = log_probs(hidden, weight, bias, logit_scale, softcap)
    with torch.no_grad():
        teacher = teacher_hidden, teacher_weight, teacher_bias
        log_p = log_probs(*teacher, teacher_logit_scale, teacher_softcap)
    losses = divergences(log_q, log_p, divergence, beta)
    entropy = torch.special.entr(log_q.exp()).sum(-1)
    weights = 1.0 if token_weights is None else token_weights[live].to(dtype)
    zeros = torch.zeros(shape, dtype=dtype, device=hidden.device)
    per_token = (zeros.masked_scatter(live, x.detach()) for x in (losses, entropy))
    return DivergenceOutput((weights * losses).sum(), *per_token)


def divergences(log_q: Tensor, log_p: Tensor, divergence: str, beta: float) -> Tensor:
    """The divergence of each row from the models' log-probabilities [M, V], as [M]."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        """KL(a, b); an entry of probability 0 adds nothing."""
        gap = torch.where(a == -math.inf, 0, a - b)
        return (torch.where(a == -math.inf, 0, a.exp()) * gap).sum(-1)

    match divergence:
        case "forward_kl":
            return kl(log_p, log_q)
        case "reverse_kl":
            return kl(log_q, log_p)
        case _:
            log_m = torch.logaddexp(log_q + math.log1p(-beta), log_p + math.log(beta))
            return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def token_terms(logps: Tensor, entropy: Tensor, tokens: Tokens, spec: LossSpec) -> TokenTerms:
    """Apply the per-token formulas; differentiable in `logps` and `entropy` ([N] each)."""
    demo, a, on_rollout = tokens.demo, tokens.advantages, tokens.rollout
    old = logps.detach() if tokens.old is None else tokens.old
    log_ratio = torch.where(on_rollout, logps - old, 0)
    if spec.importance_sampling_level == "sequence":
        log_ratio = tokens.rollout_mean(log_ratio)
    # unlike clamp, `where` keeps the gradient of nan
    ratio = torch.where(log_ratio > MAX_LOG_RATIO, MAX_LOG_RATIO, log_ratio).exp()
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
            tau = torch.full_like(a, spec.sapo_tau[1]).masked_fill(a > 0, spec.sapo_tau[0])
            return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * a, torch.zeros_like(a).bool()
        case "cispo":
            coefficient, clipped = bounded * a, bounded != ratio
        case _:
            coefficient, clipped = a, torch.zeros_like(a).bool()
    impossible = (coefficient == 0) & (logps == -math.inf)  # 0 log 0 = 0, but nan stays
    return -torch.where(impossible, 0, coefficient * logps), clipped


def _kl(d: Tensor, estimator: str) -> Tensor:
    """The KL estimator of each token from d = ref - logp."""
    match estimator:
        case "k1":
            return -d
        case "k2":
            return d * d / 2
        case _:  # k3
            return d.expm1() - d


def teacher_terms(logps: Tensor, tokens: Tokens, spec: LossSpec) -> Tensor:
    """The teacher's loss of each token, [N]; differentiable in `logps`.

    logps: [N]; with a teacher's K tokens those of `row_targets`, [N, K + 2].
    """
    teacher = tokens.teacher
    assert teacher is not None
    if teacher.ids is None:
        # elsewhere exp(-logp) may overflow, and its gradient would be 0 * inf
        gap = torch.where(tokens.rollout, teacher.logps.to(logps.dtype) - logps, 0)
        return _kl(gap, spec.teacher_loss)
    given = teacher.ids != IGNORE
    others = torch.where(given, teacher.logps, -math.inf).double()
    # rounding may leave no rest, or less
    rest, least = 1 - others.exp().sum(1), 8 * torch.finfo(teacher.logps.dtype).eps
    named = torch.where(given, logps[:, 1:-1], -math.inf), others.to(logps.dtype)
    log_rest = logps[:, -1].clamp(min=math.log(LEAST_REST)), rest.clamp(min=least).log()
    p_rest = logps[:, -1].exp(), rest.clamp(min=0)
    (q, p), (log_q, log_p) = ([x.to(logps.dtype) for x in pair] for pair in (p_rest, log_rest))
    if spec.teacher_loss == "forward_kl":
        losses = _kl_of(named[1], named[0]) + p * (log_p - log_q)
    else:
        losses = _kl_of(*named) + q * (log_q - log_p)
    return torch.where(given.any(1), losses, 0)


def _kl_of(log_p: Tensor, log_q: Tensor) -> Tensor:
    """The sum of p log(p / q) over K outcomes, [M]; one of probability p = 0 adds nothing."""
    p = log_p.exp()
    return (p * torch.where(p == 0, 0, log_p - log_q)).sum(1)


def _demonstration(logps: Tensor, advantages: Tensor, spec: LossSpec) -> Tensor:
    """The demonstration loss of each token."""
    p = logps.exp()
    q = p.detach()
    match spec.demo_weight:
        case DemoWeight.ONE:
            return -logps
        case DemoWeight.SHAPED:
            return -advantages * p / (p + spec.demo_shape)
        case DemoWeight.TRUST:
            return -p / q.clamp(min=spec.demo_shape)
    weight = q if spec.demo_weight is DemoWeight.P else q * (1 - q)
    return -torch.where(weight == 0, 0, weight * logps)  # 0 log 0 = 0


def token_gradients(
    logps: Tensor, entropy: Tensor, tokens: Tokens, spec: LossSpec, need_grad: bool
) -> tuple[TokenTerms, tuple[Tensor, Tensor] | None]:
    """Compute the detached terms and, if `need_grad`, the gradients of the mixed loss.

    logps: of `Tokens.row_targets`; those of the terms are the same. The gradients are with respect
    to logps and entropy.
    """
    if not need_grad:
        return token_terms(own_logps(logps), entropy, tokens, spec)._replace(logps=logps), None
    # autograd cannot save tensors of inference mode
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [x.clone().requires_grad_() for x in (logps, entropy)]
        if tokens.scale.is_inference():
            tokens = tree_map_only(Tensor, torch.clone, tokens)
        terms = token_terms(own_logps(leaves[0]), leaves[1], tokens, spec)
        total = (tokens.scale * terms.loss).sum()
        if tokens.teacher is not None and spec.teacher_coef != 0:
            total = total + (tokens.teacher.scale * teacher_terms(leaves[0], tokens, spec)).sum()
        d_logps, d_entropy = torch.autograd.grad(total, leaves)
    return TokenTerms(*(x.detach() for x in terms))._replace(logps=logps), (d_logps, d_entropy)


def own_logps(logps: Tensor) -> Tensor:
    """The log-probs of the targets, [N], without those of a teacher's tokens."""
    return logps if logps.dim() == 1 else logps[:, 0]


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
    out = reduce(tokens, terms, moments)
    if tokens.teacher is not None:
        out = with_teacher_loss(out, tokens, teacher_terms(terms.logps, tokens, spec), spec)
    return out.shaped(inputs.targets.shape)


def fused_gac_loss(
    logits: Tensor,
    targets: Tensor,
    *roles: Tensor | None,
    spec: LossSpec = LossSpec(),  # noqa: B008 - frozen
    logit_scale: float = 1.0,
    softcap: float | None = None,
    moments: bool = True,
    **batch: Any,
) -> LossOutput:
    """See `gac_kernels.fused_gac_loss`; same arguments, no checks.

    roles: advantages and `is_demo`; `batch`: the other inputs of `tokens.complete`.
    """
    inputs = complete(targets, *roles, spec=spec, **batch)
    tokens = with_factors(plan(inputs, spec, compute_dtype(logits.dtype)), inputs, spec)
    temperature = spec.temperature if tokens.temperature is None else tokens.temperature
    rows = logits.flatten(0, -2)
    options: Any = {"temperature": temperature, "logit_scale": logit_scale, "softcap": softcap}
    logps, entropy = token_logprobs(rows, tokens.targets, **options)
    out = reduce(tokens, token_terms(logps, entropy, tokens, spec), moments)
    if tokens.teacher is not None:
        if tokens.teacher.ids is not None:
            ids = tokens.teacher.ids
            others, _ = candidate_logprobs(rows, ids, **options)
            rest = rest_logprobs(rows, ids, **options)
            logps = torch.cat([logps[:, None], others, rest[:, None]], 1)
        out = with_teacher_loss(out, tokens, teacher_terms(logps, tokens, spec), spec)
    return out.shaped(targets.shape)


def linear_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute hidden [..., H] times weight [V, H], plus bias, never rounded below float32."""
    dtype = compute_dtype(hidden.dtype)
    logits = hidden.to(dtype) @ weight.to(dtype).T
    return logits if bias is None else logits + bias.to(dtype)


def fused_linear_gac_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *roles: Tensor | None,
    bias: Tensor | None = None,
    **keywords: Any,
) -> LossOutput:
    """See `gac_kernels.fused_linear_gac_loss`; materializes all [N, V] logits."""
    return fused_gac_loss(linear_logits(hidden, weight, bias), targets, *roles, **keywords)


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, ...]:
    """See `gac_kernels.linear_token_logprobs`; materializes all [N, V] logits."""
    logits = linear_logits(hidden, weight, bias)
    if targets.dim() == hidden.dim():  # K targets per token
        return candidate_logprobs(logits, targets, **keywords)
    return token_logprobs(logits, targets, **keywords)


def candidate_logprobs(
    logits: Tensor, targets: Tensor, *, outputs: Sequence[str] = (), **keywords: Any
) -> tuple[Tensor, ...]:
    """`token_logprobs` of K targets per token, [.., K]; the other outputs are of the first."""
    first = targets[..., 0]
    _, *others = token_logprobs(logits, first, outputs=outputs, **keywords)
    columns = [
        token_logprobs(logits, ids.where(first != IGNORE, IGNORE), **keywords)[0]
        for ids in targets.unbind(-1)
    ]
    return torch.stack(columns, -1), *others


def rest_logprobs(
    logits: Tensor,  # [N, V]
    ids: Tensor,  # int64 [N, K]; IGNORE: no token
    *,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
) -> Tensor:
    """Log-probability of all tokens but `ids`, [N]; -inf if there is no other."""
    cap = None if softcap is None else softcap / logit_scale
    x = logits.to(compute_dtype(logits.dtype))
    z = scale_logits(x, Scaling(temperature / logit_scale, cap))
    inside = (ids >= 0) & (ids < z.shape[1])
    named = torch.zeros_like(z).scatter_add(1, torch.where(inside, ids, 0), inside.to(z.dtype))
    rest = z.masked_fill(named != 0, -math.inf)
    empty = (rest == -math.inf).all(1)  # whose logsumexp has no gradient
    rest_lse = rest.masked_fill(empty[:, None], 0).logsumexp(1)
    return torch.where(empty, -math.inf, rest_lse) - z.logsumexp(1)


def fused_linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_loss: Callable[..., Tensor],
    *inputs: Tensor,
    outputs: Sequence[str] = (),
    **keywords: Any,
) -> tuple[Tensor, ...]:
    """See `gac_kernels.fused_linear_token_loss`; materializes all [N, V] logits.

    Returns (loss, losses, logps, entropy, *outputs).
    """
    stats = linear_token_logprobs(hidden, weight, targets, outputs=outputs, **keywords)
    live = (targets if targets.dim() < hidden.dim() else targets[..., 0]) != IGNORE
    losses = token_loss(*(x[live] for x in (*stats[:2], *inputs, *stats[2:])))
    spread = torch.zeros_like(stats[1]).masked_scatter(live, losses.detach().to(stats[1].dtype))
    return losses.sum(), spread, *(x.detach() for x in stats)


# What the reference needs as a backend, for every device and float dtype (see `backends`).


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def row_grads(
    logits: Tensor,
    targets: Tensor,
    scaling: Scaling,
    upstream: Upstream,
    out: Tensor,
    *,
    whole_row: bool = True,
) -> None:
    live = (targets != IGNORE).nonzero().squeeze(1)
    rows = logits.flatten(0, -2).index_select(0, live).to(compute_dtype(logits.dtype))
    temperature, softcap = scaling
    lse, entropy, d_logps, d_entropy = upstream
    tau = temperature[live, None] if isinstance(temperature, Tensor) else temperature
    capped = scale_logits(rows, Scaling(1.0, softcap))
    z = capped / tau - lse[live, None]
    p = z.exp()
    grad = -p * d_logps[live, None]
    inside = (targets[live] >= 0) & (targets[live] < grad.shape[1])
    target = torch.where(inside, targets[live], 0)[:, None]
    grad.scatter_add_(1, target, torch.where(inside, d_logps[live], 0)[:, None])
    entropy_part = p * (z.masked_fill(z == -torch.inf, 0) + entropy[live, None])
    grad -= entropy_part * d_entropy[live, None]
    if softcap is not None:
        grad *= 1 - (capped / softcap).masked_fill(capped.isinf(), 1) ** 2
    grad[(d_logps[live] == 0) & (d_entropy[live] == 0)] = 0
    out.zero_()
    width = out.shape[1]
    if width:
        out[live // width, live % width] = (grad / tau).to(out.dtype)


def row_loss(
    logits: Tensor,
    tokens: Tokens,
    spec: LossSpec,
    out: Tensor | None,
    *,
    softcap: float | None = None,
) -> TokenTerms:
    return loss_in_two_calls(row_stats, row_grads, logits, tokens, spec, out, softcap=softcap)


def loss_in_two_calls(
    row_stats: Callable[..., tuple[Tensor, ...]],
    row_grads: Callable[..., None],
    logits: Tensor,
    tokens: Tokens,
    spec: LossSpec,
    out: Tensor | None,
    *,
    softcap: float | None,
) -> TokenTerms:
    """`row_loss` by the other two row functions of a backend, which take `Tokens.row_targets`."""
    temperature = spec.temperature if tokens.temperature is None else tokens.temperature
    scaling, targets = Scaling(temperature, softcap), tokens.row_targets
    logps, entropy, lse = row_stats(logits, targets, scaling)
    terms, derivatives = token_gradients(logps, entropy, tokens, spec, out is not None)
    if out is not None and derivatives is not None:
        d_logps, d_entropy = derivatives
        if out.dtype == torch.float16:
            bounded = bound_for_float16(stack_columns(d_logps, d_entropy), temperature)
            d_logps, d_entropy = split_columns(bounded, targets)
        row_grads(logits, targets, scaling, Upstream(lse, entropy, d_logps, d_entropy), out)
    return terms


class TwoCalls:
    """Backend (see `backends`) for the formulas of this file that the kernels of another lack."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.plan, self.reduce, self.scale_ = inner.plan, inner.reduce, inner.scale_

    def row_stats(self, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        return self.inner.row_stats(*arguments, **options)

    def row_grads(self, *arguments: Any, **options: Any) -> None:
        self.inner.row_grads(*arguments, **options)

    def row_loss(
        self,
        logits: Tensor,
        tokens: Tokens,
        spec: LossSpec,
        out: Tensor | None,
        *,
        softcap: float | None = None,
    ) -> TokenTerms:
        return loss_in_two_calls(
            self.row_stats, self.row_grads, logits, tokens, spec, out, softcap=softcap
        )


def scale_(tensor: Tensor, factor: Tensor) -> None:
    tensor.mul_(factor)
