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
        if self._pattern:
            answer = last_group(self._pattern, self.graded_by(self._pattern, completion, example))
        else:  # what was cut off is not the whole answer
            answer = None if example.truncated else self.graded(completion, example)
        return float(answer is not None and self._normal(answer) == wanted)

    def _normal(self, text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if self._ignore_case else text


# A letter without brackets must be upper case; otherwise "the answer is a lamp" would choose A.
# Possessive quantifiers keep the patterns linear in the length of the response.
_STYLE = r"\\(?:(?:text|math)[a-z]{0,6}|bf|rm|boxed)\b\s*+\{?\s*+"
_OPEN = rf"(?:\$|\\\(|\*{{1,3}}+|`|<\w{{1,12}}>|{_STYLE}){{0,6}}+"
_LETTER = (  # "I think" is no choice
    rf"{_OPEN}(?:\({_OPEN}([A-Za-z])\b[\s}}*$]*+\)|\[{_OPEN}([A-Za-z])\b[\s}}*$]*+\]"
    rf"|['\"“‘]([A-Z])['\"”’]|(?!I\s+[a-z])([A-Z])\b(?!['’]\w|\s*+[-+=^_/*]\s*+\w|\w))"
)
_BOXED = re.compile(r"\\boxed\s*+\{")
_IN_BOX = re.compile(rf"\s*+{_LETTER}[\s}}.:)$*]*\}}|\s*+{_LETTER}\s*+[.:)]\s*+[^{{}}]*+\}}")
# Ordered from the strongest to the weakest evidence. The last match of the first matching pattern
# counts.
_CHOICE_PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        # "answer", "choice" or "option"; a set of first characters makes the search twice as fast
        r"(?:[AaCcOo](?i:(?<=a)nswer|(?<=c)hoice|(?<=o)ption)"
        r"\**+\s*+(?i:is|:|>|(?:must|should|would)\s++be)\s*+:?\**+\s*+"
        r"(?i:(?:option|choice)\s++)?|答案\s*+[是为：:]\s*+)"
        rf"{_LETTER}",
        rf"^\s*+{_LETTER}[\s.):*$}}\\`]*+(?:</\w{{1,12}}>\s*+)?$",
        rf"\A\s*+{_OPEN}([A-Z])[.):][^\n]*+\Z",
        rf"{_LETTER}\**+\)?\**+\s++is\s++(?:the\s++)?(?:correct|right)\s++(?:answer|choice|option)\b",
        r"\(([A-Z])\)|\[([A-Z])\]",
        r"\b([A-Z])[.)\s*]*+$",
    )
)
_AND = (
    r"(?:\s*+(?:(?:,\s*+)?\b(?:or|and|nor)\b|[,;/&或和、])"
    r"(?:\s++(?:maybe|perhaps|possibly|even|also))?\s*+|\s++)"
)
_MORE = re.compile(
    rf"[}}*$)\]'\"”’`]*+(?:\\\))?{_AND}(?:(?:option|choice)\s++)?{_LETTER}"
    r"(?!\s*+(?!or\b|and\b)[a-z])"
)
_REJECTED = re.compile(
    r"[\s}*$)\]'\"”’`]*+(?:is|are|was|seems|looks|cannot|can['’]?t|isn['’]?t)?\s*+"
    r"(?:not\b|wrong|incorrect|false|n['’]t\b|be\s++(?:right|correct)|cannot|isn['’]t)",
    re.IGNORECASE,
)
_NOT = r"(?i:\b(?:not|neither|nor|except|isn['’]?t|eliminates?|both|either)\s++(?:option\s++)?)"
_BEFORE = re.compile(rf"(?:{_NOT}|(?<!\w){_LETTER}{_AND})\(?\Z")
_NOT_A_BOX = re.compile(rf"{_NOT}[$\\(\s]*+\Z")


def chosen_letter(text: str) -> str | None:
    r"""The letter that a multiple-choice response chooses, in upper case, or None.

    Tried in this order: `\boxed{C}`; "answer is (C)", "answer must be C", "Answer: [C]"; a line
    that is only a letter; a response that is "C) 12"; "C is the correct answer"; the last "(C)"; a
    letter at the very end. The last match counts. Two letters, as in "(A) or (B)", are no choice,
    nor is a letter that is said to be wrong.
    """
    boxes = list(_BOXED.finditer(text))
    if boxes:
        end = boxes[-1].end()
        boxed = _IN_BOX.match(text, end)
        if boxed:
            before = text[max(boxes[-1].start() - 40, 0) : boxes[-1].start()]
            denied = _NOT_A_BOX.search(before) or _REJECTED.match(text, boxed.end())
            return None if denied else _letter(boxed)
        if _TWO.match(text, end):
            return None
    for pattern in _CHOICE_PATTERNS:
        if matches := list(pattern.finditer(text)):
            last = matches[-1]
            at = max(last.end(group) for group in range(1, pattern.groups + 1))
            before = text[max(at - 40, 0) : at].rstrip()[:-1]
            if _MORE.match(text, at) or _REJECTED.match(text, at) or _BEFORE.search(before):
                return None
            return _letter(last)
    return None


_TWO = re.compile(
    rf"\s*+{_LETTER}[\s}}]*+(?:{_AND}|\\text\s*+\{{\s*+(?:and|or)\s*+\}}\s*+)?{_LETTER}[\s}}]"
)


def _letter(match: re.Match[str]) -> str:
    return next(letter for letter in match.groups() if letter).upper()


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
        return float(chosen_letter(self.graded(completion, example)) == letter)


class FormatReward(RowReward):
    """1 if the completion matches the pattern, else 0. Needs no reference answer.

    A pattern that names a marker of reasoning, such as `</think>`, sees the whole completion; any
    other pattern sees what follows the reasoning.

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
        if self._full and example.truncated:
            return 0.0
        text = self.graded_by(self._pattern, completion, example).strip()
        found = self._pattern.fullmatch(text) if self._full else self._pattern.search(text)
        return float(found is not None)
