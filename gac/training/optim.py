"""AdamW and its learning-rate schedule, a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from gac.errors import require, require_at_least, require_one_of

SCHEDULES = ("cosine", "linear", "constant")


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    lr: float = 1e-6
    """Peak learning rate."""
    schedule: str = "cosine"
    """After the warm-up: cosine, linear or constant."""
    warmup_steps: int = 10
    """Number of optimizer steps of linear warm-up from 0."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a fraction of the peak."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's beta coefficients."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """AdamW's weight decay, applied to matrices only."""
    max_grad_norm: float = 1.0
    """Maximum gradient norm; 0 disables clipping."""

    def __post_init__(self) -> None:
        require_one_of(SCHEDULES, self, "schedule")
        require(self.lr > 0, "lr", self.lr, "a number > 0")
        require_at_least(0, self, "warmup_steps", "weight_decay", "max_grad_norm", "eps")
        valid = all(0 <= beta < 1 for beta in self.betas)
        require(valid, "betas", self.betas, "two numbers in [0, 1)")


def make_optimizer(model: torch.nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; vectors (norms, biases) are not decayed."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps
    )


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Learning rate at optimizer step `step` (from 0) of `steps`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = min((step - config.warmup_steps) / max(steps - 1 - config.warmup_steps, 1), 1.0)
    shape = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1 - done
    low = config.lr * config.min_lr_ratio
    return low + (config.lr - low) * shape


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradient(params: Iterable[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Clip the gradient norm to `max_norm` (0: no clipping); returns the norm before clipping."""
    return torch.nn.utils.clip_grad_norm_(params, max_norm or math.inf)
