"""The code reward: program extraction, verdicts, counts, invalid rows."""

import sys

import pytest

from gac.data import Example
from gac.rewards import RewardError, build_reward, code
from gac.rewards.code import program_of
from gac.sandbox.pool import JudgeSpec, Program, RunResult
from gac.sandbox.solver import assemble

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

GOOD = "def add(a, b):\n    return a + b\n"
BAD = "def add(a, b):\n    return a - b\n"
FOR_PYTEST = "def test_sum(a): 1", "async def test_sum(a): 1", "class TestSum:\n def test(self): 1"
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


def row_error(reward, completion, **row):
    with pytest.raises(RewardError) as raised:
        score(reward, completion, **row)
    assert "'row-7'" in str(raised.value)
    return str(raised.value)


# --- program extraction ---------------------------------------------------------------------------


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
        ("````text\n```\nx = 1\n```\n````", "```\nx = 1\n```\n"),
        ("```text\na\n```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = '''\n```sh\n'''\n```", "x = '''\n```sh\n'''\n"),
        ("- a:\n  ```python\n  x = 1\n      ```\n  ```\n", "x = 1\n    ```\n"),
        ("use `x` and ``y``", "use `x` and ``y``"),
        ("```py``` is short:\n```python\nx = 1\n```", "x = 1\n"),
        ("```\na\n```python\nb\n```", "a\n```python\nb\n"),
        ("```Python\nx = 1\n```\n```text\n1\n```", "x = 1\n"),
        ("```py3\nx = 1\n```\n```pycon\n>>> x\n1\n```\n```pytb\n1\n```", "x = 1\n"),
        ("```{.python}\nx = 1\n```\n```text\n1\n```", "x = 1\n"),
        ("```\nx = 1\n   ```\n2", "x = 1\n"),  # indented further, it belongs to the text
        ("```\nx = 1\n    ```\n2", "x = 1\n    ```\n2"),
        ("```\nx = 1\n`````\n2", "x = 1\n"),
        ("1. a\n* ```py\n  x = 1\n  ```", "x = 1\n"),
        ("1. ```py\n   x = 1\n   ```", "x = 1\n"),
        ("12) ~~~~py\n    x = '''\n    ~~~\n    '''\n~~~~\n2", "x = '''\n~~~\n'''\n"),
    ],
)
def test_the_program_is_the_last_code_block_or_the_whole_completion(completion, program):
    assert program_of(completion) == program


PROMPT = 'import math\n\ndef area(r):\n    """The area."""\n'


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("    return math.pi * r\n", PROMPT + "    return math.pi * r\n"),
        ("    return 1\n\nprint(area(1))\n", PROMPT + "    return 1\n\n"),
        ("    return 1\n# done\ndef other(): pass\n", PROMPT + "    return 1\n# done\n"),
        (
            '    x = """\na\n"""\n    return x\nexit()',
            PROMPT + '    x = """\na\n"""\n    return x\n',
        ),
        ("def area(r): return 2", "def area(r): return 2"),
        ("area = lambda r: 2", "area = lambda r: 2"),
        ("import os\narea: object = abs", "import os\narea: object = abs"),
        ("import os\nclass area: pass", "import os\nclass area: pass"),
        ("import os\nasync  def area(r): pass", "import os\nasync  def area(r): pass"),
        ("def areas(r): pass", PROMPT),
    ],
    ids=[
        *("body", "statement after", "definition after", "text in column 0", "whole", "lambda"),
        *("annotated", "class", "coroutine", "another name"),
    ],
)
def test_a_program_without_the_entry_point_continues_the_prompt(program, text):
    for prompt in (PROMPT, PROMPT.rstrip("\n")):
        assert assemble({"text": program, "entry_point": "area", "prompt": prompt}) == text
    for whole in ({"entry_point": "area"}, {"prompt": PROMPT}):
        assert assemble({"text": program} | whole) == program  # nothing to continue


# --- verdicts -------------------------------------------------------------------------------------


def test_the_reward_is_one_if_all_tests_pass_else_zero(reward):
    programs = f"So:\n```python\n{GOOD}```", BAD, "no code at all"
    assert reward(programs, [example(tests=TESTS)] * 3) == [1.0, 0.0, 0.0]


def test_partial_gives_the_fraction_of_passed_tests():
    reward = build_reward({"name": "code", "partial": True})
    assert score(reward, BAD, tests=TESTS) == pytest.approx(1 / 3)
    assert score(reward, "print(input())", cases=[["1", "1"], ["2", "3"]]) == 0.5


