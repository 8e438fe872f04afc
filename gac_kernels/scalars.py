"""Encodes a LossSpec as plain numbers for kernels and operators.

None becomes a number that has no effect. An enumerated option becomes the index that C++ uses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .contract import CHOICES, NUMBERS, LossSpec

# dtypes that the kernels support; C++ refers to them by index
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def token_scalars(spec: LossSpec) -> dict[str, float]:
    """Encode the options of the per-token formulas; all but the first are in native.h's order."""
    return {
        "temperature": float(spec.temperature),
        "ratio_low": -math.inf if spec.clip_low is None else 1 - spec.clip_low,
        "ratio_high": math.inf if spec.clip_high is None else 1 + spec.clip_high,
        "dual_clip": math.inf if spec.dual_clip is None else float(spec.dual_clip),
        "kl_coef": float(spec.kl_coef),
        "kl_estimator": CHOICES["kl_estimator"].index(spec.kl_estimator),
        "entropy_coef": float(spec.entropy_coef),
        "demo_weight": CHOICES["demo_weight"].index(spec.demo_weight),
        "demo_shape": float(spec.demo_shape),
        "policy": CHOICES["policy_loss"].index(spec.policy_loss),
        "sapo_tau_positive": float(spec.sapo_tau[0]),
        "sapo_tau_negative": float(spec.sapo_tau[1]),
        "kl_ratio": spec.use_bias_correction_kl,
        "mask_correction": spec.correction.endswith("mask"),
        "correction_min": float(spec.correction_min or 0),
        "correction_max": math.inf if spec.correction_max is None else float(spec.correction_max),
    }


def encode(spec: LossSpec) -> list[float]:
    """Encode `spec` as a list of floats (None becomes nan); `decode` is the inverse."""
    chosen = [valid.index(getattr(spec, name)) for name, valid in CHOICES.items()]
    numbers = [getattr(spec, name) for name in NUMBERS]
    values = *chosen, *numbers, spec.use_bias_correction_kl, *spec.sapo_tau
    return [math.nan if x is None else float(x) for x in values]


def decode(values: Sequence[float]) -> LossSpec:
    """Decode the result of `encode`."""
    rest: Any = iter([None if math.isnan(x) else x for x in values])
    named: dict[str, Any] = {name: valid[int(next(rest))] for name, valid in CHOICES.items()}
    named |= {name: next(rest) for name in NUMBERS}
    return LossSpec(**named, use_bias_correction_kl=bool(next(rest)), sapo_tau=tuple(rest))
