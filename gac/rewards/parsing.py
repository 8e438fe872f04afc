"""Parses an answer into values: numbers with their units, words, formulas, lists and equations."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from .values import Answer, Expression, Items, Number, Text, Value

MAX_CLAIM = 400  # characters of an answer; a longer text is prose
MAX_DIGITS = 400  # of a number, and of its exponent's size
MAX_SIDES = 8  # of an equation


# --- numbers --------------------------------------------------------------------------------------

_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})++(?![\d,])|\d++)(?:\.\d++)?|\.\d++"
NUMBER = re.compile(
    r"(?<![\w.^])(?<!\d,)(?P<sign>[-+]?)(?:US|C|A)?(?P<currency>[$€£¥₹]?) ?(?P<minus>-?)"
    rf"(?:(?P<power>10\s?\^\s?\{{?(?P<exponent1>[-+]?\d++)\}}?)|(?P<number>{_UNSIGNED})"
    rf"(?:\s?/\s?(?P<divisor>\d++(?![.,]?\d))"
    r"|\s?[x×*]\s?10\s?\^\s?\{?(?P<exponent>[-+]?\d++)\}?)?)"
    r"(?P<percent>\s?(?:%|percent\b|per cent\b))?(?P<half>\s?(?:[aApP]\.?[mM]\b\.?))?"
)
COMPARISON = re.compile(
    r"[<>≤≥≠≮≯±∓?？]|\\(?:le|leq|leqslant|lt|ge|geq|geqslant|gt|ne|neq|not|pm|mp|in|approx|sim)\b|!=|[~≈]\s*\d"
    r"|[不非或未]|大于|小于|以上|以下|超过|至少|最多|[两一]倍|倍"
)
# Words of a refusal or a guess, wherever they stand before or after a number.
_DOUBT = (
    r"not|no|never|neither|nor|except|without|unless|cannot|impossible|invalid|wrong|incorrect"
    r"|unknown|[a-z]+n['’]t|cant|dont|isnt|instead|besides|excluding|false|hardly|forbidden|unsure"
    r"|(?:any|every|no)thing but|all but|too|or|either|maybe|perhaps|possibly|versus|vs"
)
# Words that make another number of the number next to them.
_CHANGES = (
    r"plus|minus|negative|times|divided by|multiplied by|added to|mod|modulo|sqrt|root|log|ln"
    r"|lg|exp|sin|cos|tan|cot|sec|csc|arc(?:sin|cos|tan)|pi|half|third|quarter|twice|thrice|double|triple"
    r"|square|cube|reciprocal|inverse|factorial|power|choose|hundred|thousand|[a-z]{1,5}illion"
)
# Words that a number begins a calculation with.
_CONTINUES = (
    r"plus|minus|times|divided by|multiplied by|added to|mod|modulo|sqrt|root|log|ln|sin|cos|tan|pi"
    r"|power|choose|hundred|thousand|[a-z]{1,5}illion"
)
_COMPARED = (
    r"at (?:least|most)|than|over|under|above|below|between|within|beyond|exceed(?:s|ing)?|up to"
    r"|but|approaching|outside|to"
)
BEFORE_NO = re.compile(
    rf"\b(?:{_DOUBT})\b|\b(?:{_CHANGES}|{_COMPARED})[\s({{]+(?:(?:of|about|the|around)\s+)*\Z",
    re.IGNORECASE,
)
AFTER_NO = re.compile(
    rf"\b(?:{_DOUBT}|if)\b|\A\W*and\b"
    r"|\A\W*(?:squared|cubed|factorial|below zero|under zero|over|degrees below"
    rf"|(?!times\s*(?:\Z|[.,;)]|(?:an?|per|each|every|in|this)\b))(?:{_CONTINUES})\b)",
    re.IGNORECASE,
)
# A word, but no product of variables: "5 xy"
_SHORT = (
    r"[kcmnd]?m|[km]?g|m?l|ft|lbs?|oz|hrs?|yds?|in|mi|qts?|pts?|[kmgt]b|rs|k?[wh]h?|[hk]?pa|mph|kph|rpm|gcd|lcm"
    r"|is|it|of|on|at|by|an|as|he|we|us|so|to|up|me|my|my|why|try|buy|per|s"
)
_WORD = (
    rf"(?:(?i:(?:{_SHORT})\b)|(?=[^\W\d_]{{0,20}}[aeiouAEIOU])(?![A-Za-z]{{1,2}}\b)[^\W\d_]++"
    r"|[^\W\d_]{4,}+|[aAI]\b(?=\s+[^\W\d_]{2})|[\u0400-\u04ff]{3,}+|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]++)"
)
_BEFORE = re.compile(rf"(?:[\s:,*#'\"‘’“”_()\[\]$]|{_WORD}(?:['’-][^\W\d_]+)*\.?)*+")
AFTER = re.compile(
    r"(?:(?:st|nd|rd|th|[ckmnμµ]?m|[kmμµ]?g|m[lL]|[KMGT]B|[km]ph|hrs?|mins?|secs?|USD|EUR|GBP)\b"
    r"|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+|¢|(?![A-Za-z]))"
    r"(?:\s?°\s?[CF]?\b)?(?:\s[ghlmsLVWNJKCF](?![\w'’(^*+]|\s*[-+*/=]))?"
    r"(?:(?<=[a-z])\^\{?-?\d\}?|(?<=[a-z])\^?[²³]|[\s.,:;'\"‘’“”_()\[\]°€£¥¢$。，]|\*+\Z"
    rf"|(?<=[A-Za-z\s])/\s?(?:{_WORD}|[hs]\b)|-(?=[^\W\d_]{{2}})|{_WORD}(?:['’-][^\W\d_]+)*)*+"
)
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
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?\s*([ap]\.?m\.?)?(?:o'clock)?", re.IGNORECASE)

# How numbers are written, rewritten in this order. All patterns are linear.
_NUMBERS: tuple[tuple[str, Any], ...] = (
    ("\N{MINUS SIGN}|(?<![\\w)])(?<![\\w)] )\N{EN DASH}(?=[\\d.$])", "-"),
    (r"\{,\}|,\\!(?=\d{3})", ","),
    (r"(?<!\d )\b(?i:minus|negative)\s++(?=[\d.$])", "-"),
    (r"(?<![\w.)}\]])\.(?=\d)", "0."),
    *zip("²³½¼¾⅓⅔", ("^2", "^3", " 1/2", " 1/4", " 3/4", " 1/3", " 2/3"), strict=True),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (
        r"(\d{0,9})\.(\d{0,9})\\overline\{(\d{1,9})\}",
        lambda m: (
            f"{int(m[1] + m[2] + m[3]) - int('0' + m[1] + m[2])}"
            f"/{10 ** len(m[2] + m[3]) - 10 ** len(m[2])}"
        ),
    ),
    (r"(?<=\d)[ \xa0]*\\frac\{(\d{1,9})\}\{(\d{1,9})\}", r" \1/\2"),
    (  # "3 1/2" is one number
        r"(?<![\w.,/^])(\d{1,9})[ \xa0]++(\d{1,9})/([1-9]\d{0,8})(?!\d|[.,]\d)",
        lambda m: str(int(m[1]) + Fraction(int(m[2]), int(m[3]))),
    ),
    (  # "10 000" is one number
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
# LaTeX of numbers and units, as plain text.
_MARKUP: tuple[tuple[str, Any], ...] = (
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
# Plain text as LaTeX, for math-verify.
_SYMBOLS: tuple[tuple[str, Any], ...] = (
    (r"\\?\$", ""),
    (r"√(\d++|[a-z])", r"\\sqrt{\1}"),
    (r"√\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![\\A-Za-z])(?:pi(?![A-Za-z])|π)|π", r"\\pi "),
    (r"\*\*", "^"),
    (r"[*×·]", r"\\cdot "),
    *zip("≤≥≠∞∪∩", (r"\\le ", r"\\ge ", r"\\ne ", r"\\infty ", r"\\cup ", r"\\cap "), strict=True),
)
_TO_PLAIN, _TO_LATEX = (
    tuple((re.compile(pattern), replacement) for pattern, replacement in rules)
    for rules in (_NUMBERS + _MARKUP, _NUMBERS + _SYMBOLS)
)


def _latex(text: str) -> str:
    """An answer as LaTeX that math-verify reads."""
    for pattern, replacement in _TO_LATEX:
        text = pattern.sub(replacement, text)
    return text


def plain_text(text: str) -> str:
    """A text with its LaTeX for numbers and units rewritten as plain text."""
    for pattern, replacement in _TO_PLAIN:
        text = pattern.sub(replacement, text)
    return text


def number_of(match: re.Match[str]) -> Number | None:
    """The number of a match of `NUMBER`."""
    digits = (match["number"] or "1").replace(",", "")
    exponent = match["exponent"] or match["exponent1"] or "0"
    divisor = match["divisor"] or "1"
    if max(map(len, (digits, divisor))) > MAX_DIGITS or abs(int(exponent[:9])) > MAX_DIGITS:
        return None
    if not int(divisor):
        return None
    value = Fraction(digits)
    # scientific notation has one digit before the point; "15 x 10^3" is a product
    if match["exponent"] and not 1 <= value < 10:
        return None
    value = value * Fraction(10) ** int(exponent) / int(divisor)
    if match["sign"] and match["minus"]:
        return None
    if match["sign"] == "-" or match["minus"]:
        value = -value
    reduced = bool(match["divisor"]) and str(abs(value)) == f"{digits}/{divisor}"
    half = re.sub(r"[\s.]", "", match["half"] or "").lower()
    percent = bool(match["percent"])
    return Number(value, percent, bool(match["divisor"]) and not reduced, reduced, half)


TERM = re.compile(r"(?:[\d)}]|(?<![^\W\d_])[^\W\d_])\s*\Z")  # what a sign adds a number to


def _number_in(text: str) -> Number | None:
    """The number of a text that holds one number and words that leave it as it is, or None."""
    matches = list(NUMBER.finditer(text))
    if len(matches) != 1 or COMPARISON.search(text):
        return None
    [match] = matches
    before, after = text[: match.start()], text[match.end() :]
    if not _BEFORE.fullmatch(before) or not AFTER.fullmatch(after):
        return None
    if BEFORE_NO.search(before) or AFTER_NO.search(after):
        return None
    if match["sign"] and TERM.search(before):
        return None
    return number_of(match)


# --- one answer -----------------------------------------------------------------------------------

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
        text = _LABEL.sub("", text, count=1) if _LABEL.match(text) else text
        for wrapper in _WRAPPERS:
            if inner := wrapper.fullmatch(text):
                text = inner[1]
        text = text.removeprefix("\\displaystyle")
        if text == before:
            break
    return text


def parse_answer(text: str) -> Answer | None:
    """The answer that all of a text is, or None."""
    if len(text) > 2 * MAX_CLAIM:
        return None
    text = unwrapped(text)
    text = re.sub(r"\A[A-Za-z]\s*(?:\\in(?![a-z])|∈)\s*", "", text)  # "x \in [1, 2]" names a set
    if not text or len(text) > MAX_CLAIM:
        return None
    plain = plain_text(text).strip()
    latex = _latex(text)
    squeezed = re.sub(r"\s+", "", unwrapped(plain))
    value = _atom(plain, text, latex)
    if value is not None:
        return Answer((value,), squeezed, latex)
    if items := _items(text):
        return Answer((items,), squeezed, latex)
    sides = _sides(plain, text)
    if sides is not None:
        return Answer(sides, squeezed, latex) if sides else None
    if re.search(r"\d\s*_", latex):  # a number in another base
        squeezed = re.sub(r"[{}]", "", squeezed)
        return Answer((Text((squeezed,)),), squeezed, latex)
    if _is_expression(latex):
        return Answer((Expression(latex),), squeezed, latex)
    return None


def _atom(plain: str, text: str, latex: str) -> Value | None:
    """A number or a text, or None."""
    plain = unwrapped(plain)
    if clock := _CLOCK.fullmatch(plain):
        half = re.sub(r"\W", "", clock[4] or "").lower()
        if clock[2] == "00" and half:
            return Number(Fraction(int(clock[1])), half_day=half)
        return Text(
            (":".join((clock[1].lstrip("0") or "0", *filter(None, clock.groups()[1:3]))), half)
        )
    if _DATE.fullmatch(plain):
        words = re.findall(r"\d+|[^\W\d_]+", plain.lower())
        return Text(
            tuple(sorted(w for w in words if w not in ("the", "of", "on", "st", "nd", "rd", "th")))
        )
    if re.fullmatch(r"\d+(?:\s?:\s?\d+)+", plain):
        return Text((re.sub(r"\s", "", plain),))
    number = _number_in(plain)
    if number is not None:
        return number
    words = re.findall(r"[^\W\d_]+", plain)
    in_text = re.search(r"\\(?:text|mathrm|textbf|mbox)\b", text) is not None
    only_words = re.fullmatch(r"[^\W\d_]+(?:[\s'’.,-]+[^\W\d_]+)*", plain) is not None
    if only_words and (
        in_text
        or max(map(len, words)) >= 4
        or plain.lower() in ("yes", "no")
        or not plain.isascii()
    ):
        return Text(tuple(word.casefold() for word in words))
    return None


_ARITHMETIC = re.compile(r"[\d\s.,+\-*/x×÷()$€£%:]+")


def _sides(plain: str, text: str) -> tuple[Value, ...] | None:
    """The sides of an equation that gives a value; () if it gives none, None if it is no chain.

    Names, as in "x = 5", are left out; calculations are checked.
    """
    parts = _split(plain, _EQUALS)
    if len(parts) < 2 or len(parts) > MAX_SIDES or COMPARISON.search(plain):
        return None
    last = parse_answer(parts[-1]) if parts[-1].strip() else None
    if last is None or (isinstance(last.value, Text) and not all(map(is_name, parts[:-1]))):
        return ()
    originals = _split(text, _EQUALS)
    if len(originals) != len(parts):
        originals = parts
    sides: list[Value] = []
    for i, part in enumerate(parts[:-1]):
        if is_name(part):
            continue
        number = _number_in(part.strip())
        if isinstance(last.value, Number):
            bare = re.sub(r"[^\W\d_]{2,}|°", " ", part)
            known = number.value if number else evaluated(bare)
            if known is not None:
                if not agree(known, last.value, parts[-1]):
                    return ()
                continue
        latex = _latex(originals[i].strip(" $"))
        if not _is_expression(latex):
            return ()
        if isinstance(last.value, Expression) and not sides and _has_name(latex):
            return None  # an equation, such as that of a circle
        sides.append(Expression(latex))
    return (*sides, *last.sides)


def is_name(text: str) -> bool:
    r"""Whether a side of an equation names what the other side gives: "x", "f(x)", "Total"."""
    text = plain_text(text).strip(" $*\t\n")
    name = r"\\?[A-Za-z]+'?(?:_\{?\w+\}?)?(?:\((?:\w|,\s?)+\))?"
    return re.fullmatch(
        rf"{name}|[^\W\d_]+(?:[\s,:'’-]+[^\W\d_]+)*|\\angle\s?\w+|\|?\w+\|?\(.*\)", text
    ) is not None and not re.search(r"\d", text.partition("(")[0].partition("_")[0])


def _has_name(latex: str) -> bool:
    """Whether LaTeX contains a variable."""
    return re.search(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])", latex) is not None


def agree(known: Fraction, number: Number, text: str) -> bool:
    """Whether a number is the result of a calculation, rounded to the digits that it shows."""
    decimals = re.search(r"\.(\d+)", text)
    unit = Fraction(1, 10 ** (len(decimals[1]) if decimals else 0))
    values = [number.value, number.value / 100] if number.percent else [number.value]
    return any(known == v or (known.denominator > 1 and abs(known - v) < unit) for v in values)


def evaluated(text: str) -> Fraction | None:
    """The value of a calculation with + - * / and parentheses, or None."""
    if not _ARITHMETIC.fullmatch(text) or len(text) > 120:
        return None
    text = re.sub(
        r"[,$€£]|(?<![\d.])0+(?=\d)", "", text.translate({0xD7: "*", ord("x"): "*", 0xF7: "/"})
    )
    text = re.sub(r"(\d+(?:\.\d+)?)\s*%", r"(\1/100)", text)
    try:
        return _of_tree(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _of_tree(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_of_tree(operand)
        case ast.BinOp(
            left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as op, right=right
        ):
            return _OPERATORS[type(op)](_of_tree(left), _of_tree(right))
    raise ValueError


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


# --- expressions and lists ------------------------------------------------------------------------

_FUNCTIONS = {
    *(
        "sqrt",
        "sinh",
        "cosh",
        "tanh",
        "arcsin",
        "arccos",
        "arctan",
        "infty",
        "infinity",
        "log",
        "exp",
    ),
    *("max", "min", "gcd", "lcm", "sin", "cos", "tan", "cot", "sec", "csc", "deg", "det", "lim"),
}
_SMALL_WORDS = {
    *[
        "is",
        "are",
        "the",
        "not",
        "no",
        "or",
        "and",
        "of",
        "to",
        "it",
        "do",
        "be",
        "we",
        "so",
        "if",
        "for",
        "as",
        "by",
        "at",
        "he",
        "you",
        "but",
        "was",
        "has",
    ]
}


def _is_expression(latex: str) -> bool:
    """Whether LaTeX is a formula, not a sentence."""
    bare = re.sub(
        r"\\(?:begin|end|text|mathrm|mathbf|mbox|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+", " ", latex
    )
    words = re.findall(r"[A-Za-z]{2,}", bare)
    sentence = any(
        word.lower() not in _FUNCTIONS and (len(word) > 3 or word.lower() in _SMALL_WORDS)
        for word in words
    )
    return (
        not sentence
        and not re.search(r"[?!:;]\s|[?]|[^\x00-\x7f]", bare)
        and bool(re.search(r"\w", latex))
    )


_CLOSING = {"(": ")]", "[": ")]", "{": "}", "\\{": "\\}"}


def _items(text: str) -> Items | None:
    r"""The items of "1, 2", "(1, 2)", "\{1, 2\}" or "1 or 2"; None for any other text."""
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])", "", text).strip()
    brackets, inner = "", text
    opened = re.match(r"\\\{|[(\[{]", text)
    closed = re.search(r"\\\}|[)\]}]\Z", text)
    if opened and closed and closed.end() == len(text):
        inside = text[opened.end() : closed.start()]
        if _depth(inside) == 0:
            brackets, inner = (opened[0] + closed[0]).replace("\\", ""), inside
    parts = [part for part in _split(inner, _SEPARATOR) if part.strip(" $")]
    if len(parts) < 2 or len(parts) > 4 * MAX_SIDES:
        return None
    if not brackets and len(re.findall(r"(?<!\\)\b[^\W\d_]{2,}", inner)) > 2 * len(parts):
        return None  # a sentence
    items = [parse_answer(part) for part in parts]
    texts = [item is not None and isinstance(item.value, Text) for item in items]
    if any(item is None for item in items) or (not brackets and any(texts) and not all(texts)):
        return None
    return Items(brackets, tuple(item for item in items if item), _latex(text))


def _depth(text: str) -> int:
    """The depth of brackets at the end of a text; -1 if it closes one that it does not open."""
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return -1
    return depth


_SEPARATOR = re.compile(
    r"[,;，；、](?!\d{3}(?!\d)(?<=\d,\d{3}))|(?:\\text\{)?\s*\b(?:or|and)\b\s*\}?"
)
_EQUALS = re.compile(r"=|≈|\\approx\b")


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split a text at the separators that are in no brackets."""
    parts, start = [], 0
    for mark in separator.finditer(text):
        if _depth(text[start : mark.start()]) == 0:
            parts.append(text[start : mark.start()])
            start = mark.end()
    return [*parts, text[start:]]
