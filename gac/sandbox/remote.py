"""The judge's proxies for objects of the program.

Each class of the program has a local class, built from its description. Its instances ask the
solver only for attributes and for the special methods in `operations.SPECIAL` that the class
defines, so code written in C finds no other special methods to call. Instances of subclasses of
immutable builtin types, such as named tuples, are real local values with these methods added.
Equality is decided here, on plain values.
"""

from __future__ import annotations

import builtins
import sys
import types
from collections import abc, deque
from collections.abc import Callable, Generator
from typing import Any

from .lent import Lender
from .operations import GENERATORS, SPECIAL, WITH_OPERAND, Effects, importable
from .wire import Channel, ChannelClosed, Json, Node, NotPlain, WireError, decode, encode

IMMUTABLE = {kind.__name__: kind for kind in (int, float, str, tuple, frozenset, bytes, complex)}
_CONTAINERS = {kind.__name__: kind for kind in (list, dict, set, deque, bytearray)}
# classes that compare like a container without being one
_LIKE_CONTAINERS = {"UserList": list, "Mapping": dict, "Set": set}
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
    ]
)
# classes from which those of the program may derive, for `isinstance`
_STANDARD = {name: getattr(abc, name) for name in abc.__all__}
_STANDARD |= {name: getattr(types, name) for name in GENERATORS.values()}
_CHANGEABLE = tuple(_CONTAINERS.values())
_ENDS_LOOPS = (StopIteration, StopAsyncIteration)


class RemoteError(Exception):
    """The program gave no valid answer, or raised an exception that has no builtin class."""


class _RemoteBase:
    """Common base of the proxies for classes and of the proxies for instances."""

    _remote_: tuple[SolverClient, int]

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


class RemoteClass(_RemoteBase, type):
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


class Remote(_RemoteBase):
    """Proxy for an object in the solver. Base of the local classes."""

    _defines_eq_ = False
    _container_: type | None = None

    @property
    def __dict__(self) -> Any:  # type: ignore[override] # the program's, not the proxy's
        return ask("get", self, "__dict__")

    @property
    def __doc__(self) -> Any:  # type: ignore[override] # the program's, not the proxy's
        return ask("get", self, "__doc__")

    def __eq__(self, other: object) -> Any:
        if self is other:
            return True
        if self._container_:
            return _contents(self) == _contents(other)
        if not self._defines_eq_ or type(other) is not type(self):
            return NotImplemented
        state = ask("state", self)
        return bool(state) and state == ask("state", other)

    def __hash__(self) -> int:
        return hash(type(self).__name__ if self._defines_eq_ else self._remote_[1])

    def __dir__(self) -> Any:
        return ask("dir", self)

    def __copy__(self) -> Any:
        return ask("copy", self)

    def __deepcopy__(self, memo: object) -> Any:
        return ask("deepcopy", self)


def _contents(value: Any) -> Any:
    """The contents of a subclass of list, dict, set or similar, as the plain base type."""
    return ask("contents", value) if isinstance(value, Remote) and value._container_ else value


def ask(operation: str, target: Any, /, *arguments: Any, **keywords: Any) -> Any:
    """Ask the solver for an operation on a proxy's object."""
    return target._remote_[0].ask(operation, target, *arguments, **keywords)


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: Any, /, *arguments: Any, **keywords: Any) -> Any:
        return ask(name, self, *arguments, **keywords)

    def method_with_operand(self: Any, /, operand: Any, *others: Any) -> Any:
        if isinstance(operand, Remote) or is_named(type(self)):
            return ask(name, self, operand, *others)
        return _plain_operation(name, self, operand)

    return method_with_operand if name in WITH_OPERAND else method


def is_named(kind: type) -> bool:
    """Whether the tests name this class or a base, and may thus rely on the class's operators."""
    return any(vars(base).get("_named_") for base in kind.__mro__)


def _plain_operation(name: str, value: Any, operand: Any) -> Any:
    """Perform an operation on an object whose class the tests do not name.

    Where the tests expect a number, for example, operators that the program defines must not decide
    whether the result is correct.
    """
    if value._container_:
        return getattr(value._container_, name, _unsupported)(_contents(value), operand)
    if isinstance(value, tuple(IMMUTABLE.values())):
        return getattr(_base(type(value)), name, _unsupported)(value, operand)
    return operand in list(value) if name == "__contains__" else NotImplemented


def _unsupported(*operands: Any) -> Any:
    return NotImplemented


def _base(kind: type) -> type:
    return next(base for base in kind.__mro__ if base in IMMUTABLE.values())


def _next(self: Remote, name: str = "__next__", end: type[Exception] = StopIteration) -> Any:
    items = ask(name, self)
    if not items:
        raise end
    return items[0]


def _exit(self: Remote, kind: object, error: BaseException | None, trace: object) -> Any:
    return ask("__exit__", self, error)


def _async(name: str) -> Callable[..., Any]:
    async def method(self: Remote, *arguments: Any) -> Any:
        if name == "__anext__":
            return _next(self, name, StopAsyncIteration)
        return ask(name, self, *arguments[1:2])

    return method


