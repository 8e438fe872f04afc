"""Reads numbers, and evaluates calculations."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from .context import (
    COMPARISON,
    REFUSED_AFTER,
    REFUSED_BEFORE,
    TERM,
    UNITS_AFTER,
    WORDS_BEFORE,
    has_prime,
)
from .values import Number

MAX_DIGITS = 400  # of a number, and of its exponent's size

_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})++(?![\d,])|\d++)(?:\.\d++)?|\.\d++"
NUMBER = re.compile(
    r"(?<![\w.^])(?<!\d,)(?P<sign>[-+]?)(?:US|C|A)?(?P<currency>[$€£¥₹]?) ?(?P<minus>-?)"
    rf"(?:(?P<power>10\s?\^\s?\{{?(?P<exponent1>[-+]?\d++)\}}?)|(?P<number>{_UNSIGNED})"
    rf"(?:\s?/\s?(?P<divisor>\d++(?![.,]?\d))"
    r"|\s?[x×*]\s?10\s?\^\s?\{?(?P<exponent>[-+]?\d++)\}?)?)"
    r"(?P<percent>\s?(?:%|percent\b|per cent\b))?(?P<half>\s?(?:[aApP]\.?[mM]\b\.?))?"
)


def number_of(match: re.Match[str]) -> Number | None:
    """The number of a match of `NUMBER`; None if it is too long, or is a calculation."""
    digits = (match["number"] or "1").replace(",", "")
    exponent = match["exponent"] or match["exponent1"]
    divisor = match["divisor"]
    if max(len(digits), len(divisor or "")) > MAX_DIGITS or (match["sign"] and match["minus"]):
        return None
    value = Fraction(digits)
    if exponent:
        # scientific notation has one digit before the point; "15 x 10^3" is a product
        if abs(int(exponent[:9])) > MAX_DIGITS or (match["exponent"] and not 1 <= value < 10):
            return None
        value *= Fraction(10) ** int(exponent)
    if divisor:
        if not int(divisor):
            return None
        value /= int(divisor)
    if match["sign"] == "-" or match["minus"]:
        value = -value
    reduced = divisor is not None and str(abs(value)) == f"{digits}/{divisor}"
    return Number(
        value,
        percent=bool(match["percent"]),
        quotient=divisor is not None and not reduced,
        fraction=reduced,
        half_day=re.sub(r"[\s.]", "", match["half"] or "").lower(),
    )


def number_in(text: str) -> Number | None:
    """The number of a text that holds one number and words that leave it as it is, or None."""
    matches = list(NUMBER.finditer(text))
    if len(matches) != 1 or COMPARISON.search(text):
        return None
    [match] = matches
    before, after = text[: match.start()], text[match.end() :]
    if not WORDS_BEFORE.fullmatch(before) or not UNITS_AFTER.fullmatch(after):
        return None
    if REFUSED_BEFORE.search(before) or REFUSED_AFTER.search(after) or has_prime(before, after):
        return None
    if match["sign"] and TERM.search(before):
        return None
    return number_of(match)


# --- number words ---------------------------------------------------------------------------------

_UNITS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_NUMBER_WORD = re.compile(
    rf"(?P<tens>{'|'.join(_TENS)})(?:[\s-]+(?P<digit>{'|'.join(_UNITS[1:10])}))?"
    rf"|(?P<unit>{'|'.join(reversed(_UNITS))})",
    re.IGNORECASE,
)


def spelled_number(text: str) -> Number | None:
    """The number below 100 that all of a text spells, as in "forty-two"; None for other texts."""
    match = _NUMBER_WORD.fullmatch(text.strip())
    if match is None:
        return None
    tens, digit, unit = (word.lower() if word else "" for word in match.groups())
    if unit:
        return Number(Fraction(_UNITS.index(unit)))
    return Number(Fraction(10 * (_TENS.index(tens) + 2) + (_UNITS.index(digit) if digit else 0)))


# --- calculations ---------------------------------------------------------------------------------

_ARITHMETIC = re.compile(r"[\d\s.,+\-*/x×÷()$€£%:]+")
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluated(text: str) -> Fraction | None:
    """The value of a calculation with + - * / and parentheses, or None.

    Words and units beside its numbers are ignored.
    """
    text = re.sub(r"[^\W\d_]{2,}|°", " ", text)
    if not _ARITHMETIC.fullmatch(text) or len(text) > 120:
        return None
    text = text.translate({ord("×"): "*", ord("x"): "*", ord("÷"): "/"})
    text = re.sub(r"[,$€£]", "", text)
    text = re.sub(r"(?<![\d.])0+(?=\d)", "", text)
    text = re.sub(r"(\d+(?:\.\d+)?)\s*%", r"(\1/100)", text)
    try:
        return _value_of(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value_of(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value_of(operand)
        case ast.BinOp(
            left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as op, right=right
        ):
            return _OPERATORS[type(op)](_value_of(left), _value_of(right))
    raise ValueError


def agree(known: Fraction, number: Number, text: str) -> bool:
    """Whether a number is a calculation's result to the decimals of `text`."""
    decimals = re.search(r"\.(\d+)", text)
    unit = Fraction(1, 10 ** (len(decimals[1]) if decimals else 0))
    values = [number.value, number.value / 100] if number.percent else [number.value]
    return any(known == v or (known.denominator > 1 and abs(known - v) < unit) for v in values)
