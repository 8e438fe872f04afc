"""Adaptive mixing in verl 0.9, enabled by these configuration options::

    actor_rollout_ref.actor.policy_loss._target_=gac.integrations.verl.GACPolicyLoss
    +actor_rollout_ref.actor.policy_loss.demo_path=demos.parquet
    +actor_rollout_ref.actor.policy_loss.demo_batch=64

verl's own policy loss, in any mode, is unchanged and weighted by 1 - mu. In each optimizer step,
the actor makes a second pass over the step's demonstrations, weighted by mu. With
`distillation.enabled`, verl's loss of its teacher keeps its own weight, whatever mu is.
docs/integrations/verl.md lists unsupported options.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.utils import tensordict_utils as tu
from verl.workers.config import PolicyLossConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from gac.config import choose
from gac.methods import DEFAULT, METHODS
from gac.methods.teacher import TeacherConfig
from gac.mixer import Mixer, refuse, resolve_method, rollout_moments
from gac.rows import Row
from gac_kernels import loss_from_logprobs

from .demonstrations import demo_norm, read, row_of, tokenized

__all__ = ["GACPolicyLoss", "GACWorker"]

INHERITED = ("use_remove_padding", "use_dynamic_bsz", "use_fused_kernels", "max_token_len_per_gpu")


@dataclass
class GACPolicyLoss(PolicyLossConfig):
    """verl's policy-loss options plus ours.

    Creating an instance makes verl use `GACWorker` as its actor worker.
    """

    demo_path: str = ""
    """Demonstrations: a .jsonl or .parquet file or a saved Dataset; prompt and completion, or
    messages."""
    demo_batch: int = 0
    """Demonstrations per optimizer step (mini-batch), over all ranks."""
    method: Any = field(default_factory=lambda: {"name": DEFAULT})
    """A method name, or a mapping with its name and fields; see `gac.Mixer`."""
    demo_seed: int = 0
    """Seed for the order of the demonstrations."""
    chat_template_kwargs: Any = None
    """Mapping of arguments of the demonstrations' chat template; that of the prompts,
    `data.apply_chat_template_kwargs`, is not known to the actor."""

    def __post_init__(self) -> None:
        if not self.demo_path:
            raise ValueError("policy_loss.demo_path is empty: set it to a file of demonstrations")
        if self.demo_batch < 1:
            raise ValueError(
                f"policy_loss.demo_batch={self.demo_batch!r}: use a number of demonstrations >= 1"
            )
        resolve_method(choose(METHODS, self.method, "policy_loss.method"))
        ActorRolloutRefWorker.actor_worker_cls = GACWorker


class GACWorker(TrainingWorker):
    """verl's training worker; with a `GACPolicyLoss`, it also trains on demonstrations."""

    mixture: TwoPassStep | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn: Callable[..., Any]) -> None:
        actor = getattr(loss_fn, "keywords", {}).get("config")
        options = getattr(actor, "policy_loss", None)
        if isinstance(options, GACPolicyLoss):
            check_supported(self.engine_config, self.model_config)
            self.mixture = TwoPassStep(self.engine, self.model_config.tokenizer, options, loss_fn)
            loss_fn = self.mixture.rollout_loss
        super().set_loss_fn(loss_fn)

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False
    )
    def train_batch(self, data: TensorDict) -> TensorDict | None:
        output = super().train_batch(data)
        if self.mixture is None:
            return output
        log = self.mixture.mixer.close(self.engine.get_data_parallel_group())
        if output is not None:
            tu.get(output, "metrics").update({f"gac/{name}": x for name, x in log.items()})
        return output

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> Any:
        if self.mixture is not None and torch.distributed.get_rank() == 0:
            Path(local_path).mkdir(parents=True, exist_ok=True)
            self.mixture.mixer.save(local_path)  # before the barrier that ends verl's own saving
        return super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> Any:
        if self.mixture is not None and local_path is not None:
            self.mixture.mixer.load(local_path)
        return super().load_checkpoint(local_path, hdfs_path, del_local_after_load)


