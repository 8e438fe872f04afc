"""ASFT: DFT anchored to the initial policy by a full-vocabulary KL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from gac_kernels import LossSpec

from .base import Loss, Method, Mix, Observation, State, StepNeeds

if TYPE_CHECKING:
    from gac.methods.token_loss import TokenView


@dataclass(frozen=True)
class ASFT(Method):
    """Weights demonstration tokens by p; penalizes the full-vocabulary KL to the initial policy."""

    name: ClassVar[str] = "asft"
    family: ClassVar[str] = "single signal"
    source: ClassVar[str] = "arXiv 2509.23753"
    cost: ClassVar[str] = "reference forward pass on the demonstrations, full-vocabulary KL"

    kl_weight: float = 0.1
    """Weight of the KL; the default of the released code."""
    kl_direction: Literal["forward", "reverse"] = "forward"
    """forward: KL(reference || policy), as in the released code; reverse: as in the publication."""

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(rollouts=False)

    def loss(self, base: LossSpec) -> Loss:
        return Loss(base, token=self.token_loss, reference=True)

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(1.0)

    def token_loss(self, tokens: TokenView) -> torch.Tensor:
        """[N] loss of each token."""
        weighted = -tokens.logps * tokens.logps.detach().exp()
        return weighted + self.kl_weight * tokens.vocabulary_kl(self.kl_direction == "forward")
