"""The code reward: which program, which verdict, which row is at fault; real data sets; mutants."""

from __future__ import annotations

import ast
import gzip
import json
import sys
import warnings

import pytest

from gac.cli import main
from gac.data import DataConfig, Example
from gac.data.examples import load_references
from gac.rewards import RewardError, build_reward
from gac.rewards.check import check
from gac.rewards.code import program_of
from gac.sandbox.solver import assemble

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

GOOD = "def add(a, b):\n    return a + b\n"
BAD = "def add(a, b):\n    return a - b\n"
TESTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(-1, 1) == 0"]


def example(answer=None, **extra):
    return Example("row-7", (), "", answer, None, extra)


@pytest.fixture(scope="module")
def reward():
    reward = build_reward({"name": "code", "timeout": 5, "memory_mb": 256})
    yield reward
    reward.close()


def score(reward, completion, **row):
    return reward([completion], [example(**row)])[0]


def problem(reward, completion, **row):
    with pytest.raises(RewardError) as raised:
        score(reward, completion, **row)
    assert "'row-7'" in str(raised.value)
    return str(raised.value)


# --- which program --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("x = 1", "x = 1"),
        ("    return 1\n", "    return 1\n"),
        ("Look:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nx = 1\n```\nbetter:\n```py\nx = 2\n```", "x = 2\n"),
        ("~~~python\nx = '```'\n~~~", "x = '```'\n"),
        ("````\n```\nx = 1\n```\n````", "```\nx = 1\n```\n"),
        ("```python\nx = 1\n", "x = 1\n"),
        ("```python\n```", ""),
        ("use `x` and ``y``", "use `x` and ``y``"),
    ],
    ids=["all", "indented", "block", "last", "tildes", "longer", "unclosed", "empty", "inline"],
)
def test_the_program_is_the_last_block_else_everything(completion, program):
    assert program_of(completion) == program


PROMPT = 'import math\n\ndef area(r):\n    """The area."""\n'


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("    return math.pi * r\n", PROMPT + "    return math.pi * r\n"),
        ("    return 1\n\nprint(area(1))\n", PROMPT + "    return 1\n\n"),
        ("    return 1\n# done\ndef other(): pass\n", PROMPT + "    return 1\n# done\n"),
        ('    x = """\na\n"""\n    return x\nexit()', PROMPT + '    x = """\na\n"""\n    return x\n'),
        ("def area(r): return 2", "def area(r): return 2"),
        ("area = lambda r: 2", "area = lambda r: 2"),
    ],
    ids=["body", "statement after", "definition after", "text in column 0", "whole", "lambda"],
)
def test_a_program_without_the_entry_point_continues_the_prompt(program, text):
    assert assemble({"program": program, "entry_point": "area", "prompt": PROMPT}) == text


# --- verdicts -------------------------------------------------------------------------------------


def test_one_for_all_tests_else_zero(reward):
    answer = f"So:\n```python\n{GOOD}```"
    assert score(reward, answer, tests=TESTS) == 1.0
    assert score(reward, BAD, tests=TESTS) == 0.0
    assert score(reward, "no code at all", tests=TESTS) == 0.0


def test_partial_gives_the_share():
    reward = build_reward({"name": "code", "partial": True})
    assert score(reward, BAD, tests=TESTS) == pytest.approx(1 / 3)
    assert score(reward, "print(input())", cases=[["1", "1"], ["2", "3"]]) == 0.5


def test_setup_runs_before_the_tests_and_its_imports_before_the_program(reward):
    row = {"setup": "import math\ndef near(a, b): return abs(a - b) < 1e-6"}
    row["tests"] = ["assert near(area(1), math.pi)"]
    assert score(reward, "def area(r): return math.pi * r * r", **row) == 1.0
    faking = "def near(a, b): return True\ndef area(r): return 0"
    assert score(reward, faking, **row) == 0.0


def test_check_is_called_with_the_entry_point(reward):
    row = {"entry_point": "add", "tests": ["def check(candidate):\n    assert candidate(1, 2) == 3"]}
    assert score(reward, GOOD, **row) == 1.0
    assert score(reward, BAD, **row) == 0.0
    assert score(reward, "def other(): pass", **row) == 0.0


def test_a_function_with_a_builtin_name_is_the_programs_when_the_reference_says_so(reward):
    row = {"tests": ["assert sum(2, 3) == 6"], "answer": "def sum(a, b): return a * b"}
    assert score(reward, "def sum(a, b): return a * b", **row) == 1.0
    assert score(reward, "def total(a, b): return a * b", **row) == 0.0


