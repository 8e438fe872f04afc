"""One optimizer step as data: inputs, measurements, outcome, and its row of metrics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from gac import collectives
from gac.collectives import Sums
from gac.rollouts.stats import Rollouts, SamplingStats
from gac.rows import Counts, Row
from gac.step_end import StepResult
from gac.train_config import GuardConfig
from gac.types import Evidence, KLEstimate, Mix, StepNeeds, TermPair
from gac_kernels import TokenMoments

from .probes import GradientParts


class Rewards(NamedTuple):
    """Sums over the rewards of a step's rollouts, including those that are not trained on."""

    number: float
    total: float
    squares: float

    @classmethod
    def of(cls, rewards: Sequence[float]) -> Rewards:
        """The sums over `rewards`."""
        return cls(float(len(rewards)), sum(rewards), sum(r * r for r in rewards))

    @property
    def mean(self) -> float | None:
        """Mean reward; None if there are no rewards."""
        return self.total / self.number if self.number else None

    @property
    def variance(self) -> float | None:
        """Population variance; None if there are no rewards."""
        if not self.number:
            return None
        mean = self.total / self.number
        return self.squares / self.number - mean * mean  # `mean**2` would raise OverflowError


@dataclass(frozen=True)
class Step:
    """Everything that the gradient of one optimizer step depends on, except the model's weights."""

    number: int
    """Index of the step, from 0."""
    rows: tuple[Row, ...]
    """This rank's training rows."""
    mix: Mix
    """The weights of the two terms."""
    counts: Counts
    """Row and token counts over all ranks, by which the terms are divided."""
    rewards: Rewards
    """Rewards of all ranks' rollouts."""
    needs: StepNeeds
    """Inputs and measurements that the step requires."""
    old_logps: tuple[Tensor, ...]
    """Log-probs of the sampling policy by `Row.sequence`; empty: on-policy."""
    seed: int
    """Seed of the dropout masks."""
    teacher_logps: tuple[Tensor, ...] = ()
    """The teacher's log-probs [n] or [n, K], by `Row.sequence`, as in `Scores`; empty: no teacher.
    """
    teacher_ids: tuple[Tensor, ...] = ()
    """The tokens of the teacher's log-probs [n, K], int32; empty: those of the rollouts."""
    teacher_hidden: tuple[Tensor, ...] = ()
    """The teacher's hidden states [n, H] in place of its log-probs; nan without a teacher."""
    teacher_head: tuple[Any, ...] = ()
    """The fields of the `Head` of `teacher_hidden`, which has no hidden states; empty: none."""

    def plain(self) -> dict[str, Any]:
        """Convert to built-in types and tensors, for `restore`."""
        return {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "rows": [tuple(row) for row in self.rows],
            **{key: tuple(getattr(self, key)) for key in _TUPLES},
            "teacher_head": tuple(
                x.cpu() if isinstance(x, Tensor) else x for x in self.teacher_head
            ),
        }

    @classmethod
    def restore(cls, plain: dict[str, Any]) -> Step:
        """Inverse of `plain`."""
        named = {key: kind(*plain[key]) for key, kind in _TUPLES.items()}
        return cls(**{**plain, **named, "rows": tuple(Row(*row) for row in plain["rows"])})


_TUPLES: dict[str, Any] = {"mix": Mix, "counts": Counts, "rewards": Rewards, "needs": StepNeeds}


@dataclass(frozen=True)
class Measured:
    """Results of a step's forward and backward passes.

    All are the same on all ranks, except `parts` and `means`.
    """

    losses: TermPair
    """The two loss terms, reduced over all ranks."""
    moments: TokenMoments
    """Statistics of the step's tokens."""
    kl: KLEstimate | None = None
    """KL to the reference from some of the rollouts; None: `moments.kl`, from all."""
    parts: GradientParts | None = None
    """The separate gradients, still to be combined."""
    gram: Tensor | None = None
    """float64 [2 n, 2 n] inner products of the `parts`."""
    evidence: Evidence | None = None
    """Input of the signal source, if `StepNeeds.signals` is set."""
    sources: tuple[str, ...] | None = None
    """The source of each entry of `moments.demo_nll`, if `StepNeeds.sources` is set."""
    means: Sums = field(default_factory=dict)
    """Metrics column -> sum and number of its values on this rank."""
    demo_weight: float | None = None
    """Mean token weight of the demonstrations; None: the loss has no such weight."""
    teacher_loss: float | None = None
    """The teacher's loss, reduced over all ranks, before its weight; None: no teacher."""


