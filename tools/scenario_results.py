"""Collects and reports the results of a gate study: `python -m tools.scenario_results gate --out
runs/study`.

Collects the finished runs of `python -m tools.scenario_study` into the study's file in docs/,
keeping the results collected earlier, so that a study can continue elsewhere without the run
folders. Then writes the part of the study's page below its marker and the page's figure; for the
study `gate`, also that part of docs/choose_mu.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gac.config import ConfigError
from gac.evaluation.cells import percent, percent_interval
from gac.evaluation.estimates import DRAWS, bootstrap_interval
from gac.study.runs import result
from tools.scenario_study import (
    CONSTANTS,
    DOCS,
    MAIN,
    STUDIES,
    Study,
    cells,
    known_finals,
)

CHOICE = "choose_mu.md"
MARK = "<!-- below: python -m tools.scenario_results -->\n"
FIXED = tuple(f"mu-{mu}" for mu in CONSTANTS)
NEAR, COLLAPSE = 0.01, 0.5
_NUMBERS = {4: "four", 7: "seven"}
ROUNDING = 1e-9  # a distance of exactly one point does not exceed it
Finals = Mapping[str, Mapping[str, Sequence[float | None]]]
"""Scenario -> arm -> final accuracy of each seed; None where the run is missing."""


def collect(study: Study, out: Path, code: str | None, docs: Path = DOCS) -> dict[str, Any]:
    """Merge the study's file in `docs` with the results in the run folders."""
    path, finals = docs / study.file, known_finals(study, docs)
    old = json.loads(path.read_text()) if path.exists() else {}
    if (out / "scenarios").is_dir():
        for scenario, arm, place, config in cells(study, out):
            found = result(config)
            if found is not None:
                finals[scenario][arm][place] = round(found["final"]["accuracy"], 6)
    bases = {
        p.parent.parent.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(out.glob("scenarios/*/model/model.safetensors"))
    }
    return {
        "code": code or old.get("code"),
        "setting": study.setting,
        "bases": {**old.get("bases", {}), **bases},
        "finals": finals,
    }


# ---- the protocol's three questions


def common(rows: Mapping[str, Sequence[float | None]], arms: Sequence[str]) -> list[int]:
    """Indices of the seeds that all `arms` have run."""
    return [s for s in range(len(rows[FIXED[0]])) if all(rows[arm][s] is not None for arm in arms)]


def table(rows: Mapping[str, Sequence[float | None]], arms: Sequence[str], seeds: Sequence[int]):
    """Final accuracies, [arms, seeds]."""
    return np.array([[rows[arm][s] for s in seeds] for arm in arms], dtype=float)


def against_hindsight(finals: Finals, scenario: str, arm: str) -> dict[str, Any] | None:
    """The gap of `arm` to the best constant, and its number of runs below half of that constant's
    mean.

    Each bootstrap resample of the seeds selects its own best constant.
    """
    rows = finals[scenario]
    seeds = common(rows, (*FIXED, arm))
    if not seeds:
        return None
    fixed, mine = table(rows, FIXED, seeds), table(rows, (arm,), seeds)[0]
    best = int(fixed.mean(1).argmax())
    ends = None
    if len(seeds) > 1:
        index = np.random.default_rng(0).integers(len(seeds), size=(DRAWS, len(seeds)))
        gaps = mine[index].mean(1) - fixed[:, index].mean(2).max(0)
        ends = np.quantile(gaps, (0.025, 0.975)).tolist()
    return {
        "seeds": len(seeds),
        "best": FIXED[best],
        "gap": float(mine.mean() - fixed[best].mean()),
        "ci95": ends,
        "collapsed": int((mine < COLLAPSE * fixed[best].mean()).sum()),
    }


