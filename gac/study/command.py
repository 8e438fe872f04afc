"""`gac study`: command-line arguments, the runs and the two output files."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gac.errors import require_counts
from gac.evaluation.table import align_columns
from gac.study.results import row_cells

SET_HELP = "override a configuration key in every run, e.g. steps=200; the last value of a key wins"


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `study` to the commands of `gac`."""
    study = commands.add_parser(
        "study",
        usage="%(prog)s CONFIG.yaml --methods A B ... [--seeds N] [--baseline NAME] "
        "[--set KEY=VALUE ...] [--jobs J]",
        help="compare methods over seeds, with intervals",
        description="Run every method with every seed, each run in its own folder under the "
        "configuration's `out`, then write study.json and study.html there. Finished runs are "
        "kept, so you can interrupt the command and rerun it, also with more seeds or methods; a "
        "failed run is reported and does not stop the others.",
    )
    study.add_argument(
        "config",
        type=Path,
        metavar="CONFIG.yaml",
        help="run configuration, as for `gac train`; may also contain `methods:`, a mapping from "
        "label to method",
    )
    study.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help="NAME or package.module:Class, NAME:key=value,key.sub=value, LABEL@NAME:..., or a "
        "label of the file "
        "(default: all labels of the file)",
    )
    study.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="run seeds 0 to N - 1 (default: 3)"
    )
    study.add_argument(
        "--baseline",
        metavar="NAME",
        help="label of the method to compare the others with (default: the first)",
    )
    study.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=SET_HELP
    )
    study.add_argument(
        "--jobs", type=int, default=1, metavar="J", help="number of parallel runs (default: 1)"
    )
    study.add_argument(
        "--discard", action="store_true", help="delete the checkpoints of finished runs"
    )
    study.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the study that the arguments describe; returns the exit code, 1 if a run failed."""
    from gac.config import ConfigError
    from gac.config.imports import find_user_code
    from gac.study.arms import arm_config, parse_arm, read_study
    from gac.study.results import summary
    from gac.study.runs import result, run_all

    require_counts(options, "seeds", "jobs")
    find_user_code(options.config)  # processes of runs inherit it
    data, aliases = read_study(options.config)
    specs = options.methods or list(aliases)
    if not specs:
        raise ConfigError(f"--methods: missing, and {options.config} has no key `methods`")
    arms = {arm.label: arm for arm in (parse_arm(text, aliases) for text in specs)}
    if len(arms) < len(specs):
        raise ConfigError(f"--methods: two of {', '.join(specs)} have the same label")
    baseline = options.baseline or next(iter(arms))
    if baseline not in arms:
        raise ConfigError(f"--baseline={baseline!r}: use one of {', '.join(arms)}")
    seeds = range(options.seeds)
    # seed by seed, so that an interrupted study has compared all methods on the first seeds
    configs = {(s, a): arm_config(data, arms[a], s, options.set) for s in seeds for a in arms}
    out = Path(next(iter(configs.values())).out).parent
    failed = run_all(list(configs.values()), options.jobs, discard=options.discard)
    results = {key: result(config) for key, config in configs.items()}
    final = {key: None if r is None else r["final"]["accuracy"] for key, r in results.items()}
    finals = {a: [final[s, a] for s in seeds] for a in arms}
    setting = {
        "config": options.config.name,
        "set": options.set,
        "methods": specs,
        "seeds": options.seeds,
        "steps": {a: configs[0, a].steps for a in arms},
        "baseline": baseline,
        "command": command_line(options, specs),
    }
    study = {"setting": setting, "methods": summary(finals, baseline), "failed": failed}
    write(out, study, [Path(c.out) for key, c in configs.items() if results[key] is not None])
    print(table(study), f"\nResults: {out / 'study.json'}\nReport: {out / 'study.html'}")
    return 1 if failed else 0


def command_line(options: argparse.Namespace, specs: Sequence[str]) -> str:
    """The command line that reproduces this study, quoted for a shell."""
    parts = ["gac", "study", str(options.config), "--methods", *specs]
    parts += ["--seeds", str(options.seeds)]
    if options.baseline:
        parts += ["--baseline", options.baseline]
    return shlex.join([*parts, *(["--set", *options.set] if options.set else [])])


def write(out: Path, study: dict[str, Any], runs: Sequence[Path]) -> None:
    """Write study.json, study.html and, if any run has finished, the report of the runs."""
    from gac.config import save_text
    from gac.report import write_report
    from gac.study.page import render

    report = write_report(runs, out).name if runs else None
    save_text(out / "study.json", json.dumps(study, indent=1) + "\n")
    save_text(out / "study.html", render(study, report))


def table(study: dict[str, Any]) -> str:
    """The comparison as a text table, in percent."""
    lines = [["method", "seeds", "accuracy", "95%", "difference", "95%"]]
    lines += [[label, *row_cells(row)] for label, row in study["methods"].items()]
    return align_columns(lines)
