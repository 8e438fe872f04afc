"""The end of a step: its moments and losses become metrics, and the method chooses the next mix.

Both the trainer and `Mixer` end their steps here.
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
from gac.types import Evidence, KLEstimate, Mix, Observation, State, StepNeeds, TermPair
from gac_kernels import TokenMoments

logger = logging.getLogger(__name__)
LOW_WEIGHT = 0.07  # phi = p (1 - p) is at most 0.25, and about 0.1 in a pretrained model
UNKNOWN_LOSS = 2.0  # nats per token: the typical token has a probability below a seventh
NO_VARIANCE = 1e-12  # up to this variance a z-score is 0, as in `TokenMoments.signals`


@dataclass(frozen=True)
class StepResult:
    """Measurements of one optimizer step, over all ranks; None: not measured."""

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
    kl: KLEstimate | None = None
    """KL to the reference from some of the rollouts; None: `moments.kl`, from all."""
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
    demo_weight: float | None = None
    """Mean token weight of the demonstrations; None: all are 1, or not measured."""
    skipped: bool = False
    """Whether the update was skipped; the method then sees none of the measurements."""


def end_step(method: Method, state: State, result: StepResult) -> tuple[dict[str, Any], State, Mix]:
    """Turn the measurements of a step into metrics, and ask the method for the next mix.

    Args:
        method: the method.
        state: the method's state during the step; the method's own columns are read from it.
        result: the measurements of the step.

    Returns:
        The step's metrics, in which None means "not measured"; the method's new state; and the
        weights of the next step.
    """
    moments = result.moments
    scalars = torch.stack(
        [moments.kl, moments.entropy, moments.totals[5] / moments.totals[1], moments.clip_fraction]
    )
    kl, entropy, demo_entropy, clip_fraction = scalars.tolist()  # one device-to-host copy
    kl, kl_error = (kl, None) if result.kl is None else result.kl
    by_source = _by_source(result)
    row: dict[str, Any] = {
        "step": result.number + 1,
        "mu": result.mix.mu,
        "mu_star": None,
        "prior": None,
        "alpha": None,
        "kl": kl if result.has_kl else None,
        "kl_standard_error": kl_error if result.has_kl else None,
        **signal_columns(moments, result.needs.trim),
        "rollout_loss": result.rollout_loss,
        "demo_loss": result.demo_loss,
        "reward_mean": result.reward_mean,
        "entropy": entropy,
        "demo_weight": result.demo_weight,
        "demo_entropy": None if result.demo_loss is None else demo_entropy,
        "clip_fraction": None if result.rollout_loss is None else clip_fraction,
        **{f"demo_nll/{name}": math.fsum(own) / len(own) for name, own in by_source.items()},
    }
    last = Observation(row["step"])
    if not result.skipped:
        last = Observation(
            row["step"],
            kl=_finite(row["kl"]),
            entropy=_finite(entropy),
            reward_mean=_finite(result.reward_mean),
            reward_variance=_finite(result.reward_variance),
            rollout_loss=_finite(result.rollout_loss),
            demo_loss=_finite(result.demo_loss),
            evidence=result.evidence,
            losses_before=TermPair(result.demo_loss or 0.0, result.rollout_loss or 0.0),
            losses_after=result.losses_after,
            demo_losses=demo_losses(moments),
            lr=result.lr,
            losses_by_source=by_source,
        )
    if result.number == 0 and rank() == 0 and (advice := weight_advice(row, last.demo_losses)):
        logger.warning("step 1: %s", advice)
    after, mix = next_mix(method, state, last)
    return row | method.report(state), after, mix


def weight_advice(row: Mapping[str, Any], demo_losses: Sequence[float] | None) -> str | None:
    """Why the token weight of the demonstrations does not suit an untrained model, or None.

    The weights p and p (1 - p) are also small where a model already knows its demonstrations; the
    loss tells the two cases apart.
    """
    weight = row["demo_weight"]
    if weight is None or not demo_losses or weight >= LOW_WEIGHT:
        return None
    loss = math.fsum(demo_losses) / len(demo_losses)
    if loss < UNKNOWN_LOSS:
        return None
    return (
        f"the demonstrations have a mean token weight of {weight:.2g} and a loss of {loss:.2g} "
        "nats per token: method.weight=phi and p hardly teach what the model does not know at all; "
        "use method.weight=one for an untrained model"
    )


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
    demonstrations, there is only one signal. The controller sees the formula's value.

    trim: share of the demonstrations that is left out at each end, for `sft_variance`.
    """
    signals = moments.signals(trim)
    comparable = moments.demo_tokens > 0 and signals.rl_variance > NO_VARIANCE
    return {**signals._asdict(), "disagreement": signals.disagreement if comparable else None}


def demo_losses(moments: TokenMoments) -> tuple[float, ...] | None:
    """Compute `Observation.demo_losses` from the statistics of a step."""
    return tuple(moments.demo_nll[moments.demo_nll.isfinite()].tolist()) or None


def _by_source(result: StepResult) -> Mapping[str, Sequence[float]]:
    """The losses of each source's demonstrations; empty if the data name no sources."""
    by_source: dict[str, list[float]] = {}
    if not result.sources:
        return by_source
    for source, loss in zip(result.sources, result.moments.demo_nll.tolist(), strict=False):
        if source and math.isfinite(loss):  # `data.demos` used with `data.sources` has source ""
            by_source.setdefault(source, []).append(loss)
    return by_source


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
