"""The code reward: 1 if the completion's program passes the row's tests."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import is_count
from ..sandbox.pool import JudgeSpec, Pool, Program, RunResult, SandboxError
from ..sandbox.row import context_of, names_defined
from .base import Reward, RowOutcome
from .capacity import workers_that_fit

if TYPE_CHECKING:
    from ..data import Example

# Possessive quantifiers keep every pattern that sees a completion linear in its length.
_FENCE = re.compile(r"([ \t]*+(?:(?:[-*+]|\d{1,3}[.)])[ \t]++)?)(`{3,}+|~{3,}+)([^`\n]*+)$")
_PYTHON = re.compile(r"\W*py(?:thon)?\s*[\d.]*(?![a-z])", re.IGNORECASE)
_COUNTED = {"timeout": "timeouts", "stalled": "stalled", "crash": "crashes"}
_CONSTANTS = ("None", "0", "1", "True", "False", "''", "[]")
_SPARE_OUTPUT = 1 << 16  # bytes allowed beyond the expected output, for trailing white space


@cache
def _shared_pool(workers: int, preload: tuple[str, ...], require: tuple[str, ...]) -> Pool:
    """One pool per configuration, so that training and evaluation share worker processes."""
    return Pool(workers=workers, preload=preload, require=require)


@dataclass(frozen=True)
class Case:
    """One test case for a script: standard input and expected standard output."""

    stdin: bytes
    stdout: bytes


@dataclass(frozen=True)
class TestSpec:
    """The tests or input/output cases that a row's program must pass."""

    suite: JudgeSpec | None
    cases: tuple[Case, ...]
    prompt: str
    """Code that the program may continue, or ""."""


