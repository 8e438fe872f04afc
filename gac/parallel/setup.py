"""Distributed setup: join the process group, shard the model, gather its weights when needed.

accelerate provides the device, the collectives and DDP. Sharding calls torch's `fully_shard`
directly, on CPUs and GPUs, because accelerate silently ignores its FSDP flag on CPUs. The root unit
holds the embedding and the head. It stays gathered after a forward, so that the loss can use the
head's weight with a single gather.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import hashlib
import os
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import GradientAccumulationPlugin, LoggerType
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from gac.errors import ConfigError, require, value_errors_as

from .config import ParallelConfig

DISABLE_ASYNC_LOAD = (
    "HF_DEACTIVATE_ASYNC_LOAD"  # otherwise transformers' threads prefetch without limit
)


class ShardedLoading:
    """This rank's rows (dimension 0) of every weight of a model, divided as in FSDP2.

    mesh: its dimension "shard" is the group over which the model is sharded. device: where the rows
        are kept.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self.mesh, self.device = mesh, device
        shards = mesh["shard"]
        self._rank, self._ranks = shards.get_local_rank(), shards.size()
        self._rows: dict[nn.Parameter, Tensor] = {}  # keyed by placeholder
        self._placeholders: dict[str, nn.Parameter] = {}  # by name, set by `to_meta`

    def __enter__(self) -> ShardedLoading:
        self._before = os.environ.get(DISABLE_ASYNC_LOAD)
        os.environ[DISABLE_ASYNC_LOAD] = "1"
        # torch uses the hook's return value, although its type says None
        self._hook = register_module_parameter_registration_hook(self._keep_shard)  # type: ignore[arg-type]
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        del os.environ[DISABLE_ASYNC_LOAD]
        if self._before is not None:
            os.environ[DISABLE_ASYNC_LOAD] = self._before

    def _keep_shard(self, module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter | None:
        """Registration hook of torch: keep this rank's rows of a loaded `param`.

        Returns the placeholder to register instead of it.
        """
        # transformers marks loaded weights; those in no file are initialized later, unsharded
        if param in self._rows or not (param.ndim and getattr(param, "_is_hf_initialized", False)):
            return None
        rows_per_rank = -(-param.shape[0] // self._ranks)
        rows = param.detach()[rows_per_rank * self._rank : rows_per_rank * (self._rank + 1)]
        placeholder = _placeholder(param)
        self._rows[placeholder] = rows.to(self.device, copy=True)
        return placeholder

    def copy(self, param: nn.Parameter) -> nn.Parameter:
        """A parameter of its own with the same values, as a placeholder if `param` is one."""
        if param not in self._rows:  # it was not loaded
            return nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
        twin = _placeholder(param)
        self._rows[twin] = self._rows[param].clone()
        return twin

    def to_meta(self, model: nn.Module) -> None:
        """Replace the placeholders with meta parameters, so that the model can be sharded.

        Meta parameters have no storage, so nothing can read or move the missing values.
        """
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._placeholders = {name: p for name, p in parameters.items() if p in self._rows}
        on_meta = {
            p: nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for p in self._placeholders.values()
        }
        for module in model.modules():
            for name, param in module._parameters.items():
                if param in on_meta:
                    module._parameters[name] = on_meta[param]

    def fill(self, model: nn.Module) -> None:
        """Move the loaded rows into `model`, which was sharded after `to_meta`."""
        sharded = dict(model.named_parameters())  # tied weights under their first name
        filled: dict[nn.Parameter, nn.Parameter] = {}
        for name, placeholder in self._placeholders.items():
            if placeholder not in filled:  # tied weights stay one parameter
                filled[placeholder] = _with_rows(sharded[name], self._rows.pop(placeholder))
        state = {name: filled[placeholder] for name, placeholder in self._placeholders.items()}
        model.load_state_dict(state, strict=False, assign=True)


def _placeholder(param: nn.Parameter) -> nn.Parameter:
    """A parameter like `param` without storage."""
    # still on the CPU, so that adapters are created there too
    placeholder = nn.Parameter(torch.empty_like(param), requires_grad=param.requires_grad)
    placeholder.untyped_storage().resize_(0)
    placeholder.__dict__.update(param.__dict__)
    return placeholder


def _with_rows(param: Tensor, rows: Tensor) -> nn.Parameter:
    """A sharded parameter like `param` whose local shard is `rows`."""
    assert isinstance(param, DTensor)
    sharded = DTensor.from_local(
        rows,
        param.device_mesh,
        param.placements,
        shape=param.shape,
        stride=param.stride(),
    )
    return nn.Parameter(sharded, requires_grad=param.requires_grad)


LONGEST_WAIT = 60.0  # seconds that a rank that has finished waits for the others before it exits
_gathered_units: weakref.WeakSet[FSDPModule] = weakref.WeakSet()  # units inside `gathered`
_meshes: list[DeviceMesh] = []


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
    config: ParallelConfig,
    compute: torch.dtype | None,
    loading: ShardedLoading | None,
) -> nn.Module:
    """Prepare a model for inference."""
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
    while _meshes:
        getattr(_meshes.pop(), "_pg_registry", {}).clear()
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


def derive_seed(*key: int | str) -> int:
    """A seed that depends only on `key`."""
    digest = hashlib.sha256(":".join(map(str, key)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def seed(number: int) -> None:
    """Set torch's seed.

    Without a GPU, this skips the stack trace that `torch.manual_seed` records for lazy CUDA
    initialization.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


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


def _mesh(accelerator: Accelerator, config: ParallelConfig) -> DeviceMesh:
    ranks, device = accelerator.num_processes, accelerator.device.type
    if config.replicas == 1:
        mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("shard",))
    else:
        shape = (config.replicas, ranks // config.replicas)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
    _meshes.append(mesh)
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