def test_objects_of_the_program_are_used_where_they_are(reward):
    program = """
class Node:
    def __init__(self, data): self.data, self.left = data, None
    def __len__(self): return 3
    def __iter__(self): return iter([self.data, 2])
    def __getitem__(self, key): return key * 2
    def __str__(self): return f"<{self.data}>"
    def __bool__(self): return self.data > 0
def same(node): return node
def kinds(x, kind): return isinstance(x, kind)
limit = 10
"""
    tests = [
        "root = Node(1)\nroot.left = Node(5)\nassert root.left.data == 5",
        "assert len(root) == 3 and list(root) == [1, 2] and root[4] == 8 and str(root) == '<1>'",
        "assert same(root) == root and same(root) is not root.left and same(root.left) != root",
        "assert root and not Node(0)",
        "assert kinds(3, int) and limit == 10",
        "assert sorted(same({3, 1})) == [1, 3] and same((1, [2.5], {'a': b'b'})) == (1, [2.5], {'a': b'b'})",
    ]  # fmt: skip
    outcome = build_reward({"name": "code", "partial": True})
    assert score(outcome, program, tests=tests) == 1.0


def test_exceptions_cross_as_builtin_ones(reward):
    program = "class Mine(ValueError): pass\ndef f(x):\n    raise (Mine if x else KeyError)('no')"
    tests = [
        "try:\n    f(1)\nexcept ValueError as e:\n    assert str(e) == 'no'\nelse:\n    assert False",
        "try:\n    f(0)\nexcept KeyError as e:\n    assert e.args == ('no',)\nelse:\n    assert False",
    ]
    assert score(reward, program, tests=tests) == 1.0


def test_scripts_read_and_write(reward):
    cases = [["3\n", "6\n"], ["5\n", "10"]]
    double = "```python\nprint(int(input()) * 2)\n```"
    assert score(reward, double, cases=cases) == 1.0
    assert score(reward, "import sys\nsys.stdout.write(str(2 * int(sys.stdin.read())) + '  \\n\\n')",
                 cases=cases) == 1.0  # fmt: skip
    assert score(reward, "import os\nprint(2 * int(os.read(0, os.fstat(0).st_size)))",
                 cases=cases) == 1.0  # fmt: skip
    threaded = "import threading\ndef main(): print(2 * int(input()))\nthreading.Thread(target=main).start()"
    assert score(reward, threaded, cases=cases) == 1.0
    assert score(reward, "print(6)", cases=cases) == 0.0
    assert score(reward, "print(int(input()) * 2)\nraise ValueError", cases=cases) == 0.0
    assert score(reward, "print(int(input()) * 2)\nexit(0)", cases=cases) == 1.0
    assert score(reward, "print(int(input()) * 2)\nexit(3)", cases=cases) == 0.0
    main_guard = "if __name__ == '__main__':\n    print(open(0).read().strip() and 2 * int('3'))"
    assert score(reward, main_guard, cases=cases[:1]) == 1.0


def test_packages_are_there_when_they_are_preloaded():
    program = "import numpy as np\ndef f(x): return np.asarray(x).sum()"
    row = {"tests": ["assert f([1, 2]) == 3", "import random, numpy\nassert f(numpy.ones(3).tolist()) == 3"]}
    reward = build_reward({"name": "code", "preload": ["numpy"], "workers": 1})
    assert score(reward, program, **row) == 1.0
    reward.close()


# --- counts ---------------------------------------------------------------------------------------


def test_counts_tell_completions_and_equal_pairs_run_once(monkeypatch):
    reward = build_reward({"name": "code", "timeout": 1, "workers": 2})
    asked = []
    real = reward._pool.check
    monkeypatch.setattr(reward._pool, "check", lambda *a: asked.append(a) or real(*a))
    endless, crash = "while True: pass", "import ctypes\nctypes.string_at(0)"
    programs = [GOOD, GOOD, "```\n```", endless, endless, crash, "import time\ntime.sleep(60)"]
    rows = [example(tests=TESTS)] * len(programs)
    assert reward(programs, rows) == [1.0, 1.0] + [0.0] * 5
    assert len(asked) == 4
    counts = reward.counts()
    assert counts.pop("timeouts") + counts.pop("stalled") == 3  # a busy machine may stall the loop
    assert counts == {"crashes": 1, "no_program": 1}
    assert reward([GOOD], [example(tests=["assert add(1, 2) == 4"])]) == [0.0]  # other tests: anew
    assert len(asked) == 5


def test_an_endless_script_costs_its_limit_once():
    reward = build_reward({"name": "code", "timeout": 1, "partial": True})
    assert score(reward, "print(1, flush=True)\nif input(): \n  while True: pass",
                 cases=[["", "1"], ["a", "1"], ["b", "1"], ["c", "1"]]) == 0.0  # fmt: skip
    assert sum(reward.counts().values()) <= 1


