"""What the judge knows about a row before it runs anything: names, operators and imports."""

from __future__ import annotations

import ast
import builtins
import contextlib
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from .lent import COMPARISONS

CONVERTED = (int, float, complex, bytes)
"""Classes whose calls in tests convert objects of the program in the solver."""
FORMATTING = ("format", "format_map")
# helpers that tests use without an import, which must not come from the program
_HELPERS = {
    "np": "numpy",
    "numpy": "numpy",
    "pd": "pandas",
    "pytest": "pytest",
    "approx": "pytest:approx",
    "isclose": "math:isclose",
    "allclose": "numpy:allclose",
    "assert_allclose": "numpy.testing:assert_allclose",
    "assert_almost_equal": "numpy.testing:assert_almost_equal",
    "assert_array_equal": "numpy.testing:assert_array_equal",
}
_NAMED = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.ExceptHandler,
    ast.MatchAs,
    ast.MatchStar,
)
_SYNTAX = (SyntaxError, ValueError, MemoryError, RecursionError)


class RowError(Exception):
    """Raised if the row itself is invalid, whatever the program does."""


class Row:
    """The compiled tests of a row.

    Attributes:
        setup, codes: the code of the setup; the text and the code of each test.
        entries: names that the program must define.
        used, used_in_setup, bound, constants: names that setup and tests read, that the setup
            reads, that they bind; the strings they contain.
        patches: (module, attribute) pairs that the tests may replace.
        expects_stop: whether they mention StopIteration.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.all, self.entry_point = spec["all"], spec["entry_point"]
        tests = append_check_call(spec["tests"], self.entry_point)
        names = ["setup", *(f"test {n}" for n in range(1, len(tests) + 1))]
        texts = [spec["setup"], *tests]
        trees = list(map(_parsed, names, texts))
        self.used_in_setup = _Words(trees[:1]).read
        words = _Words(trees)
        self.used, self.bound, self.constants = words.read, words.bound, words.constants
        self._called = words.called
        # what the program prints reaches sys.stdout anyway
        changed = words.attributes - {("sys", "stdout")}
        self.patches = [place for place in changed if place[0] in sys.modules]
        self.expects_stop = "StopIteration" in self.used or "StopAsyncIteration" in self.used
        converted = {kind.__name__ for kind in CONVERTED} & self._called - self.bound
        rewritten = map(_Calls(converted).visit, trees)
        self.setup, *codes = map(_compiled, names, rewritten)
        self.codes = list(zip(tests, codes, strict=True))
        reference = parse(spec["reference"])
        self._defined = names_defined(reference) & self.used
        self._classes = {n.name: n for n in ast.walk(reference) if isinstance(n, ast.ClassDef)}
        self._operators = set(_operators(self._classes.values())) if reference.body else None
        self.knows_operators = self._operators is not None
        self.setup_classes = {n.name for n in trees[0].body if isinstance(n, ast.ClassDef)}
        self.entries = self._defined - names_defined(trees[0])
        if self.entry_point:
            self.entries = {self.entry_point}
        self._imports = _imports(reference, self.used - self.bound - self.entries)

    def names(self) -> dict[str, Any]:
        """The tests' initial global variables, without those of the program."""
        loaded = self.used - self._called  # a name that the tests call is not the name of a module
        names: dict[str, Any] = {
            n: sys.modules[n] for n in loaded & sys.stdlib_module_names if n in sys.modules
        }
        for name in _HELPERS.keys() & self.used:
            module, _, attribute = _HELPERS[name].partition(":")
            if module in sys.modules:
                helper = sys.modules[module]
                names[name] = getattr(helper, attribute) if attribute else helper
        names |= {"__builtins__": builtins, "__name__": "__tests__"}
        for statement in self._imports:  # of the reference, so that the program cannot choose them
            with contextlib.suppress(Exception):
                exec(statement, names)
        return names

    def wanted(self, known: Mapping[str, Any]) -> set[str]:
        """Names that the tests need of the program: those in `entries`, and all unknown ones."""
        free = self.used - known.keys() - vars(builtins).keys() - (_HELPERS.keys() - self._defined)
        return self.entries | free

    def constructs(self, name: str) -> bool:
        """Whether a class of the program with this name is one that the tests construct."""
        if name in self._defined:
            return name in self._classes
        return name.lstrip("_")[:1].isupper()

    def trusts(self, name: str) -> bool:
        """Whether the tests need this operator of the program: one that the reference defines."""
        return self._operators is None or _group(name) in self._operators


