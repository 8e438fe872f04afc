"""Several gradients of one model side by side: their inner products and weighted sums.

A solver for two objectives needs three scalars, so sharded gradients cost one small all-reduce.
Each gradient is one more buffer of the size of the (sharded) parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gac.control.solvers import Weights
from gac.methods.base import Mix
from gac.parallel.collectives import add, ranks

logger = logging.getLogger(__name__)
Gradient = list[Tensor | None]  # one entry per parameter; None: the loss does not reach it


class GradientParts:
    """Takes gradients off `parameters`, one after the other.

    Args:
        parameters: name and parameter of everything that is trained, in one order on every rank.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.parameters = list(parameters)
        self.taken: list[Gradient] = []
        self.averages: dict[str, Tensor] = {}

    def take(self) -> None:
        """Keep the accumulated gradient as the next part and clear it."""
        self.taken.append([p.grad for _, p in self.parameters])
        for _, p in self.parameters:
            p.grad = None

    def gram(self) -> Tensor:
        """float64 [P, P] on the CPU: inner products of the P parts, the same on every rank."""
        parts = self.taken
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
        return add(total).cpu()

    def bias_gram(self, count: int) -> Tensor:
        """[4, 4] of the two terms, each the mean of `count` parts, and of two further gradients.

        The further ones, taken last, are dropped: they are measured, not applied.
        """
        mean = torch.zeros(4, len(self.taken), dtype=torch.float64)
        mean[0, :count] = mean[1, count : 2 * count] = 1 / count
        mean[2, -2] = mean[3, -1] = 1
        gram = mean @ self.gram() @ mean.T
        self.taken = self.taken[:-2]
        return gram

    def combine(self, weights: Sequence[float] | None) -> None:
        """Make the gradient sum_i weights[i] part_i; None leaves the parameters without one."""
        if weights is not None:
            for column, (_, p) in zip(zip(*self.taken, strict=True), self.parameters, strict=True):
                p.grad = _weighted(column, weights, reuse=not self.averages)
        self.taken = []

    def combine_pair(self, weights: Weights | None, mix: Mix) -> Mix:
        """`combine` with the weights of the two terms, SFT and RL, each the mean of its parts.

        Returns what was applied; None skips the update with a warning and returns `mix`.
        """
        n = len(self.taken) // 2
        if weights is None:
            logger.warning("inner products of the gradients are not finite: no update")
            self.combine(None)
            return mix
        self.combine([weights[0] / n] * n + [weights[1] / n] * n)
        return Mix.weights(*weights) if sum(weights) != 0 else Mix(mix.mu, 0.0)

    def average(self, tracked: dict[str, Tensor], rate: float) -> None:
        """Replace the parts by their moving averages y <- y + rate (g - y), also in `averages`.

        tracked: those of the step before, by "part.parameter name"; they stay what they are, for
        the step may still be skipped.
        """
        for i, part in enumerate(self.taken):
            for j, (name, _) in enumerate(self.parameters):
                mean = tracked[f"{i}.{name}"] * (1 - rate)
                if (new := part[j]) is not None:
                    mean.add_(new, alpha=rate)
                part[j] = self.averages[f"{i}.{name}"] = mean


def local(tensor: Any) -> Tensor:
    """This rank's shard of a DTensor; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def copies(tensor: Any) -> int:
    """On how many ranks each element is held."""
    if not hasattr(tensor, "placements"):
        return ranks()
    held = 1
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            held *= tensor.device_mesh.size(dim)
    return held


def _weighted(
    column: Sequence[Tensor | None], weights: Sequence[float], reuse: bool
) -> Tensor | None:
    """reuse: the first buffer becomes the result, because the parts are not needed any more."""
    total: Tensor | None = None
    for gradient, weight in zip(column, weights, strict=True):
        if gradient is None or weight == 0:
            continue
        if total is None:
            total = gradient.mul_(weight) if reuse else gradient * weight
        else:
            total.add_(gradient, alpha=weight)
    return total
