"""The guided controller: computes the mixing weight mu of each step from noise signals and a KL.

`step` is the whole algorithm, a pure function from one `ControllerState` to the next;
`GuidedController` only stores a config and a state. docs/controller.md explains every option.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any

from gac.errors import finite, is_count, numbers, require
from gac.fields import (
    Checked,
    Count,
    Decay,
    Natural,
    NonNegative,
    Number,
    Positive,
    Share,
    Valid,
    one_of,
    setting,
)
from gac.types import Corrections
from gac_kernels.contract import Signals

from .alarm import Alarm, AlarmState
from .estimators import mu_star, mu_star_biased, mu_star_biased_paper
from .gate import Gate, GateState
from .schedules import Prior
from .signals import Alignment


@dataclass(frozen=True)
class ControllerState:
    """The state that an update needs, and the latest values for logging."""

    step: int
    """Number of updates so far; t of the next one."""
    mu: float
    """The current mixing weight."""
    mu_ada: float
    """The adaptive weight of the last update; m_t under ema="state"."""
    alpha: float
    """Target share of the SFT gradient."""
    kl: float | None = None
    """EMA of the KL, nats per token; None before the first."""
    sft_variance: float | None = None
    """EMA of sigma_s^2; None before the first."""
    rl_variance: float | None = None
    """EMA of sigma_r^2; None before the first."""
    disagreement: float | None = None
    """EMA of the disagreement; None before the first."""
    corrections: tuple[float, ...] | None = None
    """EMA of the `Corrections`; None before the first."""
    mu_star: float | None = None
    """mu* of the last update; None before the first."""
    prior: float | None = None
    """mu_prior of the last update; None before the first."""
    gate: GateState | None = None
    """State of the gate; None before its first measurement."""
    alarm: AlarmState | None = None
    """State of the alarm; None before the first loss."""
    alpha_step: float = 0.0
    """s_t of the last update, times `kl_sign`; 0: the KL is in its target band, or not new."""

    @property
    def demos_suspect(self) -> bool:
        """Whether the demonstrations are assumed to be wrong."""
        return self.alarm is not None and self.alarm.suspect

    def to_dict(self) -> dict[str, Any]:
        """The state in plain JSON types; floats round-trip exactly through JSON."""
        plain = asdict(self)
        if self.corrections is not None:
            plain["corrections"] = list(self.corrections)
        plain["gate"] = None if self.gate is None else list(self.gate)
        plain["alarm"] = None if self.alarm is None else self.alarm.to_plain()
        return plain

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> ControllerState:
        """Inverse of `to_dict`.

        Raises:
            ValueError: missing, unknown or non-finite entries.
        """
        require(isinstance(plain, dict), "state", plain, "a dict from state_dict()")
        wrong = sorted({f.name for f in fields(cls)} ^ set(plain))
        use = "a dict from state_dict(); the keys listed here are missing or unknown"
        require(not wrong, "state", wrong, use)
        require(is_count(plain["step"]), "step", plain["step"], "an integer >= 0")
        values = dict(plain)
        for name in ("mu", "mu_ada", "alpha", "alpha_step"):
            values[name] = finite(name, plain[name])
        for name in ("kl", "sft_variance", "rl_variance", "disagreement", "mu_star", "prior"):
            values[name] = None if plain[name] is None else finite(name, plain[name])
        if (corrections := plain["corrections"]) is not None:
            count = len(Corrections._fields)
            values["corrections"] = tuple(numbers("corrections", corrections, count))
        values["gate"] = None if plain["gate"] is None else GateState.of(plain["gate"])
        values["alarm"] = None if plain["alarm"] is None else AlarmState.of(plain["alarm"])
        return cls(**values)


ESTIMATOR = one_of("independent", "correlated", "biased", "biased_paper")


@dataclass(frozen=True)
class ControllerConfig(Checked):
    """Options of the controller; `paper()` returns those of Algorithm 1 as printed.

    Raises:
        ValueError: a value is invalid; the message names the field and the valid values.

    Source:
        The paper's Algorithm 1 and equations 3 to 13; see docs/controller.md.
    """

    ema: Annotated[str, one_of("state", "literal", "none")] = "state"
    """How mu* is averaged. "state": m_t = beta m_{t-1} + (1 - beta) mu*, then blended with the
    prior. "literal": beta mu_{t-1} + (1 - beta) mu*, as Algorithm 1 is printed. "none": no
    averaging."""
    ema_decay: Decay = setting(0.99, only_with="ema=state or ema=literal")
    """Decay beta of that average, in [0, 1)."""
    prior_blend: Share = 0.5
    """lambda in [0, 1]: share of the adaptive weight; 1: no prior, 0: only the prior."""
    max_step: NonNegative = 0.01
    """c-bar >= 0: largest change of mu per step; 1: no cap."""
    update_every: Count = 10
    """f_mu: optimizer steps between refreshes of the signals."""
    early_update_every: Count | None = None
    """f_mu during the first `early_steps` steps (the paper tried 2); null: same as `update_every`.
    """
    early_steps: Natural = setting(100, only_with="early_update_every")
    """Number of steps that use `early_update_every`."""
    signal_decay: Decay = 0.9
    """EMA decay of the signals per refresh, in [0, 1); 0 keeps only the newest value."""
    mu_init: Number = 0.5
    """mu before the first update, and m_0."""
    mu_min: Share = 0.02
    """Lower bound of mu."""
    mu_max: Share = 0.98
    """Upper bound of mu."""
    alpha_init: Number = 0.7
    """Target share of the SFT gradient before the first KL measurement."""
    alpha_min: Share = 0.1
    """Lower bound of alpha. The update is multiplicative, so an alpha of 0 stays 0."""
    alpha_max: Share = 0.95
    """Upper bound of alpha."""
    kl_target: Positive = 0.02
    """KL_tgt > 0: target KL to the reference policy, in nats per token."""
    kl_up: NonNegative = 0.2
    """eta_up >= 0: gain of the alpha update while the KL is above its target band."""
    kl_down: NonNegative = 0.3
    """eta_down >= 0: gain of the alpha update while the KL is below its target band."""
    kl_hysteresis: NonNegative = 0.1
    """h >= 0: alpha is not updated while KL / KL_tgt is in [1 - h, 1 + h]."""
    kl_decay: Decay = 0.9
    """EMA decay of the KL, in [0, 1); the average starts at the first value."""
    kl_sign: Annotated[int, Valid("1 or -1", (1, -1).__contains__)] = 1
    """+1: a high KL raises the SFT share, as printed; -1: a high KL lowers it."""
    alpha_every: Annotated[str, one_of("refresh", "step")] = "refresh"
    """When alpha is updated: on "refresh" steps, or on every "step"."""
    estimator: Annotated[str, ESTIMATOR] = "independent"
    """Formula for mu*: equation 3 ("independent"), equation 4 ("correlated"), the exact optimum for
    biased gradients ("biased"), or equation 5 with b_r as g-bar ("biased_paper").
    """
    prior: Callable[[int], float] = field(default_factory=Prior)
    """mu_prior(t) in [0, 1] as a function of the step t, from 0; see `gac.control.schedules`."""
    gate: Gate | None = None
    """Optional gate, which multiplies the blend by its trust; null: mu follows the blend."""
    alarm: Alarm | None = None
    """Closes the gate immediately after a lasting rise in the demonstration loss, until rewards
    confirm the demonstrations or the loss returns; null: no alarm.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for part in ("mu", "alpha"):
            low, high = getattr(self, f"{part}_min"), getattr(self, f"{part}_max")
            init = getattr(self, f"{part}_init")
            require(low <= high, f"{part}_min", low, f"a number <= {part}_max={high!r}")
            require(low <= init <= high, f"{part}_init", init, f"a number in [{low}, {high}]")
        require(callable(self.prior), "prior", self.prior, "a callable step -> mu")
        # the printed EMA averages the applied mu, so a closed gate could never reopen
        literal_ema_with_gate = self.gate is not None and self.ema == "literal"
        require(not literal_ema_with_gate, "ema", self.ema, "state or none with a gate")
        alarm_without_gate = self.alarm is not None and self.gate is None
        require(not alarm_without_gate, "alarm", self.alarm, "null, or set a gate as well")

    @classmethod
    def paper(cls, **changes: Any) -> ControllerConfig:
        """Algorithm 1 exactly as printed, with the paper's numbers.

        Args:
            changes: fields to override.
        """
        printed: dict[str, Any] = {"ema": "literal", "alpha_every": "step", "signal_decay": 0.99}
        return cls(**(printed | changes))

    def is_refresh(self, t: int) -> bool:
        """Whether update `t`, counted from 0, uses new signals."""
        early = self.early_update_every
        return t % (self.update_every if early is None or t >= self.early_steps else early) == 0


