"""Mutants of the C++ and CUDA sources; `tools.mutants` runs the tests of the kernels on them.

A mutant of csrc/cpu recompiles only the objects that include its file, with the flags of setup.py.
The tests compile csrc/cuda themselves, for emulated threads. A mutant that does not compile is
discarded.
"""

from __future__ import annotations

import itertools
import os
import re
import runpy
import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tools.mutant_server import Plugin, Server, pytest_run, read_results, read_triage
from tools.mutations import Change, Mutant

# groups of test files, quick ones first; a process runs each group
TESTS = {
    "csrc/cpu": (
        "native",
        "extremes options loss token_outputs",
        "batch sketch moments native_library filter vocab_parallel",
    ),
    "csrc/cuda": ("cuda_source cuda_order cuda_sketch", "extremes loss options"),
}
# not the tests of other backends, nor those that change the sources
SELECTED = {
    "csrc/cpu": "not triton and not cuda and not broken and not meet_their_limits",
    "csrc/cuda": "cuda",
}
# setup.py stores a hash of native.h; the others need a GPU, or are the emulator
SKIPPED_FILES = ("native.h", "hopper.h", "emulated.h")
LIMIT = 300.0  # seconds of tests per group

# no code to change: comments, texts, preprocessor lines, assertions, lists of template parameters
IGNORED = re.compile(
    r"//.*|/\*.*?\*/|\"(?:\\.|[^\"\n])*\"|^[ ]*#.*(?:(?<=\\)\n.*)*|\bstatic_assert\([^;]*;"
    r"|\btemplate <[^>]*>|\benum [^;]*;",
    re.MULTILINE,
)
FUNCTION = re.compile(
    r"^ {0,2}(?!return|else)(?:[\w:<>*&]+ )+[*&]?(\w+|operator\W+)\((?!.*;$)", re.MULTILINE
)
STATEMENT = re.compile(
    r"(?:^[ ]*|\) |else )((?:(?:[\w.>*+]|::|->|\[[^]]*\]|\([^()]*\))+(?:[ ][-+*/|^]?=[ ][^;{]*"
    r"|\([^;{]*\))|break|continue|return);)",
    re.MULTILINE,
)
NUMBER = re.compile(r"(?<![\w.])(?:0x[\da-f.]+(?:p[-+]?\d+)?|\d+\.?\d*(?:e[-+]?\d+)?)[fu]?\b", re.I)
# each operator, then its replacements
OPERATORS = """< <= >=, <= < >, > >= <=, >= > <, == !=, != ==, + -, - +, * /, / *, % /, += -=,
-= +=, *= /=, & |, | &, << >>, >> <<, && ||, || &&"""
REPLACEMENTS = {first: rest for first, *rest in map(str.split, OPERATORS.split(","))}
WORDS = {"true": "false", "false": "true", "min": "max", "max": "min", "fmaxf": "fminf"}
TOKEN = re.compile(r"&&|\|\||::|->|[-+*/|&^<>=!]=|\bif constexpr\b|[\w.]+|\S")
ENDS = {";", ",", "?", ":", "&&", "||", "=", "+=", "|=", "return"}
CALLED = re.compile(r"(?!(?:for|smaller|min|fmaxf)$)[\w.]+|>")  # the others are symmetric


