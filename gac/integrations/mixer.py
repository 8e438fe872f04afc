"""GAC inside another trainer; see `Mixer`."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gac.control.checks import is_count, require
from gac.control.controller import ControllerConfig
from gac.control.evidence import Evidence, Wanted
from gac.control.term_pair import Pair
from gac.data.order import Order
from gac.methods import CHORD, GAC, Constant, Method, Observation
from gac.methods.base import Outcome
from gac.methods.kl_ctrl import KLControl
from gac.parallel.collectives import rank
from gac_kernels import LossSpec, TokenMoments

logger = logging.getLogger(__name__)
FILE = "gac.json"


class Mixer:
    """Runs a controller inside another trainer: draws demonstrations, weights the losses, collects
    statistics.

    The trainer keeps its own rollout loss; you add the demonstration loss to it::

        rows = mixer.draw()                  # at the start of an optimiser step
        loss = mixer.rollouts(rollout_loss) + mixer.demos(demo_loss)  # in each micro-batch
        mixer.observe(out.moments)           # in each micro-batch: its statistics
        log = mixer.close()                  # at the end of the step: updates mu

    Every rank draws the same rows without communication, and `close` checks that mu is the same on
    all ranks. Scale losses as for DDP: summed over a rank's micro-batches and averaged over ranks,
    they must give the loss of the step.

    Args:
        controller: a ControllerConfig, or a method of `gac.methods` that needs only
            log-probabilities: GAC (proxy signals, no gate), CHORD, Constant, Guarded or KLControl.
            None: GAC().
        rows: number of available demonstrations.
        batch: demonstrations per optimizer step, over all ranks.
        seed: seed for shuffling the demonstrations.

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
    ) -> None:
        require(is_count(batch, 1), "batch", batch, "a number of demonstrations >= 1")
        self.method = served(controller)
        self.spec: LossSpec = self.method.loss(LossSpec()).spec
        """Weighting and reduction of the demonstration loss; the other fields are not used."""
        self.batch = batch
        self._order = Order(rows, seed)
        self._step = 0
        self._state, self._mix = self.method.mix(self.method.init(), Observation(0))
        self._moments: TokenMoments
        self._clear()

    @property
    def mu(self) -> float:
        """The weight of the demonstrations in the current step."""
        return self._mix.mu

    def draw(self) -> list[int]:
        """Draw the row indices of the step's demonstrations, the same on every rank."""
        return self._order.take(self.batch)

    def rollouts(self, loss: Tensor) -> Tensor:
        """Multiply the trainer's own micro-batch loss (0-d) by its weight, 1 - mu."""
        self._losses[0].append(loss.detach())
        return self._mix.pair.rollout * loss

    def demos(self, loss: Tensor) -> Tensor:
        """Multiply the demonstration loss of a micro-batch (0-d) by its weight, mu."""
        self._losses[1].append(loss.detach())
        return self._mix.pair.demo * loss

    def observe(self, moments: TokenMoments | None) -> None:
        """Add the statistics of a micro-batch of rollouts, demonstrations or both.

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

    def close(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """End the optimizer step: gather the statistics, update mu and return this step's metrics.

        Args:
            group: the data-parallel process group; None: the default group, or this process alone.

        Returns:
            mu, the method's own columns (mu_star, prior, alpha, ...), rollout_loss, demo_loss,
            sft_variance, rl_variance, disagreement, kl and demo_tokens; values that were not
            measured are left out.

        Raises:
            RuntimeError: mu differs between ranks, or `observe` was called on none of them.
        """
        total, losses = self._gather(group)
        seen: dict[str, Any] = {
            "kl": float(total.kl),
            "entropy": float(total.entropy),
            "rollout_loss": losses[0],
            "demo_loss": losses[1],
        }
        known = {name: value for name, value in seen.items() if math.isfinite(value)}
        needs = self.method.needs(self._step)
        evidence = Evidence(self._step, total) if needs.signals else None
        outcome = Outcome(evidence, Pair(demo=losses[1], rollout=losses[0]), None)
        self._state, reading = self.method.after_step(self._state, outcome)
        row = {
            "mu": self.mu,
            **self.method.report(self._state),
            **known,
            **total.signals(needs.trim)._asdict(),
            "demo_tokens": float(total.demo_tokens),
        }
        self._step += 1
        signals = None if reading is None else reading.signals
        observation = Observation(self._step, signals, **known)
        before = self._state
        self._state, self._mix = self.method.mix(before, observation)
        if (news := self.method.notice(before, self._state)) and rank() == 0:
            logger.warning("step %d: %s", self._step + 1, news)
        self._clear()
        return {k: v for k, v in row.items() if v is not None and math.isfinite(v)}

    def _clear(self) -> None:
        self._moments = TokenMoments.zeros()
        self._losses: tuple[list[Tensor], list[Tensor]] = [], []

    def _gather(self, group: dist.ProcessGroup | None) -> tuple[TokenMoments, Sequence[float]]:
        """The step's moments and losses over all ranks, on the CPU."""
        own = self._moments
        zero = own.totals.new_zeros(())
        losses = torch.stack([sum((x.double() for x in side), zero) for side in self._losses])
        scored = own.demo_nll[own.demo_nll != -math.inf]
        nll = torch.full((self.batch,), -math.inf, dtype=torch.float64, device=scored.device)
        if len(scored) > self.batch:
            raise RuntimeError(
                f"observe() got {len(scored)} demonstrations in one step, more than batch={self.batch}"
            )
        nll[: len(scored)] = scored
        mu = torch.tensor([self.mu], dtype=torch.float64, device=nll.device)
        mine = torch.cat([mu, losses, own.rollouts, own.totals, nll])
        rows = [mine]
        if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
            rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(rows, mine, group=group)
        table = torch.stack(rows).cpu()
        if (table[:, 0] != table[0, 0]).any():
            raise RuntimeError(
                f"mu differs over the ranks, {table[:, 0].tolist()}: load the same controller "
                "state on all of them"
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
        require(not missing, "state", missing, "a dict from state_dict(), which has these keys")
        if state["name"] != self.method.name:
            raise ValueError(
                f"the saved controller is {state['name']!r} and this run's {self.method.name!r}: "
                "resume with the same controller"
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
                f"{path} is missing: this checkpoint was saved without a controller, so mu is unknown; start a new run from its weights instead of resuming"
            )
        self.load_state_dict(json.loads(path.read_text()))


def served(controller: ControllerConfig | Method | None) -> Method:
    """Return the controller as a Method (None: GAC()). Raises ValueError, naming it, if it needs
    more than log-probabilities.
    """
    if controller is None:
        return GAC()
    known = isinstance(controller, (ControllerConfig, Method))
    require(known, "controller", controller, "a ControllerConfig or a method of gac.methods")
    name = getattr(controller, "name", "ControllerConfig")
    if isinstance(controller, ControllerConfig):
        lacking = _lacking(controller)
    else:
        plain = isinstance(controller, (CHORD, Constant, KLControl))
        lacking = "" if plain else "measurements that only gac's own trainer makes"
    if lacking:
        raise ValueError(
            f"controller={name}: it needs {lacking}; inside another trainer there are "
            "log-probabilities only: use gac, chord, constant, guarded or kl-ctrl, or train with "
            "gac itself"
        )
    return controller if isinstance(controller, Method) else GAC(**vars(controller))


def _lacking(controller: ControllerConfig) -> str:
    """What a guided controller needs from the gradients themselves; empty if nothing."""
    if controller.gate is not None:
        return "the inner product of the two gradients for its gate"
    if controller.estimator != "independent":
        return (
            f"the covariance or biases of the two gradients for estimator={controller.estimator!r}"
        )
    signals = getattr(controller, "signals", None)  # a plain ControllerConfig uses the proxies
    plain = signals is None or signals.wanted == Wanted()
    return "" if plain else f"gradients for signals={signals!r}"
