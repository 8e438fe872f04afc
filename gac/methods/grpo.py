"""GRPO: the model's own rollouts only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import Method, Mix, Observation, State


@dataclass(frozen=True)
class GRPO(Method):
    """The clipped policy gradient with group-relative advantages; no demonstrations."""

    name: ClassVar[str] = "grpo"
    family: ClassVar[str] = "single signal"
    source: ClassVar[str] = "arXiv 2402.03300"
    uses_demos: ClassVar[bool] = False

    def mix(self, state: State, seen: Observation) -> tuple[State, Mix]:
        return state, Mix(0.0)
