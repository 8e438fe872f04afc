"""GAC: mu from the noise of both gradients and their disagreement (the paper, Algorithm 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from gac.control.alarm import Alarm, alarm_message, is_suspect
from gac.control.controller import ControllerConfig, ControllerState, initial_state, step
from gac.control.gate import Gate, GateState
from gac.control.schedules import Prior, PriorChoice
from gac.control.signals import (
    GradientSignals,
    ProxySignals,
    Reading,
    SignalSource,
    Source,
    bias_alignment,
)
from gac.fields import require_default
from gac.types import Evidence, Mix, Observation, State, StepNeeds
from gac_kernels import DemoWeight, Signals

from .base import OURS, TokenWeighted, preset

REPORTED = "mu_star", "prior", "alpha", "alpha_step"  # of the controller's state
AVERAGES = "kl", *Signals._fields
SATURATED = 5  # updates in a row after which a log message says that the controller is saturated


@dataclass(frozen=True)
class GAC(
    ControllerConfig,
    TokenWeighted,
    name="gac",
    family="noise-aware",
    source="the paper, section 3 and Algorithm 1",
    cost="reference forward pass on the rollouts, on refresh steps",
):
    """The guided adaptive controller; most fields are those of `ControllerConfig`."""

    prior: PriorChoice = Prior(hold=None, decay=None)
    """mu_prior(t), e.g. {hold: 50}, or package.module:function. By default it holds 0.85 for a
    quarter of the run and falls to 0.15 in the rest.
    """
    weight: DemoWeight = DemoWeight.PHI
    """Token weight of the demonstrations; one = the paper's "GAC w/o phi"."""
    signals: Source = field(default_factory=ProxySignals)
    """Source of the signals: the paper's proxies, or true gradients of all parameters."""
    gradient_parts: int = 4
    """Number of micro-batch gradients per term for `signals=gradients`, >= 2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gradient_parts < 2:
            raise ValueError(
                f"gradient_parts={self.gradient_parts!r}: use 2 or more, to estimate a variance"
            )
        needs = self.signals.needs
        if self.gate is not None and not needs.gram:
            raise ValueError(
                f"gate={self.gate!r} needs the inner product of the two gradients: set "
                "method.signals=gradients"
            )
        if self.estimator == "correlated":
            option = "paired"
            measured = needs.gram and getattr(self.signals, "paired", True)
        else:
            option, measured = "bias", needs.bias
        if self.estimator != "independent" and not measured:
            raise ValueError(
                f"estimator={self.estimator!r} needs what {option}=true measures: set "
                f"method.signals={{name: gradients, {option}: true}}"
            )
        if not needs.gram:
            require_default(self, "gradient_parts", "gradient_parts", "without signals=gradients")
        if self.prior_blend == 1:
            require_default(self, "prior", "prior", "with prior_blend=1")

    def for_run(self, steps: int) -> GAC:
        if not isinstance(self.prior, Prior) or self.prior_blend == 1:
            return self
        return replace(self, prior=self.prior.for_run(steps))

    def run_warning(self, steps: int) -> str | None:
        prior = self.for_run(steps).prior
        if not isinstance(prior, Prior) or self.prior_blend == 1 or prior.high == prior.low:
            return None
        end = prior(steps - 1)
        if abs(end - prior.high) > abs(end - prior.low):
            return None
        return (
            f"method.prior: hold={prior.hold}, decay={prior.decay} is longer than steps={steps}: "
            f"mu_prior ends at {end:.2f} and never comes near low={prior.low}; omit hold and decay "
            "to scale them with the run"
        )

    def init(self) -> State:
        return {
            "controller": initial_state(self).to_dict(),
            "signals": self.signals.init(),
            "read": None,
            "measured": {},  # of the latest reading: covariance and gamma, where measured
            "saturated": 0,  # consecutive updates with alpha at its upper bound and mu rising
        }

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        state, signals, corrections = dict(state), last.signals, last.corrections
        alignment = None
        if last.evidence is not None:
            reading, state["signals"] = self.signals.read(last.evidence, state["signals"])
            signals, corrections, alignment = reading
            state["read"] = list(signals)
            alpha = state["controller"]["alpha"]
            state["measured"] = measured_corrections(self.signals, last.evidence, reading, alpha)
        measured = signals, last.kl, corrections, alignment, last.demo_loss, last.demo_losses
        before = ControllerState.from_dict(state["controller"])
        controller = step(self, before, *measured)
        rises = controller.mu - before.mu > 0.999 * self.max_step
        saturated = rises and controller.alpha == self.alpha_max and self.max_step < 1
        count = state["saturated"] + 1 if saturated else 0
        state |= {"controller": controller.to_dict(), "saturated": count}
        return state, Mix(controller.mu)

    def log_message(self, before: State, after: State) -> str | None:
        alarm = alarm_message(before["controller"]["alarm"], after["controller"]["alarm"])
        return "; ".join(filter(None, [alarm, self._saturation(after)])) or None

    def _saturation(self, state: State) -> str | None:
        """A message at the update after which the controller counts as saturated."""
        kl = state["controller"]["kl"]
        if state["saturated"] != SATURATED or kl is None or kl <= self.kl_target:
            return None
        return (
            f"the controller is saturated: the KL ({kl:.2g}) is above method.kl_target="
            f"{self.kl_target:g}, alpha is at method.alpha_max={self.alpha_max:g}, and mu has "
            f"risen by method.max_step={self.max_step:g} in {SATURATED} steps in a row: raise "
            "method.kl_target, or lower optim.lr; if the demonstrations raise the KL, set "
            "method.kl_sign=-1"
        )

    def needs(self, step: int) -> StepNeeds:
        # Update t uses the measurements of step t - 1. Step 0 also measures, so that the averages
        # start early.
        refresh = step == 0 or self.is_refresh(step + 1)
        measures_kl = refresh or self.alpha_every == "step"
        needs = StepNeeds(
            kl=measures_kl, kl_optional=measures_kl, kl_trigger=measures_kl, signals=refresh
        )
        if refresh:
            source = self.signals.needs
            parts = self.gradient_parts if source.gram else 0
            needs = needs._replace(parts=parts, bias=source.bias)
        if isinstance(self.signals, ProxySignals):
            needs = needs._replace(trim=self.signals.trim)
        return needs

    def report(self, state: State) -> dict[str, float | None]:
        columns = {name: state["controller"][name] for name in REPORTED}
        columns |= {f"average_{name}": state["controller"][name] for name in AVERAGES}
        if state["controller"]["gate"] is not None:
            gate = GateState.of(state["controller"]["gate"])
            columns |= {"trust": gate.trust, "cosine": gate.cosine, "z": gate.z}
        if self.alarm is not None:
            alarm = state["controller"]["alarm"]
            columns["demos_suspect"] = float(is_suspect(alarm))
        if isinstance(self.signals, ProxySignals):
            return columns
        # the logged signals are the proxies; add the latest reading that this step's mu is based on
        read = dict(zip(Signals._fields, state["read"] or (None,) * 3, strict=True))
        read = read | {name: state["measured"].get(name) for name in self._corrections()}
        return columns | {f"read_{name}": value for name, value in read.items()}

    def _corrections(self) -> tuple[str, ...]:
        """The corrections that the source measures: the covariance, and gamma of the biases."""
        paired = getattr(self.signals, "paired", False)
        return ("covariance",) * paired + ("gamma",) * self.signals.needs.bias


def measured_corrections(
    source: SignalSource, evidence: Evidence, reading: Reading, alpha: float
) -> dict[str, float]:
    """The covariance of equation 4 and gamma of equation 5, where `source` measures them."""
    known: dict[str, float] = {}
    if getattr(source, "paired", False) and reading.corrections is not None:
        known["covariance"] = reading.corrections.covariance
    if evidence.bias_gram is not None:
        known["gamma"] = bias_alignment(evidence.bias_gram, alpha)
    return {name: value for name, value in known.items() if math.isfinite(value)}


GACPaper = preset(
    GAC,
    "gac-paper",
    "GAC exactly as printed in Algorithm 1; mu hardly leaves the prior.",
    ema="literal",
    alpha_every="step",
    signal_decay=0.99,
    cost="reference forward pass on the rollouts",
)
GACGated = preset(
    GAC,
    "gac-gated",
    "A constant mu of 0.7, scaled by a trust in [0, 1] that follows the inner product of the two "
    "gradients.",
    family=OURS,
    source="docs/controller.md",
    cost="reference forward pass and one gradient buffer per micro-batch, on refresh steps",
    prior=Prior.constant(0.7),
    prior_blend=0.0,
    mu_min=0.0,
    update_every=2,
    max_step=0.15,
    weight=DemoWeight.ONE,
    gate=Gate(),
    alarm=Alarm(),
    signals=GradientSignals(),
)
