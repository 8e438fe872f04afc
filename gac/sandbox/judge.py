"""The judge process: runs a row's tests, and is the only writer of the verdict.

The program runs in the solver; its names are proxies for remote objects here (`remote`).
Comparisons therefore act on plain local values, whatever classes the program defines. Text or bytes
that the program returns are never run: `eval`, `exec` and unpickling refuse what is not in the row.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import marshal
import random
import re
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

from .client import Client
from .peer import ask
from .remote import Remote, RemoteBase, RemoteClass, RemoteError
from .row import CONVERTED, FORMATTING, RowError, describe, hidden

# events of `sys.audit` that only happen where data is interpreted as code, objects or addresses
_REFUSED_EVENTS = ("pickle.find_class", "marshal.load", "code.__new__", "function.__new__")
# modules that compile text they have written themselves, or that only parse
_COMPILERS = frozenset({"ast", "collections", "dataclasses", "inspect"})
# functions that ask the solver if their argument belongs to the program
_INSPECTING = {
    "dataclasses": "asdict astuple fields is_dataclass replace",
    "inspect": "getdoc getfullargspec isabstract isasyncgen isasyncgenfunction iscoroutine "
    "iscoroutinefunction isfunction isgenerator isgeneratorfunction ismethod signature",
    "typing": "get_type_hints",
}
_RECURSION = 20_000  # for nested arguments; the stack is large enough
_PRIVATE_FIELD = re.compile(r"[.\[]_")


def judge(row: bytes, channel: int, guard: bool = True) -> tuple[dict[str, Any], bool]:
    """Run the tests of a row against the solver at the other end of a socket.

    Args:
        row: see `row.compile_row`.
        channel: the socket.
        guard: refuse to run text from the program; cannot be undone in this process.

    Returns:
        The verdict, and whether the solver has closed its end. The verdict has "passed", a bool per
        test, and "problem", text of the first failure. If the row is invalid for every program, it
        has only "row_problem", the reason.
    """
    compiled = types.SimpleNamespace(**marshal.loads(row))
    client = Client(compiled, channel)
    try:
        verdict = _Judge(compiled, client).verdict(guard)
    except RowError as error:
        verdict = {"row_problem": str(error)}
    return verdict, client.ended


class _Judge:
    """The tests of one row and the process that runs the program."""

    def __init__(self, row: types.SimpleNamespace, client: Client) -> None:
        module = sys.modules["__tests__"] = types.ModuleType("__tests__")
        self._row, self._client, self._namespace = row, client, vars(module)
        for statement in row.imports:
            with contextlib.suppress(Exception):  # a module that is not preloaded
                exec(statement, self._namespace)
        self._namespace |= {
            **{
                check.__name__: functools.partial(_check, check)
                for check in (isinstance, issubclass)
            },
            "__run_case__": _run_case,
            **{hidden(kind.__name__): _asking(kind) for kind in CONVERTED},
            **{hidden(name): functools.partial(self._format, name) for name in FORMATTING},
        }

    def verdict(self, guard: bool) -> dict[str, Any]:
        row, client, namespace = self._row, self._client, self._namespace
        random.seed(row.seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(int.from_bytes(row.seed[:4], "big"))
        if guard:
            sys.setrecursionlimit(_RECURSION)
            sys.addaudithook(self._audit)
        wanted = row.entries | (row.free - namespace.keys())
        namespace["__builtins__"] = _Names(client, wanted)
        passed = [False] * len(row.tests)
        try:
            client.ask("run", row.setup_classes)
        except Exception as error:  # the program decides what is raised
            return {"passed": passed, "problem": f"the program: {describe(error)}"}
        client.used = False  # what the program has caused so far does not count
        problem = self._problem_of("setup", row.setup, not row.used_in_setup & wanted)
        if problem:
            return {"passed": passed, "problem": problem}
        client.shared = {
            name: namespace[name]
            for name in row.setup_classes
            if isinstance(namespace.get(name), type)
        }
        for number, (text, code) in enumerate(row.tests):
            found = self._problem_of(f"test {number + 1} ({' '.join(text.split())[:200]})", code)
            passed[number] = not found
            problem = problem or found
            if problem and not row.all:
                break
        if all(passed) and not client.used:
            if wanted <= row.bound:
                raise RowError(
                    "the tests use no name from the program; if they need its entry point, set "
                    "entry_point_field"
                )
            passed, problem = [False] * len(passed), "the tests never use the program"
        return {"passed": passed, "problem": problem}

    def _problem_of(self, place: str, code: types.CodeType, inherent: bool = False) -> str:
        """Run the setup or a test; return why it fails, or "" if it passes.

        Args:
            place: what it is.
            code: its code.
            inherent: whether it does not depend on the program until it asks for something.

        Raises:
            RowError: it fails for every program.
        """
        client = self._client
        for name in self._row.entries:  # they refer to the program, whatever has bound them
            self._namespace.pop(name, None)
        try:
            exec(code, self._namespace)
        except BaseException as error:  # including SystemExit: a test that exits has not passed
            if not client.used and (inherent or isinstance(error, ImportError)):
                raise RowError(f"{place} fails for every program: {describe(error)}") from None
            return f"{place}: {describe(error)}"
        lost = client.lost  # a test that swallowed the error has failed
        if client.suppressed:
            lost = f"the program suppressed {describe(client.suppressed)}"
        return f"{place}: {describe(RemoteError(lost))}" if lost else ""

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "compile":
            source = arguments[0]
            if isinstance(source, bytes):
                source = source.decode("utf-8", "replace")
            if isinstance(source, str) and source.strip() in self._row.constants:
                return
            if sys._getframe(1).f_globals.get("__name__") in _COMPILERS:
                return
        elif not event.startswith(("ctypes.", *_REFUSED_EVENTS)):
            return
        self._refuse(event)

    def _refuse(self, event: str) -> None:
        self._client.lost = f"the tests would interpret data as code ({event}); rewrite them"
        raise RemoteError(self._client.lost)

    def _format(self, method: str, template: Any, /, *arguments: Any, **keywords: Any) -> Any:
        """`template.format(...)`: a template of the program could read the tests' variables."""
        is_text = isinstance(template, str) and template.strip() not in self._row.constants
        if is_text and _PRIVATE_FIELD.search(template):
            self._refuse("str.format")
        return getattr(template, method)(*arguments, **keywords)