def against_single(finals: Finals, scenarios: Sequence[str], arm: str) -> dict[str, Any] | None:
    """Compare the average of `arm` over `scenarios` with that of the constant with the highest
    average.
    """
    arms = (*FIXED, arm)
    seeds = _whole(finals, scenarios, arms)
    if not seeds or arm in FIXED:
        return None
    mean = np.mean([table(finals[c], arms, seeds) for c in scenarios], 0)  # [arms, seeds]
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
    """Sets of scenarios to average over: the deciding ones, and all complete ones."""
    deciding, arms = study.phases[0]
    whole = [c for c in study.scenarios if len(common(finals[c], list(arms))) == len(study.seeds)]
    found = {f"the first {_NUMBERS[len(deciding)]} scenarios": tuple(deciding)}
    if len(whole) > len(deciding):
        found[f"all {len(whole)} complete scenarios"] = tuple(whole)
    return found


def _whole(finals: Finals, scenarios: Sequence[str], arms: Sequence[str]) -> list[int]:
    """Indices of the seeds that all `arms` have run in all `scenarios`."""
    return sorted(set.intersection(*(set(common(finals[c], arms)) for c in scenarios)))


# ---- the page


def page(name: str, found: Mapping[str, Any]) -> str:
    """The part of the study's page below its marker."""
    study, finals = STUDIES[name], found["finals"]
    counts = {c: {a: sum(v is not None for v in finals[c][a]) for a in finals[c]} for c in finals}
    done = sum(sum(row.values()) for row in counts.values())
    whole = len(study.seeds) * sum(map(len, counts.values()))
    parts = [
        f"{done} of {whole} runs are in `docs/{study.file}`, made by the code of commit "
        f"`{found['code']}`. Values are percent; brackets are 95 % intervals. Cells are compared on the seeds that both sides have; a dash means that there are none.",
        f"![Final accuracy by scenario]({study.page}.png)",
        "### Success of the gate",
        _verdicts(study, finals),
        "### Final accuracy",
        _means(finals),
        "### Distance to the best constant in hindsight",
        _hindsight(finals),
        "### Average over scenarios against the best single constant",
        _single(study, finals),
        "### The primary arm against each other arm",
        _duels(study, finals),
        "### Missing runs",
        _missing(study, counts),
        "### Continuing the study",
        f"`python -m tools.scenario_study {name} --out FOLDER` runs the missing "
        f"cells only, also where there are no run folders: it reads `docs/{study.file}`. Then "
        f"collect with `python -m tools.scenario_results {name} --out FOLDER --code COMMIT`. On another machine, base models are trained again and may differ by rounding; the file records the SHA-256 of each so that you can check.",
    ]
    return "\n\n".join(parts) + "\n"


def _verdicts(study: Study, finals: Finals) -> str:
    """Answers to the three questions about the primary arm, based on the runs so far."""
    judged, near, fallen = study.judged, [], 0
    for scenario in study.scenarios:
        found = against_hindsight(finals, scenario, judged)
        if found is None:
            continue
        verdict = "yes" if found["gap"] >= -NEAR - ROUNDING else "no"
        near.append(
            f"{scenario} {verdict} ({percent(found['gap'], '+')} {percent_interval(found['ci95'], '+')}"
            f" against {found['best']}, {found['seeds']} seeds)"
        )
        fallen += found["collapsed"]
    lines = [
        f"1. `{judged}` at most 1 point below the best constant in hindsight: "
        + ("; ".join(near) or "no run yet")
        + ".",
        f"2. Runs of `{judged}` that end below half of the best constant's mean: {fallen}.",
    ]
    for words, scenarios in groups(study, finals).items():
        found = against_single(finals, scenarios, judged)
        if found is None:
            lines.append(f"3. Over {words}: no seed is complete yet.")
            continue
        excludes = found["ci95"] is not None and found["ci95"][0] > 0
        lines.append(
            f"3. Over {words}: {percent(found['mean'])} against {percent(found['best_mean'])} of "
            f"{found['best']}, difference {percent(found['gap'], '+')} {percent_interval(found['ci95'], '+')}, "
            f"{found['seeds']} seeds: ahead with an interval that excludes 0: "
            f"{'yes' if excludes else 'no'}."
        )
    return "\n".join(lines)


def _arms(finals: Finals) -> list[str]:
    """Arms with at least one run, in grid order."""
    (arms, *_) = finals.values()
    return [a for a in arms if any(v is not None for c in finals for v in finals[c][a])]


