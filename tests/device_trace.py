"""Counts what a call would ask of a GPU: the kernels it launches, and how often the host waits.

There is no GPU in these tests. The call runs on a CPU with interpreted Triton kernels, on the code
paths that a GPU takes: nothing is decided by a value that only the host of a CPU may read for free.

A launch is an operator of PyTorch that writes memory, or one Triton kernel. An operator counts
once, even if it starts several kernels as a sort does; views, allocations and operators without
elements count nothing. A wait is any way in which Python learns a value or a count from a tensor:
`item`, `tolist`, `bool`, `nonzero`, indexing by a mask, a copy to the host.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gac_kernels import backends, linear, loss, tokens
from gac_kernels.backends.triton import launch

TORCH = str(Path(torch.__file__).parent)
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
# a scalar of `torch.where` stays on the host
NO_LAUNCH = ALLOCATIONS | {"_unsafe_view", "is_same_size", "scalar_tensor", "_local_scalar_dense"}
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"}
# These do not reach the dispatcher if the tensor is on the host already.
HOST_READS = ("tolist", "numpy", "cpu", "__array__")


class Event(NamedTuple):
    """A launch or a wait."""

    name: str
    place: str
    """The file and line of the first caller outside PyTorch."""


class Trace:
    """The launches and the waits of a block, in order."""

    def __init__(self) -> None:
        self.launches: list[Event] = []
        self.waits: list[Event] = []
        self._kernel = False

    def add(self, events: list[Event], name: str) -> None:
        if not self._kernel:
            events.append(Event(name, _place()))

    def within(self, part: str) -> "Trace":
        """The events whose place contains `part`, e.g. "gac_kernels/"."""
        selected = Trace()
        selected.launches = [event for event in self.launches if part in event.place]
        selected.waits = [event for event in self.waits if part in event.place]
        return selected

    def summary(self) -> str:
        """Each kind of event with its number, for the message of a failed assertion."""
        kinds = {"launches": self.launches, "waits": self.waits}
        lines = []
        for kind, events in kinds.items():
            lines.append(f"{kind}: {len(events)}")
            counts = Counter(events)
            lines += [f"  {count} {name} {place}" for (name, place), count in counts.items()]
        return "\n".join(lines)

    @contextlib.contextmanager
    def kernel(self, name: str) -> Iterator[None]:
        """One launch, whatever the interpreter calls inside."""
        self.add(self.launches, name)
        before, self._kernel = self._kernel, True
        try:
            yield
        finally:
            self._kernel = before


class _Operators(TorchDispatchMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        namespace, name = func._schema.name.split("::")
        if namespace != "aten":
            return out
        if name in WAITS or (name.startswith("index") and _needs_positions(args)):
            self.trace.add(self.trace.waits, name)
        if _launches(func, name, out):
            self.trace.add(self.trace.launches, name)
        return out


def _launches(func: Any, name: str, out: Any) -> bool:
    if name in NO_LAUNCH:
        return False
    returns = [r.alias_info for r in func._schema.returns]
    if returns and all(info is not None and not info.is_write for info in returns):  # views
        return False
    tensors = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
    return not tensors or any(x.numel() for x in tensors)


def _needs_positions(args: tuple[Any, ...]) -> bool:
    """Whether an index is a mask; to fill one with a number takes no positions."""
    if len(args) > 2 and isinstance(args[2], torch.Tensor) and args[2].numel() == 1:
        return False
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    masks = (torch.bool, torch.uint8)
    return any(isinstance(x, torch.Tensor) and x.dtype in masks for x in indices)


def _place() -> str:
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((TORCH, "<", __file__, contextlib.__file__)):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@contextlib.contextmanager
def trace() -> Iterator[Trace]:
    """Trace the block. Tensors in it answer `is_cpu` with False, and "auto" is Triton's backend."""
    found = Trace()
    run = launch.Launch.run

    def counted(self: launch.Launch, device: torch.device) -> None:
        if not self.programs:
            return
        with found.kernel(self.kernel.__name__):
            run(self, device)

    def read(name: str) -> Any:
        own = getattr(torch.Tensor, name)

        def counted(self: torch.Tensor, *args: Any, **keywords: Any) -> Any:
            found.add(found.waits, name)
            return own(self, *args, **keywords)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for name in HOST_READS:
            patch.setattr(torch.Tensor, name, read(name), raising=False)
        patch.setattr(torch.Tensor, "is_cpu", False, raising=False)
        for module in (linear, loss, tokens):
            patch.setattr(module, "ASYNCHRONOUS", {"cpu"})
        patch.setitem(backends._PREFERRED, "cpu", ("triton",))
        patch.setattr(launch.Launch, "run", counted)
        with _Operators(found):
            yield found
