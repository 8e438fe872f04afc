"""Scenarios for the demo task, one configuration each: `python -m tools.scenarios`.

Each scenario changes the demonstrations, the rewards or the base model of the scenario `base`,
which is the demo's own setting. The command writes the data, the base models and OUT/NAME.yaml;
then run, for example, `gac train OUT/spoil.yaml --set method=constant-alarm` or `gac study
OUT/spoil.yaml --methods ...`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gac.config import save
from gac.data import Example, Order
from gac.demo.run import make_base, method_config
from gac.demo.task import rows, with_demos, write_rows, write_task, wrong
from gac.rewards import Reward, build_reward
from gac.rewards.base import RowOutcome
from gac.train_config import TrainConfig

CHANGE = 0.4  # fraction of a run after which the scenario's change takes effect
SPARSE = 0.05  # subtractions per addition in the training data of the `sparse` base model


class Phases(Order):
    """Data that change during a run: rows with `from_step: n` replace all others in step n.

    The sets of rows have equal sizes, and one position runs through all of them.
    """

    def __init__(self, examples: Sequence[Example], seed: int) -> None:
        self.sets: dict[int, list[int]] = {}  # first step -> rows
        for i, example in enumerate(examples):
            self.sets.setdefault(example.extra.get("from_step", 0), []).append(i)
        sizes = set(map(len, self.sets.values()))
        if len(sizes) > 1 or 0 not in self.sets:
            raise ValueError(f"from_step: sets of sizes {sizes} from steps {sorted(self.sets)}")
        super().__init__(sizes.pop(), seed)

    def take(self, k: int, step: int = 0) -> list[int]:
        own = self.sets[max(start for start in self.sets if start <= step)]
        return [own[i] for i in super().take(k)]


class NoisyReward(Reward):
    """A reward r of a row with the field `flip` becomes 1 - r with that probability.

    Only prompts to train on have the field. The noise depends on the step, the rank and the order
    of calls.
    """

    def __init__(self, reward: str) -> None:
        self.reward, self.name = build_reward(reward), f"noisy {reward}"
        self.set_step(0)

    def set_step(self, step: int) -> None:
        """Set the optimizer step that the following calls belong to."""
        self.rng = random.Random(f"noise:{os.environ.get('RANK', 0)}:{step}")

    def outcomes(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> Sequence[RowOutcome]:
        scored = zip(self.reward.outcomes(completions, examples), examples, strict=True)
        return [self._flip(outcome, e.extra.get("flip", 0.0)) for outcome, e in scored]

    def _flip(self, outcome: RowOutcome, rate: float) -> RowOutcome:
        flips = self.rng.random() < rate
        return outcome if isinstance(outcome, Exception) or not flips else 1 - outcome


@dataclass(frozen=True)
class Scenario:
    """Differences from the demo's own setting."""

    description: str
    base: str = "first"
    """A key of `BASES`."""
    demos: str = "demos"
    """File of the demonstrations, without .jsonl."""
    later: str | None = None
    """File of the demonstrations after the change; None: the same."""
    shifts: tuple[tuple[float, str], ...] = ()
    """Further changes of the demonstrations: fraction of the run, file without .jsonl."""
    flipped: float = 0.0
    """Fraction of the rewards that are flipped after the change."""
    op: str | None = None
    """The only operation to train and evaluate on; None: both."""


