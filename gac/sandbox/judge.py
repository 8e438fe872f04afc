"""The judge process: holds a row's tests, queries the solver and is the only writer of the verdict.

Setup and tests run here; the program's names are proxies for remote objects (`remote`). Comparisons
therefore act on plain local values, whatever classes the program defines. Text or bytes that the
program returns are never run: `eval`, `exec` and unpickling refuse whatever is not in the row.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import sys
import types
from collections.abc import Mapping
from functools import partial
from typing import Any

from .library import CONVERSIONS, is_instance, run_coroutines_remotely
from .remote import Remote, RemoteClass, RemoteError, SolverClient
from .wire import Channel, WireError

Verdict = dict[str, Any]
"""Keys: "passed", a bool per test; "problem", text of the first failure; optionally "suspect", why
the row rather than the program may be at fault. If the row itself is invalid, the only key is
"row", the reason.
"""

# events of `sys.audit` that only happen where data is interpreted as code, objects or addresses
_REFUSED_EVENTS = ("pickle.find_class", "marshal.load", "code.__new__", "function.__new__")
# modules that compile text they have written themselves, or that only parse
_COMPILERS = frozenset({"ast", "collections", "dataclasses", "inspect"})


class RowError(Exception):
    """Raised if the row itself is invalid, whatever the program does."""


class RefusedError(Exception):
    """Raised if the tests would execute text or bytes that may come from the program."""


def judge(spec: Mapping[str, Any], channel: Channel, guard: bool = True) -> Verdict:
    """Run the tests of `spec` against the solver at the other end of `channel`.

    `spec`: "tests", a list of sources; "setup", source that runs before them; "entry_point", a
    name, or "" to use the names that "reference", the source of a solution, defines; "all", whether
    to continue after a failure. `guard`: refuse to run text from the program; cannot be undone in
    this process.
    """
    client = SolverClient(channel)
    try:
        return _Judge(spec, client).verdict(guard)
    except RowError as error:
        return {"row": str(error)}
    finally:
        channel.close()


class _Judge:
    """The tests of one row and the process that runs the program."""

    def __init__(self, spec: Mapping[str, Any], client: SolverClient) -> None:
        self._client, self._all = client, spec["all"]
        self._entry_point = spec["entry_point"]
        self._tests = append_check_call(spec["tests"], self._entry_point)
        names = [f"test {n}" for n in range(1, len(self._tests) + 1)]
        trees = list(map(_parsed, ["setup", *names], [spec["setup"], *self._tests]))
        setup, words = _words(trees[:1]), _words(trees[1:])
        self._used, self._bound, self._constants, self._called = (
            first | second for first, second in zip(setup, words, strict=True)
        )
        self._used_in_setup = setup[0]
        converted = self._called & CONVERSIONS.keys() - self._bound
        if converted:
            trees = list(map(_Conversions(converted).visit, trees))
        self._setup, *self._codes = map(_compile, ["setup", *names], trees)
        reference = _parse(spec["reference"])
        self._defined = names_defined(reference) & self._used
        self._classes = {n.name for n in reference.body if isinstance(n, ast.ClassDef)}
        self._entries = self._defined - names_defined(trees[0])
        if self._entry_point:
            self._entries = {self._entry_point}
        self._imports = _imports(reference, self._used - self._bound - self._entries)
        self._refused = ""

    def verdict(self, guard: bool) -> Verdict:
        all_failed: Verdict = {"passed": [False] * len(self._tests)}
        namespace = self._namespace()
        free = {name for name in self._used if name not in namespace and _is_not_builtin(name)}
        wanted = self._entries | free
        unknown = wanted - self._defined - self._bound if self._defined else set()
        if guard:
            sys.addaudithook(self._audit)
            run_coroutines_remotely()
        try:
            self._client.answer()
            found = self._client.ask("names", sorted(wanted))
            if not isinstance(found, dict) or not found.keys() <= wanted:
                raise WireError("the reply contains names that were not requested")
        except Exception as error:  # the program decides what is raised
            return all_failed | {"problem": f"the program: {_describe(error)}"}
        missing = self._entries - found.keys()
        if self._entry_point in missing or any(
            name in namespace or not _is_not_builtin(name) for name in missing
        ):
            names = ", ".join(sorted(missing))
            return all_failed | {"problem": f"the program does not define {names}"}
        namespace |= found
        self._name_classes(found)
        variables = found.keys() - self._bound
        self._client.on_globals = partial(_follow, namespace, {n: found[n] for n in variables})
        requests = self._client.requests
        proxies = all(isinstance(value, Remote | RemoteClass) for value in found.values())

        def blame(error: BaseException, place: str) -> str:
            """Why this error may be the row's fault, or ""; raises RowError if it certainly is."""
            reason = self._row_fault(error, unknown)
            if (
                reason
                and proxies
                and self._client.requests <= requests + bool(self._client.unsendable)
                and not isinstance(error, NameError)
            ):
                raise RowError(f"{place}: {_describe(error)}")
            return f"{place}: {reason}" if reason else ""

        try:
            exec(self._setup, namespace)
        except BaseException as error:  # including SystemExit: a setup that exits has failed
            if not self._used_in_setup & wanted and self._client.requests == requests:
                raise RowError(f"the row's setup fails: {_describe(error)}") from None
            reason = blame(error, "the row's setup fails") or "the row's setup fails"
            return all_failed | {"problem": f"setup: {_describe(error)}", "suspect": reason}
        namespace |= {name: found[name] for name in self._entries if name in found}

        passed: list[bool] = []
        problem = suspect = ""
        for text, code in zip(self._tests, self._codes, strict=True):
            if problem and not self._all:
                break
            failure = self._failure_of(code, namespace)
            passed.append(failure is None)
            if failure is not None:
                shown = " ".join(text.split())[:200]
                suspect = suspect or blame(failure, f"a test fails for every program; {shown!r}")
                problem = problem or f"test {len(passed)} ({shown}): {_describe(failure)}"
        passed += [False] * (len(self._tests) - len(passed))
        if all(passed) and not found:
            if wanted <= self._bound:
                raise RowError(
                    "the tests use no name from the program; if they need its entry point, set "
                    "entry_point_field"
                )
            return all_failed | {"problem": "the program defines no name that the tests use"}
        verdict: Verdict = {"passed": passed, "problem": problem}
        return verdict | ({"suspect": suspect} if suspect else {})

    def _name_classes(self, found: dict[str, Any]) -> None:
        """Mark each class in `found` whose name is capitalized or is that of a reference class."""
        for name, value in found.items():
            if isinstance(value, RemoteClass) and (
                name.lstrip("_")[:1].isupper() or name in self._classes
            ):
                type.__setattr__(value, "_named_", True)

    def _namespace(self) -> dict[str, Any]:
        """The tests' initial global variables, without those of the program."""
        module = types.ModuleType("__tests__")
        sys.modules["__tests__"] = module
        namespace = module.__dict__
        namespace |= {"__builtins__": builtins, "isinstance": is_instance}
        namespace |= {_hidden(name): function for name, function in CONVERSIONS.items()}
        # a name that the tests call is not the name of a module
        loaded = self._used - self._called
        namespace |= {n: sys.modules[n] for n in loaded if n in sys.modules and _is_stdlib(n)}
        for statement in self._imports:  # of the reference, so that the program cannot choose them
            with contextlib.suppress(Exception):
                exec(statement, namespace)
        return namespace

    def _failure_of(self, code: types.CodeType, namespace: dict[str, Any]) -> BaseException | None:
        """Run a test; return its exception, or None if it passes."""
        try:
            exec(code, namespace)
        except BaseException as error:  # including SystemExit: a test that exits has not passed
            return error
        if self._client.lost_reason:  # a test that swallowed the error has failed
            return RemoteError(self._client.lost_reason)
        return RefusedError(self._refused) if self._refused else None

    def _row_fault(self, error: BaseException, unknown: set[str]) -> str:
        """Why the row may be at fault, or "".

        Reasons are a missing module, an unknown name, a value that cannot be sent, and text of the
        program that the tests would run.
        """
        if self._refused or self._client.unsendable:
            return self._refused or self._client.unsendable
        if isinstance(error, NameError) and error.name in unknown:
            return _describe(error)
        by_row = isinstance(error, ImportError) and error is not self._client.raised
        return _describe(error) if by_row else ""

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "compile":
            source = arguments[0]
            if isinstance(source, bytes):
                source = source.decode("utf-8", "replace")
            if isinstance(source, str) and source.strip() in self._constants:
                return
            if sys._getframe(1).f_globals.get("__name__") in _COMPILERS:
                return
        elif not event.startswith(("ctypes.", *_REFUSED_EVENTS)):
            return
        self._refused = f"the tests would interpret data as code ({event}); rewrite them"
        raise RefusedError(self._refused)


