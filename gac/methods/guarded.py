"""Constant mu with an alarm: protects against demonstrations that turn bad, at no extra cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gac.control.alarm import Alarm, AlarmState, alarm_message

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
        before = None if state["alarm"] is None else AlarmState.of(state["alarm"])
        alarm, _ = self.alarm.update(before, last.demo_loss)
        demos_suspect = alarm is not None and alarm.raised
        plain = None if alarm is None else list(map(float, alarm))
        return {"alarm": plain}, Mix(0.0 if demos_suspect else self.mu)

    def log_message(self, before: State, after: State) -> str | None:
        return alarm_message(before["alarm"], after["alarm"])

    def report(self, state: State) -> dict[str, float | None]:
        return {"demos_suspect": 0.0 if state["alarm"] is None else state["alarm"][-1]}