def test_setup_runs_before_the_tests_and_its_imports_before_the_program(reward):
    setup = "import math\nclass C: k: int\ndef near(a, b): return abs(a - b) < 1e-6"
    row = example(setup=setup, tests=["assert near(area('1'), math.pi)"])
    right = "def area(r): return math.pi * C.__annotations__['k'](r)"
    assert reward([right, "def near(a, b): return True\ndef area(r): return 0"], [row] * 2) == [
        1,
        0,
    ]


def test_check_is_called_with_the_entry_point(reward):
    row = {
        "entry_point": "add",
        "tests": ["def check(candidate):\n    assert candidate(1, 2) == 3"],
    }
    programs = [GOOD, BAD, "def other(): pass", GOOD, "    return a + b", "    return a - b"]
    begun = 'def add(a, b):\n    """Add."""\n'  # the program may continue it
    prompts = [[{"role": "user", "content": begun}], "", "", "Write a function.", begun, begun]
    rows = [example(prompt=prompt, **row) for prompt in prompts]
    assert reward(programs, rows) == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "reference", ["def sum(a, b): return a * b", "sum, n = lambda a, b: a * b, 0"]
)
def test_a_builtin_name_is_the_programs_if_the_reference_defines_it(reward, reference):
    row = {"tests": ["assert sum(2, 3) == 6"], "answer": f"So:\n```python\n{reference}\n```\n"}
    programs = "def sum(a, b): return a * b", "def total(a, b): return a * b"
    assert reward(programs, [example(**row)] * 2) == [1.0, 0.0]


def test_objects_stay_in_the_programs_process(reward):
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
        "assert sorted(same({3, 1})) == [1, 3]",
        "assert same((1, [2.5], {'a': b'b'})) == (1, [2.5], {'a': b'b'})",
    ]
    assert score(build_reward({"name": "code", "partial": True}), program, tests=tests) == 1.0


def test_exceptions_are_passed_on_as_builtin_exceptions(reward):
    program = "class Mine(ValueError): pass\ndef f(x):\n    raise (Mine if x else KeyError)('no')"
    tests = [
        "try: f(1)\nexcept ValueError as e: assert str(e) == 'no'\nelse: assert False",
        "try: f(0)\nexcept KeyError as e: assert e.args == ('no',)\nelse: assert False",
    ]
    assert score(reward, program, tests=tests) == 1.0


SCRIPTS = {
    "in a block": ("```python\nprint(int(input()) * 2)\n```", 1.0),
    "spaces at the end": (
        "import sys\nsys.stdout.write(f'{2 * int(sys.stdin.read())}  \\n\\n')",
        1.0,
    ),
    "the size of stdin": ("import os\nprint(2 * int(os.read(0, os.fstat(0).st_size)))", 1.0),
    "in a thread": (
        "import threading\ndef main(): print(2 * int(input()))\n"
        "threading.Thread(target=main).start()",
        1.0,
    ),
    "right for one case": ("print(6)", 0.0),
    "an error after the output": ("print(int(input()) * 2)\nraise ValueError", 0.0),
    "success after the output": ("print(int(input()) * 2)\nexit(0)", 1.0),
    "failure after the output": ("print(int(input()) * 2)\nexit(3)", 0.0),
    "spaces, then another answer": (
        "print(int(input()) * 2)\nprint(' ' * 70_000)\nprint(7)",
        0.0,
    ),
    "lines, then another answer": ("print(int(input()) * 2, end='\\n' * 200_000)\nprint(7)", 0.0),
    "zeros, then another answer": ("print(int(input()) * 2, '\\0' * 70_000, 7)", 0.0),
    "spaces before another answer, below the limit": (
        "print(int(input()) * 2)\nprint(' ' * 65_000 + '7')",
        0.0,
    ),
    "more spaces than the limit": ("print(int(input()) * 2)\nprint(' ' * 70_000)", 0.0),
    "spaces below the limit": ("print(int(input()) * 2)\nprint(' ' * 60_000)", 1.0),
    "as main": ("if __name__ == '__main__':\n    print(2 * int(open(0).read().strip()))", 1.0),
}