# --- rows at fault --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "neither of the fields 'tests' and 'cases'"),
        ({"tests": []}, "neither of the fields"),
        ({"tests": TESTS, "cases": [["", ""]]}, "both of the fields"),
        ({"tests": [1]}, "'tests' must be a list of Python statements"),
        ({"cases": ["3"]}, "'cases' must be a list of [stdin, expected stdout]"),
        ({"cases": [["\ud800", ""]]}, "surrogates not allowed"),
        ({"tests": TESTS, "setup": 5}, "'setup' must be text, got int 5"),
        ({"tests": TESTS, "entry_point": "a.b"}, "'entry_point' must be a name"),
        ({"tests": ["assert add(1, 2) ="]}, "its test 1 is not Python: SyntaxError"),
        ({"tests": TESTS, "setup": "def ("}, "its setup is not Python"),
        ({"tests": TESTS, "setup": "1 / 0"}, "its setup fails: ZeroDivisionError"),
        ({"tests": TESTS, "setup": "import not_here"}, "its setup fails: ModuleNotFoundError"),
        ({"tests": ["import not_here\nassert add(1, 2) == 3"]}, "its test fails by itself"),
        ({"tests": ["assert add(object(), 2)"]}, "a value of type object does not cross"),
        ({"tests": ["assert ad(1, 2) == 3, add"], "answer": GOOD}, "name 'ad' is not defined"),
        ({"tests": ["assert 1 + 1 == 2"]}, "its tests use no name of the program"),
        ({"tests": ["def check(candidate): assert candidate"]}, "use no name of the program"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_a_row_that_no_program_could_pass_is_named(reward, row, words):
    assert words in problem(reward, GOOD, **row)


@pytest.mark.parametrize(
    "program",
    [
        "CONFIG = {}",
        "raise ImportError('not_here')",
        "def add(a, b): raise ModuleNotFoundError('x')",
        "def add(a, b): raise NameError('ad')",
        "def add(a, b): return object()",
        "def add(a, b): return add",
        "",
    ],
)
def test_a_program_cannot_blame_the_row(reward, program):
    row = {"setup": "value = CONFIG['a']"} if "CONFIG" in program else {}
    program += "\n#"
    assert score(reward, program, tests=["r = add(1, 2)", "assert r == 3", "add(r, r)"], **row) == 0.0


def test_on_error_drop_counts_the_row():
    reward = build_reward({"name": "code", "on_error": "drop"})
    rows = [example(tests=TESTS), example(tests=TESTS, setup="1 / 0")]
    assert reward([GOOD, GOOD], rows) == [1.0, None]
    assert reward.dropped == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout": 0}, "timeout must be a whole number >= 1, got 0"),
        ({"timeout": 1.5}, "timeout must be a whole number >= 1, got 1.5"),
        ({"memory_mb": 8}, "memory_mb must be a whole number >= 64, got 8"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"preload": "numpy"}, "preload must be a list of names"),
        ({"require": ["chains"]}, "require knows limits, seccomp, landlock, uid, namespaces"),
        ({"preload": ["not_here"]}, "preload: not_here cannot be imported"),
        ({"tests_filed": "t"}, "did you mean 'tests_field'"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        build_reward({"name": "code", **options})


# --- real data ------------------------------------------------------------------------------------

SETS = {
    "humaneval": ({}, 131),
    "mbpp": ({"setup_field": "test_setup_code"}, 779),
}


def references(data_dir, name, limit=None):
    config = DataConfig(prompts=str(data_dir / f"{name}.jsonl.gz"), limit=limit)
    return load_references(config)


def grade(name, pairs):
    reward = build_reward({"name": "code", "timeout": 10, **SETS[name][0]})  # mbpp/123 takes 3
    return reward([text for _, text in pairs], [example for example, _ in pairs])


@pytest.mark.parametrize("name", SETS)
def test_references_pass(data_dir, name):
    pairs = references(data_dir, name, limit=20)
    assert grade(name, pairs) == [1.0] * 20


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", SETS)
def test_all_references_pass(data_dir, name):
    pairs = references(data_dir, name)
    scores = grade(name, pairs)
    assert [example.id for (example, _), s in zip(pairs, scores, strict=True) if s != 1.0] == []
    assert len(scores) == SETS[name][1]


class Wrong(ast.NodeTransformer):
    """Every `return` gives a text that no test expects."""

    def visit_Return(self, node):
        return ast.Return(ast.Constant("no test expects this"))


class Swapped(ast.NodeTransformer):
    """Operators change sides: + and -, * and //, < and >=, == and !=."""

    PAIRS = (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.Lt, ast.GtE), (ast.Eq, ast.NotEq)
    TABLE = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}  # noqa: RUF012 - a constant

    def visit_BinOp(self, node):
        self.generic_visit(node)
        node.op = self.TABLE.get(type(node.op), type(node.op))()
        return node

    def visit_Compare(self, node):
        self.generic_visit(node)
        node.ops = [self.TABLE.get(type(op), type(op))() for op in node.ops]
        return node


