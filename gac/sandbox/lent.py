"""What the tests pass to the program: copies of data, and references to objects that stay behind.

Functions, iterators and instances of the tests' own classes are lent: they stay in the judge, and
the program gets proxies that can perform the operations in `operations` and nothing else.
Attributes whose names start with an underscore cannot be reached, so the program sees neither the
tests' globals nor their text. Everything else is pickled.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import inspect
import io
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

_ARITHMETIC = [
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "divmod",
    "pow",
    "lshift",
    "rshift",
    "and",
    "or",
    "xor",
]
COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
WITH_OPERAND = frozenset(
    [*COMPARISONS, "__contains__"]
    + [f"__{prefix}{name}__" for name in _ARITHMETIC for prefix in ("", "r", "i")]
)
"""Special methods that show the program a value of the tests, which may be the expected one."""
SPECIAL = WITH_OPERAND | {
    f"__{name}__"
    for name in [
        "neg",
        "pos",
        "abs",
        "invert",
        "round",
        "floor",
        "ceil",
        "trunc",
        "bool",
        "len",
        "getitem",
        "setitem",
        "delitem",
        "iter",
        "next",
        "reversed",
        "call",
        "str",
        "repr",
        "format",
        "hash",
        "enter",
        "exit",
        "await",
        "aenter",
        "aexit",
        "aiter",
        "anext",
    ]
}
"""Special methods that one side may call on an object of the other. Those that C code follows to
interpret an object (`__index__`, `__float__`, `__array__` and similar) are absent on purpose.
"""
_ATTRIBUTES = ("get", "set", "delete")
_END = object()
OPERATIONS: dict[str, Callable[..., Any]] = {
    "get": getattr,
    "set": setattr,
    "delete": delattr,
    "__call__": lambda function, /, *arguments, **keywords: function(*arguments, **keywords),
    "__next__": lambda iterator: [item for item in [next(iterator, _END)] if item is not _END],
    "__exit__": lambda manager, error: type(manager).__exit__(
        manager, error and type(error), error, None
    ),
}
"""Operations that are not methods with the same name and arguments."""
_FUNCTIONS = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    functools.partial,
)
_SHARED = (object, io.StringIO, io.BytesIO, types.SimpleNamespace)
_SHARED_MODULES = ("__tests__", "queue", "_queue", "threading", "unittest.mock")
_PLAIN: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: bytes.__bytes__,
    complex: complex.__complex__,
    dict: lambda value: dict(dict.items(value)),
}


def plain(value: Any, kind: type) -> Any:
    """The part of `value` that belongs to its base `kind`; overridden methods are ignored."""
    return _PLAIN[kind](value) if kind in _PLAIN else kind(kind.__iter__(value))  # type: ignore[attr-defined] # a collection


def lookup(kind: type, name: str) -> Any:
    """Look up attribute `name` of a class without invoking descriptors or the metaclass."""
    return next((vars(base)[name] for base in type.mro(kind) if name in vars(base)), None)


def is_importable(value: Any) -> bool:
    """Whether a class or function can be found by its module and name, as pickle does."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    found = getattr(module, getattr(value, "__qualname__", ""), None)
    return found is value and value.__module__ not in ("__tests__", "program")


def operations(value: Any) -> list[str] | None:
    """The operations that the program may perform on `value`; None if it gets a copy."""
    if isinstance(value, (*_FUNCTIONS, type)):
        return None if is_importable(value) else ["__call__"]
    kind: type = type(value)
    if kind in _SHARED or kind.__module__ in _SHARED_MODULES:
        return _members(kind)
    if hasattr(kind, "__next__"):
        return ["__next__"]
    if is_importable(kind):
        with contextlib.suppress(Exception):  # a lock, for example, cannot be copied
            if kind not in copyreg.dispatch_table:
                value.__reduce_ex__(4)
            return None
    return _members(kind)


@functools.lru_cache(maxsize=1024)
def _members(kind: type) -> list[str]:
    names = [name for name in SPECIAL if lookup(kind, name) not in (None, lookup(object, name))]
    return sorted([*_ATTRIBUTES, *names])