class CodeReward(Reward):
    """1 if the completion's program passes all of the row's tests, else 0.

    The program is the last fenced code block of the completion, or the whole completion if there is
    none. If it does not define the row's entry point, it is treated as a continuation of the row's
    prompt. The program runs in sandboxed processes that can only compute (`docs/sandbox.md`) and
    never sees the tests. A row holds either `tests` or `cases`. `tests` are Python statements that
    use the program's names and run in order after `setup`. `cases` are pairs of standard input and
    expected output; trailing white space and trailing empty lines are ignored, but output of more
    than twice the expected size and 64 KiB fails. A row that no
    program could pass is an error if this can be shown without a program (its setup fails, its
    tests are not valid Python, a field is missing) or by running the row's own answer. Every
    failure that a program can cause scores 0.

    Args:
        timeout: CPU-time limit of a program, or of each case, in whole seconds. The wall-clock
            limit is four times as long, not counting time spent waiting for a core; counting that
            time, it is forty times as long.
        memory_mb: memory limit of a program in MiB, on top of Python and the preloaded packages.
        partial: reward the fraction of tests or cases passed instead of all or nothing.
        workers: number of programs run concurrently; None: available cores divided by the ranks on
            this machine.
        preload: packages that programs may import in addition to the standard library.
        require: protection layers to require in addition to seccomp and resource limits: landlock,
            uid, namespaces.
        tests_field: row field with a list of Python statements (a string counts as one).
        setup_field: row field with imports and helpers for the tests.
        entry_point_field: row field with the name under test, e.g. the function passed to
            `check(candidate)`.
        cases_field: row field with a list of [stdin, expected stdout] pairs.
        prompt_field: row field with the prompt, which may be code to continue.

    Raises:
        ValueError: invalid option, or programs cannot be run safely on this machine.
    """

    name = "code"

    def __init__(
        self,
        *,
        timeout: int = 5,
        memory_mb: int = 512,
        partial: bool = False,
        workers: int | None = None,
        preload: Sequence[str] = (),
        require: Sequence[str] = (),
        tests_field: str = "tests",
        setup_field: str = "setup",
        entry_point_field: str = "entry_point",
        cases_field: str = "cases",
        prompt_field: str = "prompt",
    ) -> None:
        for option, value, least in (("timeout", timeout, 1), ("memory_mb", memory_mb, 64)):
            if not is_count(value, least):
                raise ValueError(f"{option} must be an integer >= {least}, got {value!r}")
        for option, names in (("preload", preload), ("require", require)):
            if isinstance(names, str) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"{option} must be a list of names, got {names!r}")
        self._limits = timeout, memory_mb
        self._partial = partial
        self._tests_field, self._setup_field = tests_field, setup_field
        self._entry_point_field, self._cases_field = entry_point_field, cases_field
        self._prompt_field = prompt_field
        self._references: dict[JudgeSpec, _Reference] = {}
        self._counts = Counter(timeouts=0, stalled=0, crashes=0, no_program=0)
        # a program with tests has two processes
        count = workers_that_fit(workers, 2 * memory_mb)
        self._pool = _shared_pool(count, tuple(preload), tuple(require))
        try:
            self._pool.start()
        except SandboxError as error:
            raise ValueError(f"reward 'code': {error}") from error

    def outcomes(
        self, completions: Sequence[str], examples: Sequence[Example]
    ) -> Sequence[RowOutcome]:
        outcomes: list[RowOutcome] = [0.0] * len(completions)
        wanted: dict[int, tuple[str, TestSpec]] = {}
        for row, (completion, example) in enumerate(zip(completions, examples, strict=True)):
            program = program_of(self.graded(completion, example))
            try:
                task = self._task(example)
            except ValueError as error:
                outcomes[row] = error
                continue
            if program.strip():
                wanted[row] = program, task
            else:
                self._counts["no_program"] += 1
        # rollouts of a prompt often share a program
        distinct = list(dict.fromkeys(wanted.values()))
        graded = dict(zip(distinct, self._pool.map(self._grade, distinct), strict=True))
        for row, pair in wanted.items():
            outcomes[row], event = graded[pair]
            if event:
                self._counts[event] += 1
        return outcomes

    def counts(self) -> dict[str, int]:
        """Number of completions so far whose program did not run to its end, by cause.

        The program exceeded the CPU limit (`timeouts`) or the wall-clock limit (`stalled`), was
        killed by a signal (`crashes`) or was empty (`no_program`).
        """
        return dict(self._counts)

    def explain(self, completion: str, example: Example) -> str:
        """Describe the program's first failure in one line."""
        program = program_of(self.graded(completion, example))
        task = self._task(example)
        if task.suite is not None:
            ran = self._check(program, task, task.suite)
            return f"{ran.problem or 'no verdict'} ({ran.ending})"
        for number, case in enumerate(task.cases, start=1):
            ran = self._run_case(Program(program), case)
            if not _is_correct(ran, case):
                wrote = f"wrote {ran.stdout!r:.200}, expected {case.stdout!r:.200}"
                return f"case {number} ({case.stdin!r:.80}): {wrote} ({ran.ending}, {ran.status})"
        return ""

    def trivial(self, example: Example) -> dict[str, str]:
        """The empty program, and programs whose functions return a constant or print it."""
        task, empty = self._task(example), {"an empty program": "pass"}
        if task.suite is None:
            return empty | {f"print({c})": f"print({c})" for c in _CONSTANTS}
        names = {task.suite.entry_point} - {""} or names_defined(task.suite.reference)
        return empty | {
            f"a program that always returns {c}": "\n".join(
                f"def {name}(*a, **k): return {c}" for name in sorted(names)
            )
            for c in _CONSTANTS
        }

    def close(self) -> None:
        """Stop the worker processes.

        All code rewards with the same `workers`, `preload` and `require` share them.
        """
        self._pool.close()

    def _task(self, example: Example) -> TestSpec:
        """Read the row's tests or cases.

        Raises:
            ValueError: a field is missing or malformed; the message names it.
        """
        tests = _field(example, self._tests_field)
        cases = _field(example, self._cases_field)
        if (tests is None) == (cases is None):
            state = "neither" if tests is None else "both"
            raise ValueError(
                f"the row needs exactly one of the fields {self._tests_field!r} and "
                f"{self._cases_field!r}, but has {state}; set tests_field or cases_field to the "
                f"field with the tests (all fields: {', '.join(sorted(example.extra)) or 'none'})"
            )
        if cases is not None:
            return TestSpec(None, _cases(self._cases_field, cases), "")
        tests = [tests] if isinstance(tests, str) else tests
        good = isinstance(tests, list | tuple) and all(
            isinstance(test, str) and test.strip() for test in tests
        )
        if not tests or not good:
            expected = "a non-empty list of Python statements"
            raise ValueError(f"{self._tests_field!r} must be {expected}, got {tests!r:.80}")
        entry_point = self._text(example, self._entry_point_field)
        if entry_point and not entry_point.isidentifier():
            raise ValueError(
                f"{self._entry_point_field!r} must be a Python identifier, got {entry_point!r}"
            )
        setup = self._text(example, self._setup_field)
        prompt = _field(example, self._prompt_field)  # messages define no function
        if not isinstance(prompt, str) or entry_point not in names_defined(prompt):
            prompt = ""
        reference = program_of(example.answer or "")
        return TestSpec(
            JudgeSpec(
                tuple(tests),
                setup or prompt,
                entry_point,
                reference,
                self._partial,
                returns=not reference.strip(),  # see `_reference`
            ),
            (),
            prompt,
        )

    def _text(self, example: Example, field: str) -> str:
        value = _field(example, field)
        if value is not None and not isinstance(value, str):
            raise ValueError(
                f"{field!r} must be a string, got {type(value).__name__} {value!r:.60}"
            )
        return value or ""

    def _grade(self, pair: tuple[str, TestSpec]) -> tuple[RowOutcome, str]:
        """Return a program's reward and the name of the counter to increment ("" for none)."""
        text, task = pair
        if task.suite is None:
            return self._run_cases(Program(text), task.cases)
        ran = self._check(text, task, task.suite)
        if (ran.row_problem or not all(ran.passed)) and task.suite.reference.strip():
            known = self._reference(task, task.suite)
            if known.problem:
                event = _COUNTED.get(ran.ending, "")
                return RowProblem(f"the row's own answer fails: {known.problem}"), event
            if known.suite != task.suite:
                ran = self._check(text, task, known.suite)
        if ran.row_problem:
            return RowProblem(ran.row_problem), ""
        return self._score(ran.passed), _COUNTED.get(ran.ending, "")

    def _check(self, text: str, task: TestSpec, suite: JudgeSpec) -> RunResult:
        context = context_of(suite, task.prompt)
        return self._pool.check(
            Program(text, context, task.prompt, suite.entry_point), suite, *self._limits
        )

    def _reference(self, task: TestSpec, suite: JudgeSpec) -> _Reference:
        """Run the row's own answer, which shows what the row needs, or that it is at fault.

        A program alone cannot show that: it may have been written to make the tests fail in this
        way.
        """
        if suite not in self._references:
            for needed in (suite, replace(suite, returns=True)):
                ran = self._check(suite.reference, task, needed)
                failed = ran.problem or f"it ended with a {ran.ending}"
                # how long a program takes depends on the machine: being slow shows nothing
                good = all(ran.passed) or ran.ending in ("timeout", "stalled")
                problem = ran.row_problem or ("" if good else failed)
                if not problem:
                    break
            self._references[suite] = _Reference(suite if problem else needed, problem)
        return self._references[suite]

    def _run_cases(self, program: Program, cases: Sequence[Case]) -> tuple[RowOutcome, str]:
        passed = [False] * len(cases)
        event = ""
        for number, case in enumerate(cases):
            ran = self._run_case(program, case)
            event = event or _COUNTED.get(ran.ending, "")
            passed[number] = _is_correct(ran, case)
            # stop here, so that an endless program uses up its time limit only once
            if ran.ending in ("timeout", "stalled") or not (passed[number] or self._partial):
                break
        return self._score(passed), event

    def _run_case(self, program: Program, case: Case) -> RunResult:
        # one byte beyond the limit shows that the script has exceeded it
        return self._pool.run(program, case.stdin, *self._limits, _max_output(case) + 1)

    def _score(self, passed: Sequence[bool]) -> float:
        return sum(passed) / len(passed) if self._partial else float(all(passed))


