"""`rollouts.function`: the user's own rollouts, such as several turns, tools or an environment."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from gac.config.imports import load_object, location
from gac.errors import RunError

if TYPE_CHECKING:
    from gac.data import Example


@dataclass(frozen=True)
class Rollout:
    """One rollout: what the policy read and wrote for one prompt, over all its turns."""

    prompt_ids: Sequence[int]
    """Token ids of the prompt."""
    completion_ids: Sequence[int]
    """Token ids after the prompt: the policy's tokens, and those of its environment or tools."""
    loss_mask: Sequence[int]
    """1 for each of `completion_ids` that the policy wrote, 0 for tokens that it only read, such as
    tool results: they have no loss and no part in the statistics."""
    logps: Sequence[float] | None = None
    """Log-probs of `completion_ids` in the engine that sampled them, nats; None: unknown. Used by
    `rollouts.correction`. Values where `loss_mask` is 0 are ignored."""
    reward: float | None = None
    """The reward; None: the configured reward scores the decoded `completion_ids`."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Added to `Example.extra` for the configured reward, e.g. the state of the environment."""

    def is_truncated(self, stops: Container[int], limit: int) -> bool:
        """Whether a limit ended the completion; its last turn may be the environment's."""
        ids, mask = self.completion_ids, self.loss_mask
        if len(ids) and ids[-1] in stops:
            return False
        return not len(mask) or bool(mask[-1]) or len(ids) >= limit


class RolloutFunction:
    """The function `package.module:function` that samples the rollouts of a run.

    It is called as `function(prompts, engine)` with a list of `Example`s, in which each prompt
    occurs `num_generations` times in a row, and returns one `Rollout` for each, in order.
    Completions are cut at `max_completion_length` tokens.
    """

    def __init__(self, name: str, key: str = "rollouts.function") -> None:
        self.where, self.function = f"{key}={name!r}", load_object(name, key)

    def __call__(self, prompts: Sequence[Example], engine: Any) -> list[Rollout]:
        """The rollouts, converted to tuples; `loss_mask` is () if every token has a loss.

        Raises:
            RunError: the function raised, or returned something else.
        """
        try:
            rollouts: Any = self.function(list(prompts), engine)
        except RunError:  # of the engine
            raise
        except Exception as error:  # user code may raise anything
            problem = f"{type(error).__name__}: {error}{location(error)}"
            raise RunError(f"{self.where}: {problem}") from error
        if not isinstance(rollouts, list | tuple) or len(rollouts) != len(prompts):
            size = f" of {len(rollouts)}" if isinstance(rollouts, list | tuple) else ""
            raise RunError(
                f"{self.where} returned a {type(rollouts).__name__}{size} for {len(prompts)} "
                "prompts: return a list with one Rollout per prompt, in order"
            )
        limit = engine.params.max_completion_length
        return [
            self._checked(i, rollout, engine.vocab_size, limit)
            for i, rollout in enumerate(rollouts)
        ]

    def _checked(self, i: int, rollout: Any, vocab_size: int, limit: int) -> Rollout:
        def require(valid: bool, name: str, value: Any, fix: str) -> None:
            if not valid:
                raise RunError(f"{self.where}: rollout {i} has {name}={value!r:.100}: {fix}")

        if not isinstance(rollout, Rollout):
            raise RunError(
                f"{self.where}: rollout {i} is a {type(rollout).__name__}: return "
                "gac.rollouts.Rollout objects"
            )

        def convert(name: str, kind: Callable[[Any], Any], fix: str) -> tuple[Any, ...]:
            value = getattr(rollout, name)
            try:
                return tuple(map(kind, value.tolist() if hasattr(value, "tolist") else value))
            except (TypeError, ValueError):
                raise RunError(
                    f"{self.where}: rollout {i} has {name}={value!r:.100}: {fix}"
                ) from None

        prompt, completion = (
            convert(name, operator.index, "give a list of token ids")
            for name in ("prompt_ids", "completion_ids")
        )
        for name, ids in (("prompt_ids", prompt), ("completion_ids", completion)):
            require(len(ids) > 0, name, ids, "give at least one token")
            bad = next((t for t in ids if not 0 <= t < vocab_size), None)
            fix = f"{bad} is not a token of the model, which has {vocab_size}"
            require(bad is None, name, ids, fix)
        size = len(completion)
        one_each = f"give one number for each of the {size} completion_ids"
        mask = convert("loss_mask", operator.index, "use a list of 0 and 1")
        require(len(mask) == size, "loss_mask", mask, one_each)
        require(set(mask) <= {0, 1}, "loss_mask", mask, "use 0 and 1")
        logps = None
        if rollout.logps is not None:
            logps = convert("logps", float, "give a list of numbers, or None")
            require(len(logps) == size, "logps", logps, one_each)
            own = [x for x, learned in zip(logps, mask, strict=True) if learned]
            require(all(x <= 0 for x in own), "logps", logps, "use log-probabilities, <= 0")
        reward = rollout.reward
        valid = reward is None or (isinstance(reward, Real) and math.isfinite(reward))
        require(valid, "reward", reward, "use a finite number, or None")
        extra = rollout.extra
        require(isinstance(extra, Mapping), "extra", extra, "use a dict")
        return replace(
            rollout,
            prompt_ids=prompt,
            completion_ids=completion[:limit],
            loss_mask=() if all(mask) else tuple(map(bool, mask[:limit])),
            logps=logps and logps[:limit],
        )
