"""Base classes for rewards, and how rows that cannot be scored are handled."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gac.errors import UserError
from gac.imports import USER_ERRORS, explained, location

from .completion import THINK, Markers, graded_text, names_marker, whole_lines

if TYPE_CHECKING:
    from gac.data import Example


logger = logging.getLogger(__name__)

OnError = Literal["raise", "drop"]
RowOutcome = float | Exception
"""A row's reward, or the exception that explains why it has none."""


class RewardError(UserError, ValueError):
    """A row cannot be scored: the reward raised, timed out or returned a non-finite number."""

    def __init__(self, problem: str, reward: str, example_id: str, completion: str) -> None:
        super().__init__(
            f"reward {reward!r} on row {example_id!r}: {problem}; completion: {completion!r:.200}. "
            "Fix the row or the reward, or set on_error: drop to skip and count such rows"
        )
        self.problem, self.reward = problem, reward
        self.example_id, self.completion = example_id, completion

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments instead of the message, for the other ranks."""
        return type(self), (self.problem, self.reward, self.example_id, self.completion)


Terms = Mapping[str, Sequence[float]]
"""Name of a term -> its unweighted value for each row; nan: failed."""


class Graded(NamedTuple):
    """What a reward says about the rows of one call."""

    rewards: list[float | None]
    """One finite float per row; None for a dropped row (only under `on_error="drop"`)."""
    terms: Terms
    """Of a reward that adds up others."""


class Reward(ABC):
    """Scores completions. Call it with the completions and their examples.

    Subclasses implement `outcomes`. To score one completion at a time, subclass `RowReward` and
    implement `score`.
    """

    name = "reward"
    """Name used in messages."""
    on_error: OnError = "raise"
    """"raise" raises RewardError if a row cannot be scored; "drop" counts the row and returns None
    for it.
    """
    dropped = 0
    """Rows dropped so far."""
    deadline: float | None = 600.0
    """Seconds after which a call of `score` or of a user's function fails; None: no deadline."""

    reasoning: Markers | None = None
    """The texts that begin and end a reasoning trace; (): none; None: those of the tokenizer, which
    a run puts here, and `THINK`.
    """

    @property
    def markers(self) -> Markers:
        """The texts that begin and end a reasoning trace."""
        return THINK if self.reasoning is None else self.reasoning

    def graded(self, completion: str, example: Example) -> str:
        """The part of the completion that can hold an answer; see `graded_text`."""
        return graded_text(completion, example, self.markers)

    def graded_by(self, pattern: re.Pattern[str], completion: str, example: Example) -> str:
        """What a pattern of the user sees: all lines if it names a marker, else `graded`."""
        if names_marker(pattern.pattern, self.markers):
            return whole_lines(completion) if example.truncated else completion
        return self.graded(completion, example)

    @abstractmethod
    def outcomes(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> Sequence[RowOutcome]:
        """Return one outcome per row. A row's failure is returned, not raised."""

    def outcomes_and_terms(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> tuple[Sequence[RowOutcome], Terms]:
        """The `outcomes`, with the terms of a reward that adds up others."""
        return self.outcomes(completions, examples), {}

    def set_step(self, step: int) -> None:  # noqa: B027 - most rewards do not depend on the step
        """Set the optimizer step (counted from 0) that the following calls belong to."""

    def counts(self) -> dict[str, int]:
        """Cumulative event counts by name, for the run to log (e.g. timeouts)."""
        return {}

    def explain(self, completion: str, example: Example) -> str:
        """Explain in one line why the completion does not get the full reward, or return "".

        For debugging individual rows; scores the row again.
        """
        return ""

    def trivial(self, example: Example) -> dict[str, str]:
        """Completions that solve nothing, by description; a row that one of them passes is weak."""
        return {}

    def passed_by(self, example: Example) -> list[str]:
        """The descriptions of the `trivial` completions that get the full reward, 1."""
        trivial = self.trivial(example)
        scores = self.outcomes([*trivial.values()], [example] * len(trivial)) if trivial else ()
        return [name for name, s in zip(trivial, scores, strict=True) if s == 1.0]

    def close(self) -> None:  # noqa: B027 - most rewards hold no resources
        """Release processes and files. They are reopened on the next use."""

    def __call__(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> list[float | None]:
        """The rewards of `grade`, one per row."""
        return self.grade(completions, examples).rewards

    def grade(self, completions: Sequence[str], examples: Sequence[Example]) -> Graded:
        """Score `completions[i]` as an answer to `examples[i]`.

        Raises:
            RewardError: a row cannot be scored and `on_error="raise"`.
            ValueError: the two sequences differ in length.
        """
        if len(completions) != len(examples):
            raise ValueError(
                f"completions has {len(completions)} rows, examples has {len(examples)}: "
                "give one example per completion"
            )
        results, terms = self.outcomes_and_terms(completions, examples)
        rows = zip(results, completions, examples, strict=True)
        return Graded([self._resolve(*row) for row in rows], terms)

    def _resolve(self, outcome: RowOutcome, completion: str, example: Example) -> float | None:
        outcome = as_outcome(outcome)
        if not isinstance(outcome, Exception):
            return outcome
        problem = f"{notes_of(outcome)}{type(outcome).__name__}: {outcome}{location(outcome)}"
        if isinstance(outcome, TimeoutError):
            problem += f"; prompt: {example.prompt_text!r:.200}"
        error = RewardError(problem, self.name, example.id, completion)
        if self.on_error == "raise":
            raise error from outcome
        self.dropped += 1
        # warn once; later drops only increase the count
        level = logging.WARNING if self.dropped == 1 else logging.DEBUG
        logger.log(level, "row dropped: %s", error)
        return None


def notes_of(error: Exception) -> str:
    """The notes on an error, such as `term 'NAME': ` for that of a term of a sum."""
    return "".join(f"{note}: " for note in reversed(getattr(error, "__notes__", ())))


class DeadlineExceeded(TimeoutError):
    """A call took longer than the reward's deadline."""


def late(seconds: float | None) -> DeadlineExceeded:
    """The error of a call that took longer than the reward's deadline."""
    return DeadlineExceeded(f"no result after {seconds:g} s (key `deadline` of the reward)")


@contextlib.contextmanager
def time_limits(seconds: float | None) -> Iterator[AbstractContextManager[None]]:
    """Yields a context manager that raises DeadlineExceeded `seconds` after it is entered.

    It can be entered many times. It does nothing outside the main thread, or if `seconds` is None.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield contextlib.nullcontext()
        return

    def stop(number: int, frame: object) -> None:
        raise late(seconds)

    previous = signal.signal(signal.SIGALRM, stop)
    try:
        yield _Timer(seconds)
    finally:
        signal.signal(signal.SIGALRM, previous)


class _Timer(AbstractContextManager[None]):
    """Sends SIGALRM after `seconds` in the context."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)


class RowReward(Reward):
    """Base class for rewards that score one completion at a time."""

    @abstractmethod
    def score(self, completion: str, example: Example) -> float:
        """The reward of one completion; may raise."""

    def outcomes(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> Sequence[RowOutcome]:
        with time_limits(self.deadline) as limit:
            return [self._attempt(*row, limit) for row in zip(completions, examples, strict=True)]

    def _attempt(
        self, completion: str, example: Example, limit: AbstractContextManager[None]
    ) -> RowOutcome:
        try:
            with limit:
                return as_outcome(self.score(completion, example))
        except USER_ERRORS as error:
            return explained(error)


class CallableReward(RowReward):
    """Calls `function(completion, example, **options) -> number` on each row."""

    def __init__(self, name: str, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self.name = name
        self._function, self._options = function, options

    def score(self, completion: str, example: Example) -> float:
        return self._function(completion, example, **self._options)


def as_outcome(value: object) -> RowOutcome:
    """Convert `value` to a finite float.

    Exceptions are returned unchanged; any other value yields an exception.
    """
    if isinstance(value, Exception):
        return value
    if not isinstance(value, Real):
        return TypeError(f"expected a number, got {type(value).__name__} {value!r:.60}")
    number = float(value)
    return number if math.isfinite(number) else ValueError(f"expected a finite number, got {value}")


def reference_answer(example: Example) -> str:
    """The example's reference answer.

    Raises:
        ValueError: the example has no reference answer.
    """
    if example.answer is None:
        raise ValueError("the row has no reference answer; set answer_field to the field with it")
    return example.answer


class Tally:
    """Counts a reward's events on this rank."""

    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        self._reported = event_counts(reward)

    def new_counts(self) -> dict[str, int]:
        """This rank's new events since the last call: `rewards_dropped`, `rewards_<name>`, ...

        Events during an evaluation are reported with the next step.
        """
        now = event_counts(self.reward)
        before, self._reported = self._reported, now
        return {f"rewards_{name}": count - before.get(name, 0) for name, count in now.items()}


def event_counts(reward: Reward) -> dict[str, int]:
    """This process's cumulative counts, including dropped rows."""
    return {"dropped": reward.dropped, **reward.counts()}


@contextlib.contextmanager
def closing_reward(reward: Reward) -> Iterator[None]:
    """Context manager that logs this process's counts and closes the reward on exit."""
    try:
        yield
    finally:
        try:
            nonzero = [f"{n} {name}" for name, n in event_counts(reward).items() if n]
            if nonzero:
                logger.warning("reward %s: %s in this process", reward.name, ", ".join(nonzero))
        finally:
            reward.close()
