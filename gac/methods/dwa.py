"""DWA: gives more weight to the term whose loss falls more slowly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gac.control.solvers import DWAState, dwa_step, dwa_weights

from .base import Mix, Observation, State
from .loss_weights import LossWeights, from_plain, positive_losses, to_plain


@dataclass(frozen=True)
class DWA(LossWeights):
    """Softmax weights from the ratio of each loss's last two window means, newer over older."""

    name: ClassVar[str] = "dwa"
    source: ClassVar[str] = "arXiv 1803.10704"

    temperature: float = 2.0
    """Softmax temperature, > 0; the paper tries 1, 2 and 4."""
    window: int = 25
    """Number of steps per window; the publication uses an epoch."""

    def __post_init__(self) -> None:
        dwa_step(DWAState(), (1.0, 1.0), self.window)  # both raise on a value out of range
        dwa_weights(DWAState(), self.temperature)

    def init(self) -> State:
        return to_plain(DWAState())

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        before = from_plain(DWAState, state)
        losses = positive_losses(last)
        after = before if losses is None else dwa_step(before, losses, self.window) or before
        return to_plain(after), Mix.weights(*dwa_weights(after, self.temperature))
