"""What a reward is: numbers for completions, and one rule for rows that cannot be scored."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from gac.data import Example

from gac.errors import UserError

logger = logging.getLogger(__name__)

OnError = Literal["raise", "drop"]
Outcome = float | Exception
"""A row's reward, or why it has none."""


class RewardError(UserError, ValueError):
    """A row that could not be scored: the reward raised, or gave no finite number."""

    def __init__(self, problem: str, reward: str, example_id: str, completion: str) -> None:
        super().__init__(
            f"reward {reward!r} on row {example_id!r}: {problem}; completion: {completion!r:.200}. "
            "Mend the row or the reward, or set on_error: drop to count and leave out such rows"
        )
        self.reward, self.example_id, self.completion = reward, example_id, completion


class Reward(ABC):
    """Scores completions: call it with texts and their examples.

    A subclass gives `outcomes`; one that looks at a completion at a time derives from `RowReward`
    and gives `score`.
    """

    name = "reward"
    """How messages call it."""
    on_error: OnError = "raise"
    """"raise" stops at a row that cannot be scored; "drop" counts it and returns None for it."""
    dropped = 0
    """Rows dropped so far."""

    @abstractmethod
    def outcomes(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> Sequence[Outcome]:
        """One outcome per row; a row's own failure is returned, not raised."""

    def at(self, step: int) -> None:  # noqa: B027 - most rewards are the same at every step
        """Say that what is scored from now on belongs to optimiser step `step`, from 0."""

    def counts(self) -> dict[str, int]:
        """Events so far that a run should show, by name: checks that ran out of time, say."""
        return {}

    def explain(self, completion: str, example: Example) -> str:
        """Why the completion does not earn everything, in a line; "" where there is no more to say.

        For people who look at single rows: it scores the row once more.
        """
        return ""

    def close(self) -> None:  # noqa: B027 - most rewards hold nothing
        """Give back processes and files; the reward opens them again when used again."""

    def __call__(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> list[float | None]:
        """Score `completions[i]` as an answer to `examples[i]`.

        Returns:
            One finite float per row; None for a dropped row (only under `on_error="drop"`).

        Raises:
            RewardError: under `on_error="raise"`, the first row that cannot be scored.
            ValueError: the two sequences differ in length.
        """
        if len(completions) != len(examples):
            raise ValueError(
                f"completions has {len(completions)} rows, examples has {len(examples)}: "
                "give one example per completion"
            )
        results = self.outcomes(completions, examples)
        return [self._settle(*row) for row in zip(results, completions, examples, strict=True)]

    def _settle(self, outcome: Outcome, completion: str, example: Example) -> float | None:
        outcome = as_outcome(outcome)
        if not isinstance(outcome, Exception):
            return outcome
        problem = f"{type(outcome).__name__}: {outcome}"
        error = RewardError(problem, self.name, example.id, completion)
        if self.on_error == "raise":
            raise error from outcome
        self.dropped += 1
        level = logging.WARNING if self.dropped == 1 else logging.DEBUG  # the count tells the rest
        logger.log(level, "row dropped: %s", error)
        return None


class RowReward(Reward):
    """A reward that looks at one completion at a time."""

    @abstractmethod
    def score(self, completion: str, example: Example) -> float:
        """The reward of one completion; may raise."""

    def outcomes(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> Sequence[Outcome]:
        return [self._attempt(*row) for row in zip(completions, examples, strict=True)]

    def _attempt(self, completion: str, example: Example) -> Outcome:
        try:
            return as_outcome(self.score(completion, example))
        except Exception as error:  # a user's function raises what it likes
            return error


def as_outcome(value: object) -> Outcome:
    """`value` as a finite float; what is neither that nor an exception becomes one."""
    if isinstance(value, Exception):
        return value
    if not isinstance(value, Real):
        return TypeError(f"expected a number, got {type(value).__name__} {value!r:.60}")
    number = float(value)
    return number if math.isfinite(number) else ValueError(f"expected a finite number, got {value}")


def gold(example: Example) -> str:
    """The example's gold answer.

    Raises:
        ValueError: it has none.
    """
    if example.answer is None:
        raise ValueError("the row has no gold answer; set answer_field to the field that holds it")
    return example.answer
