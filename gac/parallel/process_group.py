"""The process group of a run: joined at the start, left at the end.

accelerate provides the device and the collectives.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import GradientAccumulationPlugin, LoggerType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from gac.errors import ConfigError, require, value_errors_as

from .config import ParallelConfig

LONGEST_WAIT = 60.0  # seconds that a rank that has finished waits for the others before it exits
meshes: list[DeviceMesh] = []


@value_errors_as(ConfigError)
def check_trackers(names: tuple[str, ...]) -> None:
    """Raise ConfigError for the name of a tracker that accelerate does not know or find."""
    available = {tracker.value for tracker in get_available_trackers()}
    known = sorted({*LoggerType.list()} - {"all"})
    for name in names:
        require(name in known, "report_to", name, f"names from {', '.join(known)}")
        if name not in available:
            raise ConfigError(f"report_to={name!r} is not installed: pip install {name}")


def make_accelerator(config: ParallelConfig, trackers: tuple[str, ...], out: str) -> Accelerator:
    """Join the process group set up by torchrun or accelerate. Raises ConfigError."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise ConfigError("launch without --use_fsdp; to shard the model, set parallel.mode=fsdp")
    check_trackers(trackers)
    _join(config.timeout)
    accelerator = Accelerator(
        # otherwise accelerate does not connect the processes on machines without a GPU
        cpu=not torch.cuda.is_available(),
        mixed_precision="no",  # `gac.models.head` sets the precision, also of the reference
        # otherwise accelerate takes the number from the environment
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        log_with=list(trackers) or None,
        project_dir=out,
    )
    ranks, expected = accelerator.num_processes, int(os.environ.get("WORLD_SIZE", 1))
    if ranks != expected:
        raise ConfigError(
            f"WORLD_SIZE={expected}, but {ranks} processes joined: launch with torchrun"
        )
    if ranks > 1 and ranks % config.replicas:
        raise ConfigError(
            f"parallel.replicas={config.replicas}: use a divisor of {ranks}, the number of ranks"
        )
    return accelerator


def _join(timeout: float) -> None:
    """Join a process group, with the number of this restart attempt as its store prefix.

    torchrun's store survives an elastic restart; without a prefix, gloo would contact the dead
    processes whose addresses the store still contains.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or dist.is_initialized():
        return
    store, rank, ranks = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=dist.PrefixStore(f"gac/attempt-{attempt}", store),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout),
    )
    atexit.register(_leave_at_exit)
    # wait for all: a rank that exits before every rank has joined would block the others
    dist.all_reduce(torch.zeros(1))


def leave() -> None:
    """Destroy the process group, if any; wait for the other ranks first if there was no error."""
    if sys.exception() is None:
        wait_for_others()
    _destroy()


def wait_for_others() -> None:
    """Wait until every rank has called this, at most LONGEST_WAIT seconds.

    With gloo, a rank that exits can reset a connection from which another rank still reads the
    result of the last collective. The store, unlike a collective, is not affected.
    """
    if not dist.is_initialized():
        return
    store = dist.distributed_c10d._get_default_store()
    with contextlib.suppress(RuntimeError):  # the others are late, or the store is gone
        if store.add("gac/finished", 1) == dist.get_world_size():
            store.set("gac/all_finished", "")
        store.wait(["gac/all_finished"], timedelta(seconds=LONGEST_WAIT))


def _destroy() -> None:
    """Destroy the process group, if there is one, and stop its threads.

    A destroyed group stays alive, with its threads, as long as anything references it. Such a
    thread may free the tensors of the last collective late, which aborts the process if Python is
    already shutting down ("terminate called without an active exception"). The group is referenced
    by the meshes, which DTensor caches forever, and by the trainer, which its owner must release
    first.
    """
    if not dist.is_initialized():
        return
    gc.collect()  # a model and its hooks form reference cycles; DDP's destructor needs the group
    dist.destroy_process_group()
    while meshes:
        getattr(meshes.pop(), "_pg_registry", {}).clear()
    gc.collect()


def _leave_at_exit() -> None:
    """Destroy the group at exit, after clearing an uncaught exception's traceback.

    The traceback still references the trainer.
    """
    error = getattr(sys, "last_value", None)
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    _destroy()
    gc.collect()  # free what only those frames referenced, in case the group was already destroyed