class Update(NamedTuple):
    """The applied update, or why the step was skipped."""

    mix: Mix
    """The weights with which the gradient was computed."""
    norm: float
    """Gradient norm before clipping."""
    lr: float
    """Learning rate."""
    fault: str | None
    """Why the step was skipped; None if it was applied."""
    moved: float | None = None
    """Distance that the weights moved; None: not logged, or skipped."""


def step_result(
    step: Step, measured: Measured, update: Update, losses_after: TermPair | None
) -> StepResult:
    """Collect the measurements of a step for `end_step`.

    losses_after: the losses of the batch after the update, if the method needs them.
    """
    counts, losses = step.counts, measured.losses
    return StepResult(
        number=step.number,
        mix=update.mix,
        needs=step.needs,
        moments=measured.moments,
        # a term without rows is 0, which is not a measurement
        rollout_loss=losses.rollout if counts.rollouts else None,
        demo_loss=losses.demo if counts.demos else None,
        has_kl=step.needs.kl and step.rewards.number > 0,
        kl=measured.kl,
        reward_mean=step.rewards.mean,
        reward_variance=step.rewards.variance,
        evidence=measured.evidence,
        losses_after=losses_after,
        sources=measured.sources or (),
        lr=update.lr,
        demo_weight=measured.demo_weight,
        skipped=update.fault is not None,
    )


def trainer_columns(
    step: Step,
    measured: Measured,
    update: Update,
    rollouts: Rollouts | None,
    events: Mapping[str, int],
) -> dict[str, Any]:
    """The metrics of a step that only a trainer knows. Every rank must call this function.

    Args:
        rollouts: those that were sampled in this step, if any.
        events: this rank's number of events, by column.
    """
    sampled = rollouts.columns if rollouts else SamplingStats().columns()
    means = {**measured.means, **(rollouts.means if rollouts else {})}
    return {
        "grad_norm": update.norm,
        **({} if update.moved is None else {"update_norm": update.moved}),
        "tokens": int(step.counts.tokens),
        "rollout_tokens": int(step.counts.rollout_tokens),
        "lr": update.lr,
        **({} if measured.teacher_loss is None else {"teacher_loss": measured.teacher_loss}),
        **sampled,
        **collectives.columns(means, events),
    }


class Guard:
    """Checks every step before the optimizer applies it, and counts the skipped ones."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.skipped = self.consecutive = self.kept = 0
        self.fault: str | None = None  # why the last skipped step was skipped

    def judge(self, norm: float, losses: Mapping[str, float]) -> str | None:
        """The reason to skip the step, or None. The arguments must be reduced over ranks."""
        values = {**losses, "grad_norm": norm}.items()
        fault = next((f"{name} is {x}" for name, x in values if not math.isfinite(x)), None)
        if fault is None and norm > self.config.skip_above_norm:
            limit = self.config.skip_above_norm
            fault = f"grad_norm is {norm:.3g}, above guards.skip_above_norm={limit:g}"
        self.skipped += fault is not None
        self.consecutive = self.consecutive + 1 if fault else 0
        self.fault = fault or self.fault
        return fault

    @property
    def exhausted(self) -> bool:
        """Whether too many consecutive steps were skipped."""
        return self.consecutive >= self.config.patience

    def state_dict(self) -> dict[str, int]:
        """State in plain JSON types; after an aborted run the consecutive count restarts at 0."""
        consecutive = 0 if self.exhausted else self.consecutive
        return {"skipped": self.skipped, "consecutive": consecutive, "kept": self.kept}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the counts from `state`."""
        self.skipped, self.consecutive = state["skipped"], state["consecutive"]
        self.kept = state["kept"]