def _await(self: Remote) -> Generator[Any, None, Any]:
    return ask("__await__", self)
    yield


_METHODS: dict[str, Callable[..., Any]] = {
    **{name: _delegate(name) for name in SPECIAL},
    "__next__": _next,
    "__exit__": _exit,
    "__await__": _await,
    **{name: _async(name) for name in ("__aenter__", "__aexit__", "__anext__")},
}
# bases of the local classes for subclasses of immutable builtin types
_VALUES: dict[str, type] = {
    name: type(
        f"Remote_{name}",
        (Remote, kind),
        {"__eq__": kind.__eq__, "__hash__": kind.__hash__, "__dict__": vars(Remote)["__dict__"]},
    )
    for name, kind in IMMUTABLE.items()
}


class _Function(Remote):
    # a proxy for a Python function; the class of functions is not described each time
    __doc__ = vars(Remote)["__doc__"]
    __annotations__ = property(lambda self: ask("get", self, "__annotations__"))
    __call__ = _METHODS["__call__"]
    __repr__ = _METHODS["__repr__"]


class _Live(_RemoteBase):
    """Base class for local copies of a list, dict or set held by an object of the program.

    A change is made in the solver first and then to the copy.
    """

    def __reduce_ex__(self, protocol: object) -> Any:  # copying and pickling give plain values
        kind = next(base for base in _LIVE if isinstance(self, base))
        return kind, (kind(self),)


