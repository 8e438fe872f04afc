"""`gac replay`: save a skipped step, and recompute it and each of its rows separately."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gac.collectives import rank
from gac.config import load
from gac.errors import CheckpointError, ConfigError
from gac.faults import checkpoint
from gac.models.causal_lm import load_tokenizer
from gac.parallel import process_group
from gac.rows import Row
from gac.train_config import TrainConfig
from gac.training.policy import load_policy, load_reference, make_gradients
from gac.training.step import Step
from gac.types import TermPair

FORMAT = 3  # version of the files; incremented when older ones can no longer be read


@dataclass(frozen=True)
class SkippedStep:
    """A step that was not applied, and the results that caused it to be skipped."""

    step: Step
    term_weights: TermPair | None
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

        Raises CheckpointError, on every rank, if any rank could not write its part.
        """
        path = folder / f"step-{self.step.number:08d}"
        plain: dict[str, Any] = {
            "format": FORMAT,
            "step": self.step.plain(),
            "fault": self.fault,
            "norm": self.norm,
            "term_weights": None if self.term_weights is None else tuple(self.term_weights),
            "losses": tuple(self.losses),
            "shares": (first or path).name,
        }
        data = BytesIO()
        torch.save(plain, data)
        checkpoint.clear(path)  # an earlier attempt may have had more ranks
        try:
            if first is None:
                checkpoint.write_weights(path / "weights", model, tracked)
            checkpoint.write_bytes(path / f"rank-{rank()}.pt", data.getvalue())
        except CheckpointError:
            shutil.rmtree(path, ignore_errors=True)  # not all ranks' rows
            raise
        return path


def load_skipped(path: Path) -> tuple[SkippedStep, Path]:
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
        step=_merged([Step.restore(part["step"]) for part in parts]),
        term_weights=None if plain["term_weights"] is None else TermPair(*plain["term_weights"]),
        fault=plain["fault"],
        norm=plain["norm"],
        losses=TermPair(*plain["losses"]),
    )
    return skipped, path.parent / plain["shares"] / "weights"


def _merged(parts: Sequence[Step]) -> Step:
    """One step with all ranks' rows; `Row.sequence` then indexes the joined log-probs."""
    rows: list[Row] = []
    for part in parts:
        shift = 1 + max((row.sequence for row in rows), default=-1)
        rows += [row._replace(sequence=row.sequence + shift) for row in part.rows]
    joined: dict[str, Any] = {
        name: tuple(x for part in parts for x in getattr(part, name))
        for name in ("old_logps", "teacher_logps", "teacher_ids", "teacher_hidden")
    }
    return dataclasses.replace(parts[0], rows=tuple(rows), **joined)


def replay(path: Path) -> dict[str, Any]:
    """Recompute the step saved at `path`, in one process.

    Returns the recorded values, the recomputed values, and the rows whose loss or gradient is not
    finite.
    """
    path = path.resolve()  # it may be relative to a folder in the run
    saved, weights = load_skipped(path)
    compute = Recomputation(load(TrainConfig, path.parents[1] / "config.yaml"), saved, weights)
    recomputed = compute(saved.step)
    per_row = [compute(dataclasses.replace(saved.step, rows=(row,))) for row in saved.step.rows]
    culprits = [
        {
            "row": i,
            "demonstration": row.is_demo,
            "advantage": row.advantage,
            **values,
            "text": compute.tokenizer.decode(list(row.ids)),
        }
        for i, (row, values) in enumerate(zip(saved.step.rows, per_row, strict=True))
        if not all(map(math.isfinite, values.values()))
    ]
    recorded = {
        "step": saved.step.number,
        "fault": saved.fault,
        "grad_norm": saved.norm,
        "rollout_loss": saved.losses.rollout,
        "demo_loss": saved.losses.demo,
    }
    return {"recorded": recorded, "recomputed": recomputed, "culprits": culprits}


class Recomputation:
    """Recomputes gradients with the weights before a skipped step; loads only the run's models."""

    def __init__(self, config: TrainConfig, saved: SkippedStep, weights: Path) -> None:
        needs, self.term_weights = saved.step.needs, saved.term_weights
        self.tokenizer = load_tokenizer(config.model)
        accelerator = process_group.make_accelerator(config.parallel, (), config.out)
        self.model = load_policy(config, accelerator)
        reference = load_reference(config, accelerator, kl=needs.kl)
        self.gradients = make_gradients(
            config,
            accelerator,
            tokenizer=self.tokenizer,
            model=self.model,
            reference=reference,
            needs=needs,
        )
        checkpoint.load_weights(
            weights, accelerator.unwrap_model(self.model), self.gradients.tracked
        )

    def __call__(self, step: Step) -> dict[str, float]:
        """Gradient norm and losses of a step."""
        measured = self.gradients(step)
        if measured.parts:
            measured.parts.combine_pair(self.term_weights or step.mix.pair, step.mix)
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        self.model.zero_grad()
        return {
            "grad_norm": float(norm),
            "rollout_loss": measured.losses.rollout,
            "demo_loss": measured.losses.demo,
        }
