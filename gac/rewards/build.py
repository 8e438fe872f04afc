"""Builds rewards from configuration values."""

from __future__ import annotations

import contextlib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, get_args

from gac.config import convert
from gac.config.convert import did_you_mean
from gac.errors import is_real, require
from gac.imports import load_object

from .base import CallableReward, OnError, Reward
from .code import CodeReward
from .combine import BatchCallableReward, ConcurrentReward, SumReward
from .completion import Markers
from .mathematics import MathReward
from .text import ChoiceReward, ExactReward, FormatReward

REWARDS: dict[str, type[Reward]] = {
    "math": MathReward,
    "exact": ExactReward,
    "choice": ChoiceReward,
    "format": FormatReward,
    "code": CodeReward,
}
"""Name -> reward class. The constructor's keyword arguments are the configuration options."""


def build_reward(spec: str | Mapping[str, Any], *, on_error: OnError = "raise") -> Reward:
    """Build a reward from its configuration.

    Args:
        spec: a name of `REWARDS`; `package.module:function`; or a mapping: `{"name": name, option:
            value, ...}`, or `{"sum": [{"reward": spec, "weight": 1.0}, ...]}`. A function is called
            with (completion, example) and the options, or with lists of both if `batch: true`. A
            coroutine function, or any with `concurrency: N` or `retries: N`, is called for N (16)
            rows at once. A `Reward` subclass is constructed with the options. The outermost mapping
            may also set `on_error`; `deadline`, the seconds after which a call of a function fails;
            and `reasoning`, the two texts that begin and end a reasoning trace, of which nothing is
            graded (null: those of the tokenizer and its chat template; false: none).
        on_error: how to handle rows that cannot be scored, "raise" or "drop".

    Raises:
        ValueError: unknown name or option (the message suggests the closest match), or invalid
            value.
    """
    options: dict[str, Any] = dict(spec) if isinstance(spec, Mapping) else {}
    on_error = options.pop("on_error", on_error)
    deadline = options.pop("deadline", Reward.deadline)
    valid = deadline is None or (is_real(deadline) and deadline > 0)
    require(valid, "deadline", deadline, "a finite number of seconds > 0, or null")
    if on_error not in get_args(OnError):
        raise ValueError(f"on_error must be one of {get_args(OnError)}, got {on_error!r}")
    reasoning = _markers(options.pop("reasoning", None))
    reward = _build(options or spec)
    reward.on_error, reward.deadline, reward.reasoning = on_error, deadline, reasoning
    return reward


def _markers(value: object) -> Markers | None:
    """The value of the key `reasoning`."""
    if value is None:
        return None
    if value is False:
        return ()
    texts = value if isinstance(value, list | tuple) else ()
    valid = len(texts) == 2 and all(isinstance(text, str) and text.strip() for text in texts)
    require(valid, "reasoning", value, "a list of the two texts that begin and end it, or false")
    return ((texts[0], texts[1]),)


def _build(spec: str | Mapping[str, Any]) -> Reward:
    if isinstance(spec, str):
        spec = {"name": spec}
    if not isinstance(spec, Mapping) or ("name" in spec) == ("sum" in spec):
        raise ValueError(
            f"reward must be a name, or a mapping with either 'name' or 'sum'; got {spec!r}"
        )
    if misplaced := {"on_error", "deadline", "reasoning"} & spec.keys():
        raise ValueError(f"set {min(misplaced)} next to `sum`, not on one of its terms")
    options = {key: value for key, value in spec.items() if key != "name"}
    if "sum" in spec:
        return _build_sum(options)
    name = spec["name"]
    if isinstance(name, str) and ":" in name:
        return _build_callable(name, options)
    if not isinstance(name, str) or name not in REWARDS:
        hint = did_you_mean(str(name), REWARDS) or "."
        raise ValueError(
            f"unknown reward {name!r}{hint} Known: {', '.join(REWARDS)}, or package.module:function"
        )
    return _construct(name, REWARDS[name], options)


def _build_sum(options: dict[str, Any]) -> SumReward:
    terms = options.pop("sum")
    if options:
        raise ValueError(f"'sum' takes no other options, got {', '.join(map(str, options))}")
    if not isinstance(terms, list | tuple):
        raise ValueError(f"sum must be a list of terms {{reward: ..., weight: ...}}, got {terms!r}")
    built = []
    for term in terms:
        unknown = set(term) - {"reward", "weight"} if isinstance(term, Mapping) else {repr(term)}
        if unknown or "reward" not in term:
            raise ValueError(
                f"each term of a sum must be {{reward: ..., weight: ...}}, got {term!r}"
            )
        weight = term.get("weight", 1.0)
        require(is_real(weight), "weight", weight, "a finite number in each term of the sum")
        built.append((_build(term["reward"]), weight))
    return SumReward(built)


def _build_callable(name: str, options: dict[str, Any]) -> Reward:
    function = load_object(name, "reward")
    if inspect.isclass(function) and issubclass(function, Reward):
        return _construct(name, function, options)
    if inspect.iscoroutinefunction(function) or {"concurrency", "retries"} & options.keys():
        if "batch" in options:
            raise ValueError(
                f"reward {name!r}: batch scores all rows in one call: remove it, or remove "
                "concurrency and retries"
            )
        concurrency, retries = options.pop("concurrency", 16), options.pop("retries", 0)
        options = _converted(name, function, options)
        return ConcurrentReward(name, function, options, concurrency, retries)
    batch = convert(bool, options.pop("batch", False), f"reward {name!r}: batch")
    options = _converted(name, function, options)
    return (BatchCallableReward if batch else CallableReward)(name, function, options)


def _construct(name: str, reward: type[Reward], options: Mapping[str, Any]) -> Reward:
    known = list(inspect.signature(reward).parameters)
    for key in options:
        if key not in known:
            hint = did_you_mean(str(key), known) or "."
            raise ValueError(f"reward {name!r} has no option {key!r}{hint} Known: {known}")
    try:
        inspect.signature(reward).bind(**options)  # names a missing option
        return reward(**_converted(name, reward, options))
    except TypeError as error:
        raise ValueError(f"reward {name!r}: {error}; given: {dict(options)}") from error


def _converted(
    name: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Convert `options` to the types of the function's parameters, as for keys with a type."""
    hints: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # annotations may be for type checkers only
        parameters = inspect.signature(function, eval_str=True).parameters
        hints = {key: parameter.annotation for key, parameter in parameters.items()}
    return {
        key: convert(hints.get(key, Any), value, f"reward {name!r}: {key}")
        for key, value in options.items()
    }


def rewards_table() -> str:
    """List each reward with its description and options, for --help."""
    lines = ["rewards, as `reward: NAME` or `reward: {name: NAME, OPTION: value}`:"]
    for name, reward in REWARDS.items():
        words = " ".join(str(reward.__doc__).split("\n\n")[0].split())
        options = ", ".join(inspect.signature(reward).parameters)
        text = f"{words} Options: {options}." if options else words
        lines.append(
            textwrap.fill(text, 100, initial_indent=f"  {name:8}", subsequent_indent=" " * 10)
        )
    return "\n".join([*lines, "  package.module:function, or {sum: [{reward: ..., weight: ...}]}"])
