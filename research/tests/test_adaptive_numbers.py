"""A second computation of the numbers in adaptive.md, which shares no code with the first."""

import functools
import json
import math
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from research import adaptive_results

FOLDER = Path(__file__).resolve().parents[1]
PAGE = (FOLDER / "adaptive.md").read_text()
SEEDS = range(8)
CONSTANTS = ("0.02-0.02", "0.5-0.5", "0.98-0.98")


def tails(t: float, freedom: int) -> float:
    """P(|T| > t) of Student's distribution, by integration over the angle of t / sqrt(freedom)."""
    grid = np.linspace(0, math.pi / 2, 200_001)
    density = np.cos(grid) ** (freedom - 1)
    start = np.searchsorted(grid, math.atan(abs(t) / math.sqrt(freedom)))
    return float(np.trapezoid(density[start:], grid[start:]) / np.trapezoid(density, grid))


@functools.cache
def quantile(p: float, freedom: int) -> float:
    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tails(middle, freedom) > 2 * (1 - p) else (low, middle)
    return low


def accuracies() -> dict[str, dict[str, list[float]]]:
    """Cell -> arm -> accuracies in the order of the seeds, of complete arms."""
    path = FOLDER / "results" / "adaptive" / "runs.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    found: dict = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        found[row["cell"]][row["arm"]][row["seed"]] = row["accuracy"]
    return {
        cell: {a: [v[s] for s in SEEDS] for a, v in arms.items() if set(SEEDS) <= set(v)}
        for cell, arms in found.items()
    }


def chosen(arms: dict[str, list[float]], names: list[str]) -> list[float]:
    """The accuracy of the arm that is best on the other seeds, for each seed."""
    out = []
    for seed in SEEDS:
        means = [sum(arms[n][s] for s in SEEDS if s != seed) for n in names]
        out.append(arms[names[means.index(max(means))]][seed])
    return out


def lines(marker: str) -> list[list[str]]:
    """The cells of a generated table of the page, without its head."""
    text = PAGE.split(f"<!-- begin: python -m research.adaptive_results {marker} -->")[1]
    table = [x for x in text.split("<!-- end -->")[0].splitlines() if x.startswith("|")][2:]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table]


def numbers(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"-?\d+\.\d+", text)]


def test_students_distribution():
    for freedom, t in ((7, 2.364624), (7, 3.499483), (3, 3.182446)):
        p = {2.364624: 0.975, 3.499483: 0.995, 3.182446: 0.975}[t]
        assert adaptive_results.t_quantile(p, freedom) == pytest.approx(t, abs=1e-5)
        assert quantile(p, freedom) == pytest.approx(t, abs=1e-3)


def test_the_judged_differences():
    arms_of, shown = accuracies(), lines("judged")
    if not shown:
        pytest.skip("no comparison is complete")
    computed = []
    per_seed = defaultdict(list)
    for cell, arm, against, *_ in shown:
        if cell != "all cells":
            arms = arms_of[cell]
            constant = against == "best constant"
            run = [name for name in CONSTANTS if name in arms]
            other = chosen(arms, run) if constant else arms[f"yoked-{arm}"]
            per_seed[arm, against].append(np.subtract(arms[arm], other))
            difference = per_seed[arm, against][-1]
        else:
            difference = sum(per_seed[arm, against]) / len(per_seed[arm, against])
        sd = math.sqrt(sum((d - sum(difference) / 8) ** 2 for d in difference) / 7)
        mean, error = sum(difference) / 8, sd / math.sqrt(8)
        half = quantile(0.975, 7) * error
        p = tails(mean / error, 7) if error else 1.0
        computed.append((mean, mean - half, mean + half, p, error))
    ps = [row[3] for row in computed]
    for line, (mean, low, high, p, error) in zip(shown, computed, strict=True):
        assert numbers(line[3]) == pytest.approx([100 * mean, 100 * low, 100 * high], abs=0.06)
        assert float(line[4]) == pytest.approx(p, abs=1e-3)
        ranked = sorted(ps)  # Holm: the largest of the scaled p-values up to this one
        scaled = [(len(ps) - i) * q for i, q in enumerate(ranked) if q <= p]
        assert float(line[5]) == pytest.approx(min(1, max(scaled)), abs=2e-3)
        visible = (quantile(0.975, 7) + quantile(0.8, 7)) * error
        assert float(line[6]) == pytest.approx(100 * visible, abs=0.06)
        strict = (quantile(1 - 0.025 / len(ps), 7) + quantile(0.8, 7)) * error
        assert float(line[7]) == pytest.approx(100 * strict, abs=0.06)


def test_the_headroom_and_the_accuracies():
    arms_of = accuracies()
    for cell, means, headroom, enough in lines("headroom"):
        arms, pairs = arms_of[cell], [part.split(": ") for part in means.split("; ")]
        for name, text in pairs:
            assert float(text) == pytest.approx(100 * sum(arms[name]) / 8, abs=0.06)
        schedules = [name for name, _ in pairs]
        assert schedules[:3] == list(CONSTANTS)
        gap = np.subtract(chosen(arms, schedules), chosen(arms, list(CONSTANTS)))
        assert numbers(headroom)[0] == pytest.approx(100 * gap.mean(), abs=0.06)
        assert enough == ("yes" if gap.mean() >= 0.02 else "no")
    head = PAGE.split("adaptive_results accuracy -->")[1].split("|")[2:]
    cells = [cell.strip() for cell in head[: head.index("\n")]]
    for arm, *texts in lines("accuracy"):
        for cell, text in zip(cells, texts, strict=True):
            if text:
                assert numbers(text)[0] == pytest.approx(
                    100 * np.mean(arms_of[cell][arm]), abs=0.06
                )


def test_the_paths_of_mu():
    path = FOLDER / "results" / "adaptive" / "runs.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    for cell, arm, *shown, _ in lines("paths"):
        paths = np.array([r["mu"] for r in rows if r["cell"] == cell and r["arm"] == arm])
        assert len(paths) == len(SEEDS)
        for step, text in zip((1, 3, 6, 9, 12), shown, strict=True):
            mu = paths[:, step - 1]
            assert numbers(text) == pytest.approx([mu.mean(), mu.min(), mu.max()], abs=0.006)
