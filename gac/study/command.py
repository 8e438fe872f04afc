"""`gac study`: the runs and the two output files."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gac.config import load, read_yaml, save_text
from gac.errors import ConfigError, require_counts
from gac.evaluation.table import align_columns
from gac.imports import find_user_code
from gac.report import write_report
from gac.train_config import TrainConfig, loss_of

from .page import render
from .results import row_cells, summary
from .runs import result, run_all

UNEQUAL = 0.05  # relative difference of the arms' tokens that is reported


def run(options: argparse.Namespace) -> int:
    """Run the study that the arguments describe; returns the exit code, 1 if a run failed."""
    require_counts(options, "seeds", "jobs")
    find_user_code(options.config)  # processes of runs inherit it
    data, aliases = read_study(options.config)
    specs = options.methods or list(aliases)
    if not specs:
        raise ConfigError(f"--methods: missing, and {options.config} has no key `methods`")
    arms = {arm.label: arm for arm in (parse_arm(text, aliases) for text in specs)}
    if len(arms) < len(specs):
        raise ConfigError(f"--methods: two of {', '.join(specs)} have the same label")
    for label in arms:
        if "/" in label:
            raise ConfigError(
                f"methods: the label {label!r} is used as a folder name and must not contain '/'; "
                "write LABEL@NAME:..."
            )
    for override in options.set:
        key = override.partition("=")[0]
        if key in ("method", "seed", "run_name"):
            use = "--seeds" if key == "seed" else "--methods"
            raise ConfigError(f"--set {override}: {key} differs between the runs; use {use}")
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
    tokens = {a: [r["tokens"] for s in seeds if (r := results[s, a]) is not None] for a in arms}
    study = {
        "setting": setting,
        "methods": summary(finals, baseline),
        "tokens": tokens,
        "notes": unlike({a: configs[0, a] for a in arms}, tokens),
        "failed": failed,
    }
    write(out, study, [Path(c.out) for key, c in configs.items() if results[key] is not None])
    files = f"\nResults: {out / 'study.json'}\nReport: {out / 'study.html'}"
    print(table(study), *study["notes"], files, sep="\n")
    return 1 if failed else 0


def unlike(configs: Mapping[str, TrainConfig], tokens: Mapping[str, Sequence[int]]) -> list[str]:
    """One line for each respect in which a comparison of these arms is not of like with like.

    tokens: of each finished run.
    """
    notes = []
    weights = {a: weight for a, c in configs.items() if (weight := _token_weight(c)) is not None}
    if len(set(weights.values())) > 1:
        shown = ", ".join(f"{arm} {weight}" for arm, weight in weights.items())
        notes.append(
            f"The arms weigh the demonstrations' tokens differently ({shown}), which can matter "
            "more than mu: for one weight, write e.g. gac:weight=one."
        )
    means = {arm: sum(own) / len(own) for arm, own in tokens.items() if own}
    if means and max(means.values()) > (1 + UNEQUAL) * min(means.values()):
        shown = ", ".join(f"{arm} {mean:,.0f}" for arm, mean in means.items())
        notes.append(
            f"The arms trained on different numbers of tokens ({shown}): --set budget_tokens=N "
            "ends every run at N, if `steps` allows that many."
        )
    return notes


def _token_weight(config: TrainConfig) -> str | None:
    """The weight of the demonstrations' tokens; None: the method has no fused loss, or no demos."""
    loss = loss_of(config)
    uses_demos = any(config.method.needs(step).demos for step in range(config.steps))
    return str(loss.spec.demo_weight) if uses_demos and loss.token is None else None


def command_line(options: argparse.Namespace, specs: Sequence[str]) -> str:
    """The command line that reproduces this study, quoted for a shell."""
    parts = ["gac", "study", str(options.config), "--methods", *specs]
    parts += ["--seeds", str(options.seeds)]
    if options.baseline:
        parts += ["--baseline", options.baseline]
    return shlex.join([*parts, *(["--set", *options.set] if options.set else [])])


def write(out: Path, study: dict[str, Any], runs: Sequence[Path]) -> None:
    """Write study.json, study.html and, if any run has finished, the report of the runs."""
    report = write_report(runs, out).name if runs else None
    save_text(out / "study.json", json.dumps(study, indent=1) + "\n")
    save_text(out / "study.html", render(study, report))


def table(study: dict[str, Any]) -> str:
    """The comparison as a text table, in percent."""
    lines = [["method", "seeds", "accuracy", "95%", "difference", "95%", "p", "d"]]
    lines += [[label, *row_cells(row)] for label, row in study["methods"].items()]
    return align_columns(lines)


HELP = (
    "NAME or package.module:Class, NAME:key=value,key.sub=value, LABEL@NAME:..., or a key of the "
    "file's `methods:`"
)


@dataclass(frozen=True)
class Arm:
    """One method of a study."""

    label: str
    """Name in tables and in the run's folder name."""
    method: Any
    """Value of the configuration key `method`: a name or a mapping."""
    changes: tuple[str, ...] = ()
    """Overrides `method.key=value`."""


def parse_arm(text: str, aliases: Mapping[str, Any] | None = None) -> Arm:
    """Parse an arm specification, see HELP. Raises ConfigError if it is invalid."""
    aliases = aliases or {}
    if text in aliases:
        alias = aliases[text]
        if isinstance(alias, Mapping):
            return Arm(text, alias)
        arm = parse_arm(str(alias))
        return Arm(text, arm.method, arm.changes)
    label, at, spec = text.rpartition("@")
    name, *parts = spec.split(":")
    if parts and "=" not in parts[0]:  # package.module:Class
        name = f"{name}:{parts.pop(0)}"
    settings = ":".join(parts)
    changes = [change for change in settings.split(",") if change]
    if not name or (at and not label) or not all("=" in change for change in changes):
        raise ConfigError(f"methods: invalid specification {text!r}; use {HELP}")
    return Arm(label or spec, name, tuple(f"method.{change}" for change in changes))


def read_study(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a configuration file: its keys other than `methods`, and the aliases under `methods`."""
    data = read_yaml(path)
    aliases = data.pop("methods", None) or {}
    if not isinstance(aliases, Mapping):
        raise ConfigError(f"{path}: methods: expected `label: method` lines, got {aliases!r:.60}")
    return data, {str(label): method for label, method in aliases.items()}


def arm_config(
    data: Mapping[str, Any], arm: Arm, seed: int, overrides: Sequence[str] = ()
) -> TrainConfig:
    """Configuration of an arm's run with one seed; each run has its own subfolder of `out`.

    data: a TrainConfig as plain types. overrides: `key=value` for every run, applied after the
        arm's own.

    Raises ConfigError; the message names the arm.
    """
    try:
        plain, changes = {**data, "method": arm.method}, [*arm.changes, *overrides]
        shared = load(TrainConfig, plain, [*changes, f"seed={seed}"])
    except ConfigError as error:
        # the key may come from --methods
        raise ConfigError(
            f"{arm.label}: {str(error).replace('--set method.', 'method.')}"
        ) from error
    if shared.eval.data.prompts is None:
        raise ConfigError("eval.data.prompts: missing; a study compares held-out accuracies")
    return replace(shared, run_name=arm.label, out=f"{shared.out}/{arm.label}-{seed}")
