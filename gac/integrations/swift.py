"""Adaptive mixing in ms-swift 4.6.

Pass a plugin file with one line as --external_plugins::

    import gac.integrations.swift

GRPO then also trains on the demonstrations of --chord_sft_dataset with an adaptive weight,
replacing swift's CHORD. docs/integrations/others.md lists unsupported options.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from swift.rlhf_trainers import GRPOTrainer
from swift.trainers.trainer_factory import TrainerFactory
from swift.utils import to_device
from torch import Tensor

from gac.config import choose, load
from gac.errors import UserError
from gac.methods import DEFAULT, METHODS
from gac.methods.teacher import TeacherConfig
from gac.mixer import Mixer, refuse, teacher_term
from gac.models.head import attach_head
from gac.rows import Row

from .hf_trainer import StepMixin, base_model, unsupported_options

# environment variables: swift's command line cannot be extended
METHOD_ENV, TEACHER_ENV = "GAC_METHOD", "GAC_TEACHER"


class GACGRPOTrainer(StepMixin, GRPOTrainer):
    """swift's GRPOTrainer with the CHORD dataset as demonstrations.

    Uses `chord_sft_per_device_train_batch_size` demonstrations per process and micro-batch. The
    environment variable GAC_METHOD gives the method as JSON: a name, or a mapping with its name and
    fields. With a teacher of swift's, GAC_TEACHER gives its loss and weight, such as
    {"loss": "k2", "coef": 0.5}; without it, swift's own term stays in swift's loss.
    """

    def _prepare_chord_dataset(self) -> None:
        self.chord_sft_iterator = None  # disables swift's own CHORD loss
        if not self.chord_sft_dataset:
            raise ValueError("chord_sft_dataset is empty: set it to a dataset of demonstrations")
        if not self.args.chord_sft_per_device_train_batch_size:
            raise ValueError(
                "chord_sft_per_device_train_batch_size is not set: set it to the number of "
                "demonstrations per process and micro-batch"
            )
        refuse("gac.integrations.swift", _unsupported_options(self))
        slots = self.accelerator.num_processes * self.args.gradient_accumulation_steps
        self.mixer = Mixer(
            choose(METHODS, json.loads(os.environ.get(METHOD_ENV, f'"{DEFAULT}"')), METHOD_ENV),
            rows=len(self.chord_sft_dataset),
            batch=slots * self.args.chord_sft_per_device_train_batch_size,
            seed=self.args.seed,
            teacher=_teacher(self),
        )
        attach_head(base_model(self))

    def _compute_loss_and_metrics(
        self, model: torch.nn.Module, model_inputs: dict[str, Any], grpo_batch: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        rollout_loss, metrics = super()._compute_loss_and_metrics(model, model_inputs, grpo_batch)
        if not self.model.training:
            return rollout_loss, metrics
        self.begin_step(lambda indices: [self._demonstration(i) for i in indices])
        mask = grpo_batch.completion_mask
        if self.overlong_filter:
            mask = mask & ~grpo_batch.truncated_mask[:, None]
        ref = grpo_batch.ref_per_token_logps
        teacher_loss = self._teacher_loss(mask, grpo_batch)
        self.observe_rollouts(mask, grpo_batch.advantages, ref)
        # Trainer divides the returned loss by the number of micro-batches
        micro_batches = self.current_gradient_accumulation_steps
        loss = self.mixer.weight_rollout_loss(rollout_loss / micro_batches)
        loss = loss + self.mixer.weight_demo_loss(self._demo_loss(model))
        if teacher_loss is not None:
            loss = loss + self.mixer.weight_teacher_loss(teacher_loss / micro_batches)
        self.end_micro_batch()
        return micro_batches * loss, metrics

    def _teacher_loss(self, mask: Tensor, grpo_batch: Any) -> Tensor | None:
        """The mean over the micro-batch's tokens, from swift's log-probs of its teacher."""
        teacher = self.mixer.teacher
        if teacher is None:
            return None
        if grpo_batch.teacher_per_token_logps is None:
            raise ValueError(
                f"{TEACHER_ENV}: the batch has no teacher_per_token_logps: set --teacher_model or "
                "another teacher of swift's, or leave the variable out"
            )
        assert self._rollout_scores is not None
        logps, _ = self._rollout_scores
        return teacher_term(logps, mask, grpo_batch.teacher_per_token_logps, loss=teacher.loss)

    def _compute_loss_chunked(self, *args: Any, **keywords: Any) -> Tensor:
        raise ValueError("chunked micro-batches (dynamic_num_samples) are not supported")

    def _demonstration(self, index: int) -> dict[str, Any]:
        """One encoded row of the dataset."""
        row = self.chord_sft_dataset[index]
        if row.get("loss_scale") is not None:
            raise ValueError(
                "per-token loss_scale is not supported: use --loss_scale default or last_round"
            )
        if _num_targets(row) == 0:
            raise ValueError(f"chord_sft_dataset[{index}] has no completion tokens: remove the row")
        return row

    def _demo_loss(self, model: torch.nn.Module) -> Tensor:
        """This rank's demonstration loss for the micro-batch; see `score_demos`."""
        rows = self.local_demos()
        assert rows  # a step has `chord_sft_per_device_train_batch_size` for each, or more
        batch = to_device(self.template.data_collator(rows), self.accelerator.device)
        targets = batch.pop("labels").roll(-1, 1)
        targets[:, -1] = -100
        counts = [Row((0,) * _num_targets(row), 0, True) for row in self._step_demos]
        names = {"input_ids", "attention_mask", "position_ids"} & set(batch)
        inputs = {name: batch[name] for name in names}
        return self.score_demos(model, inputs, targets, counts).loss


