"""Turns a step's measurements into its metrics.jsonl row and the method's observation."""

from __future__ import annotations

import math
from itertools import compress
from typing import Any

import torch

from gac.control.term_pair import TermPair
from gac.methods import Observation
from gac.methods.base import demo_losses

from .step import Measured, Step, Update


def observe(
    step: Step, measured: Measured, update: Update, losses_after: TermPair | None = None
) -> tuple[dict[str, Any], Observation]:
    """The metrics row of a step, and the observation from which the method sets the next `Mix`.

    losses_after: the losses of the step after the update, if the method needs them. In the row,
        None means "not measured".
    """
    counts, rewards, moments, losses = step.counts, step.rewards, measured.moments, measured.losses
    scalars = torch.stack([moments.kl, moments.entropy, moments.clip_fraction])
    kl, entropy, clip_fraction = scalars.tolist()  # one device-to-host copy
    kl = kl if measured.kl is None else measured.kl
    row: dict[str, Any] = {
        "step": step.number + 1,
        "mu": update.mix.mu,
        "mu_star": None,
        "prior": None,
        "alpha": None,
        "kl": kl if step.needs.kl and rewards.number else None,
        **moments.signals(step.needs.trim)._asdict(),
        # a term without rows is 0, which is not a measurement
        "rollout_loss": losses.rollout if counts.rollouts else None,
        "demo_loss": losses.demo if counts.demos else None,
        "reward_mean": rewards.mean,
        "entropy": entropy,
        "clip_fraction": clip_fraction if counts.rollouts else None,
        "completions/mean_length": counts.rollout_tokens / counts.rollouts
        if counts.rollouts
        else None,
        "grad_norm": update.norm,
        "tokens": int(counts.tokens),
        "lr": update.lr,
    }
    sources = measured.sources
    if sources is not None:
        sources = tuple(compress(sources, moments.demo_nll.isfinite().tolist()))
    observation = Observation(
        step.number + 1,
        reward_variance=rewards.variance,
        evidence=measured.evidence,
        losses_before=losses,
        losses_after=losses_after,
        demo_losses=demo_losses(moments),
        demo_sources=sources,
        **{
            key: row[key]
            for key in ("kl", "entropy", "reward_mean", "rollout_loss", "demo_loss", "lr")
        },
    )
    for source, values in observation.losses_by_source().items():
        row[f"demo_nll/{source}"] = math.fsum(values) / len(values)
    if not update.applied:  # measurements of a skipped step must not influence the next one
        return row, Observation(step.number + 1)
    return row, observation
