"""Sharding: divides a model over the ranks, and gathers its weights when they are needed.

accelerate provides DDP. Sharding calls torch's `fully_shard` directly, on CPUs and GPUs, because
accelerate silently ignores its FSDP flag on CPUs. The root unit holds the embedding and the
head. It stays gathered after a forward, so that the loss can use the head's weight with a single
gather.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from gac.errors import ConfigError

from .config import ParallelConfig
from .loading import ShardedLoading
from .process_group import meshes

_gathered_units: weakref.WeakSet[FSDPModule] = weakref.WeakSet()  # units inside `gathered`


def sharded_loading(accelerator: Accelerator, config: ParallelConfig) -> ShardedLoading | None:
    """A context that shards a model's weights while loading; None if the model is not sharded."""
    if config.mode != "fsdp" or not dist.is_initialized():
        return None
    return ShardedLoading(_mesh(accelerator, config), accelerator.device)


def prepare(
    model: nn.Module,
    accelerator: Accelerator,
    config: ParallelConfig,
    compute: torch.dtype | None,
    loading: ShardedLoading | None,
) -> nn.Module:
    """Prepare the model for training: move it to the device, and shard it or wrap it in DDP.

    compute: dtype in which FSDP gathers the weights; None: their own.
    loading: from `sharded_loading`, used to load this model.
    """
    if loading is None:
        return accelerator.prepare(model.to(accelerator.device))
    model = shard(model, loading, compute)
    if config.defer_reduce:
        model.__dict__["no_sync"] = lambda: _deferred_reduction(model)  # used by accelerate
    return model


def prepare_frozen(
    model: nn.Module,
    accelerator: Accelerator,
    compute: torch.dtype | None,
    loading: ShardedLoading | None,
) -> nn.Module:
    """Prepare a model for inference: freeze it, and move it to the device or shard it.

    compute, loading: as in `prepare`.
    """
    model = model.requires_grad_(False).eval()
    if loading is None:
        return model.to(accelerator.device)
    return shard(model, loading, compute)


def shard(model: nn.Module, loading: ShardedLoading, compute: torch.dtype | None) -> nn.Module:
    """Shard in place: `fully_shard` on each layer, then on the root (embedding, norm, head).

    Weights are gathered in dtype `compute` (None: their own), and gradients reduced in float32. The
    root stays gathered until the end of the backward, or until `reshard`.

    Raises:
        ConfigError: a parameter was left unsharded.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    if not names:  # the family does not name its layers: take the modules in its longest list
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
        names = {type(m).__name__ for m in max(lists, key=len, default=())}
    layers = [m for m in model.modules() if type(m).__name__ in names]
    nested = {inner for layer in layers for inner in layer.modules() if inner is not layer}
    layers = [layer for layer in layers if layer not in nested]
    counts = Counter(id(p) for layer in layers for p in layer.parameters())
    if any(count > 1 for count in counts.values()):
        raise ConfigError(
            f"parallel.mode='fsdp': the layers of {type(model).__name__} share weights, which "
            "cannot be sharded layer by layer: use parallel.mode=ddp"
        )
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    loading.to_meta(model)
    for layer in layers:
        fully_shard(layer, mesh=loading.mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=loading.mesh, mp_policy=policy, reshard_after_forward=False)
    unsharded = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    if unsharded or not layers:
        raise ConfigError(
            f"parallel.mode='fsdp': {type(model).__name__} could not be sharded (layers "
            f"{sorted(names)}, {len(unsharded)} unsharded parameters {unsharded[:3]}): use "
            "parallel.mode=ddp"
        )
    loading.fill(model)
    return model


def units(model: nn.Module) -> list[FSDPModule]:
    """The sharded units of `model`, the root first; empty if it is not sharded."""
    if not isinstance(model, FSDPModule):  # a sharded model's root is always a unit
        return []
    return [m for m in model.modules() if isinstance(m, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free gathered weights, so that no forward uses stale ones after an optimizer step."""
    for unit in units(model):
        unit.reshard()


@contextlib.contextmanager
def gathered(model: nn.Module, gather: bool) -> Iterator[None]:
    """Keep all weights gathered inside the block.

    Each rank may then call the model a different number of times. If `gather` is false, nothing
    stays gathered and all ranks must make the same calls.
    """
    model_units = units(model)
    if not gather:
        yield
        reshard(model)
        return
    for unit in model_units:
        unit.set_reshard_after_forward(False)
        unit.unshard()
    _gathered_units.update(model_units)
    try:
        yield
    finally:
        for unit in model_units:  # first the root, whose setting includes the others
            _gathered_units.discard(unit)
            unit.set_reshard_after_forward(unit is not model_units[0])
        reshard(model)


def in_lockstep(model: nn.Module) -> bool:
    """Whether calling `model` gathers weights; if so, all ranks must call it equally often."""
    return any(unit not in _gathered_units for unit in units(model))


def clip_gradient(
    model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None
) -> float:
    """Clip the gradient of the optimizer's weights to `max_norm`, unless it is None or 0.

    Returns:
        The norm before clipping; 0 without a gradient.
    """
    reshard(model)  # otherwise the next forward would use the weights from before the update
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
    if max_norm:
        nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


@torch.no_grad()
def distance(trained: Sequence[nn.Parameter], before: Sequence[torch.Tensor]) -> float:
    """Euclidean distance of the weights `trained` from their copies `before`, over all shards."""
    moved = [p.detach().float() - old.float() for p, old in zip(trained, before, strict=True)]
    norm = nn.utils.get_total_norm(moved)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _mesh(accelerator: Accelerator, config: ParallelConfig) -> DeviceMesh:
    ranks, device = accelerator.num_processes, accelerator.device.type
    if config.replicas == 1:
        mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("shard",))
    else:
        shape = (config.replicas, ranks // config.replicas)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
    meshes.append(mesh)
    return mesh


@contextlib.contextmanager
def _deferred_reduction(model: nn.Module) -> Iterator[None]:
    """Accumulate unreduced gradients inside the block."""
    root = units(model)[0]
    root.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        root.set_requires_gradient_sync(True)
