"""Parses the text of one answer into its value: a number, words, a formula, a list, an equation."""

from __future__ import annotations

import re
from fractions import Fraction

from .context import COMPARISON, is_denied
from .notation import latex_text, plain_text
from .numbers import agree, evaluated, number_in, spelled_number
from .values import Answer, Expression, Items, Number, Text, Value

MAX_CLAIM = 400  # characters of an answer; a longer text is prose
MAX_SIDES = 8  # of an equation
MAX_ITEMS = 32  # of a list

# --- wrappers -------------------------------------------------------------------------------------

_WRAPPERS = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\$\$(.+)\$\$",
        r"\$([^$]+)\$",
        r"\\\((.+)\\\)",
        r"\\\[(.+)\\\]",
        r"\*\*(.+)\*\*",
        r"\*([^*]+)\*",
        r"__(.+)__",
        r"```\w*\n?([^`]+)```",
        r"`+([^`]+)`+",
        r"\"([^\"]+)\"",
        r"'([^']+)'",
        r"[“‘«「]([^”’»」]+)[”’»」]",
        r"[【〖]([^】〗]+)[】〗]",
        r"\(([^()\[\],;]+)\)",
        r"\[([^()\[\],;]+)\]",
        r"\{([^{},;]+)\}",
        r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|bf|rm|displaystyle)\s*\{((?:[^{}]|\{[^{}]*\})*)\}",
        r"<(?:answer|b|strong|i|em|code)>(.+)</(?:answer|b|strong|i|em|code)>",
        r"\\(?:boxed|fbox)\s*\{([^{}]*)\}",
    )
)
_LABEL = re.compile(
    r"(?:final\s+)?answer\s*[:：=]\s*|答案\s*[:：]\s*|(?:the\s+)?(?:final\s+)?answer\s+is\s*:?\s+",
    re.IGNORECASE,
)


def unwrapped(text: str) -> str:
    """A text without quotes, emphasis, dollars, tags and the like around all of it."""
    for _ in range(8):
        before = text
        text = text.strip().rstrip(".,;:。，").strip()
        if text.endswith(("\\", "\\,")):
            text += " "
        if label := _LABEL.match(text):
            text = text[label.end() :]
        for wrapper in _WRAPPERS if not text[:1].isalnum() else ():
            if inner := wrapper.fullmatch(text):
                text = inner[1]
        text = text.removeprefix("\\displaystyle")
        if text == before:
            break
    return text


# --- one answer -----------------------------------------------------------------------------------


def parse_answer(text: str) -> Answer | None:
    """The answer that all of a text is, or None."""
    if len(text) > 2 * MAX_CLAIM:
        return None
    text = unwrapped(text)
    text = re.sub(r"\A[A-Za-z]\s*(?:\\in(?![a-z])|∈)\s*", "", text)  # "x \in [1, 2]" names a set
    if not text or len(text) > MAX_CLAIM:
        return None
    plain = plain_text(text).strip()
    bare = unwrapped(plain)
    squeezed = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", bare)  # "4 2" is not 42
    if value := _atom(bare, text) or _items(text):
        return Answer((value,), squeezed)
    sides = _sides(plain, text)
    if sides is not None:
        return Answer(sides, squeezed) if sides else None
    latex = latex_text(text)
    if re.search(r"\d\s*_", latex):  # a number in another base
        squeezed = re.sub(r"[{}]", "", squeezed)
        return Answer((Text((squeezed,)),), squeezed)
    return Answer((Expression(latex),), squeezed) if _is_expression(latex) else None


def _atom(plain: str, text: str) -> Number | Text | None:
    """A number, a date, a time, a ratio or words. `plain` is `text` without LaTeX."""
    return _time_or_date(plain) or number_in(plain) or spelled_number(plain) or _words(plain, text)


