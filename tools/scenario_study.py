"""The study of the gate: `python -m tools.scenario_study`. docs/study.md holds its protocol.

Runs the cells of the grid in the order of their importance, seed by seed, one process at a time;
finished runs are kept, so the command may be stopped and given again. Cells that
docs/scenario_study.json holds (`python -m tools.scenario_results`) are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gac.config import ConfigError, dump
from gac.demo.scenarios import SCENARIOS, write_scenarios
from gac.demo.settings import short
from gac.study.arms import Arm, arm_config
from gac.study.runs import run_all
from gac.train_config import TrainConfig

STEPS = 120
SMALLER = ("rollouts.prompts=8", "rollouts.completions=6", "demo_batch=16")
SEEDS = 10
DOCS = Path(__file__).resolve().parents[1] / "docs"
KNOWN = DOCS / "scenario_study.json"
CONSTANTS = (0.1, 0.3, 0.5, 0.7, 0.9)


def _arm(name: str, **changes: Any) -> dict[str, Any]:
    """A method with the demo's lengths, plain demonstration tokens, and `changes`."""
    return {"name": name, **short(name, STEPS), "weight": "one", **changes}


_FREE = {"ema": "none", "prior_blend": 1.0, "max_step": 1.0}
_MU_STAR = {"ema": "none", "prior_blend": 1.0, "signals": "gradients"}
_PRIOR = {"prior": short("gac", STEPS)["prior"]}

FIRST: dict[str, dict[str, Any]] = {
    **{f"mu-{mu}": {"name": "constant", "mu": mu} for mu in CONSTANTS},
    "chord": _arm("chord-mu"),
    "gac": _arm("gac"),
    "gate-z": _arm("gac-gated"),
    "gate-cosine": _arm("gac-gated", gate={"form": "cosine"}),
}
"""The arms of the main questions. gate-z is the one whose success is defined."""

FURTHER: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo"},
    "prior": _arm("gac", prior_blend=0.0),
    "gac-paper": _arm("gac-paper"),
    "gac-phi": _arm("gac", weight="phi"),
    "gate-z-prior": _arm("gac-gated", **_PRIOR),
    "gate-cosine-prior": _arm("gac-gated", gate={"form": "cosine"}, **_PRIOR),
    "gate-z-mu-star": _arm("gac-gated", ema="none", prior_blend=1.0),
    "mu-star": _arm("gac", update_every=2, max_step=0.15, **_MU_STAR),
    "gate-z-slow": _arm("gac-gated", gate={"decay": 0.8}, update_every=4, max_step=0.025),
    "gate-z-steep": _arm("gac-gated", gate={"slope": 1.75}),
    "gate-z-hysteresis": _arm("gac-gated", gate={"hysteresis": 0.15}),
    "gac-sign": _arm("gac", kl_sign=-1),
    "gac-no-thermostat": _arm("gac", kl_up=0.0, kl_down=0.0),
    "free": _arm("gac", **_FREE),
    "free-sign": _arm("gac", **_FREE, kl_sign=-1),
    "free-no-thermostat": _arm("gac", **_FREE, kl_up=0.0, kl_down=0.0),
}
"""Further designs, and what the printed controller consists of."""

MAIN = ("base", "spoil", "wrong", "noisy")
OTHER = tuple(name for name in SCENARIOS if name not in MAIN)
PHASES = ((MAIN, FIRST), (OTHER, FIRST), (MAIN, FURTHER), (OTHER, FURTHER))


def cells(out: Path, seeds: int) -> Iterator[tuple[str, str, int, TrainConfig]]:
    """(scenario, arm, seed, run) of the whole grid, in the order in which it is run."""
    plain = {name: dump(config) for name, config in scenarios(out).items()}
    for names, arms in PHASES:
        for seed in range(seeds):
            for name in names:
                changes = [*SMALLER, f"out={out / 'runs' / name}"]
                for label, method in arms.items():
                    config = arm_config(plain[name], Arm(label, method), seed, changes)
                    yield name, label, seed, config


def scenarios(out: Path) -> dict[str, TrainConfig]:
    """The scenarios' configurations; their bases are trained if they are not there yet."""
    return write_scenarios(out / "scenarios", steps=STEPS)


def grid_setting() -> dict[str, Any]:
    """What every cell of the grid depends on, in plain JSON types."""
    setting = {"steps": STEPS, "changes": SMALLER, "arms": {**FIRST, **FURTHER}}
    return json.loads(json.dumps(setting))


def known_finals(path: Path = KNOWN) -> dict[str, dict[str, list[float | None]]]:
    """Scenario -> arm -> final accuracy by seed, None where it is not in `path`.

    Raises ConfigError if its grid was another one.
    """
    arms = {**FIRST, **FURTHER}
    finals: dict[str, dict[str, list[float | None]]]
    finals = {name: {arm: [None] * SEEDS for arm in arms} for name in SCENARIOS}
    if not path.exists():
        return finals
    found = json.loads(path.read_text())
    if found["setting"] != grid_setting():
        raise ConfigError(f"{path}: holds another grid than this program's; move it away")
    for name, row in found["finals"].items():
        finals[name] |= row
    return finals


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run what is missing; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.scenario_study", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="folder of all runs")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds per cell, at most 10")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    args = parser.parse_args(argv)
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    known = known_finals()
    configs = [
        config
        for scenario, arm, seed, config in cells(args.out, min(args.seeds, SEEDS))
        if known[scenario][arm][seed] is None
    ]
    failed = run_all(configs, args.jobs, discard=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
