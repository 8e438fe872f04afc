"""Runs the gate studies: `python -m tools.scenario_study [gate|confirmation|alarm|fourth]`.

Their protocols are in docs/: study.md, confirmation.md, alarm.md and fourth_study.md. Runs the
cells of a grid in order of importance, seed by seed, one at a time by default. Finished runs are
kept: rerun an interrupted command to resume. Cells whose results `python -m tools.scenario_results`
has already written to docs/ are skipped.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from gac.config import ConfigError, dump
from gac.demo.settings import demo_fields
from gac.study.arms import Arm, arm_config
from gac.study.runs import run_all
from gac.train_config import TrainConfig
from tools.scenarios import SCENARIOS, scenario_config, write_scenarios

STEPS = 120
SMALLER = ("rollouts.num_prompts=8", "rollouts.num_generations=6", "demo_batch_size=16")
DOCS = Path(__file__).resolve().parents[1] / "docs"
CONSTANTS = (0.1, 0.3, 0.5, 0.7, 0.9)


def _arm(name: str, **changes: Any) -> dict[str, Any]:
    """Settings of method `name`: durations for `STEPS` steps, token weight 1, then `changes`."""
    return {"name": name, **demo_fields(name, STEPS), "weight": "one", **changes}


def _gated(gate: dict[str, Any], name: str = "gac-gated", **changes: Any) -> dict[str, Any]:
    """Method `name` with `gate`; no alarm unless `changes` sets one."""
    return {"alarm": None, **_arm(name, gate=gate, **changes)}


_Z = {"form": "z"}
_FREE = {"ema": "none", "prior_blend": 1.0, "max_step": 1.0}
_MU_STAR = {"ema": "none", "prior_blend": 1.0, "signals": "gradients"}
_PRIOR = {"prior": demo_fields("gac", STEPS)["prior"]}

FIRST: dict[str, dict[str, Any]] = {
    **{f"mu-{mu}": {"name": "constant", "mu": mu} for mu in CONSTANTS},
    "chord": _arm("chord-mu"),
    "gac": _arm("gac"),
    "gate-z": _gated(_Z),
    "gate-cosine": _gated({"form": "cosine"}),
}
"""Arms for the main questions. The protocol defines success for gate-z."""

FURTHER: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo"},
    "prior": _arm("gac", prior_blend=0.0),
    "gac-paper": _arm("gac-paper"),
    "gac-phi": _arm("gac", weight="phi"),
    "gate-z-prior": _gated(_Z, **_PRIOR),
    "gate-cosine-prior": _gated({"form": "cosine"}, **_PRIOR),
    "gate-z-mu-star": _gated(_Z, ema="none", prior_blend=1.0),
    "mu-star": _arm("gac", update_every=2, max_step=0.15, **_MU_STAR),
    "gate-z-slow": _gated({**_Z, "decay": 0.8}, update_every=4, max_step=0.025),
    "gate-z-steep": _gated({**_Z, "slope": 1.75}),
    "gate-z-hysteresis": _gated({**_Z, "hysteresis": 0.15}),
    "gac-sign": _arm("gac", kl_sign=-1),
    "gac-no-thermostat": _arm("gac", kl_up=0.0, kl_down=0.0),
    "free": _arm("gac", **_FREE),
    "free-sign": _arm("gac", **_FREE, kl_sign=-1),
    "free-no-thermostat": _arm("gac", **_FREE, kl_up=0.0, kl_down=0.0),
}
"""Additional designs, and ablations of the published controller."""

CONFIRMED: dict[str, dict[str, Any]] = {
    **{arm: method for arm, method in FIRST.items() if arm.startswith("mu-")},
    "gate-cosine": FIRST["gate-cosine"],
    "sketch-cosine": _gated({"form": "cosine"}, "gac-gated-sketch"),
}
"""The constants, the best gate of the first study, and the same gate on a sketch of the head."""

_MEAN = {"form": "mean_cosine", "at_zero": 0.6, "slope": 3.0}
_SHUT = {"form": "cosine", "at_zero": 1.0, "slope": 0.0}
_CLOSING: dict[str, Any] = {"alarm": {"threshold": 6.0, "decay": 0.9, "warmup": 10}}
ALARMED: dict[str, dict[str, Any]] = {
    **{arm: method for arm, method in FIRST.items() if arm.startswith("mu-")},
    "gate-alarm": _gated(_MEAN, **_CLOSING),
    "cosine-alarm": _gated({"form": "cosine"}, **_CLOSING),
    "alarm-only": _gated(_SHUT, "gac-gated-sketch", prior={"high": 0.4, "low": 0.4}, **_CLOSING),
}
"""The constants, gates with an alarm, and a constant of 0.4 that only the alarm can shut off."""

FOURTH: dict[str, dict[str, Any]] = {
    **{arm: method for arm, method in FIRST.items() if arm.startswith("mu-")},
    "constant-alarm": {"name": "constant-alarm"},
    "guarded": {"name": "guarded"},
    "gac": FIRST["gac"],
    "chord": FIRST["chord"],
    "amft": _arm("amft"),
}
"""Constants, `constant-alarm` (the arm that is judged), `guarded`, and other adaptive methods."""

PROMPT_DEMOS: dict[str, dict[str, Any]] = {
    name: {"name": name, **demo_fields(name, STEPS)}
    for name in ("srft", "hpt", "superrl", "dypo", "sdar", "uft")
}
"""Methods that train on the demonstrations of the sampled prompts."""
NAMED = {"named-sources": {"name": "constant-alarm"}}
"""The default method with an alarm for each kind of problem, as `data.source_field` names them."""

MAIN = ("base", "spoil", "wrong", "noisy")
OTHER = ("sparse", "late", "second")
HARDER = ("half", "turn")
NEWEST = ("burst", "flicker", "sources", "mistaken")


class Study(NamedTuple):
    """A grid of runs, fixed before any of its results were seen."""

    primary_arm: str
    """The arm for which the protocol defines success."""
    seeds: range
    phases: tuple[tuple[tuple[str, ...], Mapping[str, Mapping[str, Any]]], ...]
    """(scenarios, arms), the most important first."""
    page: str
    """docs/<page>.md: protocol and results; docs/<page>.png: the figure."""
    file: str
    """File in docs/ with the results of its finished runs."""
    margin: float = 0.01
    """Largest distance to the best constant in hindsight that counts as success."""
    margins: Mapping[str, float] = MappingProxyType({})
    """The same for single scenarios."""
    first_place: bool = False
    """Whether success also requires that no other arm has a higher average."""

    @property
    def scenarios(self) -> tuple[str, ...]:
        used = {name for names, _ in self.phases for name in names}
        return tuple(name for name in SCENARIOS if name in used)

    @property
    def arms(self) -> dict[str, Mapping[str, Any]]:
        return {arm: method for _, arms in self.phases for arm, method in arms.items()}

    @property
    def setting(self) -> dict[str, Any]:
        """Settings that every cell depends on, as plain JSON types."""
        setting = {
            "steps": STEPS,
            "changes": SMALLER,
            "arms": self.arms,
            "seeds": [self.seeds.start, self.seeds.stop],
        }
        return json.loads(json.dumps(setting))


STUDIES = {
    "gate": Study(
        "gate-z",
        range(10),
        ((MAIN, FIRST), (OTHER, FIRST), (MAIN, FURTHER), (OTHER, FURTHER)),
        "study",
        "scenario_study.json",
    ),
    "confirmation": Study(
        "gate-cosine",
        range(10, 20),
        ((MAIN, CONFIRMED), (OTHER, CONFIRMED)),
        "confirmation",
        "scenario_confirmation.json",
    ),
    "alarm": Study(
        "gate-alarm",
        range(20, 30),
        (((*MAIN, *OTHER), ALARMED), (HARDER, ALARMED)),
        "alarm",
        "scenario_alarm.json",
    ),
    "fourth": Study(
        "constant-alarm",
        range(30, 40),
        (((*MAIN, *OTHER, *HARDER, *NEWEST), FOURTH), (tuple(SCENARIOS), PROMPT_DEMOS | NAMED)),
        "fourth_study",
        "scenario_fourth.json",
        margin=0.02,
        margins={"turn": 0.03},
        first_place=True,
    ),
}


def cells(study: Study, out: Path) -> Iterator[tuple[str, str, int, TrainConfig]]:
    """Yield (scenario, arm, seed index, run) of each cell, in the order of execution."""
    folder = out / "scenarios"
    bases = {name: Path(config.model.path) for name, config in scenarios(out).items()}

    @functools.cache
    def plain(name: str, method: str) -> dict[str, Any]:
        return dump(scenario_config(folder, bases[name], name, STEPS, method))

    for names, arms in study.phases:
        for seed_index, seed in enumerate(study.seeds):
            for name in names:
                changes = [*SMALLER, f"out={out / 'runs' / name}"]
                for label, method in arms.items():
                    named = ["data.source_field=op"] if label in NAMED else []
                    config = arm_config(
                        plain(name, method["name"]),
                        Arm(label, dict(method)),
                        seed,
                        [*changes, *named],
                    )
                    yield name, label, seed_index, config


def scenarios(out: Path) -> dict[str, TrainConfig]:
    """The scenarios' configurations; trains their base models unless they exist."""
    return write_scenarios(out / "scenarios", steps=STEPS)


