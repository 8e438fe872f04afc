"""Several separate gradients of one model: their inner products and weighted sums.

A two-objective solver needs only three scalars, so sharded gradients cost one small all-reduce.
Each gradient takes an additional buffer of the size of the (sharded) parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gac.control.solvers import Weights
from gac.methods.base import Mix
from gac.parallel.collectives import all_reduce_sum, world_size

logger = logging.getLogger(__name__)
Gradient = list[Tensor | None]  # one entry per parameter; None if the loss does not depend on it


class GradientParts:
    """Collects successive gradients of `parameters`.

    Args:
        parameters: (name, parameter) of every trainable parameter, in the same order on all ranks.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.parameters = list(parameters)
        self.parts: list[Gradient] = []
        self.averages: dict[str, Tensor] = {}

    def take(self) -> None:
        """Store the accumulated gradient as the next part and reset `.grad` to None."""
        self.parts.append([p.grad for _, p in self.parameters])
        for _, p in self.parameters:
            p.grad = None

    def gram(self) -> Tensor:
        """Gram matrix of the P parts: float64 [P, P] on the CPU, the same on every rank."""
        parts = self.parts
        device = self.parameters[0][1].device
        total = torch.zeros(len(parts), len(parts), dtype=torch.float64, device=device)
        for column in zip(*parts, strict=True):
            present = [(i, g) for i, g in enumerate(column) if g is not None]
            if not present:
                continue
            index = [i for i, _ in present]
            rows = torch.stack([local(g).float().flatten() for _, g in present])
            square = (rows @ rows.T).double() / copies(present[0][1])
            total[torch.tensor(index)[:, None], torch.tensor(index)] += square
        return all_reduce_sum(total).cpu()

    def bias_gram(self, count: int) -> Tensor:
        """Gram matrix [4, 4] of the gradients of the two terms and the last two parts.

        The gradient of a term is the mean of its `count` parts. Removes the last two parts: they
        are only measured, not applied.
        """
        weights = torch.zeros(4, len(self.parts), dtype=torch.float64)
        weights[0, :count] = weights[1, count : 2 * count] = 1 / count
        weights[2, -2] = weights[3, -1] = 1
        gram = weights @ self.gram() @ weights.T
        self.parts = self.parts[:-2]
        return gram

    def combine(self, weights: Sequence[float] | None) -> None:
        """Set the gradient to sum_i weights[i] part_i; with None, to None."""
        if weights is not None:
            for column, (_, p) in zip(zip(*self.parts, strict=True), self.parameters, strict=True):
                p.grad = _weighted(column, weights, reuse=not self.averages)
        self.parts = []

    def combine_pair(self, weights: Weights | None, mix: Mix) -> Mix:
        """`combine` with one weight per term (demo, rollout); each term is the mean of its parts.

        Returns the mix applied; if `weights` is None, warns, leaves no gradient and returns `mix`.
        """
        n = len(self.parts) // 2
        if weights is None:
            logger.warning(
                "skipping the update: the inner products of the gradients are not finite"
            )
            self.combine(None)
            return mix
        self.combine([weights[0] / n] * n + [weights[1] / n] * n)
        return Mix.weights(*weights) if sum(weights) != 0 else Mix(mix.mu, 0.0)

    def average(self, tracked: dict[str, Tensor], rate: float) -> None:
        """Replace the parts with their moving averages y <- y + rate (g - y), kept in `averages`.

        tracked: the previous averages, keyed by "part.parameter name"; not modified, because the
            step may still be skipped.
        """
        for i, part in enumerate(self.parts):
            for j, (name, _) in enumerate(self.parameters):
                mean = tracked[f"{i}.{name}"] * (1 - rate)
                if (new := part[j]) is not None:
                    mean.add_(new, alpha=rate)
                part[j] = self.averages[f"{i}.{name}"] = mean


def local(tensor: Any) -> Tensor:
    """This rank's shard of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def copies(tensor: Any) -> int:
    """Number of ranks that hold a copy of each element."""
    if not hasattr(tensor, "placements"):
        return world_size()
    count = 1
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            count *= tensor.device_mesh.size(dim)
    return count


def _weighted(
    column: Sequence[Tensor | None], weights: Sequence[float], reuse: bool
) -> Tensor | None:
    """Weighted sum of one parameter's gradients; reuse: write it into the first one's buffer."""
    total: Tensor | None = None
    for gradient, weight in zip(column, weights, strict=True):
        if gradient is None or weight == 0:
            continue
        if total is None:
            total = gradient.mul_(weight) if reuse else gradient * weight
        else:
            total.add_(gradient, alpha=weight)
    return total
