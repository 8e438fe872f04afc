"""Methods that train on demonstrations only, or first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from gac.fields import Count, Decay, Natural, NonNegative, Share
from gac.types import Mix, Observation, Sampling, State, StepNeeds
from gac_kernels import DemoWeight, LossSpec

from .base import Loss, Method, TokenWeighted, preset
from .token_view import TokenView


@dataclass(frozen=True)
class DemosOnly(Method, family="single signal"):
    """Base class of the methods without rollouts."""

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(rollouts=False)

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(1.0)


@dataclass(frozen=True)
class SFT(DemosOnly, TokenWeighted, name="sft", source="the paper, section 4.1"):
    """Cross-entropy on the demonstrations; no rollouts."""


DFT = preset(
    SFT,
    "dft",
    "SFT with each token weighted by its own probability p, which is not differentiated.",
    source="arXiv 2508.05629",
    weight=DemoWeight.P,
)


@dataclass(frozen=True)
class SFTBest(SFT, name="sft-best", source="the paper, appendix H (SFT variants)", keeps_best=True):
    """SFT for three epochs on 5000 demonstrations; keeps the weights of the best evaluation."""

    examples: Count = 5000
    """Number of demonstrations, taken from the start of the set."""
    epochs: Count = 3
    """Number of passes over these examples. The run ends after the last one, even if `steps` is not
    reached."""

    def sampling(self, completions: int) -> Sampling:
        return Sampling(limit_demos=self.examples, epochs=self.epochs)


@dataclass(frozen=True)
class SFTLight(SFTBest, name="sft-light", keeps_best=False):
    """SFT for one epoch on 1000 demonstrations, stopped early when the loss stops falling.

    In a single epoch every batch is unseen, so its loss before the update is a validation loss.
    Training stops when the moving average of this loss has not fallen for `patience` steps.
    """

    examples: Count = 1000
    """Number of demonstrations, taken from the start of the set."""
    epochs: Count = 1
    """Number of passes over these examples. The run ends after the last one, even if `steps` is not
    reached."""
    patience: Count = 5
    """Number of steps without a lower average loss before training stops."""
    decay: Decay = 0.7
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


@dataclass(frozen=True)
class ASFT(
    DemosOnly,
    name="asft",
    source="arXiv 2509.23753",
    cost="reference forward pass on the demonstrations, full-vocabulary KL",
):
    """Weights demonstration tokens by p; penalizes the full-vocabulary KL to the initial policy."""

    kl_weight: NonNegative = 0.1
    """Weight of the KL; the default of the released code."""
    kl_direction: Literal["forward", "reverse"] = "forward"
    """forward: KL(reference || policy), as in the released code; reverse: as in the publication."""

    def loss(self, base: LossSpec) -> Loss:
        return Loss(base, token=self.token_loss, reference=True)

    def token_loss(self, tokens: TokenView) -> torch.Tensor:
        """[N] loss of each token."""
        weighted = -tokens.logps * tokens.logps.detach().exp()
        return weighted + self.kl_weight * tokens.vocabulary_kl(self.kl_direction == "forward")


@dataclass(frozen=True)
class SFTThenRL(
    TokenWeighted,
    name="sft-then-rl",
    family="single signal",
    source="the paper, section 4.1 (SFT-best + RL)",
):
    """Only demonstrations for some steps, then rollouts, with or without demonstrations.

    The optimizer keeps its state.
    """

    sft_steps: Natural = 400
    """Number of SFT steps before RL starts."""
    mu: Share = 0.0
    """Weight of the demonstrations afterwards, in [0, 1]."""

    def needs(self, step: int) -> StepNeeds:
        sft = step < self.sft_steps
        return StepNeeds(rollouts=not sft, demos=sft or self.mu > 0)

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(1.0 if last.step < self.sft_steps else self.mu)