def _group(name: str) -> str:
    """One name for operators that stand in for each other, such as __add__ and __radd__."""
    plain = name.strip("_")
    if name in COMPARISONS:
        return "eq" if plain in ("eq", "ne") else "lt"
    return (
        plain if plain[1:] in ("nvert", "nit", "ter") else plain.removeprefix("r").removeprefix("i")
    )


def _operators(classes: Any) -> Iterator[str]:
    """The groups of the operators that classes define."""
    for node in classes:
        yield from (_group(name) for name in names_defined(node))
        if node.decorator_list:  # dataclass, total_ordering
            yield from ("eq", "lt")


class _Words(ast.NodeVisitor):
    """The names that sources read, bind and call, their strings, and attributes of modules."""

    def __init__(self, trees: list[ast.Module]) -> None:
        self.read: set[str] = set()
        self.bound: set[str] = set()
        self.constants: set[str] = set()
        self.called: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        for tree in trees:
            for node in ast.walk(tree):
                self.visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, _NAMED) and node.name:
            self.bound.add(node.name)

    def visit_Name(self, node: ast.Name) -> None:
        (self.read if isinstance(node.ctx, ast.Load) else self.bound).add(node.id)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name):
            self.called.add(node.func.id)
        match node.args:
            case [ast.Name(module), ast.Constant(str(name)), *_]:  # patch.object and setattr
                self.attributes.add((module, name))

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.constants.add(node.value.strip())
            module, _, name = node.value.rpartition(".")
            self.attributes.add((module, name))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and not isinstance(node.ctx, ast.Load):
            self.attributes.add((node.value.id, node.attr))

    def visit_alias(self, node: ast.alias) -> None:
        self.bound.add((node.asname or node.name).split(".")[0])

    def visit_arg(self, node: ast.arg) -> None:
        self.bound.add(node.arg)


class _Calls(ast.NodeTransformer):
    """Replaces functions whose calls need care: conversions such as `int(x)`, and `x.format()`."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in self._names:
            node.func.id = hidden(node.func.id)
        elif (
            isinstance(node.func, ast.Attribute)
            and node.func.attr in FORMATTING
            and not isinstance(node.func.value, ast.Constant)
        ):
            node.args.insert(0, node.func.value)
            name = ast.Name(hidden(node.func.attr), ast.Load())
            node.func = ast.copy_location(name, node.func)
        return node


def hidden(name: str) -> str:
    """A name that no source text can contain."""
    return f"{name}()"


def _parsed(place: str, text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except _SYNTAX as error:
        raise RowError(
            f"the row's {place} is not valid Python: {describe(error)}; {text!r:.200}"
        ) from None


def _compiled(place: str, tree: ast.Module) -> types.CodeType:
    try:
        return compile(tree, f"<{place}>", "exec", dont_inherit=True)
    except _SYNTAX as error:
        raise RowError(f"the row's {place} is not valid Python: {describe(error)}") from None


def parse(text: str) -> ast.Module:
    """Parse a program; return an empty module if it is not valid Python."""
    try:
        return ast.parse(text)
    except _SYNTAX:
        return ast.Module([], [])


def append_check_call(tests: list[str], entry_point: str) -> list[str]:
    """Append `check(entry_point)` to each test that defines `check`, unless some test calls it."""
    if not entry_point:
        return tests
    trees = list(map(parse, tests))
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


def describe(error: BaseException | None) -> str:
    """Class and text of an error, at most 500 characters."""
    try:
        text = str(error)
    except Exception:  # a class of the program may define __str__
        text = ""
    described = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return described[:500].encode("utf-8", "backslashreplace").decode()
