"""CHORD: a fixed schedule of mu, a token weight phi, or both (arXiv 2508.11408)."""

from __future__ import annotations

from dataclasses import dataclass

from gac.control.schedules import MixSchedule, ScheduleChoice
from gac.types import Mix, Observation, State
from gac_kernels import DemoWeight

from .base import TokenWeighted, preset


@dataclass(frozen=True)
class CHORD(TokenWeighted, name="chord-mu", family="schedule", source="arXiv 2508.11408"):
    """mu follows a schedule; `weight` is the demonstrations' token weight. Defaults: CHORD-mu."""

    schedule: ScheduleChoice = MixSchedule.chord_mu()
    """mu as a function of the step: a ramp, or package.module:function."""

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(self.schedule(last.step))


@dataclass(frozen=True)
class CHORDPhi(CHORD, name="chord-phi"):
    """Constant mu = 0.1 with phi(p) = p (1 - p): the published CHORD-phi."""

    schedule: ScheduleChoice = MixSchedule.constant(0.1)
    """mu as a function of the step."""
    weight: DemoWeight = DemoWeight.PHI
    """Token weight of the demonstrations."""


@dataclass(frozen=True)
class CHORDBoth(CHORD, name="chord"):
    """The schedule combined with phi, called CHORD in the paper's tables."""

    weight: DemoWeight = DemoWeight.PHI
    """Token weight of the demonstrations."""


INTERPRETATION = "our reading of an undefined schedule"

HPCD = preset(
    CHORD,
    "hpcd",
    f"High peak, cosine decay: {INTERPRETATION}.",
    source="the paper, figure 2 (HPCD; undefined)",
)

WCF = preset(
    CHORD,
    "wcf",
    f"Warm-up, cosine, floor: {INTERPRETATION}.",
    source="the paper, figure 2 (WCF; undefined)",
    schedule=MixSchedule.wcf(),
)
