"""The judge's proxies for objects of the program.

Each class of the program has a local class, built from its description. Its instances ask the
solver only for attributes and for the special methods in `peer.SPECIAL` that the class defines, so
code written in C finds no other special methods to call. Instances of subclasses of immutable
builtin types, such as named tuples, are real local values with these methods added.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from .peer import METHODS, VALUES, WITH_OPERAND, ask, asking, is_builtin, is_importable

# special attributes that are only read by Python code, as text or as plain data
_READABLE = frozenset(
    [
        "__name__",
        "__qualname__",
        "__dict__",
        "__annotations__",
        "__wrapped__",
        "__self__",
        "__members__",
        "__defaults__",
        "__kwdefaults__",
        "__match_args__",
    ]
)
ENDS_LOOPS = (StopIteration, StopAsyncIteration)
KEEP_ORIGIN = WITH_OPERAND | {"__neg__", "__pos__", "__invert__", "__enter__"}


class RemoteError(Exception):
    """The program gave no valid answer, or raised an exception that has no class in the judge."""


class RemoteBase:
    """Base of everything that stands for something in the program."""

    _constructed_ = _factory_ = _returned_ = False
    __setattr__, __delattr__ = asking("set"), asking("delete")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name.endswith("_") and name not in _READABLE:
            raise AttributeError(f"{name} cannot be read from the program's objects in the sandbox")
        return ask("get", self, name)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError("objects of the program cannot be pickled by the tests")


class RemoteClass(RemoteBase, type):
    """Metaclass of the proxies for classes that the program defines in the solver process."""

    __call__, __iter__, __len__ = asking("__call__"), asking("__iter__"), asking("__len__")
    __getitem__, __bool__ = asking("__getitem__"), lambda cls: True

    def __contains__(cls, operand: Any) -> Any:
        is_remote = isinstance(operand, RemoteBase)  # else the program could decide the result
        return ask("__contains__", cls, operand) if is_remote else operand in list(cls)


class Remote(RemoteBase):
    """Proxy for an object in the solver. Base of the local classes."""

    _methods_ = ()
    _container_ = None

    # the program's, not the proxy's
    __dict__ = property(lambda self: ask("get", self, "__dict__"))
    __doc__ = property(lambda self: ask("get", self, "__doc__"))
    __dir__, __copy__ = asking("dir"), asking("copy")

    def __eq__(self, other: object) -> Any:
        """Of two objects of the program, the program decides; contents are compared here."""
        if self._container_:
            return _contents(self) == _contents(other)
        if isinstance(other, Remote):
            defined: set[str] = {*self._methods_, *other._methods_}
            return ask("__eq__", self, other) if "__eq__" in defined else NotImplemented
        return ask("__eq__", self, other) if _may_decide("__eq__", self) else NotImplemented

    def __hash__(self) -> int:
        return ask("__hash__", self) if "__eq__" in self._methods_ else hash(self._remote_[1])

    def __deepcopy__(self, memo: object) -> Any:
        return ask("deepcopy", self)


def _contents(value: Any) -> Any:
    """The contents of a subclass of list, dict, set or similar, as the plain base type."""
    kind = isinstance(value, Remote) and value._container_
    return ask("contents", value, kind) if kind else value


def _may_decide(name: str, value: Any) -> bool:
    """Whether an operator of the program may see a value of the tests.

    Where the tests expect a number, operators that the program defines must not decide whether the
    result is correct. So only an object that the tests have constructed themselves has the right.
    """
    row = value._remote_[0].row
    trusted = not row.has_answer or (row.returns and name in row.operators)
    return value._constructed_ and name in value._methods_ and trusted


def _with_operand(self: Any, name: str, /, operand: Any, *others: Any) -> Any:
    """Call the method `name`, which is in WITH_OPERAND."""
    row = self._remote_[0].row
    known = not row.has_answer or row.returns or name in row.operators
    if (isinstance(operand, Remote) and known) or _may_decide(name, self):
        return ask(name, self, operand, *others)
    base = self._container_ or next((b for b in type(self).__mro__ if b in VALUES), None)
    if base and hasattr(base, name):
        return getattr(base, name)(_contents(self), operand)
    return operand in list(self) if name == "__contains__" else NotImplemented


async def ask_later(operation: str, target: Remote, *arguments: Any) -> Any:
    """A local coroutine that asks for an operation, such as to run a coroutine of the program."""
    return ask(operation, target, *arguments)


_IN_REMOTE = {"__eq__", "__ne__", "__hash__"}
SPECIAL_METHODS: dict[str, Any] = {
    **{name: METHODS[name] for name in METHODS.keys() - _IN_REMOTE},
    **{name: functools.partialmethod(_with_operand, name) for name in WITH_OPERAND - _IN_REMOTE},
    "__await__": lambda self: ask_later("__await__", self).__await__(),
    "__aenter__": lambda self: ask_later("__aenter__", self),
    "__aexit__": lambda self, kind, error, trace: ask_later("__aexit__", self, error),
    "__anext__": lambda self: ask_later("__anext__", self),
}
"""Methods of the local classes, if the program's class defines them."""
# bases of the local classes for subclasses of immutable builtin types
_VALUE_BASES: dict[type, type] = {
    kind: type(
        f"Remote_{kind.__name__}",
        (Remote, kind),
        {"__eq__": kind.__eq__, "__hash__": kind.__hash__, "__dict__": vars(Remote)["__dict__"]},
    )
    for kind in VALUES
}


