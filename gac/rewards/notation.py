"""Rewrites how numbers, units and formulas are written, as plain text or as LaTeX."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

Rule = tuple[str, str | Callable[[re.Match[str]], str]]
"""A pattern, which takes linear time, and its replacement."""


def _repeating(match: re.Match[str]) -> str:
    r"""0.1\overline{6} as a fraction."""
    whole, fixed, repeated = match.groups()
    numerator = int(whole + fixed + repeated) - int("0" + whole + fixed)
    return f"{numerator}/{10 ** len(fixed + repeated) - 10 ** len(fixed)}"


def _scale(word: str, factor: int, unless_after: str = "") -> Rule:
    """The rule that multiplies a number by the word after it."""
    return (
        rf"(?<![\w.,/]){unless_after}(\d++(?:,\d{{3}})*+(?:\.\d++)?)\s*+(?i:{word})s?\b",
        lambda match: f"{Decimal(match[1].replace(',', '')) * factor:f}",
    )


_NUMBERS: tuple[Rule, ...] = (
    ("\N{MINUS SIGN}|(?<![\\w)])(?<![\\w)] )\N{EN DASH}(?=[\\d.$])", "-"),
    (r"\{,\}|,\\!(?=\d{3})", ","),
    (r"(?<!\d )\b(?i:minus|negative)\s++(?=[\d.$])", "-"),
    (r"(?<![\w.)}\]])\.(?=\d)", "0."),
    *zip("²³½¼¾⅓⅔", ("^2", "^3", " 1/2", " 1/4", " 3/4", " 1/3", " 2/3"), strict=True),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"(\d{0,9})\.(\d{0,9})\\overline\{(\d{1,9})\}", _repeating),
    (r"(?<=\d)[ \xa0]*\\frac\{(\d{1,9})\}\{(\d{1,9})\}", r" \1/\2"),
    (  # "3 1/2" is one number
        r"(?<![\w.,/^])(\d{1,9})[ \xa0]++(\d{1,9})/([1-9]\d{0,8})(?!\d|[.,]\d)",
        lambda match: str(int(match[1]) + Fraction(int(match[2]), int(match[3]))),
    ),
    (  # "10 000" is one number
        r"(?<![\w.,])\d{1,3}(?:(?:\\[,; ]|[~ \xa0\u2009\u202f])\d{3})+(?!\d)",
        lambda match: re.sub(r"\D", "", match[0]),
    ),
    (
        r"(?<![\w.,])\d{1,99}(?:\.\d{1,99})?[eE][+-]?\d{1,2}(?!\w)",
        lambda match: f"{Decimal(match[0]):f}",
    ),
    _scale("hundred", 100),  # before the others: "5 hundred thousand"
    _scale("thousand", 10**3),
    _scale("million", 10**6),
    _scale("billion", 10**9),
    _scale("trillion", 10**12),
    _scale("lakh", 10**5),
    _scale("crore", 10**7),
    # in "84 / 12 = 7 dozen" the dozen is a unit
    _scale("dozen", 12, unless_after="(?<!=)(?<!= )"),
)
# LaTeX of numbers and units, as plain text.
_MARKUP: tuple[Rule, ...] = (
    (r"\\(?:left|right|displaystyle|,|;|!|:|quad|qquad)(?![A-Za-z])|\\ |\xa0", " "),
    (r"\\([$%#&])", r"\1"),
    (r"\^\s?\{?\s?\\?(?:circ|degree)(?![A-Za-z])\s?\}?|\\degree(?![A-Za-z])", "°"),
    (r"\\(?:text|mathrm|mbox|bf|rm|(?:text|math)[a-z]{2})\s*\{([^{}]*)\}", r" \1 "),
    (r"(-?)\\frac\{\s*(-?\d{1,99})\s*\}\{\s*(\d{1,99})\s*\}", r"\1\2/\3"),
    (r"\\(?:times|cdot)(?![A-Za-z])|×|·", "*"),
    (r"\\div(?![A-Za-z])", "÷"),
    ("∴", " "),
    (r"\\approx(?![A-Za-z])|≈", "="),
    ("[\N{EN DASH}\N{EM DASH}]", "-"),
)
# Plain text of formulas, as LaTeX for math-verify.
_SYMBOLS: tuple[Rule, ...] = (
    (r"\\?\$", ""),
    (r"√(\d++|[a-z])", r"\\sqrt{\1}"),
    (r"√\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![\\A-Za-z])(?:pi(?![A-Za-z])|π)|π", r"\\pi "),
    (r"\*\*", "^"),
    (r"[*×·]", r"\\cdot "),
    *zip("≤≥≠∞∪∩", (r"\\le ", r"\\ge ", r"\\ne ", r"\\infty ", r"\\cup ", r"\\cap "), strict=True),
)
_TO_PLAIN, _TO_LATEX = (
    [(re.compile(pattern), replacement) for pattern, replacement in rules]
    for rules in (_NUMBERS + _MARKUP, _NUMBERS + _SYMBOLS)
)


def plain_text(text: str) -> str:
    """A text with its LaTeX for numbers and units rewritten as plain text."""
    for pattern, replacement in _TO_PLAIN:
        text = pattern.sub(replacement, text)
    return text


def latex_text(text: str) -> str:
    """An answer rewritten as LaTeX that math-verify reads."""
    for pattern, replacement in _TO_LATEX:
        text = pattern.sub(replacement, text)
    return text
