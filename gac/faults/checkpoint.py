"""Checkpoints with torch.distributed.checkpoint: written to a temporary folder, then published by
one rename.

    checkpoints/step-00000120/     sharded tensors and progress.json
    checkpoints/damaged-00000140/  a checkpoint that failed its checksums, moved aside

A checkpoint loads on any number of processes. All ranks must share a file system, and call every
function that does not say otherwise.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from gac.errors import CheckpointError, NoCheckpoint
from gac.parallel.collectives import gather, rank, ranks

logger = logging.getLogger(__name__)
# a run without torchrun has one process on purpose
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
MODEL = "model."  # prefix of the model's tensor names
PROGRESS = "progress.json"  # written last: a folder without it is not a checkpoint
BLOCK = 1 << 24  # bytes read at once for a checksum


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    progress: dict[str, Any],
    further: dict[str, Tensor] | None = None,
) -> Path:
    """Write checkpoint `step` under `folder`. Returns its path.

    further: additional tensors of the run, sharded like the parameters.

    Raises CheckpointError, on every rank, if any rank could not write its part.
    """
    final, aside = _path(folder, step), folder / f".writing-{step:08d}"
    stepped = bool(optimizer.state)
    tensors, moments = get_state_dict(model, optimizer)
    if not stepped:  # get_state_dict created optimizer state in order to save it; undo that
        optimizer.state.clear()
    state: dict[str, Any] = {"model": tensors, "optimizer": moments}
    if further:
        state["further"] = further
    _together(lambda: _on_main(lambda: _fresh(aside)), folder)
    _together(lambda: _write(state, aside), folder)
    sums = _together(lambda: _checksums(aside, _mine(aside)), folder)
    files = {name: value for part in sums for name, value in part.items()}
    content = {"step": step, "stepped": stepped, "files": files, **progress}
    _together(lambda: _on_main(lambda: _publish(aside, final, content)), folder)
    return final


def write_weights(path: Path, model: nn.Module, further: dict[str, Tensor]) -> None:
    """Write the model's tensors and `further`, in the same format."""
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if further:
        state["further"] = further
    _together(lambda: _on_main(lambda: _fresh(path)), path)
    _together(lambda: _write(state, path), path)


def load(
    path: Path, model: nn.Module, optimizer: Optimizer, further: dict[str, Tensor] | None = None
) -> dict[str, Any]:
    """Load the checkpoint at `path` into the other arguments, in place; returns its progress."""
    progress = read_progress(path)
    tensors, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": tensors, "optimizer": moments}
    if further:
        state["further"] = further
    dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    if not progress["stepped"]:
        optimizer.state.clear()
    return progress


def load_weights(path: Path, model: nn.Module, further: dict[str, Tensor] | None = None) -> None:
    """Load a checkpoint, or the output of `write_weights`, into `model` in a single process.

    further: additional saved tensors, loaded in place.
    """
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if further:
        state["further"] = further
    dcp.load(state, checkpoint_id=path, no_dist=True)
    model.load_state_dict(state["model"])


def model_tensors(path: Path) -> dict[str, Tensor]:
    """The model's tensors in a checkpoint, by name, on the meta device (without values)."""
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name.removeprefix(MODEL): torch.empty(
            found.size, dtype=found.properties.dtype, device="meta"
        )
        for name, found in stored.items()
        if name.startswith(MODEL) and isinstance(found, TensorStorageMetadata)
    }


