"""Small changes of a Python file that resemble bugs; `tools.mutants` runs the tests on them."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# files that need nvcc or a GPU
SKIPPED_FILES = ("build_cuda", "inspect", "cuda")
# types, log lines, methods that every class implements
SKIPPED_CODE = (b"if TYPE_CHECKING", b"logger.", b"raise NotImplementedError")
Lines = tuple[int, int]


class Change(NamedTuple):
    """New code for a part of a module."""

    scope: str  # qualified name of the enclosing function or class
    before: str
    after: str  # or a description of it
    new: str
    start: int
    end: int
    lines: Lines  # first and last line of the statement
    around: tuple[Lines, ...]  # lines of the enclosing functions and classes, inner first


COMPARISONS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type, tuple[type, ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.BitOr: (ast.BitAnd,),
    ast.BitAnd: (ast.BitOr,),
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# keywords that change only texts, or nothing unless another bug exists
IGNORED = ("encoding", "help", "metavar", "source", "strict", "summary", "title")


def changes(text: str) -> list[Change]:
    """All changes of a module's text."""
    walk = _Walk(text)
    walk.block(ast.parse(text).body)
    return walk.changes


def _with(node: Any, **fields: Any) -> Any:
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


def _expressions(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yield (replacement, description) of an expression.

    An empty description means that the code of the replacement is shown instead.
    """
    match node:
        case ast.Compare(ops=[operator]):
            for other in COMPARISONS[type(operator)]:
                yield _with(node, ops=[other()]), ""
        case ast.BinOp(left=left, op=operator, right=right) if not any(
            map(_is_text, (left, right))
        ):
            for other in ARITHMETIC.get(type(operator), ()):
                yield _with(node, op=other()), ""
        case ast.BoolOp(op=operator, values=values):
            yield _with(node, op=ast.Or() if isinstance(operator, ast.And) else ast.And()), ""
            for i, value in enumerate(values):
                rest = values[:i] + values[i + 1 :]
                new = rest[0] if len(rest) == 1 else _with(node, values=rest)
                yield new, f"without {ast.unparse(value)}"
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand, ""
        case ast.IfExp(body=body, orelse=orelse):
            yield _with(node, body=orelse, orelse=body), "swap the two values"
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value), ""
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1), ""
            if isinstance(value, int):
                yield ast.Constant(value - 1) if value else ast.Name("-1"), ""
        case ast.Slice():
            yield from _slices(node)
        case ast.Call():
            yield from _calls(node)


def _slices(node: ast.Slice) -> Iterator[tuple[ast.expr, str]]:
    for field in ("lower", "upper"):
        bound = getattr(node, field)
        if bound is not None and not isinstance(bound, ast.Constant):
            yield _with(node, **{field: ast.BinOp(bound, ast.Add(), ast.Constant(1))}), ""


def _calls(node: ast.Call) -> Iterator[tuple[ast.expr, str]]:
    """Replacements of a call."""
    function, arguments, keywords = node.func, node.args, node.keywords
    name = getattr(function, "attr", getattr(function, "id", ""))
    if name in NAMES:
        field = "attr" if isinstance(function, ast.Attribute) else "id"
        yield _with(node, func=_with(function, **{field: NAMES[name]})), NAMES[name]
    elif name != "isinstance":
        for i in range(len(arguments) - 1):
            swapped = [arguments[i + 1], arguments[i]]
            if not any(map(_is_text, swapped)) and len({*map(ast.dump, swapped)}) == 2:
                new = _with(node, args=arguments[:i] + swapped + arguments[i + 2 :])
                yield new, f"swap to {', '.join(map(ast.unparse, swapped))}"
    for i, keyword in enumerate(keywords):
        if keyword.arg and keyword.arg not in IGNORED:
            new = _with(node, keywords=keywords[:i] + keywords[i + 1 :])
            yield new, f"without {keyword.arg}"


def _is_text(node: ast.expr) -> bool:
    constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return constant or isinstance(node, ast.JoinedStr)


def _droppable(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Constant()):  # docstring
            return False
        case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Delete():
            return True
        case ast.Return(value=None):
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
    return False


class _Walk:
    def __init__(self, text: str) -> None:
        self.text = text
        self.changes: list[Change] = []
        self.scopes: list[tuple[str, Lines]] = []
        self.lines: Lines = (1, 1)
        rows = text.splitlines(keepends=True)
        self.rows = [row.encode() for row in rows]  # columns are in bytes
        self.starts = [0, *itertools.accumulate(map(len, rows))]

    def offset(self, row: int, column: int) -> int:
        return self.starts[row - 1] + len(self.rows[row - 1][:column].decode())

    def add(self, node: Any, new: str, after: str = "") -> None:
        start = self.offset(node.lineno, node.col_offset)
        end = self.offset(node.end_lineno, node.end_col_offset)
        scope = ".".join(name for name, _ in self.scopes)
        around = tuple(lines for _, lines in reversed(self.scopes))
        before = " ".join(self.text[start:end].split())
        self.changes.append(
            Change(scope, before, after or new, new, start, end, self.lines, around)
        )

    def block(self, body: list[Any]) -> None:
        for node in body:
            self.statement(node)

    def statement(self, node: Any) -> None:
        code = self.rows[node.lineno - 1][node.col_offset :].lstrip()
        skipped = isinstance(node, (ast.Import, ast.ImportFrom, ast.Assert))
        if skipped or code.startswith(SKIPPED_CODE):
            return
        if isinstance(node, SCOPES):
            self.scope(node)
            return
        body = getattr(node, "body", None)
        last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno
        self.lines = (node.lineno, last)
        if _droppable(node):
            self.add(node, "pass")
        if isinstance(node, (ast.If, ast.While)) and not isinstance(
            node.test, (ast.Compare, ast.UnaryOp)
        ):
            test = f"not ({ast.unparse(node.test)})"
            self.add(node.test, f"({test})", test)
        if not isinstance(node, ast.Raise):
            for field, value in ast.iter_fields(node):
                if field != "annotation":
                    for child in value if isinstance(value, list) else [value]:
                        self.part(child)

    def scope(self, node: Any) -> None:
        self.scopes.append((node.name, (node.lineno, node.end_lineno)))
        self.lines = (node.lineno, node.lineno)
        if not isinstance(node, ast.ClassDef):
            for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                self.expression(default)
        self.block(node.body)
        self.scopes.pop()

    def part(self, node: Any) -> None:
        """Change one field of a statement."""
        match node:
            case ast.stmt():
                self.statement(node)
            case ast.ExceptHandler() | ast.match_case():
                self.block(node.body)
            case ast.withitem():
                self.expression(node.context_expr)
            case ast.expr():
                self.expression(node)

    def expression(self, node: Any) -> None:
        if isinstance(node, ast.JoinedStr):  # Python 3.11 has no positions in it
            return
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and not self.scopes:
            return  # a type
        if hasattr(node, "lineno"):
            for new, after in _expressions(node):
                text = ast.unparse(ast.fix_missing_locations(new))
                bare = isinstance(node, (ast.Call, ast.Slice, ast.Constant))
                self.add(node, text if bare else f"({text})", after or text)
        for child in ast.iter_child_nodes(node):
            if isinstance(node, ast.Lambda) and isinstance(child, ast.arguments):
                continue
            if isinstance(child, ast.keyword) and child.arg in IGNORED:
                continue
            self.expression(child)


class Mutant(NamedTuple):
    """A change of one expression or statement of a file."""

    module: str
    path: str
    line: int
    number: int  # number among the same changes in the same scope
    change: Change

    @property
    def key(self) -> str:
        """Name that is stable when other lines of the file change."""
        change = self.change
        number = f" #{self.number}" if self.number > 1 else ""
        return f"{self.path} {change.scope}{number}: {change.before} -> {change.after}"

    def rank(self, seed: int) -> str:
        """Rank of the mutant; a sample consists of the mutants with the lowest ranks."""
        return hashlib.sha256(f"{seed} {self.key}".encode()).hexdigest()

    def text(self) -> str:
        """Text of the changed file."""
        text = Path(self.path).read_text()
        return text[: self.change.start] + self.change.new + text[self.change.end :]

    def compiles(self) -> bool:
        """Whether the change is valid Python."""
        with contextlib.suppress(SyntaxError):
            compile(self.text(), self.path, "exec")
            return True
        return False


def all_mutants(module: str) -> list[Mutant]:
    """All mutants of a module: gac_kernels, or a package of gac."""
    mutants = []
    folder = Path(module) if module == "gac_kernels" else Path("gac") / module
    for path in sorted(folder.rglob("*.py")):
        if path.name.startswith(SKIPPED_FILES):
            continue
        text = path.read_text()
        counts: Counter[tuple[str, str, str]] = Counter()
        for change in changes(text):
            counts[change[:3]] += 1
            line = text.count("\n", 0, change.start) + 1
            mutants.append(Mutant(module, str(path), line, counts[change[:3]], change))
    return mutants


def draw(module: str, seed: int) -> Iterator[Mutant]:
    """The mutants of a module in random order."""
    mutants = sorted(all_mutants(module), key=lambda mutant: mutant.rank(seed))
    return (mutant for mutant in mutants if mutant.compiles())
