"""Weights that are cut as they arrive: no rank holds the whole of a model that it will shard.

Inside `Arrival`, each weight that transformers has read and sets in a model leaves this rank's rows
here and a placeholder without memory there; the rest of it is dropped before the next one is read.
`meta` and `place` hand the rows to the model around `fully_shard`.
"""

from __future__ import annotations

import os
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"  # else transformers' threads read ahead, without a bound


class Arrival:
    """What this rank keeps of one model's weights: its rows of dimension 0, as FSDP2 cuts them.

    mesh: its last dimension is the group over which the model is sharded. device: of the rows.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self.mesh, self.device = mesh, device
        shards = mesh["shard"]
        self._rank, self._ranks = shards.get_local_rank(), shards.size()
        self._rows: dict[nn.Parameter, Tensor] = {}  # by placeholder
        self._named: dict[str, nn.Parameter] = {}  # placeholders of the model that `meta` was given

    def __enter__(self) -> Arrival:
        self._before = os.environ.get(ONE_BY_ONE)
        os.environ[ONE_BY_ONE] = "1"
        # torch takes what a hook returns, and says in its types that it returns nothing
        self._hook = register_module_parameter_registration_hook(self._arrived)  # type: ignore[arg-type]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._hook.remove()
        del os.environ[ONE_BY_ONE]
        if self._before is not None:
            os.environ[ONE_BY_ONE] = self._before

    def _arrived(self, module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter | None:
        """What is registered instead of `param`, if it has been read; called by torch."""
        # transformers' mark; a weight without it, in no file, is drawn later and stays whole
        if param in self._rows or not (param.ndim and getattr(param, "_is_hf_initialized", False)):
            return None
        every = -(-param.shape[0] // self._ranks)
        mine = param.detach()[every * self._rank : every * (self._rank + 1)]
        placeholder = nn.Parameter(torch.empty_like(param), requires_grad=param.requires_grad)
        placeholder.untyped_storage().resize_(0)  # on the CPU, where adapters are put beside it
        placeholder.__dict__.update(param.__dict__)
        self._rows[placeholder] = mine.to(self.device, copy=True)
        return placeholder

    def meta(self, model: nn.Module) -> None:
        """Put parameters on the meta device in place of the placeholders; then it can be sharded.

        They carry no device of their own, so that nothing reads or moves what is not there.
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
        """Give a sharded model, `meta`'s, its rows, and forget them."""
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
        rows, param.device_mesh, param.placements, run_check=False, shape=param.shape,
        stride=param.stride(),
    )  # fmt: skip
    return nn.Parameter(whole, requires_grad=param.requires_grad)
