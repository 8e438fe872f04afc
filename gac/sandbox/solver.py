"""The process that holds the model's program: runs it, then answers the judge's questions.

It never sees the tests, and nobody believes what it says: an answer is a value or a failed test.
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

from .wire import Channel, Ended, Json, WireError, decode, encode

# what could end a loop of the tests early if it came out of a call
_ENDS_OF_LOOPS = (StopIteration, StopAsyncIteration, GeneratorExit)
_LARGEST_CUT = 200  # top-level lines after which a continuation is searched for its end


def answer_questions(spec: Mapping[str, str], channel: Channel) -> None:
    """Run the program of `spec` (see `assemble`), then answer until the judge has no question."""
    module = _module("program")
    try:
        _run(spec, module)
    except BaseException as error:  # SystemExit too: a program that ends is no answer
        channel.send(_failure(error))
    else:
        channel.send(["value", None])
    objects = _Objects()
    with contextlib.suppress(Ended, WireError):
        while True:
            channel.send(_answer(channel.receive(), module, objects))


def run_script(spec: Mapping[str, str]) -> int:
    """Run the program of `spec` as the main module over standard input and output.

    Returns:
        The exit status that Python would give.
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
        threading._shutdown()  # type: ignore[attr-defined] # waits for threads, as Python's own end does
        sys.stdout.flush()
    except BaseException:
        status = status or 1
    return status


def assemble(spec: Mapping[str, str]) -> str:
    """The text to run: the program, or the prompt with the program as its continuation.

    `spec` has "program" and may have "entry_point" and "prompt", code that the program continues
    if it does not define the entry point itself. A continuation ends before its first top-level
    statement, as generation stopped there when such data sets were made.
    """
    program, name, prompt = (spec.get(key, "") for key in ("program", "entry_point", "prompt"))
    defines = rf"^(?:(?:async\s+)?def|class)\s+{re.escape(name)}\b|^{re.escape(name)}\s*[:=]"
    if not name or not prompt or re.search(defines, program, re.MULTILINE):
        return program
    prompt = prompt if prompt.endswith("\n") else prompt + "\n"
    starts = [found.start() for found in re.finditer(r"^[^\s#]", program, re.MULTILINE)]
    for start in starts[:_LARGEST_CUT]:
        text = prompt + program[:start]
        try:
            compile(text, "<program>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            continue  # inside a string or brackets
        return text
    return prompt + program


def _run(spec: Mapping[str, str], module: types.ModuleType) -> None:
    imports = spec.get("imports", "")
    for line in imports.splitlines():  # those of the row's setup, as if the program stood after it
        with contextlib.suppress(Exception):  # the judge says which import fails
            exec(line, module.__dict__)
    exec(compile(assemble(spec), "<program>", "exec", dont_inherit=True), module.__dict__)


def _module(name: str) -> types.ModuleType:
    """A module for the program; dataclasses and pickle look it up by name."""
    module = types.ModuleType(name)
    module.__dict__["__builtins__"] = builtins
    sys.modules[name] = module
    return module


class _Objects:
    """The program's objects that the judge knows, by number."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def refer(self, value: Any) -> int:
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)  # keeps it alive, so its id stays its own
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
    except BaseException as error:  # the program raises what it likes
        return _failure(error)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, arguments, keywords: function(*arguments, **keywords),
    "get": getattr,
    "set": setattr,
    "item": lambda container, key: container[key],
    "len": len,
    "iter": iter,
    "next": lambda iterator: list(itertools.islice(iterator, 1)),  # empty at its end
    "str": str,
    "repr": repr,
    "bool": bool,
}


def _failure(error: BaseException) -> Json:
    """The nearest builtin class of `error`, its arguments if they are plain, and its text."""
    kind = next(k for k in type(error).__mro__ if getattr(builtins, k.__name__, None) is k)
    if kind in (Exception, BaseException) or issubclass(kind, _ENDS_OF_LOOPS):
        name = ""
    else:
        name = kind.__name__
    try:
        text = f"{type(error).__name__}: {error}"[:1000]
    except BaseException:  # its __str__ is the program's own
        text = type(error).__name__
    try:
        arguments = encode(list(error.args))
    except Exception:  # arguments that are no plain values
        arguments = [text]
    return ["error", name, arguments, text]


def leave(status: int) -> None:
    """End this process without the interpreter's clean-up, which the program could have changed."""
    os._exit(status)
