"""`gac replay`: recompute a skipped step, and each of its rows separately."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

from gac.config import load
from gac.faults import checkpoint
from gac.models.causal_lm import load_tokenizer
from gac.parallel import setup
from gac.training.policy import load_policy, load_reference, make_gradients
from gac.train_config import TrainConfig
from gac.training.step import Step

from . import skipped


def replay(path: Path) -> dict[str, Any]:
    """Recompute the step saved at `path`, in one process.

    Returns the recorded values, the recomputed values, and the rows whose loss or gradient is not
    finite.
    """
    saved, weights = skipped.load(path)
    compute = Recomputation(load(TrainConfig, path.parents[1] / "config.yaml"), saved, weights)
    recomputed = compute(saved.step)
    per_row = [compute(dataclasses.replace(saved.step, rows=(row,))) for row in saved.step.rows]
    culprits = [
        {
            "row": i,
            "demonstration": row.is_demo,
            "advantage": row.advantage,
            **values,
            "text": compute.tokenizer.decode(list(row.ids)),
        }
        for i, (row, values) in enumerate(zip(saved.step.rows, per_row, strict=True))
        if not all(map(math.isfinite, values.values()))
    ]
    recorded = {
        "step": saved.step.number,
        "fault": saved.fault,
        "grad_norm": saved.norm,
        "rollout_loss": saved.losses.rollout,
        "demo_loss": saved.losses.demo,
    }
    return {"recorded": recorded, "recomputed": recomputed, "culprits": culprits}


class Recomputation:
    """Recomputes gradients with the weights before a skipped step; loads only the run's models."""

    def __init__(self, config: TrainConfig, saved: skipped.SkippedStep, weights: Path) -> None:
        needs, self.weights = saved.step.needs, saved.weights
        self.tokenizer = load_tokenizer(config.model)
        accelerator = setup.make_accelerator(
            config.parallel, config.mixed_precision, (), config.out
        )
        self.model = load_policy(config, accelerator)
        reference = load_reference(config, accelerator, kl=needs.kl)
        self.gradients = make_gradients(
            config, accelerator, self.tokenizer, self.model, reference, needs
        )
        checkpoint.load_weights(
            weights, accelerator.unwrap_model(self.model), self.gradients.tracked
        )

    def __call__(self, step: Step) -> dict[str, float]:
        """Gradient norm and losses of a step."""
        measured = self.gradients(step)
        if measured.parts:
            measured.parts.combine_pair(self.weights or step.mix.pair, step.mix)
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        self.model.zero_grad(set_to_none=True)
        return {
            "grad_norm": float(norm),
            "rollout_loss": measured.losses.rollout,
            "demo_loss": measured.losses.demo,
        }
