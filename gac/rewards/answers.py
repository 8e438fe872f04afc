r"""Reads an answer: finds it in a text, and parses it into values that can be compared.

One reading serves references and completions. `read_answer` looks, in this order, for the text
after `####`, in `<answer>` tags, in `\boxed`, after "the answer is", for a text that is nothing but
an answer, and for the last number of the last sentence with one. What it finds must be ONE value: a
list of guesses, a term, a comparison or a negation is not a number, whatever numbers it contains.
"""

from __future__ import annotations

import itertools
import re

from .parsing import (
    AFTER,
    AFTER_NO,
    BEFORE_NO,
    COMPARISON,
    MAX_CLAIM,
    NUMBER,
    TERM,
    agree,
    evaluated,
    is_name,
    number_of,
    parse_answer,
    plain_text,
    unwrapped,
)
from .values import Answer, Number, Text

MAX_BOXES = 8  # of a list of boxes

# --- finding --------------------------------------------------------------------------------------

_CALCULATION = re.compile(r"<<[^<>\n]{0,200}>>")  # GSM8K's annotations
_TAG = re.compile(r"<(answer|final_answer|result)>", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\b\s*")
_PHRASE = re.compile(
    r"\b(?:answer|solution|result)\b(?:\s+to\b[^.:\n]{0,80}?)?[*_ ]{0,4}"
    r"(?:\bis(?:\s*:)?|:|=|\b(?:would|should|must|will)\s+be\b|\bequals\b)[*_]{0,3}(?=[^\w]|$)"
    r"|答案\s*[是为為：:]+",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"(?<=[.!?])(?=[\s*\"'”)])|(?<=[。！？])|\n")
_REASON = re.compile(
    r"(?:\s*[,;(\N{EM DASH}\N{EN DASH}]\s*|\s+)"
    r"(?:because|since|as|which|so|when|where|after|given|i\.e\.)\b.*",
    re.IGNORECASE | re.DOTALL,
)
_RETRACTED = re.compile(
    r"\A\W*(?:no|nope|wait|or|maybe|perhaps|possibly|alternatively|otherwise|not)\b"
    r"(?! (?:matter|one|need))"
    r"|\b(?:wrong|incorrect|mistake|not (?:right|correct|the answer))\b"
    r"|\b(?:could|might|may) (?:also )?be\b",
    re.IGNORECASE,
)
_EMPHASIS = re.compile(r"(?:\*\*|__)([^\n]{1,200}?)(?:\*\*|__)")
_BARE_NUMBER = re.compile(r"[$-]*\d[\d.,/]*%?")


def read_answer(text: str, *, prose: bool = True) -> Answer | None:
    """The answer in a text, or None if it has none, or more than one.

    prose: whether the last number of a sentence may be the answer; not for a short reference.
    """
    text = _CALCULATION.sub("", text).strip()
    marked = _marked(text)
    if marked is not None:
        return read_answer(marked) if _BOX.search(marked) else _claim(marked)
    tagged = _tagged(text)
    if tagged is not None:
        return read_answer(tagged)
    if _BOX.search(text):
        boxes = _boxes(text)
        return None if boxes is None else _claim(boxes)
    if said := _last(_PHRASE, text):
        return _read_sentence(text[said.end() :].lstrip(), said=True)
    if not prose:
        return _claim(text)
    whole = parse_answer(text.removesuffix("!")) if "\n" not in text else None
    return whole or _read_sentence(_last_with_value(text), said=False) or _verbatim(text)


def _claim(text: str) -> Answer | None:
    """The answer that a marked text is; one that cannot be read equals only the same text."""
    return parse_answer(text) or _verbatim(text)


def _verbatim(text: str) -> Answer | None:
    if len(text) > MAX_CLAIM:
        return None
    words = tuple(re.findall(r"\w+|[^\w\s]", unwrapped(text).casefold()))
    if not any(word.isalnum() for word in words):
        return None
    return Answer((Text(words),), "".join(words), "")


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last match of a pattern."""
    matches = list(pattern.finditer(text))
    return matches[-1] if matches else None


def _marked(text: str) -> str | None:
    """The text after the last `####`, GSM8K's final-answer marker, or None.

    On any line but the last, only a bare number counts: "#### Step 2" is a Markdown heading.
    """
    for below, line in enumerate(reversed(text.rstrip().splitlines())):
        before, mark, answer = line.rpartition("####")
        answer = answer.strip()
        is_heading = before.endswith("#") or (below > 0 and not _BARE_NUMBER.fullmatch(answer))
        if mark and answer and not is_heading:
            return answer
    return None


def _tagged(text: str) -> str | None:
    """The content of the last `<answer>` tag, or None; a tag without an end holds no answer."""
    tag = _last(_TAG, text)
    if tag is None:
        return None
    end = text.lower().find(f"</{tag[1].lower()}>", tag.end())
    return text[tag.end() : end] if end >= 0 else ""


def _boxes(text: str) -> str | None:
    r"""The content of the last `\boxed`, or None if it has no end.

    Boxes that only "or", "and" or a comma separates are a list.
    """
    matches = list(_BOX.finditer(text))
    contents: list[str] = []
    start = len(text)
    for box in reversed(matches):
        content, end = _braced(text, box.end())
        between = text[end:start] if contents else ""
        if content is None:
            return None if not contents else ", ".join(contents)
        if contents and not _JOIN.fullmatch(between):
            break
        contents.insert(0, content)
        start = box.start()
        if len(contents) > MAX_BOXES:
            break
    return ", ".join(dict.fromkeys(contents))


_JOIN = re.compile(r"[\s$,;&]*(?:or|and)?[\s$]*(?:\w{1,2}\s*=\s*)?", re.IGNORECASE)


def _braced(text: str, start: int) -> tuple[str | None, int]:
    """The content of the braces at `start`, or the next character; None if they have no end."""
    if text[start : start + 1] != "{":
        return text[start : start + 1] or None, start + 1
    depth = 0
    for brace in re.compile(r"(?<!\\)[{}]").finditer(text, start, start + 4 * MAX_CLAIM):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start + 1 : brace.start()], brace.end()
    return None, len(text)


def _read_sentence(text: str, *, said: bool) -> Answer | None:
    """The answer of the first sentence of `text`, which the rest does not retract."""
    end = _SENTENCE_END.search(text)
    sentence, rest = (text[: end.start()], text[end.end() :]) if end else (text, "")
    sentence = _EMPHASIS.sub(r"\1", sentence).strip("*_ \t").rstrip("!")
    if sentence.endswith(("?", "？")) or _RETRACTED.search(rest[:MAX_CLAIM]):
        return None
    claims = [sentence, _REASON.sub("", sentence)] if said else [sentence]
    for claim in claims:
        answer = parse_answer(claim)
        if answer is not None and (said or not isinstance(answer.value, Text)):
            return answer
    sentence = sentence[-4 * MAX_CLAIM :]
    begins_with_number = said and re.match(r"\W*+(?:\w{1,20}+\s++)?\W*+\d", sentence)
    return _verbatim(sentence) if begins_with_number else _last_value(sentence)


def _last_with_value(text: str) -> str:
    """The text from the beginning of the last sentence that has a digit or a formula."""
    text = text[-4 * MAX_CLAIM :]
    starts = [0, *(m.end() for m in _SENTENCE_END.finditer(text)), len(text)]
    for start, end in reversed(list(itertools.pairwise(starts))):
        if re.search(r"\d|\$[^$]+\$|\\\(", text[start:end]):
            return text[start:].lstrip()
    return ""


# --- the last number of a sentence ----------------------------------------------------------------

_LINK = re.compile(
    r"\s*|\s*(?:hours?|hrs?|minutes?|feet|foot|ft|pounds?|lbs?|dollars?|years?|weeks?|days?)\s*"
    r"|[^\d=]{0,24}?(?:[,;|/&+*×÷^~:-]|\\\w+|\b(?:x|or|and|to|through|plus|minus|times|by|versus|vs)\b)"
    r"(?:\s*\b(?:or|and|even|maybe|perhaps|possibly|also|then)\b)*[\s$€£(-]*",
    re.IGNORECASE,
)
_CLAUSE = re.compile(
    r"[.,](?!\d)|[;:()]|\b(?:so|because|since|which|when|while|for|after|before|that|therefore|thus|hence)\b",
    re.IGNORECASE,
)
_OPERATOR = re.compile(r"(?:[-+*/^÷√∛∜±∓\\]|(?<!\w)x|[\w)]\()\s*\Z")
_OPERAND = re.compile(r"\)\s?[\w(^*/]|\s?[*×·÷^/+=]")
_LATER_GUESS = re.compile(r"[\s,;(]*(?:or|and|maybe|perhaps|possibly|not|no)\b", re.IGNORECASE)


def _last_value(sentence: str) -> Answer | None:
    """The last number of a sentence, if nothing beside it makes it a part of something else."""
    plain = plain_text(sentence)
    matches = list(NUMBER.finditer(plain))
    if not matches:
        formula = re.findall(r"\$([^$]+)\$|\\\((.+?)\\\)", sentence)
        return parse_answer("".join(formula[-1])) if formula else None
    last = matches[-1]
    previous = matches[-2].end() if len(matches) > 1 else 0
    between, after = plain[previous : last.start()], plain[last.end() :]
    left = _CLAUSE.split(plain[: last.start()])[-1]
    right = _CLAUSE.split(after)[0]
    number = number_of(last)
    if (
        number is None
        or COMPARISON.search(left + right)
        or not AFTER.fullmatch(right)
        or AFTER_NO.search(right)
        or _LATER_GUESS.match(after)
        or BEFORE_NO.search(left)
        or _OPERATOR.search(plain[: last.start()])
        or _OPERAND.match(after)
        or (last["sign"] and TERM.search(plain[: last.start()]))
        or (len(matches) > 1 and _LINK.fullmatch(between))
    ):
        return None
    if left.rstrip().endswith("=") and not _gives(left.rstrip()[:-1], number, last[0]):
        return None
    text = re.sub(r"\s", "", last[0])
    return Answer((number,), text, text)


def _gives(left: str, number: Number, text: str) -> bool:
    """Whether the left side of an equation is a name, or a calculation that gives the number."""
    side = left.rpartition("=")[2]
    side = re.sub(r"['’]s\b|\b[aAI]\b", " ", side)
    side = re.sub(r"(?<=\d)\s*x\s*(?=[\d$])", "*", side)
    known = evaluated(re.sub(r"[^\W\d_]{2,}|°", " ", side))
    if known is not None:
        return agree(known, number, text)
    rest = re.sub(r"[^\W\d_]{2,}", " ", side).strip()
    return is_name(side) or is_name(rest) or not re.search(r"[^\W\d_]", rest)
