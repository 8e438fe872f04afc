"""The paper's statistics of a run's health and of its controller, from the columns of its metrics.

Each function takes the columns of metrics.jsonl and returns numbers by name, nan where the run did
not record what they need. `gac report` shows them in tables of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .reading import Columns

LARGE_ALPHA = 0.05
"""Change of alpha in one step that counts as large, as in the paper's table 16."""
UPDATE_BOUND = 0.1
"""B_theta of the paper's appendix D, in the norm of all weights."""
SLOW_PERIOD = 20
"""Steps per oscillation above which an oscillation of mu counts as slow."""
STAGES = {"early": (0.0, 0.25), "middle": (0.25, 0.75), "late": (0.75, 1.0)}
"""Parts of a run, as shares of its steps. The paper's appendix M has 0 to 200, 200 to 800 and 800+
of its steps; the default prior holds for a quarter of a run."""
TERMS = {"alpha": "average_disagreement", "1": "average_rl_variance", "0": "average_sft_variance"}
"""mu* is a mean of alpha, 1 and 0; the average that weighs each of them (equation 3)."""


def field(columns: Columns, name: str) -> np.ndarray:
    """A column, or an all-nan column if no row has it."""
    return columns[name] if name in columns else np.full(len(columns["step"]), math.nan)


def training_health(columns: Columns, config: Mapping[str, Any]) -> dict[str, float]:
    """The paper's table 21 for one run.

    Returns:
        effective_tokens: rollout tokens whose ratio was not clipped.
        clip_ratio: share of rollout tokens with a clipped ratio.
        kl_trigger: share of steps whose update of alpha left the band of the hysteresis.
        kl_off_target: share of steps with a measured KL outside that band around `kl_target`.
        mean_length: tokens per completion.
        within_bound: share of updates with a norm of at most `UPDATE_BOUND`.
    """
    tokens, clipped = field(columns, "rollout_tokens"), field(columns, "clip_fraction")
    counted = np.isfinite(tokens) & np.isfinite(clipped)
    total = float(tokens[counted].sum())
    effective = float((tokens * (1 - clipped))[counted].sum())
    moved = field(columns, "update_norm")
    return {
        "effective_tokens": effective if counted.any() else math.nan,
        "clip_ratio": 1 - effective / total if total else math.nan,
        "kl_trigger": _share(field(columns, "alpha_step"), lambda step: step != 0),
        "kl_off_target": _off_target(columns, config),
        "mean_length": _mean(field(columns, "completions/mean_length")),
        "within_bound": _share(moved, lambda norm: norm <= UPDATE_BOUND),
        "largest_update": float(np.nanmax(moved)) if np.isfinite(moved).any() else math.nan,
    }


def alpha_stability(columns: Columns) -> dict[str, float]:
    """The paper's table 16: mean, deviation and 5 to 95% range of alpha and of the averaged KL."""
    stats: dict[str, float] = {}
    for name, key in (("alpha", "alpha"), ("average_kl", "kl_average")):
        values = field(columns, name)
        values = values[np.isfinite(values)]
        low, high = np.quantile(values, (0.05, 0.95)) if len(values) else (math.nan, math.nan)
        stats |= {
            f"{key}_mean": _mean(values),
            f"{key}_deviation": float(values.std()) if len(values) else math.nan,
            f"{key}_low": float(low),
            f"{key}_high": float(high),
        }
    changes = np.abs(np.diff(field(columns, "alpha")))
    return stats | {"alpha_large": _share(changes, lambda change: change > LARGE_ALPHA)}


