"""The math reward: compares the final answer with the reference answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gac.errors import MissingExtra

from .answers import read_answer
from .base import Reward, RowOutcome, reference_answer, time_limits
from .grading_pool import AnswerPair, GradingPool
from .text import compile_answer_pattern, last_group
from .values import Answer, equal, pairs

if TYPE_CHECKING:
    from gac.data import Example


@cache
def _shared_pool(timeout: float, workers: int | None) -> GradingPool:
    """One pool per configuration, so that training and evaluation share workers."""
    return GradingPool(timeout, workers)


class MathReward(Reward):
    r"""1 if the completion's final answer is mathematically equal to the reference answer, else 0.

    `read_answer` reads both: after the last `####`, in `<answer>` tags, in the last `\boxed`, after
    "the answer is", or in the last sentence with a number. The answer must be one value: a list of
    guesses, a term such as "5x + 3" or a repeated question such as "4*5" is not a number, and a box
    that is denied or is an operand is no answer. Units, currencies and percent signs may be left
    out; "5 million", "5 dozen", "3 1/2", "10 000" and "1.5 x 10^5" are numbers. An expression is
    right only if the reference is an expression, too; math-verify compares these, in worker
    processes. A check that exceeds `timeout` is stopped, scores 0 and is counted.

    Args:
        timeout: CPU-time limit per check, in seconds.
        workers: number of grading processes; None: up to 4, depending on the available cores.
        answer_pattern: regular expression with one group; its last match is the final answer (no
            match scores 0).
    """

    name = "math"

    def __init__(
        self,
        *,
        timeout: float = 5.0,
        workers: int | None = None,
        answer_pattern: str | None = None,
    ) -> None:
        if find_spec("math_verify") is None:
            raise MissingExtra(
                "reward 'math' requires the extra 'train': pip install 'gac-kernels[train]'"
            )
        self._pool = _shared_pool(timeout, workers)
        self._pattern = compile_answer_pattern(answer_pattern)
        self._counts = Counter(timeouts=0, crashes=0)

    def outcomes(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> Sequence[RowOutcome]:
        outcomes: dict[int, RowOutcome] = {}
        checks: dict[int, list[AnswerPair]] = {}
        with time_limits(self.deadline) as limit:
            for row, (completion, example) in enumerate(zip(completions, examples, strict=True)):
                try:
                    with limit:
                        reference = read_reference(reference_answer(example))
                        answer = self._read(completion, example)
                except (ValueError, TimeoutError) as error:
                    outcomes[row] = error
                    continue
                verdict = False if answer is None else equal(reference, answer)
                if verdict is None and answer is not None:
                    checks[row] = pairs(reference, answer)
                else:
                    outcomes[row] = float(bool(verdict))
        verdicts = iter(self._pool.grade([pair for own in checks.values() for pair in own]))
        for row, own in checks.items():
            outcomes[row] = self._outcome([next(verdicts) for _ in own], examples[row])
        return [outcomes[row] for row in range(len(completions))]

    def counts(self) -> dict[str, int]:
        """`timeouts` and `crashes`: checks that timed out, or crashed their worker twice."""
        return dict(self._counts)

    def close(self) -> None:
        """Stop the grading processes, which all math rewards with the same settings share."""
        self._pool.close()

    def _read(self, completion: str, example: Example) -> Answer | None:
        if self._pattern is None:
            return read_answer(self.graded(completion, example))
        text = self.graded_by(self._pattern, completion, example)
        return read_answer(last_group(self._pattern, text) or "")

    def _outcome(self, verdicts: Sequence[str], example: Example) -> RowOutcome:
        """The outcome of the checks of a row, all of which must be right."""
        if "bad reference" in verdicts:
            return _unreadable(str(example.answer))
        for event, counted in (("timeout", "timeouts"), ("crash", "crashes")):
            self._counts[counted] += event in verdicts
        return float(all(verdict == "right" for verdict in verdicts))


@lru_cache(maxsize=4096)  # all rollouts of a prompt share their reference answer
def read_reference(text: str) -> Answer:
    """Read a reference answer.

    Raises:
        ValueError: it holds no answer.
    """
    answer = read_answer(text, prose="\n" in text.strip())
    if answer is None:
        raise _unreadable(text)
    return answer


def _unreadable(text: str) -> ValueError:
    return ValueError(f"no answer can be read from the reference answer {text!r}")