def _teacher(trainer: Any) -> TeacherConfig | None:
    """The teacher's term that `TEACHER_ENV` describes, or None.

    Raises:
        ValueError: swift's loss has a term of the teacher as well, or the loss needs K tokens.
    """
    if TEACHER_ENV not in os.environ:
        return None
    try:
        teacher = load(TeacherConfig, {"loss": "k2", **json.loads(os.environ[TEACHER_ENV])})
    except (UserError, TypeError, ValueError) as error:
        raise ValueError(f"{TEACHER_ENV}={os.environ[TEACHER_ENV]!r}: {error}") from error
    if teacher.candidates is not None:
        raise ValueError(
            f"{TEACHER_ENV}: loss={teacher.loss!r}: swift scores the sampled tokens: use k2 or k3"
        )
    for name in ("teacher_kl_coef", "sdar_loss_coef", "advantage_reweight"):
        value = getattr(trainer.args, name, None)
        if value:
            fix = "leave it out" if isinstance(value, str) else "set it to 0"
            raise ValueError(
                f"{TEACHER_ENV}: {name}={value!r} adds the same teacher to swift's own loss: "
                f"{fix}, or unset the variable"
            )
    return teacher


def _num_targets(row: dict[str, Any]) -> int:
    """Number of tokens with a loss in an encoded row; the first token has no loss."""
    return sum(label != -100 for label in row["labels"][1:])


def _unsupported_options(trainer: Any) -> dict[str, tuple[bool, str]]:
    """Unsupported options: name -> (whether it is set, the fix)."""
    template, args = trainer.template, trainer.args
    return unsupported_options(trainer) | {
        "model": (trainer.is_multimodal, "images are not supported: use a text model"),
        "use_liger_kernel": (
            args.use_liger_kernel,
            "Liger's loss does not return log-probabilities: set it to False",
        ),
        "padding_free": (template.padding_free, "set it to False"),
        "sequence_parallel_size": (template.sequence_parallel_size > 1, "set it to 1"),
    }


TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.{GACGRPOTrainer.__name__}"
