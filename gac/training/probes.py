"""Separate parts of the gradient of each term, which only some steps measure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gac.collectives import all_reduce_sum, world_size
from gac.rows import Row
from gac.types import Mix, StepNeeds, Weights

logger = logging.getLogger(__name__)

# elements of a parameter whose gradients are copied at once, and whose products are summed in the
# precision of a float32 matrix product; the sum over chunks is in float64
CHUNK = 1 << 20
Gradient = list[Tensor | None]  # one entry per parameter; None if the loss does not depend on it
# adds the gradient of rows, for a mix, to `.grad`; if the last argument is true, without phi and
# without clipping
Accumulate = Callable[[list[Row], Mix, bool], None]


class GradientParts:
    """Splits each term's rows into `needs.parts` equal parts and computes each part's gradient.

    Args:
        parameters: (name, parameter) of every trainable parameter, in the same order on all ranks.
        needs: the number of parts, and what to measure of them.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], needs: StepNeeds) -> None:
        self.parameters, self.needs = list(parameters), needs
        self.parts: list[Gradient] = []
        self.averages: dict[str, Tensor] = {}

    def measure(
        self,
        rows: Sequence[Row],
        live: Sequence[Row],
        accumulate: Accumulate,
        tracked: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the gradients and their inner products, in the order demonstrations, rollouts.

        Args:
            rows: the rows of the step. live: those that may have a gradient.
            accumulate: adds the gradient of rows to `.grad`.
            tracked: see `average`.

        Returns:
            The Gram matrix of the parts and, with `needs.bias`, the one that `bias` returns.
        """
        live_rows, count = set(live), self.needs.parts
        for demo in (True, False):
            term = [row for row in rows if row.is_demo == demo]
            for i in range(count):
                part = term[len(term) * i // count : len(term) * (i + 1) // count]
                # each part is a mean over its own rows, hence the scale `count`
                mix = Mix(float(demo), float(count))
                accumulate([row for row in part if row in live_rows], mix, False)
                self.take()
        bias_gram = self.bias(live, accumulate) if self.needs.bias else None
        gram = self.gram()
        # a non-finite gradient would corrupt the moving averages permanently
        if self.needs.average and gram.isfinite().all():
            self.average(tracked)
            gram = self.gram()
        return gram, bias_gram

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
            index = torch.tensor([i for i, _ in present])
            flat = [local(g).flatten().split(CHUNK) for _, g in present]
            for chunks in zip(*flat, strict=True):
                rows = torch.stack(chunks).float()
                square = (rows @ rows.T).double() / copies(present[0][1])
                total[index[:, None], index] += square
        return all_reduce_sum(total).cpu()

    def bias(self, live: Sequence[Row], accumulate: Accumulate) -> Tensor:
        """Gram matrix [4, 4] of the applied and the plain gradients of the two terms.

        The plain gradients, without phi and without clipping, are only measured.
        """
        count = self.needs.parts
        for demo in (True, False):
            accumulate([row for row in live if row.is_demo == demo], Mix(float(demo)), True)
            self.take()
        weights = torch.zeros(4, len(self.parts), dtype=torch.float64)
        weights[0, :count] = weights[1, count : 2 * count] = 1 / count
        weights[2, -2] = weights[3, -1] = 1
        gram = weights @ self.gram() @ weights.T
        del self.parts[-2:]
        return gram

    def average(self, tracked: dict[str, Tensor]) -> None:
        """Replace the parts with their moving averages y <- y + rate (g - y), kept in `averages`.

        tracked: the previous averages, by "part.parameter name"; not modified, because the step may
            still be skipped.
        """
        rate = self.needs.average
        for i, part in enumerate(self.parts):
            for j, (name, _) in enumerate(self.parameters):
                mean = tracked[f"{i}.{name}"] * (1 - rate)
                if (new := part[j]) is not None:
                    mean.add_(new, alpha=rate)
                part[j] = self.averages[f"{i}.{name}"] = mean

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
        count = self.needs.parts
        self.combine([weight / count for weight in weights for _ in range(count)])
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
    """Weighted sum of a parameter's gradients; with `reuse`, it overwrites the first of them."""
    terms = [(g, w) for g, w in zip(column, weights, strict=True) if g is not None and w != 0]
    if not terms:
        return None
    (gradient, weight), *rest = terms
    total = gradient.mul_(weight) if reuse else gradient * weight
    for gradient, weight in rest:
        total.add_(gradient, alpha=weight)
    return total