def _changing(kind: type, name: str) -> Callable[..., Any]:
    change_copy = getattr(kind, name)

    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        ask("change", self, name, *arguments, **keywords)
        return change_copy(self, *arguments, **keywords)

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
    """Client for the solver at the other end of the channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._objects: dict[int, Any] = {}
        self._classes: dict[int, type] = {}
        self._lender = Lender()
        self.requests = 0
        """Number of requests so far."""
        self.lost_reason = ""
        """Why the solver no longer answers, or "". Tests that pass afterwards count as failed."""
        self.raised: Exception | None = None
        """The latest exception raised in the solver."""
        self.unsendable = ""
        """Error text for a value that a test could not send, or ""."""
        self.on_globals: Callable[[Any], None] = lambda names: None
        """Called with new values of the program's global variables."""

    def ask(self, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        """Send one request and return the answer; raises the program's exception."""
        self.requests += 1
        try:
            question = [operation, encode([list(arguments), keywords], self._refer)]
        except NotPlain as error:
            self.unsendable = str(error)
            raise
        if self.lost_reason:
            raise RemoteError(self.lost_reason)
        answer = self.answer(question)
        if type(answer) is not Effects:
            return answer
        if isinstance(answer.changed, list) and len(answer.changed) == 2:
            _update([*arguments], answer.changed[0])
            _update(keywords, answer.changed[1])
        self.on_globals(answer.names)
        return answer.value

    def answer(self, question: Json = None) -> Any:
        """Send `question`, if any, and return the solver's answer.

        The first answer, which needs no question, says whether the program ran. The solver may call
        functions of the tests before it answers.
        """
        try:
            if question is not None:
                self._channel.send(question)
            while True:
                kind, content, printed = _checked(self._channel.receive())
                sys.stdout.write(printed)
                value = decode(content, self._resolve)
                if kind != "callback":
                    break
                self._channel.send(self._called(value))
        except ChannelClosed:
            self.lost_reason = "the program exited"
        except (WireError, MemoryError) as error:
            self.lost_reason = f"invalid answer: {error}"
        else:
            if kind == "value":
                return value
            ends_loop = isinstance(value, _ENDS_LOOPS)
            is_error = isinstance(value, Exception) and not ends_loop
            self.raised = value if is_error else RemoteError(str(value))
            raise self.raised
        self._channel.close()
        raise RemoteError(self.lost_reason)

    def _called(self, request: Any) -> Json:
        """Perform an operation on an object of the tests at the request of the solver."""
        try:
            number, operation, arguments, keywords = request
            result = self._lender.perform(number, operation, arguments, keywords)
            return ["result", encode([True, result], self._refer)]
        except Exception as error:  # it goes back through the program, which may handle it
            if isinstance(error, _RemoteBase):
                return ["result", encode([False, error], self._refer)]
            return ["result", encode(self._lender.failure(error))]

    def _refer(self, value: Any) -> Node | None:
        kind = type(value)
        if issubclass(kind, _RemoteBase):
            return "object", value._remote_[1], None
        if isinstance(value, BaseException):
            return "error", [kind.__name__, f"{value!s:.500}"], None
        place = importable(value)
        if place is not None:
            return "import", place, None
        return self._lender.refer(value)

    def _resolve(self, tag: str, content: Json, items: list[Any] | None) -> Any:
        if tag == "class":
            return self._class(content)
        if tag == "live" and items and type(items[0]) in _LIVE:
            live = _LIVE[type(items[0])](items[0])
            object.__setattr__(live, "_remote_", (self, content))
            return live
        if tag == "function" and type(content) is int:
            if content not in self._objects:
                self._objects[content] = function = _Function()
                object.__setattr__(function, "_remote_", (self, content))
            return self._objects[content]
        if tag == "effects" and items:
            return Effects(*items)
        if tag == "lent":
            return self._lender[content]
        number, description, *text = content
        if tag == "error":
            return self._exception(number, description, text[0], items or [])
        if number not in self._objects:
            kind = self._class(description)
            base = _base(kind) if issubclass(kind, tuple(IMMUTABLE.values())) else object
            value: Any = base.__new__(kind, *(items or ()))
            object.__setattr__(value, "_remote_", (self, number))
            self._objects[number] = value
        return self._objects[number]

    def _class(self, description: Json) -> Any:
        """Return the proxy class for the description of a class, creating it if needed.

        A description is a known number, or [number, name, nearest builtin class, descriptions of
        the bases, special methods].
        """
        if type(description) is int:
            return self._classes[description]
        number, name, kind, bases, methods = description
        if number not in self._classes:
            standard = [_STANDARD[base] for base in bases if isinstance(base, str)]
            standard += [_CONTAINERS[kind]] if kind in _CONTAINERS else []
            parents = tuple(self._class(base) for base in bases if not isinstance(base, str))
            base = _local_base(kind)
            if not any(issubclass(parent, base) for parent in parents):
                parents = (*parents, base)
            members: dict[str, Any] = {m: _METHODS[m] for m in methods if m in _METHODS}
            members |= {m: _overridden(m) for m in methods if not m.startswith("_")}
            members["_defines_eq_"] = "__eq__" in methods
            members["_container_"] = _CONTAINERS.get(kind) or _LIKE_CONTAINERS.get(kind)
            members |= {"_remote_": (self, number), "_standard_": standard}
            members |= {"__module__": "program", "__doc__": vars(Remote)["__doc__"]}
            try:
                local = RemoteClass(name, parents, members)
            except TypeError:  # bases that cannot be combined here
                local = RemoteClass(name, (base,), members)
            self._classes[number] = local
        return self._classes[number]

    def _exception(self, number: int, description: Json, text: Json, arguments: list[Any]) -> Any:
        if not isinstance(text, str):
            raise TypeError("an error needs a text")
        if isinstance(description, str):
            kind = getattr(builtins, description, None)
        else:
            kind = self._class(description)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            return RemoteError(text)
        if issubclass(kind, _ENDS_LOOPS):  # it would end a loop in the tests
            return RemoteError(text)
        try:
            error = type.__call__(kind, *arguments)
        except Exception:  # the arguments come from the program
            return RemoteError(text)
        if isinstance(kind, RemoteClass):
            object.__setattr__(error, "_remote_", (self, number))
        return error


def _update(value: Any, new: Any) -> None:
    """Update a container in place to `new`, its content after the program has changed it."""
    if type(value) is not type(new):
        raise RemoteError("invalid answer: an argument has changed its type")
    if isinstance(value, dict):
        merged = {key: _merged(value.get(key), item) for key, item in new.items()}
        value.clear()
        value.update(merged)
    elif isinstance(value, set):
        value.clear()
        value.update(new)
    else:
        merged_items = [*map(_merged, value, new), *list(new)[len(value) :]]
        value.clear()
        value.extend(merged_items)


def _merged(value: Any, new: Any) -> Any:
    if not isinstance(value, _CHANGEABLE) or type(value) is not type(new):
        return new
    _update(value, new)
    return value


def _checked(answer: Json) -> tuple[str, Json, str]:
    if isinstance(answer, list) and len(answer) == 3:
        kind, _, printed = answer
        if kind in ("value", "raise", "callback") and isinstance(printed, str):
            return kind, answer[1], printed
    raise WireError("neither a value nor an error")


def _local_base(kind: Json) -> type:
    """Base class of a proxy class; `kind`: nearest builtin base of the program's class."""
    if kind in _VALUES:
        return _VALUES[kind]
    if kind in _CONTAINERS or kind in _LIKE_CONTAINERS:
        return Remote
    builtin = getattr(builtins, kind)
    if not (issubclass(builtin, Exception) and not issubclass(builtin, _ENDS_LOOPS)):
        return RemoteError if issubclass(builtin, BaseException) else Remote
    return _EXCEPTIONS.setdefault(
        kind, type(kind, (_RemoteException, builtin), {"__hash__": object.__hash__})
    )


class _RemoteException(_RemoteBase):
    """Base class of the proxies for exception classes that the program defines."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):  # Python itself sets __traceback__ and __context__
            object.__setattr__(self, name, value)
        else:
            ask("set", self, name, value)


_EXCEPTIONS: dict[str, type] = {}


def _overridden(name: str) -> property:
    def get(self: Any) -> Any:
        if is_named(type(self)):
            return ask("get", self, name)
        return getattr(_base(type(self)), name).__get__(self)

    return property(get)
