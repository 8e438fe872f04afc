"""A skipped step on disk: the very `Step` that was computed, with its weights and what came out.

replay/step-00000012/rank-0.pt    the step, one file per rank with the rank's rows
replay/step-00000012/weights/     the model before the step, shared by skipped steps in a row,
                                  and a method's moving averages
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gac.data.rows import Row
from gac.errors import ConfigError
from gac.pair import Pair
from gac.parallel.collectives import rank
from gac.training.step import Step

from . import checkpoint

FORMAT = 2  # of the files, raised when an older program's cannot be read


@dataclass(frozen=True)
class SkippedStep:
    """A step that was not applied."""

    step: Step
    weights: Pair | None
    """Of the two terms, from a solver; None: the step's own mix."""
    fault: str
    """Why it was skipped."""
    norm: float
    """Of the gradient."""
    losses: Pair
    """Over all ranks."""

    def keep(
        self, folder: Path, model: nn.Module, tracked: dict[str, Tensor], first: Path | None
    ) -> Path:
        """Write the step under `folder`; every rank calls it. Returns its path.

        tracked: moving averages of gradients. first: where the first of the skipped steps in a row
        was kept, if this is a later one: the weights are still the same.
        """
        path = folder / f"step-{self.step.number:08d}"
        if first is None:
            checkpoint.write_weights(path / "weights", model, tracked)
        path.mkdir(parents=True, exist_ok=True)
        plain: dict[str, Any] = {
            "format": FORMAT, "step": self.step.plain(), "fault": self.fault, "norm": self.norm,
            "weights": None if self.weights is None else tuple(self.weights),
            "losses": tuple(self.losses), "shares": (first or path).name,
        }  # fmt: skip
        torch.save(plain, path / f"rank-{rank()}.pt")
        return path


def load(path: Path) -> tuple[SkippedStep, Path]:
    """The step kept at `path`, with the rows of all ranks, and where its weights are.

    Raises ConfigError if there is none, or if another version wrote it.
    """
    files = sorted(path.glob("rank-*.pt"), key=lambda p: int(p.stem.removeprefix("rank-")))
    if not files:
        raise ConfigError(f"{path} holds no kept step: give a folder of RUN/replay")
    parts = [torch.load(file, weights_only=True) for file in files]
    if parts[0].get("format") != FORMAT:
        raise ConfigError(f"{path} was kept by another version of gac: replay it with that one")
    plain = parts[0]  # all but rows and log-probs are the same on every rank
    skipped = SkippedStep(
        _merged([Step.restore(part["step"]) for part in parts]),
        None if plain["weights"] is None else Pair(*plain["weights"]),
        plain["fault"], plain["norm"], Pair(*plain["losses"]),
    )  # fmt: skip
    return skipped, path.parent / plain["shares"] / "weights"


def _merged(parts: Sequence[Step]) -> Step:
    """One step with all ranks' rows; their sequence numbers index the joined log-probs."""
    rows: list[Row] = []
    old: list[Tensor] = []
    for part in parts:
        rows += [row._replace(sequence=row.sequence + len(old)) for row in part.rows]
        old += part.old_logps
    return dataclasses.replace(parts[0], rows=tuple(rows), old_logps=tuple(old))
