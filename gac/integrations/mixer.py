"""Runs a controller inside another trainer; see `Mixer`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gac.control.controller import ControllerConfig
from gac.control.signals import Evidence, SourceNeeds
from gac.data.order import Order
from gac.data.rows import Row
from gac.errors import is_count, require
from gac.methods import CHORD, DEFAULT, GAC, METHODS, Constant, Method, Observation
from gac.methods.base import demo_losses, next_mix
from gac.methods.rules import KLControl
from gac.training.probes import UnitSketches
from gac_kernels import HeadSketch, LossOutput, LossSpec, TokenMoments, loss_from_logprobs

FILE = "gac.json"


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

    Args:
        controller: a ControllerConfig, or a method of `gac.methods` that needs only
            log-probabilities: GAC (proxy signals, no gate), CHORD, Constant, Guarded or KLControl.
            None: the default method, a constant mu with an alarm.
        rows: number of available demonstrations.
        batch: demonstrations per optimizer step, over all ranks.
        seed: seed of the order of the demonstrations.
        sketches: the trainer passes the head sketches of its losses to `observe_sketches`, so that
            methods that read them (`gac-gated-sketch`) are accepted.

    Raises:
        ValueError: the method needs more than log-probabilities, or an argument is invalid.
    """

    def __init__(
        self,
        controller: ControllerConfig | Method | None = None,
        *,
        rows: int,
        batch: int,
        seed: int = 0,
        sketches: bool = False,
    ) -> None:
        require(is_count(batch, 1), "batch", batch, "a number of demonstrations >= 1")
        self.method = resolve_method(controller, sketches)
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

    def draw(self) -> list[int]:
        """Draw the row indices of the step's demonstrations, the same on every rank."""
        return self._order.take(self.batch)

    def weight_rollout_loss(self, loss: Tensor) -> Tensor:
        """Multiply the trainer's own micro-batch loss (0-d) by its weight, 1 - mu."""
        self._losses[0].append(loss.detach())
        return self._mix.pair.rollout * loss

    def weight_demo_loss(self, loss: Tensor) -> Tensor:
        """Multiply the demonstration loss of a micro-batch (0-d) by its weight, mu."""
        self._losses[1].append(loss.detach())
        return self._mix.pair.demo * loss

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

    @property
    def sketch(self) -> HeadSketch | None:
        """The sketch to pass to this step's losses, the same on every rank; None if not needed."""
        size = self.method.needs(self._step).sketch
        return HeadSketch(size, seed=self._step) if size else None

    def observe_sketches(self, units: Sequence[int], is_demo: bool, out: LossOutput) -> None:
        """Add the sketches of a micro-batch, if `sketch` was requested.

        Args:
            units: for each sequence, an id that dependent sequences share, such as the rollouts of
                one prompt; -1: independent.
            is_demo: whether the sequences are demonstrations.
            out: the loss of the micro-batch.
        """
        self._sketches.add(None, [Row((), 0, is_demo, unit=unit) for unit in units], out)

    def close(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """End the optimizer step: gather the statistics, update mu and return this step's metrics.

        Args:
            group: the data-parallel process group; None: the default group, if any.

        Returns:
            mu, the method's own columns (mu_star, prior, alpha, ...), rollout_loss, demo_loss,
            sft_variance, rl_variance, disagreement, kl and demo_tokens; values that were not
            measured are left out.

        Raises:
            RuntimeError: ranks differ in mu, `observe` was not called, or KLControl has no KL.
        """
        total, losses = self._gather(group)
        metrics: dict[str, Any] = {
            "kl": float(total.kl),
            "entropy": float(total.entropy),
            "rollout_loss": losses[0],
            "demo_loss": losses[1],
        }
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        if isinstance(self.method, KLControl) and total.rollout_tokens and math.isnan(total.kl):
            raise RuntimeError(
                f"controller={self.method.name} follows the KL to the reference policy, which is "
                "not measured (kl=nan): use the trainer's KL loss, or another controller"
            )
        needs = self.method.needs(self._step)
        row = {
            "mu": self.mu,
            **self.method.report(self._state),
            **metrics,
            **total.signals(needs.trim)._asdict(),
            "demo_tokens": float(total.demo_tokens),
        }
        sketches = self._sketches.gathered() if needs.sketch else None
        evidence = Evidence(self._step, total, sketches=sketches) if needs.signals else None
        self._step += 1
        observation = Observation(
            self._step, **metrics, evidence=evidence, demo_losses=demo_losses(total)
        )
        self._state, self._mix = next_mix(self.method, self._state, observation)
        self._clear()
        return {k: v for k, v in row.items() if v is not None and math.isfinite(v)}

    def _clear(self) -> None:
        self._moments = TokenMoments.zeros()
        self._losses: tuple[list[Tensor], list[Tensor]] = [], []
        self._sketches = UnitSketches(self.method.needs(self._step).sketch)

    def _gather(self, group: dist.ProcessGroup | None) -> tuple[TokenMoments, Sequence[float]]:
        """The step's moments and losses over all ranks, on the CPU."""
        moments = self._moments
        zero = moments.totals.new_zeros(())
        losses = torch.stack([sum((x.double() for x in term), zero) for term in self._losses])
        scored = moments.demo_nll[moments.demo_nll != -math.inf]
        nll = torch.full((self.batch,), -math.inf, dtype=torch.float64, device=scored.device)
        if len(scored) > self.batch:
            raise RuntimeError(
                f"observe() got {len(scored)} demonstrations in one step, more than "
                f"batch={self.batch}: call close() after every step, or use a larger batch"
            )
        nll[: len(scored)] = scored
        mu = torch.tensor([self.mu], dtype=torch.float64, device=nll.device)
        local = torch.cat([mu, losses, moments.rollouts, moments.totals, nll])
        rows = [local]
        if dist.is_available() and dist.is_initialized():
            rows = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
            dist.all_gather(rows, local, group=group)
        table = torch.stack(rows).cpu()
        if (table[:, 0] != table[0, 0]).any():
            raise RuntimeError(
                f"mu differs between ranks: {table[:, 0].tolist()}; load the same controller state "
                "on all of them"
            )
        parts = [TokenMoments(row[3:10], row[16:], row[10:16]) for row in table]
        total = TokenMoments.merged(parts)
        if total.rollout_tokens + total.demo_tokens == 0:
            raise RuntimeError("no statistics since the last close(): call observe() in every step")
        return total, table[:, 1:3].mean(0).tolist()

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


def resolve_method(controller: ControllerConfig | Method | None, sketches: bool = False) -> Method:
    """Convert the controller to a Method; None gives the default method.

    `sketches` declares that the trainer measures head sketches.

    Raises:
        ValueError: the controller needs more than log-probabilities.
    """
    if controller is None:
        return METHODS[DEFAULT]()
    valid = isinstance(controller, (ControllerConfig, Method))
    require(valid, "controller", controller, "a ControllerConfig or a method of gac.methods")
    name = getattr(controller, "name", "ControllerConfig")
    if isinstance(controller, Method):
        needs = controller.needs(0)
        if not (needs.rollouts and needs.demos):
            kind = "rollouts" if needs.rollouts else "demonstrations"
            raise ValueError(
                f"controller={name} trains on only {kind}, so it has nothing to mix: use gac, "
                "guarded or constant, or leave GAC out"
            )
    if isinstance(controller, ControllerConfig):
        missing = _missing_inputs(controller, sketches)
    else:
        supported = isinstance(controller, (CHORD, Constant, KLControl))
        missing = "" if supported else "measurements that only gac's own trainer makes"
    if missing:
        raise ValueError(
            f"controller={name} needs {missing}, but only log-probabilities are available "
            "inside other trainers: use gac, chord, constant, guarded or kl-ctrl, or run "
            "`gac train`"
        )
    return controller if isinstance(controller, Method) else GAC(**vars(controller))


def refuse(trainer: str, options: dict[str, tuple[bool, str]]) -> None:
    """Raise ValueError, naming `trainer`, for the first option that is set.

    options: name -> (whether it is set, the fix).
    """
    for option, (is_set, fix) in options.items():
        if is_set:
            raise ValueError(f"{trainer} does not support {option}: {fix}")


def _missing_inputs(controller: ControllerConfig, sketches: bool) -> str:
    """Describe the inputs that `controller` needs but other trainers lack; "" if there are none."""
    signals = getattr(controller, "signals", None)  # a plain ControllerConfig uses the proxies
    needs = SourceNeeds() if signals is None else signals.needs
    if controller.estimator != "independent":
        return f"the covariance or biases of the gradients for estimator={controller.estimator!r}"
    if sketches and needs.sketch:
        return ""
    if controller.gate is not None:
        return "the inner product of the two gradients for its gate"
    if needs == SourceNeeds():
        return ""
    return f"gradients for signals={signals!r}"


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
