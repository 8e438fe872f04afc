"""The inputs and outputs of a signal source.

A source is a frozen dataclass with two pure functions: `init() -> state` and
`read(evidence, state) -> (reading, state)`. States are plain JSON types.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from gac_kernels.contract import Signals, TokenMoments

from .alignment import Alignment
from .estimators import Corrections

State = dict[str, Any]  # plain JSON types


class SourceNeeds(NamedTuple):
    """Evidence that a signal source needs in addition to `Evidence.moments`."""

    gram: bool = False
    """`Evidence.gram`: micro-batch gradients, which cost memory."""
    bias: bool = False
    """`Evidence.bias_gram`, at the cost of two extra backward passes."""
    sketch: int = 0
    """`Evidence.sketches` of this size; 0: none."""

    @property
    def has_alignment(self) -> bool:
        """Whether the source also estimates the inner product of the two gradients."""
        return self.gram or self.sketch > 0


class Sketches(NamedTuple):
    """Sketches R G S^T of the gradients of the LM head weight.

    G is one unit's contribution to the gradient of its term. A unit is a demonstration, or all
    rollouts of a prompt.
    """

    demos: torch.Tensor
    """float64 [n, k k]."""
    rollouts: torch.Tensor
    """float64 [n, k k]."""


class Evidence(NamedTuple):
    """Measurements of a refresh step, summed over micro-batches and ranks."""

    step: int
    """Number of optimizer steps done so far."""
    moments: TokenMoments | None = None
    """Statistics of the step's tokens."""
    gram: torch.Tensor | None = None
    """[M_s + M_r, M_s + M_r] inner products of micro-batch gradients, SFT first; float64."""
    sft_count: int = 0
    """M_s, the number of SFT micro-batches in `gram`."""
    bias_gram: torch.Tensor | None = None
    """[4, 4] inner products as in `bias_moments`."""
    sketches: Sketches | None = None
    """Sketches of every unit in the step."""


class Reading(NamedTuple):
    """Output of a source: arguments for `gac.control.controller.step`."""

    signals: Signals
    corrections: Corrections | None = None
    alignment: Alignment | None = None


class SignalSource(Protocol):
    """Interface of a signal source; the method chooses it and the trainer provides the evidence."""

    @property
    def needs(self) -> SourceNeeds:
        """Evidence that `read` needs."""

    def init(self) -> State:
        """Return the state before the first reading."""

    def read(self, evidence: Evidence, state: State) -> tuple[Reading, State]:
        """Return the signals of this refresh and the new state; `state` is not modified."""
