"""The configuration of one training run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from gac.config import Choice, ConfigError, dump, load
from gac.data import DataConfig
from gac.evaluation.task import EvalSettings
from gac.faults.guard import GuardConfig
from gac.methods import METHODS, Method
from gac.model import ModelConfig
from gac.parallel.setup import ParallelConfig
from gac.rewards.noise import RewardNoise
from gac.rollouts.generation import RolloutConfig
from gac.training.optim import OptimConfig
from gac_kernels import LossSpec


def restated(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """A configuration that an earlier version dumped, as this one does; unknown keys: as it is."""
    method = saved.get("method")
    if isinstance(method, Mapping) and "gate" in method and "alarm" not in method:
        saved = {**saved, "method": {**method, "alarm": None}}  # gates were without one
    try:
        return dump(load(TrainConfig, saved))
    except ConfigError:
        return saved


def _methods() -> dict[str, type[Method]]:
    return METHODS


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run. Everything is written to `out`, which is all that resuming needs."""

    out: str = "runs/gac"
    """The run directory."""
    name: str | None = None
    """What the report calls this run; null: the method's name."""
    model: ModelConfig = ModelConfig()
    """The model and how it is held."""
    method: Annotated[Method, Choice(_methods, lambda method: method.family)] = METHODS[
        "gac-gated"
    ]()
    """`name` and the fields of that method, e.g. {name: constant, mu: 0.3}; see `gac methods`."""
    data: DataConfig = DataConfig()
    """Prompts to sample on, and demonstrations."""
    reward: Any = "math"
    """How responses are scored: math, exact, choice, format, code, package.module:function, or a
    mapping with a `name` and its options, or a `sum` of several."""
    reward_noise: RewardNoise | None = None
    """Wrong rewards in training, for experiments: {rate: 0.35, start: 64}."""
    rollouts: RolloutConfig = RolloutConfig()
    """How the policy is sampled."""
    loss: LossSpec = LossSpec()
    """Clip, KL, entropy and reductions; a method may override its own part."""
    optim: OptimConfig = OptimConfig()
    """AdamW and its schedule."""
    steps: int = 800
    """Optimiser steps."""
    demo_batch: int = 64
    """Demonstrations per optimiser step, over all ranks."""
    micro_batch: int | None = None
    """Rows per forward and backward; null: all of a rank's rows of one kind at once."""
    micro_tokens: int | None = None
    """Tokens per forward and backward, instead of `micro_batch`: rows of any lengths lie end to
    end, without padding, each attending to itself alone. null: rows padded to the longest. Flash
    attention, and sdpa on a CPU, cost what the rows cost; eager, and sdpa on a GPU, cost the square
    of this number, so keep it low there."""
    eval: EvalSettings = EvalSettings()
    """Evaluation during and after training."""
    monitor_kl_every: int = 0
    """Steps between measurements of the KL to the reference policy if nothing needs it; 0: none."""
    kl_rows: int | None = None
    """Rollouts per step, over all ranks, on which the KL to the reference policy is measured where
    it is not part of the loss; null: all of them."""
    checkpoint_every: int = 100
    """Optimiser steps between checkpoints."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept, beside the best: the most accurate of those whose step was
    evaluated too (`gac export --step best`), so all evaluations count if `checkpoint_every` divides
    `eval.every`. A method that ends with its best weights saves at each better evaluation."""
    mixed_precision: str = "no"
    """"bf16": bfloat16 arithmetic on float32 weights, by accelerate; "no": the weights' dtype."""
    parallel: ParallelConfig = ParallelConfig()
    """Several processes: DDP or FSDP2."""
    guards: GuardConfig = GuardConfig()
    """When a step is skipped and when the run is given up."""
    trackers: tuple[str, ...] = ()
    """accelerate's trackers, e.g. [tensorboard, wandb]."""
    export: bool = True
    """Write the final model to out/model as a transformers folder."""
    seed: int = 0
    """Seed of everything."""

    def __post_init__(self) -> None:
        for name in ("steps", "demo_batch", "checkpoint_every", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: use a number >= 1")
        for name in ("micro_tokens", "kl_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value!r}: use a number >= 1, or null")
        if self.rollouts.engine == "paged" and self.parallel.mode == "fsdp":
            raise ValueError(
                "rollouts.engine='paged': it needs a whole model on each rank; use "
                "parallel.mode=ddp or rollouts.engine=generate"
            )
        if self.mixed_precision not in ("no", "bf16"):
            raise ValueError(f"mixed_precision={self.mixed_precision!r}: use no or bf16")