class RemoteException(RemoteBase):
    """Base of the proxies for exception classes that the program defines.

    What is set on them stays here: Python itself sets `__traceback__` and `__context__`.
    """

    __hash__, __setattr__ = object.__hash__, object.__setattr__


@functools.cache
def standard(path: str) -> Any:
    """The builtin class or importable exception class with this "module:name", or None.

    No other class: `unittest.mock` has one whose objects equal everything, and `unittest.SkipTest`
    and the exceptions of this package end a test without a failure.
    """
    module, _, name = path.partition(":")
    kind = getattr(sys.modules.get(module), name, None)
    is_exception = isinstance(kind, type) and issubclass(kind, BaseException)
    known = is_exception and is_importable(kind) and not module.startswith(("unittest", "sandbox"))
    return kind if known or is_builtin(kind) else None


@functools.cache
def local_base(path: str) -> type:
    """Base of a proxy class, by "module:name" of the nearest base in the standard library."""
    kind = standard(path)
    if not issubclass(kind, BaseException):
        return _VALUE_BASES.get(kind, Remote)
    if not issubclass(kind, Exception) or issubclass(kind, ENDS_LOOPS):
        kind = RemoteError
    return type(kind.__name__, (RemoteException, kind), {})


def _live(kind: type, changes: str) -> type:
    """Class of the local copies of lists, dicts or sets held by an object of the program.

    A change is made in the solver first and then to the copy.
    """
    members: dict[str, Any] = {
        name: functools.partialmethod(_change, getattr(kind, name)) for name in changes.split()
    }
    # copying and pickling give plain values
    members["__reduce_ex__"] = lambda self, protocol: (kind, (kind(self),))
    return type(kind.__name__, (RemoteBase, kind), members)


def _change(self: Any, method: Any, /, *arguments: Any, **keywords: Any) -> Any:
    """Call the builtin `method` in the solver and here."""
    ask("change", self, method.__name__, *arguments, **keywords)
    return method(self, *arguments, **keywords)


_CHANGES = {
    list: "append extend insert pop remove clear sort reverse __setitem__ __delitem__ __iadd__",
    dict: "update pop popitem clear setdefault __setitem__ __delitem__ __ior__",
    set: "add discard remove pop clear update __ior__ __iand__ __isub__ __ixor__",
}
LIVE: dict[type, type] = {kind: _live(kind, changes) for kind, changes in _CHANGES.items()}


def overridden(name: str, self: Any) -> Any:
    """An attribute of a value, such as a named tuple, that the program's class overrides."""
    value = ask("get", self, name)
    if callable(value) and not self._constructed_:
        base = next((base for base in type(self).__mro__ if base in VALUES), object)
        return getattr(base, name).__get__(self)
    return value