SCENARIOS = {
    "base": Scenario("weak demonstrations of subtraction, as in the demo"),
    "spoil": Scenario("demonstrations whose digits are random after the change", later="wrong"),
    "wrong": Scenario("demonstrations whose digits are random", demos="wrong"),
    "noisy": Scenario("35 % of the rewards are flipped after the change", flipped=0.35),
    "sparse": Scenario(
        "subtraction only, which the base model solves in less than 1 % of its attempts",
        base="sparse",
        op="-",
    ),
    "late": Scenario(
        "demonstrations whose digits are random until the change", demos="wrong", later="demos"
    ),
    "second": Scenario("same as base, but with another base model", base="second"),
    "half": Scenario(
        "after the change, half of the demonstrations have random digits", later="half"
    ),
    "turn": Scenario(
        "demonstrations of addition until the change, and of subtraction afterwards",
        demos="plus",
        later="demos",
    ),
    "burst": Scenario(
        "demonstrations whose digits are random for a tenth of the run after the change",
        shifts=((0.4, "wrong"), (0.5, "demos")),
    ),
    "flicker": Scenario(
        "after the change, random digits in every second twentieth of the run",
        shifts=tuple((0.4 + 0.05 * i, "demos" if i % 2 else "wrong") for i in range(12)),
    ),
    "sources": Scenario(
        "demonstrations of subtraction and of addition, alternating every tenth of the run",
        shifts=tuple((0.1 * i, "plus" if i % 2 else "demos") for i in range(1, 10)),
    ),
    "mistaken": Scenario(
        "after the change, every first digit of a solution is too large by one, modulo ten",
        later="mistaken",
    ),
}
BASES = {  # data file, seeds to try, accepted subtraction accuracy
    "first": ("base", range(5), (0.01, 0.10)),
    "second": ("base", range(5, 10), (0.01, 0.10)),
    "sparse": ("sparse", range(5), (0.0, 0.0099)),
}


def write_scenarios(
    out: Path, names: Sequence[str] = tuple(SCENARIOS), steps: int = 160, base_steps: int = 400
) -> dict[str, TrainConfig]:
    """Write the data, train the missing base models and write out/NAME.yaml for each name."""
    task = out / "task"
    if not (task / "prompts_plus.jsonl").exists():
        write_task(task, seed=0)
        write_scenario_data(task, seed=0)
    bases = {}
    for key in dict.fromkeys(SCENARIOS[name].base for name in names):
        data, seeds, accepted = BASES[key]
        bases[key] = make_base(out, base_steps, seeds, accepted, data)
    configs = {}
    for name in names:
        configs[name] = scenario_config(out, bases[SCENARIOS[name].base], name, steps)
        save(configs[name], out / f"{name}.yaml")
    return configs


def write_scenario_data(task: Path, seed: int) -> None:
    """Write the data that only the scenarios need.

    - wrong.jsonl: demos.jsonl with random digits.
    - half.jsonl: demos.jsonl with random digits in every other row.
    - sparse.jsonl: like base.jsonl, with fewer subtractions.
    - eval_minus.jsonl: 200 held-out subtractions.
    - plus.jsonl: 256 additions of the same quality as demos.jsonl.
    - mistaken.jsonl: demos.jsonl, with one systematic mistake.
    - prompts_NAME.jsonl: the same changes of prompts_demos.jsonl, whose prompts bring their own
      demonstrations.
    """
    rng = random.Random(f"scenarios:{seed}")
    for prefix, source in (("", "demos"), ("prompts_", "prompts_demos")):
        for name, changed in _variants(_read(task / f"{source}.jsonl"), seed).items():
            write_rows(task / f"{prefix}{name}.jsonl", changed)
    ops = rng.choices("+-", [1.0, SPARSE], k=20000)
    write_rows(task / "sparse.jsonl", rows(rng, ops, {"+": 0.6, "-": 0.6}))
    write_rows(task / "eval_minus.jsonl", rows(rng, ["-"] * 200))
    write_rows(task / "plus.jsonl", rows(rng, ["+"] * 256, {"+": 0.3}))
    write_rows(task / "prompts_plus.jsonl", with_demos(_read(task / "prompts.jsonl"), seed, "+"))


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _variants(problems: Sequence[dict[str, Any]], seed: int) -> dict[str, list[dict[str, Any]]]:
    """Variant name -> all rows, with some or all of the solutions changed."""
    solved = {i: row for i, row in enumerate(problems) if "solution" in row}
    scrambled = dict(zip(solved, wrong(list(solved.values()), seed), strict=True))
    changes = {
        "wrong": scrambled,
        "half": {i: scrambled[i] for i in list(scrambled)[1::2]},
        "mistaken": {
            i: row | {"solution": _increase(row["solution"])} for i, row in solved.items()
        },
    }
    return {
        name: [changed.get(i, row) for i, row in enumerate(problems)]
        for name, changed in changes.items()
    }


