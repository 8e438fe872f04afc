"""Training rewards as graders for lm-evaluation-harness: `!function gac_grader.math`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from gac.data import Example
from gac.rewards import Reward, build_reward


def math(row: Mapping[str, Any], responses: Sequence[str]) -> dict[str, float | None]:
    """Grade with the `math` reward; rows need prompt and answer."""
    return _score("math", {}, row, responses)


def choice(row: Mapping[str, Any], responses: Sequence[str]) -> dict[str, float | None]:
    """Grade with the `choice` reward; rows need prompt and answer (a letter)."""
    return _score("choice", {}, row, responses)


def exact(row: Mapping[str, Any], responses: Sequence[str]) -> dict[str, float | None]:
    """Grade with the `exact` reward; rows need prompt and answer."""
    return _score("exact", {}, row, responses)


def mbpp(row: Mapping[str, Any], responses: Sequence[str]) -> dict[str, float | None]:
    """Grade with the `code` reward in the sandbox; rows need prompt, tests and test_setup_code."""
    return _score("code", {"timeout": 10, "setup_field": "test_setup_code"}, row, responses)


def humaneval(row: Mapping[str, Any], responses: Sequence[str]) -> dict[str, float | None]:
    """Grade with the `code` reward in the sandbox; rows need prompt, tests and entry_point."""
    return _score("code", {"timeout": 10}, row, responses)


def _score(
    name: str, options: Mapping[str, Any], row: Mapping[str, Any], responses: Sequence[str]
) -> dict[str, float | None]:
    example = Example(str(row.get("id")), (), row["prompt"], row.get("answer"), None, row)
    (score,) = _reward(name, tuple(options.items()))([responses[0]], [example])
    return {"score": score}


@cache
def _reward(name: str, options: tuple[tuple[str, Any], ...]) -> Reward:
    return build_reward({"name": name, **dict(options)})
