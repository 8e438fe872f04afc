"""Statistics of a study: means over seeds, paired differences, t intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gac.evaluation.table import percent, percent_interval

Finals = Mapping[str, Sequence[float | None]]
"""Label -> final accuracy of each seed; None if the run is missing or failed."""


def interval(values: Sequence[float], share: bool = False) -> list[float] | None:
    """95% t interval of the mean over seeds; None for fewer than two values.

    A bootstrap of three seeds gives the range of their values, which often excludes the true mean.

    share: the values are in [0, 1], and so is the interval.
    """
    if len(values) < 2:
        return None
    # Student's t is sqrt(n - 1) * tan(angle), with density cos(angle) ** (n - 2)
    n, angles = len(values), np.linspace(0, np.pi / 2, 100_000)
    mass = np.cumsum(np.cos(angles) ** (n - 2))
    quantile = math.sqrt(n - 1) * math.tan(np.interp(0.95 * mass[-1], mass, angles))
    ends = np.mean(values) + np.array([-1, 1]) * quantile * np.std(values, ddof=1) / math.sqrt(n)
    return [round(end, 6) for end in (ends.clip(0, 1) if share else ends).tolist()]


def paired(values: Sequence[float | None], base: Sequence[float | None]) -> list[float]:
    """Differences for the seeds that have both values."""
    pairs = zip(values, base, strict=True)
    return [a - b for a, b in pairs if a is not None and b is not None]


def summary(finals: Finals, baseline: str) -> dict[str, dict[str, Any]]:
    """Statistics per method: the value of the key `methods` in study.json."""
    rows = {}
    for label, values in finals.items():
        known = [value for value in values if value is not None]
        differences = paired(values, finals[baseline])
        rows[label] = {
            "final": list(values),
            "mean": mean(known),
            "ci95": interval(known, share=all(0 <= value <= 1 for value in known)),
            "against_baseline": {"difference": mean(differences), "ci95": interval(differences)},
        }
    return rows


def row_cells(row: Mapping[str, Any]) -> list[str]:
    """Table cells: number of seeds, accuracy with interval, difference with interval."""
    against, known = row["against_baseline"], sum(value is not None for value in row["final"])
    accuracy = [percent(row["mean"]), percent_interval(row["ci95"])]
    difference = [percent(against["difference"], "+"), percent_interval(against["ci95"], "+")]
    return [str(known), *accuracy, *difference]


def mean(values: Sequence[float]) -> float | None:
    """The mean, or None without values."""
    return round(math.fsum(values) / len(values), 6) if values else None
