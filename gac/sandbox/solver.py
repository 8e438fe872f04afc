"""The solver process: runs the model's program, then performs what the judge asks for.

It never sees the tests, and its answers are untrusted: each is plain data or fails the test. It has
proxies for functions, iterators and instances of the tests, which stay in the judge.
"""

from __future__ import annotations

import asyncio
import atexit
import builtins
import contextlib
import copy
import functools
import io
import itertools
import json
import pickle
import re
import sys
import threading
import types
from collections import UserList
from collections.abc import Mapping, Sequence, Set
from typing import Any

from .peer import (
    CONTAINERS,
    METHODS,
    OPERATIONS,
    SPECIAL,
    VALUES,
    Peer,
    asking,
    is_builtin,
    is_importable,
    is_mutable,
    lookup,
    plain,
)
from .row import describe
from .wire import Json, Node, encode

_LIKE_CONTAINERS: dict[type, type] = {UserList: list, Mapping: dict, Set: set}
_MAX_CUTS = 200  # top-level lines at which to try to end a continuation
_PRINTED = 1 << 20  # characters of output to pass on per answer


def run_script(spec: Mapping[str, Any]) -> int:
    """Run the program of `spec` as the main module, on standard input and output.

    Returns:
        The exit status that Python would return.
    """
    try:
        _run(spec, "__main__")
        status = 0
    except SystemExit as stop:
        code = stop.code
        status = 0 if code is None else (code & 255 if isinstance(code, int) else 1)
    except BaseException:  # the program may raise anything
        status = 1
    try:  # as Python does on exit
        threading._shutdown()  # type: ignore[attr-defined] # private
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.__stdout__):
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
    except BaseException:  # the program may have replaced its streams
        status = status or 1
    return status


def assemble(spec: Mapping[str, Any]) -> str:
    """The text to run: the program, or the prompt with the program as its continuation.

    `spec` has "text" and may have "entry_point" and "prompt", code that the program continues
    if it does not define the entry point itself. A continuation ends before its first top-level
    statement, because such datasets were created with models that stopped there.
    """
    program, name, prompt = (spec.get(key, "") for key in ("text", "entry_point", "prompt"))
    defines = rf"^(?:(?:async\s+)?def|class)\s+{re.escape(name)}\b|^{re.escape(name)}\s*[:=]"
    if not name or not prompt or re.search(defines, program, re.MULTILINE):
        return program
    prompt = prompt if prompt.endswith("\n") else prompt + "\n"
    for cut in itertools.islice(re.finditer(r"^[^\s#]", program, re.MULTILINE), _MAX_CUTS):
        text = prompt + program[: cut.start()]
        # inside a string or brackets, compiling fails
        with contextlib.suppress(SyntaxError, ValueError, MemoryError, RecursionError):
            compile(text, "<program>", "exec", dont_inherit=True)
            return text
    return prompt + program


def _run(spec: Mapping[str, Any], name: str) -> None:
    """Run the program as a module, after the definitions of the row."""
    module = sys.modules[name] = types.ModuleType(name)  # dataclasses and pickle look it up there
    vars(module)["__builtins__"] = builtins
    for text in spec.get("context", ()):
        with contextlib.suppress(Exception):  # the judge reports which import fails
            exec(compile(text, "<row>", "exec", dont_inherit=True), vars(module))
    exec(compile(assemble(spec), "<program>", "exec", dont_inherit=True), vars(module))


