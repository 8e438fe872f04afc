"""The solver process: runs the model's program, then answers the judge's requests.

It never sees the tests, and its answers are untrusted: each is a plain value or fails the test.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import os
import re
import sys
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

from .wire import Channel, ChannelClosed, Json, WireError, decode, encode

# exceptions that would end a loop in the tests early if a call raised them
_ENDS_OF_LOOPS = (StopIteration, StopAsyncIteration, GeneratorExit)
_MAX_CUTS = 200  # top-level lines at which to try to end a continuation


def answer_questions(spec: Mapping[str, str], channel: Channel) -> None:
    """Run the program of `spec` (see `assemble`), then answer requests until the judge closes the
    channel.
    """
    module = _module("program")
    try:
        _run(spec, module)
    except BaseException as error:  # including SystemExit: a program that exits has failed
        channel.send(_failure(error))
    else:
        channel.send(["value", None])
    objects = _Objects()
    with contextlib.suppress(ChannelClosed, WireError):
        while True:
            channel.send(_answer(channel.receive(), module, objects))


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
    except BaseException:
        status = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined] # joins threads, as a normal interpreter exit does
        sys.stdout.flush()
    except BaseException:
        status = status or 1
    return status


def assemble(spec: Mapping[str, str]) -> str:
    """The text to run: the program, or the prompt with the program as its continuation.

    `spec` has "program" and may have "entry_point" and "prompt", code that the program continues
    if it does not define the entry point itself. A continuation is cut before its first top-level
    statement, where generation stopped when such data sets were created.
    """
    program, name, prompt = (spec.get(key, "") for key in ("program", "entry_point", "prompt"))
    defines = rf"^(?:(?:async\s+)?def|class)\s+{re.escape(name)}\b|^{re.escape(name)}\s*[:=]"
    if not name or not prompt or re.search(defines, program, re.MULTILINE):
        return program
    prompt = prompt if prompt.endswith("\n") else prompt + "\n"
    starts = [found.start() for found in re.finditer(r"^[^\s#]", program, re.MULTILINE)]
    for start in starts[:_MAX_CUTS]:
        text = prompt + program[:start]
        try:
            compile(text, "<program>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            continue  # inside a string or brackets
        return text
    return prompt + program


def _run(spec: Mapping[str, str], module: types.ModuleType) -> None:
    imports = spec.get("imports", "")
    for (
        line
    ) in imports.splitlines():  # the imports of the row's setup, as if the program followed it
        with contextlib.suppress(Exception):  # the judge reports which import fails
            exec(line, module.__dict__)
    exec(compile(assemble(spec), "<program>", "exec", dont_inherit=True), module.__dict__)


def _module(name: str) -> types.ModuleType:
    """Create and register a module for the program; dataclasses and pickle look it up by name."""
    module = types.ModuleType(name)
    module.__dict__["__builtins__"] = builtins
    sys.modules[name] = module
    return module


class _Objects:
    """The program's objects that the judge holds references to, by number."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def refer(self, value: Any) -> int:
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)  # keeps it alive so that its id is not reused
        return number

    def resolve(self, number: int) -> Any:
        return self._objects[number]


def _answer(question: Json, module: types.ModuleType, objects: _Objects) -> Json:
    try:
        operation, *parts = question
        arguments = [decode(part, objects.resolve) for part in parts]
        if operation == "names":
            found = {n: module.__dict__[n] for n in arguments[0] if n in module.__dict__}
        else:
            found = _OPERATIONS[operation](*arguments)
        return ["value", encode(found, objects.refer)]
    except BaseException as error:  # the program may raise anything
        return _failure(error)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, arguments, keywords: function(*arguments, **keywords),
    "get": getattr,
    "set": setattr,
    "item": lambda container, key: container[key],
    "len": len,
    "iter": iter,
    "next": lambda iterator: list(itertools.islice(iterator, 1)),  # empty when exhausted
    "str": str,
    "repr": repr,
    "bool": bool,
}


def _failure(error: BaseException) -> Json:
    """Encode `error`: its nearest builtin class, its arguments if they are plain, and its text."""
    kind = next(k for k in type(error).__mro__ if getattr(builtins, k.__name__, None) is k)
    if kind in (Exception, BaseException) or issubclass(kind, _ENDS_OF_LOOPS):
        name = ""
    else:
        name = kind.__name__
    try:
        text = f"{type(error).__name__}: {error}"[:1000]
    except BaseException:  # the program may define __str__
        text = type(error).__name__
    try:
        arguments = encode(list(error.args))
    except Exception:  # arguments that are not plain values
        arguments = [text]
    return ["error", name, arguments, text]


def leave(status: int) -> None:
    """End this process without the interpreter's clean-up, which the program could have changed."""
    os._exit(status)
