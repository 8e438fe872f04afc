"""Multi-objective weights for two objectives, always in the order (SFT, RL).

Everything is a pure function of a few scalars, so sharded gradients need only one small all-reduce.
The update direction is w_s g_s + w_r g_r; the weights may be negative or sum to more than 1, so
apply them to gradients, not to losses. `None` means that an input was not finite: skip the step.
"""

from .gram import Gram, Weights, cross_gram, with_unit_rl
from .gram_steps import GradNormState, gradnorm_step, moco_step
from .gram_weights import aligned_mtl, cagrad, mgda, nash_mtl, pcgrad, sdmgrad
from .loss_steps import (
    DWAState,
    FAMOState,
    dwa_step,
    dwa_weights,
    famo_step,
    famo_weights,
    uncertainty_step,
    uncertainty_weights,
)

__all__ = [
    "DWAState",
    "FAMOState",
    "GradNormState",
    "Gram",
    "Weights",
    "aligned_mtl",
    "cagrad",
    "cross_gram",
    "dwa_step",
    "dwa_weights",
    "famo_step",
    "famo_weights",
    "gradnorm_step",
    "mgda",
    "moco_step",
    "nash_mtl",
    "pcgrad",
    "sdmgrad",
    "uncertainty_step",
    "uncertainty_weights",
    "with_unit_rl",
]
