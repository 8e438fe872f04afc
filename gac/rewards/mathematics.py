"""The math reward: compares the final answer with the reference answer, using math-verify."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gac.errors import MissingExtra

from .base import Reward, RowOutcome, reference_answer, time_limits
from .grading_pool import GradingPool
from .text import compile_answer_pattern, last_group

if TYPE_CHECKING:
    from gac.data import Example

_NUMBER = re.compile(r"[$-]*\d[\d.,/]*%?")
_DELIMITED = re.compile(r"\\boxed|(?<!\\)\$|\\\(|\\\[")
# What may stand beside the number of an answer, as in "**5 m**", "18 dollars." or "60 km/h"; but
# "2xy", "2 pi", "ln 2" and "not 5" are not numbers with a unit.
_BESIDE = re.compile(
    r"\(?(?<![\\A-Za-z])(?!(?:not|pi|sqrt|root|log|ln|exp|sin|cos|tan|mod|hundred|thousand|[a-z]{0,5}illion)\b)"
    r"(?:(?<!\d)[A-Za-z]{2,}|(?<=\d )[ghlmsL]\b"
    r"|(?<=\d)(?:st|nd|rd|th|[ckm]m|[km]g|m[lL]|[km]ph|hrs?|min|sec)\b)"
    r"(?:/[A-Za-z]+)?(?:\^\d|[:)])?|\*\*|[°€£]|\.$"
)
_PLAIN_NUMBER = re.compile(r"(?=.*\d)[$-]*(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:/\d+)? ?%?")
# math-verify reads a bare word as a product of letters, so that "east" would equal "seat".
_WORD = re.compile(r"[A-Za-z]{4,}|(?i:yes|no)")
# What math-verify does not know or misreads, rewritten in this order. All patterns are linear.
_REWRITES: tuple[tuple[re.Pattern[str], Any], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        ("\N{MINUS SIGN}|(?<![\\w)])(?<![\\w)] )\N{EN DASH}(?=[\\d.$])", "-"),
        (r"(?<!\d )\b(?i:minus|negative)\s++(?=[\d.$])", "-"),
        (r"-\\?\$(?=[\d.][^$\n]*+(?:\n|\Z))", "-"),  # "-$5": no formula ends on this line
        (r"\A([^$]*?)\\?\$(?=[\d.][^$]*+\Z)", r"\1"),  # the only dollar sign
        (r"(?<![\w.)}\]])\.(?=\d)", "0."),
        *zip("²³½¼¾⅓⅔", ("^2", "^3", " 1/2", " 1/4", " 3/4", " 1/3", " 2/3"), strict=True),
        (r"√(\d++|[a-z])", r"\\sqrt{\1}"),
        (
            r"(\d{0,9})\.(\d{0,9})\\overline\{(\d{1,9})\}",
            lambda m: (
                rf"\frac{{{int(m[1] + m[2] + m[3]) - int('0' + m[1] + m[2])}}}"
                rf"{{{10 ** len(m[2] + m[3]) - 10 ** len(m[2])}}}"
            ),
        ),
        (  # "3 1/2", which it reads as (3 + 1)/2
            r"(?<![\w.,/^])(\d{1,9})[ \xa0]++(\d{1,9})/(\d{1,9})(?!\d|[.,]\d)",
            lambda m: f"{int(m[1]) * int(m[3]) + int(m[2])}/{m[3]}",
        ),
        (  # "10 000", which it reads as a product
            r"(?<![\w.,])\d{1,3}(?:(?:\\[,; ]|[~ \xa0\u2009\u202f])\d{3})+(?!\d)",
            lambda m: re.sub(r"\D", "", m[0]),
        ),
        (
            r"(?<![\w.,])\d{1,99}(?:\.\d{1,99})?[eE][+-]?\d{1,2}(?!\w)",
            lambda m: f"{Decimal(m[0]):f}",
        ),
        *(
            (
                rf"(?<![\w.,/])(\d++(?:,\d{{3}})*+(?:\.\d++)?)\s*+(?i:{scale})s?\b",
                lambda m, zeros=zeros: f"{Decimal(m[1].replace(',', '')).scaleb(zeros):f}",
            )
            for scale, zeros in (
                ("hundred", 2),  # before the others: "5 hundred thousand"
                ("thousand", 3),
                ("million", 6),
                ("billion", 9),
                ("trillion", 12),
            )
        ),
    )
)


@cache
def _shared_pool(timeout: float, workers: int | None) -> GradingPool:
    """One pool per configuration, so that training and evaluation share workers."""
    return GradingPool(timeout, workers)


class MathReward(Reward):
    """1 if the completion's final answer is mathematically equal to the reference answer, else 0.

    The final answer is the text after the last `####` (a bare number, or the last line): a number
    with its unit, or one expression. Without one, it is what math-verify extracts from the
    completion: the boxed expressions of the last paragraph that has one (several are a set), "the
    answer is ...", or the last number or formula. "5 million", "3 1/2" and "10 000" are numbers.

    Checks run in worker processes. One that exceeds `timeout` is stopped, scores 0 and is counted.
    A reference answer that math-verify cannot parse is an error in the row.

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
                    pairs[row] = answer_text(reference_answer(example)), answer
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
        # math-verify makes a set of all boxes, but those of the last paragraph correct earlier ones
        start = completion.rfind("\n\n", 0, max(completion.rfind(r"\boxed"), 0)) + 1
        return answer_text(marked) if marked else _rewritten(completion[start:])

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


def answer_text(answer: str) -> str:
    """Format a final answer or a reference answer for math-verify.

    Takes the text after `####`, if any, and boxes it unless it already has LaTeX delimiters. Of a
    number with its unit, only the number remains.
    """
    answer = _rewritten(text_after_marker(answer) or answer).lstrip("* ").rstrip("*. \n")
    number = _BESIDE.sub("", answer).strip()
    answer = number if _PLAIN_NUMBER.fullmatch(number) else answer
    if _DELIMITED.search(answer):  # a worked solution, or LaTeX with its own delimiters
        return answer
    if _WORD.fullmatch(answer):
        answer = f"\\text{{{answer}}}"
    return f"\\boxed{{{answer}}}"


def _rewritten(text: str) -> str:
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text