_MONTH = (
    r"jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
    r"|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?"
)
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_DATE = re.compile(
    rf"(?:[a-z]{{3,6}}day,?\s)?(?:(?:{_MONTH})\.?\s{_DAY}|(?:the\s)?{_DAY}\s(?:of\s)?(?:{_MONTH})\.?)"
    rf"(?:,?\s\d{{4}})?|(?:{_MONTH})\.?,?\s\d{{4}}|\d{{1,4}}([-/.])\d{{1,2}}\1\d{{1,4}}",
    re.IGNORECASE,
)
_CLOCK = re.compile(
    r"(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2}))?\s*(?P<half>[ap]\.?m\.?)?(?:o'clock)?",
    re.IGNORECASE,
)
_RATIO = re.compile(r"\d+(?:\s?:\s?\d+)+")
_PHRASE = re.compile(r"[^\W\d_]+(?:[\s'’.,-]+[^\W\d_]+)*")


def _time_or_date(plain: str) -> Number | Text | None:
    if clock := _CLOCK.fullmatch(plain):
        half = re.sub(r"\W", "", clock["half"] or "").lower()
        if clock["minute"] == "00" and half:
            return Number(Fraction(int(clock["hour"])), half_day=half)
        digits = (clock["hour"].lstrip("0") or "0", clock["minute"], clock["second"])
        return Text((":".join(filter(None, digits)), half))
    if _DATE.fullmatch(plain):
        parts = re.findall(r"\d+|[^\W\d_]+", plain.lower())
        fillers = ("the", "of", "on", "st", "nd", "rd", "th")
        return Text(tuple(sorted(part for part in parts if part not in fillers)))
    return Text((re.sub(r"\s", "", plain),)) if _RATIO.fullmatch(plain) else None


def _words(plain: str, text: str) -> Text | None:
    r"""A text that is nothing but words; a few short ones, such as "xy", need a `\text`."""
    if not _PHRASE.fullmatch(plain):
        return None
    words = re.findall(r"[^\W\d_]+", plain)
    is_text = (
        re.search(r"\\(?:text|mathrm|textbf|mbox)\b", text) is not None
        or max(map(len, words)) >= 4
        or plain.lower() in ("yes", "no")
        or not plain.isascii()
    )
    return Text(tuple(word.casefold() for word in words)) if is_text else None


# --- equations ------------------------------------------------------------------------------------

_EQUALS = re.compile(r"=|≈|\\approx\b")
_CALCULATION = re.compile(r"[-($\s]*\d.*", re.DOTALL)


def _sides(plain: str, text: str) -> tuple[Value, ...] | None:
    """The sides of an equation that gives a value; () if it gives none, None if it is no equation.

    Names, as in "x = 5", are left out; calculations are checked.
    """
    parts = _split(plain, _EQUALS)
    if not 2 <= len(parts) <= MAX_SIDES or COMPARISON.search(plain):
        return None
    last = parse_answer(parts[-1]) if parts[-1].strip() else None
    if last is None or (isinstance(last.value, Text) and not all(map(is_name, parts[:-1]))):
        return ()
    originals = _split(text, _EQUALS)
    if len(originals) != len(parts):
        originals = parts
    sides: list[Value] = []
    for part, original in zip(parts[:-1], originals, strict=False):
        if is_denied(_CALCULATION.sub("", part)):
            return ()
        if is_name(part):
            continue
        number = number_in(part.strip())
        known = number.value if number else evaluated(part)
        if isinstance(last.value, Number) and known is not None:
            if not agree(known, last.value, parts[-1]):
                return ()
            continue
        latex = latex_text(original.strip(" $"))
        if not _is_expression(latex):
            return ()
        if isinstance(last.value, Expression) and not sides and _has_variable(latex):
            return None  # an equation, such as that of a circle
        sides.append(Expression(latex))
    return (*sides, *last.sides)


_NAME = re.compile(
    r"\\?[A-Za-z]+'?(?:_\{?\w+\}?)?(?:\((?:\w|,\s?)+\))?"  # x, \alpha', x_1, f(x, y)
    r"|[^\W\d_]+(?:[\s,:'’-]+[^\W\d_]+)*"  # Total cost
    r"|\\angle\s?\w+|\|?\w+\|?\(.*\)"
)


