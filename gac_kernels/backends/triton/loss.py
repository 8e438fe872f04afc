"""The full loss of a row: statistics, per-token formulas and gradient.

Notation: N = B T rows, V vocabulary size, L lanes, R consecutive logits per lane.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import contract
from ...contract import LossSpec
from ...tokens import ROW_COLUMNS, Scaling, Tokens, TokenTerms
from . import launch
from .softmax import (
    NO_LOSS,
    row_at,
    row_scaling,
    row_values,
    write_gradient,
    write_zeros,
)

MAX_LOG_RATIO = tl.constexpr(contract.MAX_LOG_RATIO)
FLOAT16_BOUND = tl.constexpr(contract.FLOAT16_BOUND)


@triton.jit
def k3_estimate(d):
    """exp(d) - d - 1 and -expm1(d) without cancellation; the interpreter has no expm1."""
    series = 1 / 40320 + d * (1 / 362880)
    series = 1 / 5040 + d * series
    series = 1 / 720 + d * series
    series = 1 / 120 + d * series
    series = 1 / 24 + d * series
    series = 1 / 6 + d * series
    series = 0.5 + d * series
    growth, near = tl.exp(d), tl.abs(d) < 0.5
    kl = tl.where(near, d * d * series, growth - d - 1.0)
    return kl, tl.where(near, -(d + kl), 1.0 - growth)


@triton.jit
def kl_estimate(logp, ref, KL: tl.constexpr):
    """The KL estimator and its derivative with respect to logp."""
    d = ref - logp
    if KL == "k1":
        return -d, tl.full([], 1.0, tl.float32)
    elif KL == "k2":  # noqa: RET505 - Triton prunes constexpr branches, not code after a return
        return d * d / 2, -d
    else:
        return k3_estimate(d)


@triton.jit
def rollout_term(
    logp,
    old,
    advantage,
    low,
    high,
    dual_clip,
    tau_positive,
    tau_negative,
    POLICY: tl.constexpr,
    HAS_DUAL: tl.constexpr,
):
    """The policy loss of a rollout token, its derivative in logp, and 1 if the token was clipped.

    Also the ratio, and whether it is clamped at exp(MAX_LOG_RATIO).
    """
    log_ratio = logp - old
    overflows = log_ratio > MAX_LOG_RATIO
    ratio = tl.exp(tl.where(overflows, MAX_LOG_RATIO, log_ratio))
    bounded = tl.where(ratio < low, low, tl.where(ratio > high, high, ratio))
    clipped = tl.full([], False, tl.int1)
    if POLICY == "clip":
        free = ratio * advantage
        bound = bounded * advantage
        clipped = free > bound
        loss = -tl.where(clipped, bound, free)
        if HAS_DUAL:
            ceiling = -dual_clip * advantage
            beyond = (advantage < 0) & (loss > ceiling)
            loss = tl.where(beyond, ceiling, loss)
            clipped = clipped | beyond
        d_logp = tl.where(clipped | overflows, 0.0, -free)
    elif POLICY == "sapo":
        tau = tl.where(advantage > 0, tau_positive, tau_negative)
        gate = 1.0 / (1.0 + tl.exp(-tau * (ratio - 1.0)))
        loss = -4.0 / tau * gate * advantage
        d_logp = tl.where(overflows, 0.0, -4.0 * gate * (1.0 - gate) * ratio * advantage)
    else:
        if POLICY == "cispo":
            clipped = bounded != ratio
            d_logp = -bounded * advantage
        else:
            d_logp = -advantage
        impossible = (d_logp == 0) & (logp == float("-inf"))
        loss = tl.where(impossible, 0.0, d_logp * logp)  # 0 log 0 = 0, but nan stays
    return loss, d_logp, tl.where(clipped, 1.0, 0.0), ratio, overflows


@triton.jit
def correction(log_ratio, low, high, MASK: tl.constexpr):
    """The importance-sampling factor exp(log_ratio) of a token; 1 if log_ratio is nan.

    log_ratio: the token's log-probability minus that under the policy that sampled it. A factor
    outside [low, high] becomes 0 if MASK, else the nearer bound.
    """
    factor = tl.where(log_ratio == log_ratio, tl.exp(log_ratio), 1.0)
    if MASK:
        bounded = tl.where((factor < low) | (factor > high), 0.0, factor)
    else:
        bounded = tl.where(factor < low, low, tl.where(factor > high, high, factor))
    return bounded


@triton.jit
def weigh(loss, d_logp, logp, weight):
    """Multiply by a weight; a token of weight 0 has no loss, even if its logp is -inf."""
    impossible = (weight == 0) & (logp == float("-inf"))
    return tl.where(impossible, 0.0, loss * weight), d_logp * weight


@triton.jit
def demo_term(logp, advantage, shape, DEMO: tl.constexpr):
    """The loss of a demonstration token and its derivative with respect to logp."""
    p = tl.exp(logp)
    if DEMO == "shaped":
        loss = -advantage * p / (p + shape)
        d_logp = loss * shape / (p + shape)
    elif DEMO == "trust":
        loss = -p / tl.where(p < shape, shape, p)
        d_logp = loss
    else:
        if DEMO == "one":
            d_logp = tl.full([], -1.0, tl.float32)
        elif DEMO == "p":
            d_logp = -p
        else:
            d_logp = -p * (1.0 - p)
        loss = tl.where(d_logp == 0, 0.0, d_logp * logp)  # 0 log 0 = 0
    return loss, d_logp


@triton.jit
def token_values(
    n,
    logp,
    entropy,
    demo,
    advantages,
    old,
    ref,
    factor,
    rollout_logps,
    low,
    high,
    dual_clip,
    kl_coef,
    entropy_coef,
    demo_shape,
    tau_positive,
    tau_negative,
    correction_min,
    correction_max,
    POLICY: tl.constexpr,
    KL_RATIO: tl.constexpr,
    MASK_CORRECTION: tl.constexpr,
    HAS_DUAL: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    KL: tl.constexpr,
    DEMO: tl.constexpr,
):
    """The loss of token n, its KL, and whether it was clipped; its derivatives in logp and entropy.

    The arguments are those of `loss_kernel`.
    """
    kl = 0.0
    clipped = 0.0
    d_entropy = 0.0
    advantage = tl.load(advantages + n)
    if tl.load(demo + n):
        loss, d_logp = demo_term(logp, advantage, demo_shape, DEMO)
        if factor is not None:
            loss, d_logp = weigh(loss, d_logp, logp, tl.load(factor + n))
    else:
        old_logp = logp
        if old is not None:
            old_logp = tl.load(old + n)
        loss, d_logp, clipped, ratio, overflows = rollout_term(
            logp=logp,
            old=old_logp,
            advantage=advantage,
            low=low,
            high=high,
            dual_clip=dual_clip,
            tau_positive=tau_positive,
            tau_negative=tau_negative,
            POLICY=POLICY,
            HAS_DUAL=HAS_DUAL,
        )
        if factor is not None:
            loss, d_logp = weigh(loss, d_logp, logp, tl.load(factor + n))
        if rollout_logps is not None:
            log_correction = logp - tl.load(rollout_logps + n)
            corrected = correction(log_correction, correction_min, correction_max, MASK_CORRECTION)
            loss, d_logp = weigh(loss, d_logp, logp, corrected)
        if ref is not None:
            kl, d_kl = kl_estimate(logp, tl.load(ref + n), KL)
            if KL_RATIO:
                d_kl = ratio * (d_kl + tl.where(overflows, 0.0, kl))
                loss += kl_coef * ratio * kl
            else:
                loss += tl.where(kl_coef == 0, 0.0, kl_coef * kl)
            d_logp += tl.where(kl_coef == 0, 0.0, kl_coef * d_kl)
        if HAS_ENTROPY:
            loss -= entropy_coef * entropy
            d_entropy = -entropy_coef
    return loss, kl, clipped, d_logp, d_entropy


@triton.jit(
    do_not_specialize=["N", "T"],
    do_not_specialize_on_alignment=[*ROW_COLUMNS, "terms", "temperatures"],
)
def loss_kernel(
    logits,  # [B, T, V]
    out,  # [B, T, V]: gradient of sum(scale * loss); None = not needed
    targets,  # int64 [N]
    demo,  # bool [N]
    advantages,  # float32 [N]
    old,  # float32 [N], or None: the ratio is 1 and differentiable
    ref,  # float32 [N] or None
    scale,  # float32 [N]
    factor,  # float32 [N] or None
    rollout_logps,  # float32 [N] or None: no correction
    terms,  # float32 [5, N]: logp, entropy, loss, kl, clipped; 0 where there is no loss
    N,
    T,
    V,
    stride_b: tl.int64,
    stride_t: tl.int64,
    out_stride_b: tl.int64,
    out_stride_t: tl.int64,
    temperatures,  # float32 [N], or None: those of the next two arguments
    exp2_scale,
    inverse_temperature,
    softcap,  # or None, like the options below that are not used
    low,
    high,
    dual_clip,
    kl_coef,
    entropy_coef,
    demo_shape,
    tau_positive,
    tau_negative,
    correction_min,
    correction_max,
    POLICY: tl.constexpr,
    KL_RATIO: tl.constexpr,
    MASK_CORRECTION: tl.constexpr,
    HAS_DUAL: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    KL: tl.constexpr,
    DEMO: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    STAGES: tl.constexpr,
    PEEL: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    y = tl.load(targets + n)
    logp = 0.0
    entropy = 0.0
    loss = 0.0
    kl = 0.0
    clipped = 0.0
    d_logp = 0.0
    d_entropy = 0.0
    top = 0.0
    log2_mass = 0.0
    row = row_at(logits, n, T, stride_b, stride_t)
    exp2_scale, inverse_temperature = row_scaling(temperatures, n, exp2_scale, inverse_temperature)
    if y != NO_LOSS:
        logp, entropy, _, top, log2_mass = row_values(
            row=row,
            y=y,
            V=V,
            exp2_scale=exp2_scale,
            softcap=softcap,
            REREAD=out is not None,
            PEEL=PEEL,
            L=L,
            R=R,
            STAGES=STAGES,
        )
        loss, kl, clipped, d_logp, d_entropy = token_values(
            n=n,
            logp=logp,
            entropy=entropy,
            demo=demo,
            advantages=advantages,
            old=old,
            ref=ref,
            factor=factor,
            rollout_logps=rollout_logps,
            low=low,
            high=high,
            dual_clip=dual_clip,
            kl_coef=kl_coef,
            entropy_coef=entropy_coef,
            demo_shape=demo_shape,
            tau_positive=tau_positive,
            tau_negative=tau_negative,
            correction_min=correction_min,
            correction_max=correction_max,
            POLICY=POLICY,
            KL_RATIO=KL_RATIO,
            MASK_CORRECTION=MASK_CORRECTION,
            HAS_DUAL=HAS_DUAL,
            HAS_ENTROPY=HAS_ENTROPY,
            KL=KL,
            DEMO=DEMO,
        )
    tl.store(terms + n, logp)
    tl.store(terms + N + n, entropy)
    tl.store(terms + 2 * N + n, loss)
    tl.store(terms + 3 * N + n, kl)
    tl.store(terms + 4 * N + n, clipped)
    if out is not None:
        # `out` may be the row itself, and a slower warp may still have to read the target logit
        tl.debug_barrier()
        weight = tl.load(scale + n)
        d_logp *= weight
        d_entropy *= weight
        if out.dtype.element_ty == tl.float16:  # see `tokens.bound_for_float16`
            bound = FLOAT16_BOUND / inverse_temperature
            bounded = tl.clamp(d_logp, -bound, bound)
            d_logp = tl.where(tl.abs(d_logp) < float("inf"), bounded, d_logp)
        out_row = row_at(out, n, T, out_stride_b, out_stride_t)
        if (d_logp != 0) | (d_entropy != 0):
            write_gradient(
                row=row,
                out=out_row,
                y=y,
                V=V,
                top=top,
                log2_mass=log2_mass,
                exp2_scale=exp2_scale,
                softcap=softcap,
                d_logp=d_logp * inverse_temperature,
                d_entropy=d_entropy * inverse_temperature,
                entropy=entropy,
                HAS_ENTROPY=HAS_ENTROPY,
                BLOCK=L * R,
                STAGES=STAGES,
            )
        else:
            write_zeros(out_row, V, L * R)


def formula(tokens: Tokens, spec: LossSpec) -> dict[str, Any]:
    """Kernel arguments for the options of `token_values`."""
    options = spec.token_options
    has_correction, is_sapo = tokens.rollout_logps is not None, spec.policy_loss == "sapo"
    return {
        "low": options["ratio_low"],
        "high": options["ratio_high"],
        "dual_clip": options["dual_clip"],
        "kl_coef": options["kl_coef"],
        "entropy_coef": options["entropy_coef"],
        "demo_shape": options["demo_shape"],
        "tau_positive": options["sapo_tau_positive"] if is_sapo else None,
        "tau_negative": options["sapo_tau_negative"] if is_sapo else None,
        "correction_min": options["correction_min"] if has_correction else None,
        "correction_max": options["correction_max"] if has_correction else None,
        "POLICY": spec.policy_loss,
        "KL_RATIO": spec.use_bias_correction_kl and spec.kl_coef != 0,
        "MASK_CORRECTION": has_correction and spec.correction.endswith("mask"),
        "HAS_DUAL": spec.dual_clip is not None,
        "HAS_ENTROPY": spec.entropy_coef != 0,
        "KL": spec.kl_estimator,
        "DEMO": spec.demo_weight.value,
    }


@triton.jit(
    do_not_specialize=["N"],
    do_not_specialize_on_alignment=[*ROW_COLUMNS, "logps", "entropies", "terms", "derivatives"],
)
def terms_kernel(
    logps,  # float32 [N]
    entropies,  # float32 [N]
    targets,  # int64 [N]
    demo,  # the other arguments: as in `loss_kernel`
    advantages,
    old,
    ref,
    scale,
    factor,
    rollout_logps,
    terms,  # float32 [5, N]
    derivatives,  # float32 [2, N]: of sum(scale * loss) in logps and entropies
    N,
    low,
    high,
    dual_clip,
    kl_coef,
    entropy_coef,
    demo_shape,
    tau_positive,
    tau_negative,
    correction_min,
    correction_max,
    POLICY: tl.constexpr,
    KL_RATIO: tl.constexpr,
    MASK_CORRECTION: tl.constexpr,
    HAS_DUAL: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    KL: tl.constexpr,
    DEMO: tl.constexpr,
):
    """The formulas of `loss_kernel` where the statistics of the rows are known."""
    n = tl.program_id(0).to(tl.int64)
    logp = 0.0
    entropy = 0.0
    loss = 0.0
    kl = 0.0
    clipped = 0.0
    d_logp = 0.0
    d_entropy = 0.0
    if tl.load(targets + n) != NO_LOSS:
        logp = tl.load(logps + n)
        entropy = tl.load(entropies + n)
        loss, kl, clipped, d_logp, d_entropy = token_values(
            n=n,
            logp=logp,
            entropy=entropy,
            demo=demo,
            advantages=advantages,
            old=old,
            ref=ref,
            factor=factor,
            rollout_logps=rollout_logps,
            low=low,
            high=high,
            dual_clip=dual_clip,
            kl_coef=kl_coef,
            entropy_coef=entropy_coef,
            demo_shape=demo_shape,
            tau_positive=tau_positive,
            tau_negative=tau_negative,
            correction_min=correction_min,
            correction_max=correction_max,
            POLICY=POLICY,
            KL_RATIO=KL_RATIO,
            MASK_CORRECTION=MASK_CORRECTION,
            HAS_DUAL=HAS_DUAL,
            HAS_ENTROPY=HAS_ENTROPY,
            KL=KL,
            DEMO=DEMO,
        )
    tl.store(terms + n, logp)
    tl.store(terms + N + n, entropy)
    tl.store(terms + 2 * N + n, loss)
    tl.store(terms + 3 * N + n, kl)
    tl.store(terms + 4 * N + n, clipped)
    weight = tl.load(scale + n)
    tl.store(derivatives + n, d_logp * weight)
    tl.store(derivatives + N + n, d_entropy * weight)


def token_terms(
    logps: Tensor,  # float32 [N]
    entropy: Tensor,  # float32 [N]
    tokens: Tokens,
    spec: LossSpec,
) -> tuple[TokenTerms, Tensor]:
    """The terms of `row_loss` from the statistics of the rows, and their derivatives [2, N]."""
    count, device = len(logps), logps.device
    results = torch.empty(7, count, dtype=torch.float32, device=device)
    columns = {name: getattr(tokens, name) for name in ROW_COLUMNS}
    arguments = {
        **launch.dense(logps=logps, entropies=entropy, **columns),
        "terms": results[:5],
        "derivatives": results[5:],
        "N": count,
        **formula(tokens, spec),
    }
    launch.Launch(terms_kernel, count, arguments, 1).run(device)
    return TokenTerms(*results[:5]), results[5:]


def row_loss(
    logits: Tensor,
    tokens: Tokens,
    spec: LossSpec,
    out: Tensor | None,
    *,
    softcap: float | None = None,
) -> TokenTerms:
    count = tokens.targets.numel()
    terms = torch.empty(5, count, dtype=torch.float32, device=logits.device)
    tile = launch.tiling(logits, out)
    temperature = spec.temperature if tokens.temperature is None else tokens.temperature
    arguments = {
        "logits": logits,
        "out": out,
        **launch.dense(**{name: getattr(tokens, name) for name in ROW_COLUMNS}),
        "terms": terms,
        "N": count,
        "out_stride_b": 0,
        "out_stride_t": 0,
        **launch.geometry(logits, out),
        **launch.scaling(Scaling(temperature, softcap)),
        **formula(tokens, spec),
        "L": tile.lanes,
        "R": tile.width,
        "STAGES": tile.stages,
        "PEEL": launch.peels(logits),
    }
    launch.Launch(loss_kernel, count, arguments, tile.warps).run(logits.device)
    return TokenTerms(*terms)
