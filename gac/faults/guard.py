"""Decides which optimizer steps to skip and when to abort the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gac.errors import require, require_at_least


@dataclass(frozen=True)
class GuardConfig:
    """When to skip an optimizer step, and when to abort the run."""

    skip_above_norm: float = 1e5
    """Skip a step whose gradient norm is above this or not finite."""
    patience: int = 5
    """Number of consecutive skipped steps after which the run saves a checkpoint and aborts."""
    max_saved_steps: int = 3
    """Maximum number of skipped steps saved under out/replay for `gac replay`, with their weights.
    """

    def __post_init__(self) -> None:
        require(self.skip_above_norm > 0, "skip_above_norm", self.skip_above_norm, "a number > 0")
        require_at_least(1, self, "patience")
        require_at_least(0, self, "max_saved_steps")


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
        """Resume from `state`; in older checkpoints "consecutive" is called "in_a_row"."""
        self.skipped, self.kept = state["skipped"], state["kept"]
        self.consecutive = state["consecutive" if "consecutive" in state else "in_a_row"]