def is_name(text: str) -> bool:
    r"""Whether a side of an equation names what the other side gives: "x", "f(x)", "Total"."""
    text = plain_text(text).strip(" $*\t\n")
    stem = text.partition("(")[0].partition("_")[0]
    return _NAME.fullmatch(text) is not None and not re.search(r"\d", stem)


def _has_variable(latex: str) -> bool:
    return re.search(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])", latex) is not None


# --- expressions ----------------------------------------------------------------------------------

_MARKUP = re.compile(
    r"\\(?:begin|end|text|mathrm|mathbf|mbox|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+"
)
_FUNCTION = re.compile(
    r"sqrt|(?:sin|cos|tan)h|arc(?:sin|cos|tan)|infty|infinity|log|exp|max|min|gcd|lcm|sin|cos|tan|cot"
    r"|sec|csc|deg|det|lim",
    re.IGNORECASE,
)
_SMALL_WORD = re.compile(
    r"is|are|the|not|no|or|and|of|to|it|do|be|we|so|if|for|as|by|at|he|you|but|was|has",
    re.IGNORECASE,
)


def _is_expression(latex: str) -> bool:
    """Whether LaTeX is a formula, not a sentence."""
    bare = _MARKUP.sub(" ", latex)
    if re.search(r"[?!:;]\s|[?]|[^\x00-\x7f]", bare) or not re.search(r"\w", latex):
        return False
    words = re.findall(r"[A-Za-z]{2,}", bare)
    return not any(
        _SMALL_WORD.fullmatch(word) or (len(word) > 3 and not _FUNCTION.fullmatch(word))
        for word in words
    )


# --- lists ----------------------------------------------------------------------------------------

# a comma of "1,000" separates nothing
_SEPARATOR = re.compile(
    r"[,;，；、](?!\d{3}(?!\d)(?<=\d,\d{3}))|(?:\\text\{)?\s*\b(?:or|and)\b\s*\}?"
)

_CLAUSE = re.compile(r"\s*(?:so|thus|hence|therefore|because|since|which)\b", re.IGNORECASE)


def _items(text: str) -> Items | None:
    r"""The items of "1, 2", "(1, 2)", "\{1, 2\}" or "1 or 2"; None for any other text."""
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])", "", text).strip()
    brackets, inner = "", text
    opening = re.match(r"\\\{|[(\[{]", text)
    closing = re.search(r"(?:\\\}|[)\]}])\Z", text)
    if opening and closing:
        inside = text[opening.end() : closing.start()]
        if _depth(inside) == 0:
            brackets, inner = (opening[0] + closing[0]).replace("\\", ""), inside
    parts = [part for part in _split(inner, _SEPARATOR) if part.strip(" $")]
    if not 2 <= len(parts) <= MAX_ITEMS:
        return None
    is_sentence = len(re.findall(r"(?<!\\)\b[^\W\d_]{2,}", inner)) > 2 * len(parts)
    if not brackets and (is_sentence or any(map(_CLAUSE.match, parts[1:]))):
        return None
    items: list[Answer] = []
    for part in parts:
        item = parse_answer(part)
        if item is None:
            return None
        items.append(item)
    texts = [isinstance(item.value, Text) for item in items]
    if not brackets and any(texts) and not all(texts):
        return None
    return Items(brackets, tuple(items), latex_text(text))


def _depth(text: str) -> int:
    """The depth of brackets at the end of a text; -1 if it closes one that it does not open."""
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return -1
    return depth


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split a text at the separators that are in no brackets."""
    parts, start = [], 0
    for mark in separator.finditer(text):
        if _depth(text[start : mark.start()]) == 0:
            parts.append(text[start : mark.start()])
            start = mark.end()
    return [*parts, text[start:]]
