"""One process or many: start the ranks, shard the model, and hold it whole where it must be.

accelerate gives the device, the collectives and DDP; sharding is torch's `fully_shard`, called here
on CPUs and GPUs alike, because accelerate's FSDP flag is silently ignored on CPUs. The root unit
holds the embedding and the head and stays gathered from a forward to its backward, so that the
loss inside the model's forward finds the head's weight, gathered once.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import traceback
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from gac.config import ConfigError

from .arrival import Arrival
from .collectives import largest

MODES = ("ddp", "fsdp")
_held: weakref.WeakSet[FSDPModule] = weakref.WeakSet()  # units inside `gathered`
_meshes: list[DeviceMesh] = []


@dataclass(frozen=True)
class ParallelConfig:
    """How several processes share the work; with one process nothing of this matters."""

    mode: str = "ddp"
    """ddp: every rank holds the model; fsdp: weights, gradients and moments are sharded (FSDP2)."""
    replicas: int = 1
    """fsdp: copies of the sharded model (HSDP), e.g. the number of nodes; 1 = one shard group."""
    gather_for_rollouts: bool = True
    """fsdp: hold all weights on every rank while it samples; false gathers layer by layer."""
    defer_reduce: bool = False
    """fsdp: reduce gradients after the last micro-batch only: less traffic, a whole gradient more
    memory."""
    resize: bool = False
    """Allow going on from a checkpoint of another number of processes."""
    timeout: float = 1800.0
    """Seconds after which a collective that a rank does not join ends the job."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r}: use one of {', '.join(MODES)}")
        if self.replicas < 1:
            raise ValueError(f"replicas={self.replicas!r}: use a number >= 1")
        if not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout!r}: use seconds > 0")


def make_accelerator(
    config: ParallelConfig, precision: str, trackers: tuple[str, ...], out: str
) -> Accelerator:
    """Join the process group that torchrun or accelerate announces. Raises ConfigError."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise ConfigError("launch without --use_fsdp: parallel.mode=fsdp shards the model")
    _join(config.timeout)
    accelerator = Accelerator(
        # without it, accelerate starts unrelated processes where there is no GPU
        cpu=not torch.cuda.is_available(),
        # fsdp has a policy of its own instead of autocast
        mixed_precision="no" if config.mode == "fsdp" else precision,
        log_with=list(trackers) or None,
        project_dir=out,
    )
    ranks, announced = accelerator.num_processes, int(os.environ.get("WORLD_SIZE", 1))
    if ranks != announced:
        raise ConfigError(f"WORLD_SIZE={announced}, but {ranks} processes joined: use torchrun")
    if ranks % config.replicas:
        raise ConfigError(f"parallel.replicas={config.replicas}: use a divisor of {ranks} ranks")
    return accelerator


def _join(timeout: float) -> None:
    """The process group of this attempt: torchrun's store outlives an elastic restart, and gloo
    would call the dead processes whose addresses it still holds under the default name."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or dist.is_initialized():
        return
    store, rank, ranks = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=dist.PrefixStore(f"gac/attempt-{attempt}", store), rank=rank, world_size=ranks,
        timeout=timedelta(seconds=timeout),
    )  # fmt: skip
    atexit.register(_leave_at_exit)
    dist.all_reduce(torch.zeros(1))  # who leaves before all have joined keeps the others waiting


def arriving(accelerator: Accelerator, config: ParallelConfig) -> Arrival | None:
    """What keeps this rank's share of a model's weights while they are read; None: all of them."""
    if config.mode != "fsdp" or accelerator.num_processes == 1:
        return None
    return Arrival(_mesh(accelerator, config), accelerator.device)


def prepare(
    model: nn.Module, accelerator: Accelerator, config: ParallelConfig, precision: str,
    arrival: Arrival | None,
) -> nn.Module:  # fmt: skip
    """The model as this rank trains it, on its device: sharded, or wrapped by DDP.

    arrival: of `arriving`, for this model.
    """
    if arrival is None:
        return accelerator.prepare(model.to(accelerator.device))
    model = shard(model, arrival, _policy(precision), keep_root=True)
    if config.defer_reduce:
        model.__dict__["no_sync"] = lambda: _deferred(model)  # accelerate's looks for it
    return model


def prepare_frozen(
    model: nn.Module, accelerator: Accelerator, config: ParallelConfig, precision: str,
    arrival: Arrival | None,
) -> nn.Module:  # fmt: skip
    """A model that is only evaluated: sharded too, never gathered longer than a forward."""
    model = model.requires_grad_(False).eval()
    if arrival is None:
        return model.to(accelerator.device)
    return shard(model, arrival, _policy(precision), keep_root=False)


