"""Verdicts of the judge: which tests pass, the first problem, and what is wrong with a row."""

import sys
from typing import Any

import pytest

from gac.sandbox.pool import JudgeSpec, Pool, Program, RunResult
from tests.sandbox.verdicts import MANAGER, MORE, F

if sys.platform != "linux":
    pytest.skip("the sandbox needs Linux", allow_module_level=True)

ADD = "def f(x):\n  global n\n  n += x"
EXIT = "import os\ndef f(x): os._exit(0)"
THREE = ("assert f(1) == 1", "assert  f(1) \\\n == 2", "assert f(1) == 1")
CATCH = "try: f(1)\nexcept BaseException: pass"
INTERPRET = "the tests would interpret data as code (compile); rewrite them"
BIND = (
    "if not f(1): a = 1\nf(a)",
    "if not f(1):\n  async def b(): pass\nf(b)",
    "(lambda c: f(c))(1)\nf(c)",
    "if not f(1): import math as d\nf(d)",
    "try: f(1)\nexcept ValueError as e: pass\nf(e)",
    "match f(1):\n  case 2 as g: pass\nf(g)",
    "match f(1):\n  case [*h]: pass\nf(h)",
)
ABSENT = "fails for every program: ModuleNotFoundError: No module named 'absent'"
UNUSED = (
    "the tests use no name from the program; if they need its entry point, set entry_point_field"
)


def failed(problem, *passed):
    return RunResult("ended", passed or (False,), problem)


def invalid(problem):
    return RunResult("ended", row_problem=problem)


PASSED = RunResult("ended", (True,))
MANAGED = (
    "with m: pass",
    "async def main(m):\n  async with m: pass\nimport asyncio\nasyncio.run(main(m))",
)

