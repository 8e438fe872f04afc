"""Checkpoints with torch.distributed.checkpoint.

They are written to a temporary folder, then published by one rename::

    checkpoints/step-00000120/     sharded tensors and progress.json
    checkpoints/damaged-00000140/  a checkpoint that failed its checksums

A checkpoint loads on any number of processes. All ranks must share a file system. Call every
function on all ranks unless its docstring says otherwise.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import shutil
import warnings
import zlib
from collections.abc import Callable
from dataclasses import is_dataclass
from enum import EnumType
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from gac.collectives import Result, gather, rank, run_on_all_ranks, world_size
from gac.errors import CheckpointError, CheckpointNotFound, UserError

logger = logging.getLogger(__name__)
# a run without torchrun has one process on purpose
warnings.filterwarnings("ignore", message="torch.distributed is disabled")
MODEL = "model."  # prefix of the model's tensor names
EXTRA = "further"  # key of `extra_tensors`
PROGRESS = "progress.json"  # written last: a folder without it is not a checkpoint
INDEX = ".metadata"
PLAIN = (("torch", "Size"), ("torch.serialization", "_get_layout"))
PATHS = ("PosixPath", "WindowsPath")
BLOCK = 1 << 24  # bytes read at once for a checksum


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    progress: dict[str, Any],
    extra_tensors: dict[str, Tensor] | None = None,
) -> Path:
    """Write checkpoint `step` under `folder`. Returns its path.

    extra_tensors: additional tensors of the run, sharded like the parameters.

    Raises CheckpointError, on every rank, if any rank could not write its part.
    """
    final, temporary = _path(folder, step), folder / f".writing-{step:08d}"
    stepped = bool(optimizer.state)
    tensors, moments = get_state_dict(model, optimizer)
    if not stepped:  # get_state_dict created optimizer state in order to save it; undo that
        optimizer.state.clear()
    state: dict[str, Any] = {"model": tensors, "optimizer": moments}
    if extra_tensors:
        state[EXTRA] = extra_tensors
    clear(temporary)
    _on_all_ranks(lambda: _write(state, temporary), folder)
    sums = _on_all_ranks(lambda: _checksums(temporary, _own_files(temporary)), folder)
    files = {name: value for part in gather(sums) for name, value in part.items()}
    content = {"step": step, "stepped": stepped, "files": files, **progress}
    _on_all_ranks(lambda: _on_rank_0(lambda: _publish(temporary, final, content)), folder)
    return final


def write_weights(path: Path, model: nn.Module, extra_tensors: dict[str, Tensor]) -> None:
    """Write the model's tensors and `extra_tensors`, in the format of a checkpoint."""
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if extra_tensors:
        state[EXTRA] = extra_tensors
    clear(path)
    _on_all_ranks(lambda: _write(state, path), path)


def clear(path: Path) -> None:
    """Create an empty folder; all ranks wait until it exists."""

    def create() -> None:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True, exist_ok=True)

    _on_all_ranks(lambda: _on_rank_0(create), path.parent)


def write_bytes(path: Path, content: bytes) -> None:
    """Write this rank's own file. Raises CheckpointError, on every rank, if any rank cannot."""
    _on_all_ranks(lambda: path.write_bytes(content), path.parent)


