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
import functools
import importlib
import math
import operator
import sys
import types
from collections import UserList
from collections.abc import Callable, Mapping, Set
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
    "__next__": lambda iterator: _next_item(iterator),  # empty when exhausted
    "__reversed__": reversed,
    "__call__": lambda function, /, *arguments, **keywords: function(*arguments, **keywords),
    "__str__": str,
    "__repr__": repr,
    "__format__": format,
    "__enter__": lambda manager: type(manager).__enter__(manager),
    "__exit__": lambda manager, error: type(manager).__exit__(
        manager, error and type(error), error, None
    ),
    "__await__": lambda coroutine: _complete(coroutine),
    "__aenter__": lambda manager: _complete(type(manager).__aenter__(manager)),
    "__aexit__": lambda manager, error: _complete(
        type(manager).__aexit__(manager, error and type(error), error, None)
    ),
    "__aiter__": lambda iterable: type(iterable).__aiter__(iterable),
    "__anext__": lambda iterator: _complete(_next_items(iterator)),  # empty when exhausted
}
WITH_OPERAND = frozenset(
    [
        *_binary(),
        "__divmod__",
        "__rdivmod__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__contains__",
    ]
)
"""Operations that show the program a value of the tests, which may be the expected one."""
GENERATORS: dict[type, str] = {
    types.GeneratorType: "GeneratorType",
    types.CoroutineType: "CoroutineType",
    types.AsyncGeneratorType: "AsyncGeneratorType",
}
OPERATIONS: dict[str, Callable[..., Any]] = {
    **SPECIAL,
    "get": lambda value, name: live(getattr(value, name)),
    "set": setattr,
    "delete": delattr,
    "change": lambda value, name, /, *arguments, **keywords: getattr(value, name)(
        *arguments, **keywords
    ),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "state": lambda value: _state(value),
    "contents": lambda value: _contents(value),
    "dir": dir,
    "isinstance": isinstance,
    "__int__": int,
    "__float__": float,
    "__complex__": complex,
    "__bytes__": bytes,
}


def _next_item(iterator: Any) -> list[Any]:
    try:
        return [next(iterator)]  # must not call `__iter__`, which may start again
    except StopIteration:
        return []


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


async def _next_items(iterator: Any) -> list[Any]:
    try:
        return [await type(iterator).__anext__(iterator)]
    except StopAsyncIteration:
        return []


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def _complete(awaitable: Any) -> Any:
    """Run `awaitable` to completion.

    All calls use the same event loop, because asyncio objects may be bound to a loop.
    """
    return _loop().run_until_complete(_awaited(awaitable))


def is_builtin_class(kind: type) -> bool:
    """Whether `kind` is a class in `builtins`."""
    return vars(builtins).get(kind.__name__) is kind


def nearest_builtin(kind: type) -> type:
    """The first builtin class in the MRO of `kind`."""
    return next(base for base in type.mro(kind) if is_builtin_class(base))


class Effects:
    """A returned value, and the side effects of the operation.

    Args:
        value: the returned value.
        changed: the arguments and keywords if the operation may have changed them in place, else
            None.
        names: new values of global variables.
    """

    def __init__(self, value: Any, changed: Any, names: dict[str, Any]) -> None:
        self.value, self.changed, self.names = value, changed, names


class Live:
    """Marks a list, dict or set that the judge may change."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _contents(value: Any) -> Any:
    if isinstance(value, dict | list | set):
        return plain_base(value)
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, UserList | Set):
        return list(value) if isinstance(value, UserList) else set(value)
    return plain_base(value)


def live(value: Any) -> Any:
    """`value`, wrapped in `Live` if it is a list, dict or set."""
    return Live(value) if type(value) in (list, dict, set) else value


def _state(value: Any) -> dict[str, Any]:
    """The attributes of an object: its `__dict__` and slots, without properties."""
    names: list[str] = []
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    slotted = {n: getattr(value, n) for n in names if n != "__dict__" and hasattr(value, n)}
    return {**slotted, **getattr(value, "__dict__", {})}


def importable(value: Any) -> list[str] | None:
    """[module, qualified name] of a function or class of the standard library, or None."""
    name = getattr(value, "__qualname__", None)
    module = getattr(value, "__module__", None) or getattr(
        getattr(value, "__objclass__", None), "__module__", None
    )
    if not isinstance(name, str) or not isinstance(module, str):
        return None
    if module.split(".")[0] not in sys.stdlib_module_names:
        return None
    try:
        return [module, name] if find_import(module, name) is value else None
    except (ImportError, AttributeError):
        return None


def find_import(module: str, name: str) -> Any:
    """The object at a path that `importable` returned."""
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value
