"""Separate gradients of the parts of each loss term: their inner products and weighted sums.

A two-objective solver needs only three scalars, so sharded gradients cost one small all-reduce.
Each gradient takes an additional buffer of the size of the (sharded) parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gac.control.solvers import Weights
from gac.data.rows import Row
from gac.methods.base import Mix
from gac.parallel.collectives import all_reduce_sum, world_size

logger = logging.getLogger(__name__)
Accumulate = Callable[[list[Row], Mix], None]  # adds the gradient of rows to `.grad`
Gradient = list[Tensor | None]  # one entry per parameter; None if the loss does not depend on it


class GradientParts:
    """Collects successive gradients of `parameters`.

    Args:
        parameters: (name, parameter) of every trainable parameter, in the same order on all ranks.
        count: number of parts of each of the two terms.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], count: int = 1) -> None:
        self.parameters, self.count = list(parameters), count
        self.parts: list[Gradient] = []
        self.averages: dict[str, Tensor] = {}

    def measure(self, rows: Sequence[Row], live: Sequence[Row], accumulate: Accumulate) -> None:
        """Compute the gradient of each of the `count` parts of each term, demonstrations first.

        rows: the rows of the step, in equal parts. live: those that may have a gradient.
        """
        live_rows, count = set(live), self.count
        for demo in (True, False):
            term = [row for row in rows if row.is_demo == demo]
            for i in range(count):
                part = term[len(term) * i // count : len(term) * (i + 1) // count]
                # each part is a mean over its own rows, hence the scale `count`
                accumulate([r for r in part if r in live_rows], Mix(float(demo), float(count)))
                self.take()

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

    def combine(self, weights: Sequence[float]) -> None:
        """Set the gradient to sum_i weights[i] part_i."""
        for column, (_, p) in zip(zip(*self.parts, strict=True), self.parameters, strict=True):
            p.grad = _weighted(column, weights, reuse=not self.averages)
        self.parts = []

    def combine_pair(self, weights: Weights | None, mix: Mix) -> Mix:
        """`combine` with one weight per term (demo, rollout); each term is the mean of its parts.

        Returns the mix applied; if `weights` is None, warns, leaves no gradient and returns `mix`.
        """
        if weights is None:
            message = "skipping the update: the inner products of the gradients are not finite"
            logger.warning(message)
            self.parts = []
            return mix
        self.combine([weight / self.count for weight in weights for _ in range(self.count)])
        return Mix.weights(*weights) if sum(weights) != 0 else Mix(mix.mu, 0.0)


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
