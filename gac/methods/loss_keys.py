"""The keys of the configuration's `loss` that a method accepts; the others are errors."""

from __future__ import annotations

from dataclasses import fields, replace

from gac_kernels import LossSpec

from .base import Method, StepNeeds

POLICY = {"clip_low", "clip_high", "dual_clip", "policy_loss", "importance_sampling_level"}
POLICY |= {"sapo_tau"}
ROLLOUTS = POLICY | {"kl_coef", "kl_estimator", "use_bias_correction_kl", "entropy_coef"}
ROLLOUTS |= {"rollout_reduction", "correction_min"}
DEMOS = {"demo_weight", "demo_shape", "demo_reduction"}
ELSEWHERE = {name: f"rollouts.{name}" for name in ("temperature", "correction", "correction_max")}


def check_loss(method: Method, base: LossSpec, steps: int) -> None:
    """Raise ValueError if `base`, the `loss` of a run of `steps` steps, has a key without effect.

    That is a key that `method` sets itself or does not use.
    """
    loss, default = method.loss(replace(base, max_tokens=base.max_tokens or 1)), LossSpec()
    needs = StepNeeds.union(map(method.needs, range(steps)))
    unused = set() if needs.rollouts else set(ROLLOUTS)
    unused |= set() if needs.demos else DEMOS
    unused |= POLICY if loss.token is not None and not loss.policy else set()
    if "constant" not in (loss.spec.rollout_reduction, loss.spec.demo_reduction):
        unused.add("max_tokens")
    for field in fields(LossSpec):
        name, used = field.name, getattr(loss.spec, field.name)
        given = getattr(base, name)
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
        if name in unused:
            raise ValueError(
                f"loss.{name}={given!r} has no effect on method {method.name!r}: remove the key"
            )
