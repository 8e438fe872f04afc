"""The paper's statistics of a run, against values computed by hand or with the standard library."""

import json
import math
import statistics

import numpy as np
import pytest

from gac.report import write_report
from gac.report.health import (
    alpha_stability,
    cross_covariance,
    fast_power,
    smoothing,
    stages,
    training_health,
)
from gac.report.reading import read_run
from gac.report.table import summarize
from gac.training.trainer import train
from tests.tiny import metrics, tiny_config


def columns(**values):
    lists = {
        name: [math.nan if x is None else x for x in column] for name, column in values.items()
    }
    count = len(next(iter(lists.values())))
    return {"step": np.arange(1.0, count + 1)} | {k: np.array(v, float) for k, v in lists.items()}


def test_training_health_by_hand():
    rows = columns(
        **{
            "rollout_tokens": [100, 200, None, 100],
            "clip_fraction": [0.1, 0.25, 0.5, 0.0],
            "alpha_step": [0.0, -0.3, 0.1, None],
            "kl": [0.0, 0.021, None, 0.05],
            "completions/mean_length": [4, 6, None, 8],
            "update_norm": [0.05, 0.1, 0.13, None],
        }
    )
    assert training_health(rows, {"method": {"kl_target": 0.02}}) == pytest.approx(
        {
            "effective_tokens": 90 + 150 + 100,
            "clip_ratio": 60 / 400,
            "kl_trigger": 2 / 3,
            "kl_off_target": 2 / 3,  # 0.021 is within 10% of 0.02
            "mean_length": 6,
            "within_bound": 2 / 3,
            "largest_update": 0.13,
        }
    )
    assert all(map(math.isnan, training_health(columns(mu=[0.5]), {}).values()))


def test_alpha_stability_by_the_standard_library():
    alpha = [0.7, 0.7, 0.62, 0.64, 0.71, 0.65, 0.65, 0.9, 0.88, 0.7, None]
    stats = alpha_stability(columns(alpha=alpha, average_kl=[0.02] * 11))
    known = alpha[:-1]
    cuts = statistics.quantiles(known, n=20, method="inclusive")
    assert stats == pytest.approx(
        {
            "alpha_mean": statistics.fmean(known),
            "alpha_deviation": statistics.pstdev(known),
            "alpha_low": cuts[0],
            "alpha_high": cuts[-1],
            "alpha_large": 5 / 9,  # 0.08, 0.07, 0.06, 0.25 and 0.18
            "kl_average_mean": 0.02,
            "kl_average_deviation": 0.0,
            "kl_average_low": 0.02,
            "kl_average_high": 0.02,
        }
    )


def test_covariance_counts_each_reading_once():
    rows = columns(
        read_covariance=[None, 0.1, 0.1, 0.1, -0.3, 0.5],
        read_sft_variance=[None, 0.4, 0.4, 0.4, 0.2, 0.2],
        read_rl_variance=[None, 0.6, 0.6, 0.6, 0.3, 0.1],
        read_disagreement=[None, 0.1, 0.1, 0.1, -0.9, 0.1],
        read_gamma=[None, -0.1, -0.1, -0.1, 0.2, 0.05],
    )
    stats = cross_covariance(rows)
    assert stats["covariance"] == pytest.approx(0.1)
    assert stats["covariance_variation"] == pytest.approx(statistics.pstdev([0.1, -0.3, 0.5]) / 0.1)
    # 0.1 + 1 - 0.2, -0.9 + 0.5 + 0.6 and 0.1 + 0.3 - 1
    assert stats["denominator_positive"] == pytest.approx(2 / 3)
    assert stats["covariance_share"] == pytest.approx((0.1 + 0.6 + 5 / 3) / 3)
    assert (stats["gamma_least"], stats["gamma_largest"]) == (-0.1, 0.2)


def test_fast_power_is_that_of_fast_waves_only():
    """A wave of amplitude a has the power a^2 / 2, and neither a trend nor a slow wave counts."""
    time = np.arange(400)
    fast = 0.3 * np.sin(2 * np.pi * time / 8)
    slow = np.sin(2 * np.pi * time / 100) + 0.01 * time
    assert fast_power(fast + slow) == pytest.approx(0.3**2 / 2, rel=0.03)
    assert fast_power(slow) < 1e-4
    assert math.isnan(fast_power(fast[:39]))
    removed = smoothing({"step": time, "mu_star": fast + slow, "mu": 0.1 * fast + slow})
    assert removed["fast_removed"] == pytest.approx(0.99, abs=0.002)


def test_stages_name_the_term_that_dominates():
    rows = columns(
        mu=[0.9, 0.8, 0.5, 0.4, 0.3, 0.2, 0.2, 0.1],
        average_disagreement=[None, 1, 1, 1, 2, 2, 0, 0],
        average_rl_variance=[None, 1, 3, 3, 1, 1, 0, 1],
        average_sft_variance=[None, 2, 0, 0, 1, 1, 0, 3],
    )
    stats = stages(rows)
    assert stats["early_mu"] == pytest.approx(0.85)
    assert [stats[f"early_{term}"] for term in ("alpha", "1", "0")] == [0.25, 0.25, 0.5]
    assert [stats[f"middle_{term}"] for term in ("alpha", "1", "0")] == [0.375, 0.5, 0.125]
    assert [stats[f"late_{term}"] for term in ("alpha", "1", "0")] == [0, 0.25, 0.75]
    assert all(map(math.isnan, stages(columns(mu=[0.5] * 4)).values()))


def test_a_paired_run_reports_c_and_a_biased_one_gamma(task, tmp_path):
    """The report's numbers are those of the metrics of real runs, and of weights that moved."""
    signals = {"name": "gradients", "paired": True, "bias": True}
    method = {"name": "gac", "signals": signals, "gradient_parts": 2, "update_every": 2}
    out = tmp_path / "run"
    train(tiny_config(task, out, method=method, steps=8, log_update_norm=True))
    rows = metrics(out)
    read = [row for row in rows if row["read_covariance"] is not None]
    c = list(dict.fromkeys(row["read_covariance"] for row in read))
    assert len(c) >= 3
    numbers = summarize(read_run(out), window=2)
    assert numbers["covariance"] == pytest.approx(statistics.fmean(c))
    assert numbers["gamma_largest"] == max(row["read_gamma"] for row in read)
    assert numbers["largest_update"] == max(row["update_norm"] for row in rows) > 0
    text = write_report([out], tmp_path / "page").read_text()
    assert "Training health" in text
    assert "Covariance and bias" in text
    assert json.loads((out / "metrics.jsonl").read_text().splitlines()[0])["rollout_tokens"] > 0
