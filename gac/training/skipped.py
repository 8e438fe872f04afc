"""Saves a skipped step: the exact `Step`, the model's weights and the results.

replay/step-00000012/rank-0.pt    the step, one file per rank with the rank's rows
replay/step-00000012/weights/     the model before the step and the moving averages of gradients,
                                  shared by consecutive skipped steps
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gac.control.term_pair import TermPair
from gac.data.rows import Row
from gac.errors import ConfigError
from gac.faults import checkpoint
from gac.parallel.collectives import rank
from gac.training.step import Step

FORMAT = 2  # version of the files; incremented when older ones can no longer be read


@dataclass(frozen=True)
class SkippedStep:
    """A step that was not applied, and the results that caused it to be skipped."""

    step: Step
    weights: TermPair | None
    """The solver's weights of the two terms; None: the step's own mix."""
    fault: str
    """Why it was skipped."""
    norm: float
    """Gradient norm."""
    losses: TermPair
    """The two loss terms, reduced over all ranks."""

    def save(
        self, folder: Path, model: nn.Module, tracked: dict[str, Tensor], first: Path | None
    ) -> Path:
        """Write the step under `folder` and return its path. Call it on every rank.

        tracked: moving averages of gradients. first: path of the first of the consecutive skipped
            steps, which has the weights; None: this is the first.
        """
        path = folder / f"step-{self.step.number:08d}"
        if first is None:
            checkpoint.write_weights(path / "weights", model, tracked)
        path.mkdir(exist_ok=True)
        plain: dict[str, Any] = {
            "format": FORMAT,
            "step": self.step.plain(),
            "fault": self.fault,
            "norm": self.norm,
            "weights": None if self.weights is None else tuple(self.weights),
            "losses": tuple(self.losses),
            "shares": (first or path).name,
        }
        torch.save(plain, path / f"rank-{rank()}.pt")
        return path


def load(path: Path) -> tuple[SkippedStep, Path]:
    """The step saved at `path`, with the rows of all ranks, and the path of its weights.

    Raises ConfigError if no step is saved at `path`, or if another version wrote it.
    """
    files = sorted(path.glob("rank-*.pt"), key=lambda p: int(p.stem.removeprefix("rank-")))
    if not files:
        raise ConfigError(f"{path} contains no saved step: give a folder in RUN/replay")
    parts = [torch.load(file, weights_only=True) for file in files]
    if parts[0].get("format") != FORMAT:
        raise ConfigError(
            f"{path} was written by another version of gac: replay it with that version"
        )
    plain = parts[0]  # all but rows and log-probs are the same on every rank
    skipped = SkippedStep(
        _merged([Step.restore(part["step"]) for part in parts]),
        None if plain["weights"] is None else TermPair(*plain["weights"]),
        plain["fault"],
        plain["norm"],
        TermPair(*plain["losses"]),
    )
    return skipped, path.parent / plain["shares"] / "weights"


def _merged(parts: Sequence[Step]) -> Step:
    """One step with all ranks' rows; `Row.sequence` then indexes the joined log-probs."""
    rows: list[Row] = []
    old: list[Tensor] = []
    for part in parts:
        rows += [row._replace(sequence=row.sequence + len(old)) for row in part.rows]
        old += part.old_logps
    return dataclasses.replace(parts[0], rows=tuple(rows), old_logps=tuple(old))
