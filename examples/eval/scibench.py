"""The reward of scibench.yaml: a number that is off by at most 5%."""

from __future__ import annotations

import math
import re
from typing import Any

TOLERANCE = 0.05  # relative, as in arXiv 2307.10635
BOX = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
POWER = re.compile(r"(?:\\times|\\cdot|[x*×·])\s*10\s*\^\s*\{?\s*([+-]?\d+)\s*\}?")


def number(text: str) -> float | None:
    r"""The value of a decimal, in LaTeX or plain text, such as 1.2 \times 10^{-3}; else None."""
    text = text.strip().strip("$").replace("\\,", "").replace("{,}", "").replace(",", "")
    text = POWER.sub(r"e\1", text.replace("−", "-"))
    try:
        value = float(re.sub(r"\s+", "", text))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def close(completion: str, example: Any) -> float:
    """1 if the last box has a number within the tolerance of the answer, else 0."""
    boxes, expected = BOX.findall(completion), number(str(example.answer))
    found = number(boxes[-1]) if boxes else None
    if found is None or expected is None:
        return 0.0
    return float(abs(found - expected) <= TOLERANCE * abs(expected))
