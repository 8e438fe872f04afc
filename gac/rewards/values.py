"""What an answer can be, and when two answers are equal."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Number:
    """A number, whatever its unit."""

    value: Fraction
    percent: bool = False
    quotient: bool = False
    """Whether it was written as a division, "20/4", that a number as such would not be."""
    fraction: bool = False
    """Whether it was written as a fraction in lowest terms."""
    half_day: str = ""
    """"am" or "pm" of an hour."""


@dataclass(frozen=True)
class Text:
    """Words, a date, a time or a ratio, which are compared as text."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Expression:
    """LaTeX for math-verify."""

    latex: str


@dataclass(frozen=True)
class Items:
    """A list, set, tuple or interval."""

    brackets: str
    """"", or the two brackets."""
    items: tuple[Answer, ...]
    latex: str


Value = Number | Text | Expression | Items


@dataclass(frozen=True)
class Answer:
    """One answer: the sides of an equation, all of which must equal the reference."""

    sides: tuple[Value, ...]
    text: str
    """The answer as it was written, without wrapping and white space."""

    @property
    def value(self) -> Value:
        """The result: the last side."""
        return self.sides[-1]


def equal(reference: Answer, answer: Answer) -> bool | None:
    """Whether two answers are equal; None: math-verify has to compare `pairs`."""
    if reference.text == answer.text:
        return True
    verdicts = [_same(reference.value, side) for side in answer.sides]
    return False if False in verdicts else (None if None in verdicts else True)


def pairs(reference: Answer, answer: Answer) -> list[tuple[str, str]]:
    """The pairs of LaTeX, reference and answer, that math-verify has to find equal."""
    return [
        (_boxed_latex(reference.value), _boxed_latex(side))
        for side in answer.sides
        if _same(reference.value, side) is None
    ]


def _boxed_latex(value: Value) -> str:
    match value:
        case Number(number, percent):
            latex = f"{number / 100 if percent else number}"
        case Expression(latex) | Items(_, _, latex):
            pass
        case Text(words):  # never undecided
            latex = " ".join(words)
    return f"\\boxed{{{latex}}}"


def _same(reference: Value, answer: Value) -> bool | None:
    match reference, answer:
        case Number(), Number():
            return _same_number(reference, answer)
        case Text(ours), Text(theirs):
            return ours == theirs or _same_clock(ours, theirs)
        case Items(), Items():
            return _same_items(reference, answer)
        case Expression(latex), Items():
            return None if re.search(r"\\pm|\\cup|\\{", latex) else False
        case (Expression(), Number() | Expression()) | (Items(), Expression()):
            return None
    return False


def _same_number(reference: Number, answer: Number) -> bool:
    if answer.quotient and not (reference.quotient or reference.fraction):
        return False  # it repeats the question
    if reference.half_day and answer.half_day and reference.half_day != answer.half_day:
        return False
    ours, theirs = reference.value, answer.value
    if reference.percent == answer.percent:
        return _close(ours, theirs)
    if reference.percent:
        return _close(ours, theirs) or _close(ours / 100, theirs)
    return _close(ours, theirs) or _close(ours, theirs / 100)


def _close(a: Fraction, b: Fraction) -> bool:
    """Whether two numbers agree in 6 decimals, and small ones in 3 digits."""
    if a == b:
        return True
    return round(a, 6) == round(b, 6) and (
        abs(a) >= Fraction(1, 1000) or abs(a - b) <= abs(a) / 1000
    )


def _same_clock(ours: tuple[str, ...], theirs: tuple[str, ...]) -> bool:
    """Whether two times agree, of which one may leave out am or pm."""
    clocks = all(len(words) == 2 and ":" in words[0] for words in (ours, theirs))
    return clocks and ours[0] == theirs[0] and "" in (ours[1], theirs[1])


def _same_items(reference: Items, answer: Items) -> bool | None:
    if len(reference.items) != len(answer.items):
        return False
    kinds = {reference.brackets, answer.brackets}
    if len(kinds) == 2 and kinds not in ({"", "{}"}, {"", "()"}):
        return False
    rows = [[equal(a, b) for b in answer.items] for a in reference.items]
    if any(None in row for row in rows):
        return None
    if kinds <= {"", "{}"}:  # the order does not matter
        return all(map(any, rows)) and all(map(any, zip(*rows, strict=True)))
    return all(row[i] is True for i, row in enumerate(rows))
