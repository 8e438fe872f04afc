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
    n = len(values)
    angles, mass = _student(n)
    quantile = math.sqrt(n - 1) * math.tan(np.interp(0.95 * mass[-1], mass, angles))
    ends = np.mean(values) + np.array([-1, 1]) * quantile * np.std(values, ddof=1) / math.sqrt(n)
    return [round(end, 6) for end in (ends.clip(0, 1) if share else ends).tolist()]


def p_value(differences: Sequence[float]) -> float | None:
    """Two-sided p of the paired t test that the mean difference is 0; None for fewer than two."""
    if len(differences) < 2:
        return None
    n, mean, deviation = len(differences), np.mean(differences), np.std(differences, ddof=1)
    if deviation == 0:
        return 1.0 if mean == 0 else 0.0
    angles, mass = _student(n)
    angle = math.atan(abs(mean) / deviation * math.sqrt(n / (n - 1)))
    return round(float(1 - np.interp(angle, angles, mass) / mass[-1]), 6)


def cohens_d(values: Sequence[float], base: Sequence[float]) -> float | None:
    """Cohen's d: the difference of the means in pooled standard deviations; None if these are 0.

    It does not use that seeds are paired, so that it is comparable with other publications'.
    """
    if min(len(values), len(base)) < 2:
        return None
    spread = (len(values) - 1) * np.var(values, ddof=1) + (len(base) - 1) * np.var(base, ddof=1)
    pooled = math.sqrt(spread / (len(values) + len(base) - 2))
    return round(float(np.mean(values) - np.mean(base)) / pooled, 6) if pooled > 0 else None


def _student(n: int) -> tuple[np.ndarray, np.ndarray]:
    """The distribution of the t of n values: angles in [0, pi / 2], and the mass below each.

    Student's t is sqrt(n - 1) * tan(angle), with density cos(angle) ** (n - 2).
    """
    angles = np.linspace(0, np.pi / 2, 100_000)
    density = np.cos(angles) ** (n - 2)
    return angles, np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])


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
            "against_baseline": {
                "difference": mean(differences),
                "ci95": interval(differences),
                "p": p_value(differences),
                "cohens_d": cohens_d(known, [x for x in finals[baseline] if x is not None]),
            },
        }
    return rows


def row_cells(row: Mapping[str, Any]) -> list[str]:
    """Cells: number of seeds, accuracy, difference, both with intervals, p and Cohen's d."""
    against, known = row["against_baseline"], sum(value is not None for value in row["final"])
    accuracy = [percent(row["mean"]), percent_interval(row["ci95"])]
    difference = [percent(against["difference"], "+"), percent_interval(against["ci95"], "+")]
    effect = [
        "-" if against[name] is None else f"{against[name]:{form}}"
        for name, form in (("p", ".3f"), ("cohens_d", "+.2f"))
    ]
    return [str(known), *accuracy, *difference, *effect]


def mean(values: Sequence[float]) -> float | None:
    """The mean, or None without values."""
    return round(math.fsum(values) / len(values), 6) if values else None