def initial_state(config: ControllerConfig) -> ControllerState:
    """The state before the first update."""
    return ControllerState(0, config.mu_init, config.mu_init, config.alpha_init)


def step(
    config: ControllerConfig,
    state: ControllerState,
    signals: Signals | None = None,
    kl: float | None = None,
    corrections: Corrections | None = None,
    alignment: Alignment | None = None,
    demo_loss: float | None = None,
    demo_losses: Sequence[float] | None = None,
) -> ControllerState:
    """One update: Algorithm 1 with the options of `config`.

    Args:
        config: the options.
        state: the state before the update, which is not modified.
        signals: sigma_s^2, sigma_r^2 and disagreement of this refresh; a non-finite one leaves its
            average unchanged. None between refreshes.
        kl: mean KL to the reference policy per token, nats; ignored if not finite.
        corrections: for the estimators other than "independent"; zero until they are first given.
        alignment: inner product of the two gradients at this refresh, for a gate.
        demo_loss: mean loss of the step's demonstrations, for an alarm; ignored if not finite.
        demo_losses: loss of each demonstration; if one of them is finite, `demo_loss` is not read.
    """
    decay = config.signal_decay
    signal_emas = [state.sft_variance, state.rl_variance, state.disagreement]
    if signals is not None:
        new = map(float, (signals.sft_variance, signals.rl_variance, signals.disagreement))
        signal_emas = [_ema(decay, *pair) for pair in zip(signal_emas, new, strict=True)]
    correction_emas = state.corrections
    if corrections is not None:
        old = correction_emas or (None,) * len(corrections)
        averages = [_ema(decay, *pair) for pair in zip(old, map(float, corrections), strict=True)]
        correction_emas = tuple(0.0 if value is None else value for value in averages)

    kl_ema, alpha, move = state.kl, state.alpha, 0.0
    due = config.alpha_every == "step" or config.is_refresh(state.step)
    if due and kl is not None and math.isfinite(kl):
        kl_ema = _average(config.kl_decay, state.kl, float(kl))
        move = alpha_step(config, kl_ema)
        alpha = next_alpha(config, alpha, kl_ema)

    target = _mu_star(config, alpha, signal_emas, correction_emas)
    beta = 0.0 if config.ema == "none" else config.ema_decay
    previous = state.mu if config.ema == "literal" else state.mu_ada
    mu_ada = beta * previous + (1.0 - beta) * target
    prior = finite("prior", config.prior(state.step))
    require(0 <= prior <= 1, f"prior({state.step})", prior, "a prior with values in [0, 1]")
    blend = (1.0 - config.prior_blend) * prior + config.prior_blend * mu_ada
    gate, alarm, demos_suspect = state.gate, state.alarm, state.demos_suspect
    if config.gate is not None:
        if config.alarm is not None:
            alarm, changed = config.alarm.update(alarm, demo_loss, demo_losses)
            demos_suspect = alarm is not None and alarm.suspect
            gate = config.gate.reset(gate, demos_suspect) if changed else gate
        gate = gate if alignment is None else config.gate.update(gate, alignment, demos_suspect)
        blend *= config.gate.trust(gate, demos_suspect)
    # wrong demonstrations do harm within a few steps, so the decrease is not capped
    change = _clip(blend - state.mu, -(1.0 if demos_suspect else config.max_step), config.max_step)
    mu = _clip(state.mu + change, config.mu_min, config.mu_max)
    sft_variance, rl_variance, disagreement = signal_emas
    return ControllerState(
        step=state.step + 1,
        mu=mu,
        mu_ada=mu_ada,
        alpha=alpha,
        kl=kl_ema,
        sft_variance=sft_variance,
        rl_variance=rl_variance,
        disagreement=disagreement,
        corrections=correction_emas,
        mu_star=target,
        prior=prior,
        gate=gate,
        alarm=alarm,
        alpha_step=move,
    )