class Solver(Peer):
    """The solver's side of the conversation, about the program of `spec` (see `assemble`)."""

    loads = staticmethod(pickle.loads)

    def __init__(self, spec: Mapping[str, Any], channel: int) -> None:
        super().__init__(channel)
        self._spec = spec
        self._new_classes: list[Json] = []
        self._output = sys.stdout = io.StringIO()
        _solver[:] = [self]

    def serve(self) -> None:
        """Answer requests until the judge closes its end."""
        # other threads of the program may ask for something only while a request is performed
        with contextlib.suppress(OSError, EOFError), self._turn:
            while True:
                _, request = self.loads(self.receive())
                self._turn.release()
                answer = self.perform(request)
                self._turn.acquire()
                self.channel.send_bytes(self.dumps(*answer))

    def ask(self, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        """Ask for an operation on an object of the tests."""
        with self._turn:
            kind, answer = self.exchange(self.dumps("ask", operation, arguments, keywords))
        [value] = pickle.loads(answer)
        if kind == "raise":
            raise value
        return value

    def perform(self, request: bytes) -> list[Any]:
        try:
            operation, arguments, keywords, patches = pickle.loads(request)
            for module, name, value in patches:
                setattr(sys.modules[module], name, value)
            if operation == "run":
                _shared_classes.update(*arguments)
                _run(self._spec, "program")
                return ["value", None]
            value = _perform(operation, *arguments, **keywords)
            # the judge may change a container that the program keeps
            kept = operation in ("find", "get") and type(value) in (list, dict, set)
            return [
                "value",
                value,
                _changed(request, [*arguments, *keywords.values()]),
                self.number(value) if kept else None,
            ]
        except BaseException as error:  # the program may raise anything
            return ["raise", error]

    def dumps(self, kind: str, *content: Any) -> bytes:
        printed = self._output.getvalue()[:_PRINTED]
        self._output.seek(0)
        self._output.truncate()
        try:
            nodes = encode([kind, printed, *content], self._refer)
        except Exception as error:  # a value that cannot be sent
            nodes = encode(["raise", printed, describe(error)], self._refer)
        classes, self._new_classes = self._new_classes, []
        return json.dumps([classes, nodes]).encode("ascii")

    # -- what the judge learns about an object -----------------------------------------------------

    def _refer(self, value: Any) -> Node:
        kind = type(value)
        borrowed = self.proxy_numbers.get(id(value))
        if borrowed is not None:
            return "lent", [borrowed]
        if isinstance(value, type):
            return "class", [_path(value) if is_builtin(value) else self._class(value)]
        if isinstance(value, BaseException):
            state = vars(value) if is_importable(kind) else {}
            details = [describe(value), value.__cause__, value.args, state]
            return "error", [self.number(value), self._class(kind), *details]
        if kind.__name__ in _shared_classes and all(
            base.__module__ == "program" for base in kind.__mro__[:-1]
        ):
            return "instance", [kind.__name__, _state(value)]
        number, described = self.number(value), self._class(kind)
        if kind is types.CoroutineType:
            return "coroutine", [number]
        base = next((base for base in kind.__mro__ if is_builtin(base)), object)
        return "object", [number, described, *([plain(value, base)] if base in VALUES else [])]

    def _class(self, kind: type) -> Json:
        """A reference to a class, described before if the judge does not know it.

        A number; text for an exception class of the standard library; [number] for a class of the
        tests. See `client.Client._define` for the description.
        """
        borrowed = self.proxy_numbers.get(id(kind))
        if borrowed is not None:
            return [borrowed]
        if issubclass(kind, BaseException) and is_importable(kind):
            return _path(kind)
        if id(kind) not in self._numbers:
            bases = [self._class(base) for base in kind.__bases__ if not is_importable(base)]
            self._new_classes.append(
                [self.number(kind), *[kind.__name__, bases, *description(kind)]]
            )
        return self.number(kind)


_solver: list[Solver] = []  # of this process, for the functions that pickles refer to


@functools.lru_cache(maxsize=4096)
def description(kind: type) -> list[Json]:
    """The nearest base that is known to the judge, how objects compare, and special methods."""
    known = [base for base in type.mro(kind) if is_importable(base)]
    base = next(b for b in known if is_builtin(b) or issubclass(b, BaseException))
    equal = lookup(kind, "__eq__")
    contents = [
        *(container for container in CONTAINERS if issubclass(kind, container)),
        *(held for like, held in _LIKE_CONTAINERS.items() if lookup(like, "__eq__") is equal),
    ]
    inherited = base if base in VALUES else object
    return [
        _path(base),
        contents[0].__name__ if contents else "",
        [
            name
            for name in (*SPECIAL, *(vars(base) if base in VALUES else ()))
            if (name in SPECIAL or not name.startswith("_"))
            and lookup(kind, name) is not lookup(inherited, name)
        ],
    ]


def _path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _state(value: Any) -> dict[str, Any]:
    """The attributes of an object: its `__dict__` and slots, without properties."""
    state = object.__getstate__(value)
    return {
        name: part[name]
        for part in (state if isinstance(state, tuple) else (state,))
        if part
        for name in part
    }


# -- operations ------------------------------------------------------------------------------------


def _perform(operation: str, target: Any, /, *arguments: Any, **keywords: Any) -> Any:
    if operation in _OPERATIONS:
        return _OPERATIONS[operation](target, *arguments, **keywords)
    method = lookup(type(target), operation)
    if method is None:
        return NotImplemented
    return method.__get__(target, type(target))(*arguments, **keywords)


_shared_classes: set[str] = set()  # of the setup, whose instances are copied
_OPERATIONS: dict[str, Any] = {
    **OPERATIONS,
    "find": lambda name: vars(sys.modules["program"])[name],
    "change": lambda value, name, /, *arguments, **keywords: getattr(value, name)(
        *arguments, **keywords
    ),
    "convert": lambda value, module, name, /, *arguments, **keywords: getattr(
        sys.modules[module], name
    )(value, *arguments, **keywords),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "contents": lambda value, kind: (
        plain(value, kind)
        if isinstance(value, kind)
        else kind(value.items() if kind is dict else value)
    ),
    "dir": dir,
    "__eq__": lambda left, right: left == right,
    "__getitem__": lambda value, key: value[key],
    "__aenter__": lambda manager: _complete(type(manager).__aenter__(manager)),
    "__anext__": lambda iterator: _complete(type(iterator).__anext__(iterator)),
    "__await__": lambda awaitable: _complete(awaitable),
    "__aexit__": lambda manager, error: _complete(
        type(manager).__aexit__(manager, error and type(error), error, None)
    ),
}


_loop = functools.cache(asyncio.new_event_loop)


def _complete(awaitable: Any) -> Any:
    """Run `awaitable` to completion.

    All calls use the same event loop, because asyncio objects may be bound to a loop.
    """
    return _loop().run_until_complete(awaitable)


def _changed(request: bytes, arguments: Sequence[Any]) -> list[Any]:
    """The arguments that the call has changed in place, and None for the others."""
    if not any(map(is_mutable, arguments)):
        return []
    _, before, keywords, _ = pickle.loads(request)
    pairs = zip([*before, *keywords.values()], arguments, strict=True)
    return [new if is_mutable(new) and not _same(old, new) else None for old, new in pairs]


def _same(old: Any, new: Any) -> bool:
    try:
        return bool(old == new)
    except Exception:  # arrays, or what the program defines
        return False


# -- proxies for objects of the tests; pickles of the judge refer to these functions ---------------


def own(number: int) -> Any:
    """An object of the program."""
    return _solver[0].own(number)


def named(module: str, name: str) -> Any:
    """A class that pickle would not find, such as the program's copy of one of the setup."""
    return vars(sys.modules[module])[name]


def borrow(number: int, make: Any, *arguments: Any) -> Any:
    """The proxy for an object of the tests, made if needed."""
    return _solver[0].remember(number, make, *arguments)


def proxy(number: int, name: str, operations: tuple[str, ...], details: dict[str, Any]) -> Any:
    """A proxy that can be asked for `operations` only."""
    made: Any = object.__new__(_proxy_class(name, operations))
    vars(made).update(details, _remote_=(_solver[0], number))
    return made


@functools.cache
def _proxy_class(name: str, operations: tuple[str, ...]) -> type:
    methods = {"__getattr__": "get", "__setattr__": "set", "__delattr__": "delete"}
    members: dict[str, Any] = {
        **({"__iter__": lambda self: self} if "__next__" in operations else {}),
        **{name: METHODS[name] for name in operations if name in METHODS},
        **{method: asking(name) for method, name in methods.items() if name in operations},
    }
    return type(name, (), members)
