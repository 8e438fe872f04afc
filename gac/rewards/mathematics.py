"""The math reward: is the final answer equal to the gold answer, by math-verify?"""

from __future__ import annotations

import atexit
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gac.errors import MissingExtra

from .base import Outcome, Reward, gold
from .grading_pool import GradingPool
from .text import compile_answer_pattern, last_group

if TYPE_CHECKING:
    from gac.data import Example

_NUMBER = re.compile(r"[$-]*\d[\d.,/]*%?")
_DELIMITED = re.compile(r"\\boxed|(?<!\\)\$|\\\(|\\\[")
# math-verify reads a bare word as a product of letters, so that "east" would equal "seat".
_WORD = re.compile(r"[A-Za-z]{4,}")


@cache
def _shared_pool(timeout: float, workers: int | None) -> GradingPool:
    """One pool per setting: training and evaluation share their workers."""
    pool = GradingPool(timeout, workers)
    atexit.register(pool.close)
    return pool


class MathReward(Reward):
    """1 where the completion's final answer equals the gold answer as mathematics, else 0.

    The final answer is what follows the last `####` (a bare number, or the last line), else what
    math-verify finds in the completion: a boxed expression, "the answer is ...", else the last
    number or formula. The checks run in worker processes; one that takes more than `timeout` is
    stopped, scores 0 and is counted. A gold answer that is no mathematics is an error of the row.

    Args:
        timeout: CPU seconds for one check.
        workers: grading processes; None: up to 4, by the machine's cores.
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
            raise MissingExtra("reward 'math' needs the extra train: pip install 'gac[train]'")
        self._pool = _shared_pool(timeout, workers)
        self._pattern = compile_answer_pattern(answer_pattern)
        self._counts = Counter(timeouts=0, crashes=0)

    def outcomes(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> Sequence[Outcome]:
        outcomes: list[Outcome] = [0.0] * len(completions)
        pairs: dict[int, tuple[str, str]] = {}
        for row, (completion, example) in enumerate(zip(completions, examples, strict=True)):
            try:
                pairs[row] = gold_text(gold(example)), self._final_answer(completion)
            except ValueError as error:
                outcomes[row] = error
        for row, verdict in zip(pairs, self._pool.grade(list(pairs.values())), strict=True):
            outcomes[row] = self._outcome(verdict, examples[row])
        return outcomes

    def counts(self) -> dict[str, int]:
        """`timeouts` and `crashes`: checks that were cut off, or ended their worker twice."""
        return dict(self._counts)

    def close(self) -> None:
        """End the grading processes (of every math reward with the same settings)."""
        self._pool.close()

    def _final_answer(self, completion: str) -> str:
        answer = completion
        if self._pattern is not None:
            answer = last_group(self._pattern, completion) or ""
        elif marked := after_mark(completion):
            answer = marked
        return _plain_minus(answer)

    def _outcome(self, verdict: str, example: Example) -> Outcome:
        if verdict == "bad gold":
            return ValueError(f"math-verify finds no mathematics in the gold {example.answer!r}")
        if verdict in ("timeout", "crash"):
            self._counts["timeouts" if verdict == "timeout" else "crashes"] += 1
        return float(verdict == "right")


def after_mark(text: str) -> str | None:
    """What follows the last `####`, GSM8K's mark of the final answer, or None.

    math-verify does not know the mark and may prefer an earlier "... answered 200". Elsewhere than
    on the last line only a bare number counts: "#### Step 2" is a Markdown heading.
    """
    for below, line in enumerate(reversed(text.rstrip().splitlines())):
        before, mark, answer = line.rpartition("####")
        answer = answer.strip()
        is_heading = before.endswith("#") or (below > 0 and not _NUMBER.fullmatch(answer))
        if mark and answer and not is_heading:
            return answer
    return None


def gold_text(answer: str) -> str:
    """A gold answer as math-verify reads it best: what follows `####`, or the whole in a box."""
    answer = _plain_minus(after_mark(answer) or answer).strip()
    if _DELIMITED.search(answer):  # a worked solution, or LaTeX with its own delimiters
        return answer
    if _WORD.fullmatch(answer):
        answer = f"\\text{{{answer}}}"
    return f"\\boxed{{{answer}}}"


def _plain_minus(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-")
