"""Shared code for trainers built on transformers' Trainer and TRL's GRPO."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from gac.mixer import Mixer, rollout_moments
from gac.models.head import run_head
from gac.rows import Row
from gac_kernels import LossOutput

from .demonstrations import demo_norm

if TYPE_CHECKING:
    from typing import Any as Trainer  # for type checkers: the mixin uses attributes of its host
else:
    Trainer = object


class StepMixin(Trainer):
    """Manages the step's demonstrations, the log and the checkpoints of a trainer."""

    mixer: Mixer
    _step_demos: Any = None  # demonstrations of the current step
    _micro_batch: int  # number of micro-batches so far in the current step
    _rollout_scores: tuple[Tensor, Tensor | None] | None = None  # log-probs and entropy

    def begin_step(self, pick: Callable[[list[int]], Sequence[Any]]) -> None:
        """Draw the step's demonstrations in its first micro-batch; `pick` maps indices to rows."""
        if self._step_demos is None:
            self._step_demos, self._micro_batch = pick(self.mixer.draw()), 0

    def local_demos(self) -> Sequence[Any] | None:
        """This rank's demonstrations in this micro-batch, or None if no rank has any.

        An empty list still requires a forward pass: sharded weights need every rank.
        """
        assert self._step_demos is not None
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        first = self._micro_batch * ranks
        if first >= len(self._step_demos):
            return None
        return self._step_demos[first + rank :: ranks * self.current_gradient_accumulation_steps]

    def end_micro_batch(self) -> None:
        """End the micro-batch; after the last one, end the step and log its metrics."""
        self._micro_batch += 1
        if self.accelerator.sync_gradients:
            if self.mixer.final:
                self.control.should_training_stop = True
            for name, value in self.mixer.close().items():
                self._metrics["train"][f"gac/{name}"].append(value)
            self._step_demos = None

    def score_demos(
        self,
        model: torch.nn.Module,
        inputs: Mapping[str, Tensor | None],
        targets: Tensor,
        rows: list[Row],
    ) -> LossOutput:
        """Compute this rank's demonstration term of the micro-batch and observe its statistics.

        Summing over micro-batches and averaging over ranks gives the step's loss.

        Args:
            model: the policy, possibly wrapped, with `attach_head`.
            inputs: arguments of the model.
            targets: int64 [B, T], shifted; -100 = no loss.
            rows: all demonstrations of the step; only their numbers of tokens are read.
        """
        head = run_head(model, **inputs)
        if head.hidden is not None and head.weight is not None and head.autocast is None:
            # with TRL's cast_lm_head_to_fp32, the head has higher precision than the hidden states
            head = replace(head, hidden=head.hidden.to(head.weight.dtype))
        ones, spec = torch.ones(len(targets)), self.mixer.spec
        norm = demo_norm(rows, spec, self.accelerator.num_processes)
        batch = targets, ones, ones.bool()
        out = head.loss(*batch, mu=1.0, spec=spec, demo_norm=norm)
        self.mixer.observe(out.moments)
        return out

    def observe_rollouts(self, mask: Tensor, advantages: Tensor, ref: Tensor | None) -> None:
        """Give the mixer the statistics of the last scored rollouts; see `rollout_moments`."""
        assert self._rollout_scores is not None
        (logps, entropy), self._rollout_scores = self._rollout_scores, None
        self.mixer.observe(rollout_moments(logps, mask, advantages, entropy=entropy, ref_logps=ref))

    def _get_per_token_logps_and_entropies(self, *args: Any, **keywords: Any) -> Any:
        scores = super()._get_per_token_logps_and_entropies(*args, **keywords)
        # only the policy's log-probs have gradients, not those of the old policy or the reference
        if torch.is_grad_enabled():
            self._rollout_scores = scores[:2]
        return scores

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            self.mixer.save(Path(self._get_output_dir(trial=trial)) / folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        # swift can load only the weights from a checkpoint and otherwise start fresh
        if checkpoint is not None and not getattr(self.args, "resume_only_model", False):
            self.mixer.load(checkpoint)


def base_model(trainer: Any) -> Any:
    """The transformers model inside accelerate's and peft's wrappers."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def unsupported_options(trainer: Any) -> dict[str, tuple[bool, str]]:
    """Unsupported transformers and accelerate options: name -> (whether it is set, the fix)."""
    args, accelerator = trainer.args, trainer.accelerator
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    parallel = getattr(accelerator, "parallelism_config", None)
    adapters = (getattr(trainer.model, "peft_config", None) or {}).values()
    checkpointing = args.gradient_checkpointing_kwargs or {}
    return {
        "deepspeed": (
            plugin is not None and plugin.zero_stage == 3,
            "ZeRO-3 partitions the head's weight: use ZeRO-2 or FSDP2",
        ),
        "parallelism_config": (
            parallel is not None and parallel.non_data_parallel_size > 1,
            "tensor, context and sequence parallelism are not supported",
        ),
        "peft_config": (
            any(adapter.is_prompt_learning for adapter in adapters),
            "virtual tokens would misalign the demonstrations: use LoRA",
        ),
        "torch_compile": (args.torch_compile, "set it to False"),
        "gradient_checkpointing_kwargs": (
            args.gradient_checkpointing and checkpointing.get("use_reentrant", False),
            "reentrant checkpointing allows one forward per backward: set use_reentrant to False",
        ),
    }
