"""Argument checks whose errors contain the name, the value and the valid values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import SupportsFloat

from gac.errors import require


def is_real(value: object) -> bool:
    """Whether `value` is a finite Python number; bool does not count."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: object, minimum: int = 0) -> bool:
    """Whether `value` is an integer >= `minimum`; bool does not count."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def finite(name: str, value: SupportsFloat) -> float:
    """Convert a Python number or 0-d array to a float; raise ValueError if it is not finite."""
    number = math.nan if isinstance(value, str) else float(value)
    require(math.isfinite(number), name, value, "a finite number")
    return number


def numbers(name: str, values: Sequence[SupportsFloat], count: int) -> list[float]:
    """Convert `values` to floats; raise ValueError unless they are `count` finite numbers."""
    require(len(values) == count, name, values, f"{count} numbers, or None")
    return [finite(name, value) for value in values]