# program, tests, other fields of the row, result
VERDICTS: dict[str, Any] = {
    "the first failure is the last test": (
        (F, THREE, {}),
        failed("test 2 (assert f(1) \\ == 2): AssertionError", True, False, False),
    ),
    "all tests": (
        (F, THREE, {"all": True}),
        failed("test 2 (assert f(1) \\ == 2): AssertionError", True, False, True),
    ),
    "an exception": (
        ("def f(x): raise ValueError('no', x)", ["f(1)"], {}),
        failed("test 1 (f(1)): ValueError: ('no', 1)"),
    ),
    "an exception of the tests that could end them": (
        (
            "def f(x):\n  class T(x): pass\n  raise T",
            ["class Q(BaseException): pass\nf(Q)"],
            {},
        ),
        failed(
            "test 1 (class Q(BaseException): pass f(Q)): RemoteError: invalid answer: "
            "not an exception class of the tests"
        ),
    ),
    "a failed assertion that the program suppresses": (
        (
            "class f:\n  def __enter__(s): pass\n  def __exit__(s, *e): return True",
            ["with f(): assert 0, 5"],
            {},
        ),
        failed(
            "test 1 (with f(): assert 0, 5): RemoteError: the program suppressed AssertionError: 5"
        ),
    ),
    "an exception without text": (
        ("def f(x): raise ValueError", ["f(1)"], {}),
        failed("test 1 (f(1)): ValueError"),
    ),
    "an exception without __str__": (
        ("class C(Exception):\n  def __str__(s): 1 / 0\ndef f(x): raise C", ["f(1)"], {}),
        failed("test 1 (f(1)): C"),
    ),
    "a long problem": (
        ("def f(x): return 'x' * 600", ["raise KeyError(f(1))"], {}),
        failed(f"test 1 (raise KeyError(f(1))): KeyError: '{'x' * 489}"),
    ),
    "the program ends a loop": (
        ("def f(x): raise StopIteration(5)", ["for _ in map(f, [1]): assert 0"], {}),
        failed("test 1 (for _ in map(f, [1]): assert 0): RemoteError: StopIteration: 5"),
    ),
    "the program calls exit": (
        ("def f(x): exit(3)", ["f(1)"], {}),
        failed("test 1 (f(1)): RemoteError: SystemExit: 3"),
    ),
    "an object is pickled": (
        ("class K: pass", ["import pickle\npickle.dumps(K())"], {}),
        failed(
            "test 1 (import pickle pickle.dumps(K())): "
            "TypeError: objects of the program cannot be pickled by the tests"
        ),
    ),
    "a private attribute": (
        ("class K:\n  __slots__ = ()", ["K.__slots__"], {}),
        failed(
            "test 1 (K.__slots__): AttributeError: "
            "__slots__ cannot be read from the program's objects in the sandbox"
        ),
    ),
    "operators of a class whose name starts with an underscore": (
        (
            "class _T:\n  def __init__(s, x): s.x = x\n  def __sub__(s, o): return s.x - o",
            ["assert _T(3) - 1 == 2"],
            {},
        ),
        PASSED,
    ),
    "operators of a class with a small name": (
        (
            "class num:\n  def __init__(s, x): s.x = x\n  def __sub__(s, o): return s.x - o",
            ["assert num(3) - 1 == 2"],
            {"reference": "class num:\n  def __sub__(s, o): pass"},
        ),
        PASSED,
    ),
    "an operator that stands in for that of the reference": (
        (
            "class N:\n  def __init__(s, x): s.x = x\n  def __irshift__(s, o): return s.x >> o",
            ["n = N(9)\nn >>= 1\nassert n == 4"],
            {"reference": "class N:\n  def __rshift__(s, o): pass"},
        ),
        PASSED,
    ),
    "a function of the reference with the name of one of an absent package": (
        (
            f"def allclose(a, b): return a == b\n{F}",
            ["assert allclose(f(1), 1)"],
            {"reference": f"def allclose(a, b): pass\n{F}", "entry_point": "f"},
        ),
        PASSED,
    ),
    "a variable of the tests with the name and value of one of the program": (
        (f"n = 1\n{ADD}", ["n = 1\nf(1)\nassert n == 1"], {}),
        PASSED,
    ),
    "a variable of the program that the tests replace": (
        (f"n = 1\n{ADD}", ["globals()['n'] = 5\nf(1)\nassert n == 5"], {}),
        PASSED,
    ),
    "a conversion that the tests define": (
        (F, ["def int(x): return 7\nassert int(f(1)) == 7"], {}),
        PASSED,
    ),
    "an entry point that the setup defines too": (
        (F, ["assert f(1) == 1"], {"setup": "def f(x): pass", "entry_point": "f"}),
        PASSED,
    ),
    "all names of a module that the reference imports": (
        (F, ["assert f(sqrt(4)) == 2"], {"reference": f"from math import *\n{F}"}),
        PASSED,
    ),
    "a name that the reference imports and assigns": (
        (F, ["assert f(sqrt(4)) == 2"], {"reference": f"from math import sqrt\nsqrt = sqrt\n{F}"}),
        PASSED,
    ),
    "an operator of one of two classes of the reference": (
        (
            "class N:\n  def __init__(s, x): s.x = x\n  def __lt__(s, o): return s.x < o",
            ["assert N(1) < 2"],
            {
                "reference": "from dataclasses import dataclass as d\n"
                "@d(order=True)\nclass N: x: int\nclass M: pass"
            },
        ),
        PASSED,
    ),
    "context managers that end without an error": (
        (MANAGER, [f"m = f()\n{end}\nassert m.error == (None,) * 3" for end in MANAGED], {}),
        RunResult("ended", (True, True)),
    ),
    "an object whose attributes have underscores": (
        (
            "class P: pass\ndef f(x):\n  p = P()\n  setattr(p, '__x', x)\n  p.y__ = 2\n  return p",
            ["assert vars(f(1)) == {'__x': 1, 'y__': 2}"],
            {"setup": "class P: pass"},
        ),
        PASSED,
    ),
    "a list with the name of a class of the setup": (
        ("class P(list): pass\nf = P", ["assert f([1]) == [1]"], {"setup": "class P(list): pass"}),
        PASSED,
    ),
    "an object of another class": (
        ("class T: pass\ndef f(x): return T()", ["class U: 5\nassert not isinstance(f(1), U)"], {}),
        PASSED,
    ),
    "an operator with three operands": (
        (
            "class N:\n  def __pow__(s, power, modulus): return power, modulus",
            ["assert pow(N(), 5, 7) == (5, 7)"],
            {},
        ),
        PASSED,
    ),
    "a conversion of nothing": ((F, ["assert f(int()) == 0"], {}), PASSED),
    "annotations are values": (
        ("def f(x: int): pass", ["assert f.__annotations__ == {'x': int}"], {}),
        PASSED,
    ),
    "a dataclass of the tests": (
        (F, ["from dataclasses import dataclass\n@dataclass\nclass P: x: int\nP(f(1))"], {}),
        PASSED,
    ),
    "text of the tests": ((F, ["f(1)\nassert eval(' 1 + 1\\n') == 2"], {}), PASSED),
    "text that is not Unicode": (
        ("def f(x): raise ValueError('\\ud800')", ["f(1)"], {}),
        failed("test 1 (f(1)): ValueError: \\ud800"),
    ),
    "a name of the reference with a type": (
        (F, ["f(y)"], {"reference": f"{F}\ny: int = 2"}),
        failed("test 1 (f(y)): NameError: name 'y' is not defined"),
    ),
    "names that the tests bind elsewhere": (
        (F, BIND, {"all": True, "reference": F}),
        failed(
            "test 1 (if not f(1): a = 1 f(a)): NameError: name 'a' is not defined",
            *[False] * len(BIND),
        ),
    ),
    "a check that a function calls": (
        (
            F,
            ["def check(g): assert g(1) == 2\ndef run(): check(f)"],
            {"entry_point": "f"},
        ),
        failed("test 1 (def check(g): assert g(1) == 2 def run(): check(f)): AssertionError"),
    ),
    "a check without an entry point": ((F, ["def check(g): pass\nassert f(1)"], {}), PASSED),
    "an operator of an object whose class the tests do not name": (
        ("class T:\n  def __sub__(s, o): return 5\ndef f(x): return T()", ["f(1) - 1"], {}),
        failed("test 1 (f(1) - 1): TypeError: unsupported operand type(s) for -: 'T' and 'int'"),
    ),
    "an operator of an object of the tests": (
        (
            "class T:\n  def __lt__(s, o): return False\ndef f(x): return T()",
            ["class U:\n  def __gt__(s, o): return True\nassert f(1) < U()"],
            {},
        ),
        PASSED,
    ),
    "an operator that a list does not have": (
        ("class T(list):\n  def __sub__(s, o): return 5\ndef f(x): return T()", ["f(1) - 1"], {}),
        failed("test 1 (f(1) - 1): TypeError: unsupported operand type(s) for -: 'T' and 'int'"),
    ),
    "a test exits": (
        (F, ["f(1)", "exit()"], {}),
        failed("test 2 (exit()): SystemExit: None", True, False),
    ),
    "no entry point": (
        (F, ["g(h(1))"], {"entry_point": "g"}),
        failed("test 1 (g(h(1))): NameError: name 'g' is not defined"),
    ),
    "no function with the name of a builtin": (
        ("def total(a): return 3", ["assert sum([1, 2]) == 3"], {"reference": "def sum(a): pass"}),
        failed("test 1 (assert sum([1, 2]) == 3): NameError: name 'sum' is not defined"),
    ),
    "no class with the name of a module": (
        (F, ["assert math.pi > f(3)"], {"reference": "class math: pi = 3.14"}),
        failed("test 1 (assert math.pi > f(3)): NameError: name 'math' is not defined"),
    ),
    "a check": (
        (F, ["x = 1\ndef check(g): assert g(1) == 2"], {"entry_point": "f"}),
        failed("test 1 (x = 1 def check(g): assert g(1) == 2): AssertionError"),
    ),
    "a check that another test calls": (
        (
            F,
            ["def check(g): calls.append(g(1))", "check(f)", "assert calls == [1]"],
            {"entry_point": "f", "setup": "calls = []"},
        ),
        RunResult("ended", (True, True, True)),
    ),
    "a function of the setup that the program defines too": (
        (
            f"def near(a, b): return True\n{F}",
            ["assert near(f(1), 2)"],
            {
                "setup": "def near(a, b): return a == b",
                "reference": f"def near(a, b): pass\n{F}",
            },
        ),
        failed("test 1 (assert near(f(1), 2)): AssertionError"),
    ),
    "the program fails": (
        ("1 / 0", ["f(1)", "f(2)"], {}),
        failed("the program: ZeroDivisionError: division by zero", False, False),
    ),
    "the program exits": (
        ("import os; os._exit(0)", ["f(1)"], {}),
        failed("the program: RemoteError: the program exited"),
    ),
    "the program exits in a test": (
        (EXIT, ["f", CATCH, "assert True"], {"all": True}),
        failed(
            "test 2 (try: f(1) except BaseException: pass): RemoteError: the program exited",
            True,
            False,
            False,
        ),
    ),
    "the program has other names": (
        ("x = 1", ["assert f"], {"reference": F}),
        failed("test 1 (assert f): NameError: name 'f' is not defined"),
    ),
    "a name of the reference": (
        (F, ["f(y)"], {"reference": f"{F}\ny = 2"}),
        failed("test 1 (f(y)): NameError: name 'y' is not defined"),
    ),
    "a name that nobody defines": (
        (F, ["assert f(1)\nf(y)"], {"reference": F}),
        failed(
            "test 1 (assert f(1) f(y)): NameError: name 'y' is not defined",
        ),
    ),
    "a name that nobody defines, before a request": (
        (F, ["f(y)"], {"reference": F}),
        failed(
            "test 1 (f(y)): NameError: name 'y' is not defined",
        ),
    ),
    "a name without a reference": (
        (F, ["f(y)"], {}),
        failed("test 1 (f(y)): NameError: name 'y' is not defined"),
    ),
    "several failures": (
        (
            F,
            ["assert f(1) == 2", "f(y)", "f(1)", "f(object())"],
            {"all": True, "reference": F},
        ),
        failed(
            "test 1 (assert f(1) == 2): AssertionError",
            False,
            False,
            True,
            True,
        ),
    ),
    "an import of the tests": (
        (F, ["import absent\nf(1)"], {}),
        invalid(f"test 1 (import absent f(1)) {ABSENT}"),
    ),
    "an import of the tests, if the program is data": (
        ("f = 1", ["import absent\nf"], {}),
        invalid(f"test 1 (import absent f) {ABSENT}"),
    ),
    "an import of the program": (
        ("def f(x): import absent", ["f(1)"], {}),
        failed("test 1 (f(1)): ModuleNotFoundError: No module named 'absent'"),
    ),
    "text of the program": (
        (
            "def f(x): return '1 + 1'",
            ["try: eval(f(1))\nexcept Exception: pass\nelse: raise KeyError", "f(1)"],
            {},
        ),
        failed(
            "test 1 (try: eval(f(1)) except Exception: pass else: raise KeyError): "
            f"RemoteError: {INTERPRET}",
            False,
            False,
        ),
    ),
    "a setup that fails": (
        (F, ["f(1)"], {"setup": "f\nraise SystemExit"}),
        failed("setup: SystemExit"),
    ),
    "a setup that fails by the program without its name": (
        ("def f(x): raise KeyError", ["f(1)"], {"setup": "eval('f')(1)", "entry_point": "f"}),
        failed("setup: KeyError"),
    ),
    "a setup that fails without the program": (
        (F, ["f(1)"], {"setup": "raise SystemExit"}),
        invalid("setup fails for every program: SystemExit"),
    ),
    "a setup that is not valid": (
        (F, ["f(1)"], {"setup": "return 1"}),
        invalid(
            "the row's setup is not valid Python: SyntaxError: 'return' outside function "
            "(<setup>, line 1); 'return 1'"
        ),
    ),
    "tests without the program": ((F, ["assert 1", "assert 2"], {}), invalid(UNUSED)),
    "tests that define the name": (
        ("x = 1", ["def f(): return 1\nassert f()"], {"reference": "def g(): pass"}),
        invalid(UNUSED),
    ),
    "a name that the program need not define": (
        ("x = 1", ["try: f\nexcept NameError: pass"], {}),
        failed("the tests never use the program"),
    ),
}

VERDICTS |= {
    name: (
        (program, tests, fields),
        RunResult("ended", passed, problem.replace("@", " ".join(tests[0].split()))),
    )
    for name, (program, tests, fields, passed, problem) in MORE.items()
}


@pytest.fixture(scope="module")
def pool():
    pool = Pool(workers=1)
    yield pool
    pool.close()


@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts(pool, name):
    (program, tests, fields), result = VERDICTS[name]
    spec = JudgeSpec(tuple(tests), **fields)
    assert pool.check(Program(program, entry_point=spec.entry_point), spec, 5, 256) == result
