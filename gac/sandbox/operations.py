"""The operations that the judge may ask the solver to perform on an object of the program.

A class of the program is described to the judge by the special methods in `SPECIAL` that it
defines. Methods that C code calls to interpret an object (`__index__`, `__float__`, `__buffer__`,
`__array__` and similar) are absent on purpose, as are `__eq__` and `__hash__`: comparisons are made
in the judge.
"""

from __future__ import annotations

import asyncio
import builtins
import copy
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

from .wire import plain_base

_BINARY = [
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "lshift",
    "rshift",
    "xor",
]
_KEYWORDS = ["and", "or"]  # the operator module adds an underscore to these


def _binary() -> dict[str, Callable[..., Any]]:
    table: dict[str, Callable[..., Any]] = {}
    for name in (*_BINARY, *_KEYWORDS):
        forward = getattr(operator, f"{name}_" if name in _KEYWORDS else name)
        table[f"__{name}__"] = forward
        table[f"__r{name}__"] = lambda right, left, forward=forward: forward(left, right)
        table[f"__i{name}__"] = getattr(operator, f"i{name}")
    return table


SPECIAL: dict[str, Callable[..., Any]] = {
    **_binary(),
    **{
        f"__{name}__": getattr(operator, name)
        for name in ["neg", "pos", "abs", "invert", "lt", "le", "gt", "ge"]
    },
    "__pow__": pow,
    "__divmod__": divmod,
    "__rdivmod__": lambda right, left: divmod(left, right),
    "__round__": round,
    "__floor__": math.floor,
    "__ceil__": math.ceil,
    "__trunc__": math.trunc,
    "__bool__": bool,
    "__len__": len,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__delitem__": operator.delitem,
    "__contains__": operator.contains,
    "__iter__": iter,
    "__next__": lambda iterator: list(itertools.islice(iterator, 1)),  # empty when exhausted
    "__reversed__": reversed,
    "__call__": lambda function, /, *arguments, **keywords: function(*arguments, **keywords),
    "__str__": str,
    "__repr__": repr,
    "__format__": format,
    "__enter__": lambda manager: type(manager).__enter__(manager),
    "__exit__": lambda manager, error: type(manager).__exit__(
        manager, error and type(error), error, None
    ),
    "__await__": lambda coroutine: asyncio.run(_awaited(coroutine)),
}
OPERATIONS: dict[str, Callable[..., Any]] = {
    **SPECIAL,
    "get": lambda value, name: _live(getattr(value, name)),
    "set": setattr,
    "delete": delattr,
    "change": lambda value, name, /, *arguments, **keywords: getattr(value, name)(
        *arguments, **keywords
    ),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "state": lambda value: _state(value),
    "contents": plain_base,
}


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def is_builtin_class(kind: type) -> bool:
    """Whether `kind` is a class in `builtins`."""
    return vars(builtins).get(kind.__name__) is kind


def nearest_builtin(kind: type) -> type:
    """The first builtin class in the MRO of `kind`."""
    return next(base for base in type.mro(kind) if is_builtin_class(base))


class Live:
    """Marks a list, dict or set that the judge may change."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _live(value: Any) -> Any:
    return Live(value) if type(value) in (list, dict, set) else value


def _state(value: Any) -> dict[str, Any]:
    """The attributes of an object: its `__dict__` and slots, without properties."""
    names: list[str] = []
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    slotted = {n: getattr(value, n) for n in names if n != "__dict__" and hasattr(value, n)}
    return {**slotted, **getattr(value, "__dict__", {})}
