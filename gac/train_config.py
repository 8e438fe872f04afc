"""The configuration of one training run."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any

from gac.data import DataConfig
from gac.errors import require
from gac.evaluation.config import EvalSettings, EvalTask
from gac.fields import (
    Checked,
    Choice,
    Count,
    Natural,
    NonNegative,
    PositiveShare,
    Share,
    Valid,
    check_effects,
    expand_paths,
    one_of,
    require_default,
    setting,
)
from gac.methods import DEFAULT, METHODS, Method, all_methods
from gac.methods.base import Loss
from gac.methods.loss_keys import check_loss
from gac.methods.teacher import TeacherConfig
from gac.methods.teacher_keys import check_teacher
from gac.models.config import ModelConfig
from gac.parallel.config import ParallelConfig
from gac.rollouts.config import STORED_PAIRS, RolloutConfig
from gac.types import Sampling, StepNeeds
from gac_kernels import LossSpec

KL_SHARE = 8
"""By default, one rollout in this many estimates a KL that only triggers something."""
SEED = Valid("a whole number from 0 to 2**31 - 1", lambda x: 0 <= x < 2**31)
STEPS = Valid("an integer from 1 to 1,000,000", lambda x: 1 <= x <= 1_000_000)
BETAS = Valid("two numbers in [0, 1)", lambda betas: all(0 <= beta < 1 for beta in betas))


@dataclasses.dataclass(frozen=True)
class OptimConfig(Checked):
    """Optimizer and learning-rate schedule."""

    lr: PositiveShare = setting(1e-6, may_change=True)
    """Peak learning rate."""
    schedule: Annotated[str, one_of("cosine", "linear", "constant")] = "cosine"
    """After the warm-up: cosine, linear or constant."""
    warmup_steps: Natural = 10
    """Number of optimizer steps of linear warm-up from 0."""
    min_lr_ratio: Share = setting(0.1, only_with="schedule=cosine or schedule=linear")
    """Final learning rate as a fraction of the peak."""
    betas: Annotated[tuple[float, float], BETAS] = (0.9, 0.999)
    """AdamW's beta coefficients."""
    eps: NonNegative = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay, applied to matrices only."""
    max_grad_norm: NonNegative = 1.0
    """Maximum gradient norm; 0 disables clipping."""


@dataclasses.dataclass(frozen=True)
class GuardConfig(Checked):
    """When to skip an optimizer step, and when to abort the run."""

    skip_above_norm: Annotated[float, Valid("a number > 0", lambda x: x > 0)] = 1e5
    """Skip a step whose gradient norm is above this or not finite."""
    patience: Count = 5
    """Number of consecutive skipped steps after which the run saves a checkpoint and aborts."""
    max_saved_steps: Natural = 3
    """Maximum number of skipped steps saved under out/replay for `gac replay`, with their weights.
    """


@dataclasses.dataclass(frozen=True)
class TrainConfig(Checked):
    """One training run. Everything is written to `out`, the only folder that resuming needs."""

    out: Annotated[str, Valid("the name of a folder", bool)] = setting("runs/gac", may_change=True)
    """The run directory; `~` and `$NAME` are expanded."""
    run_name: str | None = setting(None, may_change=True)
    """Name of the run in the report; null: the run folder's name."""
    model: ModelConfig = ModelConfig()
    """The model, its dtype and adapters."""
    method: Annotated[Method, Choice(all_methods, lambda method: method.family)] = METHODS[
        DEFAULT
    ]()
    """`name` and the fields of that method, e.g. {name: constant, mu: 0.3}; see `gac methods`. The
    name of your own method is package.module:Class."""
    data: DataConfig = DataConfig()
    """Prompts for rollouts, and demonstrations."""
    reward: Any = "math"
    """How responses are scored: math, exact, choice, format, code, package.module:function, or a
    mapping with a `name` and its options, or a `sum` of several."""
    rollouts: RolloutConfig = RolloutConfig()
    """How responses are sampled from the policy."""
    loss: LossSpec = LossSpec()
    """Clipping, KL, entropy and reductions; a method may override some of these."""
    teacher: TeacherConfig = TeacherConfig()
    """A model that scores the rollouts token by token, for a further term of the loss. A method may
    set some of these keys."""
    optim: OptimConfig = OptimConfig()
    """AdamW and its schedule."""
    steps: Annotated[int, STEPS] = setting(800, may_change=True)
    """Number of optimizer steps."""
    budget_tokens: Count | None = setting(None, may_change=True)
    """End the run after the step with which it has trained on this many tokens, prompts included:
    the budget of the paper's appendix H. `steps` is then the most; null: no budget."""
    demo_batch_size: Count = 64
    """Demonstrations per optimizer step, over all ranks."""
    micro_batch_size: Count | None = setting(None, may_change=True)
    """Rows per forward and backward pass, padded to the longest, instead of
    `max_tokens_per_micro_batch`."""
    max_tokens_per_micro_batch: Count | None = setting(None, may_change=True)
    """Tokens per forward and backward pass, with any padding: rows are grouped by length, and one
    with more tokens is alone. null: if `micro_batch_size` is null too, chosen from the free memory
    at the start, logged, saved in `out`/config.yaml and kept on resume."""
    packing: bool | None = setting(None, may_change=True)
    """Whether the rows of `max_tokens_per_micro_batch` are packed end to end without padding, each
    attending only to itself. null: where that costs no more attention than separate rows, i.e. with
    flash attention, or sdpa on a CPU; elsewhere the cost grows with the square of the budget."""
    eval: EvalSettings = setting(EvalSettings(), may_change=True)
    """Evaluation during and after training."""
    monitor_kl_every: Natural = 0
    """Number of steps between measurements of the KL to the reference policy for monitoring; 0:
    only when the method or the loss needs it."""
    kl_sample_size: Count | None = None
    """Rollouts per step, over all ranks, used to estimate the KL to the reference policy when it is
    not part of the loss; null: an eighth of them for a method that only compares the KL with a
    target (`gac`), otherwise all.
    """
    log_update_norm: bool = setting(False, may_change=True)
    """Log the norm of every update of the weights; it takes a copy of the trained weights."""
    ignore_input_changes: bool = setting(False, may_change=True)
    """Resume although the content of the data, the reward, the model or the tokenizer has changed.
    """
    checkpoint_every: Count = setting(100, may_change=True)
    """Optimizer steps between checkpoints."""
    keep_checkpoints: Count = setting(2, may_change=True)
    """Number of newest checkpoints to keep, in addition to the best one (`gac export --checkpoint
    best`). The best is the most accurate checkpoint whose step was evaluated, so let
    `checkpoint_every` divide `eval.every` to consider every evaluation. A method that ends with its
    best weights also saves a checkpoint at every new best evaluation.
    """
    parallel: ParallelConfig = setting(ParallelConfig(), may_change=True)
    """Parallel training: DDP or FSDP2."""
    guards: GuardConfig = setting(GuardConfig(), may_change=True)
    """When to skip a step and when to abort the run."""
    report_to: tuple[str, ...] = setting((), may_change=True)
    """Experiment trackers of accelerate, e.g. [tensorboard, wandb]."""
    project: str = setting("gac", only_with="report_to", may_change=True)
    """Project of the run in the trackers of `report_to`."""
    export: bool = setting(True, may_change=True)
    """Save the final model to out/model in transformers format."""
    seed: Annotated[int, SEED] = 0
    """Random seed of the run."""

    def __post_init__(self) -> None:
        check_effects(self)
        super().__post_init__()
        expand_paths(self, "out")
        if self.micro_batch_size is not None:
            for name in ("max_tokens_per_micro_batch", "packing"):
                require_default(self, name, name, "with micro_batch_size")
        low = self.loss.clip_low
        require(low is None or low <= 1, "loss.clip_low", low, "a number in [0, 1], or null")
        require(self.loss.kl_coef >= 0, "loss.kl_coef", self.loss.kl_coef, "a number >= 0")
        if self.eval.every and not (self.eval.data.prompts or self.eval.tasks):
            raise ValueError(
                f"eval.every={self.eval.every}: there is nothing to evaluate: set "
                "eval.data.prompts or eval.tasks, or eval={} for no evaluation"
            )
        if not dataclasses.is_dataclass(self.method):
            raise ValueError("method: a function cannot be a method: use a subclass of Method")
        self._check_effects()
        if self.rollouts.engine == "paged" and self.parallel.mode == "fsdp":
            raise ValueError(
                "rollouts.engine='paged' needs the full model on each rank: use parallel.mode=ddp "
                "or rollouts.engine=generate"
            )
        plan = self.method.sampling(self.rollouts.num_generations)
        if self.rollouts.function is not None and plan.has_prefix:
            raise ValueError(
                f"rollouts.function={self.rollouts.function!r}: the rollouts of method "
                f"{self.method.name!r} continue a demonstration: use another method, or null"
            )

    def _check_effects(self) -> None:
        """Raise ValueError if a key has no effect, or harms the method."""
        method, rollouts, loss = self.method, self.rollouts, loss_of(self)
        needs = StepNeeds.union(map(method.needs, range(self.steps)))
        plan = method.sampling(rollouts.num_generations)
        check_loss(method, self.loss, loss, needs, plan)
        check_teacher(method, self.teacher, teacher_of(self), needs, loss)
        self._check_average()
        unused = ["correction", "correction_max"] if plan.from_reference else []
        unused += ["scale_rewards"] if plan.pairs or plan.advantages else []
        unused += [] if plan.uses_rewards else ["scale_rewards", "dynamic_sampling_retries"]
        unused += ["mask_truncated_completions"] if plan.pairs else []
        for name in unused:
            require_default(rollouts, name, f"rollouts.{name}", f"on method {method.name!r}")
        require(
            not rollouts.dynamic_sampling_retries or plan.demos == "separate",
            "rollouts.dynamic_sampling_retries",
            rollouts.dynamic_sampling_retries,
            f"0: prompts with equal rewards teach method {method.name!r} by their demonstrations",
        )
        in_loss = loss.spec.kl_coef != 0 or (loss.token is not None and needs.kl)
        measured = needs.rollouts and (needs.kl or self.monitor_kl_every)
        if in_loss or not measured:
            why = "if the loss contains the KL" if in_loss else "without monitor_kl_every"
            require_default(self, "kl_sample_size", "kl_sample_size", why)
        for name, default in vars(EvalTask()).items():
            if not self.eval.data.prompts and getattr(self.eval, name) != default:
                raise ValueError(
                    f"eval.{name} has no effect without eval.data.prompts: set it, or remove the "
                    "key, or set eval={} for no evaluation"
                )
        if rollouts.function == STORED_PAIRS:
            self._check_pairs(plan)
        group = sum(stage.size for stage in plan.stages) or rollouts.num_generations
        if group + plan.demo_in_group < 2 and needs.rollouts and plan.uses_rewards:
            raise ValueError(
                f"rollouts.num_generations={rollouts.num_generations}: advantages compare the "
                "rollouts of a prompt, so a single one has advantage 0 and teaches nothing: use a "
                "number >= 2"
            )

    def _check_pairs(self, plan: Sampling) -> None:
        """Raise ValueError if the method cannot be trained on pairs of responses from the data."""
        key = f"rollouts.function={STORED_PAIRS!r}"
        if not plan.pairs:
            raise ValueError(
                f"{key}: method {self.method.name!r} needs responses of the policy: use dpo or "
                "ipo, or rollouts.function=null"
            )
        if self.rollouts.num_generations != 2:
            raise ValueError(
                f"rollouts.num_generations={self.rollouts.num_generations}: {key} has two "
                "responses per prompt: use 2"
            )

    def _check_average(self) -> None:
        """Raise ValueError if the teacher is an average in a dtype that rounds its changes away."""
        model, rate = self.model, teacher_of(self).update_rate
        in_float32 = model.dtype == "float32" or model.master_weights or model.lora is not None
        require(
            in_float32 or rate in (0, 1),
            "model.master_weights",
            model.master_weights,
            f"true: in {model.dtype}, a teacher with teacher.update_rate={rate:g} does not move",
        )