def alpha_step(config: ControllerConfig, kl: float) -> float:
    """s_t of equation 13, times `kl_sign`: 0 in the band of the hysteresis; `kl` is averaged."""
    ratio = kl / config.kl_target
    move = 0.0
    if ratio > 1.0 + config.kl_hysteresis:
        move = config.kl_up * (ratio - 1.0)
    elif ratio < 1.0 - config.kl_hysteresis:
        move = -config.kl_down * (1.0 - ratio)
    return config.kl_sign * move


def next_alpha(config: ControllerConfig, alpha: float, kl: float) -> float:
    """Update alpha by equation 10 with the hysteresis of equation 13; `kl` is the averaged KL."""
    grown = alpha * math.exp(min(alpha_step(config, kl), 700.0))  # exp(710) overflows
    return _clip(grown, config.alpha_min, config.alpha_max)


def _mu_star(
    config: ControllerConfig,
    alpha: float,
    signal_emas: list[float | None],
    correction_emas: tuple[float, ...] | None,
) -> float:
    """mu* by the configured estimator; alpha until all three signals are known."""
    if any(value is None for value in signal_emas):
        return alpha
    # an unbiased estimate of a squared norm may be negative; clamp its average to 0
    ss, rr, d = (max(value, 0.0) for value in signal_emas if value is not None)
    terms = Corrections() if correction_emas is None else Corrections(*correction_emas)
    if config.estimator == "biased":
        return mu_star_biased(
            alpha, disagreement=d, sft_variance=ss, rl_variance=rr, corrections=terms
        )
    if config.estimator == "biased_paper":
        dot, gap = -terms.rl_bias_dot_gap, max(terms.bias_gap_sq, 0.0)
        shared = (alpha, d, ss, rr, terms.covariance)
        return mu_star_biased_paper(*shared, bias_dot_gradient=dot, bias_gap_sq=gap)
    return mu_star(
        alpha,
        disagreement=d,
        sft_variance=ss,
        rl_variance=rr,
        covariance=terms.covariance if config.estimator == "correlated" else 0.0,
    )


