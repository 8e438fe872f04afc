r"""Reads an answer: finds it in a text, and parses it into values that can be compared.

One reading serves references and completions. `read_answer` looks, in this order, for the text
after `####`, in `<answer>` tags, in `\boxed`, after "the answer is", for a text that is nothing but
an answer, and in the last sentence with a number: the result of its calculation, or its last
number. What it finds must be ONE value: a list of guesses, a term, a comparison or a negation is
not a number, whatever numbers it contains.
"""

from __future__ import annotations

import itertools
import re

from .boxes import boxed, has_box
from .context import (
    COMPARISON,
    REFUSED_AFTER,
    REFUSED_BEFORE,
    TERM,
    UNITS_AFTER,
    has_prime,
    is_denied,
)
from .notation import plain_text
from .numbers import NUMBER, agree, evaluated, number_of
from .parsing import MAX_CLAIM, is_name, parse_answer, unwrapped
from .values import Answer, Number, Text

# --- finding --------------------------------------------------------------------------------------

_CALCULATION = re.compile(r"<<[^<>\n]{0,200}>>")  # GSM8K's annotations
# emoji, stars and ticks, but no cross
_EMOJI = re.compile(r"[\u2605\u2606\u2705\u2713\u2714\u2728\U0001f300-\U0001faff\ufe0f]")
_TAG = re.compile(r"<(answer|final_answer|result)>", re.IGNORECASE)
_PHRASE = re.compile(
    r"\b(?:answer|solution|result)\b(?:\s+to\b[^.:\n]{0,80}?)?[*_ ]{0,4}"
    r"(?:\bis(?:\s*:)?|:|=|\b(?:would|should|must|will)\s+be\b|\bequals\b)[*_]{0,3}(?=[^\w]|$)"
    r"|答案\s*[是为為：:]+",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!=\?)(?=[\s*\"'”)])|(?<=[。！？])|\n")
_REASON = re.compile(
    r"(?:\s*[,;(\N{EM DASH}\N{EN DASH}]\s*|\s+)"
    r"(?:because|since|as|which|so|when|where|after|given|i\.e\.)\b.*",
    re.IGNORECASE | re.DOTALL,
)
# "not 6 but 5" and "5, not 6"
_INSTEAD_OF = re.compile(
    r"\Anot\s+[-$]*\d[\d.,]*+\s+but\s+(?:rather\s+)?"
    r"|,\s++(?:and\s++)?not\s++[-$]*+\d[\d.,]*+\W*+\Z"
)
_RETRACTED = re.compile(
    r"\A\W*(?:no|nope|wait|or|maybe|perhaps|possibly|alternatively|otherwise|not)\b"
    r"(?! (?:matter|one|need))"
    r"|\b(?:wrong|incorrect|mistake|not (?:right|correct|the answer)|sorry|I meant|correction)\b"
    r"|\b(?:could|might|may) (?:also )?be\b",
    re.IGNORECASE,
)
_EMPHASIS = re.compile(r"(?:\*\*|__)([^\n]{1,200}?)(?:\*\*|__)")
_BARE_NUMBER = re.compile(r"[$-]*\d[\d.,/]*%?")


def read_answer(text: str, *, prose: bool = True) -> Answer | None:
    """The answer in a text, or None if it has none, or more than one.

    prose: whether the last number of a sentence may be the answer; not for a short reference.
    """
    text = _CALCULATION.sub("", text)
    text = (text if text.isascii() else _EMOJI.sub("", text)).strip()
    marked = _marked(text)
    if marked is not None:
        return read_answer(marked) if has_box(marked) else _claim(marked)
    tagged = _tagged(text)
    if tagged is not None:
        return read_answer(tagged)
    if has_box(text):
        content = boxed(text)
        return None if content is None else _claim(content)
    if said := _last(_PHRASE, text):
        return _read_sentence(text[said.end() :].lstrip(), said=True)
    if not prose:
        return _claim(text)
    text = re.sub(r"\\[()\[\]]", "$", text)
    if re.search(r"[^\W\d_]{2}", text):  # "It is 5!" stresses the answer, "5!" is a factorial
        text = text.removesuffix("!")
    whole = parse_answer(text) if "\n" not in text else None
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
    return Answer((Text(words),), "".join(words))


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last match of a pattern."""
    matches = list(pattern.finditer(text))
    return matches[-1] if matches else None


def _marked(text: str) -> str | None:
    """The text after the last `####`, GSM8K's final-answer marker, or None.

    On any line but the last, only a bare number counts: "#### Step 2" is a Markdown heading.
    """
    if "####" not in text:
        return None
    for below, line in enumerate(reversed(text.rstrip().splitlines())):
        before, mark, answer = line.rpartition("####")
        answer = answer.strip()
        is_heading = before.endswith("#") or (below > 0 and not _BARE_NUMBER.fullmatch(answer))
        if mark and answer and not is_heading:
            return answer
    return None


def _tagged(text: str) -> str | None:
    """The content of the last `<answer>` tag, or None; a tag without an end holds no answer."""
    tag = _last(_TAG, text) if "<" in text else None
    if tag is None:
        return None
    end = re.compile(f"</{tag[1]}>", re.IGNORECASE).search(text, tag.end())
    return text[tag.end() : end.start()] if end else ""


def _read_sentence(text: str, *, said: bool) -> Answer | None:
    """The answer of the first sentence of `text`, which the rest does not retract."""
    end = _SENTENCE_END.search(text)
    sentence, rest = (text[: end.start()], text[end.end() :]) if end else (text, "")
    sentence = _EMPHASIS.sub(r"\1", sentence).strip("*_ \t").rstrip("!")
    if sentence.endswith(("?", "？")) or _RETRACTED.search(rest[:MAX_CLAIM]):
        return None
    if said:
        sentence = _INSTEAD_OF.sub("", sentence)
    claims = [sentence, _REASON.sub("", sentence)] if said else [sentence]
    for claim in claims:
        answer = parse_answer(claim)
        if answer is not None and (said or not isinstance(answer.value, Text)):
            return answer
    sentence = sentence[-4 * MAX_CLAIM :]
    begins_with_number = said and re.match(r"\W*+(?:\w{1,20}+\s++)?\W*+\d", sentence)
    return _verbatim(sentence) if begins_with_number else _value_in(sentence)


def _last_with_value(text: str) -> str:
    """The text from the beginning of the last sentence that has a digit or a formula."""
    text = text[-4 * MAX_CLAIM :]
    starts = [0, *(m.end() for m in _SENTENCE_END.finditer(text)), len(text)]
    for start, end in reversed(list(itertools.pairwise(starts))):
        if re.search(r"\d|\$[^$]+\$", text[start:end]):
            return text[start:].lstrip()
    return ""


# --- the value of a sentence ----------------------------------------------------------------------

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
_OPERAND = re.compile(r"\)\s?[\w(^*/]|\s?(?:[*×·÷^+=]|/(?!\s?[^\W\d_]{3}))")
_LATER_GUESS = re.compile(r"[\s,;(]*(?:or|and|maybe|perhaps|possibly|not|no)\b", re.IGNORECASE)
_CALLED_WRONG = re.compile(r"\b(?:wrong|incorrect|mistaken)\b", re.IGNORECASE)
# The rest of a sentence that only gives circumstances: "after selling 3", "because 8 - 3 is 5".
_CIRCUMSTANCES = re.compile(
    r",?\s(?:(?:after|before|by|when|while|from|without|upon)\s+(?:\w+\s+)?\w{2,}ing|because)\b.*",
    re.IGNORECASE | re.DOTALL,
)


def _value_in(sentence: str) -> Answer | None:
    """The value that a sentence gives: the result of its calculation, or its last number."""
    plain = plain_text(sentence)
    if answer := _result(plain) or _last_formula(sentence):
        return answer
    main = _CIRCUMSTANCES.sub("", plain)
    return _last_number(main if re.search(r"\d", main) else plain)


def _last_formula(sentence: str) -> Answer | None:
    """The formula at the end of a sentence without other numbers: "The point is $(1, 2)$"."""
    match = re.search(r"\$([^$]+)\$\W*\Z", sentence)
    if match is None or re.search(r"\d", before := sentence[: match.start()]):
        return None
    answer = parse_answer(match[1])
    if answer is None or isinstance(answer.value, Number) or COMPARISON.search(before):
        return None
    return None if REFUSED_BEFORE.search(before.replace("$", "")) else answer


def _last_number(plain: str) -> Answer | None:
    """The last number, if nothing beside it makes it a part of something else."""
    matches = list(NUMBER.finditer(plain))
    if not matches:
        return None
    last = matches[-1]
    previous = matches[-2].end() if len(matches) > 1 else 0
    before, after = plain[: last.start()], plain[last.end() :]
    left, right = _CLAUSE.split(before)[-1], _CLAUSE.split(after)[0]
    number = number_of(last)
    if (
        number is None
        or COMPARISON.search(left + right)
        or not UNITS_AFTER.fullmatch(right)
        or REFUSED_AFTER.search(right)
        or _LATER_GUESS.match(after)
        or _CALLED_WRONG.search(after)
        or REFUSED_BEFORE.search(left)
        or is_denied(before[: _start_of_calculation(before.rstrip(" ="))])
        or has_prime(before, after)
        or _OPERATOR.search(before)
        or _OPERAND.match(after)
        or (last["sign"] and TERM.search(before))
        or (len(matches) > 1 and _LINK.fullmatch(plain[previous : last.start()]))
    ):
        return None
    if left.rstrip().endswith("=") and not _gives(left.rstrip()[:-1], number, last[0]):
        return None
    return _answer_of(last, number)


def _answer_of(match: re.Match[str], number: Number) -> Answer:
    return Answer((number,), re.sub(r"\s", "", match[0]))


def _gives(left: str, number: Number, text: str) -> bool:
    """Whether the left side of an equation is a name, or a calculation that gives the number."""
    side = left.rpartition("=")[2]
    side = re.sub(r"['’]s\b|\b[aAI]\b", " ", side)
    side = re.sub(r"(?<=\d)\s*x\s*(?=[\d$])", "*", side)
    known = evaluated(side)
    if known is not None:
        return agree(known, number, text)
    rest = re.sub(r"[^\W\d_]{2,}", " ", side).strip()
    return is_name(side) or is_name(rest) or not re.search(r"[^\W\d_]", rest)


# --- the result of a calculation ------------------------------------------------------------------

_DIGITS = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+")
# Units of an operand: "60 miles", "$2/bar", "30%"
_UNITS = (
    r"[%)]*(?:\s?/?\s?(?!(?:is|are|was|were|so)\b)[A-Za-z][\w&'’]*+(?:-[A-Za-z]\w*+)*+){0,6}\s*"
)
_NEXT_OPERAND = re.compile(rf"{_UNITS}[-+*/x×÷]\s*[-($€£\s]*")
_LAST_OPERAND = re.compile(_UNITS)
_ALTERNATIVE = re.compile(r"\d[\s,]*(?:\w+\s)?or\s*\Z", re.IGNORECASE)  # "7 or 2 + 3 = 5"
# What introduces a number that belongs to the circumstances of a result: "in 5 days".
_SETTING = re.compile(
    r"\b(?:in|for|after|before|by|from|on|at|when|since|during|every|per|with|within|across|until|if|than"
    r"|to\s+[a-z]+)\b",
    re.IGNORECASE,
)
_RIVAL = re.compile(
    r"\b(?:or|maybe|perhaps|possibly|either|versus|vs|alternatively|instead|but|else|otherwise|unless"
    r"|wrong|incorrect|false|impossible|invalid|mistaken?|unsure|never|hardly|cannot)\b"
    r"|\b(?:is|was|would|should|could|can)(?:\s+not|n['’]t)\b"
    r"|\bnot\s+(?:be\s+)?(?:right|correct|true|sure|the|an?)\b|[<>=≤≥≠±√?!|;:\\^_]",
    re.IGNORECASE,
)


def _result(plain: str) -> Answer | None:
    """The result of the last calculation of a sentence, whatever its circumstances.

    "They earn 18 + 30 = 48 dollars if they sell all 12 of them" gives 48: the calculation proves
    the number, so its neighbors are read less strictly than those in `_last_number`.
    """
    left, equals, right = plain.rpartition("=")
    result = NUMBER.match(plain, len(left) + 1 + len(right) - len(right.lstrip()))
    number = number_of(result) if equals and result else None
    if result is None or number is None:
        return None
    start = _start_of_calculation(left)
    before, calculation, rest = left[:start], left[start:], plain[result.end() :]
    calculation = re.sub(r"(?<![A-Za-z])x(?![A-Za-z])", "*", calculation)
    calculation = re.sub(r"/?\s?[A-Za-z][\w&'’-]*", " ", calculation)
    known = evaluated(calculation) if calculation else None
    if known is None or not agree(known, number, result[0]):
        return None
    if is_denied(before) or _ALTERNATIVE.search(before):
        return None
    rest = re.sub(r"\A\s?dozens?\b", "", rest)
    is_operand = re.match(r"['′″]|\s?[*×·÷^+-]\s?[\w(]|(?![a-z]{1,4}\b)\w", rest)
    if is_operand or REFUSED_AFTER.match(rest) or _RIVAL.search(rest):
        return None
    following = _DIGITS.search(rest)
    between = rest[: following.start()] if following else "for"
    if not _SETTING.search(between) or re.search(r"[,&]|\band\b", between):
        return None
    return _answer_of(result, number)


def _start_of_calculation(left: str) -> int:
    """Where the calculation at the end of a text begins; the end of the text if it has none."""
    operands = list(_DIGITS.finditer(left, left.rfind("=") + 1))
    if len(operands) < 2 or not _LAST_OPERAND.fullmatch(left, operands[-1].end()):
        return len(left)
    first = len(operands) - 1
    while first and _NEXT_OPERAND.fullmatch(
        left, operands[first - 1].end(), operands[first].start()
    ):
        first -= 1
    if first == len(operands) - 1:
        return len(left)
    start = operands[first].start()
    return len(left[:start].rstrip("-($€£"))