def shard(
    model: nn.Module, arrival: Arrival, policy: MixedPrecisionPolicy, keep_root: bool
) -> nn.Module:
    """`fully_shard` of each layer, and of the rest as one unit; in place.

    keep_root: the rest (embedding, last norm, head) stays gathered from forward to backward.
    Raises RuntimeError if a parameter was left whole.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [m for m in model.modules() if type(m).__name__ in names]
    arrival.meta(model)
    for layer in layers:
        fully_shard(layer, mesh=arrival.mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=arrival.mesh, mp_policy=policy, reshard_after_forward=not keep_root)
    whole = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    if whole or not layers:
        raise RuntimeError(
            f"{type(model).__name__} could not be sharded: layers {sorted(names)}, "
            f"{len(whole)} whole parameters {whole[:3]}; use parallel.mode=ddp"
        )
    arrival.place(model)
    return model


def leave() -> None:
    """Leave the process group, if there is one, and end its threads; nothing may use it after.

    A group that is destroyed lives on, with its threads, while anything refers to it. Such a thread
    may free the tensors of the last collective late, and aborts the process if Python is by then
    on its way out ("terminate called without an active exception"). Referring to it are the meshes,
    which the caches of DTensor keep for ever, and the trainer: its owner lets go of it first.
    """
    if not dist.is_initialized():
        return
    gc.collect()  # a model and its hooks are in circles; the destructor of DDP needs the group
    dist.destroy_process_group()
    while _meshes:
        getattr(_meshes.pop(), "_pg_registry", {}).clear()
    gc.collect()


def _leave_at_exit() -> None:
    """However the program ends: an error that ended it refers to the trainer by its traceback."""
    error = getattr(sys, "last_value", None)
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    leave()
    gc.collect()  # what only those frames referred to, where the group was left before


def seed(number: int) -> None:
    """`torch.manual_seed`, which without a GPU spends its time on remembering who called it."""
    if torch.accelerator.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


def units(model: nn.Module) -> list[FSDPModule]:
    """The sharded units of `model`, the root first; empty when it is not sharded."""
    if not isinstance(model, FSDPModule):  # the root is always one: no walk over the modules
        return []
    return [m for m in model.modules() if isinstance(m, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Drop gathered weights, so that no forward can use those from before an optimiser step."""
    for unit in units(model):
        unit.reshard()


@contextlib.contextmanager
def gathered(model: nn.Module, config: ParallelConfig) -> Iterator[None]:
    """Hold all weights inside, so that ranks may call the model a different number of times.

    Without `gather_for_rollouts` nothing is held, and the ranks have to step in lockstep.
    """
    held = units(model)
    if not config.gather_for_rollouts:
        yield
        reshard(model)
        return
    for unit in held:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    _held.update(held)
    try:
        yield
    finally:
        for unit in held:
            _held.discard(unit)
            unit.set_reshard_after_forward(unit is not held[0], recurse=False)
            unit.reshard()


def in_lockstep(model: nn.Module) -> bool:
    """Whether every call of the model gathers weights, so that all ranks must make it."""
    return any(unit not in _held for unit in units(model))


def calls(model: nn.Module, mine: int) -> int:
    """How many calls this rank makes when it needs `mine`: all ranks' most in lockstep."""
    if not in_lockstep(model):
        return mine
    return int(largest([mine])[0])


def full(value: Tensor) -> float:
    """A 0-d tensor as a number, also if it is a sum over shards."""
    return float(value.full_tensor() if isinstance(value, DTensor) else value)


def _mesh(accelerator: Accelerator, config: ParallelConfig) -> DeviceMesh:
    ranks, device = accelerator.num_processes, accelerator.device.type
    if config.replicas == 1:
        mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("shard",))
    else:
        shape = (config.replicas, ranks // config.replicas)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
    _meshes.append(mesh)
    return mesh


def _policy(precision: str) -> MixedPrecisionPolicy:
    """bfloat16 arithmetic on float32 shards; gradients are reduced in float32."""
    compute = torch.bfloat16 if precision == "bf16" else None
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)


@contextlib.contextmanager
def _deferred(model: nn.Module) -> Iterator[None]:
    for root in units(model)[:1]:
        root.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        for root in units(model)[:1]:
            root.set_requires_gradient_sync(True)