def load(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer,
    extra_tensors: dict[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Load the checkpoint at `path` into the other arguments, in place; returns its progress."""
    progress = read_progress(path)
    tensors, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": tensors, "optimizer": moments}
    if extra_tensors:
        state[EXTRA] = extra_tensors
    stored = _reader(path).read_metadata().state_dict_metadata
    for name in [*state["optimizer"]["state"]]:
        if f"optimizer.state.{name}.step" not in stored:  # the weight has not had a gradient yet
            del state["optimizer"]["state"][name]
    _read(state, path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(strict=False),  # weights without moments
    )
    if not progress["stepped"]:
        optimizer.state.clear()
    return progress


def load_weights(
    path: Path, model: nn.Module, extra_tensors: dict[str, Tensor] | None = None
) -> None:
    """Load a checkpoint, or the output of `write_weights`, into `model` in a single process.

    extra_tensors: additional saved tensors, loaded in place.
    """
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if extra_tensors:
        state[EXTRA] = extra_tensors
    _read(state, path, no_dist=True)  # in place


def model_tensors(path: Path) -> dict[str, Tensor]:
    """The model's tensors in a checkpoint, by name, on the meta device (without values)."""
    stored = _reader(path).read_metadata().state_dict_metadata
    return {
        name.removeprefix(MODEL): torch.empty(
            entry.size, dtype=entry.properties.dtype, device="meta"
        )
        for name, entry in stored.items()
        if name.startswith(MODEL) and isinstance(entry, TensorStorageMetadata)
    }


def read_tensors(path: Path, meta_tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read the given subset of `model_tensors`, unsharded, in this process only."""
    tensors = {name: torch.empty_like(x, device="cpu") for name, x in meta_tensors.items()}
    _read({"model": tensors}, path, no_dist=True)
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


def list_complete(folder: Path) -> list[Path]:
    """The finished checkpoints under `folder`, oldest first."""
    return sorted(p.parent for p in folder.glob(f"step-*/{PROGRESS}"))


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest intact checkpoint, or None; newer, damaged ones are renamed with a warning.

    Each rank checks some of the files; all ranks return the same result.
    """
    for path in reversed(list_complete(folder)):
        faults = [f for f in gather(_fault(path)) if f]
        if not faults:
            return path
        damaged = path.with_name(path.name.replace("step-", "damaged-"))
        logger.warning(
            "%s is damaged (%s); renamed it to %s and falling back to the previous checkpoint",
            path,
            faults[0],
            damaged.name,
        )
        if rank() == 0:
            shutil.rmtree(damaged, ignore_errors=True)
            path.rename(damaged)
        gather(None)
    return None


def find(folder: Path, step: int) -> Path:
    """The finished checkpoint of `step`.

    Raises CheckpointNotFound, which lists the available steps, if there is none.
    """
    path, complete = _path(folder, step), list_complete(folder)
    if path not in complete:
        available = ", ".join(str(int(p.name.removeprefix("step-"))) for p in complete) or "none"
        raise CheckpointNotFound(
            f"no checkpoint of step {step} in {folder}; available steps: {available}"
        )
    return path


def verify(path: Path) -> None:
    """Raise CheckpointError unless all files match their checksums; call it in one process."""
    fault = _fault(path, all_files=True)
    if fault:
        raise CheckpointError(f"{path} is damaged ({fault}): choose another checkpoint")


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Delete all but the newest `keep` checkpoints and the one of step `best`."""
    if rank() != 0:
        return
    best_path = None if best is None else _path(folder, best)
    for path in list_complete(folder)[:-keep]:
        if path != best_path:
            shutil.rmtree(path)
    for stale in folder.glob(".writing-*"):
        shutil.rmtree(stale, ignore_errors=True)


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _on_all_ranks(work: Callable[[], Result], folder: Path) -> Result:
    """Run `work` on every rank; if writing fails on any, all raise CheckpointError."""

    def explain(error: Exception) -> UserError:
        if not isinstance(error, OSError):
            raise error
        free = shutil.disk_usage(folder).free / 1e6 if folder.exists() else math.nan
        return CheckpointError(
            f"could not write a checkpoint under {folder}, where {free:.1f} MB are free "
            f"(rank {rank()}: {error}); free some space or fix the disk, then rerun the "
            "command to resume from the last finished checkpoint"
        )

    return run_on_all_ranks(work, explain)


def _cause(error: CheckpointException) -> BaseException:
    """KeyboardInterrupt if any rank was interrupted, else an OSError that names the first cause."""
    causes = [cause for cause, _ in error.failures.values()]
    if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
        return KeyboardInterrupt()
    cause = (causes or [error])[0]
    return OSError(f"{type(cause).__name__}: {cause}".splitlines()[0])


def _on_rank_0(work: Callable[[], None]) -> None:
    if rank() == 0:
        work()


def _write(state: dict[str, Any], path: Path) -> None:
    try:
        dcp.save(state, checkpoint_id=path)
    except CheckpointException as error:  # not an Exception
        raise _cause(error) from error


def _read(state: dict[str, Any], path: Path, no_dist: bool = False) -> None:
    try:
        dcp.load(state, storage_reader=_reader(path), planner=_Planner(), no_dist=no_dist)
    except CheckpointException as error:
        raise _cause(error) from error


def _reader(path: Path) -> dcp.FileSystemReader:
    """torch's reader, which unpickles the index, after a check that this runs no code."""
    with (path / INDEX).open("rb") as file:
        _Index(file).load()
    return dcp.FileSystemReader(path)


class _Index(pickle.Unpickler):
    """Unpickles the index of a checkpoint, and refuses everything that is not part of one."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("torch.distributed.checkpoint.") and name.isidentifier():
            found = super().find_class(module, name)
            if is_dataclass(found) or isinstance(found, EnumType):
                return found
        plain = (module, name) in PLAIN or (module.startswith("pathlib") and name in PATHS)
        if plain or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise CheckpointError(f"the checkpoint's index refers to {module}.{name}: do not load it")


class _Planner(DefaultLoadPlanner):
    """Unpickles only plain values and tensors."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises; torch's method reads it without a check
        value.seek(0)
        super().load_bytes(read_item, value)


def _publish(temporary: Path, final: Path, content: dict[str, Any]) -> None:
    """Add the progress to a written checkpoint and rename it to its final path."""
    content = json.loads(json.dumps(content))  # as `load` reads it, or its checksum differs
    with (temporary / PROGRESS).open("w") as file:
        json.dump({"checksum": _checksum_of(content), "content": content}, file)
        file.flush()
        os.fsync(file.fileno())
    replaced = final.with_name(f".writing-{final.name}")  # aside, because deleting it takes time
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    folder = os.open(final.parent, os.O_RDONLY)
    os.fsync(folder)  # so that the rename survives a power failure
    os.close(folder)


def _own_files(path: Path) -> list[str]:
    """The files that this rank wrote; for rank 0 also the index."""
    names = [p.name for p in path.glob(f"__{rank()}_*.distcp")]
    return [*names, INDEX] if rank() == 0 else names


def _checksums(path: Path, names: list[str]) -> dict[str, list[int]]:
    """Map each name to [size in bytes, crc32]."""
    checksums = {}
    for name in names:
        size = crc = 0
        with (path / name).open("rb") as file:
            while block := file.read(BLOCK):
                size, crc = size + len(block), zlib.crc32(block, crc)
        checksums[name] = [size, crc]
    return checksums


def _checksum_of(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _fault(path: Path, all_files: bool = False) -> str | None:
    """The first fault in the files that this rank checks, or None."""
    try:
        files = read_progress(path)["files"]
        own_files = sorted(files)[slice(None) if all_files else slice(rank(), None, world_size())]
        missing = [name for name in own_files if not (path / name).exists()]
        if missing:
            return f"{missing[0]} is missing"
        checksums = _checksums(path, own_files)
    except (OSError, CheckpointError) as error:
        return str(error)
    for name in own_files:
        (size, crc), (saved_size, saved_crc) = checksums[name], files[name]
        if size != saved_size:
            return f"{name} has {size} bytes instead of {saved_size}"
        if crc != saved_crc:
            return f"{name} does not match its checksum"
    return None
