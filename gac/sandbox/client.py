"""The judge's side of the conversation with the solver, which it does not trust.

What the tests pass to the program is copied if it is data. Functions, iterators and instances of
the tests' own classes are lent: they stay here, and the program can perform the operations in
`operations` on them and nothing else. Attributes whose names start with an underscore cannot be
reached, so the program sees neither the tests' globals nor their text.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import inspect
import io
import json
import pickle
import sys
import types
from collections import deque
from typing import Any

from . import solver
from .peer import (
    CONTAINERS,
    OPERATIONS,
    SPECIAL,
    VALUES,
    Peer,
    is_builtin,
    is_importable,
    is_mutable,
    lookup,
    plain,
)
from .remote import (
    ENDS_LOOPS,
    KEEP_ORIGIN,
    LIVE,
    SPECIAL_METHODS,
    Remote,
    RemoteBase,
    RemoteClass,
    RemoteError,
    ask_later,
    local_base,
    overridden,
    standard,
)
from .row import CAREFUL, describe
from .wire import DECODE_ERRORS, Json, Shells, decode

_ATTRIBUTES = ("get", "set", "delete")
_FUNCTIONS = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    functools.partial,
)
_SHARED = (object, io.StringIO, io.BytesIO, types.SimpleNamespace)
_SHARED_MODULES = ("__tests__", "queue", "threading", "unittest.mock")
_DATA = {*VALUES, list, dict, set}
# builtin classes that are not in `builtins`
_UNNAMED = {kind: name for name, kind in vars(types).items() if isinstance(kind, type)}


class _Pickler(pickle.Pickler):
    """A pickler that can be given a `reducer_override`."""


class Client(Peer):
    """Client for the solver at the other end of a socket.

    Args:
        row: see `row.compile_row`.
    """

    def __init__(self, row: Any, channel: int) -> None:
        super().__init__(channel)
        self.row = row
        self.used = False
        """Whether the program has been used since it ran."""
        self.lost = ""
        """Why the solver no longer answers, or "". Tests that pass afterwards count as failed."""
        self.ended = False
        """Whether that is because the solver closed its end."""
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
            self.used |= operation != "find"
            target, patches = arguments[0], self._new_patches()
            kept = operation in KEEP_ORIGIN and getattr(target, "_constructed_", False)
            value, changed = self._answer(
                self.dumps("ask", operation, arguments, keywords, patches), operation
            )
            if value is None or self.row.returns:
                for old, new in zip([*arguments, *keywords.values()], changed, strict=False):
                    _updated(old, new)
            failures = {"AssertionError"} | (CAREFUL - self.row.expected)
            if operation.endswith("exit__") and value and self._must_fail(arguments[1], failures):
                self.suppressed = arguments[1]
            if isinstance(value, Remote):
                # a method of such a class, called on the class, constructs an instance too
                factory = operation == "get" and id(target) in self.constructors
                object.__setattr__(value, "_factory_", factory and self.row.has_answer)
                called = operation == "__call__" and not value._returned_
                constructed = called and (id(target) in self.constructors or target._factory_)
                object.__setattr__(value, "_constructed_", kept or constructed)
            return value

    def _must_fail(self, error: Any, failures: set[str]) -> bool:
        """Whether the test fails with `error`, even if the program suppresses it.

        So it does with one of `failures`, or with an error of the program that no test names.
        """
        names = {kind.__name__ for kind in type(error).__mro__} - {"object"}
        raised = id(error) in self.proxy_numbers or not isinstance(error, Exception)
        return not names.isdisjoint(failures) or (raised and names.isdisjoint(self.row.read))

    def _new_patches(self) -> list[tuple[str, str, Any]]:
        """What the tests have newly assigned to attributes of modules: module, name and value."""
        new = [
            (module, name, current)
            for (module, name), known in self._patched.items()
            if (current := getattr(sys.modules[module], name, None)) is not known
        ]
        self._patched |= {(module, name): current for module, name, current in new}
        return new

    def _answer(self, request: bytes, operation: str) -> tuple[Any, Any]:
        """The solver's answer and the arguments that it has changed."""
        try:
            if not self.lost:
                kind, value, changed, number = [*self.exchange(request), [], None][:4]
                if number is not None:
                    value = self._refer(number, LIVE[type(value)](value))
        except (OSError, EOFError):
            self.lost, self.ended = "the program exited", True
        except DECODE_ERRORS as error:
            self.lost = f"invalid answer: {error!s:.200}"
        if self.lost:
            self.used = True  # whatever fails now, the row is not to blame
            raise RemoteError(self.lost)
        if kind == "value":
            return value, changed
        if value is self.suppressed:
            self.suppressed = None
        if isinstance(value, ENDS_LOOPS) and not (
            operation in ("__next__", "__anext__")
            or any(kind.__name__ in self.row.expected for kind in ENDS_LOOPS)
        ):
            value = describe(value)
        raise value if isinstance(value, Exception) else RemoteError(f"{value}")

    def perform(self, operation: Any, arguments: Any, keywords: Any) -> list[Any]:
        """Perform an operation on an object of the tests."""
        try:
            target = arguments[0]
            allowed = operations(target) if id(target) in self._numbers else ()
            # a subclass of str could lie about what it is
            if type(operation) is not str or operation not in (allowed or ()):
                kind = type(target).__name__
                raise TypeError(f"this {kind} object has no operation {operation!r:.40}")
            if operation in _ATTRIBUTES and (
                type(arguments[1]) is not str
                or arguments[1].startswith("_")
                or _is_closed(type(target), operation, arguments[1])
            ):
                raise AttributeError("only public attributes of the tests' objects can be used")
            method = OPERATIONS.get(operation) or getattr(type(target), operation)
            return ["value", method(*arguments, **keywords)]
        except Exception as error:  # it goes back through the program, which may handle it
            if self._must_fail(error, {"AssertionError"}):
                self.suppressed = error
            return ["raise", error]

    # -- what is sent ------------------------------------------------------------------------------

    def dumps(self, kind: str, *content: Any) -> bytes:
        file = io.BytesIO()
        pickler: Any = _Pickler(file, pickle.HIGHEST_PROTOCOL)
        pickler.reducer_override = self._reduce
        pickler.dump(content)
        return pickle.dumps([kind, file.getvalue()])

    def _reduce(self, value: Any) -> Any:
        """How to pickle `value`; NotImplemented for data, which pickle can copy by itself."""
        kind = type(value)
        number = self.proxy_numbers.get(id(value))
        if number is not None or isinstance(value, RemoteBase):
            return solver.own, (value._remote_[1] if number is None else number,)
        if isinstance(value, BaseException):
            # the text of a failed assertion could show the expected value
            arguments = () if isinstance(value, AssertionError) else value.args
            return solver.borrow, (self.number(value), kind, *arguments)
        allowed = operations(value)
        if allowed is None:
            return NotImplemented
        if isinstance(value, type) and issubclass(value, BaseException):
            base = next(base for base in value.__mro__ if is_importable(base))
            return solver.borrow, (self.number(value), type, value.__name__, (base,), {})
        if isinstance(value, type) and self.shared.get(value.__name__) is value:
            return solver.named, ("program", value.__name__)
        if isinstance(value, type) and value in _UNNAMED:
            return solver.named, ("types", _UNNAMED[value])
        data = next((base for base in kind.__mro__ if base in _DATA), None)
        if data and not hasattr(kind, "_fields"):
            return data, (plain(value, data),)
        is_function = allowed == ["__call__"]
        name = getattr(value if is_function else kind, "__name__", "partial")
        details = _details(value, name) if is_function else {}
        number = self.number(value)
        return solver.borrow, (number, solver.proxy, number, name, tuple(allowed), details)

    # -- what is received --------------------------------------------------------------------------

    def loads(self, message: bytes) -> list[Any]:
        classes, nodes = json.loads(message)
        for description in classes:
            self._define(*description)
        shells: Shells = {
            "instance": (lambda parts: object.__new__(self.shared[parts[0]]), _set_attributes)
        }
        kind, printed, *content = decode(nodes, self._resolve, shells)
        sys.stdout.write(printed)
        return [kind, *content]

    def _resolve(self, tag: str, parts: list[Any]) -> Any:
        """What a node stands for here. Every object of the program has one proxy."""
        if tag == "lent":
            return self.own(*parts)
        if tag == "class":
            kind = self._read_class(*parts)
            # otherwise `except program.Error` would catch failed assertions
            catches_all = kind in (BaseException, Exception, AssertionError)
            return local_base("builtins:Exception") if catches_all else kind
        if isinstance(known := self.proxies.get(parts[0]), Remote):  # returned once more
            for name, value in (("_constructed_", False), ("_returned_", True)):
                object.__setattr__(known, name, value)
        return self.remember(parts[0], getattr(self, f"_make_{tag}"), *parts)

    def _refer(self, number: int, value: Any) -> Any:
        object.__setattr__(value, "_remote_", (self, number))
        return value

    def _make_coroutine(self, number: int) -> Any:
        return ask_later("__await__", self._refer(number, Remote()))

    def _make_object(self, number: int, reference: Json, *content: Any) -> Any:
        kind = self._read_class(reference, named=False)
        base = next((base for base in kind.__mro__ if base in VALUES), object)
        return self._refer(number, base.__new__(kind, *content))

    def _make_error(
        self, number: int, kind: Json, text: str, cause: Any, arguments: Any, state: Any
    ) -> Any:
        local = self._read_class(kind)
        if not issubclass(local, Exception):
            return RemoteError(f"{text}")
        try:
            error = local.__new__(local, *arguments)
            next(filter(is_builtin, local.__mro__)).__init__(error, *arguments)
            vars(error).update({} if isinstance(error, RemoteBase) else state)
        except Exception:  # the arguments come from the program
            return RemoteError(f"{text}")
        error.__cause__ = cause if isinstance(cause, BaseException) else None
        return self._refer(number, error) if isinstance(error, RemoteBase) else error

    def _read_class(self, reference: Json, named: bool = True) -> Any:
        """The local class for a reference: see `solver.Solver._class`.

        named: whether it may be a class that Python has, which is neither the class nor the base
            of an object of the program.
        """
        if type(reference) is int:
            return self.proxies[reference]
        if type(reference) is str and named:
            return standard(reference)
        kind = self.own(reference[0])
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
    ) -> None:
        """Create the proxy class for a class of the program.

        Args:
            number: its number among the program's objects.
            name: its name.
            bases: references to its bases that the program defines.
            base: "module:name" of its nearest base in `builtins` or among the exceptions.
            container: the type of its contents if objects compare by them, else "".
            methods: the special methods that it defines, and overridden methods of `base`.
        """
        last = local_base(base)
        parents = tuple(self._read_class(base, named=False) for base in bases)
        if not any(issubclass(parent, last) for parent in parents):
            parents = (*parents, last)
        self.remember(
            number,
            RemoteClass,
            name,
            parents,
            {
                **{name: SPECIAL_METHODS[name] for name in methods if name in SPECIAL_METHODS},
                **{
                    name: property(functools.partial(overridden, name))
                    for name in methods
                    if not name.startswith("_")
                },
                "_remote_": (self, number),
                "_methods_": methods,
                "_container_": {kind.__name__: kind for kind in CONTAINERS}.get(container),
                "__module__": "program",
                "__doc__": vars(Remote)["__doc__"],
            },
        )


