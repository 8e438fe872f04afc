"""The loss of the contract written out token by token, for autograd in float64.

Deliberately naive: one Python loop over sequences, no code of the library.
"""

import math
from typing import Any

import torch
from torch import Tensor

from gac_kernels import DemoWeight, LossSpec


def distributions(
    x: Tensor, targets: Tensor, spec: LossSpec, logit_scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of x [N, V]."""
    log_p = all_log_probs(x, spec, logit_scale, softcap)
    logps = log_p.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    return logps, -(log_p.exp() * log_p).sum(-1)


def all_log_probs(x: Tensor, spec: LossSpec, logit_scale: float, softcap: float | None) -> Tensor:
    z = logit_scale * x
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return (z / spec.temperature).log_softmax(-1)


def teacher_tokens(spec: LossSpec, log_p: Tensor, logp: Tensor, teacher: Tensor, ids: Any) -> Any:
    """The teacher's losses of the rollout tokens of one sequence, from log_p [n, V]."""
    if ids is None:
        d = teacher - logp
        return {"k1": -d, "k2": d * d / 2, "k3": d.exp() - d - 1}[spec.teacher_loss]
    losses = []
    for row, values, tokens in zip(log_p, teacher, ids, strict=True):
        if tokens[0] == -100:
            losses.append(torch.zeros((), dtype=torch.float64))
            continue
        q, p = row.exp()[tokens[tokens != -100]], values[tokens != -100].exp()
        q, p = (torch.cat([x, 1 - x.sum()[None]]) for x in (q, p))
        first, second = (p, q) if spec.teacher_loss == "forward_kl" else (q, p)
        losses.append((first * (first / second).log()).sum())
    return torch.stack(losses) if losses else logp


def kept(spec: LossSpec, logp: Tensor, engine: Tensor, a: Tensor) -> Tensor:
    """1 inside the trust region of probabilities, else 0."""
    d = torch.where(engine.isnan(), 0.0, logp.exp() - engine.exp()).detach()
    outside = d.abs() > (0.3 if spec.correction_max == 2.0 else spec.correction_max)
    if spec.correction == "probability_mask_away":
        outside &= torch.sign(a) == torch.sign(d)
    return (~outside).double()


def correction(spec: LossSpec, differences: Tensor) -> Tensor:
    """The factors of one sequence from the differences of its rollout tokens."""
    d = torch.where(differences.isnan(), 0.0, differences)
    if spec.correction == "none":
        return torch.ones_like(d)
    if spec.correction.startswith("sequence"):
        d = d.sum().expand_as(d)
    w, low, high = d.exp(), spec.correction_min or 0.0, spec.correction_max or math.inf
    if spec.correction.endswith("truncate"):
        return w.clamp(low, high)
    return torch.where((w < low) | (w > high), 0.0, w)


def policy_term(spec: LossSpec, r: Tensor, logp: Tensor, a: Tensor) -> Tensor:
    low = -math.inf if spec.clip_low is None else 1 - spec.clip_low
    high = math.inf if spec.clip_high is None else 1 + spec.clip_high
    if spec.policy_loss == "reinforce":
        return -a * logp
    if spec.policy_loss == "cispo":
        return -r.clamp(low, high).detach() * a * logp
    if spec.policy_loss == "sapo":
        tau = torch.where(a > 0, torch.tensor(spec.sapo_tau[0]).double(), spec.sapo_tau[1])
        return -(4 / tau) * torch.sigmoid(tau * (r - 1)) * a
    term = -torch.minimum(r * a, r.clamp(low, high) * a)
    if spec.dual_clip is not None:
        term = torch.where(a < 0, term.minimum(-spec.dual_clip * a), term)
    return term


def demo_term(spec: LossSpec, logp: Tensor, a: Tensor) -> Tensor:
    p, c = logp.exp(), spec.demo_shape
    match spec.demo_weight:
        case DemoWeight.SHAPED:
            return -a * p / (p + c)
        case DemoWeight.TRUST:
            return -p / p.clamp(min=c).detach()
        case DemoWeight.ONE:
            return -logp
        case DemoWeight.P:
            return -p.detach() * logp
        case _:
            return -(p * (1 - p)).detach() * logp


def rollout_tokens(
    spec: LossSpec, logp: Tensor, entropy: Tensor, a: Tensor, w: Tensor, columns: dict[str, Any]
) -> Tensor:
    """The losses of the rollout tokens of one sequence."""
    old, ref, engine = (columns.get(k) for k in ("old_logps", "ref_logps", "rollout_logps"))
    anchor = logp.detach() if old is None else old
    log_ratio = logp - anchor
    r = (
        log_ratio.mean().expand_as(logp).exp()
        if spec.importance_sampling_level == "sequence"
        else log_ratio.exp()
    )
    if engine is not None and spec.correction.startswith("probability"):
        w = w * kept(spec, logp, engine, a)
    elif engine is not None:
        w = w * correction(spec, anchor - engine)
    loss = w * policy_term(spec, r, logp, a) - spec.entropy_coef * entropy
    if spec.kl_coef:
        d = ref - logp
        kl = {"k1": -d, "k2": d * d / 2, "k3": d.exp() - d - 1}[spec.kl_estimator]
        loss = loss + spec.kl_coef * kl * (r if spec.use_bias_correction_kl else 1)
    return loss


def reduced(parts: list[Tensor], reduction: str, max_tokens: float | None, norm: Any) -> Tensor:
    """Reduce the token losses of each unit of one kind."""
    parts = [part for part in parts if len(part)]
    if not parts:
        return torch.zeros((), dtype=torch.float64)
    if reduction == "sequence":
        return sum(part.mean() for part in parts) / (norm or len(parts))
    total = sum(part.sum() for part in parts)
    if reduction == "token":
        return total / (norm or sum(map(len, parts)))
    return total / (norm or len(parts)) / (max_tokens if reduction == "constant" else 1)


def oracle(
    x: Tensor,  # float64 [N, V]
    targets: Tensor,  # [N]
    advantages: Tensor,  # [N]
    is_demo: Tensor,  # [N]
    ends: list[int],  # of the sequences
    spec: LossSpec,
    mu: float,
    weights: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    rollout_norm: float | None = None,
    demo_norm: float | None = None,
    teacher_logps: Tensor | None = None,
    teacher_ids: Tensor | None = None,
    **columns: Tensor | None,
) -> dict[str, Tensor]:
    """The terms and the loss; without empty sequences."""
    logps, entropy = distributions(x, targets, spec, logit_scale, softcap)
    log_p = all_log_probs(x, spec, logit_scale, softcap)
    live = targets != -100
    rollouts, demos, teachers, start = [], [], [], 0
    for end in ends:
        r, d = (torch.arange(start, end)[(live & role)[start:end]] for role in (~is_demo, is_demo))
        w = torch.ones_like(logps) if weights is None else weights.double()
        own = {k: None if v is None else v.double()[r] for k, v in columns.items()}
        rollouts.append(rollout_tokens(spec, logps[r], entropy[r], advantages[r], w[r], own))
        demos.append(w[d] * demo_term(spec, logps[d], advantages[d]))
        if teacher_logps is not None:
            ids = None if teacher_ids is None else teacher_ids[r]
            of = teacher_tokens(spec, log_p[r], logps[r], teacher_logps[r].double(), ids)
            teachers.append(of)
        start = end
    rollout_loss = reduced(rollouts, spec.rollout_reduction, spec.max_tokens, rollout_norm)
    demo_loss = reduced(demos, spec.demo_reduction, spec.max_tokens, demo_norm)
    terms = {
        "loss": (1 - mu) * rollout_loss + mu * demo_loss,
        "rollout_loss": rollout_loss,
        "demo_loss": demo_loss,
    }
    if teacher_logps is not None:
        own = reduced(teachers, spec.rollout_reduction, spec.max_tokens, rollout_norm)
        terms |= {"teacher_loss": own, "loss": terms["loss"] + spec.teacher_coef * own}
    return terms