def known_finals(study: Study, docs: Path = DOCS) -> dict[str, dict[str, list[float | None]]]:
    """Scenario -> arm -> final accuracy by seed; None where the study's file has no result.

    Raises ConfigError if the file belongs to a different grid.
    """
    path = docs / study.file
    finals: dict[str, dict[str, list[float | None]]]
    finals = {c: {arm: [None] * len(study.seeds) for arm in study.arms} for c in study.scenarios}
    if not path.exists():
        return finals
    saved = json.loads(path.read_text())
    if saved["setting"] != study.setting:
        raise ConfigError(f"{path}: contains results of a different grid; move it away")
    for name, row in saved["finals"].items():
        finals[name] |= row
    return finals


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run the cells that have no result yet; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.scenario_study", description=__doc__)
    parser.add_argument("study", nargs="?", choices=STUDIES, default="gate")
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="folder for all runs")
    parser.add_argument(
        "--jobs", type=int, default=1, help="number of parallel runs, one thread each"
    )
    parser.add_argument("--only", choices=SCENARIOS, help="run only this scenario")
    args = parser.parse_args(argv)
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    study = STUDIES[args.study]
    known = known_finals(study)
    configs = [
        config
        for scenario, arm, seed_index, config in cells(study, args.out)
        if known[scenario][arm][seed_index] is None and args.only in (None, scenario)
    ]
    failed = run_all(configs, args.jobs, discard=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
