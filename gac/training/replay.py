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
from gac.training.run_config import TrainConfig
from gac.training.step import Step

from . import skipped


def replay(path: Path) -> dict[str, Any]:
    """Recompute the step saved at `path`, in one process.

    Returns the recorded values, the recomputed values, and the rows whose loss or gradient is not
    finite.
    """
    kept, weights = skipped.load(path)
    compute = Recompute(load(TrainConfig, path.parents[1] / "config.yaml"), kept, weights)
    again = compute(kept.step)
    alone = [compute(dataclasses.replace(kept.step, rows=(row,))) for row in kept.step.rows]
    culprits = [
        {
            "row": i,
            "demonstration": row.is_demo,
            "advantage": row.advantage,
            **found,
            "text": compute.tokenizer.decode(list(row.ids)),
        }
        for i, (row, found) in enumerate(zip(kept.step.rows, alone, strict=True))
        if not all(map(math.isfinite, found.values()))
    ]
    recorded = {
        "step": kept.step.number,
        "fault": kept.fault,
        "grad_norm": kept.norm,
        "rollout_loss": kept.losses.rollout,
        "demo_loss": kept.losses.demo,
    }
    return {"recorded": recorded, "again": again, "culprits": culprits}


class Recompute:
    """Recomputes gradients under the weights of a skipped step; loads only the models of the run."""

    def __init__(self, config: TrainConfig, kept: skipped.SkippedStep, weights: Path) -> None:
        needs, self.weights = kept.step.needs, kept.weights
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
        found = self.gradients(step)
        if found.parts:
            found.parts.combine_pair(self.weights or step.mix.pair, step.mix)
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        self.model.zero_grad(set_to_none=True)
        return {
            "grad_norm": float(norm),
            "rollout_loss": found.losses.rollout,
            "demo_loss": found.losses.demo,
        }
