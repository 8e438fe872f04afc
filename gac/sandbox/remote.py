"""The judge's proxies for objects of the program, and its client for the solver.

Each class of the program has a local class, built from its description. Its instances ask the
solver only for attributes and for the special methods in `lent.SPECIAL` that the class defines, so
code written in C finds no other special methods to call. Instances of subclasses of immutable
builtin types, such as named tuples, are real local values with these methods added.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Collection, Generator
from typing import Any

from . import lent
from .lent import SPECIAL, WITH_OPERAND, Lender, is_importable
from .solver import CONTAINERS, VALUES
from .wire import DECODE_ERRORS, Channel, ChannelClosed, Json, WireError, decode, is_builtin, parse

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
_ENDS_LOOPS = (StopIteration, StopAsyncIteration)
_KEEP_ORIGIN = SPECIAL & {"__neg__", "__pos__", "__abs__", "__invert__", "__round__", "__enter__"}
_KEEP_ORIGIN |= WITH_OPERAND


class RemoteError(Exception):
    """The program gave no valid answer, or raised an exception that has no class in the judge."""


class RemoteBase:
    """Base of everything that stands for something in the program."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name.endswith("_") and name not in _READABLE:
            raise AttributeError(f"{name} cannot be read from the program's objects in the sandbox")
        return ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        ask("delete", self, name)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError("objects of the program cannot be pickled by the tests")


class RemoteClass(RemoteBase, type):
    """Metaclass of the proxies for classes that the program defines in the solver process."""

    def __call__(cls, /, *arguments: Any, **keywords: Any) -> Any:
        return ask("__call__", cls, *arguments, **keywords)

    def __iter__(cls) -> Any:
        return ask("__iter__", cls)

    def __len__(cls) -> int:
        return ask("__len__", cls)

    def __getitem__(cls, key: Any) -> Any:
        return ask("__getitem__", cls, key)

    def __contains__(cls, key: Any) -> Any:
        return ask("__contains__", cls, key)


class Remote(RemoteBase):
    """Proxy for an object in the solver. Base of the local classes."""

    _methods_ = ()
    _container_ = None
    _constructed_ = _factory_ = False

    @property
    def __dict__(self) -> Any:  # type: ignore[override] # the program's, not the proxy's
        return ask("get", self, "__dict__")

    @property
    def __doc__(self) -> Any:  # type: ignore[override] # the program's, not the proxy's
        return ask("get", self, "__doc__")

    def __eq__(self, other: object) -> Any:
        """Of two objects of the program, the program decides; contents are compared here."""
        if self is other or self._container_:
            return self is other or _contents(self) == _contents(other)
        if isinstance(other, Remote):
            defined = {*self._methods_, *other._methods_}
            return ask("__eq__", self, other) if "__eq__" in defined else NotImplemented
        return ask("__eq__", self, other) if _may_decide("__eq__", self) else NotImplemented

    def __hash__(self) -> int:
        return ask("__hash__", self) if "__eq__" in self._methods_ else hash(self._remote_[1])

    def __dir__(self) -> Any:
        return ask("dir", self)

    def __copy__(self) -> Any:
        return ask("copy", self)

    def __deepcopy__(self, memo: object) -> Any:
        return ask("deepcopy", self)


def ask(operation: str, target: Any, /, *arguments: Any, **keywords: Any) -> Any:
    """Ask the solver for an operation on a proxy's object."""
    return target._remote_[0].ask(operation, target, *arguments, **keywords)


def _contents(value: Any) -> Any:
    """The contents of a subclass of list, dict, set or similar, as the plain base type."""
    return ask("contents", value) if isinstance(value, Remote) and value._container_ else value


def _may_decide(name: str, value: Any) -> bool:
    """Whether an operator of the program may see a value of the tests.

    Where the tests expect a number, operators that the program defines must not decide whether the
    result is correct. So only an object that the tests have constructed themselves has the right.
    """
    return value._constructed_ and name in value._methods_ and value._remote_[0].trusts(name)


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: Any, /, *arguments: Any, **keywords: Any) -> Any:
        return ask(name, self, *arguments, **keywords)

    def with_operand(self: Any, /, operand: Any, *others: Any) -> Any:
        if isinstance(operand, Remote) or _may_decide(name, self):
            return ask(name, self, operand, *others)
        base = self._container_ or next((b for b in type(self).__mro__ if b in VALUES), None)
        if base:
            return getattr(base, name, _unsupported)(_contents(self), operand)
        return operand in list(self) if name == "__contains__" else NotImplemented

    return with_operand if name in WITH_OPERAND else method


def _unsupported(*operands: Any) -> Any:
    return NotImplemented


