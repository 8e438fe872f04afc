"""Collects and reports the results of a gate study.

Usage: `python -m tools.scenario_results gate --out runs/study`.

Adds the finished runs of `python -m tools.scenario_study` to the study's file in docs/. Results
collected earlier are kept, so a study can continue on another machine without the run folders.
Then writes the figure of the study's page and the part of the page below its marker; for the study
`fourth`, also the part of docs/choose_mu.md below its marker.

Seconds per step come from the folder `--timing`, which must contain runs of the scenario `base`
that were made while the machine was otherwise idle.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gac.config import ConfigError
from gac.evaluation.cells import markdown_table, percent, percent_interval
from gac.evaluation.estimates import BOOTSTRAP_RESAMPLES, bootstrap_interval
from gac.study.runs import result
from tools.scenario_study import CONSTANTS, DOCS, STEPS, STUDIES, Study, cells, known_finals

SUMMARY_PAGE, SUMMARIZED = "choose_mu.md", "fourth"
MARK = "<!-- below: python -m tools.scenario_results -->\n"
FIXED = tuple(f"mu-{mu}" for mu in CONSTANTS)
COLLAPSE = 0.5  # fraction of the best constant's mean
TIMED = "base"  # the scenario whose seconds per step are reported
LONGER = 0.01  # arms that take longer by more are also compared at equal time
_NUMBERS = {4: "four", 7: "seven", 13: "thirteen"}
PANELS = 5  # per row of the figure
ROUNDING = 1e-9  # tolerance, so that a distance of exactly one point does not exceed it
Finals = Mapping[str, Mapping[str, Sequence[float | None]]]
"""Scenario -> arm -> final accuracy of each seed; None if the run is missing."""


def collect(
    study: Study, out: Path, code: str | None, timing: Path | None = None, docs: Path = DOCS
) -> dict[str, Any]:
    """Merge the study's file in `docs` with the results in the run folders."""
    path, finals = docs / study.file, known_finals(study, docs)
    old = json.loads(path.read_text()) if path.exists() else {}
    course, seconds = old.get("course", {}), old.get("seconds", {})
    if (out / "scenarios").is_dir():
        for scenario, arm, seed_index, config in cells(study, out):
            outcome = result(config)
            if outcome is None:
                continue
            finals[scenario][arm][seed_index] = round(outcome["final"]["accuracy"], 6)
            if scenario == TIMED:
                rows = _jsonl(Path(config.out) / "eval.jsonl")
                by_step = {str(row["step"]): round(row["accuracy"], 6) for row in rows}
                course.setdefault(arm, {})[str(seed_index)] = by_step
    if timing:
        for scenario, arm, seed_index, config in cells(study, timing):
            if scenario == TIMED and result(config) is not None:
                steps = [row["seconds"] for row in _jsonl(Path(config.out) / "metrics.jsonl")]
                median = round(float(np.median(steps)), 6)
                seconds.setdefault(arm, {})[str(seed_index)] = median
    models = sorted(out.glob("scenarios/*/model/model.safetensors"))
    bases = {p.parent.parent.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in models}
    return {
        "code": code or old.get("code"),
        "setting": study.setting,
        "bases": {**old.get("bases", {}), **bases},
        "finals": finals,
        "course": course,
        "seconds": seconds,
    }


def _jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- the protocol's three questions


def common_seeds(rows: Mapping[str, Sequence[float | None]], arms: Sequence[str]) -> list[int]:
    """Indices of the seeds for which all `arms` have results."""
    return [s for s in range(len(rows[FIXED[0]])) if all(rows[arm][s] is not None for arm in arms)]


def accuracies(
    rows: Mapping[str, Sequence[float | None]], arms: Sequence[str], seeds: Sequence[int]
) -> np.ndarray:
    """[arms, seeds] final accuracies."""
    return np.array([[rows[arm][s] for s in seeds] for arm in arms], dtype=float)


