"""Objects of the tests that the program may use: functions, iterators and instances.

They stay in the judge, and the program gets proxies. A proxy performs the operations in its
description and nothing else. Attributes whose names start with an underscore cannot be reached, so
the program sees neither the tests' globals nor their text.
"""

from __future__ import annotations

import functools
import io
import operator
import types
from collections.abc import Callable
from typing import Any

from .operations import SPECIAL, nearest_builtin
from .wire import Json, Node

Ask = Callable[[int, str, Any, Any], Any]

_ASYNC = ("__await__", "__aenter__", "__aexit__", "__aiter__", "__anext__")
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: perform for name, perform in SPECIAL.items() if name not in _ASYNC},
    "__eq__": operator.eq,
    "__hash__": hash,
    "get": getattr,
    "set": setattr,
    "delete": delattr,
}
_ATTRIBUTES = ("get", "set", "delete")
_FUNCTIONS = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    functools.partial,
)
_NAMED = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)
# standard-library classes whose instances tests may pass, like instances of their own classes
_SHARED = (io.StringIO, io.BytesIO, types.SimpleNamespace)
_PLAIN = (int, float, str, tuple, frozenset, bytes, complex, list, dict, set)


def _operations(value: Any) -> list[str] | None:
    """The `OPERATIONS` that the program may use on `value`; None if it must not get `value`."""
    kind = type(value)
    if isinstance(value, _FUNCTIONS) or (kind is type and value.__module__ == "__tests__"):
        return ["__call__"]
    if kind in _SHARED or (kind.__module__ == "__tests__" and not _is_plain(kind)):
        members: dict[str, Any] = {}
        for base in reversed(kind.__mro__[:-1]):
            members |= vars(base)
        return [*_ATTRIBUTES, *(name for name in OPERATIONS if members.get(name) is not None)]
    return ["__next__"] if hasattr(kind, "__next__") else None


def _is_plain(kind: type) -> bool:
    return issubclass(kind, _PLAIN) and not hasattr(kind, "_fields")


class Lender:
    """The judge's side: the objects that the program has proxies for, by number."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._numbers: dict[int, int] = {}

    def __getitem__(self, number: Json) -> Any:
        if type(number) is not int or number < 0:
            raise TypeError("a reference to one of the tests' objects must be an integer >= 0")
        return self._values[number]

    def keep(self, value: Any) -> int:
        """Keep `value` alive, so that its id is not reused, and return its number."""
        number = self._numbers.setdefault(id(value), len(self._values))
        if number == len(self._values):
            self._values.append(value)
        return number

    def refer(self, value: Any) -> Node | None:
        operations = _operations(value)
        if operations is None:
            return None
        name = value.__name__ if isinstance(value, _NAMED) else type(value).__name__
        return "lent", [self.keep(value), name, operations], None

    def perform(self, number: int, operation: str, arguments: list[Any], keywords: Any) -> Any:
        """Perform an operation that the program asks for."""
        value = self[number]
        # a subclass of str could lie about what it is
        if type(operation) is not str or operation not in (_operations(value) or ()):
            kind = type(value).__name__
            raise TypeError(f"this {kind} object of the tests has no operation {operation!r:.40}")
        if operation in _ATTRIBUTES:
            name, *rest = arguments
            if type(name) is not str or name.startswith("_"):
                raise AttributeError("only public attributes of the tests' objects can be used")
            return OPERATIONS[operation](value, name, *rest)
        return OPERATIONS[operation](value, *arguments, **keywords)

    def failure(self, error: Exception) -> list[Any]:
        """Encode what the program may know about an exception."""
        plain = all(type(argument) in (int, float, str, bool) for argument in error.args)
        arguments = list(error.args) if plain else [f"{error!s:.500}"]
        return [False, nearest_builtin(type(error)).__name__, arguments, self.keep(error)]


class Borrower:
    """The solver's side: proxies by number. `ask` performs an operation in the judge."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._proxies: dict[int, Any] = {}
        self._classes: dict[str, type] = {}
        self._numbers: dict[int, int] = {}

    def number(self, value: Any) -> int | None:
        """The number of a proxy, or of an exception of the tests; None for other values."""
        return self._numbers.get(id(value))

    def keep(self, number: int, proxy: Any) -> None:
        self._proxies[number] = proxy
        self._numbers[id(proxy)] = number

    def proxy(self, number: int, name: str, operations: list[str]) -> Any:
        """The proxy for an object of the tests."""
        if number not in self._proxies:
            if operations == ["__call__"]:
                proxy = self._function(number, name)
            else:
                key = f"{name}({','.join(operations)})"
                if key not in self._classes:
                    self._classes[key] = _proxy_class(name, operations)
                proxy = self._classes[key]()
                object.__setattr__(proxy, "_ask_", functools.partial(self._ask, number))
            self.keep(number, proxy)
        return self._proxies[number]

    def _function(self, number: int, name: str) -> Callable[..., Any]:
        def function(*arguments: Any, **keywords: Any) -> Any:
            return self._ask(number, "__call__", arguments, keywords)

        function.__name__ = function.__qualname__ = name
        return function


def _proxy_class(name: str, operations: list[str]) -> type:
    members = {o: _method(o) for o in operations if o not in _ATTRIBUTES}
    if "get" in operations:
        members["__getattr__"] = _method("get")
        members["__setattr__"] = _method("set")
        members["__delattr__"] = _method("delete")
    if "__next__" in operations:
        members["__next__"] = _next
        members.setdefault("__iter__", lambda self: self)
    if "__exit__" in operations:
        members["__exit__"] = lambda self, kind, error, trace: self._ask_("__exit__", (error,), {})
    return type(name, (), members)


def _method(operation: str) -> Callable[..., Any]:
    def method(self: Any, /, *arguments: Any, **keywords: Any) -> Any:
        return self._ask_(operation, arguments, keywords)

    return method


def _next(self: Any) -> Any:
    items = self._ask_("__next__", (), {})
    if not items:
        raise StopIteration
    return items[0]
