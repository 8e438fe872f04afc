"""Runs a controller inside another trainer; see `Mixer`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gac.control.controller import ControllerConfig
from gac.errors import is_count, require
from gac.methods import DEFAULT, GAC, METHODS
from gac.methods.base import Method
from gac.methods.teacher import TeacherConfig
from gac.methods.teacher_keys import check_keys, obstacle
from gac.order import Order
from gac.step_end import StepResult, end_step, next_mix
from gac.types import Evidence, Observation, Sampling, StepNeeds
from gac_kernels import LossSpec, TokenMoments, loss_from_logprobs

FILE = "gac.json"
MEASURED = StepNeeds(kl=True, signals=True)
"""What any trainer with log-probabilities of its rollouts and demonstrations measures."""
CHECKED_STEPS = 1000  # number of steps whose needs are checked at the start
COMPLETIONS = 8  # rollouts per prompt that are assumed for `Method.sampling`
NEEDS = {  # descriptions, for errors
    "kl": "the KL to the reference policy",
    "signals": "the controller's signals",
    "parts": "separate gradients of the two terms",
    "bias": "gradients without phi and without clipping",
    "average": "moving averages of the gradients",
    "losses_after": "the losses of the batch after the update",
    "sources": "the source of each demonstration",
    "rewards": "the rewards of the rollouts",
    "teacher": "a teacher's log-probs of the rollouts",
}
DEMO_OPTIONS = {"demo_weight", "demo_shape", "demo_reduction"}  # the options of LossSpec in use


class Mixer:
    """Computes mu inside another trainer, from the statistics of its steps.

    The trainer keeps its own rollout loss; you add the demonstration loss to it::

        rows = mixer.draw()  # at the start of an optimizer step
        # in each micro-batch:
        loss = mixer.weight_rollout_loss(rollout_loss) + mixer.weight_demo_loss(demo_loss)
        mixer.observe(out.moments)
        metrics = mixer.close()  # at the end of the step: updates mu

    Every rank draws the same rows without communication, and `close` checks that mu is the same on
    all ranks. Scale losses as for DDP: summed over a rank's micro-batches and averaged over ranks,
    they must give the loss of the step.

    A trainer that has a teacher's log-probs of its rollouts passes `teacher`, and adds
    `mixer.weight_teacher_loss(loss)`, where the loss is that of `teacher_term`, or of the fused
    losses' `teacher_logps`. It has a weight of its own, `teacher_coef`, whatever mu is.

    Args:
        controller: a ControllerConfig, or any method, also your own, whose `needs` are a subset of
            `measures`, and which leaves the trainer its rollouts and their loss. None: the default
            method, a constant mu with an alarm.
        rows: number of available demonstrations.
        batch: demonstrations per optimizer step, over all ranks.
        seed: seed of the order of the demonstrations.
        measures: what the trainer measures. One that calls `observe_rewards` in every step passes
            `MEASURED._replace(rewards=True)`.
        teacher: `loss`, `coef` and `top_k` of the teacher's term; None: the trainer has no teacher.

    Raises:
        ValueError: the method needs something that the trainer does not measure, it cannot have a
            teacher, or an argument is invalid.
    """

    def __init__(
        self,
        controller: ControllerConfig | Method | None = None,
        *,
        rows: int,
        batch: int,
        seed: int = 0,
        measures: StepNeeds = MEASURED,
        teacher: TeacherConfig | None = None,
    ) -> None:
        require(is_count(batch, 1), "batch", batch, "a number of demonstrations >= 1")
        self.method = resolve_method(controller, measures._replace(teacher=teacher is not None))
        self.teacher = None if teacher is None else resolve_teacher(self.method, teacher)
        """The loss of the teacher's log-probs; None: the trainer has no teacher."""
        self.spec: LossSpec = self.method.loss(LossSpec()).spec
        """Weighting and reduction of the demonstration loss; the other fields are not used."""
        self.batch = batch
        self._order = Order(rows, seed)
        self._step = 0
        self._state, self._mix = next_mix(self.method, self.method.init(), Observation(0))
        self._moments: TokenMoments
        self._clear()

    @property
    def mu(self) -> float:
        """The weight of the demonstrations in the current step."""
        return self._mix.mu

    @property
    def scale(self) -> float:
        """The factor of both terms: 1, unless the method's weights have another sum."""
        return self._mix.scale

    @property
    def final(self) -> bool:
        """Whether the method ends the run after the current step."""
        return self._mix.final

    def draw(self) -> list[int]:
        """Draw the row indices of the step's demonstrations, the same on every rank."""
        return self._order.take(self.batch)

    def weight_rollout_loss(self, loss: Tensor) -> Tensor:
        """Multiply the trainer's own micro-batch loss (0-d) by its weight, 1 - mu."""
        self._rollout_losses.append(loss.detach())
        return self._mix.pair.rollout * loss

    def weight_demo_loss(self, loss: Tensor) -> Tensor:
        """Multiply the demonstration loss of a micro-batch (0-d) by its weight, mu."""
        self._demo_losses.append(loss.detach())
        return self._mix.pair.demo * loss

    @property
    def teacher_coef(self) -> float:
        """The weight of the teacher's loss in the current step; 0 without a teacher."""
        if self.teacher is None:
            return 0.0
        return self.teacher.coef if self._mix.teacher is None else self._mix.teacher

    def weight_teacher_loss(self, loss: Tensor) -> Tensor:
        """Multiply the teacher's loss of a micro-batch (0-d) by its weight, `teacher_coef`.

        Raises:
            ValueError: this mixer has no teacher.
        """
        if self.teacher is None:
            raise ValueError("teacher=None: give the mixer a gac.methods.teacher.TeacherConfig")
        self._teacher_losses.append(loss.detach())
        return self.teacher_coef * loss

    def observe(self, moments: TokenMoments | None) -> None:
        """Add the statistics of a micro-batch, which may have rows of either kind or of both.

        Raises:
            ValueError: `moments` is None because the loss was called with `moments=False`.
        """
        if moments is None:
            raise ValueError("moments=None: call the loss with moments=True")
        totals = moments.totals.clone()
        # a micro-batch without rollouts adds 0 to the KL, not nan
        totals[2] = torch.where(totals[0] == 0, 0, totals[2])
        new = TokenMoments(moments.rollouts, moments.demo_nll, totals)
        self._moments = new + self._moments.to(totals.device)

    def observe_rewards(self, rewards: Sequence[float] | Tensor) -> None:
        """Add the rewards of this rank's rollouts; for methods whose needs include `rewards`."""
        values = torch.as_tensor(rewards, dtype=torch.float64).flatten().cpu()
        self._rewards += torch.tensor([len(values), values.sum(), values.square().sum()])

    def close(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """End the optimizer step: gather the statistics, update mu and return this step's metrics.

        Args:
            group: the data-parallel process group; None: the default group, if any.

        Returns:
            mu, the method's own columns (mu_star, prior, alpha, ...), rollout_loss, demo_loss,
            teacher_loss, sft_variance, rl_variance, disagreement, kl and demo_tokens; values that
            were not measured are left out.

        Raises:
            RuntimeError: ranks differ in mu, or something that the method needs was not measured.
        """
        result, teacher_loss = self._step_result(group)
        row, self._state, self._mix = end_step(self.method, self._state, result)
        self._step += 1
        self._clear()
        row["demo_tokens"] = float(result.moments.demo_tokens)
        row["teacher_loss"] = teacher_loss
        # the trainer's own log has the others
        names = row.keys() - {"step", "reward_mean", "demo_entropy", "clip_fraction"}
        return {
            name: value
            for name, value in row.items()
            if name in names and value is not None and math.isfinite(value)
        }

    def _clear(self) -> None:
        self._moments = TokenMoments.zeros()
        self._rollout_losses: list[Tensor] = []
        self._demo_losses: list[Tensor] = []
        self._teacher_losses: list[Tensor] = []
        self._rewards = torch.zeros(3, dtype=torch.float64)  # number, sum and sum of squares

    def _step_result(self, group: dist.ProcessGroup | None) -> tuple[StepResult, float | None]:
        """What the step measured, over all ranks, on the CPU, and the teacher's loss, if any."""
        needs = self.method.needs(self._step)
        moments = self._moments
        device = moments.totals.device
        zero = moments.totals.new_zeros(())
        losses = [
            sum((x.double() for x in term), zero)
            for term in (self._rollout_losses, self._demo_losses, self._teacher_losses)
        ]
        known = [self.mu, float(len(self._teacher_losses))]
        own = torch.tensor(known, dtype=torch.float64, device=device)
        table = self._gather(
            torch.cat([own, torch.stack(losses), self._rewards.to(device), moments.rollouts]),
            moments,
            group,
        )
        if (table[:, 0] != table[0, 0]).any():
            raise RuntimeError(
                f"mu differs between ranks: {table[:, 0].tolist()}; load the same controller state "
                "on all of them"
            )
        total = TokenMoments.merged(
            [TokenMoments(row[8:15], row[21:], row[15:21]) for row in table]
        )
        if total.rollout_tokens + total.demo_tokens == 0:
            raise RuntimeError("no statistics since the last close(): call observe() in every step")
        rollout_loss, demo_loss, teacher_loss = table[:, 2:5].mean(0).tolist()
        number, reward_sum, square_sum = table[:, 5:8].sum(0).tolist()
        taught = bool(table[:, 1].any())
        self._check_measured(needs, total, rewards=number, taught=taught)
        evidence = Evidence(self._step, total) if needs.signals else None
        mean = reward_sum / number if number else None
        result = StepResult(
            number=self._step,
            mix=self._mix,
            needs=needs,
            moments=total,
            rollout_loss=rollout_loss,
            demo_loss=demo_loss,
            reward_mean=mean,
            reward_variance=None if mean is None else square_sum / number - mean * mean,
            evidence=evidence,
        )
        return result, teacher_loss if taught else None

    def _check_measured(
        self, needs: StepNeeds, total: TokenMoments, *, rewards: float, taught: bool
    ) -> None:
        """Raise RuntimeError if the trainer did not measure what the method needs in this step.

        rewards: their number. taught: whether the teacher's loss was given.
        """
        if not total.rollout_tokens:
            return
        if needs.kl and not needs.kl_optional and math.isnan(total.kl):
            raise RuntimeError(
                f"controller={self.method.name} follows the KL to the reference policy, which is "
                "not measured (kl=nan): use the trainer's KL loss, or another controller"
            )
        if self.teacher is not None and not taught:
            raise RuntimeError(
                f"teacher={self.teacher.loss}: the step has rollouts, but no loss of the teacher: "
                "call weight_teacher_loss() in every step"
            )
        if needs.rewards and not rewards:
            raise RuntimeError(
                f"controller={self.method.name} needs the rewards, which are not measured: call "
                "observe_rewards() in every step"
            )

    def _gather(
        self, numbers: Tensor, moments: TokenMoments, group: dist.ProcessGroup | None
    ) -> Tensor:
        """Each rank's row of `numbers`, then `moments.totals` and `moments.demo_nll`."""
        scored = moments.demo_nll[moments.demo_nll != -math.inf]
        if len(scored) > self.batch:
            raise RuntimeError(
                f"observe() got {len(scored)} demonstrations in one step, more than "
                f"batch={self.batch}: call close() after every step, or use a larger batch"
            )
        nll = torch.full((self.batch,), -math.inf, dtype=torch.float64, device=scored.device)
        nll[: len(scored)] = scored
        local = torch.cat([numbers, moments.totals, nll])
        rows = [local]
        if dist.is_available() and dist.is_initialized():
            rows = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
            dist.all_gather(rows, local, group=group)
        return torch.stack(rows).cpu()

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """The state between two steps, in plain JSON types."""
        return {
            "name": self.method.name,
            "step": self._step,
            "method": self._state,
            "mix": list(self._mix),
            "order": self._order.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict()`.

        Raises:
            ValueError: the state belongs to another method or to other demonstrations.
        """
        missing = sorted({"name", "step", "method", "mix", "order"} - set(state))
        use = "a dict from state_dict(); the keys listed here are missing"
        require(not missing, "state", missing, use)
        if state["name"] != self.method.name:
            raise ValueError(
                f"the saved controller is {state['name']!r}, but this run uses "
                f"{self.method.name!r}: resume with the same controller"
            )
        self._order.load_state_dict(state["order"])
        self._step, self._state = int(state["step"]), state["method"]
        self._mix = type(self._mix)(*state["mix"])
        self._clear()

    def save(self, folder: str | Path) -> None:
        """Write the state to a checkpoint folder, atomically."""
        path = Path(folder) / FILE
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self.state_dict()))
        part.replace(path)

    def load(self, folder: str | Path) -> None:
        """Load the state that `save` wrote.

        Raises:
            FileNotFoundError: the folder has no such file.
        """
        path = Path(folder) / FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: this checkpoint was saved without a controller, so mu is "
                "unknown; start a new run from its weights instead of resuming"
            )
        self.load_state_dict(json.loads(path.read_text()))


def resolve_method(
    controller: ControllerConfig | Method | None, measures: StepNeeds = MEASURED
) -> Method:
    """Convert the controller to a Method; None gives the default method.

    measures: what the trainer measures.

    Raises:
        ValueError: the method needs something else; the message names it.
    """
    if controller is None:
        return METHODS[DEFAULT]()
    valid = isinstance(controller, (ControllerConfig, Method))
    require(valid, "controller", controller, "a ControllerConfig or a method of gac.methods")
    method = controller if isinstance(controller, Method) else _as_method(controller)
    name = method.name if method is controller else type(controller).__name__
    needs = list(map(method.needs, range(CHECKED_STEPS)))
    for kind, key in (("demonstrations", "rollouts"), ("rollouts", "demos")):
        if not all(getattr(step, key) for step in needs):
            raise ValueError(
                f"controller={name} trains on only {kind} in some steps, so it has nothing to mix: "
                "use gac, guarded or constant, or leave GAC out"
            )
    missing = _unmeasured(StepNeeds.union(needs), measures) or _owned_by_trainer(method)
    if missing:
        raise ValueError(
            f"controller={name} needs {missing}, which this trainer does not provide: use a "
            "controller that needs only log-probabilities, such as constant-alarm, gac or chord, "
            "or run `gac train`"
        )
    return method


def resolve_teacher(method: Method, teacher: TeacherConfig) -> TeacherConfig:
    """The teacher's term of a method inside another trainer, which scores the rollouts itself.

    Raises:
        ValueError: a key belongs to a teacher of `gac train`, the method sets it, or the method
            cannot have a teacher; the message names it.
    """
    if not isinstance(teacher, TeacherConfig):
        raise ValueError(f"teacher={teacher!r}: use a gac.methods.teacher.TeacherConfig")
    for key, default in (("path", None), ("self", False)):
        value = getattr(teacher, key)
        if value != default:
            raise ValueError(
                f"teacher.{key}={value!r}: another trainer scores the rollouts itself: remove the "
                "key, and pass the teacher's log-probs"
            )
    if teacher.whole:
        raise ValueError("teacher.top_k=None: another trainer passes K tokens: use a number")
    used = method.teacher(teacher)
    check_keys(method, teacher, used)
    needs = StepNeeds.union(map(method.needs, range(CHECKED_STEPS)))
    if reason := obstacle(method, needs, method.loss(LossSpec())):
        raise ValueError(
            f"teacher={used.loss}: method {method.name!r} {reason}: leave the teacher out, or use "
            "gac or constant-alarm"
        )
    return used


def _as_method(config: ControllerConfig) -> Method:
    """The method with the options of `config`, and the paper's proxies as signals."""
    try:
        return GAC(**vars(config))
    except ValueError as error:
        raise ValueError(
            f"controller={type(config).__name__} needs more than log-probabilities: {error}, or "
            "remove the option"
        ) from error


def _unmeasured(needs: StepNeeds, measures: StepNeeds) -> str:
    """The first need that the trainer does not measure; "" if there is none."""
    for key, meaning in NEEDS.items():
        need, given = getattr(needs, key), getattr(measures, key)
        if need and not given and not (key == "kl" and needs.kl_optional):
            return f"{meaning} ({key}={need!r})"
    return ""


def _owned_by_trainer(method: Method) -> str:
    """What the method changes of the trainer's own rollouts and their loss; "" if nothing."""
    if type(method).credit is not Method.credit:
        return "its own advantages (credit)"
    loss, trainers = method.loss(LossSpec(max_tokens=1)), LossSpec(max_tokens=1)
    if loss.token is not None or loss.pooled:
        return f"its own loss ({'token' if loss.token is not None else 'pooled'})"
    for option in fields(LossSpec):
        value = getattr(loss.spec, option.name)
        if option.name not in DEMO_OPTIONS and value != getattr(trainers, option.name):
            return f"its own loss of the rollouts ({option.name}={value!r})"
    for field in fields(Sampling):
        value = getattr(method.sampling(COMPLETIONS), field.name)
        if value != field.default:
            return f"its own rows ({field.name}={value!r})"
    return "evaluations (keeps_best=True)" if method.keeps_best else ""


def refuse(trainer: str, options: dict[str, tuple[bool, str]]) -> None:
    """Raise ValueError, naming `trainer`, for the first option that is set.

    options: name -> (whether it is set, the fix).
    """
    for option, (is_set, fix) in options.items():
        if is_set:
            raise ValueError(f"{trainer} does not support {option}: {fix}")


def teacher_term(
    logps: Tensor,  # [B, T]: token log-probabilities under the policy
    mask: Tensor,  # [B, T]: nonzero for tokens that are trained on
    teacher_logps: Tensor,  # [B, T]: of the same tokens; nan where no teacher has scored them
    *,
    loss: str,  # of `LossSpec.teacher_loss`: "k2" or "k3"
    reduction: str = "token",  # of `LossSpec.rollout_reduction`
    norm: float | Tensor | None = None,  # number of tokens or rows of the step; None: of the batch
) -> Tensor:
    """Compute the teacher's loss of a batch of rollouts, 0-d, differentiable in `logps`."""
    known = (mask != 0) & ~teacher_logps.isnan()
    spec = LossSpec(teacher_coef=1.0, teacher_loss=loss, rollout_reduction=reduction)
    return loss_from_logprobs(
        logps,
        torch.where(known, 0, -100),
        torch.zeros(len(logps), device=logps.device),
        teacher_logps=teacher_logps.nan_to_num(),
        rollout_norm=norm,
        moments=False,
        spec=spec,
    ).loss


def rollout_moments(
    logps: Tensor,  # [B, T]: token log-probabilities under the policy
    mask: Tensor,  # [B, T]: nonzero for tokens that are trained on
    advantages: Tensor,  # [B], [B, 1] or [B, T]
    *,
    entropy: Tensor | None = None,  # [B, T], nats
    ref_logps: Tensor | None = None,  # [B, T]: token log-probabilities under the reference policy
) -> TokenMoments:
    """Compute the controller's statistics of a batch of rollouts, without gradients.

    Without `entropy` or `ref_logps`, the corresponding moments are nan ("not measured").
    """
    trained = mask != 0
    if advantages.dim() == 2:
        advantages = advantages.expand(mask.shape)
    moments = loss_from_logprobs(
        logps,
        torch.where(trained, 0, -100),
        advantages,
        ref_logps=ref_logps,
        entropy=entropy,
    ).moments
    assert moments is not None
    return moments