def against_hindsight(finals: Finals, scenario: str, arm: str) -> dict[str, Any] | None:
    """Compare `arm` with the best constant of `scenario` in hindsight.

    Returns the gap, its interval and the number of runs that collapsed. Each bootstrap resample of
    the seeds selects its own best constant.
    """
    rows = finals[scenario]
    seeds = common_seeds(rows, (*FIXED, arm))
    if not seeds:
        return None
    fixed, values = accuracies(rows, FIXED, seeds), accuracies(rows, (arm,), seeds)[0]
    best = int(fixed.mean(1).argmax())
    ends = None
    if len(seeds) > 1:
        size = (BOOTSTRAP_RESAMPLES, len(seeds))
        index = np.random.default_rng(0).integers(len(seeds), size=size)
        gaps = values[index].mean(1) - fixed[:, index].mean(2).max(0)
        ends = np.quantile(gaps, (0.025, 0.975)).tolist()
    return {
        "seeds": len(seeds),
        "best": FIXED[best],
        "gap": float(values.mean() - fixed[best].mean()),
        "ci95": ends,
        "collapsed": int((values < COLLAPSE * fixed[best].mean()).sum()),
    }


def against_single(finals: Finals, scenarios: Sequence[str], arm: str) -> dict[str, Any] | None:
    """Compare `arm` with the best single constant, both averaged over `scenarios`."""
    arms = (*FIXED, arm)
    seeds = _complete_seeds(finals, scenarios, arms)
    if not seeds or arm in FIXED:
        return None
    mean = np.mean([accuracies(finals[c], arms, seeds) for c in scenarios], 0)  # [arms, seeds]
    best = int(mean[:-1].mean(1).argmax())
    gaps = mean[-1] - mean[best]
    ends = list(bootstrap_interval(gaps.tolist())) if len(seeds) > 1 else None
    return {
        "seeds": len(seeds),
        "best": FIXED[best],
        "mean": float(mean[-1].mean()),
        "best_mean": float(mean[best].mean()),
        "gap": float(gaps.mean()),
        "ci95": ends,
    }


def groups(study: Study, finals: Finals) -> dict[str, tuple[str, ...]]:
    """Description -> scenarios to average over: those of the first phase, and all complete ones."""
    deciding, arms = study.phases[0]
    count = len(study.seeds)
    complete = [c for c in study.scenarios if len(common_seeds(finals[c], list(arms))) == count]
    by_text = {f"the first {_NUMBERS[len(deciding)]} scenarios": tuple(deciding)}
    if len(complete) > len(deciding):
        by_text[f"all {len(complete)} complete scenarios"] = tuple(complete)
    return by_text


def _complete_seeds(finals: Finals, scenarios: Sequence[str], arms: Sequence[str]) -> list[int]:
    """Indices of the seeds for which all `arms` have results in all `scenarios`."""
    return sorted(set.intersection(*(set(common_seeds(finals[c], arms)) for c in scenarios)))


# ---- the page


def page(name: str, results: Mapping[str, Any]) -> str:
    """The part of the study's page below the marker."""
    study, finals = STUDIES[name], results["finals"]
    counts = {c: {a: sum(v is not None for v in finals[c][a]) for a in finals[c]} for c in finals}
    done = sum(sum(row.values()) for row in counts.values())
    total = len(study.seeds) * sum(map(len, counts.values()))
    sections = {
        "Success": _verdicts(study, finals),
        "Final accuracy": _means(finals),
        "Distance to the best constant in hindsight": _hindsight(finals),
        "Average over scenarios against the best single constant": _single(study, finals),
        "The primary arm against each other arm": _pairwise(study, finals),
        "Equal time": _equal_time(study, results),
        "Missing runs": _missing(study, counts),
        "Continuing the study": _continuing(name, study),
    }
    parts = [
        f"`docs/{study.file}` contains {done} of {total} runs, made with the code of commit "
        f"`{results['code']}`. Values are percentages; brackets are 95 % intervals. Cells are "
        "compared on the seeds that both sides have; a dash means that there are none.",
        f"![Final accuracy by scenario]({study.page}.png)",
        *(f"### {title}\n\n{text}" for title, text in sections.items() if text),
    ]
    return "\n\n".join(parts) + "\n"


def _continuing(name: str, study: Study) -> str:
    return (
        f"`python -m tools.scenario_study {name} --out FOLDER` runs only the missing cells, even "
        f"without run folders, because it reads `docs/{study.file}`. Then collect the results with "
        f"`python -m tools.scenario_results {name} --out FOLDER --code COMMIT`. On another "
        "machine, base models are trained again and may differ by rounding; the file records the "
        "SHA-256 of each so that you can check."
    )


