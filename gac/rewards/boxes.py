r"""Finds the answer in the last `\boxed`, unless the text around it changes or denies it."""

from __future__ import annotations

import re

from .context import is_denied
from .numbers import agree, evaluated
from .parsing import MAX_CLAIM, parse_answer
from .values import Number, equal

MAX_BOXES = 8  # of a list of boxes
_BOX = re.compile(r"\\(?:boxed|fbox)\b\s*")
_BRACE = re.compile(r"(?<!\\)[{}]")
_JOIN = re.compile(
    r"[\s,;&/|]*(?:\\(?:lor|vee|land|wedge)|(?:or|and|maybe|perhaps|possibly|also)\b|[\s,])*"
    r"(?:[A-Za-z]\w?\s*=\s*)?",
    re.IGNORECASE,
)


def has_box(text: str) -> bool:
    r"""Whether a text contains `\boxed` or `\fbox`."""
    return "\\boxed" in text or "\\fbox" in text


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed`; None if it has no end or is not the answer.

    A box is not the answer if it is an operand ("\boxed{5} + 3"), is denied ("not \boxed{5}") or
    is one of several values ("\boxed{5} or 7"). Boxes that only "or", "and" or a comma separates
    are a list.
    """
    contents: list[str] = []
    start = len(text)
    after = 0
    for box in reversed(list(_BOX.finditer(text))):
        content, end = _braced(text, box.end())
        if content is None:
            break
        if end > start:  # a box around the last one
            start, after = box.start(), max(after, end)
            continue
        if contents and not _JOIN.fullmatch(_bare(text[end:start][:_WINDOW])):
            break
        if not contents:
            after = end
        contents.insert(0, content)
        start = box.start()
        if len(contents) > MAX_BOXES:
            break
    if not contents or _is_part(text[:start], text[after:], contents[-1]):
        return None
    return ", ".join(dict.fromkeys(contents))


def _braced(text: str, start: int) -> tuple[str | None, int]:
    """The content of the braces at `start`, or the next character; None if they have no end."""
    if text[start : start + 1] != "{":
        return text[start : start + 1] or None, start + 1
    depth = 0
    for brace in _BRACE.finditer(text, start, start + 4 * MAX_CLAIM):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start + 1 : brace.start()], brace.end()
    return None, len(text)


# --- the text around a box ------------------------------------------------------------------------

_WINDOW = 80  # characters before and after a box that are read
# Delimiters of formulas, emphasis and tags, which do not change a value.
_DELIMITER = re.compile(
    r"\$|\\[()\[\],;:! ]|\\(?:displaystyle|left|right|quad|qquad)\b|\*\*|</?[a-z_]{1,16}>"
)
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}")
_BINARY = r"(?:\d|[)}]|(?<![A-Za-z])[A-Za-z])[ \t]*[-+*/^÷×·]\s*"
_COMMAND = (
    r"\\(?:times|cdot|div|leq?|leqslant|lt|geq?|geqslant|gt|neq?|pm|mp|not|log|ln|lg|exp|sin|cos|tan|cot"
    r"|sec|csc|lor|vee|sqrt|pi)\b"
)
_STYLE = r"text|math|boxed|fbox|color|underline|bf|rm|large|Large|huge|Huge|ensuremath|displaystyle"
_OPERAND_BEFORE = re.compile(
    rf"(?:{_BINARY}|(?<![\w*-])-|[=(]\s*-\s*|[≤≥≠±√÷×∓^_<]\s*|\d|\S[ \t]*(?<![=-])>\s*"
    r"|(?:\d|\)|(?<![A-Za-z])[A-Za-z]|\b(?:log|ln|sin|cos|tan|sqrt))\(\s*"
    rf"|{_COMMAND}[\s({{]*"
    rf"|(?:[\^_]|\\(?!{_STYLE})[A-Za-z]+(?:\[[^\]{{}}]*\])?(?:\{{[^{{}}]*\}})?)\{{\s*)\Z"
)
_VARIABLE = r"(?![aAI]\s+[A-Za-z'’])[A-Za-z](?![A-Za-z])"
_OPERAND_AFTER = re.compile(
    rf"[ \t]*(?:(?:[-+/÷×·]|\*(?!\*))[ \t]*(?:\d|\\[a-z]|\((?=[\d\\-]|[a-z]\b)|{_VARIABLE})"
    r"|\^\s*\{?\s*(?!\\circ|\\degree|\\text)[\w-]|[<>≤≥≠±√]|!=|:[ \t]*\d"
    rf"|{_COMMAND}|[ijknqruvwxyzXYZ](?![A-Za-z'’])"
    r"|(?:squared|cubed|factorial|plus|minus|times(?!\s*(?:\Z|[.,;]|an?\b|per\b)))\b"
    r"|,?\s*or\s+(?:more|less|fewer|greater|above|below|something|else|maybe|perhaps|another)\b)"
)
_WRONG = r"(?:wrong|incorrect|false|impossible|a mistake|not\s+(?:right|correct|true|the\s+\w+))"
_DENIED = re.compile(
    r"\s*\?"
    r"|[\s.,;(!]*(?:(?:but|which|and|this|that|it|no|nope|wait|sorry)\b[\s,]*){0,4}"
    rf"(?:(?:(?:is|was|seems|looks)\b|['’]s\b|(?:would|must|might)\s+be\b)\s*(?:clearly\s+)?{_WRONG}\b"
    rf"|(?:cannot|can['’]?t|could\s?n['’]t|could\s+not)\s+be\s+(?:right|correct|true|the\b)"
    r"|(?:is|was|would)n['’]t\s+(?:be\s+)?(?:right|correct|true|the\s+(?:answer|right|correct))\b)",
    re.IGNORECASE,
)
_NAMED = r"(?:[A-Za-z]\w?\s*=\s*)?"
_VALUE_BEFORE = re.compile(
    rf"((?:[\d(][-+*/×÷().,\d ]*)?[\d)])[ ,]*\s+or\s+{_NAMED}\Z", re.IGNORECASE
)
_VALUE_AFTER = re.compile(
    rf"[ ,]*\s+or\s+{_NAMED}(?P<or>[-\d./,]*\d)"
    rf"|[ ,]*\s+and\s+{_NAMED}(?P<and>[-\d./,]*\d)\s*(?:[.;]\s|[.;]?\Z|\n)"
    r"|[ \t]*=[ \t]*(?P<side>[^=\n,;]{1,60}?)\s*(?:[.,;=]\s|[.,;=]?\Z|\n)",
    re.IGNORECASE,
)


def _bare(text: str) -> str:
    return _TEXT.sub(r" \1 ", _DELIMITER.sub("", text))


def _is_part(before: str, after: str, content: str) -> bool:
    """Whether the text around a box makes its content a part of something else, or denies it."""
    before, after = _bare(before[-_WINDOW:]), _bare(after[:_WINDOW])
    if _OPERAND_BEFORE.search(before, max(len(before) - 40, 0)) or is_denied(before):
        return True
    if _OPERAND_AFTER.match(after) or _DENIED.match(after):
        return True
    others = [match[match.lastgroup or 0] for match in [_VALUE_AFTER.match(after)] if match]
    others += [match[1] for match in [_VALUE_BEFORE.search(before)] if match]
    return not all(_are_equal(other, content) for other in others)


def _are_equal(other: str, content: str) -> bool:
    """Whether a second value restates that of a box, as in "10/4 or 2.5"."""
    ours, theirs = parse_answer(content), parse_answer(other)
    if ours is not None and isinstance(ours.value, Number):
        known = evaluated(other)
        if known is not None:
            return agree(known, ours.value, content)
    return ours is not None and theirs is not None and equal(ours, theirs) is not False
