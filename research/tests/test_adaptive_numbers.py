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
CONSTANTS = {
    "sums": ["0.02-0.02", "0.5-0.5", "0.98-0.98"],
    "code": ["0.02-0.02", "0.1-0.1", "0.5-0.5", "0.98-0.98"],
}


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
        means = [round(sum(arms[n][s] for s in SEEDS if s != seed), 9) for n in names]
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


@pytest.mark.parametrize("task", CONSTANTS)
def test_the_accuracies_and_the_judged_differences(task):
    arms_of, shown = accuracies(), lines(task)
    printed, computed, per_seed = [], [], defaultdict(list)
    for cell, arm, accuracy, *judged in shown:
        if cell != "all cells":
            assert numbers(accuracy)[0] == pytest.approx(
                100 * np.mean(arms_of[cell][arm]), abs=0.06
            )
        for against, text in (("best", judged[:3]), ("yoked", judged[3:])):
            if not text[0]:
                continue
            if cell != "all cells":
                arms = arms_of[cell]
                best = against == "best"
                constants = [name for name in CONSTANTS[task] if name in arms]
                other = chosen(arms, constants) if best else arms[f"yoked-{arm}"]
                per_seed[arm, against].append(np.subtract(arms[arm], other))
                difference = per_seed[arm, against][-1]
            else:
                difference = sum(per_seed[arm, against]) / len(per_seed[arm, against])
            mean = sum(difference) / 8
            error = math.sqrt(sum((d - mean) ** 2 for d in difference) / 7 / 8)
            half = quantile(0.975, 7) * error
            p = tails(mean / error, 7) if error else float(mean == 0)
            visible = (quantile(0.975, 7) + quantile(0.8, 7)) * error
            printed.append([*numbers(text[0]), float(text[1]), float(text[2])])
            computed.append((mean, half, p, visible))
    ps = [row[2] for row in computed]
    for text, (mean, half, p, visible) in zip(printed, computed, strict=True):
        ranked = sorted(ps)  # Holm: the largest of the scaled p-values up to this one
        corrected = min(1, max((len(ps) - i) * q for i, q in enumerate(ranked) if q <= p))
        expected = [100 * mean, 100 * (mean - half), 100 * (mean + half)]
        assert text[:3] == pytest.approx(expected, abs=0.06)
        assert text[3] == pytest.approx(corrected, abs=2e-3)
        assert text[4] == pytest.approx(100 * visible, abs=0.06)


def test_no_complete_arm_is_left_out():
    arms_of, shown = accuracies(), defaultdict(dict)
    for cell, means, *_ in lines("headroom"):
        shown[cell] |= dict(part.split(": ") for part in means.split("; "))
    for task in CONSTANTS:
        for cell, arm, accuracy, *_ in lines(task):
            shown[cell][arm] = accuracy
    for cell, others in re.findall(r"^([\w-]+), other arms: (.*)\.$", PAGE, re.MULTILINE):
        shown[cell] |= dict(re.findall(r"`([\w-]+)` ([^;]+)", others))
    for cell, arms in arms_of.items():
        printed = {arm: numbers(text)[0] for arm, text in shown[cell].items()}
        assert printed == pytest.approx({a: 100 * np.mean(v) for a, v in arms.items()}, abs=0.06)


def test_the_headroom():
    arms_of = accuracies()
    for cell, means, headroom, enough in lines("headroom"):
        arms, pairs = arms_of[cell], [part.split(": ") for part in means.split("; ")]
        for name, text in pairs:
            assert float(text) == pytest.approx(100 * sum(arms[name]) / 8, abs=0.06)
        schedules = [name for name, _ in pairs]
        constants = CONSTANTS["code" if cell.startswith("code") else "sums"]
        constants = [name for name in constants if name in arms]
        assert schedules[: len(constants)] == constants
        gap = np.subtract(chosen(arms, schedules), chosen(arms, constants))
        assert numbers(headroom)[0] == pytest.approx(100 * gap.mean(), abs=0.06)
        assert enough == ("yes" if gap.mean() >= 0.02 else "no")


def test_the_paths_of_mu():
    path = FOLDER / "results" / "adaptive" / "runs.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    for cell, arm, *shown, _ in lines("paths"):
        runs = [r for r in rows if r["cell"] == cell and r["arm"] == arm]
        assert len(runs) == len(SEEDS)
        changes = [r["second"].index(1) for r in runs]
        ends = [len(r["mu"]) - 1 for r in runs]
        for at, text in zip(
            ([0] * 8, [c - 1 for c in changes], [c + 2 for c in changes], ends), shown, strict=True
        ):
            mu = np.array([r["mu"][i] for r, i in zip(runs, at, strict=True)])
            assert numbers(text) == pytest.approx([mu.mean(), mu.min(), mu.max()], abs=0.006)