def _verdicts(study: Study, finals: Finals) -> str:
    """Answers to the three questions about the primary arm, based on the runs so far."""
    arm, answers, num_collapsed = study.primary_arm, [], 0
    for scenario in study.scenarios:
        gap = against_hindsight(finals, scenario, arm)
        if gap is None:
            continue
        margin = study.margins.get(scenario, study.margin)
        answer = "yes" if gap["gap"] >= -margin - ROUNDING else "no"
        answers.append(
            f"{scenario} {answer} ({_gap(gap)} against {gap['best']}, {gap['seeds']} seeds)"
        )
        num_collapsed += gap["collapsed"]
    goal = f"at most {_points(study.margin)} below the best constant in hindsight"
    for scenario, margin in study.margins.items():
        goal += f" (in `{scenario}`, {_points(margin)})"
    lines = [
        f"1. `{arm}` {goal}: {'; '.join(answers) or 'no run yet'}.",
        f"2. Runs of `{arm}` that end below half of the best constant's mean: {num_collapsed}.",
    ]
    for text, scenarios in groups(study, finals).items():
        gap = against_single(finals, scenarios, arm)
        if gap is None:
            lines.append(f"3. Over {text}: no seed is complete yet.")
            continue
        excludes = gap["ci95"] is not None and gap["ci95"][0] > 0
        lines.append(
            f"3. Over {text}: {percent(gap['mean'])} against {percent(gap['best_mean'])} of "
            f"{gap['best']}, difference {_gap(gap)}, {gap['seeds']} seeds; ahead, with an interval "
            f"that excludes 0: {'yes' if excludes else 'no'}."
        )
    if study.first_place:
        ahead = [
            f"`{other}` by {_gap(gap)}"
            for other in _arms(finals)
            if (gap := paired_difference(finals, study.phases[0][0], other, arm))
            and gap["gap"] > ROUNDING
        ]
        lines.append(f"4. Arms with a higher average than `{arm}`: {'; '.join(ahead) or 'none'}.")
    return "\n".join(lines)


def _points(share: float) -> str:
    """A difference of accuracies in points."""
    return f"{100 * share:.0f} point{'s' * (share > 0.01)}"


def _gap(gap: Mapping[str, Any]) -> str:
    """A gap and its interval."""
    return f"{percent(gap['gap'], '+')} {percent_interval(gap['ci95'], '+')}"


def _arms(finals: Finals) -> list[str]:
    """Arms with at least one run, in grid order."""
    (arms, *_) = finals.values()
    return [a for a in arms if any(v is not None for c in finals for v in finals[c][a])]


def _means(finals: Finals) -> str:
    rows = [[f"`{arm}`", *(_mean(finals[c][arm]) for c in finals)] for arm in _arms(finals)]
    text = "The number of seeds is given in parentheses unless it is 10."
    return f"{text}\n\n{markdown_table(('arm', *finals), rows)}"


def _mean(values: Sequence[float | None]) -> str:
    """A table cell: mean and interval; if results are missing, also the number of results."""
    known = [v for v in values if v is not None]
    if not known:
        return "-"
    ends = bootstrap_interval(known) if len(known) > 1 else None
    number = f" ({len(known)})" if len(known) < len(values) else ""
    return f"{percent(float(np.mean(known)))} {percent_interval(ends)}{number}"


def _hindsight(finals: Finals) -> str:
    rows = []
    for arm in _arms(finals):
        gaps = [against_hindsight(finals, c, arm) for c in finals]
        rows.append([f"`{arm}`", *map(_distance, gaps)])
    text = (
        "`n fell`: n runs ended below half of the best constant's mean. Each constant is compared "
        "with the best of all five, including itself."
    )
    return f"{text}\n\n{markdown_table(('arm', *finals), rows)}"


def _distance(gap: dict[str, Any] | None) -> str:
    if gap is None:
        return "-"
    return _gap(gap) + (f"; {gap['collapsed']} fell" if gap["collapsed"] else "")


def _single(study: Study, finals: Finals) -> str:
    parts = []
    head = ("arm", "seeds", "mean", "best constant", "difference", "95 % interval")
    for text, scenarios in groups(study, finals).items():
        rows = []
        for arm in _arms(finals):
            gap = against_single(finals, scenarios, arm)
            if gap is not None:
                mean, difference = percent(gap["mean"]), percent(gap["gap"], "+")
                ends = percent_interval(gap["ci95"], "+")
                rows.append((f"`{arm}`", str(gap["seeds"]), mean, gap["best"], difference, ends))
        parts.append(f"Over {text}:\n\n{markdown_table(head, rows)}")
    return "\n\n".join(parts)


