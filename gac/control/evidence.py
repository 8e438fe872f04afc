"""What a source of signals is given, and what it returns.

A source is a frozen dataclass with two pure functions: `init() -> state` and
`read(evidence, state) -> (reading, state)`. States are plain JSON types.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from gac.pair import Pair
from gac_kernels.contract import Signals, TokenMoments

from .alignment import Alignment
from .estimators import Corrections

State = dict[str, Any]  # plain JSON types


class Wanted(NamedTuple):
    """What a source reads beside `Evidence.moments`."""

    gram: bool = False
    """`Evidence.gram`: micro-batch gradients, which cost memory."""
    bias: bool = False
    """`Evidence.bias_gram`: two more backward passes."""
    sketch: int = 0
    """`Evidence.sketches` of this size; 0: none."""
    norms: bool = False
    """`Evidence.norms`: gradients are reduced over ranks after every micro-batch."""

    @property
    def aligned(self) -> bool:
        """Whether the inner product of both gradients can be told from it."""
        return self.gram or self.sketch > 0 or self.norms


class Sketches(NamedTuple):
    """R G S^T of each unit's share G of the gradient of its term with respect to the head's weight.

    A unit is a demonstration, or all rollouts of a prompt.
    """

    demos: Tensor
    """float64 [n, k k]."""
    rollouts: Tensor
    """float64 [n, k k]."""


class Norms(NamedTuple):
    """How the accumulated gradient of both terms grows, micro-batch by micro-batch."""

    squares: Tensor
    """float64 [M]: its squared norm after each of M micro-batches."""
    progress: Tensor
    """float64 [M, 2]: the share of the demonstrations and of the rollouts that is in it."""
    weights: Pair
    """The weight of each term."""


class Evidence(NamedTuple):
    """What a refresh step has measured, summed over micro-batches and ranks."""

    step: int
    """Optimiser steps done so far."""
    moments: TokenMoments | None = None
    """Statistics of the step's tokens."""
    gram: Tensor | None = None
    """[M_s + M_r, M_s + M_r] inner products of micro-batch gradients, SFT first; float64."""
    sft_count: int = 0
    """M_s, the number of SFT micro-batches in `gram`."""
    bias_gram: Tensor | None = None
    """[4, 4] inner products as in `bias_moments`."""
    sketches: Sketches | None = None
    """Of every unit of the step."""
    norms: Norms | None = None
    """Of the running sum of the micro-batches' gradients."""


class Reading(NamedTuple):
    """What a source returns: arguments of `gac.control.controller.step`."""

    signals: Signals
    corrections: Corrections | None = None
    alignment: Alignment | None = None


class SignalSource(Protocol):
    """The interface of a source; a method names one and the trainer feeds it."""

    @property
    def wanted(self) -> Wanted:
        """What must be in the evidence."""

    def init(self) -> State:
        """State before the first reading."""

    def read(self, evidence: Evidence, state: State) -> tuple[Reading, State]:
        """Signals of this refresh, and the new state; `state` is not modified."""