@pytest.mark.parametrize("case", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_scripts_use_stdin_and_stdout(reward, case):
    assert score(reward, case[0], cases=[["3\n", "6\n"], ["5\n", "10"]]) == case[1]


def test_preloaded_packages_can_be_imported():
    program = "import numpy as np\ndef f(x): return np.asarray(x).sum()"
    row = {
        "tests": [
            "assert f([1, 2]) == 3",
            "import random, numpy\nassert f(numpy.ones(3).tolist()) == 3",
        ]
    }
    reward = build_reward({"name": "code", "preload": ["numpy"], "workers": 1})
    assert score(reward, program, **row) == 1.0
    reward.close()
    assert reward._pool._server is None


# --- counts ---------------------------------------------------------------------------------------


def test_counts_are_per_completion_and_equal_pairs_run_once(monkeypatch):
    reward = build_reward({"name": "code", "timeout": 2, "workers": 2})
    assert reward.counts() == {"timeouts": 0, "stalled": 0, "crashes": 0, "no_program": 0}
    checked = []
    real = reward._pool.check
    monkeypatch.setattr(reward._pool, "check", lambda *a: checked.append(a) or real(*a))
    endless, crash = "while True: pass", "import ctypes\nctypes.string_at(0)"
    programs = [GOOD, GOOD, "```\n```", endless, endless, crash]
    assert reward(programs, [example(tests=TESTS)] * len(programs)) == [1.0, 1.0] + [0.0] * 4
    assert len(checked) == 3
    counts = reward.counts()
    assert counts.pop("timeouts") + counts.pop("stalled") == 2  # a busy machine may stall the loop
    assert counts == {"crashes": 1, "no_program": 1}
    # different tests, so the program runs again
    assert reward([GOOD], [example(tests=["assert add(1, 2) == 4"])]) == [0.0]
    assert len(checked) == 4


# --- what is run ----------------------------------------------------------------------------------


class FakePool:
    """Records what is run, and gives prepared results."""

    def __init__(self, *results):
        self.results, self.calls = list(results), []

    def run(self, *arguments):
        self.calls.append(arguments)
        return self.results.pop(0)

    check = run

    def map(self, function, items):
        return list(map(function, items))


def fake(*results, **options):
    """A reward with `options` that gets `results`, and the calls of its pool."""
    reward = build_reward({"name": "code", **options})
    reward._pool = FakePool(*results)
    return reward, reward._pool.calls


IO = [["a\n", "1\n\n 2 \n"], ["b", "x"]]


def test_scripts_run_case_by_case():
    results = RunResult("ended", stdout=b"1  \n\n 2\n\n"), RunResult("ended", stdout=b"y")
    options = {"timeout": 3, "memory_mb": 64, "cases_field": "io"}
    reward, calls = fake(*results, **options)
    assert score(reward, "p()", io=IO) == 0.0
    assert calls == [
        (Program("p()"), b"a\n", 3, 64, 2 * 7 + (1 << 16) + 1),
        (Program("p()"), b"b", 3, 64, 2 * 1 + (1 << 16) + 1),
    ]
    assert score(fake(*results, **options, partial=True)[0], "p()", io=IO) == 0.5
    reason = "case 2 (b'b'): wrote b'y', expected b'x' (ended, 0)"
    assert fake(*results, **options)[0].explain("p()", example(io=IO)) == reason
    right = results[0], RunResult("ended", stdout=b"x\r\n")
    assert fake(*right, **options)[0].explain("p()", example(io=IO)) == ""
    assert score(fake(*right, **options)[0], "p()", io=IO) == 1.0


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    ("first", "event", "goes_on"),
    [
        (RunResult("ended", stdout=b"1\n2"), None, True),
        (RunResult("ended", stdout=b"\n1\n\n 2"), None, True),
        (RunResult("ended", stdout=b"1\n\n2"), None, True),
        (RunResult("ended", stdout=b"1\n\n 2", status=1), None, True),
        (RunResult("crash", stdout=b"1\n\n 2"), "crashes", True),
        (RunResult("stalled", stdout=b"1\n\n 2"), "stalled", False),
        (RunResult("timeout", stdout=b"1\n\n 2"), "timeouts", False),
    ],
    ids=["no empty line", "empty line", "indent", "status", "crash", "stalled", "timeout"],
)
def test_a_failing_case_ends_the_run_except_for_partial_rewards(first, event, goes_on, partial):
    reward, calls = fake(first, RunResult("ended", stdout=b"x"), partial=partial)
    goes_on = goes_on and partial
    assert score(reward, "p()", cases=IO) == goes_on / 2
    assert len(calls) == 1 + goes_on
    counted = {name: count for name, count in reward.counts().items() if count}
    assert counted == ({event: 1} if event else {})


