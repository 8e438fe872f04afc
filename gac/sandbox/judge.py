"""The judge process: holds a row's tests, queries the solver and alone writes the verdict.

Setup and tests run here; the program's names are proxies for remote objects. Comparisons therefore
act on plain local values, whatever classes the program defines.
"""

from __future__ import annotations

import ast
import builtins
import sys
import types
from collections.abc import Mapping
from typing import Any

from .wire import Channel, ChannelClosed, Json, NotPlain, WireError, decode, encode

Verdict = dict[str, Any]
"""{"passed": [bool per test], "problem": text of the first failure}, or {"row": what is wrong with
the row itself}."""


class RemoteError(Exception):
    """The program raised a non-builtin exception or did not answer."""


class RowError(Exception):
    """The row itself is invalid, whatever the program."""


class Remote:
    """Proxy for an object in the solver; operations run there. Equality is identity."""

    __slots__ = ("_remote_number_", "_remote_solver_")

    def __init__(self, solver: SolverClient, number: int) -> None:
        object.__setattr__(self, "_remote_solver_", solver)
        object.__setattr__(self, "_remote_number_", number)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._remote_solver_.ask("call", self, list(arguments), keywords)

    def __getattr__(self, name: str) -> Any:
        return self._remote_solver_.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._remote_solver_.ask("set", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._remote_solver_.ask("item", self, key)

    def __len__(self) -> int:
        return self._remote_solver_.ask("len", self)

    def __iter__(self) -> Any:
        iterator = self._remote_solver_.ask("iter", self)
        if not isinstance(iterator, Remote):
            return iter(iterator)
        return iterator._remote_solver_.items(iterator)

    def __next__(self) -> Any:
        return next(self._remote_solver_.items(self))

    def __bool__(self) -> bool:
        return self._remote_solver_.ask("bool", self)

    def __str__(self) -> str:
        return self._remote_solver_.ask("str", self)

    def __repr__(self) -> str:
        return self._remote_solver_.ask("repr", self)


class SolverClient:
    """Client for the solver at the other end of the channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._remotes: dict[int, Remote] = {}
        self.asked = 0
        """Number of requests so far."""
        self.lost_reason = ""
        """Why the solver no longer answers, or "". Tests that pass afterwards count as failed."""
        self.raised: Exception | None = None
        """The latest exception raised in the solver."""
        self.unsendable = ""
        """Error text for a value that a test could not send, or ""."""

    def ask(self, operation: str, *parts: Any) -> Any:
        """Send one request and return the answer; raises the program's exception."""
        self.asked += 1
        try:
            question = [operation, *(encode(part, self._number) for part in parts)]
        except NotPlain as error:
            self.unsendable = str(error)
            raise
        if self.lost_reason:
            raise RemoteError(self.lost_reason)
        try:
            self._channel.send(question)
            return self.answer()
        except ChannelClosed:
            self.lost_reason = "the program exited"
        except WireError as error:
            self.lost_reason = f"invalid answer: {error}"
        self._channel.close()
        raise RemoteError(self.lost_reason)

    def items(self, iterator: Any) -> Any:
        """Yield the remaining items of a remote iterator."""
        while True:
            item = self.ask("next", iterator)
            if not (isinstance(item, list) and len(item) <= 1):
                raise RemoteError("invalid answer: neither an item nor the end of the iterator")
            if not item:
                return
            yield item[0]

    def answer(self) -> Any:
        """Receive the next answer. The first one reports whether the program itself ran."""
        answer = self._channel.receive()
        if isinstance(answer, list) and len(answer) == 2 and answer[0] == "value":
            return decode(answer[1], self._remote)
        self.raised = _exception(answer)
        raise self.raised

    def _remote(self, number: int) -> Remote:
        return self._remotes.setdefault(number, Remote(self, number))

    def _number(self, value: Any) -> int:
        if type(value) is not Remote:
            raise NotPlain(value)
        return value._remote_number_


def _exception(answer: Json) -> Exception:
    if not (isinstance(answer, list) and len(answer) == 4 and answer[0] == "error"):
        raise WireError("neither a value nor an error")
    _, name, arguments, text = answer
    if not (isinstance(name, str) and isinstance(text, str)):
        raise WireError("an error needs a name and a text")
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RemoteError(text)
    if issubclass(kind, StopIteration | StopAsyncIteration):
        return RemoteError(text)
    try:
        return kind(*decode(arguments))
    except Exception:  # the arguments come from the program
        return RemoteError(text)


def judge(spec: Mapping[str, Any], channel: Channel) -> Verdict:
    """Run the tests of `spec` against the solver at the other end of `channel`.

    `spec`: "tests", a list of sources; "setup", source that runs before them; "entry_point", a
    name, or "" to use the names that "reference", the source of a solution, defines; "all", whether
    to continue after a failure.
    """
    solver = SolverClient(channel)
    try:
        return _judge(spec, solver)
    except RowError as error:
        return {"row": str(error)}
    finally:
        channel.close()


def _judge(spec: Mapping[str, Any], solver: SolverClient) -> Verdict:
    tests = append_check_call(spec["tests"], spec["entry_point"])
    setup_code = _compile("setup", spec["setup"])
    codes = [_compile(f"test {n}", text) for n, text in enumerate(tests, start=1)]
    used = _names_read([spec["setup"], *tests])
    defined = names_defined(spec["reference"]) & used
    entries = defined - names_defined(spec["setup"])
    if spec["entry_point"]:
        entries = {spec["entry_point"]}
    all_failed: Verdict = {"passed": [False] * len(tests)}

    module = types.ModuleType("__tests__")
    sys.modules["__tests__"] = module
    namespace = module.__dict__
    namespace["__builtins__"] = builtins
    namespace |= {name: sys.modules[name] for name in used & set(sys.modules) if _is_stdlib(name)}
    wanted = entries | {name for name in used if name not in namespace and _is_not_builtin(name)}
    unknown = wanted - defined - _names_bound([spec["setup"], *tests]) if defined else set()
    try:
        solver.answer()
        found = solver.ask("names", sorted(wanted))
        if not isinstance(found, dict) or not found.keys() <= wanted:
            raise WireError("names that were not requested")
    except (Exception, ChannelClosed) as error:
        return all_failed | {"problem": f"the program: {_describe(error)}"}
    missing = entries - found.keys()
    if spec["entry_point"] in missing or any(
        n in namespace or not _is_not_builtin(n) for n in missing
    ):
        return all_failed | {"problem": f"the program does not define {', '.join(sorted(missing))}"}
    namespace |= found

    asked = solver.asked
    try:
        exec(setup_code, namespace)
    except BaseException as error:  # including SystemExit: a setup that exits has failed
        lacking = _names_read([spec["setup"]]) & wanted
        by_row = solver.asked == asked and not lacking
        if by_row or _is_row_fault(error, solver, unknown):
            raise RowError(f"the row's setup fails: {_describe(error)}") from None
        return all_failed | {"problem": f"setup: {_describe(error)}"}
    namespace |= {name: found[name] for name in entries if name in found}

    passed: list[bool] = []
    problem = ""
    for text, code in zip(tests, codes, strict=True):
        if solver.lost_reason or (problem and not spec["all"]):
            break
        failure = _failure_of(code, namespace, solver)
        if failure is not None and _is_row_fault(failure, solver, unknown):
            raise RowError(f"a test fails for every program: {_describe(failure)}; {text!r:.200}")
        passed.append(failure is None)
        if failure is not None and not problem:
            shown = " ".join(text.split())[:200]
            problem = f"test {len(passed)} ({shown}): {_describe(failure)}"
    passed += [False] * (len(tests) - len(passed))
    if all(passed) and not found:
        raise RowError(
            "the tests use no name from the program; set entry_point_field if they should"
        )
    return {"passed": passed, "problem": problem}


def _failure_of(
    code: types.CodeType, namespace: dict[str, Any], solver: SolverClient
) -> BaseException | None:
    """Run a test; return its exception, or None if it passes."""
    try:
        exec(code, namespace)
    except BaseException as error:  # including SystemExit: a test that exits has not passed
        return error
    return (
        RemoteError(solver.lost_reason) if solver.lost_reason else None
    )  # a test that swallowed the error has failed


def _is_row_fault(error: BaseException, solver: SolverClient, unknown: set[str]) -> bool:
    """Whether the row is at fault: a missing module, an unknown name or a value that cannot be
    sent.
    """
    if isinstance(error, NameError):
        return error.name in unknown
    return bool(solver.unsendable) or (
        isinstance(error, ImportError) and error is not solver.raised
    )


def _compile(place: str, text: str) -> types.CodeType:
    try:
        return compile(text, f"<{place}>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise RowError(
            f"the row's {place} is not valid Python: {_describe(error)}; {text!r:.200}"
        ) from None


def append_check_call(tests: list[str], entry_point: str) -> list[str]:
    """`tests`, with `check(entry_point)` appended to each test that defines `check`, unless some
    test calls it.
    """
    if not entry_point:
        return tests
    trees = []
    for text in tests:
        try:
            trees.append(ast.parse(text))
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return tests  # compiling them later reports the error
    outside = [n for tree in trees for n in tree.body if not isinstance(n, ast.FunctionDef)]
    called = any(
        isinstance(node, ast.Name) and node.id == "check" for n in outside for node in ast.walk(n)
    )
    return [
        f"{text}\n\ncheck({entry_point})\n"
        if not called and any(isinstance(n, ast.FunctionDef) and n.name == "check" for n in t.body)
        else text
        for text, t in zip(tests, trees, strict=True)
    ]


def _names_read(texts: list[str]) -> set[str]:
    nodes = (node for text in texts for node in ast.walk(ast.parse(text)))
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _names_bound(texts: list[str]) -> set[str]:
    """All names that the texts bind anywhere."""
    names: set[str] = set()
    for node in (node for text in texts for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            names.add(node.name)
    return names


def names_defined(text: str) -> set[str]:
    """Names that a program binds at its top level; empty if it is not valid Python."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return set()
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            inside = (n for target in targets for n in ast.walk(target))
            names |= {n.id for n in inside if isinstance(n, ast.Name)}
    return names


def _is_stdlib(name: str) -> bool:
    return name in sys.stdlib_module_names


def _is_not_builtin(name: str) -> bool:
    return not hasattr(builtins, name)


def _describe(error: BaseException | None) -> str:
    if isinstance(error, ChannelClosed):
        return "the process exited"
    text = str(error)
    return f"{type(error).__name__}: {text}"[:500] if text else type(error).__name__
