"""The end of a step: from its moments and losses to its metrics, and to the mix of the next step.

gac's trainer and `Mixer` both end their steps here.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gac.collectives import rank
from gac.errors import require
from gac.imports import user_code
from gac.methods.base import Method
from gac.types import Evidence, Mix, Observation, State, StepNeeds, TermPair
from gac_kernels import TokenMoments

logger = logging.getLogger(__name__)
NO_VARIANCE = 1e-12  # at most: a z-score is 0, as in `TokenMoments.signals`


@dataclass(frozen=True)
class Turn:
    """What one optimizer step measured, over all ranks; None: not measured."""

    number: int
    """Index of the step, from 0."""
    mix: Mix
    """The weights with which the gradient was computed."""
    needs: StepNeeds
    """What the method required."""
    moments: TokenMoments
    """Statistics of the step's tokens."""
    rollout_loss: float | None
    """The reduced rollout loss; None: the step has no rollouts."""
    demo_loss: float | None
    """The reduced demonstration loss; None: the step has no demonstrations."""
    has_kl: bool = True
    """Whether the KL to the reference was measured."""
    kl: float | None = None
    """Mean KL over a subset of the rollouts; None: `moments.kl`, over all."""
    reward_mean: float | None = None
    """Mean reward of the rollouts."""
    reward_variance: float | None = None
    """Population variance of the rewards."""
    evidence: Evidence | None = None
    """Input of the signal source, if `StepNeeds.signals` is set."""
    losses_after: TermPair | None = None
    """The losses of the batch after the update, if `StepNeeds.losses_after` is set."""
    sources: Sequence[str] = ()
    """The source of each entry of `moments.demo_nll`, if `StepNeeds.sources` is set."""
    lr: float | None = None
    """Learning rate of the step."""
    skipped: bool = False
    """Whether the update was skipped: then the measurements do not reach the method."""


def end_step(method: Method, state: State, turn: Turn) -> tuple[dict[str, Any], State, Mix]:
    """End a step: what it measured becomes metrics, and the method's observation.

    Args:
        method: the method.
        state: the method's state during the step, with which its columns explain the step's mu.
        turn: the step.

    Returns:
        The step's metrics, in which None means "not measured"; the method's new state; and the
        weights of the next step.
    """
    moments = turn.moments
    scalars = torch.stack(
        [moments.kl, moments.entropy, moments.totals[5] / moments.totals[1], moments.clip_fraction]
    )
    kl, entropy, demo_entropy, clip_fraction = scalars.tolist()  # one device-to-host copy
    kl = kl if turn.kl is None else turn.kl
    by_source = _by_source(turn)
    row: dict[str, Any] = {
        "step": turn.number + 1,
        "mu": turn.mix.mu,
        "mu_star": None,
        "prior": None,
        "alpha": None,
        "kl": kl if turn.has_kl else None,
        **signal_columns(moments, turn.needs.trim),
        "rollout_loss": turn.rollout_loss,
        "demo_loss": turn.demo_loss,
        "reward_mean": turn.reward_mean,
        "entropy": entropy,
        "demo_entropy": None if turn.demo_loss is None else demo_entropy,
        "clip_fraction": None if turn.rollout_loss is None else clip_fraction,
        **{f"demo_nll/{name}": math.fsum(own) / len(own) for name, own in by_source.items()},
    }
    last = Observation(row["step"])
    if not turn.skipped:
        last = Observation(
            row["step"],
            kl=_finite(row["kl"]),
            entropy=_finite(entropy),
            reward_mean=_finite(turn.reward_mean),
            reward_variance=_finite(turn.reward_variance),
            rollout_loss=_finite(turn.rollout_loss),
            demo_loss=_finite(turn.demo_loss),
            evidence=turn.evidence,
            losses_before=TermPair(turn.demo_loss or 0.0, turn.rollout_loss or 0.0),
            losses_after=turn.losses_after,
            demo_losses=demo_losses(moments),
            lr=turn.lr,
            losses_by_source=by_source,
        )
    after, mix = next_mix(method, state, last)
    return row | method.report(state), after, mix


def next_mix(method: Method, state: State, last: Observation) -> tuple[State, Mix]:
    """Return the result of `method.mix`; rank 0 logs the method's message, if there is one.

    Raises RunError if a method from outside of this package fails or returns something else.
    """
    if type(method).__module__.startswith("gac."):
        after, mix = method.mix(state, last)
    else:
        with user_code(f"method {type(method).__qualname__!r}"):
            after, mix = method.mix(state, last)
            json.dumps(after)  # checkpoints contain it
            require(
                isinstance(mix, Mix) and 0 <= mix.mu <= 1, "mix", mix, "Mix(mu) with mu in [0, 1]"
            )
    message = method.log_message(state, after)
    if message is not None and rank() == 0:
        logger.warning("step %d: %s", last.step + 1, message)
    return after, mix


def signal_columns(moments: TokenMoments, trim: float) -> dict[str, float | None]:
    """The paper's three signals as metrics; None where nothing was measured.

    `TokenMoments.signals` sets a z-score without variance to 0, so a step in which all advantages
    are equal has a disagreement of 1, which says nothing about the two signals. Without
    demonstrations, there are no two signals. The controller sees the formula's value.

    trim: share of the demonstrations that is left out at each end, for `sft_variance`.
    """
    signals = moments.signals(trim)
    comparable = moments.demo_tokens > 0 and signals.rl_variance > NO_VARIANCE
    return {**signals._asdict(), "disagreement": signals.disagreement if comparable else None}


def demo_losses(moments: TokenMoments) -> tuple[float, ...] | None:
    """Compute `Observation.demo_losses` from the statistics of a step."""
    return tuple(moments.demo_nll[moments.demo_nll.isfinite()].tolist()) or None


def _by_source(turn: Turn) -> Mapping[str, Sequence[float]]:
    """The losses of each source's demonstrations; empty if the data name no sources."""
    by_source: dict[str, list[float]] = {}
    if not turn.sources:
        return by_source
    for source, loss in zip(turn.sources, turn.moments.demo_nll.tolist(), strict=False):
        if source and math.isfinite(loss):  # "": a row of `data.demos`, beside `data.sources`
            by_source.setdefault(source, []).append(loss)
    return by_source


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
