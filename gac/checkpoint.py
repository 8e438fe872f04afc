"""Checkpoints by torch.distributed.checkpoint: written aside, made visible by one rename.

    checkpoints/step-00000120/     sharded tensors and progress.json
    checkpoints/best.json          {"step": ..., "accuracy": ...}

The same files load on any number of processes.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

PROGRESS = "progress.json"  # written last: a folder without it is not a checkpoint


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def save(
    folder: Path, step: int, model: nn.Module, optimizer: Optimizer, progress: dict[str, Any]
) -> Path:
    """Write checkpoint `step` under `folder`; every rank calls it. Returns its path."""
    final, aside = folder / f"step-{step:08d}", folder / f".writing-{step:08d}"
    if _rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    _barrier()
    tensors, moments = get_state_dict(model, optimizer)
    dcp.save({"model": tensors, "optimizer": moments}, checkpoint_id=aside,
             no_dist=not dist.is_initialized())  # fmt: skip
    if _rank() == 0:
        with (aside / PROGRESS).open("w") as file:
            json.dump({"step": step, **progress}, file)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
    _barrier()
    return final


def load(path: Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Fill `model` and `optimizer` from the checkpoint at `path`; returns its progress."""
    tensors, moments = get_state_dict(model, optimizer)
    state = {"model": tensors, "optimizer": moments}
    dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return read_progress(path)


def read_progress(path: Path) -> dict[str, Any]:
    """What was saved beside the tensors."""
    return json.loads((path / PROGRESS).read_text())


def complete(folder: Path) -> list[Path]:
    """The finished checkpoints under `folder`, oldest first."""
    return sorted(p.parent for p in folder.glob(f"step-*/{PROGRESS}"))


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints and the best one."""
    if _rank() != 0:
        return
    best = read_best(folder).get("step")
    for path in complete(folder)[:-keep]:
        if path.name != (f"step-{best:08d}" if best is not None else None):
            shutil.rmtree(path)
    for stale in folder.glob(".writing-*"):
        shutil.rmtree(stale, ignore_errors=True)


def read_best(folder: Path) -> dict[str, Any]:
    """{"step", "accuracy"} of the best evaluated checkpoint; empty when there is none."""
    path = folder / "best.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write_best(folder: Path, step: int, accuracy: float) -> None:
    """Name the best checkpoint, atomically."""
    aside = folder / ".best.json"
    aside.write_text(json.dumps({"step": step, "accuracy": accuracy}))
    aside.rename(folder / "best.json")