def test_the_judge_gets_the_fields_of_the_row():
    fields = {f"{name}_field": f"my {name}" for name in ("tests", "setup", "entry_point", "prompt")}
    row = {"my tests": "assert f(1)", "my entry_point": "f", "answer": "def f(x): return 1"}
    begun = "import os\nimport re as r, gc\nclass g:\n    k = 1\ndef f(x):\n    'Doc.'\n"
    defined = ("import os", "import re as r, gc", "class g:\n    k = 1")
    setup = "from os import *\nlimit = 2\nsecret = 3\nif limit: import io\n"
    row["answer"] += "\nlimit"  # the answer reads it
    needed = ("from os import *", "limit = 2")
    for more, setup_sent, context, prompt in (
        ({"my prompt": begun}, begun, defined, begun),
        ({"my prompt": begun, "my setup": setup}, setup, needed + defined, begun),
        ({"my prompt": "def g(x): pass", "my setup": setup}, setup, needed, ""),
        ({"my prompt": "def f("}, "", (), ""),
    ):
        reward, calls = fake(RunResult("ended", (True,)), **fields, timeout=2, memory_mb=99)
        assert score(reward, "p", **row, **more) == 1.0
        suite = JudgeSpec(("assert f(1)",), setup_sent, "f", row["answer"], returns=False)
        assert calls == [(Program("p", context, prompt, "f"), suite, 2, 99)]
    reward, calls = fake(RunResult("ended", (True, False, True)), partial=True)
    assert score(reward, "p", tests=["a", "b", "c"], prompt=begun) == pytest.approx(2 / 3)
    assert calls == [(Program("p"), JudgeSpec(("a", "b", "c"), all=True), 5, 512)]


def test_the_reference_runs_once_per_row():
    passed, failed = RunResult("ended", (True,)), RunResult("timeout", (False,), problem="no")
    reward, calls = fake(failed, passed, failed, on_error="drop")
    row = example(answer="ref", tests=["t"])
    assert reward(["a", "b"], [row] * 2) == [0.0, 0.0]
    assert reward.counts()["timeouts"] == 2
    assert [call[0].text for call in calls] == ["a", "ref", "b"]
    bad = RunResult("ended", (False,), problem="no")
    reward, calls = fake(failed, bad, passed, passed)
    assert reward(["a"], [row]) == [1.0]  # the reference passes if it may change its arguments
    assert [(call[0].text, call[1].returns) for call in calls] == [
        ("a", False),
        ("ref", False),
        ("ref", True),
        ("a", True),
    ]
    for of_answer, outcome in (
        (bad, None),
        (RunResult("ended", row_problem="no"), None),
        (RunResult("crash", (False,)), None),
        (failed, 0.0),
        (RunResult("stalled", (False,)), 0.0),  # being slow shows nothing
    ):
        reward, _ = fake(failed, of_answer, of_answer, on_error="drop")
        assert reward(["a"], [row]) == [outcome]
    assert fake(failed)[0].explain("a", row) == "no (timeout)"
    assert fake(passed)[0].explain("a", row) == "no verdict (ended)"


# --- invalid rows --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "exactly one of the fields 'tests' and 'cases', but has neither"),
        ({}, "with the tests (all fields: none)"),
        ({"test": [], "check": "x"}, "set tests_field or cases_field to the field with the tests"),
        ({"test": [], "check": "x"}, "(all fields: check, test)"),
        ({"tests": "", "cases": []}, "but has neither"),
        ({"tests": TESTS, "cases": [["", ""]]}, "but has both"),
        ({"tests": [1]}, "'tests' must be a non-empty list"),
        ({"tests": ()}, "'tests' must be a non-empty list"),
        ({"tests": {"assert add(1, 2) == 3": 1}}, "'tests' must be a non-empty list"),
        ({"cases": ()}, "'cases' must be a list of [stdin"),
        ({"cases": ["36"]}, "'cases' must be a list of [stdin"),
        ({"cases": [["3", "6"], ["3"]]}, "'cases' must be a list of [stdin"),
        ({"cases": [["3", 6]]}, "'cases' must be a list of [stdin"),
        ({"tests": ["assert add(1, 2) == 3", " "]}, "'tests' must be a non-empty list"),
        ({"cases": "eJxr"}, "examples/eval/livecodebench.py"),
        ({"cases": [["\ud800", ""]]}, "surrogates not allowed"),
        ({"tests": TESTS, "setup": 5}, "'setup' must be a string, got int 5"),
        ({"tests": TESTS, "entry_point": "a.b"}, "'entry_point' must be a Python identifier"),
        ({"tests": ["assert add(1, 2) ="]}, "test 1 is not valid Python: SyntaxError"),
        ({"tests": TESTS, "setup": "def ("}, "setup is not valid Python"),
        ({"tests": TESTS, "setup": "1 / 0"}, "setup fails for every program: ZeroDivisionError"),
        ({"tests": TESTS, "setup": "import not_here"}, "setup fails for every program: Module"),
        ({"tests": ["import not_here\nassert add(1, 2) == 3"]}, "fails for every program"),
        ({"tests": ["assert add(object(), 2)"], "answer": GOOD}, "own answer fails: test 1"),
        ({"tests": ["def test(a=1): add(object(), a)"], "answer": GOOD}, "answer fails: test"),
        ({"tests": ["async def test(a=1): add([], a)"], "answer": GOOD}, "answer fails: test"),
        ({"tests": ["assert ad(1, 2) == 3, add"], "answer": GOOD}, "name 'ad' is not defined"),
        ({"tests": ["assert 1 + 1 == 2"]}, "use no name from the program"),
        ({"tests": ["def check(candidate): assert candidate"]}, "use no name from the program"),
        *[({"tests": [*TESTS, test]}, "um would never run: param") for test in FOR_PYTEST],
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_rows_that_no_program_can_pass_are_reported(reward, row, words):
    assert words in row_error(reward, GOOD, **row)


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
    assert (
        score(reward, program, tests=["r = add(1, 2)", "assert r == 3", "add(r, r)"], **row) == 0.0
    )