def _follow(namespace: dict[str, Any], found: dict[str, Any], new: Any) -> None:
    """Copy changed global variables of the program, except names that the tests have bound."""
    for name in new.keys() & found.keys():
        if namespace.get(name) is found[name]:
            namespace[name] = found[name] = new[name]


def _parsed(place: str, text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise RowError(
            f"the row's {place} is not valid Python: {_describe(error)}; {text!r:.200}"
        ) from None


def _compile(place: str, tree: ast.Module) -> types.CodeType:
    try:
        return compile(tree, f"<{place}>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise RowError(f"the row's {place} is not valid Python: {_describe(error)}") from None


def append_check_call(tests: list[str], entry_point: str) -> list[str]:
    """Append `check(entry_point)` to each test that defines `check`, unless some test calls it."""
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


def _words(trees: list[ast.Module]) -> tuple[set[str], set[str], set[str], set[str]]:
    """Four sets from the `trees`: names read, names bound, string constants and names called."""
    read: set[str] = set()
    bound: set[str] = set()
    constants: set[str] = set()
    called: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                called.add(node.func.id)
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                constants.add(node.value.strip())
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            bound.add(node.name)
    return read, bound, constants, called


class _Conversions(ast.NodeTransformer):
    """Replaces the builtins in calls such as `int(x)` by `remote.CONVERSIONS`."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in self._names:
            node.func.id = _hidden(node.func.id)
        return node


def _hidden(name: str) -> str:
    """A name that no source text can contain."""
    return f"{name}()"


def names_defined(tree: ast.Module) -> set[str]:
    """Names that a program binds at its top level, apart from its imports."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            inside = (n for target in targets for n in ast.walk(target))
            names |= {n.id for n in inside if isinstance(n, ast.Name)}
    return names


def _imports(tree: ast.Module, names: set[str]) -> list[types.CodeType]:
    """The top-level imports of a program that bind one of `names`."""
    codes = []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                bound = (alias.asname or alias.name).split(".")[0]
                if bound in names or alias.name == "*":
                    single = type(node)(**{**dict(ast.iter_fields(node)), "names": [alias]})
                    tree_of_one = ast.Module([ast.copy_location(single, node)], [])
                    codes.append(compile(tree_of_one, "<reference>", "exec", dont_inherit=True))
    return codes


def _parse(text: str) -> ast.Module:
    """Parse a program; return an empty module if it is not valid Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return ast.Module([], [])


def _is_stdlib(name: str) -> bool:
    return name in sys.stdlib_module_names


def _is_not_builtin(name: str) -> bool:
    return not hasattr(builtins, name)


def _describe(error: BaseException | None) -> str:
    try:
        text = str(error)
    except Exception:  # a class of the program may define __str__
        text = ""
    described = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return described[:500].encode("utf-8", "backslashreplace").decode()
