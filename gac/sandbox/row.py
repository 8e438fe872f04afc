"""What is known about a row before anything runs: its code, names, operators and imports.

The trainer compiles a row once, so that the judges of its programs need not.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import marshal
import symtable
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .peer import COMPARISONS, WITH_OPERAND

CONVERTED = (int, float, complex, bytes)
"""Classes whose calls in tests convert objects of the program in the solver."""
FORMATTING = ("format", "format_map")
CAREFUL = {"StopIteration", "StopAsyncIteration", "AttributeError", "NameError", "TypeError"}
"""Errors that end a loop, or that show that the program lacks something."""
# helpers that tests use without an import, which must not come from the program
_HELPERS = {
    "np": "import numpy as np",
    "numpy": "import numpy",
    "pd": "import pandas as pd",
    "deepcopy": "from copy import deepcopy",
    "math": "import math",
    "pytest": "import pytest",
    "approx": "from pytest import approx",
    "isclose": "from math import isclose",
    "allclose": "from numpy import allclose",
    "assert_allclose": "from numpy.testing import assert_allclose",
    "assert_almost_equal": "from numpy.testing import assert_almost_equal",
    "assert_array_equal": "from numpy.testing import assert_array_equal",
}
# one thread at a time: https://github.com/python/cpython/issues/106905
_PARSER = threading.Lock()
_NAMED = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.ExceptHandler,
    ast.MatchAs,
    ast.MatchStar,
)


class RowError(Exception):
    """Raised if the row itself is invalid, whatever the program does."""


@dataclass(frozen=True)
class Program:
    """Source to run and what may be prepended to it; see `solver.assemble`."""

    text: str
    context: tuple[str, ...] = ()
    """Statements that run before it, if they can."""
    prompt: str = ""
    entry_point: str = ""


@dataclass(frozen=True)
class JudgeSpec:
    """The tests of a row."""

    tests: tuple[str, ...]
    setup: str = ""
    """Source that runs before them."""
    entry_point: str = ""
    """The name under test, or "" for the names that `reference` defines."""
    reference: str = ""
    """Source of a solution, or ""."""
    all: bool = False
    """Whether to continue after a failure."""
    returns: bool = True
    """Whether a call that returns a value may change its arguments."""


@lru_cache(maxsize=4096)
def compile_row(spec: JudgeSpec) -> bytes:
    """What the judge needs to know about a row, in the format of `marshal`.

    Raises:
        RowError: the setup or a test is not valid Python.
    """
    places = ["setup", *(f"test {n}" for n in range(1, len(spec.tests) + 1))]
    texts = [spec.setup, *spec.tests]
    trees = [_valid(p, t, ast.parse, t) for p, t in zip(places, texts, strict=True)]
    words, setup_words = _Words(trees), _Words(trees[:1])
    used = _Words([n for t in trees for n in t.body if not isinstance(n, ast.FunctionDef)]).read
    for place, tree in zip(places, trees, strict=True):
        calls = "\n".join(
            _runner_call(node, used, words.read, spec.entry_point) for node in tree.body
        )
        tree.body += _valid(place, calls, ast.parse, calls).body
    reference = _parse(spec.reference)
    classes = [node for node in ast.walk(reference) if isinstance(node, ast.ClassDef)]
    defined = names_defined(spec.reference) & words.read
    entries = {spec.entry_point} if spec.entry_point else defined - names_defined(spec.setup)
    free = words.read - vars(builtins).keys() - (_HELPERS.keys() - defined)
    imports = [
        # a name that the tests call is not the name of a module
        *(f"import {n}" for n in (words.read - words.called) & sys.stdlib_module_names),
        *(_HELPERS[n] for n in _HELPERS.keys() & words.read),
        # those of the answer, so that the program cannot choose them
        *(ast.unparse(n) for n in reference.body if isinstance(n, ast.Import | ast.ImportFrom)),
    ]
    converted = {kind.__name__ for kind in CONVERTED} & words.called - words.bound
    operators = set(map(_group, _Words([n for node in classes for n in node.body]).bound))
    if any(node.decorator_list for node in classes):  # dataclass, total_ordering
        operators |= {"eq", "lt"}
    setup, *codes = [
        _valid(p, t, compile, _Calls(converted).visit(tree), f"<{p}>", "exec", 0, True)
        for p, t, tree in zip(places, texts, trees, strict=True)
    ]
    return marshal.dumps(
        {
            "imports": [compile(text, "<import>", "exec", 0, True) for text in imports],
            "setup": setup,
            "tests": list(zip(spec.tests, codes, strict=True)),  # the text and the code of each
            "all": spec.all,
            "returns": spec.returns,
            # of random numbers: the same in every run, and unknown to the program
            "seed": hashlib.sha256(repr(spec).encode()).digest(),
            "entries": entries,  # names that the program must define
            "free": free,  # names that it may define
            # classes of the program that the tests construct, judging by their names
            "constructed": {
                n
                for n in entries | free
                if (n in {c.name for c in classes} if n in defined else n.lstrip("_")[:1].isupper())
            },
            # those that the answer defines, and that the tests may need of the program
            "operators": {n for n in WITH_OPERAND if _group(n) in operators},
            "has_answer": bool(reference.body),
            "setup_classes": {n.name for n in trees[0].body if isinstance(n, ast.ClassDef)},
            "used_in_setup": setup_words.read,
            "bound": words.bound,
            "constants": words.constants,
            # attributes of modules that the tests may replace; stdout reaches them anyway
            "patches": words.attributes - {("sys", "stdout")},
            # errors that need care, if the tests name them
            "expected": words.read & CAREFUL,
            "read": words.read | words.words,  # names and attributes
        }
    )


def _runner_call(node: ast.stmt, used: set[str], read: set[str], entry_point: str) -> str:
    """How a test runner would call what a statement defines, or "".

    Functions that other statements use are helpers.

    Raises:
        RowError: a test that only pytest would run.
    """
    match node:
        case ast.ClassDef(name, [_, *_]):
            return f"__run_case__({name})"
        case ast.FunctionDef("check") if entry_point and "check" not in used:
            return f"check({entry_point})"
        case ast.FunctionDef(name, takes) | ast.AsyncFunctionDef(name, takes) if name.startswith(
            "test"
        ) and len(takes.args) == len(takes.defaults):
            run = "" if isinstance(node, ast.FunctionDef) else "__import__('asyncio').run"
            return "" if name in used else f"{run}({name}())"
        case ast.ClassDef(name) | ast.FunctionDef(name) | ast.AsyncFunctionDef(name) if (
            name.lower().startswith("test") and name not in read and "def test" in ast.unparse(node)
        ):
            raise RowError(
                f"{name} would never run: parameters, fixtures and classes of pytest are not "
                "supported; call it in the tests, or write a unittest.TestCase"
            )
    return ""


def _group(name: str) -> str:
    """One name for operators that stand in for each other, such as __add__ and __radd__."""
    plain = name.strip("_")
    if name in COMPARISONS:
        return "eq" if plain in ("eq", "ne") else "lt"
    return plain if plain == "rshift" else plain.removeprefix("r").removeprefix("i")


class _Words:
    """The names that sources read, bind and call, their strings, and attributes of modules."""

    def __init__(self, trees: Sequence[ast.AST]) -> None:
        self.read: set[str] = set()
        self.bound: set[str] = set()
        self.called: set[str] = set()
        self.constants: set[str] = set()
        self.words: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        for node in (node for tree in trees for node in ast.walk(tree)):
            match node:
                case ast.Name(name, ast.Load()):
                    self.read.add(name)
                case ast.Name(name) | ast.arg(name):
                    self.bound.add(name)
                case ast.alias(name, alias):
                    self.bound.add((alias or name).split(".")[0])
                case ast.Constant(str(text)):
                    self.constants.add(text.strip())
                    module, _, name = text.rpartition(".")  # as in patch("builtins.input")
                    self.attributes.add((module, name))
                case ast.Attribute(_, name, ast.Load()):
                    self.words.add(name)
                case ast.Attribute(ast.Name(module), name, ast.Store() | ast.Del()):
                    self.attributes.add((module, name))
                case ast.Call(function, args):
                    if isinstance(function, ast.Name):
                        self.called.add(function.id)
                    match args:  # as in patch.object(module, name) and setattr(module, name, value)
                        case [ast.Name(module), ast.Constant(str(name)), *_]:
                            self.attributes.add((module, name))
                case _ if isinstance(node, _NAMED) and node.name:
                    self.bound.add(node.name)


@dataclass
class _Calls(ast.NodeTransformer):
    """Replaces functions whose calls need care: conversions such as `int(x)`, and `x.format()`."""

    conversions: set[str]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node.func:
            case ast.Name(name) if name in self.conversions:
                node.func.id = hidden(name)
            case ast.Attribute(value, name) if name in FORMATTING and not isinstance(
                value, ast.Constant
            ):
                node.args.insert(0, value)
                node.func = ast.copy_location(ast.Name(hidden(name), ast.Load()), node.func)
        return node


def hidden(name: str) -> str:
    """A name that no source text can contain."""
    return f"{name}()"


def _valid(place: str, text: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        with _PARSER:
            return function(*arguments)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise RowError(
            f"the row's {place} is not valid Python: {describe(error)}; {text!r:.200}"
        ) from None


def _parse(text: str) -> ast.Module:
    """Parse a row's text; return an empty module if it is not valid Python."""
    try:
        tree: ast.Module = _valid("text", text, ast.parse, text)
    except RowError:
        return ast.Module([], [])
    return tree