class Table:
    """Objects by number, kept alive so that their ids are not reused."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._numbers: dict[int, int] = {}

    def __getitem__(self, number: Any) -> Any:
        if type(number) is not int or number < 0:
            raise TypeError("a reference to an object must be an integer >= 0")
        return self._values[number]

    def number(self, value: Any) -> int:
        """The number of `value`, which is added if it is new."""
        number = self._numbers.setdefault(id(value), len(self._values))
        if number == len(self._values):
            self._values.append(value)
        return number


class Lender(Table):
    """The judge's side: the objects that the program has proxies for."""

    def reduce(self, value: Any) -> Any:
        """How to pickle `value`; NotImplemented for data, which pickle can copy by itself."""
        kind = type(value)
        if isinstance(value, BaseException):
            # the text of a failed assertion could show the expected value
            arguments = () if isinstance(value, AssertionError) else value.args
            return borrow, (self.number(value), kind, *arguments)
        allowed = operations(value)
        if allowed is None:
            return NotImplemented
        if isinstance(value, type) and issubclass(value, BaseException):
            base = next(base for base in value.__mro__ if is_importable(base))
            return borrow, (self.number(value), type, value.__name__, (base,), {})
        data = next((base for base in kind.__mro__ if base in _BASES), None)
        if data and not hasattr(kind, "_fields"):
            return data, (plain(value, data),)
        described = value if isinstance(value, (*_FUNCTIONS, type)) else kind
        number, name = self.number(value), getattr(described, "__name__", "partial")
        if allowed == ["__call__"]:
            return borrow, (number, function, number, _details(value, name))
        return borrow, (number, instance, number, name, tuple(allowed))

    def perform(self, number: int, operation: str, arguments: list[Any], keywords: Any) -> Any:
        """Perform an operation that the program asks for."""
        value = self[number]
        # a subclass of str could lie about what it is
        if type(operation) is not str or operation not in (operations(value) or ()):
            kind = type(value).__name__
            raise TypeError(f"this {kind} object of the tests has no operation {operation!r:.40}")
        if operation in _ATTRIBUTES and (
            type(arguments[0]) is not str or arguments[0].startswith("_")
        ):
            raise AttributeError("only public attributes of the tests' objects can be used")
        method = OPERATIONS.get(operation) or getattr(type(value), operation)
        return method(value, *arguments, **keywords)


def _details(value: Any, name: str) -> dict[str, Any]:
    """What decorators read from a function: names, text for readers, and parameters."""
    details = {"__name__": name, "__qualname__": name, "__doc__": value.__doc__}
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return details
    empty = inspect.Parameter.empty
    shown = [
        p.replace(default=empty if p.default is empty else ..., annotation=empty)
        for p in parameters
    ]
    return {**details, "__signature__": inspect.Signature(shown)}


_BASES = {*_PLAIN, tuple, list, set, frozenset}


# -- the solver's side -----------------------------------------------------------------------------


# the `Solver` of this process, for the functions that pickles refer to
borrower: list[Any] = []


def own(number: int) -> Any:
    """An object of the program."""
    return borrower[0].objects[number]


def borrow(number: int, make: Callable[..., Any], *arguments: Any) -> Any:
    """The proxy for an object of the tests, made if needed."""
    solver = borrower[0]
    if number not in solver.proxies:
        solver.proxies[number] = proxy = make(*arguments)
        solver.proxy_numbers[id(proxy)] = number
    return solver.proxies[number]


def function(number: int, details: dict[str, Any]) -> Any:
    """A proxy for a function."""
    use = functools.partial(borrower[0].use, number, "__call__")

    def proxy(*arguments: Any, **keywords: Any) -> Any:
        return use(arguments, keywords)

    for name, value in details.items():
        setattr(proxy, name, value)
    return proxy


def instance(number: int, name: str, allowed: tuple[str, ...]) -> Any:
    """A proxy for another object."""
    proxy: Any = object.__new__(_proxy_class(name, allowed))
    object.__setattr__(proxy, "_use_", functools.partial(borrower[0].use, number))
    return proxy


@functools.cache
def _proxy_class(name: str, allowed: tuple[str, ...]) -> type:
    members = {"__iter__": lambda self: self} if "__next__" in allowed else {}
    members |= dict(_METHODS.get(operation) or _method(operation) for operation in allowed)
    try:
        return type(name, (vars(sys.modules["program"])[name],), members)  # its own copy
    except (KeyError, TypeError):
        return type(name, (), members)


def _method(operation: str, name: str = "") -> tuple[str, Callable[..., Any]]:
    """The name of a special method, and a function that asks for `operation`."""

    def method(self: Any, /, *arguments: Any, **keywords: Any) -> Any:
        return self._use_(operation, arguments, keywords)

    return name or operation, method


def _attribute(self: Any, name: str) -> Any:
    if name.startswith("_"):
        return object.__getattribute__(self, name)
    return self._use_("get", (name,), {})


def _next(self: Any) -> Any:
    for item in self._use_("__next__", (), {}):
        return item
    raise StopIteration


_METHODS: dict[str, tuple[str, Callable[..., Any]]] = {
    "get": ("__getattribute__", _attribute),
    "set": _method("set", "__setattr__"),
    "delete": _method("delete", "__delattr__"),
    "__next__": ("__next__", _next),
    "__exit__": ("__exit__", lambda self, kind, error, _: self._use_("__exit__", (error,), {})),
}


class _Pickler(pickle.Pickler):
    """A pickler that can be given a `reducer_override`."""


def pickled(value: Any, reduce: Callable[[Any], Any]) -> bytes:
    """Pickle `value`; `reduce` decides about everything but numbers, text and collections."""
    file = io.BytesIO()
    pickler: Any = _Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.reducer_override = reduce
    pickler.dump(value)
    return file.getvalue()
