"""Constant mu with an alarm: protects against demonstrations that turn bad, at no extra cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gac.control.alarm import Alarm, AlarmState, notice

from .base import Mix, Observation, State
from .constant import Constant


@dataclass(frozen=True)
class Guarded(Constant):
    """Constant mu, set to 0 after the demonstration loss jumps up, until it jumps down again."""

    name: ClassVar[str] = "guarded"
    family: ClassVar[str] = "noise-aware"
    source: ClassVar[str] = "docs/controller.md"

    mu: float = 0.4
    """Weight of the demonstrations while the alarm is off, in [0, 1]."""
    alarm: Alarm = Alarm()
    """Detects jumps of the demonstration loss."""

    def init(self) -> State:
        return {"alarm": None}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        known = None if state["alarm"] is None else AlarmState.of(state["alarm"])
        alarm, _ = self.alarm.next(known, last.demo_loss)
        doubted = alarm is not None and alarm.raised
        plain = None if alarm is None else list(map(float, alarm))
        return {"alarm": plain}, Mix(0.0 if doubted else self.mu)

    def notice(self, before: State, after: State) -> str | None:
        return notice(before["alarm"], after["alarm"])

    def report(self, state: State) -> dict[str, float | None]:
        return {"doubted": 0.0 if state["alarm"] is None else state["alarm"][-1]}