def changes(text: str) -> Iterator[tuple[int, int, str, str]]:
    """Yield (start, end, new, description) of each change.

    An empty description means that the new code is shown instead.
    """
    code = IGNORED.sub(lambda match: re.sub(r"\S", " ", match[0]), text)
    for match in re.finditer(r"(?<!\S)(?=(\S+\s+)([-+*/%&|<>=!]{1,2})(\s+\S+))", code):
        for other in REPLACEMENTS.get(match[2], ()):
            yield match.start(1), match.end(3), match.expand(rf"\1{other}\3"), ""
    for match in re.finditer(r"(?<=[\s(\[{!])(?:!|-)(?=[\w(])", code):
        yield *match.span(), "", "nothing"
    for match in NUMBER.finditer(code):
        for sign in "+-" if match[0].isdigit() else "+":
            yield *match.span(), f"({match[0]} {sign} 1)", ""
    for match in re.finditer(rf"(?<![\w.])(?:{'|'.join(WORDS)})\b", code):
        yield *match.span(), WORDS[match[0]], ""
    for match in STATEMENT.finditer(code):
        yield *match.span(1), "{}", "nothing"
    tokens = list(TOKEN.finditer(code))
    for i, token in enumerate(tokens):
        if token[0] in ("if", "if constexpr", "while"):
            start, end = tokens[i + 1].end(), tokens[_last(tokens, i + 1, 1, set())].end()
            yield start, end, f"!({text[start:end]})", "negated"
        elif token[0] in ("&&", "||"):
            start, end = tokens[_last(tokens, i, -1, ENDS)].start(), tokens[i + 1].start()
            yield start, end, "", "nothing"
            yield tokens[i - 1].end(), tokens[_last(tokens, i, 1, ENDS)].end(), "", "nothing"
        elif token[0] == "?":
            colon = _last(tokens, i, 1, {":"}) + 1
            end = tokens[_last(tokens, colon, 1, {";", ","})].end()
            spans = (token.end(), tokens[colon].start()), (tokens[colon].end(), end)
            yield from _swap(text, *spans)
        elif token[0] == "(" and CALLED.fullmatch(tokens[i - 1][0]):
            yield from _swapped_arguments(text, tokens, i)


def _last(tokens: list[re.Match[str]], i: int, step: int, ends: set[str]) -> int:
    """Index of the last token of the expression that follows token i.

    With `step` -1: index of the first token of the expression that precedes token i.
    """
    opening, closing = ("([{", ")]}")[::step]
    depth = 0
    for j in itertools.count(i + step, step):
        depth -= tokens[j][0] in closing
        if depth < 0 or (depth == 0 and tokens[j][0] in ends):
            return j - step
        depth += tokens[j][0] in opening
    raise AssertionError


def _swap(text: str, *spans: tuple[int, int]) -> Iterator[tuple[int, int, str, str]]:
    (a, b), (c, d) = spans
    yield a, d, text[c:d] + text[b:c] + text[a:b], "swapped"


def _swapped_arguments(
    text: str, tokens: list[re.Match[str]], i: int
) -> Iterator[tuple[int, int, str, str]]:
    spans = []
    while tokens[i][0] != ")":
        first, i = i + 1, _last(tokens, i, 1, {","}) + 1
        spans.append((tokens[first].start(), tokens[i - 1].end()))
    declared = any(re.match(r"(const )?[\w:<>]+[*&]* \w|\[&\]", text[a:b]) for a, b in spans)
    for pair in [] if declared else itertools.pairwise(spans):
        yield from _swap(text, *pair)


def all_mutants(module: str) -> list[Mutant]:
    """All mutants of a folder; those of csrc/token_math.h belong to csrc/cpu."""
    paths = [*Path(module).glob("*.h"), *Path(module).glob("*.cpp"), Path("csrc/token_math.h")]
    mutants = []
    for path in sorted(paths) if module == "csrc/cpu" else sorted(Path(module).glob("*.h")):
        if path.name in SKIPPED_FILES:
            continue
        text = path.read_text()
        functions = [(0, ""), *((m.start(), m[1]) for m in FUNCTION.finditer(text))]
        counts = Counter[tuple[str, str, str]]()
        for start, end, new, after in changes(text):
            scope = [name for position, name in functions if position <= start][-1]
            before = " ".join(text[start:end].split())
            name = scope, before, after or new
            counts[name] += 1
            line = text.count("\n", 0, start) + 1
            change = Change(*name, new, start, end, (line, line), ())
            mutants.append(Mutant(module, str(path), line, counts[name], change))
    return mutants


