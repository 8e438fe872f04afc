"""Norms of the accumulating gradient, for `signals: accumulator`, and a check of the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gac.control.accumulator import order, tells_all
from gac.data.rows import Row
from gac.errors import ConfigError
from gac.training.run_config import TrainConfig

from .gradient_parts import copies, local

Blocks = list[tuple[bool, list[Row]]]


def ordered(blocks: Blocks) -> Blocks:
    """Reorder the (is_demo, rows) micro-batches so that their gradient norms are most informative."""
    kinds = {kind: [block for block in blocks if block[0] == kind] for kind in (True, False)}
    sides = {kind: iter(mine) for kind, mine in kinds.items()}
    return [next(sides[kind]) for kind in order(len(kinds[True]), len(kinds[False]))]


def progress(demo: Sequence[bool], rows: Sequence[float]) -> Tensor:
    """Cumulative shares [M, 2] of demonstrations and rollouts after each of the M micro-batches.

    rows: number of rows in each micro-batch, summed over ranks.
    """
    kinds = torch.tensor(demo)
    counts = torch.tensor(rows, dtype=torch.float64)
    sums = torch.stack([(counts * kinds).cumsum(0), (counts * ~kinds).cumsum(0)], 1)
    return sums / sums[-1].clamp(min=1)


def square_norm(gradients: Sequence[Any], device: torch.device) -> Tensor:
    """This rank's contribution to the squared norm (float64 scalar); sum it over ranks for the
    total.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        if gradient is not None:
            total += local(gradient).float().square().sum(dtype=torch.float64) / copies(gradient)
    return total


def check_accumulation(config: TrainConfig, ranks: int) -> None:
    """Raise ConfigError unless the run's micro-batches determine every quantity that `accumulator`
    estimates.
    """
    group, limit = config.rollouts.completions, config.micro_batch
    if config.micro_tokens is not None:
        raise ConfigError(
            f"micro_tokens={config.micro_tokens}: signals: accumulator requires micro-batches of a fixed number of rows; set micro_batch instead"
        )
    if limit is not None and limit % group:
        raise ConfigError(
            f"micro_batch={limit}: signals: accumulator wants a prompt's rollouts together; use a "
            f"multiple of rollouts.completions={group}"
        )
    sizes = {True: config.demo_batch // ranks, False: config.rollouts.prompts * group // ranks}
    rows = {kind: _sizes(size, limit or size) for kind, size in sizes.items()}
    kinds = order(len(rows[True]), len(rows[False]))
    counts = [rows[kind].pop(0) for kind in kinds]
    if not tells_all(progress(kinds, counts)):
        raise ConfigError(
            f"micro_batch={limit}: signals: accumulator has {kinds.count(True)} micro-batches of "
            f"demonstrations and {kinds.count(False)} of rollouts; it needs two or "
            "more of each, and three or more of one; use a smaller micro_batch, or larger batches"
        )


def _sizes(count: int, limit: int) -> list[float]:
    """Sizes of the chunks of at most `limit` rows that `count` rows are split into."""
    return [float(min(limit, count - start)) for start in range(0, count, limit)]