def _means(finals: Finals) -> str:
    rows = []
    for arm in _arms(finals):
        row = [f"`{arm}`"]
        for scenario in finals:
            known = [v for v in finals[scenario][arm] if v is not None]
            ends = bootstrap_interval(known) if len(known) > 1 else None
            text = f"{percent(float(np.mean(known)))} {percent_interval(ends)}" if known else "-"
            row.append(
                text + (f" ({len(known)})" if 0 < len(known) < len(finals[scenario][arm]) else "")
            )
        rows.append(row)
    return "The number of seeds is given in parentheses unless it is 10.\n\n" + _markdown(
        ("arm", *finals), rows
    )


def _hindsight(finals: Finals) -> str:
    rows = []
    for arm in _arms(finals):
        cells = [against_hindsight(finals, c, arm) for c in finals]
        rows.append([f"`{arm}`", *map(_distance, cells)])
    words = "`n fell`: n runs ended below half of the best constant's mean. A constant is compared with the best of all five, including itself."
    return f"{words}\n\n{_markdown(('arm', *finals), rows)}"


def _distance(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    fallen = f"; {found['collapsed']} fell" if found["collapsed"] else ""
    return f"{percent(found['gap'], '+')} {percent_interval(found['ci95'], '+')}{fallen}"


def _single(study: Study, finals: Finals) -> str:
    parts = []
    for words, scenarios in groups(study, finals).items():
        rows = []
        for arm in _arms(finals):
            x = against_single(finals, scenarios, arm)
            if x is not None:
                rows.append(
                    (
                        f"`{arm}`",
                        str(x["seeds"]),
                        percent(x["mean"]),
                        x["best"],
                        percent(x["gap"], "+"),
                        percent_interval(x["ci95"], "+"),
                    )
                )
        head = ("arm", "seeds", "mean", "best constant", "difference", "95 % interval")
        parts.append(f"Over {words}:\n\n{_markdown(head, rows)}")
    return "\n\n".join(parts)


def _duels(study: Study, finals: Finals) -> str:
    """Paired differences of averages, with and without the scenario in which the primary arm leads
    most, so that no single scenario decides the result.
    """
    deciding, judged = study.phases[0][0], study.judged
    gaps = {c: found["gap"] for c in deciding if (found := against_hindsight(finals, c, judged))}
    if not gaps:
        return "No seed is complete yet."
    most = max(gaps, key=lambda scenario: gaps[scenario])
    kinds = (tuple(deciding), tuple(c for c in deciding if c != most))
    rows = []
    for other in _arms(finals):
        cells = [_duel(finals, scenarios, judged, other) for scenarios in kinds]
        if other != judged and all(cells):
            rows.append([f"`{other}`", *cells])
    words = f"Mean of `{judged}` minus that of the other arm, on the seeds that both have."
    head = ("other arm", f"the first {_NUMBERS[len(deciding)]} scenarios", f"without `{most}`")
    return f"{words}\n\n{_markdown(head, rows)}"


def _duel(finals: Finals, scenarios: Sequence[str], one: str, other: str) -> str:
    seeds = sorted(
        set.intersection(
            *(
                {
                    s
                    for s, pair in enumerate(zip(finals[c][one], finals[c][other], strict=True))
                    if None not in pair
                }
                for c in scenarios
            )
        )
    )
    if len(seeds) < 2:
        return ""
    first, second = np.mean([table(finals[c], (one, other), seeds) for c in scenarios], 0)
    gaps = first - second
    return f"{percent(float(gaps.mean()), '+')} {percent_interval(bootstrap_interval(gaps.tolist()), '+')}"


def brief(study: Study, finals: Finals) -> str:
    """The part of docs/choose_mu.md below its marker: the first arms on the seeds that all of them
    have run.
    """
    arms = list(study.phases[0][1])
    seeds = _whole(finals, MAIN, arms)
    if not seeds:
        return "No seed is complete yet.\n"
    values = np.array([table(finals[c], arms, seeds) for c in MAIN])  # [scenarios, arms, n]
    rows = []
    for arm, name in enumerate(arms):
        means = [percent(float(x)) for x in values[:, arm].mean(1)]
        all_of_it = values[:, arm].mean(0)
        ends = bootstrap_interval(all_of_it.tolist()) if len(seeds) > 1 else None
        rows.append((f"`{name}`", *means, percent(float(all_of_it.mean())), percent_interval(ends)))
    words = f"Mean accuracy in percent over {len(seeds)} of {len(study.seeds)} seeds (those for which all arms have run in all four scenarios); the interval is for the average."
    return f"{words}\n\n{_markdown(('arm', *MAIN, 'average', '95 % interval'), rows)}\n"


def _missing(study: Study, counts: Mapping[str, Mapping[str, int]]) -> str:
    """Missing runs, one line per group of scenarios that lack the same ones."""
    lack: dict[str, list[str]] = {}
    for scenarios, arms in study.phases:
        for scenario in scenarios:
            missing = {a: len(study.seeds) - counts[scenario][a] for a in arms}
            texts = [
                f"{a} ({n} seeds)" if counts[scenario][a] else a for a, n in missing.items() if n
            ]
            if texts:
                lack.setdefault(", ".join(texts), []).append(f"`{scenario}`")
    lines = [f"- {', '.join(scenarios)}: {text}" for text, scenarios in lack.items()]
    return "\n".join(lines) or "Nothing: the grid is complete."


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(study: Study, finals: Finals, path: Path) -> None:
    """Draw one panel per scenario that has runs: seeds as dots, means with interval bars."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from gac.report.plots import COLORS, DPI, STYLE

    shown = [c for c in finals if any(v is not None for a in finals[c] for v in finals[c][a])]
    arms = _arms(finals)
    if not shown:
        return
    with rc_context(STYLE):
        size = (2.0 + 1.9 * len(shown), 0.24 * len(arms) + 0.9)
        figure = Figure(figsize=size, dpi=DPI, layout="constrained")
        panels = np.atleast_1d(figure.subplots(1, len(shown), sharey=True))
        for axes, scenario in zip(panels, shown, strict=True):
            for place, arm in enumerate(arms):
                known = [100 * v for v in finals[scenario][arm] if v is not None]
                colour = COLORS[1] if arm == study.judged else COLORS[0]
                axes.plot(known, [-place] * len(known), ".", color=colour, alpha=0.3)
                if known:
                    axes.plot([np.mean(known)], [-place], "o", color=colour, markersize=5)
                if len(known) > 1:
                    axes.plot(bootstrap_interval(known), [-place] * 2, color=colour, linewidth=2)
            axes.set_title(scenario)
            axes.grid(visible=True, axis="x")
        panels[0].set_yticks([-i for i in range(len(arms))], arms)
        figure.supxlabel("final accuracy on held-out problems, %")
        figure.savefig(path, format="png")


def main(argv: Sequence[str] | None = None) -> int:
    """Collect, write the results, the page and the figure; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.scenario_results", description=__doc__)
    parser.add_argument("study", nargs="?", choices=STUDIES, default="gate")
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="folder for all runs")
    parser.add_argument("--code", help="commit that the runs were made with")
    args = parser.parse_args(argv)
    write(args.study, args.out, args.code)
    return 0


def write(name: str, out: Path, code: str | None, docs: Path = DOCS) -> None:
    """Collect the study `name` from the run folders in `out` and write its results to `docs`."""
    study = STUDIES[name]
    found = collect(study, out, code, docs)
    (docs / study.file).write_text(json.dumps(found, separators=(",", ":")) + "\n")
    _write(docs / f"{study.page}.md", page(name, found))
    draw(study, found["finals"], docs / f"{study.page}.png")
    if name == "gate":
        _write(docs / CHOICE, brief(study, found["finals"]))
    print(f"wrote {study.file}, {study.page}.md and {study.page}.png in {docs}")


def _write(path: Path, text: str) -> None:
    """Replace the part of `path` below its marker."""
    top, mark, _ = path.read_text().partition(MARK)
    if not mark:
        raise ConfigError(f"{path}: no line {MARK.strip()!r}; add it where the results should go")
    path.write_text(f"{top}{MARK}\n{text}")


if __name__ == "__main__":
    sys.exit(main())
