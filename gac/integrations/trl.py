"""Adaptive mixing in TRL: `GACTrainer` is a `GRPOTrainer` that also trains on demonstrations.

loss = (1 - mu) * GRPOTrainer's own loss + mu * the demonstrations' loss, where mu is updated after
each optimizer step. Works with TRL 1.9.2 and later; docs/integrations/trl.md lists unsupported
options.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, ProcessorMixin
from trl import GRPOTrainer

from gac.control.controller import ControllerConfig
from gac.errors import is_count, require
from gac.methods import Method
from gac.methods.teacher import TeacherConfig
from gac.mixer import MEASURED, Mixer, refuse
from gac.models.head import attach_head, run_head
from gac.rows import collate
from gac_kernels.contract import IGNORE
from gac_kernels.heads.trl.grpo import FusedGRPOMixin, FusedLoss, Inexpressible
from gac_kernels.heads.trl.head import with_gradient

from .demonstrations import row_of, tokenized
from .hf_trainer import StepMixin, base_model, unsupported_options

__all__ = ["GACMixin", "GACTrainer"]

logger = logging.getLogger(__name__)


class GACMixin(StepMixin, FusedGRPOMixin):
    """Mixin that adds demonstrations to a trainer.

    List it before GRPOTrainer, or a subclass of it, among the bases. It adds five arguments and
    logs gac/mu, gac/mu_star, gac/alpha, gac/prior, gac/rollout_loss, gac/demo_loss,
    gac/sft_variance, gac/rl_variance, gac/disagreement and, with a reference model, gac/kl, with a
    teacher gac/teacher_loss.

    A teacher's loss on the rollouts is added in the pass of the fused loss, with a weight that does
    not depend on mu. Without a `teacher_model`, a subclass adds `teacher_logps` and, for K tokens,
    `teacher_ids` to the result of `_generate_and_score_completions`: [B, T], or [B, T, K] both, of
    the completions' tokens at the sampling temperature. Ids of -100 in a row: it has no teacher.

    Args:
        demo_dataset: a Dataset with prompt and completion (texts or messages), or messages.
        demo_batch: demonstrations per optimizer step, over all processes.
        controller: a ControllerConfig or a method, see `gac.Mixer`; None = the default method.
        teacher: the teacher's loss, its weight and K; None: the default one if there is a model.
        teacher_model: scores the rollouts, with the policy's tokenizer.

    Raises:
        TypeError: demo_dataset is not a Dataset.
        ValueError: a trainer option is not supported or does not fit the controller, or an argument
            is invalid.
    """

    _rewards: Tensor | None = None  # of this rank's part of the last rollouts
    _teacher_vocabulary: int  # number of the policy's tokens

    def __init__(
        self,
        *args: Any,
        demo_dataset: Dataset,
        demo_batch: int,
        controller: ControllerConfig | Method | None = None,
        teacher: TeacherConfig | None = None,
        teacher_model: PreTrainedModel | None = None,
        **keywords: Any,
    ) -> None:
        if not isinstance(demo_dataset, Dataset):
            raise TypeError(
                f"demo_dataset is a {type(demo_dataset).__name__}: use a datasets.Dataset"
            )
        require(
            is_count(demo_batch, 1), "demo_batch", demo_batch, "a number of demonstrations >= 1"
        )
        super().__init__(*args, **keywords)
        refuse("GACTrainer", _unsupported_options(self))
        self.mixer = Mixer(
            controller,
            rows=len(demo_dataset),
            batch=demo_batch,
            seed=self.args.seed,
            measures=MEASURED._replace(rewards=True),
            teacher=TeacherConfig() if teacher is None and teacher_model is not None else teacher,
        )
        self.teacher_model = self._prepared(teacher_model)
        template = {
            "tools": getattr(self, "tools", None) or None,
            "chat_template": getattr(self, "chat_template", None),
            **(getattr(self, "chat_template_kwargs", None) or {}),
        }
        # several environments: a row's column `environment` selects the tools of its prompt
        env_tools = self._env_tools if getattr(self, "_multi_environment", False) else None
        with self.accelerator.main_process_first():
            self._demos = tokenized(
                demo_dataset, "demo_dataset", self.processing_class, template, env_tools
            )
        attach_head(base_model(self))
        needs = self.mixer.method.needs(0)
        if self.beta == 0 and needs.kl:
            name, use = self.mixer.method.name, "use beta=1e-30 to measure it at the same loss"
            if not needs.kl_optional:
                raise ValueError(f"controller={name} follows the KL, unknown with beta=0.0: {use}")
            logger.warning(
                "beta=0.0: without a reference model, the KL is unknown to %s, and alpha stays "
                "constant; %s",
                name,
                use,
            )

    def _calculate_rewards(self, *args: Any, **keywords: Any) -> Tensor:
        by_function = super()._calculate_rewards(*args, **keywords)  # [rollouts of all ranks, F]
        if self.model.training:
            weighted = by_function * self.reward_weights.to(by_function.device)
            rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
            self._rewards = weighted.nansum(1)[rank::ranks]
        return by_function

    # ---- the teacher

    def _prepared(self, teacher: PreTrainedModel | None) -> Any:
        """The teacher, ready to score on this rank."""
        if teacher is None:
            return None
        assert self.mixer.teacher is not None
        attach_head(teacher)
        models: list[Any] = [teacher, base_model(self)]
        sizes = [model.get_input_embeddings().weight.shape[0] for model in models]
        k, self._teacher_vocabulary = self.mixer.teacher.candidates or 0, sizes[1]
        if k > min(sizes):
            raise ValueError(
                f"teacher.top_k={k}: the vocabulary has {min(sizes)} tokens: use a smaller number"
            )
        return self.accelerator.prepare_model(teacher, evaluation_mode=True)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        if self.teacher_model is not None and self.model.training:
            ids, mask = (
                torch.cat([batch[f"prompt_{kind}"], batch[f"completion_{kind}"]], 1)
                for kind in ("ids", "mask")
            )
            size, length = self.args.per_device_train_batch_size, batch["completion_ids"].shape[1]
            parts = [
                self._teacher_scores(*part, length)
                for part in zip(ids.split(size), mask.split(size), strict=True)
            ]
            batch |= {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return batch

    @torch.no_grad()
    def _teacher_scores(self, ids: Tensor, mask: Tensor, length: int) -> dict[str, Tensor]:
        """The teacher's log-probs of the last `length` tokens of rows [B, T], as loss inputs."""
        assert self.mixer.teacher is not None
        k = self.mixer.teacher.candidates
        head = run_head(self.teacher_model, input_ids=ids, attention_mask=mask)
        if k is None:
            targets = ids.roll(-1, 1).masked_fill(mask.roll(-1, 1) == 0, IGNORE)
            logps, _ = head.logprobs(targets, self.temperature)
            return {"teacher_logps": logps[:, -length - 1 : -1]}
        every = torch.arange(ids.numel(), device=ids.device).view_as(ids)
        at = every[:, -length - 1 : -1].flatten()
        logps, top = head.top_logprobs(at, k, self.temperature, self._teacher_vocabulary)
        shape = len(ids), length, k
        return {"teacher_logps": logps.view(shape), "teacher_ids": top.view(shape)}

    def _fused_loss(self, inputs: dict[str, Any]) -> FusedLoss:
        request = super()._fused_loss(inputs)
        teacher = self.mixer.teacher
        if teacher is None or not self.model.training:
            return request
        if self._entropy_bonus_enabled:  # changes the divisor of the fused loss
            raise Inexpressible("a teacher with an entropy bonus")
        names = (
            ["teacher_logps"] if teacher.candidates is None else ["teacher_logps", "teacher_ids"]
        )
        for name in names:
            if name not in inputs:
                raise ValueError(
                    f"{name} is missing in the batch: teacher.loss={teacher.loss!r} needs it: add "
                    "it to the result of _generate_and_score_completions, or pass teacher_model"
                )
            request.keywords[name] = inputs[name]
        # the whole gradient; it is multiplied by the scale of the mixture later
        coef = self.mixer.teacher_coef / self.mixer.scale
        spec = replace(request.keywords["spec"], teacher_coef=coef, teacher_loss=teacher.loss)
        request.keywords |= {"mu": self.mixer.mu, "spec": spec}
        return request

    def _report(self, option: str) -> None:
        if self.mixer.teacher is not None:
            raise ValueError(f"teacher: the fused loss, to which it is added, lacks {option}")
        super()._report(option)

    # ---- the loss

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        if "pixel_values" in inputs:
            raise ValueError("the prompts contain images: GACTrainer supports text only")
        rollout_loss = super()._compute_loss(model, inputs)
        if not self.model.training:  # evaluation uses the trainer's own loss
            return rollout_loss
        if self._step_demos is None and self._rewards is not None:
            self.mixer.observe_rewards(self._rewards)  # also for a step that reuses rollouts
        self.begin_step(lambda indices: [row_of(row) for row in self._demos.select(indices)])
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        ref = inputs.get("ref_per_token_logps")
        self.observe_rollouts(mask, inputs["advantages"], ref)
        loss = self._weighted(rollout_loss)
        loss = loss + self.mixer.weight_demo_loss(self._demo_loss(model))
        self.end_micro_batch()
        return loss

    def _weighted(self, rollout_loss: Tensor) -> Tensor:
        """The rollouts' loss and the teacher's, with their weights.

        With a teacher, the gradient of `rollout_loss` is that of both, but for the scale.
        """
        if self.mixer.teacher is None:
            return self.mixer.weight_rollout_loss(rollout_loss)
        assert self.rollout_out is not None  # or `_report` has raised an error
        assert self.rollout_out.teacher_loss is not None
        value = self.mixer.weight_rollout_loss(rollout_loss.detach())
        value = value + self.mixer.weight_teacher_loss(self.rollout_out.teacher_loss)
        return with_gradient(value, self.mixer.scale * rollout_loss)

    def _demo_loss(self, model: torch.nn.Module) -> Tensor:
        """This rank's demonstration loss for the micro-batch; see `score_demos`."""
        rows, device = self.local_demos(), self.accelerator.device
        if rows is None:
            return torch.zeros((), device=device)
        batch = collate(rows, self.processing_class.pad_token_id, device)
        out = self.score_demos(model, batch.model_inputs, batch.targets, self._step_demos)
        return out.loss


class GACTrainer(GACMixin, GRPOTrainer):
    """GRPOTrainer with adaptively weighted demonstrations; see GACMixin."""


def _unsupported_options(trainer: Any) -> dict[str, tuple[bool, str]]:
    """Unsupported options: name -> (whether it is set, the fix)."""
    options = unsupported_options(trainer)
    options.pop("torch_compile")
    return options | {
        "processing_class": (
            isinstance(trainer.processing_class, ProcessorMixin),
            "images are not supported: use a text model",
        ),
        "router_aux_loss_coef": (
            getattr(trainer, "aux_loss_enabled", False),
            "the router loss is not part of the mixture: set it to 0",
        ),
    }
