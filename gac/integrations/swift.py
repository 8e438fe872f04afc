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

from gac.config import choose
from gac.methods import DEFAULT, METHODS
from gac.mixer import Mixer, refuse
from gac.models.head import attach_head
from gac.rows import Row

from .hf_trainer import StepMixin, base_model, unsupported_options

METHOD_ENV = "GAC_METHOD"  # an environment variable: swift's command line cannot be extended


class GACGRPOTrainer(StepMixin, GRPOTrainer):
    """swift's GRPOTrainer with the CHORD dataset as demonstrations.

    Uses `chord_sft_per_device_train_batch_size` demonstrations per process and micro-batch. The
    environment variable GAC_METHOD gives the method as JSON: a name, or a mapping with its name and
    fields.
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
        self.observe_rollouts(mask, grpo_batch.advantages, ref)
        # Trainer divides the returned loss by the number of micro-batches
        micro_batches = self.current_gradient_accumulation_steps
        loss = self.mixer.weight_rollout_loss(rollout_loss / micro_batches)
        loss = loss + self.mixer.weight_demo_loss(self._demo_loss(model))
        self.end_micro_batch()
        return micro_batches * loss, metrics

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
