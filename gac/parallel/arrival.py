"""Shards a model's weights while loading, so that no rank ever holds the full model.

Inside this context, each weight that transformers sets in a model is replaced by a placeholder
without storage. Only this rank's rows are kept, and the rest is freed before the next weight is
read. Call `meta` before and `place` after `fully_shard` to put the rows into the model.
"""

from __future__ import annotations

import os
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"  # otherwise transformers' threads prefetch without limit


class Arrival:
    """This rank's shard of one model's weights: its rows along dimension 0, as FSDP2 splits them.

    mesh: its dimension "shard" is the group over which the model is sharded. device: where the rows
        are kept.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self.mesh, self.device = mesh, device
        shards = mesh["shard"]
        self._rank, self._ranks = shards.get_local_rank(), shards.size()
        self._rows: dict[nn.Parameter, Tensor] = {}  # keyed by placeholder
        self._named: dict[
            str, nn.Parameter
        ] = {}  # placeholders of the model passed to `meta`, by name

    def __enter__(self) -> Arrival:
        self._before = os.environ.get(ONE_BY_ONE)
        os.environ[ONE_BY_ONE] = "1"
        # torch uses the hook's return value, although its type says None
        self._hook = register_module_parameter_registration_hook(self._arrived)  # type: ignore[arg-type]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hook.remove()
        del os.environ[ONE_BY_ONE]
        if self._before is not None:
            os.environ[ONE_BY_ONE] = self._before

    def _arrived(self, module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter | None:
        """torch's registration hook: the placeholder to register instead of a loaded `param`."""
        # transformers' mark of a loaded weight; one that is in no file is initialized later and not
        # sharded here
        if param in self._rows or not (param.ndim and getattr(param, "_is_hf_initialized", False)):
            return None
        every = -(-param.shape[0] // self._ranks)
        mine = param.detach()[every * self._rank : every * (self._rank + 1)]
        placeholder = nn.Parameter(torch.empty_like(param), requires_grad=param.requires_grad)
        placeholder.untyped_storage().resize_(
            0
        )  # still on the CPU, so that adapters are created there too
        placeholder.__dict__.update(param.__dict__)
        self._rows[placeholder] = mine.to(self.device, copy=True)
        return placeholder

    def meta(self, model: nn.Module) -> None:
        """Replace the placeholders with meta parameters, so that the model can be sharded.

        Meta parameters have no storage, so nothing can read or move the missing values.
        """
        every = dict(model.named_parameters(remove_duplicate=False))
        self._named = {name: p for name, p in every.items() if p in self._rows}
        kept = {
            p: nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for p in self._named.values()
        }
        for module in model.modules():
            for name, param in module._parameters.items():
                if param in kept:
                    module._parameters[name] = kept[param]

    def place(self, model: nn.Module) -> None:
        """Set the rows in the sharded model that was passed to `meta`, and release them."""
        sharded = dict(model.named_parameters(remove_duplicate=False))
        made: dict[nn.Parameter, nn.Parameter] = {}
        for name, placeholder in self._named.items():
            if placeholder not in made:  # tied weights stay one parameter
                made[placeholder] = _with_rows(sharded[name], self._rows.pop(placeholder))
        state = {name: made[placeholder] for name, placeholder in self._named.items()}
        model.load_state_dict(state, strict=False, assign=True)
        self._named.clear()


def _with_rows(param: Tensor, rows: Tensor) -> nn.Parameter:
    assert isinstance(param, DTensor)
    whole = DTensor.from_local(
        rows,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    return nn.Parameter(whole, requires_grad=param.requires_grad)
