"""The math reward: compares the final answer with the reference answer, using math-verify."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gac.errors import MissingExtra

from .base import Reward, RowOutcome, reference_answer, time_limits
from .grading_pool import GradingPool
from .text import compile_answer_pattern, last_group

if TYPE_CHECKING:
    from gac.data import Example

_NUMBER = re.compile(r"[$-]*\d[\d.,/]*%?")
_DELIMITED = re.compile(r"\\boxed|(?<!\\)\$|\\\(|\\\[")
# what may stand beside the number of an answer, as in "**5 m**", "$18 dollars." or "60 km/h"
_BESIDE = re.compile(
    r"\(?(?<!\\)(?:[A-Za-z]{2,}|(?<=\d )[ghlmsL]\b)(?:/[A-Za-z]+)?(?:\^\d|[:)])?|\*\*|[°€£]|\.$"
)
_PLAIN_NUMBER = re.compile(r"(?=.*\d)[$-]*(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:/\d+)? ?%?")
# math-verify reads a bare word as a product of letters, so that "east" would equal "seat".
_WORD = re.compile(r"[A-Za-z]{4,}")


@cache
def _shared_pool(timeout: float, workers: int | None) -> GradingPool:
    """One pool per configuration, so that training and evaluation share workers."""
    return GradingPool(timeout, workers)


class MathReward(Reward):
    """1 if the completion's final answer is mathematically equal to the reference answer, else 0.

    The final answer is the text after the last `####` (a bare number, or the last line): a number
    with its unit, or one expression. Without one, it is what math-verify extracts from the
    completion: a boxed expression, "the answer is ...", or the last number or formula. Checks run
    in worker processes. One that exceeds `timeout` is stopped, scores 0 and is counted. A reference
    answer that math-verify cannot parse is an error in the row.

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
        pairs: dict[int, tuple[str, str]] = {}
        with time_limits(self.deadline) as limit:
            for row, (completion, example) in enumerate(zip(completions, examples, strict=True)):
                try:
                    with limit:
                        answer = self._final_answer(completion)
                    pairs[row] = reference_text(reference_answer(example)), answer
                except (ValueError, TimeoutError) as error:
                    outcomes[row] = error
        for row, verdict in zip(pairs, self._pool.grade(list(pairs.values())), strict=True):
            outcomes[row] = self._outcome(verdict, examples[row])
        return [outcomes[row] for row in range(len(completions))]

    def counts(self) -> dict[str, int]:
        """`timeouts` and `crashes`: checks that timed out, or crashed their worker twice."""
        return dict(self._counts)

    def close(self) -> None:
        """Stop the grading processes, which all math rewards with the same settings share."""
        self._pool.close()

    def _final_answer(self, completion: str) -> str:
        if self._pattern is not None:
            return answer_text(last_group(self._pattern, completion) or "")
        marked = text_after_marker(completion)
        return answer_text(marked) if marked else _plain_minus(completion)

    def _outcome(self, verdict: str, example: Example) -> RowOutcome:
        if verdict == "bad reference":
            return ValueError(f"math-verify cannot parse the reference answer {example.answer!r}")
        if verdict in ("timeout", "crash"):
            self._counts["timeouts" if verdict == "timeout" else "crashes"] += 1
        return float(verdict == "right")


def text_after_marker(text: str) -> str | None:
    """The text after the last `####`, GSM8K's final-answer marker, or None.

    math-verify does not know this marker and may prefer an earlier "... answered 200". On any line
    but the last, only a bare number counts: "#### Step 2" is a Markdown heading.
    """
    for below, line in enumerate(reversed(text.rstrip().splitlines())):
        before, mark, answer = line.rpartition("####")
        answer = answer.strip()
        is_heading = before.endswith("#") or (below > 0 and not _NUMBER.fullmatch(answer))
        if mark and answer and not is_heading:
            return answer
    return None


def reference_text(answer: str) -> str:
    """Format a reference answer for math-verify.

    Takes the text after `####`, if any, and boxes it unless it already has LaTeX delimiters.
    """
    answer = _plain_minus(text_after_marker(answer) or answer).strip()
    if _DELIMITED.search(answer):  # a worked solution, or LaTeX with its own delimiters
        return answer
    if _WORD.fullmatch(answer):
        answer = f"\\text{{{answer}}}"
    return f"\\boxed{{{answer}}}"


def answer_text(answer: str) -> str:
    """Format the text of a final answer for math-verify, which finds the number in "18 dollars".

    Anything but a number with its unit is boxed: of "x^2 + 1", it would find only the 1.
    """
    answer = _plain_minus(answer)
    if not answer or _PLAIN_NUMBER.fullmatch(_BESIDE.sub("", answer).strip()):
        return answer
    return reference_text(answer.lstrip("* ").rstrip("*. "))


def _plain_minus(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-")
