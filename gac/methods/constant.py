"""Constant mu: the fixed mixture that most trainers offer, without and with an alarm."""

from __future__ import annotations

from dataclasses import dataclass

from gac.control.alarm import Alarm, alarm_message, is_suspect
from gac.fields import Share
from gac.types import Mix, Observation, State

from .base import OURS, TokenWeighted, preset


@dataclass(frozen=True)
class Constant(
    TokenWeighted, name="constant", family="schedule", source="the paper, appendix K (QCM)"
):
    """The same mu at every step; the paper's QCM is mu = 0.58."""

    mu: Share = 0.58
    """Weight of the demonstrations, in [0, 1]."""

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(self.mu)


@dataclass(frozen=True)
class ConstantAlarm(Constant, name="constant-alarm", family=OURS, source="docs/controller.md"):
    """Constant mu; almost 0 after a lasting rise in the demonstration loss, until it falls back.

    The few demonstrations that are used during an alarm are a probe: if the policy learns them
    easily, the alarm ends. If the data name sources (`data.source_field`), each source has its own
    alarm. mu is then the mean over the last step's demonstrations: `mu_suspect` for those of
    suspect sources, else `mu`.
    """

    mu: Share = 0.4
    """Weight of the demonstrations while the alarm is off, in [0, 1]."""
    mu_suspect: Share = 0.02
    """Weight of the demonstrations while the alarm is on, in [0, 1]."""
    alarm: Alarm = Alarm()
    """Detects lasting rises in the demonstration loss."""

    def init(self) -> State:
        return {"alarm": None}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        by_source, alarms = last.losses_by_source, dict(state.get("sources", {}))
        for source, losses in by_source.items():
            alarms[source] = self.alarm.update_plain(alarms.get(source), None, losses)
        if by_source:
            suspect = [len(own) for source, own in by_source.items() if is_suspect(alarms[source])]
            share = sum(suspect) / sum(map(len, by_source.values()))
            return {"alarm": None, "sources": alarms, "suspect": share}, self._mix(share)
        if alarms:  # a skipped step
            return state, self._mix(state["suspect"])
        alarm = self.alarm.update_plain(state["alarm"], last.demo_loss, last.demo_losses)
        return {"alarm": alarm}, self._mix(float(is_suspect(alarm)))

    def _mix(self, share: float) -> Mix:
        """The mix if `share` of the last demonstrations came from suspect sources."""
        return Mix((1 - share) * self.mu + share * self.mu_suspect)

    def log_message(self, before: State, after: State) -> str | None:
        old, messages = before.get("sources", {}), [alarm_message(before["alarm"], after["alarm"])]
        for source, alarm in after.get("sources", {}).items():
            message = alarm_message(old.get(source), alarm)
            messages.append(message and f"source {source!r}: {message}")
        return "; ".join(filter(None, messages)) or None

    def report(self, state: State) -> dict[str, float | None]:
        return {"demos_suspect": state.get("suspect", float(is_suspect(state["alarm"])))}


Guarded = preset(
    ConstantAlarm,
    "guarded",
    "constant-alarm without probing: an alarm ends only when the loss falls back.",
    mu_suspect=0.0,
)