class NativeServer(Server):
    """Compiles each mutant and forks a process that runs the tests."""

    def sample(self, module: str) -> None:
        """Run sampled mutants without a result or, with --again, all untriaged survivors."""
        latest = {record["key"]: record for record in read_results(self.root)}
        alive = {key for key, r in latest.items() if r["outcome"] in self.options.again}
        alive -= read_triage(self.root).keys()
        self.objects = self.temporary.parent / "objects"
        self.objects.mkdir(exist_ok=True)
        with mock.patch("setuptools.setup"):
            self.setup = runpy.run_path("setup.py")
        began = time.monotonic()
        assert self.compile(module, self.setup["SOURCES"], self.objects)
        print(f"compiled in {time.monotonic() - began:.1f} s", flush=True)
        status, _, by = self.test(module)
        assert status == 0, f"the tests fail without a mutant: {by}"
        print(f"compiled and tested in {time.monotonic() - began:.1f} s", flush=True)
        count = 0
        for mutant in sorted(all_mutants(module), key=lambda m: m.rank(self.options.seed)):
            if self.options.again and mutant.key not in alive:
                continue
            if self.options.again or mutant.key not in latest:
                if not self.build(mutant):
                    continue
                self.record(mutant, {})
            count += 1
            if count >= self.options.sample and self.options.again != "survived":
                break
        # without a mutant, for the modules that follow
        assert self.compile(module, self.setup["SOURCES"], self.objects)

    def compile(self, module: str, names: Any, folder: Path) -> bool:
        """Compile some objects of csrc/cpu and link them with the others, or check csrc/cuda."""
        if module == "csrc/cuda":
            check = "g++ -std=c++20 -fsyntax-only -Wall -Wextra -Werror -Wno-unknown-pragmas"
            commands = [[*check.split(), "csrc/cuda/emulate.cpp"]]
        else:
            compiler, flags = shlex.split(os.environ.get("CXX", "c++")), self.setup["FLAGS"]
            flags = [*flags, "-MMD", f'-DGAC_INTERFACE="{self.setup["INTERFACE"]}"', "-c"]
            sources = self.setup["SOURCES"]
            commands = [
                [*compiler, *flags, *sources[n], f"csrc/cpu/{n}.cpp", "-o", f"{folder / n}.o"]
                for n in names
            ]
            objects = [f"{(folder if n in names else self.objects) / n}.o" for n in sources]
            commands.append([*compiler, "-shared", *objects, "-o", "gac_kernels/_native.so"])
        run = partial(subprocess.run, capture_output=True, check=False)
        return all(run(command).returncode == 0 for command in commands)

    def build(self, mutant: Mutant) -> bool:
        """Compile everything that includes the mutant's file; returns whether that succeeded."""
        path, objects = Path(mutant.path), self.objects.with_name("changed")
        objects.mkdir(exist_ok=True)
        names = [d.stem for d in self.objects.glob("*.d") if f"/{path.name}" in d.read_text()]
        text = path.read_text()
        try:
            path.write_text(mutant.text())
            return self.compile(mutant.module, names, objects)
        finally:
            path.write_text(text)

    def run(self, mutant: Mutant, _: Any) -> dict[str, Any]:
        """Result of the tests on a mutant that was built."""
        path, began = Path(mutant.path), time.monotonic()
        text = path.read_text()
        try:
            path.write_text(mutant.text())
            status, count, by = self.test(mutant.module)
        finally:
            path.write_text(text)
        record = {"module": mutant.module, "key": mutant.key, "seed": self.options.seed}
        record |= {"tests": count} | ({"again": True} if self.options.again else {})
        record |= {"by": by} if status else {}
        outcome = "killed" if status else "survived"  # also if it is None, after the deadline
        return record | {"outcome": outcome, "seconds": round(time.monotonic() - began, 1)}

    def test(self, module: str) -> tuple[int | None, int, str]:
        """Run a folder's tests; return the exit status, the number of tests and the failed one."""
        total = 0
        for group in TESTS[module]:
            self.failed.unlink(missing_ok=True)
            status, _ = self.fork(partial(run_tests, group, SELECTED[module], self.failed), LIMIT)
            count, *failed = self.failed.read_text().split("\n") if self.failed.exists() else ["0"]
            total += int(count)
            if status != 0:
                return status, total, failed[0] if failed else f"status {status}"
        return 0, total, ""


def run_tests(group: str, selected: str, failed: Path) -> int:
    """Run test files until a test fails; write the number of tests and the failure to `failed`."""
    plugin = Plugin()
    files = [f"tests/kernels/test_{name}.py" for name in group.split()]
    limit = ["--timeout=60", "--timeout-method=thread"]
    status = pytest_run(files, plugin, "-x", "-k", selected, *limit)
    failed.write_text("\n".join([str(len(plugin.seconds)), *plugin.failed]))
    return status
