"""The tasks of the study of adaptive mu, their cells, their reward and their schedules.

A pretrained model finishes sums, or learns a code. In a *cell*, the demonstrations or the rewards
have two *regimes*: the first is clean, and the second is not. When each step belongs to which
regime is drawn per seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gac.data import Example
from gac.methods.base import TokenWeighted
from gac.order import Order
from gac.rewards import Reward
from gac.types import Mix, Observation, State

PARTLY = 0.3
"""Share of random rewards in the second regime of `partly-random-rewards`."""


class Problem(NamedTuple):
    """What the model finishes, how it should, and a systematic error that it can learn."""

    prompt: str
    answer: str
    wrong: str


@dataclass(frozen=True)
class Task:
    """What the model learns. All prompts, and all answers, have equally many tokens."""

    draw: Callable[[random.Random], Problem]
    template: str
    """The beginning of an answer in the model's chat template."""
    prompts: tuple[str, ...]
    """Prompts that contain every token of the task."""
    steps: int
    """Optimizer steps of a run."""
    demos: int
    """Demonstrations of a step."""
    lr: float
    """The learning rate."""
    first: int
    """The first layer with adapters; the layers before it need no backward pass."""
    evaluated: int
    """Number of held-out problems."""
    mus: tuple[float, ...]
    """The constants of the study, lowest first."""
    length: int = 2
    """Tokens of a response: two digits."""

    def texts(self) -> list[str]:
        """Texts that contain every token of the task."""
        return [self.template.format(prompt=prompt) for prompt in self.prompts]


TERMS = range(11, 50)
"""Every sum has two digits, and each digit is a token."""


def draw_sum(rng: random.Random) -> Problem:
    """A sum of two different digits; the error is to write the digits in the wrong order."""
    while True:
        a, b = rng.choice(TERMS), rng.choice(TERMS)
        if (a + b) % 11:
            break
    return Problem(f"{a} + {b}", str(a + b), str(a + b)[::-1])


CODED = range(1, 6)
"""The first two digits of a prompt."""
SHIFT = 2
"""The code moves a digit by SHIFT within `CODED`, in a circle, and the wrong code by -SHIFT."""


def draw_code(rng: random.Random) -> Problem:
    """Three digits; the answer is the first two in a code that the pretrained model cannot know."""
    first, second = rng.choice(CODED), rng.choice(CODED)
    coded, wrong = (
        "".join(str((digit - 1 + shift) % len(CODED) + 1) for digit in (first, second))
        for shift in (SHIFT, -SHIFT)
    )
    return Problem(f"{first}{second}{rng.randrange(10)}", coded, wrong)


SUMS = Task(
    draw_sum,
    "<|im_start|>assistant\n{prompt} = ",
    tuple(f"{a} + {b}" for a in TERMS for b in TERMS),
    steps=12,
    demos=8,
    lr=1e-3,
    first=26,
    evaluated=500,
    mus=(0.02, 0.5, 0.98),
)
CODE = Task(
    draw_code,
    "<|im_start|>assistant\n{prompt}, {prompt}, ",
    ("012", "345", "678", "999"),
    steps=28,
    demos=16,
    lr=4e-3,
    first=24,
    evaluated=100,
    mus=(0.02, 0.1, 0.5, 0.98),
)


@dataclass(frozen=True)
class Cell:
    """A task, and what its second regime changes."""

    task: Task
    less: bool = False
    """Whether mu should be lower in the second regime, or higher."""
    bad: bool = False
    """Whether the demonstrations of the second regime are wrong."""
    noise: tuple[float, float] = (0.0, 0.0)
    """The probability with which a reward is replaced by a coin, in each regime."""
    changes: str = "once"
    """When the regime changes: "once", at a random step of the middle third; "late", at one of the
    third quarter; in two "bursts", of a quarter of the run each; "never", but schedules switch in
    the middle.
    """


CELLS = {
    "bad-demonstrations": Cell(SUMS, less=True, bad=True),
    "noisy-rewards": Cell(SUMS, noise=(0.0, 1.0), changes="bursts"),
    "stationary": Cell(SUMS, less=True, changes="never"),
    "partly-random-rewards": Cell(SUMS, noise=(0.0, PARTLY)),
    "code-bad-demonstrations": Cell(CODE, less=True, bad=True, changes="late"),
    "code-stationary": Cell(CODE, less=True, changes="never"),
}


def held_out(task: Task, count: int) -> list[dict[str, Any]]:
    """The problems of the evaluation, the same for all runs; none is in `rows`."""
    rng, found = random.Random("held out"), {}
    while len(found) < count:
        problem = task.draw(rng)
        found[problem.prompt] = problem
    return [row(problem) for problem in found.values()]


def row(problem: Problem, *, bad: bool = False) -> dict[str, str]:
    """The row of a problem in a data file; with `bad`, its demonstration is wrong."""
    solution = problem.wrong if bad else problem.answer
    return {"prompt": problem.prompt, "answer": problem.answer, "solution": solution}


def rows(
    task: Task, kind: str, seed: int, per_step: int, bad: Sequence[bool], excluded: set[str]
) -> list[dict[str, Any]]:
    """The rows of a run in the order in which it visits them, `per_step` for each step.

    kind: "prompts" or "demos"; seeds and kinds have rows of their own, cells share them.
    bad: whether the demonstrations of each step are wrong. excluded: prompts that do not occur.
    """
    rng = random.Random(f"{kind}/{seed}")
    found: list[dict[str, Any]] = []
    while len(found) < per_step * len(bad):
        problem = task.draw(rng)
        if problem.prompt not in excluded:
            found.append(row(problem, bad=bad[len(found) // per_step]))
    return found


def regimes(cell: str, seed: int, steps: int) -> list[bool]:
    """Whether each step of a run is in the cell's second regime."""
    rng, quarter, changes = random.Random(f"{cell}/{seed}"), steps // 4, CELLS[cell].changes
    if changes == "never":
        return [t >= steps // 2 for t in range(steps)]
    if changes in ("once", "late"):
        third = steps // 3, 2 * steps // 3
        change = rng.randint(*(third if changes == "once" else (2 * quarter, 3 * quarter)))
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


class AnswerReward(Reward):
    """1 for the right answer, else 0; in noisy steps replaced by a fair coin.

    Args:
        noise: the probability of that in each step.
        seed: of the coins, which do not depend on the completions.
    """

    name = "answer"

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
    return [CELLS[cell].noise[is_second] for is_second in second]


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
