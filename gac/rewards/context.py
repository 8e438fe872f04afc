"""What may stand beside a number, and what makes the number a part of something else."""

from __future__ import annotations

import re

# --- words that refuse a number -------------------------------------------------------------------

# A clause with one of these words denies its number, or guesses it.
_DENIAL = (
    r"not|no|never|neither|nor|except|without|unless|cannot|impossible|invalid|wrong|incorrect"
    r"|unknown|[a-z]+n['’]t|cant|dont|isnt|instead|besides|excluding|false|hardly|forbidden|unsure|doubt"
    r"|(?:any|every|no)thing but|all but|too|or|either|maybe|perhaps|possibly|versus|vs"
)
# Operations, which make another number of the number before or after them.
_OPERATION = (
    r"plus|minus|times|divided by|multiplied by|added to|mod|modulo|sqrt|root|log|ln|sin|cos|tan|pi"
    r"|power|choose|hundred|thousand|[a-z]{1,5}illion|lakh|crore"
)
# Operations on the number after them.
_PREFIX_OPERATION = (
    r"negative|lg|exp|cot|sec|csc|arc(?:sin|cos|tan)|half|third|quarter|twice|thrice|double|triple"
    r"|square|cube|reciprocal|inverse|opposite|factorial"
)
# Operations on the number before them.
_SUFFIX_OPERATION = (
    r"squared|cubed|factorial|below zero|under zero|over|degrees below|dozens?|tens|halves|thirds"
    r"|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand|million)ths"
)
# Comparisons with the number after them, and guesses.
_BOUND = (
    r"at (?:least|most)|than|over|under|above|below|between|within|beyond|exceed(?:s|ing)?|up to"
    r"|approaching|outside|(?:may|might|could)\s(?:also\s|well\s)?be"
)
COMPARISON = re.compile(
    r"[<>≤≥≠≮≯±∓∝?？]|[A-Za-z]\s?→|\\(?:le|leq|leqslant|lt|ge|geq|geqslant|gt|ne|neq|not|pm|mp|in|approx|sim)\b|!=|[~≈]\s*\d"
    r"|[不非或未]|大于|小于|以上|以下|超过|至少|最多|[两一]倍|倍"
)
REFUSED_BEFORE = re.compile(
    rf"\b(?:{_DENIAL})\b"
    rf"|\b(?:{_OPERATION}|{_PREFIX_OPERATION}|{_BOUND}|but|to)[\s({{]+(?:(?:of|about|the|around)\s+)*\Z",
    re.IGNORECASE,
)
# "times" counts in "5 times" and "5 times a day".
REFUSED_AFTER = re.compile(
    rf"\b(?:{_DENIAL}|if)\b|\A\W*and\b"
    rf"|\A\W*(?:{_SUFFIX_OPERATION}"
    rf"|(?!times\s*(?:\Z|[.,;)]|(?:an?|per|each|every|in|this)\b))(?:{_OPERATION}))\b",
    re.IGNORECASE,
)
_DENIES = re.compile(
    r"(?:\b(?:not|never|cannot|cant|dont|isnt|neither|nor|without|except|excluding|besides|doubt"
    r"|(?<!in )either|maybe|perhaps|possibly|unless|if|(?:any|every)thing but|all but)|n['’]t)\Z"
)
_OPERATES = re.compile(rf"\b(?:{_OPERATION}|{_PREFIX_OPERATION}|{_BOUND})\Z")
# Words that may stand between a denial and what it denies: "it is not true that the answer is".
_AFTER_DENIAL = frozenset(
    [
        *("answer", "are", "be", "because", "believe", "case", "certain", "clear", "correct"),
        *("equal", "equals", "is", "it", "result", "right", "say", "so", "sure", "that", "the"),
        *("think", "to", "true", "value", "was"),
    ]
)


def is_denied(before: str) -> bool:
    """Whether a text ends in words that deny or change what follows: "I do not think that it is".

    Unlike `REFUSED_BEFORE`, it ignores a clause that denies something else, as in "the number of
    people who did not come is".
    """
    words = re.split(r"[\s=({]+", before[-80:].lower().rstrip("\n ({:="))
    named = len(words)
    while named and (words[named - 1] in _AFTER_DENIAL or re.fullmatch("[a-z]", words[named - 1])):
        named -= 1
    if _DENIES.search(" ".join(words[max(named - 3, 0) : named])):
        return True
    if before.rstrip().endswith(":"):
        return False
    while words and words[-1] in ("of", "the"):
        words.pop()
    return _OPERATES.search(" ".join(words[-3:])) is not None


TERM = re.compile(r"(?:[\d)}]|(?<![^\W\d_])[^\W\d_])\s*\Z")  # what a sign adds a number to
_PRIME = re.compile(r"['\"’”′″]")
_OPENING_QUOTE = re.compile(r"(?<!\w)['\"‘“]")


def has_prime(before: str, after: str) -> bool:
    """Whether a prime follows a number, as in 5', and no closing quote."""
    return _PRIME.match(after) is not None and _OPENING_QUOTE.search(before) is None


# --- words that leave a number as it is -----------------------------------------------------------

# Short words, which could be products of variables such as "xy".
_SHORT_WORD = (
    r"[kcmnd]?m|[km]?g|m?l|ft|lbs?|oz|hrs?|yds?|in|mi|qts?|pts?|[kmgt]b|rs|k?[wh]h?|[hk]?pa|mph|kph|rpm|gcd|lcm"
    r"|is|it|of|on|at|by|an|as|he|we|us|so|to|up|me|my|why|try|buy|per|s"
)
_CJK = r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"
_WORD = (
    rf"(?:(?i:(?:{_SHORT_WORD})\b)|(?=[^\W\d_]{{0,20}}[aeiouAEIOU])(?![A-Za-z]{{1,2}}\b)[^\W\d_]++"
    rf"|[^\W\d_]{{4,}}+|[aAI]\b(?=\s+[^\W\d_]{{2}})|[\u0400-\u04ff]{{3,}}+|{_CJK}++)"
)
WORDS_BEFORE = re.compile(rf"(?:[\s:,*#'\"‘’“”_()\[\]$]|{_WORD}(?:['’-][^\W\d_]+)*\.?)*+")
# A unit attached to the number, or a symbol such as the m of "5 m"; then words and punctuation.
UNITS_AFTER = re.compile(
    r"(?:(?:st|nd|rd|th|[ckmnμµ]?m|[kmμµ]?gs?|m[lL]|[KMGT]B|[km]ph|hrs?|mins?|secs?|lbs?|USD|EUR|GBP)\b"
    rf"|{_CJK}+|¢|(?![A-Za-z]))"
    r"(?:\s?°\s?[CF]?\b)?(?:\s[ghlmsLVWNJKCF](?![\w'’(^*+]|\s*[-+*/=]))?"
    rf"(?:/\s?(?=[^\W\d_]{{3}}){_WORD})?"  # "5/hour", but not "5/x"
    r"(?:(?<=[a-z])\^\{?-?\d\}?|(?<=[a-z])\^?[²³]|[\s.,:;'\"‘’“”_()\[\]°€£¥¢$。，]|\*+\Z"
    rf"|(?<=[A-Za-z\s])/\s?(?:{_WORD}|[hs]\b)|-(?=[^\W\d_]{{2}})|{_WORD}(?:['’-][^\W\d_]+)*)*+"
)
