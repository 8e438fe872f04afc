"""Moving averages of the separate gradients, which some solvers combine in their place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .parts import GradientParts


def zero_averages(parameters: Sequence[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """The averages before the first step, of one part per term, by "part.parameter name"."""
    return {f"{i}.{name}": torch.zeros_like(p.detach()) for i in (0, 1) for name, p in parameters}


def average_parts(parts: GradientParts, tracked: dict[str, Tensor], rate: float) -> None:
    """Replace `parts` with their moving averages y <- y + rate (g - y), kept in `parts.averages`.

    tracked: the previous averages; not modified, because the step may still be skipped.
    """
    for i, part in enumerate(parts.parts):
        for j, (name, _) in enumerate(parts.parameters):
            mean = tracked[f"{i}.{name}"] * (1 - rate)
            if (new := part[j]) is not None:
                mean.add_(new, alpha=rate)
            part[j] = parts.averages[f"{i}.{name}"] = mean
