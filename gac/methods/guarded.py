"""Constant mu with an alarm: protects against demonstrations that turn bad, at no extra cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gac.control.alarm import Alarm, AlarmState, alarm_message, is_suspect
from gac.errors import require

from .base import Mix, Observation, State
from .constant import Constant
from .preset import preset


@dataclass(frozen=True)
class Guarded(Constant):
    """Constant mu; 0 from a lasting rise of the demonstration loss until the loss has returned."""

    name: ClassVar[str] = "guarded"
    family: ClassVar[str] = "noise-aware"
    source: ClassVar[str] = "docs/controller.md"

    mu: float = 0.4
    """Weight of the demonstrations while the alarm is off, in [0, 1]."""
    mu_suspect: float = 0.0
    """Weight of the demonstrations while the alarm is on, in [0, 1]."""
    alarm: Alarm = Alarm()
    """Detects lasting rises of the demonstration loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.mu_suspect <= 1, "mu_suspect", self.mu_suspect, "a number in [0, 1]")

    def init(self) -> State:
        return {"alarm": None}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        before = None if state["alarm"] is None else AlarmState.of(state["alarm"])
        alarm, _ = self.alarm.update(before, last.demo_loss, last.demo_losses)
        plain = None if alarm is None else alarm.to_plain()
        return {"alarm": plain}, Mix(self.mu_suspect if is_suspect(plain) else self.mu)

    def log_message(self, before: State, after: State) -> str | None:
        return alarm_message(before["alarm"], after["alarm"])

    def report(self, state: State) -> dict[str, float | None]:
        return {"demos_suspect": float(is_suspect(state["alarm"]))}


GuardedProbing = preset(
    Guarded,
    "guarded-probing",
    "guarded that keeps a small share of suspect demonstrations: if the policy learns them easily, "
    "they are used again.",
    mu_suspect=0.02,
)