class _Reference(NamedTuple):
    """How to run the tests so that the row's own answer passes, or why it fails."""

    suite: JudgeSpec
    problem: str


class RowProblem(ValueError):
    """Raised for a row that no program could pass."""


def program_of(completion: str) -> str:
    """The last code block marked as Python, else the last code block, else all of `completion`.

    A block may be indented, as in a list, and its end may be missing. A fence that is indented
    further than the block's own belongs to its text.
    """
    last = last_python = None
    fence: _Fence | None = None
    block: list[str] = []
    for line in [*completion.splitlines(keepends=True), ""]:
        mark = _fence(line)
        if fence is None:
            fence, block = mark, []
            continue
        closes = not line or (mark and _closes(mark, fence))
        # a new block begins inside one of another language, whose end is missing
        begins = mark and mark.info and fence.info and not _PYTHON.match(fence.info)
        if closes or begins:
            last = "".join(block)
            if _PYTHON.match(fence.info):
                last_python = last
            fence, block = None if closes else mark, []
        else:
            block.append(_dedented(line, fence.indent))
    return next(text for text in (last_python, last, completion) if text is not None)


class _Fence(NamedTuple):
    """A line that may begin or end a code block: its indent in columns, marks and info string."""

    indent: int
    marks: str
    info: str


def _fence(line: str) -> _Fence | None:
    match = _FENCE.match(line)
    return match and _Fence(len(match[1].expandtabs()), match[2], match[3].strip())


def _closes(mark: _Fence, fence: _Fence) -> bool:
    return mark.indent <= fence.indent + 3 and not mark.info and mark.marks.startswith(fence.marks)


def _dedented(line: str, width: int) -> str:
    """Remove at most `width` leading columns of white space."""
    if not width:
        return line
    expanded = line.expandtabs() if line[:1] == "\t" else line
    return expanded[min(width, len(expanded) - len(expanded.lstrip(" "))) :]


def _field(example: Example, name: str) -> Any:
    value = example.extra.get(name)
    return None if value == "" or value == [] else value


def _cases(field: str, value: object) -> tuple[Case, ...]:
    pairs = value if isinstance(value, list | tuple) else ()
    good = all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(t, str) for t in pair)
        for pair in pairs
    )
    if not pairs or not good:
        packed = "; to unpack LiveCodeBench's tests, use examples/eval/livecodebench.py"
        raise ValueError(
            f"{field!r} must be a list of [stdin, expected stdout] pairs of strings, "
            f"got {value!r:.80}{packed if isinstance(value, str) else ''}"
        )
    return tuple(Case(given.encode(), expected.encode()) for given, expected in pairs)


def _max_output(case: Case) -> int:
    """The number of bytes that a script may write."""
    return 2 * len(case.stdout) + _SPARE_OUTPUT


def _is_correct(ran: RunResult, case: Case) -> bool:
    ended = ran.ending == "ended" and ran.status == 0
    if len(ran.stdout) > _max_output(case):
        return False
    return ended and _lines(ran.stdout) == _lines(case.stdout)


def _lines(output: bytes) -> list[bytes]:
    """Lines without trailing white space or trailing empty lines."""
    return [line.rstrip() for line in output.rstrip().splitlines()]