def read_tensors(path: Path, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read some of the model's tensors, unsharded, in this process only; `wanted`: a subset of
    `model_tensors`.
    """
    tensors = {name: torch.empty_like(x, device="cpu") for name, x in wanted.items()}
    dcp.load({"model": tensors}, checkpoint_id=path, no_dist=True)
    return tensors


def read_progress(path: Path) -> dict[str, Any]:
    """The progress saved with the tensors. Raises CheckpointError if it is damaged."""
    try:
        record = json.loads((path / PROGRESS).read_text())
        content = record["content"]
        intact = record["checksum"] == _checksum_of(content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / PROGRESS} cannot be read: {error}") from None
    if not intact:
        raise CheckpointError(f"{path / PROGRESS} does not match its checksum")
    return content


def complete(folder: Path) -> list[Path]:
    """The finished checkpoints under `folder`, oldest first."""
    return sorted(p.parent for p in folder.glob(f"step-*/{PROGRESS}"))


def newest(folder: Path) -> Path | None:
    """The newest intact checkpoint, or None; newer, damaged ones are renamed with a warning.

    Each rank checks a share of the files; all ranks return the same result.
    """
    for path in reversed(complete(folder)):
        found = [f for f in gather(_fault(path)) if f]
        if not found:
            return path
        aside = path.with_name(path.name.replace("step-", "damaged-"))
        logger.warning(
            "%s is damaged (%s); renamed it to %s, falling back to the previous checkpoint",
            path,
            found[0],
            aside.name,
        )
        gather(None)  # barrier: do not rename while another rank is still reading
        if rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        gather(None)
    return None


def at(folder: Path, step: int) -> Path:
    """The finished checkpoint of `step`. If there is none, raises NoCheckpoint, which lists the
    available steps.
    """
    path = _path(folder, step)
    found = complete(folder)
    if path not in found:
        there = ", ".join(str(int(p.name.removeprefix("step-"))) for p in found) or "none"
        raise NoCheckpoint(f"no checkpoint of step {step} in {folder}; available steps: {there}")
    return path


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Delete all but the newest `keep` checkpoints and the one of step `best`."""
    if rank() != 0:
        return
    kept = {*complete(folder)[-keep:], *([] if best is None else [_path(folder, best)])}
    for path in complete(folder):
        if path not in kept:
            shutil.rmtree(path)
    for stale in folder.glob(".writing-*"):
        shutil.rmtree(stale, ignore_errors=True)


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _together(work: Callable[[], Any], folder: Path) -> list[Any]:
    """Run `work` on every rank and gather the results; if one rank fails, all raise instead of
    hanging.
    """
    result, fault = None, None
    try:
        result = work()
    except (OSError, CheckpointException) as error:
        fault = f"rank {rank()}: {_cause(error)}"
    results = gather((result, fault))
    faults = [f for _, f in results if f]
    if faults:
        free = shutil.disk_usage(folder).free / 1e6 if folder.exists() else math.nan
        raise CheckpointError(
            f"a checkpoint could not be written under {folder}, where {free:.1f} MB are free "
            f"({faults[0]}); free some space or fix the disk, then rerun the command to resume from the last finished checkpoint"
        )
    return [r for r, _ in results]


def _cause(error: BaseException) -> str:
    """First line of the underlying error, unwrapped from torch's CheckpointException."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _on_main(work: Callable[[], None]) -> None:
    if rank() == 0:
        work()


def _fresh(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def _write(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, checkpoint_id=path, no_dist=not dist.is_initialized())


def _publish(aside: Path, final: Path, content: dict[str, Any]) -> None:
    content = json.loads(
        json.dumps(content)
    )  # turn tuples into lists before computing the checksum
    with (aside / PROGRESS).open("w") as file:
        json.dump({"checksum": _checksum_of(content), "content": content}, file)
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(final, ignore_errors=True)
    aside.rename(final)
    folder = os.open(final.parent, os.O_RDONLY)
    os.fsync(folder)  # so that the rename survives a power failure
    os.close(folder)


def _mine(path: Path) -> list[str]:
    """The files that this rank wrote; for rank 0 also the index."""
    names = [p.name for p in path.glob(f"__{rank()}_*.distcp")]
    return [*names, ".metadata"] if rank() == 0 else names


def _checksums(path: Path, names: list[str]) -> dict[str, list[int]]:
    """Map each name to [size in bytes, crc32]."""
    out = {}
    for name in names:
        size = crc = 0
        with (path / name).open("rb") as file:
            while block := file.read(BLOCK):
                size, crc = size + len(block), zlib.crc32(block, crc)
        out[name] = [size, crc]
    return out


def _checksum_of(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _fault(path: Path) -> str | None:
    """The first fault in this rank's share of a checkpoint's files, or None."""
    try:
        files = read_progress(path)["files"]
        share = sorted(files)[rank() :: ranks()]
        missing = [name for name in share if not (path / name).exists()]
        if missing:
            return f"{missing[0]} is missing"
        found = _checksums(path, share)
    except (OSError, CheckpointError) as error:
        return str(error)
    for name in share:
        if found[name][0] != files[name][0]:
            return f"{name} has {found[name][0]} bytes instead of {files[name][0]}"
        if found[name][1] != files[name][1]:
            return f"{name} does not match its checksum"
    return None