def _pairwise(study: Study, finals: Finals) -> str:
    """Paired differences of averages between the primary arm and every other arm.

    The second column leaves out the scenario in which the primary arm leads most, so that no single
    scenario decides the result.
    """
    deciding, arm = study.phases[0][0], study.primary_arm
    by_scenario = {c: against_hindsight(finals, c, arm) for c in deciding}
    gaps = {c: gap["gap"] for c, gap in by_scenario.items() if gap is not None}
    if not gaps:
        return "No seed is complete yet."
    largest = max(gaps, key=lambda scenario: gaps[scenario])
    columns = (tuple(deciding), tuple(c for c in deciding if c != largest))
    rows = []
    for other in _arms(finals):
        gaps_to = [paired_difference(finals, scenarios, arm, other) for scenarios in columns]
        if other != arm and all(gaps_to):
            rows.append([f"`{other}`", *(_gap(gap) for gap in gaps_to if gap)])
    text = f"Mean of `{arm}` minus that of the other arm, on the seeds that both have."
    head = ("other arm", f"the first {_NUMBERS[len(deciding)]} scenarios", f"without `{largest}`")
    return f"{text}\n\n{markdown_table(head, rows)}"


def paired_difference(
    finals: Finals, scenarios: Sequence[str], arm: str, other: str
) -> dict[str, Any] | None:
    """Mean of `arm` minus that of `other`, with its interval; None for fewer than two seeds."""
    common = []
    for scenario in scenarios:
        pairs = zip(finals[scenario][arm], finals[scenario][other], strict=True)
        common.append({s for s, pair in enumerate(pairs) if None not in pair})
    seeds = sorted(set.intersection(*common))
    if len(seeds) < 2:
        return None
    first, second = np.mean([accuracies(finals[c], (arm, other), seeds) for c in scenarios], 0)
    gaps = first - second
    return {"gap": float(gaps.mean()), "ci95": list(bootstrap_interval(gaps.tolist()))}


def summary_section(study: Study, finals: Finals) -> str:
    """The part of docs/choose_mu.md below its marker: one row per arm."""
    rows = []
    for arm in _arms(finals):
        gaps = [gap | {"at": c} for c in finals if (gap := against_hindsight(finals, c, arm))]
        seeds = _complete_seeds(finals, list(finals), (*FIXED, arm))
        if len(gaps) < len(finals) or not seeds:
            continue
        worst = min(gaps, key=lambda gap: gap["gap"])
        mean = np.mean([accuracies(finals[c], (arm,), seeds)[0] for c in finals])
        single = against_single(finals, list(finals), arm)
        cells = (
            percent(float(mean)),
            _gap(single) if single else "",
            percent(float(np.mean([gap["gap"] for gap in gaps])), "+"),
            f"{percent(worst['gap'], '+')} (`{worst['at']}`)",
            str(sum(gap["collapsed"] for gap in gaps)),
            str(len(seeds)),
        )
        rows.append((f"`{arm}`", *cells))
    head = (
        "arm, mean, difference to the best single constant, mean regret, worst regret, fell, seeds"
    )
    text = (
        f"Accuracies in percent, averaged over {len(finals)} scenarios. *Regret*: distance to the "
        "best constant of each scenario in hindsight. *Fell*: number of runs that ended below half "
        "of that constant's mean."
    )
    return f"{text}\n\n{markdown_table(head.split(', '), rows)}\n"


def _equal_time(study: Study, results: Mapping[str, Any]) -> str:
    """Time per step relative to constant mu; accuracy at equal time of the arms that are slower."""
    seconds, course = results.get("seconds", {}), results.get("course", {})
    constants = [arm for arm in FIXED if arm in seconds]
    rows = []
    for arm in (arm for arm in seconds if arm not in FIXED):
        seeds = sorted(set(seconds[arm]).intersection(*(seconds[c] for c in constants)))
        ratios = [
            seconds[arm][s] / float(np.mean([seconds[c][s] for c in constants])) for s in seeds
        ]
        if not ratios:
            continue
        ratio = float(np.mean(ratios))
        ends = bootstrap_interval(ratios) if len(ratios) > 1 else None
        interval = f" [{ends[0]:.3f}, {ends[1]:.3f}]" if ends else ""
        earlier = "-"
        if ratio > 1 + LONGER:
            by_step = list(course[arm].values())
            step = max(int(n) for n in by_step[0] if int(n) <= STEPS / ratio)
            mean = float(np.mean([evaluations[str(step)] for evaluations in by_step]))
            best = max(
                float(np.mean([e[str(STEPS)] for e in course[c].values()])) for c in constants
            )
            earlier = f"{percent(mean)} at step {step}; best constant {percent(best)}"
        rows.append((f"`{arm}`", str(len(ratios)), f"{ratio:.3f}{interval}", earlier))
    if not rows:
        return ""
    head = ("arm", "seeds", "seconds per step, relative to a constant", "accuracy at equal time")
    text = (
        f"Scenario `{TIMED}`; median seconds of a step, divided by the mean of the constants, run "
        "by run on one thread. Arms that take more than 1 % longer are compared at their last "
        "evaluation within the constants' time."
    )
    return f"{text}\n\n{markdown_table(head, rows)}"