def _set_attributes(instance: Any, parts: list[Any]) -> None:
    """Fill an object of a class of the setup; the second part holds its attributes."""
    for key, value in parts[1].items():
        if key[:2] == "__" == key[-2:] or callable(lookup(type(instance), key)):
            raise TypeError(f"{key} is not an attribute")
        object.__setattr__(instance, key, value)


def _is_closed(kind: type, operation: str, name: str) -> bool:
    """Whether the program may not change this attribute: methods, and what a mock has recorded."""
    held = lookup(kind, name)
    if kind.__module__ != "unittest.mock":
        return operation != "get" and callable(held)
    if operation == "get":
        return name in ("attach_mock", "configure_mock", "mock_add_spec", "reset_mock")
    return held is not None and name not in ("return_value", "side_effect")


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
                value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return None
    return _members(kind)


@functools.lru_cache(maxsize=1024)
def _members(kind: type) -> list[str]:
    return sorted(
        name
        for name in (*_ATTRIBUTES, *SPECIAL)
        if name in _ATTRIBUTES or lookup(kind, name) not in (None, lookup(object, name))
    )


def _details(value: Any, name: str) -> dict[str, Any]:
    """What decorators read from a function: names, text for readers, and parameters."""
    details = {"__name__": name, "__qualname__": name, "__doc__": value.__doc__}
    empty = inspect.Parameter.empty
    with contextlib.suppress(TypeError, ValueError):  # a builtin function without a signature
        details["__signature__"] = inspect.Signature(
            [
                p.replace(default=empty if p.default is empty else ..., annotation=empty)
                for p in inspect.signature(value).parameters.values()
            ]
        )
    return details


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
