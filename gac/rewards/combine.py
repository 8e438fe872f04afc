"""Weighted sums of rewards, and rewards that score several rows at once."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from gac.errors import RunError, is_count
from gac.imports import USER_ERRORS, explained

from .base import (
    CallableReward,
    DeadlineExceeded,
    Reward,
    RowOutcome,
    Terms,
    as_outcome,
    late,
    notes_of,
    time_limits,
)

if TYPE_CHECKING:
    from gac.data import Example


class SumReward(Reward):
    """Weighted sum of rewards. A row fails if any term cannot score it."""

    name = "sum"

    def __init__(self, terms: Sequence[tuple[Reward, float]]) -> None:
        if not terms:
            raise ValueError("sum needs at least one term {reward: ..., weight: ...}")
        self._terms = tuple(terms)
        names = [reward.name for reward, _ in terms]
        self._names = [
            name if names.count(name) == 1 else f"{name}-{names[:i].count(name) + 1}"
            for i, name in enumerate(names)
        ]

    def outcomes(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> Sequence[RowOutcome]:
        return self.outcomes_and_terms(completions, examples)[0]

    def outcomes_and_terms(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> tuple[Sequence[RowOutcome], Terms]:
        for reward, _ in self._terms:
            reward.deadline, reward.reasoning = self.deadline, self.reasoning
        columns = [reward.outcomes(completions, examples) for reward, _ in self._terms]
        terms = {
            name: [math.nan if isinstance(v, Exception) else v for v in map(as_outcome, column)]
            for name, column in zip(self._names, columns, strict=True)
        }
        return [self._add(row) for row in zip(*columns, strict=True)], terms

    def set_step(self, step: int) -> None:
        for reward, _ in self._terms:
            reward.set_step(step)

    def counts(self) -> dict[str, int]:
        """The terms' counts, summed by name."""
        total: Counter[str] = Counter()
        for reward, _ in self._terms:
            total.update(reward.counts())
        return dict(total)

    def explain(self, completion: str, example: Example) -> str:
        """The terms that do not give their full reward, 1, with their own explanations."""
        reasons = []
        for name, reward in self._counted():
            [score] = map(as_outcome, reward.outcomes([completion], [example]))
            if not isinstance(score, Exception) and score < 1:
                why = reward.explain(completion, example)
                reasons.append(f"{name} scores {score:g}{': ' if why else ''}{why}")
        return "; ".join(reasons)

    def passed_by(self, example: Example) -> list[str]:
        """What passes a term, which is weak whatever the other terms give."""
        return [
            f"{name}: {text}" for name, term in self._counted() for text in term.passed_by(example)
        ]

    def close(self) -> None:
        for reward, _ in self._terms:
            reward.close()

    def _counted(self) -> list[tuple[str, Reward]]:
        """The names and terms with a positive weight."""
        pairs = zip(self._names, self._terms, strict=True)
        return [(name, reward) for name, (reward, weight) in pairs if weight > 0]

    def _add(self, outcomes: Sequence[RowOutcome]) -> RowOutcome:
        total = 0.0
        for outcome, name, (_, weight) in zip(outcomes, self._names, self._terms, strict=True):
            value = as_outcome(outcome)
            if isinstance(value, Exception):
                if (note := f"term {name!r}") not in notes_of(value):  # rows may share an exception
                    value.add_note(note)
                return value
            total += weight * value
        return total


class ConcurrentReward(CallableReward):
    """Scores up to `concurrency` rows at once, for judges over a network.

    A coroutine function runs in one event loop; each call of another function has a thread. A row
    that fails is tried `retries` more times, first after 1 s, then after 2, 4, ...
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        options: dict[str, Any],
        concurrency: int,
        retries: int,
    ) -> None:
        super().__init__(name, function, options)
        for key, value, low in (("concurrency", concurrency, 1), ("retries", retries, 0)):
            if not is_count(value, low):
                raise ValueError(f"{key} must be a whole number >= {low}, got {value!r}")
        self._concurrency, self._retries = concurrency, retries

    def outcomes(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> Sequence[RowOutcome]:
        # in a thread of its own: the caller may have a running event loop, as a notebook has
        return _daemon(
            asyncio.run, self._all(list(zip(completions, examples, strict=True)))
        ).result()

    async def _all(self, rows: Sequence[tuple[str, Example]]) -> list[RowOutcome]:
        free = asyncio.Semaphore(self._concurrency)
        return await asyncio.gather(*(self._one(free, *row) for row in rows))

    async def _one(self, free: asyncio.Semaphore, completion: str, example: Example) -> RowOutcome:
        async with free:
            for attempt in range(self._retries + 1):
                if attempt:
                    await asyncio.sleep(2.0 ** (attempt - 1))
                limit = asyncio.timeout(self.deadline)
                try:
                    async with limit:
                        if inspect.iscoroutinefunction(self._function):
                            call = self._function(completion, example, **self._options)
                        else:
                            score = functools.partial(self._function, **self._options)
                            call = asyncio.wrap_future(_daemon(score, completion, example))
                        outcome = as_outcome(await call)
                except TimeoutError as error:  # of ours, or of the user's own client
                    outcome = late(self.deadline) if limit.expired() else explained(error)
                except USER_ERRORS as error:
                    outcome = explained(error)
                if not isinstance(outcome, Exception):
                    break
        return outcome


def _daemon(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call `function` in a thread that does not keep the process alive if it hangs."""
    future: Future[Any] = Future()

    def work() -> None:
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        try:
            future.set_result(function(*args))
        except BaseException as error:  # the caller of `result` gets it
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


class BatchCallableReward(CallableReward):
    """Calls `function(completions, examples, **options) -> numbers` on whole batches.

    If a batch raises, its rows are retried one at a time to isolate the failing ones; if it takes
    longer than the deadline, all of them fail.
    """

    def outcomes(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> Sequence[RowOutcome]:
        if not completions:
            return []
        try:
            with time_limits(self.deadline) as limit, limit:
                values = list(self._function(list(completions), list(examples), **self._options))
        except DeadlineExceeded as error:
            return [error] * len(completions)
        except USER_ERRORS as error:
            if len(completions) == 1:
                return [explained(error)]
            return [
                outcome
                for completion, example in zip(completions, examples, strict=True)
                for outcome in self.outcomes([completion], [example])
            ]
        if len(values) != len(completions):
            raise RunError(
                f"reward {self.name!r} returned {len(values)} scores for {len(completions)} "
                "completions"
            )
        return [as_outcome(value) for value in values]
