"""The controller's state between updates, and its checkpoint format."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from gac.control.checks import finite, is_count, numbers, require

from .alarm import AlarmState
from .estimators import Corrections
from .gate import GateState


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
        wrong = sorted({f.name for f in fields(cls)} ^ set(plain))
        use = "a dict from to_dict(); the keys listed here are missing or unknown"
        require(not wrong, "state", wrong, use)
        require(is_count(plain["step"]), "step", plain["step"], "an integer >= 0")
        values = dict(plain)
        for name in ("mu", "mu_ada", "alpha"):
            values[name] = finite(name, plain[name])
        for name in ("kl", "sft_variance", "rl_variance", "disagreement", "mu_star", "prior"):
            values[name] = None if plain[name] is None else finite(name, plain[name])
        if (corrections := plain["corrections"]) is not None:
            count = len(Corrections._fields)
            values["corrections"] = tuple(numbers("corrections", corrections, count))
        values["gate"] = None if plain["gate"] is None else GateState.of(plain["gate"])
        values["alarm"] = None if plain["alarm"] is None else AlarmState.of(plain["alarm"])
        return cls(**values)
