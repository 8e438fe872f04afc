"""The batch of a skipped step: kept with its weights, and computed again by `gac replay`.

replay/step-00000012/rank-0.pt    rows and weights of the loss, one file per rank
replay/step-00000012/weights/     the model before the step, shared by skipped steps in a row,
                                  and a method's moving averages
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gac.config import load
from gac.control.solvers import Weights
from gac.data.rows import Row
from gac.errors import ConfigError
from gac.methods import Mix

from . import checkpoint


@dataclasses.dataclass(frozen=True)
class Bad:
    """One skipped step on this rank: what `Gradients` was called with, and what came out."""

    step: int
    fault: str
    """Why the step was skipped."""
    seed: int
    """Of the dropout masks."""
    rows: Sequence[Row]
    mix: Mix
    weights: Weights | None
    """Of the two terms, from a solver; None: `mix` was applied as it is."""
    norms: tuple[float, float]
    kl: bool
    old_logps: Sequence[Tensor]
    grad_norm: float
    losses: tuple[float, float]
    """The rollout and the demonstration term, over all ranks."""


def keep(
    folder: Path, bad: Bad, model: nn.Module, tracked: dict[str, Tensor], first: Path | None
) -> Path:
    """Write a skipped step under `folder`; every rank calls it. Returns its path.

    tracked: moving averages of gradients. first: where the first of the skipped steps in a row was
    kept, if this is a later one: the weights are still the same.
    """
    path = folder / f"step-{bad.step:08d}"
    if first is None:
        checkpoint.write_weights(path / "weights", model, tracked)
    path.mkdir(parents=True, exist_ok=True)
    plain = {f.name: getattr(bad, f.name) for f in dataclasses.fields(bad)}
    plain |= {"rows": [tuple(r) for r in bad.rows], "mix": tuple(bad.mix)}
    plain |= {"old_logps": list(bad.old_logps), "shares": (first or path).name}
    torch.save(plain, path / f"rank-{dist.get_rank() if dist.is_initialized() else 0}.pt")
    return path


def replay(path: Path) -> dict[str, Any]:
    """Compute a kept step again, in one process, and each of its rows on its own.

    Returns what was recorded, what came out now, and the rows whose loss or gradient is not finite.
    """
    from gac.train_config import TrainConfig
    from gac.training.trainer import Trainer  # it imports this module to keep steps

    files = sorted(path.glob("rank-*.pt"), key=lambda p: int(p.stem.removeprefix("rank-")))
    if not files:
        raise ConfigError(f"{path} holds no kept step: give a folder of RUN/replay")
    parts = [torch.load(file, weights_only=True) for file in files]
    config = load(TrainConfig, path.parents[1] / "config.yaml")
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(dataclasses.replace(config, out=scratch, trackers=()))
        model = trainer.accelerator.unwrap_model(trainer.model)
        checkpoint.load_weights(
            path.parent / parts[0]["shares"] / "weights", model, trainer.gradients.tracked
        )
        rows, old = _merged(parts)
        again = _Again(trainer, parts, old)
        torch.manual_seed(parts[0]["seed"])
        now = again(rows)
        alone = [again([row]) for row in rows]
    names = ("fault", "grad_norm", "losses", "step")
    culprits = [
        {"row": i, "demonstration": row.is_demo, "advantage": row.advantage, **found,
         "text": trainer.tokenizer.decode(list(row.ids))}
        for i, (row, found) in enumerate(zip(rows, alone, strict=True))
        if not all(map(math.isfinite, [found["grad_norm"], *found["losses"]]))
    ]  # fmt: skip
    return {"recorded": {n: parts[0][n] for n in names}, "again": now, "culprits": culprits}


def _merged(parts: Sequence[dict[str, Any]]) -> tuple[list[Row], list[Tensor]]:
    """The rows of all ranks, with indices into one list of old log-probs."""
    rows: list[Row] = []
    old: list[Tensor] = []
    for part in parts:
        for row in (Row(*values) for values in part["rows"]):
            before = len(old) if part["old_logps"] else 0
            rows.append(row._replace(sequence=row.sequence + before))
        old += part["old_logps"]
    return rows, old


class _Again:
    """Gradients of some rows under the weights of the kept step."""

    def __init__(self, trainer: Any, parts: Sequence[dict[str, Any]], old: list[Tensor]) -> None:
        kept = parts[0]  # all but rows and log-probs are the same on every rank
        self.trainer, self.mix, self.weights = trainer, Mix(*kept["mix"]), kept["weights"]
        norms = tuple(n * len(parts) for n in kept["norms"])
        self.keywords = {"norms": norms, "kl": kept["kl"], "old_logps": old, "step": kept["step"]}

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        found = self.trainer.gradients(rows, self.mix, **self.keywords)
        if found.parts:
            found.parts.combine_pair(self.weights or self.mix.pair, self.mix)
        params = [p for p in self.trainer.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        self.trainer.optimizer.zero_grad(set_to_none=True)
        return {
            "grad_norm": float(norm),
            "losses": (float(found.rollout_loss), float(found.demo_loss)),
        }
