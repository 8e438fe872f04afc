"""The bias of the applied gradients, relative to gradients without phi and without clipping."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from gac.data.rows import Row
from gac.methods.base import Mix
from gac_kernels import DemoWeight, LossSpec

from .parts import Accumulate, GradientParts


def measure_bias(parts: GradientParts, live: Sequence[Row], accumulate: Accumulate) -> Tensor:
    """Gram matrix [4, 4] of the gradients of the two terms, as applied and under `plain_spec`.

    parts: the applied gradients, several per term; not changed.
    live: the rows that may have a gradient. accumulate: adds their gradient under `plain_spec`.
    """
    count = parts.count
    for demo in (True, False):
        accumulate([row for row in live if row.is_demo == demo], Mix(float(demo)))
        parts.take()
    weights = torch.zeros(4, len(parts.parts), dtype=torch.float64)
    weights[0, :count] = weights[1, count : 2 * count] = 1 / count
    weights[2, -2] = weights[3, -1] = 1
    gram = weights @ parts.gram() @ weights.T
    del parts.parts[-2:]  # only measured, not applied
    return gram


def plain_spec(spec: LossSpec) -> LossSpec:
    """`spec` without phi and without clipping."""
    return dataclasses.replace(
        spec, demo_weight=DemoWeight.ONE, clip_low=None, clip_high=None, dual_clip=None
    )
