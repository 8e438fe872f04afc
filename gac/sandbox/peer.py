"""What the judge and the solver have in common: a conversation about objects that stay in place.

Each process numbers those of its objects that it does not copy. The other one has proxies, whose
methods ask for operations. Before a process answers, it may ask for operations itself.
"""

from __future__ import annotations

import builtins
import sys
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

FRAME_BYTES = 64 << 20
_ARITHMETIC = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor"
COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
WITH_OPERAND = frozenset(
    [*COMPARISONS, "__contains__"]
    + [f"__{prefix}{name}__" for name in _ARITHMETIC.split() for prefix in ("", "r", "i")]
)
"""Special methods that show the program a value of the tests, which may be the expected one."""
_OTHERS = """
    neg pos abs invert round floor ceil trunc bool len getitem setitem delitem iter next reversed
    call str repr format hash enter exit await aenter aexit aiter anext
"""
SPECIAL = WITH_OPERAND | {f"__{name}__" for name in _OTHERS.split()}
"""Special methods that one side may call on an object of the other. Those that C code follows to
interpret an object (`__index__`, `__float__`, `__array__` and similar) are absent on purpose.
"""
OPERATIONS: dict[str, Callable[..., Any]] = {
    "get": getattr,
    "set": setattr,
    "delete": delattr,
    "__call__": lambda function, /, *arguments, **keywords: function(*arguments, **keywords),
    "__exit__": lambda manager, error: type(manager).__exit__(
        manager, error and type(error), error, None
    ),
}
"""Operations that are not methods with the same name and arguments."""
_PLAIN: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: bytes.__bytes__,
    complex: complex.__complex__,
    dict: lambda value: dict(dict.items(value)),
}
VALUES = (int, float, str, tuple, frozenset, bytes, complex)
"""Objects of classes derived from these are values in the judge."""
CONTAINERS = (list, dict, set, deque, bytearray)
"""Objects of classes derived from these compare by their contents."""


def plain(value: Any, kind: type) -> Any:
    """The part of `value` that belongs to its base `kind`; overridden methods are ignored."""
    return _PLAIN[kind](value) if kind in _PLAIN else kind(kind.__iter__(value))  # type: ignore[attr-defined] # a collection


def is_mutable(value: Any) -> bool:
    """Whether `value` is a container or an array."""
    numpy: Any = sys.modules.get("numpy")
    return isinstance(value, (*CONTAINERS, *([numpy.ndarray] if numpy else [])))


def is_builtin(value: Any) -> bool:
    """Whether `value` is a class in `builtins`."""
    return isinstance(value, type) and vars(builtins).get(value.__name__) is value


def lookup(kind: type, name: str) -> Any:
    """Look up attribute `name` of a class without invoking descriptors or the metaclass."""
    return next((vars(base)[name] for base in type.mro(kind) if name in vars(base)), None)


def is_importable(value: Any) -> bool:
    """Whether a class or function can be found by its module and name, as pickle does."""
    found = getattr(
        sys.modules.get(getattr(value, "__module__", "")), getattr(value, "__qualname__", ""), None
    )
    return found is value and value.__module__ not in ("__tests__", "program")


class Peer:
    """One side of the conversation, over a socket.

    Attributes:
        proxies: by the number of an object of the other side.
        proxy_numbers: that number, by the id of the proxy.
    """

    dumps: Callable[..., bytes]
    """Encodes an "ask" (operation, arguments, keywords), a "value" or a "raise"."""
    loads: Callable[[bytes], list[Any]]
    """Decodes a message of the other side."""
    perform: Callable[..., list[Any]]
    """Performs what the other side asks for; returns kind and content of the answer."""

    def __init__(self, channel: int) -> None:
        self.channel = Connection(channel)
        self._turn = threading.RLock()
        self._objects: dict[int, Any] = {}  # kept alive, so that their ids are not reused
        self._numbers: dict[int, int] = {}
        self.proxies: dict[int, Any] = {}
        self.proxy_numbers: dict[int, int] = {}

    def number(self, value: Any) -> int:
        """The number of an object of this side, for the other one."""
        number = self._numbers.setdefault(id(value), len(self._objects))
        self._objects[number] = value
        return number

    def own(self, number: Any) -> Any:
        """The object of this side with this number."""
        return self._objects[number]

    def remember(self, number: int, make: Callable[..., Any], *arguments: Any) -> Any:
        """The proxy for an object of the other side, made by `make(*arguments)` if needed."""
        if number not in self.proxies:
            self.proxies[number] = made = make(*arguments)
            self.proxy_numbers[id(made)] = number
        return self.proxies[number]

    def exchange(self, message: bytes) -> list[Any]:
        """Send a message, perform what the other side asks for, and return its answer."""
        while True:
            self.channel.send_bytes(message)
            kind, *content = self.loads(self.receive())
            if kind != "ask":
                return [kind, *content]
            message = self.dumps(*self.perform(*content))

    def receive(self) -> bytes:
        """Read one message.

        Raises:
            OSError, EOFError: the other side closed its end, or its message is too long.
        """
        return self.channel.recv_bytes(FRAME_BYTES)


def ask(operation: str, target: Any, /, *arguments: Any, **keywords: Any) -> Any:
    """Ask the other process for an operation on a proxy's object."""
    return target._remote_[0].ask(operation, target, *arguments, **keywords)


def asking(operation: str) -> Callable[..., Any]:
    """A method of a proxy that asks for `operation`."""

    def method(self: Any, /, *arguments: Any, **keywords: Any) -> Any:
        return ask(operation, self, *arguments, **keywords)

    return method


METHODS: dict[str, Callable[..., Any]] = {
    **{name: asking(name) for name in SPECIAL},
    "__exit__": lambda self, kind, error, trace: ask("__exit__", self, error),
}
"""Special methods of proxies."""