def _increase(solution: str) -> str:
    """The solution with its first digit increased by one, modulo ten."""
    return f"{(int(solution[0]) + 1) % 10}{solution[1:]}"


def scenario_config(
    out: Path, base: Path, name: str, steps: int, method: str = "grpo"
) -> TrainConfig:
    """The configuration of scenario `name` for a run of `method` with `steps` steps."""
    scenario, change = SCENARIOS[name], int(CHANGE * steps)
    config, task = method_config(out, base, method, 0, steps), out / "task"
    files = {0: scenario.demos}
    if scenario.later is not None:
        files[change] = scenario.later
    files |= {max(round(share * steps), 1): file for share, file in scenario.shifts}
    if config.data.demos is None:  # the prompts bring their own demonstrations
        changed = {"prompts": _phases(task, {n: f"prompts_{file}" for n, file in files.items()})}
    else:
        changed = {"demos": _phases(task, files)}
    if scenario.flipped:
        noisy = {0: Path(changed.get("prompts", config.data.prompts)).stem}
        changed["prompts"] = _phases(task, noisy | {change: noisy[0]}, scenario.flipped)
    order = "tools.scenarios:Phases" if len(files) > 1 or scenario.flipped else None
    data = dataclasses.replace(config.data, **changed, order=order)
    reward = {"name": "tools.scenarios:NoisyReward", "reward": config.reward}
    evaluation = dataclasses.replace(config.eval, every=steps // 4)
    if scenario.op is not None:
        data = dataclasses.replace(data, where={"op": scenario.op})
        held_out = dataclasses.replace(evaluation.data, prompts=str(out / "task/eval_minus.jsonl"))
        evaluation = dataclasses.replace(evaluation, data=held_out)
    return dataclasses.replace(
        config,
        out=str(out / name),
        data=data,
        eval=evaluation,
        reward=reward if scenario.flipped else config.reward,
        monitor_kl_every=0,
        checkpoint_every=steps // 4,
        keep_checkpoints=1,
    )


def _phases(task: Path, files: Mapping[int, str], flip: float = 0.0) -> str:
    """The path of a file with the rows of `files`, by first step; `flip` applies after the first.

    The file is written if there is more than one.
    """
    if len(files) == 1:
        return str(task / f"{files[0]}.jsonl")
    parts = [f"{file}{start or ''}" for start, file in files.items()]
    path = task / f"{'-'.join(parts)}{'-noisy' * bool(flip)}.jsonl"
    if task.exists() and not path.exists():
        changes = {n: {"from_step": n} | ({"flip": flip} if n and flip else {}) for n in files}
        sets = {n: _read(task / f"{file}.jsonl") for n, file in files.items()}
        write_rows(path, [row | changes[n] for n, rows in sets.items() for row in rows])
    return str(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and write the scenarios; returns the exit code."""
    listed = "\n".join(f"  {name:8} {s.description}" for name, s in SCENARIOS.items())
    parser = argparse.ArgumentParser(
        prog="python -m tools.scenarios",
        description=f"{__doc__}\n\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("runs/scenarios"))
    parser.add_argument("--names", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument("--steps", type=int, default=160, help="optimizer steps per run")
    parser.add_argument(
        "--base-steps", type=int, default=400, help="optimizer steps for training the base models"
    )
    args = parser.parse_args(argv)
    for name in write_scenarios(args.out, args.names, args.steps, args.base_steps):
        print(f"{args.out / name}.yaml: {SCENARIOS[name].description}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
