"""What stops a run early and clearly: a bad folder, another run's checkpoint, a step gone wrong."""

from __future__ import annotations

import json
import math
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from gac.errors import BadFolder, ConfigError, RunError

# keys of TrainConfig that a run may change when it goes on: none changes what is learned from
HARMLESS = {
    "out", "name", "steps", "eval", "micro_batch", "checkpoint_every", "keep_checkpoints",
    "trackers", "export", "guards", "parallel",
}  # fmt: skip


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


def check_folder(out: Path) -> None:
    """Raise BadFolder unless every rank can write in `out` and all see the same folder."""
    probe = [f".probe-{secrets.token_hex(4)}"]
    if dist.is_initialized():
        dist.broadcast_object_list(probe)
    path, rank = out / probe[0], dist.get_rank() if dist.is_initialized() else 0
    fault = None
    try:
        if rank == 0:
            out.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"gac")
    except OSError as error:
        fault = f"the run directory cannot be written ({error.strerror}): choose another `out`"
    faults = _gather(fault)
    if not any(faults) and not path.exists():
        fault = f"rank {rank} does not see the files of rank 0: `out` must be on a shared disk"
    faults = [f for f in (*faults, *_gather(fault)) if f]
    if rank == 0:
        _remove(path)
    if faults:
        raise BadFolder(f"out={str(out)!r}: {faults[0]}")


def check_space(out: Path, model: nn.Module, checkpoints: int) -> None:
    """Raise RunError unless `checkpoints` checkpoints of `model` with AdamW's moments fit."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    moments = 2 * sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    need, free = checkpoints * (weights + moments), shutil.disk_usage(out).free
    if free < need:
        raise RunError(
            f"out={str(out)!r}: {free / 1e9:.3g} GB free, and {checkpoints} checkpoints of this "
            f"model need {need / 1e9:.3g} GB: make room, or lower keep_checkpoints"
        )


def check_same_run(
    saved: Mapping[str, Any], now: Mapping[str, Any], ranks: tuple[int, int], resize: bool
) -> None:
    """Raise ConfigError unless a run configured as `now` may go on from one of `saved`.

    ranks: number of processes (then, now).
    """
    old, new = (dict(_flat(json.loads(json.dumps(c)))) for c in (saved, now))
    differing = [
        f"{key}: {old.get(key, 'not set')!r} in the checkpoint, {new.get(key, 'not set')!r} now"
        for key in sorted({*old, *new})
        if key.partition(".")[0] not in HARMLESS and old.get(key) != new.get(key)
    ]
    if differing:
        raise ConfigError(
            "the checkpoint in `out` belongs to another configuration; go on with that one, or "
            "choose another `out`:\n  " + "\n  ".join(differing)
        )
    if ranks[0] != ranks[1] and not resize:
        raise ConfigError(
            f"parallel.resize=False: the checkpoint was written by {ranks[0]} processes and "
            f"{ranks[1]} are running; other numbers would come out. Start {ranks[0]}, or set "
            "parallel.resize=true"
        )


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, value


def _gather(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # below a file: there was nothing to remove
