"""SFT-light and SFT-best: SFT on so many demonstrations for so many epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from gac.rollouts.plan import Sampling

from .base import Mix, Observation, State
from .sft import SFT


@dataclass(frozen=True)
class SFTBest(SFT):
    """SFT for three epochs of 5000 demonstrations; the best evaluation's weights are kept."""

    name: ClassVar[str] = "sft-best"
    source: ClassVar[str] = "the paper, appendix H (SFT variants)"
    keeps_best: ClassVar[bool] = True

    examples: int = 5000
    """Demonstrations used, the first ones of the set."""
    epochs: int = 3
    """Passes over them; the run ends there if its `steps` have not run out."""

    def __post_init__(self) -> None:
        for name in ("examples", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: use a number >= 1")

    def sampling(self, completions: int) -> Sampling:
        return Sampling(limit_demos=self.examples, epochs=self.epochs)


@dataclass(frozen=True)
class SFTLight(SFTBest):
    """SFT for one epoch of 1000 demonstrations, stopped early where the loss stops falling.

    In a single epoch every batch is new to the model, so that its loss before the update is a
    validation loss; a moving average of it that has not fallen for `patience` steps is a plateau.
    """

    name: ClassVar[str] = "sft-light"
    keeps_best: ClassVar[bool] = False

    examples: int = 1000
    """Demonstrations used, the first ones of the set."""
    epochs: int = 1
    """Passes over them; the run ends there if its `steps` have not run out."""
    patience: int = 5
    """Steps without a lower average loss after which training stops."""
    decay: float = 0.7
    """Decay of the moving average of the loss, per step."""

    def init(self) -> State:
        return {"average": None, "best": None, "since": 0}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        loss = last.demo_loss
        if loss is None or not math.isfinite(loss):
            return state, Mix(1.0, final=state["since"] >= self.patience)
        old, best = state["average"], state["best"]
        average = loss if old is None else self.decay * old + (1 - self.decay) * loss
        better = best is None or average < best
        since = 0 if better else state["since"] + 1
        after = {"average": average, "best": average if better else best, "since": since}
        return after, Mix(1.0, final=since >= self.patience)