def _missing(study: Study, counts: Mapping[str, Mapping[str, int]]) -> str:
    """Missing runs, one line per group of scenarios that lack the same runs."""
    by_missing: dict[str, list[str]] = {}
    for scenarios, arms in study.phases:
        for scenario in scenarios:
            missing = {a: len(study.seeds) - counts[scenario][a] for a in arms}
            texts = [
                f"{a} ({n} seeds)" if counts[scenario][a] else a for a, n in missing.items() if n
            ]
            if texts:
                by_missing.setdefault(", ".join(texts), []).append(f"`{scenario}`")
    lines = [f"- {', '.join(scenarios)}: {text}" for text, scenarios in by_missing.items()]
    return "\n".join(lines) or "None: the grid is complete."


def draw(study: Study, finals: Finals, path: Path) -> None:
    """Draw one panel per scenario that has runs: seeds as dots, means with interval bars."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from gac.report.plots import COLORS, DPI, STYLE

    shown = [c for c in finals if any(v is not None for a in finals[c] for v in finals[c][a])]
    arms = _arms(finals)
    if not shown:
        return
    columns = min(len(shown), PANELS)
    lines = math.ceil(len(shown) / columns)
    with rc_context(STYLE):
        size = (2.0 + 1.9 * columns, (0.24 * len(arms) + 0.6) * lines + 0.3)
        figure = Figure(figsize=size, dpi=DPI, layout="constrained")
        panels = figure.subplots(lines, columns, sharey=True, squeeze=False).flat
        for scenario, axes in zip(shown, panels, strict=False):
            for row, arm in enumerate(arms):
                known = [100 * v for v in finals[scenario][arm] if v is not None]
                color = COLORS[1] if arm == study.primary_arm else COLORS[0]
                axes.plot(known, [-row] * len(known), ".", color=color, alpha=0.3)
                if known:
                    axes.plot([np.mean(known)], [-row], "o", color=color, markersize=5)
                if len(known) > 1:
                    axes.plot(bootstrap_interval(known), [-row] * 2, color=color, linewidth=2)
            axes.set_title(scenario)
            axes.grid(visible=True, axis="x")
            axes.set_yticks([-i for i in range(len(arms))], arms)
        for axes in panels:
            axes.set_axis_off()
        figure.supxlabel("final accuracy on held-out problems, %")
        figure.savefig(path, format="png")


def main(argv: Sequence[str] | None = None) -> int:
    """Collect, write the results, the page and the figure; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.scenario_results", description=__doc__)
    parser.add_argument("study", nargs="?", choices=STUDIES, default="gate")
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="folder for all runs")
    parser.add_argument("--code", help="commit of the code that made the runs")
    parser.add_argument("--timing", type=Path, help="folder of runs made on an idle machine")
    args = parser.parse_args(argv)
    write(args.study, args.out, args.code, args.timing)
    return 0


def write(
    name: str, out: Path, code: str | None, timing: Path | None = None, docs: Path = DOCS
) -> None:
    """Collect the study `name` from the run folders in `out` and write its results to `docs`."""
    study = STUDIES[name]
    results = collect(study, out, code, timing, docs)
    (docs / study.file).write_text(json.dumps(results, separators=(",", ":")) + "\n")
    _write(docs / f"{study.page}.md", page(name, results))
    draw(study, results["finals"], docs / f"{study.page}.png")
    if name == SUMMARIZED:
        _write(docs / SUMMARY_PAGE, summary_section(study, results["finals"]))
    print(f"wrote {study.file}, {study.page}.md and {study.page}.png in {docs}")


def _write(path: Path, text: str) -> None:
    """Replace the part of `path` below its marker."""
    top, mark, _ = path.read_text().partition(MARK)
    if not mark:
        raise ConfigError(f"{path}: no line {MARK.strip()!r}; add it where the results should go")
    path.write_text(f"{top}{MARK}\n{text}")


if __name__ == "__main__":
    sys.exit(main())
