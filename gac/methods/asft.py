"""ASFT: DFT anchored to the initial policy by a full-vocabulary KL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from .base import Method, Mix, Observation, State

if TYPE_CHECKING:
    from gac.training.token_loss import TokenView


@dataclass(frozen=True)
class ASFT(Method):
    """Demonstration tokens weigh p, plus a KL between the whole distributions of both policies."""

    name: ClassVar[str] = "asft"
    family: ClassVar[str] = "single signal"
    source: ClassVar[str] = "arXiv 2509.23753"
    cost: ClassVar[str] = "reference forward of the demonstrations, full-vocabulary KL"
    uses_rollouts: ClassVar[bool] = False
    uses_reference: ClassVar[bool] = True
    own_loss: ClassVar[bool] = True

    kl_weight: float = 0.1
    """Weight of the KL; the released program's default."""
    kl_direction: Literal["forward", "reverse"] = "forward"
    """forward: KL(reference || policy), as the released program; reverse: as the publication."""

    def mix(self, state: State, seen: Observation) -> tuple[State, Mix]:
        return state, Mix(1.0)

    def token_loss(self, tokens: TokenView) -> Tensor:
        weighted = -tokens.logps * tokens.logps.detach().exp()
        return weighted + self.kl_weight * tokens.vocabulary_kl(self.kl_direction == "forward")