def _next(name: str, end: type[Exception]) -> Callable[[Remote], Any]:
    def method(self: Remote) -> Any:
        items = ask(name, self)
        if not items:
            raise end
        return items[0]

    return method


def _exit(name: str) -> Callable[..., Any]:
    def method(self: Remote, kind: object, error: BaseException | None, trace: object) -> Any:
        suppressed = ask(name, self, error)
        if suppressed and isinstance(error, AssertionError):
            self._remote_[0].suppressed = error
        return suppressed

    return method


def _async(function: Callable[..., Any]) -> Callable[..., Any]:
    async def method(self: Remote, *arguments: Any) -> Any:
        return function(self, *arguments)

    return method


def _await(self: Remote) -> Generator[Any, None, Any]:
    return ask("__await__", self)
    yield


async def _coroutine(client: SolverClient, number: int) -> Any:
    return client.ask("__await__", client.object(number))


_METHODS: dict[str, Callable[..., Any]] = {
    **{name: _delegate(name) for name in SPECIAL - {"__eq__", "__ne__", "__hash__"}},
    "__next__": _next("__next__", StopIteration),
    "__exit__": _exit("__exit__"),
    "__await__": _await,
    "__aenter__": _async(_delegate("__aenter__")),
    "__aexit__": _async(_exit("__aexit__")),
    "__anext__": _async(_next("__anext__", StopAsyncIteration)),
}
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
    """Base of the proxies for exception classes that the program defines."""

    __hash__ = object.__hash__

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):  # Python itself sets __traceback__ and __context__
            object.__setattr__(self, name, value)
        else:
            ask("set", self, name, value)


_UNNAMED = {f"builtins:{k.__name__}": k for k in vars(types).values() if isinstance(k, type)}


@functools.cache
def _standard(path: str) -> Any:
    """The class of the standard library with this "module:name", or None."""
    module, _, name = path.partition(":")
    kind = getattr(sys.modules.get(module), name, None)
    known = isinstance(kind, type) and is_importable(kind)
    return kind if known else _UNNAMED.get(path)


@functools.cache
def _local_base(path: str) -> type:
    """Base of a proxy class, by "module:name" of the nearest base in the standard library."""
    kind = _standard(path)
    if kind in VALUES:
        return _VALUE_BASES[kind]
    if not issubclass(kind, BaseException):
        return Remote
    if not issubclass(kind, Exception) or issubclass(kind, _ENDS_LOOPS):
        kind = RemoteError
    return type(kind.__name__, (RemoteException, kind), {})


class _Live(RemoteBase):
    """Base of the local copies of lists, dicts and sets held by an object of the program.

    A change is made in the solver first and then to the copy.
    """

    def __reduce_ex__(self, protocol: object) -> Any:  # copying and pickling give plain values
        kind = next(base for base in _LIVE if isinstance(self, base))
        return kind, (kind(self),)


def _changing(kind: type, name: str) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        ask("change", self, name, *arguments, **keywords)
        return getattr(kind, name)(self, *arguments, **keywords)

    return method


_CHANGES = {
    list: "append extend insert pop remove clear sort reverse __setitem__ __delitem__ __iadd__",
    dict: "update pop popitem clear setdefault __setitem__ __delitem__ __ior__",
    set: "add discard remove pop clear update __ior__ __iand__ __isub__ __ixor__",
}
_LIVE: dict[type, type] = {
    kind: type(kind.__name__, (_Live, kind), {n: _changing(kind, n) for n in names.split()})
    for kind, names in _CHANGES.items()
}


