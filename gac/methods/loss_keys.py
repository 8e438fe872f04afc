"""The keys of the configuration's `loss` that a method accepts; the others are errors."""

from __future__ import annotations

from dataclasses import fields

from gac.fields import require_default
from gac.types import Sampling, StepNeeds
from gac_kernels import DemoWeight, LossSpec

from .base import Loss, Method

CLIP = {"clip_low", "clip_high"}
POLICY = CLIP | {"dual_clip", "policy_loss", "importance_sampling_level", "sapo_tau"}
PENALTY = {"kl_estimator", "use_bias_correction_kl"}
ROLLOUTS = POLICY | PENALTY | {"kl_coef", "entropy_coef"}
ROLLOUTS |= {"rollout_reduction", "correction_min"}
SHAPED = DemoWeight.SHAPED, DemoWeight.TRUST
DEMOS = {"demo_weight", "demo_shape", "demo_reduction"}
ELSEWHERE = {name: f"rollouts.{name}" for name in ("temperature", "correction", "correction_max")}
ELSEWHERE |= {"teacher_coef": "teacher.coef", "teacher_loss": "teacher.loss"}


def check_loss(
    method: Method, base: LossSpec, loss: Loss, needs: StepNeeds, plan: Sampling
) -> None:
    """Raise ValueError if `base`, the `loss` section of a run, has a key without effect.

    That is a key that `method` sets itself or does not use, or that acts only with another key.
    loss: the run's loss. needs: the union of the method's needs in all steps. plan: its sampling.
    """
    spec, default = loss.spec, LossSpec()
    reductions = spec.rollout_reduction, spec.demo_reduction
    needed = {
        **dict.fromkeys(CLIP, (spec.policy_loss in ("clip", "cispo"), "policy_loss=clip or cispo")),
        "dual_clip": (spec.policy_loss == "clip", "policy_loss=clip"),
        "sapo_tau": (spec.policy_loss == "sapo", "policy_loss=sapo"),
        "importance_sampling_level": (spec.policy_loss != "reinforce", "a policy_loss with ratios"),
        **dict.fromkeys(PENALTY, (spec.kl_coef != 0, "kl_coef")),
        "demo_shape": (spec.demo_weight in SHAPED, "demo_weight=shaped or trust"),
        "correction_min": (spec.correction != "none", "rollouts.correction"),
        "max_tokens": ("constant" in reductions, "a constant reduction"),
    }
    unused = set() if needs.rollouts else set(ROLLOUTS)
    unused |= set() if plan.uses_rewards else POLICY
    unused |= set() if needs.demos and not plan.teacher else DEMOS
    if loss.token is not None:
        unused |= {"demo_weight", "demo_shape"} | (set() if loss.policy else POLICY)
    for field in fields(LossSpec):
        name, used, given = field.name, getattr(spec, field.name), getattr(base, field.name)
        if given == getattr(default, name):
            continue
        own = {"demo_weight": "weight", "demo_shape": "shape"}.get(name, name)
        if name in ELSEWHERE:
            raise ValueError(f"loss.{name}={given!r}: use {ELSEWHERE[name]} instead")
        if used != given:
            advice = f"use method.{own} instead" if hasattr(method, own) else "remove the key"
            raise ValueError(
                f"loss.{name}={given!r}: method {method.name!r} sets it to {used!r}; {advice}"
            )
        holds, need = needed.get(name, (True, ""))
        if name in unused or not holds:
            why = f"on method {method.name!r}" if name in unused else f"without {need}"
            require_default(base, name, f"loss.{name}", why)