def _average(decay: float, old: float | None, new: float) -> float:
    return new if old is None else decay * old + (1.0 - decay) * new


def _ema(decay: float, old: float | None, new: float) -> float | None:
    """EMA that ignores non-finite values."""
    return _average(decay, old, new) if math.isfinite(new) else old


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


class GuidedController:
    """Computes mu in your own training loop: call `update` once per optimizer step.

    The same inputs give the same mu on every rank, so pass signals and a KL that are reduced over
    all ranks.

    Args:
        config: the options; None: `ControllerConfig()`.
    """

    def __init__(self, config: ControllerConfig | None = None) -> None:
        if not isinstance(config, ControllerConfig | None):
            raise TypeError(f"config is a {type(config).__name__}: use ControllerConfig(...)")
        self.config = ControllerConfig() if config is None else config
        self.state = initial_state(self.config)

    def __repr__(self) -> str:
        return f"GuidedController({self.config}, {self.state})"

    def update(
        self,
        signals: Signals | None = None,
        kl: float | None = None,
        corrections: Corrections | None = None,
        alignment: Alignment | None = None,
        demo_loss: float | None = None,
        demo_losses: Sequence[float] | None = None,
    ) -> float:
        """Update the state with the measurements of a step and return the next mu.

        Args:
            signals: the three signals, on steps where `is_refresh()` is true; a non-finite one
                leaves its average unchanged, and an unbiased estimate may be negative. None: not
                measured.
            kl: mean KL to the reference policy per rollout token, nats; None or non-finite: not
                measured.
            corrections: covariance and biases, for the estimators other than "independent".
            alignment: inner product of the two gradients, for a gate.
            demo_loss: mean loss of the step's demonstrations, for an alarm; None or non-finite: not
                measured.
            demo_losses: loss of each demonstration; if one of them is finite, `demo_loss` is not
                read.

        Returns:
            mu, the weight of the demonstrations, in [mu_min, mu_max].
        """
        if not isinstance(signals, Signals | None):
            raise TypeError(f"signals is a {type(signals).__name__}: use moments.signals()")
        measured = (signals, kl, corrections, alignment, demo_loss, demo_losses)
        self.state = step(self.config, self.state, *measured)
        return self.state.mu

    def is_refresh(self) -> bool:
        """Whether the next update uses new signals."""
        return self.config.is_refresh(self.state.step)

    @property
    def mu(self) -> float:
        """The current mixing weight; mu_init before the first update."""
        return self.state.mu

    @property
    def alpha(self) -> float:
        """Target share of the SFT gradient."""
        return self.state.alpha

    @property
    def mu_star(self) -> float | None:
        """mu* of the last update; None before the first."""
        return self.state.mu_star

    @property
    def prior(self) -> float | None:
        """mu_prior of the last update; None before the first."""
        return self.state.prior

    @property
    def trust(self) -> float:
        """The factor by which the gate scales mu; 1 without a gate."""
        if self.config.gate is None:
            return 1.0
        return self.config.gate.trust(self.state.gate, self.state.demos_suspect)

    def state_dict(self) -> dict[str, Any]:
        """The state in plain JSON types, for a checkpoint."""
        return self.state.to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` that was saved under the same config.

        Raises:
            ValueError: entries are missing, unknown or non-finite; the state does not change.
        """
        self.state = ControllerState.from_dict(state)
