"""Adaptive mixing in Trinity-RFT 0.6, enabled by one dotted path in its configuration::

    algorithm:
      algorithm_type: gac.integrations.trinity.GACAlgorithm

This algorithm replaces `mix_chord`: expert rows come from the auxiliary buffer, and mu is adaptive.
Each term is divided by its count over the whole training step, so the gradient does not depend on
the number of micro-batches or ranks. docs/integrations/others.md lists unsupported options.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from trinity.algorithm.algorithm import MIXCHORDAlgorithm
from trinity.algorithm.policy_loss_fn.policy_loss_fn import PolicyLossFn
from trinity.algorithm.sample_strategy.mix_sample_strategy import MixSampleStrategy
from trinity.common.experience import CustomField, Experience

from gac.config import choose
from gac.methods import DEFAULT, METHODS
from gac.mixer import Mixer, refuse, resolve_method
from gac_kernels import LossSpec, loss_from_logprobs

REDUCTIONS = {"token-mean": "token", "seq-mean-token-mean": "sequence"}
# Fields added to each row: counts over the whole training step, used as loss denominators.
COUNTS = ("rollouts", "rollout_tokens", "demos", "demo_tokens")


class GACAlgorithm(MIXCHORDAlgorithm):
    """Trinity's `mix_chord` with our loss and counts, without its KL and entropy losses."""

    @classmethod
    def default_config(cls) -> dict[str, Any]:
        return super().default_config() | {
            "policy_loss_fn": f"{__name__}.{GACPolicyLoss.__name__}",
            "sample_strategy": f"{__name__}.{GACSampleStrategy.__name__}",
            "kl_loss_fn": "none",
            "entropy_loss_fn": "none",
        }

    @classmethod
    def check_config(cls, config: Any) -> None:
        """Raise ValueError for unsupported settings, and set the loss's state folder."""
        super().check_config(config)
        algorithm, trainer = config.algorithm, config.trainer
        actor = ((trainer.trainer_config or {}).get("actor_rollout_ref") or {}).get("actor") or {}
        supported = {
            "algorithm.kl_loss_fn": (algorithm.kl_loss_fn, "none"),
            "algorithm.entropy_loss_fn": (algorithm.entropy_loss_fn, "none"),
            "trainer.ulysses_sequence_parallel_size": (trainer.ulysses_sequence_parallel_size, 1),
            "model.temperature": (config.model.temperature, 1.0),
            "actor.ppo_epochs": (actor.get("ppo_epochs"), 1),
            "actor.ppo_mini_batch_size": (
                actor.get("ppo_mini_batch_size"),
                config.buffer.train_batch_size,
            ),
        }
        options = {
            f"{name}={value!r}": (value not in (None, use), f"use {use!r}")
            for name, (value, use) in supported.items()
        }
        refuse("GACAlgorithm", options)
        if algorithm.policy_loss_fn_args is None:
            algorithm.policy_loss_fn_args = GACPolicyLoss.default_args()
        algorithm.policy_loss_fn_args.setdefault("state_dir", config.checkpoint_job_dir)


class GACSampleStrategy(MixSampleStrategy):
    """Trinity's mixed batches, with the step's counts added to each row."""

    async def sample(self, step: int) -> tuple[list[Experience], dict[str, Any], list[Any]]:
        rows, metrics, representatives = await super().sample(step)
        count_rows(rows)
        return rows, metrics, representatives


def count_rows(rows: list[Experience]) -> None:
    """Write the counts of the whole step into each row.

    Raises:
        ValueError: a demonstration has no completion tokens.
    """
    counts = dict.fromkeys(COUNTS, 0)
    for row in rows:
        expert = row.info["is_expert"]
        tokens = int(row.action_mask.sum())
        if expert and tokens == 0:
            raise ValueError("a demonstration has no completion tokens: remove it from the dataset")
        counts["demos" if expert else "rollouts"] += tokens > 0
        counts["demo_tokens" if expert else "rollout_tokens"] += tokens
    counts["rows"] = len(rows)
    fields = [CustomField(name, f"gac_{name}", torch.int64) for name in counts]
    for row in rows:
        row.info.update(counts)
        row.custom_fields = [*row.custom_fields, *fields]