def names_defined(text: str) -> set[str]:
    """Names that a row's text binds at the top level, apart from imports.

    Never pass a completion: parsing untrusted code can crash this process.
    """
    try:
        table = _valid("text", text, symtable.symtable, text, "<row>", "exec")
    except RowError:
        return set()
    return {s.get_name() for s in table.get_symbols() if s.is_assigned() and not s.is_imported()}


def _tests(node: ast.ClassDef, entries: set[str]) -> bool:
    """Whether a class of the setup tests the program, which then must not see it."""
    return bool(entries & _Words([node]).read) or any(
        "TestCase" in ast.unparse(b) for b in node.bases
    )


@lru_cache(maxsize=4096)
def context_of(spec: JudgeSpec, prompt: str) -> tuple[str, ...]:
    """The row's definitions that programs are written for, and may use without repeating them.

    These are the setup's imports and classes, what the row's own answer reads from the setup, and
    everything in the prompt but the entry point.
    """
    read = _Words([_parse(spec.reference)]).read
    entries = {spec.entry_point} if spec.entry_point else names_defined(spec.reference)
    nodes: list[ast.stmt] = [
        node
        for node in _parse(spec.setup).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.ClassDef) and not _tests(node, entries))
        or read & names_defined(ast.unparse(node))
    ]
    return tuple(
        dict.fromkeys(
            [
                text
                for text in [ast.unparse(node) for node in [*nodes, *_parse(prompt).body]]
                if spec.entry_point not in names_defined(text)
            ]
        )
    )


def describe(error: BaseException | None) -> str:
    """Class and text of an error, at most 500 characters."""
    try:
        text = str.__str__(str(error))
    except BaseException:  # a class of the program may define __str__
        text = ""
    described = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return described[:500].encode("utf-8", "backslashreplace").decode()