def cross_covariance(columns: Columns) -> dict[str, float]:
    """The paper's table 10, from the readings of a run with `signals.paired`.

    Returns:
        covariance: mean of c.
        covariance_variation: standard deviation of c over the absolute mean.
        denominator_positive: share of readings whose denominator of equation 4 is positive.
        covariance_share: mean of |c| / (sigma_s^2 + sigma_r^2).
        gamma: mean |gamma| of a run with `signals.bias`; gamma_least, gamma_largest: its range.
    """
    c, ss, rr, d = (
        field(columns, f"read_{name}")
        for name in ("covariance", "sft_variance", "rl_variance", "disagreement")
    )
    # a reading is logged until the next one
    new = np.concatenate([[True], c[1:] != c[:-1]])[: len(c)]
    known = new & np.isfinite(c) & np.isfinite(ss) & np.isfinite(rr) & np.isfinite(d)
    c, ss, rr, d = c[known], ss[known], rr[known], d[known]
    mean = _mean(c)
    noise = np.where(ss + rr > 0, ss + rr, math.nan)
    gamma = field(columns, "read_gamma")
    gamma = gamma[np.isfinite(gamma)]
    return {
        "covariance": mean,
        "covariance_variation": float(c.std() / abs(mean)) if len(c) and mean else math.nan,
        "denominator_positive": _share(d + ss + rr - 2 * c, lambda value: value > 0),
        "covariance_share": _mean(np.abs(c) / noise),
        "gamma": _mean(np.abs(gamma)),
        "gamma_least": float(gamma.min()) if len(gamma) else math.nan,
        "gamma_largest": float(gamma.max()) if len(gamma) else math.nan,
    }


def fast_power(values: np.ndarray, period: float = SLOW_PERIOD) -> float:
    """Power of the oscillations of `values` that are shorter than `period` steps.

    The line through all values is subtracted, and a Hann window is applied: otherwise a trend would
    count as fast. Unit: that of `values`, squared. nan for fewer values than two periods.
    """
    values = values[np.isfinite(values)]
    count = len(values)
    if count < 2 * period:
        return math.nan
    time = np.arange(count)
    rest = values - np.polyval(np.polyfit(time, values, 1), time)
    window = np.hanning(count)
    power = np.abs(np.fft.rfft(rest * window)) ** 2 / (window**2).sum() / count
    fast = np.fft.rfftfreq(count) > 1 / period
    return float(2 * power[fast].sum())


def smoothing(columns: Columns) -> dict[str, float]:
    """Fast oscillations of mu* (before smoothing) and of mu, and the share that is removed."""
    before, after = (fast_power(field(columns, name)) for name in ("mu_star", "mu"))
    return {
        "fast_before": before,
        "fast_after": after,
        "fast_removed": 1 - after / before if before > 0 else math.nan,
    }


def stages(columns: Columns) -> dict[str, float]:
    """Which term of mu* dominates when: for each stage, mean mu and the weight of each term.

    mu* = (D alpha + sigma_r^2 1 + sigma_s^2 0) / (D + sigma_r^2 + sigma_s^2).
    """
    weights = np.array([field(columns, name) for name in TERMS.values()]).clip(0)
    total = weights.sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = weights / np.where(total > 0, total, math.nan)
    mu, count = field(columns, "mu"), len(columns["step"])
    stats: dict[str, float] = {}
    for stage, (start, end) in STAGES.items():
        part = slice(round(start * count), round(end * count))
        stats[f"{stage}_mu"] = _mean(mu[part])
        for term, share in zip(TERMS, shares, strict=True):
            stats[f"{stage}_{term}"] = _mean(share[part])
    return stats if np.isfinite(shares).any() else dict.fromkeys(stats, math.nan)


def _off_target(columns: Columns, config: Mapping[str, Any]) -> float:
    method = config.get("method")
    fields = method if isinstance(method, Mapping) else {}
    target, band = fields.get("kl_target", 0.02), fields.get("kl_hysteresis", 0.1)
    return _share(field(columns, "kl"), lambda kl: np.abs(kl / target - 1) > band)


def _share(values: np.ndarray, condition: Any) -> float:
    """Share of the finite values for which `condition` holds; nan if there are none."""
    values = values[np.isfinite(values)]
    return float(np.mean(condition(values))) if len(values) else math.nan


def _mean(values: np.ndarray) -> float:
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else math.nan
