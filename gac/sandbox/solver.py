"""The solver process: runs the model's program, then answers the judge's requests.

It never sees the tests, and its answers are untrusted: each is a plain value or fails the test.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import io
import re
import sys
import threading
import types
from collections import UserList, deque
from collections.abc import Mapping, Set
from typing import Any

from .lent import Borrower
from .operations import (
    GENERATORS,
    OPERATIONS,
    SPECIAL,
    Effects,
    Live,
    find_import,
    is_builtin_class,
    live,
    nearest_builtin,
)
from .wire import Channel, ChannelClosed, Json, Node, WireError, decode, encode, plain_base

_IMMUTABLE = (int, float, str, tuple, frozenset, bytes, complex)
_CONTAINERS = (list, dict, set, deque, bytearray)
_LIKE_CONTAINERS: tuple[type, ...] = (UserList, Mapping, Set)
_MAX_CUTS = 200  # top-level lines at which to try to end a continuation
_WATCHED = 100  # items of a global variable whose changes are noticed
_PRINTED = 1 << 20  # characters of output to pass on per answer


def answer_questions(spec: Mapping[str, str], channel: Channel) -> None:
    """Run the program of `spec` (see `assemble`), then answer requests until the channel closes."""
    module = _module("program")
    objects = _Objects(module, channel)
    try:
        _run(spec, module)
    except BaseException as error:  # including SystemExit: a program that exits has failed
        channel.send(objects.failure(error))
    else:
        channel.send(objects.success(None))
    with contextlib.suppress(ChannelClosed, WireError):
        while True:
            channel.send(objects.answer(channel.receive()))


def run_script(spec: Mapping[str, str]) -> int:
    """Run the program of `spec` as the main module, on standard input and output.

    Returns:
        The exit status that Python would return.
    """
    try:
        _run(spec, _module("__main__"))
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
            if stream is not None:
                stream.flush()
    except BaseException:  # the program may have replaced its streams
        status = status or 1
    return status


def assemble(spec: Mapping[str, str]) -> str:
    """The text to run: the program, or the prompt with the program as its continuation.

    `spec` has "program" and may have "entry_point" and "prompt", code that the program continues
    if it does not define the entry point itself. A continuation ends before its first top-level
    statement, because such data sets were created with models that stopped there.
    """
    program, name, prompt = (spec.get(key, "") for key in ("program", "entry_point", "prompt"))
    defines = rf"^(?:(?:async\s+)?def|class)\s+{re.escape(name)}\b|^{re.escape(name)}\s*[:=]"
    if not name or not prompt or re.search(defines, program, re.MULTILINE):
        return program
    prompt = prompt if prompt.endswith("\n") else prompt + "\n"
    starts = [match.start() for match in re.finditer(r"^[^\s#]", program, re.MULTILINE)]
    for start in starts[:_MAX_CUTS]:
        text = prompt + program[:start]
        try:
            compile(text, "<program>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            continue  # inside a string or brackets
        return text
    return prompt + program


def _run(spec: Mapping[str, str], module: types.ModuleType) -> None:
    # the imports of the row's setup, as if the program followed it
    for line in spec.get("imports", "").splitlines():
        with contextlib.suppress(Exception):  # the judge reports which import fails
            exec(line, module.__dict__)
    exec(compile(assemble(spec), "<program>", "exec", dont_inherit=True), module.__dict__)


def _module(name: str) -> types.ModuleType:
    """Create a module for the program and register it for lookups by dataclasses and pickle."""
    module = types.ModuleType(name)
    module.__dict__["__builtins__"] = builtins
    sys.modules[name] = module
    return module


class _Objects:
    """The program's objects that the judge holds references to, by number."""

    def __init__(self, module: types.ModuleType, channel: Channel) -> None:
        self._module, self._channel = module, channel
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._described: set[int] = set()
        self._globals: dict[str, tuple[Any, Any]] = {}
        self._borrower = Borrower(self._use)
        self._thread = threading.get_ident()
        self._output = sys.stdout = io.StringIO()

    def answer(self, question: Json) -> Json:
        """Perform one request."""
        try:
            operation, message = question
            arguments, keywords = decode(message, self._resolve)
            if operation == "names":
                names = self._module.__dict__
                self._globals = {n: _snapshot(names[n]) for n in arguments[0] if n in names}
                return self.success({name: live(names[name]) for name in self._globals})
            value = OPERATIONS[operation](*arguments, **keywords)
            changed = value is None and self._changed_arguments(message, arguments, keywords)
            new = self._changed_globals()
            return self.success(Effects(value, changed, new) if changed or new else value)
        except BaseException as error:  # the program may raise anything
            return self.failure(error)

    def _changed_arguments(self, message: Json, arguments: list[Any], keywords: Any) -> Any:
        """The arguments of a call if it has changed them in place, else None."""
        if not any(isinstance(a, _CONTAINERS) for a in (*arguments, *keywords.values())):
            return None
        before = decode(message, self._resolve)
        return None if before == [arguments, keywords] else [arguments, keywords]

    def _changed_globals(self) -> dict[str, Any]:
        """New values of the global variables that have changed since the judge received them."""
        new = {}
        for name, (value, content) in self._globals.items():
            current = self._module.__dict__.get(name)
            if current is not value or (content is not None and _content(current) != content):
                new[name] = live(current)
        self._globals |= {name: _snapshot(self._module.__dict__.get(name)) for name in new}
        return new

    def success(self, value: Any) -> Json:
        return ["value", self._encode(value), self._printed()]

    def failure(self, error: BaseException) -> Json:
        """Encode `error`: its class, its arguments if they can be sent, and its text."""
        try:
            content = self._encode(error)
        except Exception:  # arguments that cannot be sent
            content = encode(type(error).__name__)
        return ["raise", content, self._printed()]

    def _printed(self) -> str:
        text = self._output.getvalue()[:_PRINTED]
        self._output.seek(0)
        self._output.truncate()
        return text

    def _encode(self, value: Any) -> Json:
        self._described = set()
        return encode(value, self._refer)

    def _number(self, value: Any) -> int:
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)  # keeps it alive so that its id is not reused
        return number

    def _refer(self, value: Any) -> Node:
        kind = type(value)
        borrowed = self._borrower.number(value)
        if borrowed is not None:
            return "lent", borrowed, None
        if issubclass(kind, type):
            return "class", self._describe(value), None
        if issubclass(kind, BaseException):
            return "error", [self._number(value), self._describe(kind), _text(value)], value.args
        if kind is types.FunctionType:
            return "function", self._number(value), None
        if kind is Live:
            return "live", self._number(value.value), [value.value]
        if kind is Effects:
            return "effects", None, [value.value, value.changed, value.names]
        content = [self._number(value), self._describe(kind)]
        if issubclass(kind, _IMMUTABLE):
            return "value", content, [plain_base(value)]
        return "object", content, None

    def _describe(self, kind: type) -> Json:
        """Describe a class for `SolverClient._class`; for a builtin exception, return its name."""
        if is_builtin_class(kind) and issubclass(kind, BaseException):
            return kind.__name__
        number = self._number(kind)
        if number in self._described:
            return number
        self._described.add(number)
        builtin = nearest_builtin(kind)
        container: type | None = next((b for b in _CONTAINERS if issubclass(kind, b)), None)
        if container is None:
            equal = _lookup(kind, "__eq__")
            container = next((b for b in _LIKE_CONTAINERS if _lookup(b, "__eq__") is equal), None)
        inherited = builtin if builtin in _IMMUTABLE else object
        methods = [
            name
            for name in (*SPECIAL, "__eq__")
            if _lookup(kind, name) is not _lookup(inherited, name)
        ]
        if builtin in _IMMUTABLE:  # methods such as `upper` that the class overrides
            methods += [
                name
                for name in vars(builtin)
                if not name.startswith("_") and _lookup(kind, name) is not _lookup(builtin, name)
            ]
        bases = [
            base.__name__ if base.__module__ == "collections.abc" else self._describe(base)
            for base in kind.__bases__
            if not is_builtin_class(base)
        ]
        bases += [GENERATORS[kind]] if kind in GENERATORS else []
        return [number, kind.__name__, (container or builtin).__name__, bases, methods]

    def _resolve(self, tag: str, content: Json, items: list[Any] | None) -> Any:
        if tag == "object":
            return self._objects[content]
        if tag == "error":
            name, text = content
            kind = getattr(builtins, name, None)
            is_error = isinstance(kind, type) and issubclass(kind, BaseException)
            return kind(text) if is_error else Exception(text)  # type: ignore[misc] # see is_error
        if tag == "import":
            return find_import(*content)
        if tag == "lent":
            return self._borrower.proxy(*content)
        raise TypeError(f"unknown tag {tag!r}")

    def _use(self, number: int, operation: str, arguments: Any, keywords: Any) -> Any:
        """Use an object of the tests; answer the judge's requests until the result arrives."""
        if threading.get_ident() != self._thread:
            raise RuntimeError("objects of the tests can be used in the main thread only")
        request = self._encode([number, operation, arguments, keywords])
        self._channel.send(["callback", request, self._printed()])
        while (message := self._channel.receive())[0] != "result":
            self._channel.send(self.answer(message))
        succeeded, *result = decode(message[1], self._resolve)
        if succeeded:
            return result[0]
        if isinstance(result[0], BaseException):  # raised by the program, inside the tests
            raise result[0]
        name, arguments, number = result
        error = getattr(builtins, name)(*arguments)
        self._borrower.keep(number, error)
        raise error


def _snapshot(value: Any) -> tuple[Any, Json]:
    """`value`, and its encoded content if `value` is a small list, dict or set of plain data."""
    return value, _content(value) if type(value) in (list, dict, set) else None


def _content(value: Any) -> Json:
    try:
        content = encode(value) if len(value) <= _WATCHED else None
    except (ValueError, TypeError):
        return None
    return content if len(str(content)) <= 64 * _WATCHED else None


def _lookup(kind: type, name: str) -> Any:
    """Look up attribute `name` of a class without invoking descriptors or the metaclass."""
    return next((vars(base)[name] for base in type.mro(kind) if name in vars(base)), None)


def _text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:1000]
    except BaseException:  # the program may define __str__
        return type(error).__name__