class SolverClient:
    """Client for the solver at the other end of the channel.

    Args:
        channel: pipes to and from the solver.
        returns: whether changes of arguments count even if the call returns a value.
    """

    def __init__(self, channel: Channel, returns: bool = True) -> None:
        self._channel, self._returns = channel, returns
        self._objects: dict[int, Any] = {}
        self._classes: dict[int, type] = {}
        self._coroutines: dict[int, int] = {}
        self._lender = Lender()
        self._turn = threading.RLock()
        self.requests = 0
        """Number of requests so far."""
        self.lost_reason = ""
        """Why the solver no longer answers, or "". Tests that pass afterwards count as failed."""
        self.suppressed: BaseException | None = None
        """A failed assertion of the tests that the program has not let through."""
        self.constructors: Collection[int] = ()
        """Ids of the classes of the program whose instances the tests construct."""
        self.factories = False
        """Whether a method of such a class, called on the class, constructs an instance too."""
        self.trusts: Callable[[str], bool] = lambda name: True
        """Whether the row relies on this operator."""
        self.shared: dict[str, type] = {}
        """Classes of the setup, which the program has too: their instances are copied."""
        self.expects_stop = False
        """Whether the tests expect a StopIteration, which would otherwise end their loops."""
        self.prepare: Callable[[], None] = lambda: None
        """Called before each request."""
        self.on_globals: Callable[[dict[str, Any]], None] = lambda names: None
        """Called with new values of the program's global variables."""

    def ask(self, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        """Send one request and return the answer; raises the program's exception."""
        with self._turn:
            if operation != "patch":
                self.prepare()
            self.requests += 1
            request = lent.pickled((operation, arguments, keywords), self._reduce)
            value, changed = self.answer(request)
            if changed and (value is None or self._returns):
                old = [*arguments[1:], *keywords.values()]
                for argument, new in zip(old, changed, strict=True):
                    if new is not None:
                        _update(argument, new)
            if isinstance(value, Remote):
                object.__setattr__(
                    value, "_constructed_", self._constructs(operation, arguments[0])
                )
                if operation == "get" and self.factories and id(arguments[0]) in self.constructors:
                    object.__setattr__(value, "_factory_", True)
            return value

    def _constructs(self, operation: str, target: Any) -> bool:
        """Whether the result counts as constructed by the tests."""
        if operation == "__call__":
            return id(target) in self.constructors or (
                isinstance(target, Remote) and target._factory_
            )
        return operation in _KEEP_ORIGIN and target._constructed_

    def answer(self, request: bytes | None = None) -> tuple[Any, Any]:
        """Send `request`, if any, and return the solver's answer and the changed arguments.

        The first answer, which needs no request, says whether the program ran. The solver may use
        objects of the tests before it answers.
        """
        if self.lost_reason:
            raise RemoteError(self.lost_reason)
        try:
            if request is not None:
                self._channel.send(request)
            while True:
                kind, value, changed = self._receive()
                if kind != "callback":
                    break
                self._channel.send(lent.pickled(self._called(value), self._reduce))
        except ChannelClosed:
            self.lost_reason = "the program exited"
        except (WireError, MemoryError) as error:
            self.lost_reason = f"invalid answer: {error}"
        else:
            if kind == "value":
                return value, changed
            if value is self.suppressed:
                self.suppressed = None
            if not isinstance(value, Exception):
                raise RemoteError(f"{value}")
            if isinstance(value, _ENDS_LOOPS) and not self.expects_stop:
                raise RemoteError(f"{type(value).__name__}: {value}")
            raise value
        self._channel.close()
        raise RemoteError(self.lost_reason)

    def object(self, number: int) -> Any:
        """A reference to an object of the program that has no proxy."""
        reference = Remote()
        object.__setattr__(reference, "_remote_", (self, number))
        return reference

    def _receive(self) -> tuple[str, Any, Any]:
        message = parse(self._channel.receive())
        try:
            for description in message[0]:
                self._define(*description)
            kind, value, printed, changed, names = decode(message[1], self._resolve)
            if kind not in ("value", "raise", "callback") or type(printed) is not str:
                raise TypeError("neither a value nor an error")
            self.on_globals(names)
        except DECODE_ERRORS as error:
            raise WireError(f"{error!s:.200}") from None
        sys.stdout.write(printed)
        return kind, value, changed

    def _called(self, request: Any) -> tuple[str, Any]:
        """Perform an operation on an object of the tests at the request of the solver."""
        try:
            return "result", self._lender.perform(*request)
        except Exception as error:  # it goes back through the program, which may handle it
            if isinstance(error, AssertionError):
                self.suppressed = error
            return "error", error

    def _reduce(self, value: Any) -> Any:
        number = (
            value._remote_[1] if isinstance(value, RemoteBase) else self._coroutines.get(id(value))
        )
        return self._lender.reduce(value) if number is None else (lent.own, (number,))

    # -- objects and classes of the program --------------------------------------------------------

    def _resolve(self, tag: str, parts: list[Any]) -> Any:
        return getattr(self, f"_read_{tag}")(*parts)

    def _remember(self, number: int, make: Callable[[], Any]) -> Any:
        if type(number) is not int:
            raise TypeError("an object of the program needs a number")
        if number not in self._objects:
            self._objects[number] = make()
        return self._objects[number]

    def _read_lent(self, number: int) -> Any:
        return self._lender[number]

    def _read_class(self, reference: Json) -> Any:
        return self._class(reference)

    def _read_live(self, number: int, value: Any) -> Any:
        live = _LIVE[type(value)](value)
        object.__setattr__(live, "_remote_", (self, number))
        return live

    def _read_coroutine(self, number: int) -> Any:
        coroutine = self._remember(number, lambda: _coroutine(self, number))
        self._coroutines[id(coroutine)] = number
        return coroutine

    def _read_object(self, number: int, reference: Json, *content: Any) -> Any:
        def make() -> Any:
            kind = self._class(reference)
            base = next((base for base in kind.__mro__ if base in VALUES), object)
            value = base.__new__(kind, *content)
            object.__setattr__(value, "_remote_", (self, number))
            return value

        return self._remember(number, make)

    def _read_instance(self, target: Any, name: str = "", state: Any = None) -> Any:
        if not name:
            return object.__new__(self.shared[target])
        for key, value in state.items():
            if key.startswith("__") and key.endswith("__"):
                raise TypeError(f"{key} is not an attribute")
            object.__setattr__(target, key, value)
        return target

    def _read_error(
        self, number: int, kind: Json, text: str, cause: Any, arguments: Any = None, state: Any = ()
    ) -> Any:
        def make() -> Any:
            local = self._class(kind)
            if not issubclass(local, Exception):
                return RemoteError(f"{text}")
            arguments_ = (text,) if arguments is None else arguments
            try:
                error = local.__new__(local, *arguments_)
                next(filter(is_builtin, local.__mro__)).__init__(error, *arguments_)
                vars(error).update(state)
            except Exception:  # the arguments come from the program
                return RemoteError(f"{text}")
            if isinstance(error, RemoteBase):
                object.__setattr__(error, "_remote_", (self, number))
            error.__cause__ = cause if isinstance(cause, BaseException) else None
            return error

        return self._remember(number, make)

    def _class(self, reference: Json) -> Any:
        """The local class for a reference: see `solver.Solver._class`."""
        if type(reference) is int:
            return self._classes[reference]
        if type(reference) is str:
            return _standard(reference)
        kind = self._lender[reference[0]]
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise TypeError("not an exception class of the tests")
        return kind

    def _define(
        self,
        number: int,
        name: str,
        bases: list[Json],
        base: str,
        container: str,
        methods: list[str],
        standard: list[str],
    ) -> None:
        """Create the proxy class for a class of the program.

        Args:
            number: its number among the program's objects.
            name: its name.
            bases: references to its bases that the program defines.
            base: "module:name" of its nearest base in `builtins` or among the exceptions.
            container: the type of its contents if objects compare by them, else "".
            methods: the special methods that it defines, and overridden methods of `base`.
            standard: "module:name" of all its bases, for `isinstance`.
        """
        last = _local_base(base)
        parents = tuple(map(self._class, bases))
        if not any(issubclass(parent, last) for parent in parents):
            parents = (*parents, last)
        members: dict[str, Any] = {m: _METHODS[m] for m in methods if m in _METHODS}
        members |= {m: _overridden(m) for m in methods if not m.startswith("_")}
        contents = {kind.__name__: kind for kind in CONTAINERS}.get(container)
        members |= {"_remote_": (self, number), "_methods_": methods, "_container_": contents}
        members |= {"_standard_": standard, "__module__": "program", "_constructed_": False}
        members["__doc__"] = vars(Remote)["__doc__"]
        try:
            self._classes[number] = RemoteClass(name, parents, members)
        except TypeError:  # bases that cannot be combined here
            self._classes[number] = RemoteClass(name, (last,), members)


def _overridden(name: str) -> property:
    def get(self: Any) -> Any:
        value = ask("get", self, name)
        if callable(value) and not self._constructed_:
            base = next(base for base in type(self).__mro__ if base in VALUES)
            return getattr(base, name).__get__(self)
        return value

    return property(get)


def is_a(kind: type, kinds: Any) -> bool:
    """Whether a class of the program derives from any of `kinds`, by the names of its bases.

    A class of the setup, which the program has too, counts as the program's.
    """
    if isinstance(kinds, tuple):
        return any(is_a(kind, each) for each in kinds)
    names = [name for base in kind.__mro__ for name in vars(base).get("_standard_", ())]
    if isinstance(kinds, type) and kinds.__module__ == "__tests__":
        return f"program:{kinds.__qualname__}" in names
    return any(issubclass(base, kinds) for base in map(_standard, names) if base)


def _update(value: Any, new: Any) -> None:
    """Update a container in place to `new`, its content after the program has changed it."""
    numpy: Any = sys.modules.get("numpy")
    if type(value) is not type(new):
        raise RemoteError("invalid answer: an argument has changed its type")
    if numpy and isinstance(value, numpy.ndarray):
        value[...] = new
    elif isinstance(value, dict):
        merged = {key: _merged(value.get(key), item) for key, item in new.items()}
        value.clear()
        value.update(merged)
    elif isinstance(value, set):
        value.clear()
        value.update(new)
    elif isinstance(value, list | deque | bytearray):
        merged_items = [*map(_merged, value, new), *list(new)[len(value) :]]
        value.clear()
        value.extend(merged_items)


def _merged(value: Any, new: Any) -> Any:
    if not isinstance(value, tuple(CONTAINERS)) or type(value) is not type(new):
        return new
    _update(value, new)
    return value
