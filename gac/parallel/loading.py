"""Loads a model of which every rank keeps only its own rows."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

# transformers' threads otherwise prefetch without limit
DISABLE_ASYNC_LOAD = "HF_DEACTIVATE_ASYNC_LOAD"


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