def test_a_program_that_exits_fails_tests_that_catch_everything(reward):
    program = "import os\ndef add(a, b): os._exit(0)"
    tests = ["try: add(1, 2)\nexcept BaseException: pass"]
    assert score(reward, program, tests=tests) == 0.0
    assert score(reward, GOOD, tests=tests) == 1.0


BROKEN = ["assert add(1, 2) == 3", "assert add(1, 1) == 3"]


def test_the_reference_shows_that_a_row_is_broken(reward):
    assert "own answer fails: test 2" in row_error(reward, GOOD, tests=BROKEN, answer=GOOD)
    assert score(reward, GOOD, tests=BROKEN) == 0.0  # the program alone shows nothing
    setup = {"setup": "value = CONFIG['a']", "tests": ["assert add(value, 2) == 3"]}
    right = f"{GOOD}\nCONFIG = {{'a': 1}}"
    assert "own answer fails: setup" in row_error(reward, GOOD, answer=GOOD, **setup)
    assert reward([GOOD, right], [example(answer=right, **setup)] * 2) == [0.0, 1.0]


def test_rows_that_run_the_programs_text_are_refused(reward):
    source, row = "def text(): return '1 + 2'", {"tests": ["assert eval(text()) == 3"]}
    assert "interpret data as code" in row_error(reward, source, answer=source, **row)
    assert score(reward, source, **row) == 0.0
    assert score(reward, GOOD, tests=["assert add(1, 2) == eval('2 + 1')"]) == 1.0  # the row's own


def test_names_that_the_tests_borrow_come_from_the_references_imports(reward):
    row = {"tests": ["assert isclose(add(0.1, 0.2), 0.3)"], "answer": f"from math import *\n{GOOD}"}
    assert score(reward, GOOD, **row) == 1.0
    # only the name that the tests use is imported
    alone = row | {"answer": f"from math import not_in_math, isclose\n{GOOD}"}
    assert score(reward, GOOD, **alone) == 1.0
    assert score(reward, f"def isclose(*a): return True\n{BAD}", **row) == 0.0


def test_on_error_drop_counts_the_row():
    reward = build_reward({"name": "code", "on_error": "drop"})
    rows = [example(tests=TESTS), example(tests=TESTS, setup="1 / 0")]
    assert reward([GOOD, GOOD], rows) == [1.0, None]
    assert reward.dropped == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout": 0}, "timeout must be an integer >= 1, got 0"),
        ({"timeout": 1.5}, "timeout: expected a whole number, got 1.5"),
        ({"timeout": True}, "timeout: expected a whole number, got True"),
        ({"require": ["uid", 1]}, "require must be a list of names"),
        ({"memory_mb": 8}, "memory_mb must be an integer >= 64, got 8"),
        ({"workers": 0}, "workers=0: use an integer >= 1"),
        ({"workers": 1.5}, "workers: expected a whole number, got 1.5"),
        ({"preload": "numpy"}, "preload must be a list of names"),
        (
            {"require": ["chains"]},
            "require must be among limits, seccomp, landlock, uid, namespaces",
        ),
        ({"preload": ["not_here"]}, "preload: cannot import not_here"),
        ({"tests_filed": "t"}, "did you mean 'tests_field'"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        build_reward({"name": "code", **options})


def test_programs_are_dedented_by_columns():
    assert code._dedented("    x", 2) == "  x"
    assert code._dedented(" x", 4) == "x"
    assert code._dedented("\tx", 4) == "    x"  # a tab is eight columns
    assert code._dedented("x\ty", 4) == "x\ty"
    assert code._dedented("  x", 0) == "  x"
