"""Text-only rewards: exact match, multiple choice, format."""

from __future__ import annotations

import re
import string
from typing import TYPE_CHECKING

from .base import RowReward, reference_answer

if TYPE_CHECKING:
    from gac.data import Example


def last_group(pattern: re.Pattern[str], text: str) -> str | None:
    """The group captured by the last match of `pattern`, or None."""
    matches = pattern.findall(text)
    return matches[-1] if matches else None


def compile_answer_pattern(pattern: str | None) -> re.Pattern[str] | None:
    """Compile a pattern with one group.

    Raises:
        ValueError: not a regular expression, or not exactly one group.
    """
    if pattern is None:
        return None
    try:
        compiled = re.compile(pattern, re.MULTILINE)
    except re.error as error:
        raise ValueError(
            f"answer_pattern {pattern!r} is not a valid regular expression: {error}"
        ) from error
    if compiled.groups != 1:
        raise ValueError(f"answer_pattern must have exactly one group (...), got {pattern!r}")
    return compiled


class ExactReward(RowReward):
    """1 if the completion equals the reference answer, else 0. White space does not matter.

    Args:
        ignore_case: ignore case when comparing.
        answer_pattern: regular expression with one group; its last match is compared instead of the
            whole completion (no match scores 0).
    """

    name = "exact"

    def __init__(self, *, ignore_case: bool = False, answer_pattern: str | None = None) -> None:
        self._ignore_case = ignore_case
        self._pattern = compile_answer_pattern(answer_pattern)

    def score(self, completion: str, example: Example) -> float:
        wanted = self._normal(reference_answer(example))
        answer = last_group(self._pattern, completion) if self._pattern else completion
        return float(answer is not None and self._normal(answer) == wanted)

    def _normal(self, text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if self._ignore_case else text


# Ordered from the strongest to the weakest evidence. The last match of the first matching pattern
# counts. A letter without parentheses must be upper case; otherwise "the answer is a lamp" would
# choose A. Possessive quantifiers keep the patterns linear in the length of the response.
_LETTER = (  # "I think" is no choice
    r"""(?:\(([A-Za-z])\)|['"]([A-Z])['"]|\**+(?!I\s+[a-z])([A-Z])\b(?!['’]))"""
)
_CHOICE_PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\\boxed\{\s*+(?:\\(?:(?:text|math)[a-z]{0,6}|bf|rm)\b\s*+\{?\s*+)?" + _LETTER,
        r"(?i:answer|choice|option)\**+\s*+(?i:is|:|>|(?:must|should|would)\s++be)\s*+:?\**+\s*+"
        r"(?i:(?:option|choice)\s++)?(?:\$|\\\()?" + _LETTER,
        r"^\s*+" + _LETTER + r"[\s.):*$]*+$",
        r"\A\s*+\**+([A-Z])\)[^\n]*+\Z()",
        r"\b([A-Z])\)?\**+\s++is\s++(?:the\s++)?(?:correct|right)\s++(?:answer|choice|option)\b()",
        r"\(([A-Z])\)()",
        r"\b([A-Z])[.)\s*]*+$()",
    )
)


def chosen_letter(text: str) -> str | None:
    r"""The letter that a multiple-choice response chooses, in upper case, or None.

    Tried in this order: `\boxed{C}`; "answer is (C)", "answer must be C", "Answer: C"; a response
    that is only a letter or "C) 12"; "C is the correct answer"; the last "(C)"; a letter at the
    very end. The last match counts.
    """
    for pattern in _CHOICE_PATTERNS:
        matches = pattern.findall(text)
        if matches:
            return "".join(matches[-1]).upper()
    return None


class ChoiceReward(RowReward):
    """1 if the response chooses the right letter, else 0 (see `chosen_letter`).

    The reference answer is a letter, "C" or "(C)". If the row lists its choices, a letter beyond
    the last one is an error.

    Args:
        choices_field: row field with the list of choices.
    """

    name = "choice"

    def __init__(self, *, choices_field: str = "choices") -> None:
        self._field = choices_field

    def score(self, completion: str, example: Example) -> float:
        wanted = re.fullmatch(r"\s*\(?([A-Za-z])\)?[.:]?\s*", reference_answer(example))
        if wanted is None:
            raise ValueError(f"the reference answer {example.answer!r} is not a letter like C")
        letter = wanted[1].upper()
        choices = example.extra.get(self._field)
        if choices is not None and string.ascii_uppercase.index(letter) >= len(choices):
            raise ValueError(f"the answer {letter} is not one of the {len(choices)} choices")
        return float(chosen_letter(completion) == letter)


class FormatReward(RowReward):
    """1 if the completion matches the pattern, else 0. Needs no reference answer.

    Args:
        pattern: regular expression; a dot matches line breaks too. Avoid nested quantifiers, which
            can take exponential time; only `deadline` stops them.
        full: True: the whole completion, stripped of surrounding white space, must match; False:
            any part of it.
    """

    name = "format"

    def __init__(self, pattern: str, *, full: bool = True) -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(
                f"pattern {pattern!r} is not a valid regular expression: {error}"
            ) from error
        self._full = full

    def score(self, completion: str, example: Example) -> float:
        text = completion.strip()
        found = self._pattern.fullmatch(text) if self._full else self._pattern.search(text)
        return float(found is not None)