class TwoPassStep:
    """The two passes of an optimizer step: verl's batch, then the step's demonstrations."""

    def __init__(
        self, engine: Any, tokenizer: Any, options: GACPolicyLoss, policy_loss: Callable[..., Any]
    ) -> None:
        self.engine = engine
        self.policy_loss: Any = policy_loss  # a partial of verl's, with its configuration
        self.demos = tokenized(
            read(options.demo_path), options.demo_path, tokenizer, options.chat_template_kwargs
        )
        pad = tokenizer.pad_token_id
        self.pad = tokenizer.eos_token_id if pad is None else pad
        self.mixer = Mixer(
            choose(METHODS, options.method),
            rows=len(self.demos),
            batch=options.demo_batch,
            seed=options.demo_seed,
            teacher=self._teacher(),
        )
        self.engine_forward_backward = engine.forward_backward_batch
        engine.forward_backward_batch = self.forward_backward

    def forward_backward(
        self, data: TensorDict, loss_function: Callable[..., Any], forward_only: bool = False
    ) -> Any:
        """Compute the gradients of verl's batch, then add those of the demonstrations."""
        output = self.engine_forward_backward(data, loss_function, forward_only=forward_only)
        if not forward_only:
            self.engine_forward_backward(self.demo_data(data), self.demo_loss)
        return output

    def _teacher(self) -> TeacherConfig | None:
        """The weight of verl's loss of its teacher, which is verl's own; None: no teacher."""
        distillation = getattr(self.policy_loss, "keywords", {}).get("distillation_config")
        if distillation is None:
            return None
        options = distillation.distillation_loss
        if not options.use_task_rewards:
            raise ValueError(
                "distillation.distillation_loss.use_task_rewards=False: without a loss of the "
                "rollouts there is nothing to mix with demonstrations: set it to True"
            )
        return TeacherConfig(loss="k2", coef=options.distillation_loss_coef)

    def rollout_loss(
        self,
        model_output: Any = None,
        data: TensorDict | None = None,
        dp_group: Any = None,
        **keywords: Any,
    ) -> Any:
        """verl's own loss, weighted by 1 - mu; reports the scored rollouts to the mixer.

        With a teacher's top-K log-probs, verl calls it first with `student_logits`, for the
        divergence of each token.
        """
        if model_output is None:
            return self.policy_loss(data=data, **keywords)
        given = {"model_output": model_output, "data": data, "dp_group": dp_group}
        loss, metrics = self.policy_loss(**given)
        if not torch.is_grad_enabled():
            return loss, metrics
        assert data is not None
        logps = no_padding_2_padding(model_output["log_probs"].detach(), data)
        entropy = model_output.get("entropy")
        if entropy is not None:
            entropy = no_padding_2_padding(entropy.detach(), data)
        names = {"response_mask", "advantages", "ref_log_prob"} & set(data.keys())
        batch = data.select(*names).to_padded_tensor()
        moments = rollout_moments(
            logps,
            batch["response_mask"],
            batch["advantages"],
            entropy=entropy,
            ref_logps=batch.get("ref_log_prob", None),
        )
        self.mixer.observe(moments)
        if self.mixer.teacher is None:
            return self.mixer.weight_rollout_loss(loss), metrics
        rewarded, _ = ppo_loss(self.policy_loss.keywords["config"], **given)
        coef = self.mixer.teacher.coef
        taught = (loss - rewarded) / coef if coef else torch.zeros_like(loss)
        return (
            self.mixer.weight_rollout_loss(rewarded) + self.mixer.weight_teacher_loss(taught),
            metrics,
        )

    def demo_data(self, data: TensorDict) -> TensorDict:
        """This rank's demonstrations for the step, in the format that verl's engine expects."""
        ranks = self.engine.get_data_parallel_size()
        demos = [row_of(row) for row in self.demos.select(self.mixer.draw())]
        self.norm = demo_norm(demos, self.mixer.spec, ranks)
        rows = demos[self.engine.get_data_parallel_rank() :: ranks]
        count = -(-len(demos) // ranks)
        size = min(tu.get(data, "micro_batch_size_per_gpu") or count, count)
        # every rank runs the same number of forwards: pad with one-token rows without a loss
        rows += [Row((self.pad,), 1, True)] * (-(-count // size) * size - len(rows))

        def jagged(parts: list[Tensor]) -> Tensor:
            return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

        tensors = {
            "input_ids": jagged([torch.tensor(row.ids) for row in rows]),
            "position_ids": jagged([torch.arange(len(row.ids)) for row in rows]),
            "loss_mask": jagged([torch.arange(len(row.ids)) >= row.start for row in rows]),
        }
        options = {name: tu.get(data, name) for name in set(INHERITED) & set(data.keys())}
        return tu.get_tensordict(
            tensors, {**options, "micro_batch_size_per_gpu": size, "temperature": 1.0}
        )

    def demo_loss(self, model_output: Any, data: TensorDict, dp_group: Any = None) -> Any:
        """The demonstration term of a micro-batch, weighted by mu."""
        ids, ends = data["input_ids"].values(), data["input_ids"].offsets()
        # position t predicts token t + 1; a row's first token is never a target, so rows do not
        # leak into each other
        targets = torch.where(data["loss_mask"].values(), ids, -100).roll(-1)
        sequences = len(ends) - 1
        out = loss_from_logprobs(
            model_output["log_probs"].values(),
            targets,
            torch.ones(sequences),
            torch.ones(sequences, dtype=torch.bool),
            mu=1.0,
            cu_seqlens=ends.int(),
            spec=self.mixer.spec,
            demo_norm=self.norm,
        )
        self.mixer.observe(out.moments)
        return self.mixer.weight_demo_loss(out.loss), {}


def check_supported(engine: Any, model: Any) -> None:
    """Raise ValueError for settings that are untested or would give the loss wrong weights."""
    parallel = getattr(engine, "ulysses_sequence_parallel_size", 1)
    unsupported_options = {
        "strategy": (engine.strategy != "fsdp2", engine.strategy, "fsdp2"),
        "ulysses_sequence_parallel_size": (parallel > 1, parallel, "1"),
        "model.processor": (model.processor is not None, "an image processor", "a text model"),
        "mtp.enable": (model.mtp is not None and model.mtp.enable, True, "False"),
    }
    options = unsupported_options.items()
    refuse("GACPolicyLoss", {f"{k}={value}": (x, f"use {use}") for k, (x, value, use) in options})