def teacher_of(config: TrainConfig) -> TeacherConfig:
    """The run's teacher, with the keys that the method sets."""
    return config.method.teacher(config.teacher)


def plan_of(config: TrainConfig) -> Sampling:
    """How the run's prompts become rows; the teacher may need the prompts' demonstrations."""
    plan = config.method.sampling(config.rollouts.num_generations)
    return dataclasses.replace(plan, teacher=plan.teacher or teacher_of(config).self)


def kl_rollouts(config: TrainConfig) -> int | None:
    """Rollouts per step, over all ranks, from which the KL to the reference is estimated.

    None: all of them, with the forward passes of the loss.
    """
    if config.kl_sample_size is not None:
        return config.kl_sample_size
    needs = StepNeeds.union(map(config.method.needs, range(config.steps)))
    if not needs.kl_trigger or loss_of(config).spec.kl_coef != 0:
        return None
    rollouts = config.rollouts.num_prompts * config.rollouts.num_generations
    return math.ceil(rollouts / KL_SHARE)


def loss_of(config: TrainConfig) -> Loss:
    """The run's loss; `loss.max_tokens` defaults to `rollouts.max_completion_length`.

    With rollouts from another engine, or a function that may return its log-probs,
    `rollouts.correction` is applied; with a teacher, its loss is added.
    """
    rollouts, teacher = config.rollouts, teacher_of(config)
    longest = config.loss.max_tokens or rollouts.max_completion_length
    loss = config.method.loss(dataclasses.replace(config.loss, max_tokens=longest))
    from_reference = config.method.sampling(rollouts.num_generations).from_reference
    # the log-probs of a server are those at temperature 1 without truncation
    comparable = rollouts.temperature == 1 and rollouts.top_p == 1
    elsewhere = rollouts.engine == "vllm" or rollouts.function is not None
    if elsewhere and comparable and not from_reference:
        spec = dataclasses.replace(
            loss.spec, correction=rollouts.correction, correction_max=rollouts.correction_bound
        )
        loss = loss._replace(spec=spec)
    if teacher.active:
        spec = dataclasses.replace(loss.spec, teacher_coef=teacher.coef, teacher_loss=teacher.loss)
        loss = loss._replace(spec=spec)
    return loss