def _run_case(kind: Any) -> None:
    """Run a class of the row if it is a `unittest.TestCase`."""
    if isinstance(kind, type) and issubclass(kind, unittest.TestCase):
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(kind).run(result)
        for _, report in result.failures + result.errors:
            raise AssertionError(report.strip().splitlines()[-1])
        assert not result.unexpectedSuccesses, "a test succeeds unexpectedly"


class _Names(dict[str, Any]):
    """The builtins, and the global variables in `wanted` of the program, for the tests.

    Functions and classes are kept. Other values are not, because the program may change them.
    """

    def __init__(self, client: Client, wanted: set[str]) -> None:
        super().__init__(__import__=builtins.__import__)
        self._client, self._wanted = client, wanted

    def __missing__(self, name: str) -> Any:
        if name not in self._wanted:
            return self.setdefault(name, vars(builtins)[name])
        try:
            value = self._client.ask("find", name)
        except Exception:  # the program decides what is raised
            raise KeyError(name) from None
        if isinstance(value, RemoteClass) and name in self._client.row.constructed:
            self._client.constructors.add(id(value))
        if callable(value):
            self[name] = value
        # calling it asks the program, unless it is a builtin class
        if not isinstance(value, RemoteBase):
            self._client.used = True
        return value


def _check(check: Callable[..., bool], value: Any, kinds: Any) -> bool:
    """`isinstance` or `issubclass` for the tests: the program knows what its classes derive from.

    So a proxy for a subclass of `list` counts as a `list`.
    """
    if check(value, kinds) or not isinstance(value, Remote | RemoteClass):
        return check(value, kinds)
    with contextlib.suppress(TypeError):  # a class of the tests
        return ask("convert", value, "builtins", check.__name__, kinds) is True
    return False


def inspect_remotely() -> None:
    """Make the functions in `_INSPECTING` ask the solver about the program's objects."""
    for module_name, names in _INSPECTING.items():
        module = sys.modules[module_name]
        for name in names.split():
            setattr(module, name, _asking(getattr(module, name)))
    # the judge calls the tests itself
    unittest.main = lambda *arguments, **options: None  # type: ignore[assignment] # a class


def _asking(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, called in the solver if its first argument belongs to the program."""

    @functools.wraps(function)
    def asking(*arguments: Any, **keywords: Any) -> Any:
        if arguments and isinstance(arguments[0], Remote | RemoteClass):
            return ask(
                "convert",
                arguments[0],
                function.__module__,
                function.__name__,
                *arguments[1:],
                **keywords,
            )
        return function(*arguments, **keywords)

    return asking
