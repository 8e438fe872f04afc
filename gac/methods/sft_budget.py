"""SFT-light and SFT-best: SFT on a fixed number of demonstrations for a fixed number of epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from gac.errors import require_at_least
from gac.rollouts.plan import Sampling

from .base import Mix, Observation, State
from .sft import SFT


@dataclass(frozen=True)
class SFTBest(SFT):
    """SFT for three epochs on 5000 demonstrations; keeps the weights of the best evaluation."""

    name: ClassVar[str] = "sft-best"
    source: ClassVar[str] = "the paper, appendix H (SFT variants)"
    keeps_best: ClassVar[bool] = True

    examples: int = 5000
    """Number of demonstrations, taken from the start of the set."""
    epochs: int = 3
    """Number of passes over them. The run ends after the last, even if `steps` is not reached."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "examples", "epochs")

    def sampling(self, completions: int) -> Sampling:
        return Sampling(limit_demos=self.examples, epochs=self.epochs)


@dataclass(frozen=True)
class SFTLight(SFTBest):
    """SFT for one epoch on 1000 demonstrations, stopped early when the loss stops falling.

    In a single epoch every batch is unseen, so its loss before the update is a validation loss.
    Training stops when the moving average of this loss has not fallen for `patience` steps.
    """

    name: ClassVar[str] = "sft-light"
    keeps_best: ClassVar[bool] = False

    examples: int = 1000
    """Number of demonstrations, taken from the start of the set."""
    epochs: int = 1
    """Number of passes over them. The run ends after the last, even if `steps` is not reached."""
    patience: int = 5
    """Number of steps without a lower average loss before training stops."""
    decay: float = 0.7
    """Decay of the moving average of the loss, per step."""

    def init(self) -> State:
        return {"average": None, "best": None, "steps_since_best": 0}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        loss = last.demo_loss
        if loss is None or not math.isfinite(loss):
            return state, Mix(1.0, final=state["steps_since_best"] >= self.patience)
        old, best = state["average"], state["best"]
        average = loss if old is None else self.decay * old + (1 - self.decay) * loss
        better = best is None or average < best
        steps = 0 if better else state["steps_since_best"] + 1
        new = {"average": average, "best": average if better else best, "steps_since_best": steps}
        return new, Mix(1.0, final=steps >= self.patience)
