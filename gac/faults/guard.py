"""Which optimiser steps are not applied, and when a run is given up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class GuardConfig:
    """When an optimiser step is skipped, and when the run is given up."""

    max_norm: float = 1e5
    """A step whose gradient norm is above this, or not finite, is not applied."""
    patience: int = 5
    """So many skipped steps in a row stop the run, after a checkpoint."""
    keep: int = 3
    """Skipped batches that are saved under out/replay for `gac replay`; each with its weights."""

    def __post_init__(self) -> None:
        if not self.max_norm > 0:
            raise ValueError(f"max_norm={self.max_norm!r}: use a number > 0")
        if self.patience < 1:
            raise ValueError(f"patience={self.patience!r}: use a number >= 1")
        if self.keep < 0:
            raise ValueError(f"keep={self.keep!r}: use a number >= 0")


class Guard:
    """Judges every step before the optimiser sees its gradient, and counts the bad ones."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.skipped = self.in_a_row = self.kept = 0
        self.fault: str | None = None  # of the last skipped step

    def judge(self, norm: float, losses: Mapping[str, float]) -> str | None:
        """Why the step must be skipped, or None. All arguments are global over ranks."""
        fault = None
        for name, value in {**losses, "grad_norm": norm}.items():
            if not math.isfinite(value):
                fault = f"{name} is {value}"
                break
        else:
            if norm > self.config.max_norm:
                fault = f"grad_norm is {norm:.3g}, above guards.max_norm={self.config.max_norm:g}"
        self.skipped += fault is not None
        self.in_a_row = self.in_a_row + 1 if fault else 0
        self.fault = fault or self.fault
        return fault

    @property
    def exhausted(self) -> bool:
        """Whether the run must stop."""
        return self.in_a_row >= self.config.patience

    def state_dict(self) -> dict[str, int]:
        """Plain JSON types; a run that was given up starts counting afresh."""
        in_a_row = 0 if self.exhausted else self.in_a_row
        return {"skipped": self.skipped, "in_a_row": in_a_row, "kept": self.kept}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from `state`."""
        self.skipped, self.in_a_row, self.kept = (
            state[name] for name in ("skipped", "in_a_row", "kept")
        )