class GACPolicyLoss(PolicyLossFn):
    """(1 - mu) times the rollouts' clipped policy loss plus mu times the demonstration loss.

    Args:
        method: a method name, or a mapping with its name and fields; see `gac.Mixer`.
        state_dir: folder in which rank 0 saves the controller after each step, as
            gac_<step>/gac.json.
        clip_range, clip_range_low, clip_range_high, clip_ratio_c: as in Trinity's ppo.
        kl_coef: weight of the k3 KL to the reference, on rollouts only.
        loss_agg_mode: "token-mean" or "seq-mean-token-mean", over the whole training step.
    """

    def __init__(
        self,
        backend: str = "verl",
        method: Any = DEFAULT,
        state_dir: str | None = None,
        clip_range: float | None = 0.2,
        clip_range_low: float | None = None,
        clip_range_high: float | None = None,
        clip_ratio_c: float | None = 3.0,
        kl_coef: float = 0.0,
        loss_agg_mode: str = "token-mean",
    ) -> None:
        super().__init__(backend=backend)
        if loss_agg_mode not in REDUCTIONS:
            raise ValueError(f"loss_agg_mode={loss_agg_mode!r}: use one of {', '.join(REDUCTIONS)}")
        if not state_dir:
            raise ValueError(
                "policy_loss_fn_args.state_dir is empty: set it to a folder for the controller's "
                "state"
            )
        self.method, self.state_dir = resolve_method(choose(METHODS, method)), Path(state_dir)
        self.rollout_options: dict[str, Any] = {
            "clip_low": clip_range if clip_range_low is None else clip_range_low,
            "clip_high": clip_range if clip_range_high is None else clip_range_high,
            "dual_clip": clip_ratio_c,
            "kl_coef": kl_coef,
            "rollout_reduction": REDUCTIONS[loss_agg_mode],
        }
        self.mixer: Mixer | None = None
        self.step = 0
        self.rows_done = 0  # number of the step's rows that this rank has processed

    def __call__(  # Trinity selects the fields to pass by argument name
        self,
        logprob: Tensor,
        old_logprob: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        expert_mask: Tensor,
        step: Tensor,
        ref_logprob: Tensor,
        gac_rollouts: Tensor,
        gac_rollout_tokens: Tensor,
        gac_demos: Tensor,
        gac_demo_tokens: Tensor,
        gac_rows: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, float]]:
        fields = (gac_rollouts, gac_rollout_tokens, gac_demos, gac_demo_tokens, gac_rows)
        rollouts, rollout_tokens, demos, demo_tokens, rows = (int(x[0]) for x in fields)
        mixer = self._mixer(int(step[0]), demos)
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        spec = LossSpec(
            demo_weight=mixer.spec.demo_weight,
            demo_shape=mixer.spec.demo_shape,
            **self.rollout_options,
        )
        count = rollout_tokens if spec.rollout_reduction == "token" else rollouts
        experts = expert_mask.bool()
        # CHORD gives expert rows the advantage 0, but SHAPED demonstrations need a weight of 1
        advantages = torch.where(experts[:, None], 1.0, advantages)
        out = loss_from_logprobs(
            logprob,
            torch.where(action_mask.bool(), 0, -100),
            advantages,
            experts,
            mu=mixer.mu,
            old_logps=old_logprob,
            ref_logps=ref_logprob,
            spec=spec,
            rollout_norm=count / ranks,
            demo_norm=demo_tokens / ranks,
        )
        loss = mixer.scale * out.loss
        if not torch.is_grad_enabled():
            return loss, {}
        mixer.observe(out.moments)
        mixer.weight_rollout_loss(out.rollout_loss)
        mixer.weight_demo_loss(out.demo_loss)
        self.rows_done += len(logprob)
        log = {"mu": mixer.mu}
        if self.rows_done == rows // ranks:  # the step's last micro-batch, on every rank
            log = self._close(rollout_tokens, demo_tokens)
        return loss, {f"gac/{name}": value for name, value in log.items()}

    def _mixer(self, step: int, demos: int) -> Mixer:
        """The mixer for this step, restored from the previous step after a restart."""
        if step != self.step:
            if self.rows_done:
                raise RuntimeError(
                    f"step {self.step} is incomplete: this rank processed {self.rows_done} rows; "
                    "every rank must process (rows in the step) / (number of ranks)"
                )
            if self.mixer is None:
                # Trinity's buffer orders the demonstrations; the mixer's order is not used
                self.mixer = Mixer(self.method, rows=1, batch=1)
                if step > 1:
                    self.mixer.load(self.state_dir / f"gac_{step - 1}")
            self.step = step
        assert self.mixer is not None
        self.mixer.batch = demos
        return self.mixer

    def _close(self, rollout_tokens: int, demo_tokens: int) -> dict[str, float]:
        """End the step on all ranks and save the controller for a restart."""
        assert self.mixer is not None
        log = self.mixer.close()
        tokens = log.pop("demo_tokens")
        if tokens != demo_tokens:
            raise RuntimeError(
                f"the optimizer step processed {tokens:.0f} of the training step's {demo_tokens} "
                "demonstration tokens: use one optimizer step per training step and no sequence "
                "parallelism"
            )
        if not dist.is_initialized() or dist.get_rank() == 0:
            folder = self.state_dir / f"gac_{self.step}"
            folder.mkdir(parents=True, exist_ok=True)
            self.mixer.save(folder)
            self._remove_unused()
        self.rows_done = 0
        return log

    def _remove_unused(self) -> None:
        """Remove the states from before Trinity's last checkpoint that belong to no checkpoint."""
        states, checkpoints = (
            {int(path.name.rpartition("_")[2]) for path in self.state_dir.glob(f"{name}_[0-9]*")}
            for name in ("gac", "global_step")
        )
        for step in states - checkpoints:
            if step < max(checkpoints, default=0):
                shutil.rmtree(self.state_dir / f"gac_{step}")

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"method": DEFAULT, "clip_range": 0.2, "loss_agg_mode": "token-mean"}