def mutant(kind, example, text):
    """The reference, changed; HumanEval's is the body of its prompt's function."""
    whole = example.extra["prompt"] + text if "entry_point" in example.extra else text
    with warnings.catch_warnings(action="ignore"):  # escapes that Python does not know
        tree = ast.parse(whole)
    return ast.unparse(ast.fix_missing_locations(kind().visit(tree)))


def plain_script(example, program):
    """The usual way: program, setup and tests in one process; its exit status decides."""
    parts = [program, example.extra.get("test_setup_code", ""), *example.extra["tests"]]
    if "entry_point" in example.extra:
        parts.append(f"check({example.extra['entry_point']})")
    texts = json.dumps(parts)
    return f"import json\nspace = {{}}\nfor text in json.loads({texts!r}): exec(text, space)"


def verdicts(name, kind, pairs):
    """(ours, plain exec's) of the changed references."""
    reward = build_reward({"name": "code", "timeout": 2, **SETS[name][0]})
    examples = [example for example, _ in pairs]
    programs = [mutant(kind, example, text) for example, text in pairs]
    scripts = [Example("x", (), "", None, None, {"cases": [["", ""]]}) for _ in pairs]
    quiet = [
        "import io, sys\nsys.stdout = io.StringIO()\n" + plain_script(*pair)
        for pair in zip(examples, programs, strict=True)
    ]
    return reward(programs, examples), reward(quiet, scripts)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", [Wrong, Swapped], ids=lambda kind: kind.__name__)
def test_mutants_fail_as_under_plain_exec(data_dir, name, kind):
    ours, plain = verdicts(name, kind, references(data_dir, name, limit=20))
    assert ours == plain
    assert ours.count(0.0) >= 8  # the others have no such operator


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", [Wrong, Swapped], ids=lambda kind: kind.__name__)
def test_all_mutants_fail_as_under_plain_exec(data_dir, name, kind):
    pairs = references(data_dir, name)
    ours, plain = verdicts(name, kind, pairs)
    both = zip(pairs, ours, plain, strict=True)
    assert [example.id for (example, _), a, b in both if a != b] == []
    assert kind is not Wrong or set(ours) == {0.0}


# --- gac rewards check ----------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path):
    rows = [
        {"id": "good", "prompt": "add", "answer": GOOD, "tests": TESTS},
        {"id": "wrong", "prompt": "add", "answer": BAD, "tests": TESTS},
        {"id": "broken", "prompt": "add", "answer": GOOD, "tests": ["assert ("]},
        {"id": "case", "prompt": "echo", "answer": "print(1)", "cases": [["", "2"]]},
    ]
    data = tmp_path / "rows.jsonl.gz"
    with gzip.open(data, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    path = tmp_path / "train.yaml"
    path.write_text(f"data:\n  prompts: {data}\nreward: code\nmodel:\n  path: none\nsteps: 5\n")
    return path


def test_check_names_the_rows_whose_solution_fails(config):
    found = check(config)
    assert found.rows == 4
    assert [failing.row for failing in found.failing] == ["wrong", "broken", "case"]
    wrong, broken, case = (failing.reason for failing in found.failing)
    assert wrong.startswith("earns 0; test 1 (assert add(1, 2) == 3): AssertionError")
    assert broken.startswith("its test 1 is not Python")
    assert "wrote b'1\\n', expected b'2'" in case


def test_check_on_the_command_line(config, capsys):
    assert main(["rewards", "check", str(config)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("wrong: earns 0") and printed[-1] == "1 of 4 rows pass"
    assert main(["rewards", "check", str(config), "--set", "data.limit=1"]) == 0
    assert capsys.readouterr().out == "1 of 1 rows pass\n"


def test_check_reads_evaluation_files_and_names_what_is_missing(config, capsys):
    data = {"prompts": str(config.parent / "rows.jsonl.gz"), "limit": 1}
    assert check({"settings": {"data": data}, "reward": "code"}).rows == 1
    tasks = {"a": {"data": data, "reward": "code"}, "b": {"data": data, "reward": "code"}}
    assert check({"tasks": tasks}).rows == 2
    assert main(["rewards", "check", str(config), "--set", "reward=cod"]) == 2
    assert "unknown reward 'cod'; did you mean 'code'?" in capsys.readouterr().err
    config.write_text("reward: code")
    assert main(["rewards", "check", str(config)]) == 2
    assert "has no data: give data.prompts" in capsys.readouterr().err
