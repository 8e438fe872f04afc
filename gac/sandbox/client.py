"""The judge's client for the solver: requests, answers, and what the answers describe."""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from . import lent
from .lent import Lender
from .remote import (
    ENDS_LOOPS,
    KEEP_ORIGIN,
    LIVE,
    METHODS,
    Remote,
    RemoteBase,
    RemoteClass,
    RemoteError,
    coroutine,
    local_base,
    overridden,
    standard,
)
from .solver import CONTAINERS, VALUES, is_mutable
from .wire import DECODE_ERRORS, Channel, ChannelClosed, Json, decode, is_builtin


class SolverClient:
    """Client for the solver at the other end of the channel.

    Args:
        channel: pipes to and from the solver.
        row: see `row.compile_row`.
    """

    def __init__(self, channel: Channel, row: Any) -> None:
        self._channel, self.row = channel, row
        self._objects: dict[int, Any] = {}
        self._classes: dict[int, type] = {}
        self._coroutines: dict[int, int] = {}
        self._lender = Lender()
        self._turn = threading.RLock()
        self.requests = 0
        """Number of uses of the program so far."""
        self.lost_reason = ""
        """Why the solver no longer answers, or "". Tests that pass afterwards count as failed."""
        self.suppressed: BaseException | None = None
        """A failed assertion of the tests that the program has not let through."""
        self.constructors: set[int] = set()
        """Ids of the classes of the program whose instances the tests construct."""
        self.shared: dict[str, type] = {}
        """Classes of the setup, which the program has too: their instances are copied."""
        self._patched = {
            (module, name): getattr(sys.modules[module], name, None)
            for module, name in row.patches
            if module in sys.modules
        }

    def ask(self, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        """Send one request and return the answer; raises the program's exception."""
        with self._turn:
            self.requests += operation != "find"
            request = (self._new_patches(), operation, arguments, keywords)
            value, changed = self.answer(lent.pickled(request, self._reduce))
            if changed and (value is None or self.row.returns):
                old = [*arguments[1:], *keywords.values()]
                for argument, new in zip(old, changed, strict=True):
                    _updated(argument, new)
            if isinstance(value, Remote):
                target = arguments[0]
                # a method of such a class, called on the class, constructs an instance too
                if operation == "get" and id(target) in self.constructors:
                    object.__setattr__(value, "_factory_", self.row.has_answer)
                constructed = (
                    target._constructed_
                    if operation in KEEP_ORIGIN
                    else operation == "__call__"
                    and (id(target) in self.constructors or target._factory_)
                )
                object.__setattr__(value, "_constructed_", constructed)
            return value

    def _new_patches(self) -> list[tuple[str, str, Any]]:
        """What the tests have newly assigned to attributes of modules: module, name and value."""
        new = [
            (module, name, current)
            for (module, name), known in self._patched.items()
            if (current := getattr(sys.modules[module], name, None)) is not known
        ]
        self._patched |= {(module, name): current for module, name, current in new}
        return new

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
                kind, value, changed = self._read(self._channel.receive())
                if kind != "callback":
                    break
                self._channel.send(lent.pickled(self._called(value), self._reduce))
        except ChannelClosed:
            self.lost_reason = "the program exited"
        except DECODE_ERRORS as error:
            self.lost_reason = f"invalid answer: {error!s:.200}"
        else:
            if kind == "value":
                return value, changed
            if value is self.suppressed:
                self.suppressed = None
            if not isinstance(value, Exception):
                raise RemoteError(f"{value}")
            if isinstance(value, ENDS_LOOPS) and not self.row.expects_stop:
                raise RemoteError(f"{type(value).__name__}: {value}")
            raise value
        self._channel.close()
        raise RemoteError(self.lost_reason)

    def _read(self, message: bytes) -> tuple[str, Any, Any]:
        classes, nodes = json.loads(message)
        for description in classes:
            self._define(*description)
        kind, value, printed, changed = decode(nodes, self._resolve)
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
        if number not in self._objects:
            self._objects[number] = make()
        return self._objects[number]

    def _read_lent(self, number: int) -> Any:
        return self._lender[number]

    def _read_live(self, number: int, value: Any) -> Any:
        live = LIVE[type(value)](value)
        object.__setattr__(live, "_remote_", (self, number))
        return live

    def _read_coroutine(self, number: int) -> Any:
        reference = Remote()
        object.__setattr__(reference, "_remote_", (self, number))
        local = self._remember(number, lambda: coroutine(reference))
        self._coroutines[id(local)] = number
        return local

    def _read_object(self, number: int, reference: Json, *content: Any) -> Any:
        def make() -> Any:
            kind = self._read_class(reference)
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
        self, number: int, kind: Json, text: str, cause: Any, arguments: Any, state: Any
    ) -> Any:
        def make() -> Any:
            local = self._read_class(kind)
            if not issubclass(local, Exception):
                return RemoteError(f"{text}")
            try:
                error = local.__new__(local, *arguments)
                next(filter(is_builtin, local.__mro__)).__init__(error, *arguments)
                vars(error).update(state)
            except Exception:  # the arguments come from the program
                return RemoteError(f"{text}")
            if isinstance(error, RemoteBase):
                object.__setattr__(error, "_remote_", (self, number))
            error.__cause__ = cause if isinstance(cause, BaseException) else None
            return error

        return self._remember(number, make)

    def _read_class(self, reference: Json) -> Any:
        """The local class for a reference: see `solver.Solver._class`."""
        if type(reference) is int:
            return self._classes[reference]
        if type(reference) is str:
            return standard(reference)
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
        last = local_base(base)
        parents = tuple(map(self._read_class, bases))
        if not any(issubclass(parent, last) for parent in parents):
            parents = (*parents, last)
        members: dict[str, Any] = {m: METHODS[m] for m in methods if m in METHODS}
        members |= {m: overridden(m) for m in methods if not m.startswith("_")}
        members |= {
            "_remote_": (self, number),
            "_methods_": methods,
            "_container_": {kind.__name__: kind for kind in CONTAINERS}.get(container),
            "_standard_": standard,
            "__module__": "program",
            "__doc__": vars(Remote)["__doc__"],
        }
        self._classes[number] = RemoteClass(name, parents, members)


def _updated(value: Any, new: Any) -> Any:
    """What stands for `new` in the judge: the tests' own container with new content, or `new`."""
    if type(value) is not type(new) or not is_mutable(value):
        return new
    if type(value).__module__ == "numpy":
        value[...] = new
        return value
    if isinstance(value, dict):
        new = {key: _updated(value.get(key), item) for key, item in new.items()}
    elif isinstance(value, list | deque):
        new = [*map(_updated, value, new), *list(new)[len(value) :]]
    value.clear()
    (value.update if isinstance(value, dict | set) else value.extend)(new)
    return value
