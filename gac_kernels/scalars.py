"""Encodes a LossSpec as plain numbers for kernels and operators.

None becomes a number that has no effect. An enumerated option becomes the index that C++ uses.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from .contract import KL_ESTIMATORS, NUMBERS, POLICIES, DemoWeight, LossSpec

# dtypes that the kernels support; C++ refers to them by index
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DEMO_WEIGHTS = tuple(DemoWeight)
_TEXTS = tuple(
    f.name for f in fields(LossSpec) if f.name not in ("demo_weight", "sapo_tau", *NUMBERS)
)


def token_scalars(spec: LossSpec) -> dict[str, float]:
    """Encode the options of the per-token formulas; all but the first are in native.h's order."""
    return {
        "temperature": float(spec.temperature),
        "ratio_low": -math.inf if spec.clip_low is None else 1 - spec.clip_low,
        "ratio_high": math.inf if spec.clip_high is None else 1 + spec.clip_high,
        "dual_clip": math.inf if spec.dual_clip is None else float(spec.dual_clip),
        "kl_coef": float(spec.kl_coef),
        "kl_estimator": KL_ESTIMATORS.index(spec.kl_estimator),
        "entropy_coef": float(spec.entropy_coef),
        "demo_weight": _DEMO_WEIGHTS.index(spec.demo_weight),
        "demo_shape": float(spec.demo_shape),
        "policy": POLICIES.index(spec.policy_loss),
        "sapo_tau_positive": float(spec.sapo_tau[0]),
        "sapo_tau_negative": float(spec.sapo_tau[1]),
        "kl_ratio": spec.use_bias_correction_kl,
        "mask_correction": spec.correction.endswith("mask"),
        "correction_min": float(spec.correction_min or 0),
        "correction_max": math.inf if spec.correction_max is None else float(spec.correction_max),
    }


def encode(spec: LossSpec) -> tuple[str, list[float]]:
    """Encode `spec` as a string and a list of floats (None becomes nan); `decode` is the inverse.

    Dynamo can trace f-strings, except those of numbers that it treats as dynamic.
    """
    texts = [f"{name!r}:{getattr(spec, name)!r}" for name in _TEXTS]
    literal = "{" + ",".join(texts) + f",'demo_weight':{spec.demo_weight.value!r}" + "}"
    values = [*(getattr(spec, name) for name in NUMBERS), *spec.sapo_tau]
    return literal, [math.nan if x is None else float(x) for x in values]


def decode(literal: str, numbers: Sequence[float]) -> LossSpec:
    """Decode the result of `encode`."""
    values = [None if math.isnan(x) else x for x in numbers]
    named: dict[str, Any] = dict(zip(NUMBERS, values, strict=False))
    positive, negative = numbers[-2:]
    return LossSpec(**ast.literal_eval(literal), **named, sapo_tau=(positive, negative))
