"""The rewards of training as graders of lm-evaluation-harness: `!function gac_grader.math`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from gac.data import Example
from gac.rewards import Reward, build_reward


def math(row: Mapping[str, Any], responses: Sequence[str]) -> dict[str, float | None]:
    """The reward `math`; rows with prompt and answer."""
    return _score("math", {}, row, responses)


def choice(row: Mapping[str, Any], responses: Sequence[str]) -> dict[str, float | None]:
    """The reward `choice`; rows with prompt and answer, a letter."""
    return _score("choice", {}, row, responses)


def exact(row: Mapping[str, Any], responses: Sequence[str]) -> dict[str, float | None]:
    """The reward `exact`; rows with prompt and answer."""
    return _score("exact", {}, row, responses)


def mbpp(row: Mapping[str, Any], responses: Sequence[str]) -> dict[str, float | None]:
    """The reward `code` in the sandbox; rows with prompt, tests and test_setup_code."""
    return _score("code", {"timeout": 10, "setup_field": "test_setup_code"}, row, responses)


def _score(
    name: str, options: Mapping[str, Any], row: Mapping[str, Any], responses: Sequence[str]
) -> dict[str, float | None]:
    example = Example(str(row.get("id")), (), row["prompt"], row.get("answer"), None, row)
    (score,) = _reward(name, tuple(options.items()))([responses[0]], [example])
    return {"score": score}


@cache
def _reward(name: str, options: tuple[tuple[str, Any], ...]) -> Reward:
    return build_reward({"name": name, **dict(options)})
