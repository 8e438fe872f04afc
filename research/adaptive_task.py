"""The task of the study of adaptive mu, its cells, its reward and its schedules.

A pretrained model finishes sums. In a *cell*, the demonstrations or the rewards have two *regimes*:
the first is clean, and the second is not. When each step belongs to which regime is drawn per seed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gac.data import Example
from gac.methods.base import TokenWeighted
from gac.order import Order
from gac.rewards import Reward
from gac.types import Mix, Observation, State

STEPS = 12
TERMS = range(11, 50)
"""Every sum has two digits, and each digit is a token."""
TEMPLATE = "<|im_start|>assistant\n{prompt} = "
"""The beginning of an answer in the model's chat template."""
LENGTH = 2
"""Tokens of a response: the two digits."""
CELLS = ("bad-demonstrations", "noisy-rewards", "stationary", "partly-random-rewards")
PARTLY = 0.3
"""Share of random rewards in the second regime of `partly-random-rewards`."""


def problem(rng: random.Random) -> dict[str, Any]:
    """A sum of two different digits; `answer` is the text that the model should write."""
    while True:
        a, b = rng.choice(TERMS), rng.choice(TERMS)
        if (a + b) % 11:
            break
    return {"prompt": f"{a} + {b}", "answer": str(a + b)}


def texts() -> list[str]:
    """Texts that contain every token of the task."""
    return [TEMPLATE.format(prompt=f"{a} + {b}") for a in TERMS for b in TERMS]


def wrong(answer: str) -> str:
    """The digits in the wrong order: a systematic error, which the model can learn."""
    return answer[::-1]


def held_out(count: int) -> list[dict[str, Any]]:
    """The problems of the evaluation, the same for all runs; none is in `rows`."""
    rng, found = random.Random("held out"), {}
    while len(found) < count:
        row = problem(rng)
        found[row["prompt"]] = row | {"solution": row["answer"]}
    return list(found.values())


def rows(
    kind: str, seed: int, per_step: int, bad: Sequence[bool], excluded: set[str]
) -> list[dict[str, Any]]:
    """The rows of a run in the order in which it visits them, `per_step` for each step.

    kind: "prompts" or "demos"; seeds and kinds have rows of their own, cells share them.
    bad: whether the demonstrations of each step are wrong. excluded: prompts that do not occur.
    """
    rng = random.Random(f"{kind}/{seed}")
    found: list[dict[str, Any]] = []
    while len(found) < per_step * len(bad):
        row = problem(rng)
        if row["prompt"] not in excluded:
            is_wrong = bad[len(found) // per_step]
            solution = wrong(row["answer"]) if is_wrong else row["answer"]
            found.append(row | {"solution": solution})
    return found


def regimes(cell: str, seed: int, steps: int = STEPS) -> list[bool]:
    """Whether each step is in the cell's second regime.

    `noisy-rewards` has two bursts of a quarter of the run; `stationary` changes nothing, and its
    schedules switch in the middle; the other cells change once, in the middle third.
    """
    rng, quarter = random.Random(f"{cell}/{seed}"), steps // 4
    if cell == "stationary":
        return [t >= steps // 2 for t in range(steps)]
    if cell != "noisy-rewards":
        change = rng.randint(steps // 3, 2 * steps // 3)
        return [t >= change for t in range(steps)]
    free = steps - 2 * quarter
    before = rng.randint(1, free - 1)
    between = rng.randint(1, free - before)
    starts = (before, before + quarter + between)
    return [any(start <= t < start + quarter for start in starts) for t in range(steps)]


class InOrder(Order):
    """Visits the rows in the order of the file: `data.order`."""

    def __init__(self, examples: Sequence[Example], seed: int) -> None:
        super().__init__(len(examples), seed)

    def _permute(self, epoch: int) -> Any:
        return list(range(self.n))


class SumReward(Reward):
    """1 for the right number, else 0; in noisy steps replaced by a fair coin.

    Args:
        noise: the probability of that in each step.
        seed: of the coins, which do not depend on the completions.
    """

    name = "sum"

    def __init__(self, noise: Sequence[float] = (), seed: int = 0) -> None:
        self.noise, self.seed, self.step = tuple(noise), seed, 0

    def set_step(self, step: int) -> None:
        self.step = step

    def outcomes(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> Sequence[float | Exception]:
        noise = self.noise[self.step] if self.step < len(self.noise) else 0.0
        rng = random.Random(f"{self.seed}/{self.step}")
        scores = []
        for completion, example in zip(completions, examples, strict=True):
            replaced, coin = rng.random() < noise, float(rng.random() < 0.5)
            scores.append(coin if replaced else float(completion == example.answer))
        return scores


def noise_of(cell: str, second: Sequence[bool]) -> list[float]:
    """The probability with which a reward is replaced, in each step."""
    level = {"noisy-rewards": 1.0, "partly-random-rewards": PARTLY}.get(cell, 0.0)
    return [level * is_second for is_second in second]


@dataclass(frozen=True)
class MuPath(TokenWeighted, name="mu-path"):
    """mu is given for every step: a schedule, or the path of another run without its feedback."""

    values: tuple[float, ...] = ()
    """mu of each step, in [0, 1]."""

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(self.values[min(last.step, len(self.values) - 1)])  # asked after the end


def path(first: float, second: float, regime: Sequence[bool]) -> Mapping[str, Any]:
    """The method that uses one mu in each regime."""
    values = [second if is_second else first for is_second in regime]
    return {"name": "research.adaptive_task:MuPath", "values": values}
