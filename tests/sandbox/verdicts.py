"""More verdicts for `test_judge`: program, tests, other fields of the row, which tests pass, and
the problem, where @ stands for the first test.
"""

F = "def f(x): return x"
T = "class T:\n  def __sub__(s, o): return 5\n"
MINUS = "TypeError: unsupported operand type(s) for -: 'T' and 'int'"
FACTORY = f"{T}class U:\n  def make(s): return T()\ndef f(x): return U()"
MANAGER = """
class f:
    def __enter__(s): return s
    def __exit__(s, *e): s.error = e
    async def __aenter__(s): return s
    async def __aexit__(s, *e): s.error = e
"""
MORE = {
    "a function that returns nothing may change its arguments": (
        "def f(x, y):\n  x.append(1)\n  return y",
        ["x = []\nf(x, None)\nassert x == [1]\nf(x, 2)\nassert x == [1]"],
        {"returns": False},
        (True,),
        "",
    ),
    "what a call leaves as it is keeps its identity": (
        "def f(x, y): y.append(3)",
        ["t = (1, 2)\nx, y = [t], []\nf(x, y)\nassert x[0] is t and y == [3]"],
        {},
        (True,),
        "",
    ),
    "an attribute of a module that the tests and the program set": (
        "import math\ndef f(x):\n  math.pi += x\n  return math.pi",
        ["import math\nmath.pi = 3\nassert f(1) == 4 and f(1) == 5"],
        {},
        (True,),
        "",
    ),
    "a manager that lets an error through": (
        "class f:\n  def __enter__(s): pass\n  def __exit__(s, *e): pass",
        ["try:\n  with f(): assert 0\nexcept AssertionError: pass"],
        {},
        (True,),
        "",
    ),
    "a failed assertion that the program lets through": (
        "def f(g): g()",
        ["def g(): assert 0\ntry: f(g)\nexcept AssertionError: pass"],
        {},
        (True,),
        "",
    ),
    "a failed assertion that the program catches": (
        "def f(g):\n  try: g()\n  except AssertionError: pass",
        ["def g(): assert 0, 5\nf(g)"],
        {},
        (False,),
        "test 1 (@): RemoteError: the program suppressed AssertionError: 5",
    ),
    "managers that end with an error": (
        MANAGER,
        [
            f"m = f()\n{kind}def main(m):\n  {kind}with m: 1 / 0\nimport asyncio\n"
            f"try: {run}(main(m))\nexcept ZeroDivisionError as e:\n"
            "  assert m.error[0] is ZeroDivisionError and m.error[1] is e and not m.error[2]"
            for kind, run in (("", ""), ("async ", "asyncio.run"))
        ],
        {},
        (True, True),
        "",
    ),
    "a coroutine is passed back": (
        "async def g(): return 4\nasync def f(c): return await c",
        ["import asyncio\nassert asyncio.run(f(g())) == 4"],
        {},
        (True,),
        "",
    ),
    "the parameters of a function of the tests, without defaults and types": (
        "import inspect\ndef f(g): return str(inspect.signature(g))",
        ["def g(a, b: int = 5): pass\nassert f(g) == '(a, b=Ellipsis)'"],
        {},
        (True,),
        "",
    ),
    "attributes and the cause of an error": (
        "def f(x):\n  e = ValueError(x)\n  e.code = 5\n  raise e from KeyError(2)",
        [
            "try: f(1)\nexcept ValueError as e:\n"
            "  assert (e.code, e.args, repr(e.__cause__)) == (5, (1,), 'KeyError(2)')"
        ],
        {},
        (True,),
        "",
    ),
    "classes of errors that no test may raise": (
        "class E(StopIteration): pass\nclass S(SystemExit): pass\ndef f(x): raise x",
        [
            "def kind(e):\n  try: f(e)\n  except Exception as e: return type(e).__name__\n"
            "assert [kind(E), kind(S)] == ['E', 'S']"
        ],
        {},
        (True,),
        "",
    ),
    "an error of a class that is not a builtin": (
        "import json\nclass E(json.JSONDecodeError): pass\ndef f(x): raise E('no', '', 0)",
        ["import json\ntry: f(1)\nexcept json.JSONDecodeError as e: assert e.msg == 'no'"],
        {},
        (True,),
        "",
    ),
    "the value of an error that ends a loop": (
        "def f(x): raise StopIteration(x)",
        ["try: f(1)\nexcept StopIteration as e: assert e.value == 1"],
        {},
        (True,),
        "",
    ),
    "operators of what a method returns": (
        FACTORY,
        ["f(1).make() - 1"],
        {"reference": FACTORY},
        (False,),
        f"test 1 (@): {MINUS}",
    ),
    "operators of what a function with the name of a class returns": (
        f"{T}def Make(): return T()",
        ["Make() - 1"],
        {},
        (False,),
        f"test 1 (@): {MINUS}",
    ),
    "operators of a class with a small name, without a reference": (
        T.replace("T", "t"),
        ["t() - 1"],
        {},
        (False,),
        "test 1 (@): " + MINUS.replace("'T'", "'t'"),
    ),
    "random numbers that the program cannot predict": (
        "import random\ndef f(x): return random.random()",
        ["import random\nassert f(1) != random.random()"],
        {},
        (True,),
        "",
    ),
    "tests without the program, one of which fails": (
        F,
        ["assert 1", "assert 0"],
        {},
        (True, False),
        "test 2 (assert 0): AssertionError",
    ),
    "parsed text of the program": (
        "def f(x): return '1 + 1'",
        [
            "import ast\ntree = ast.parse(f(1))\n"
            "try: compile(tree, '', 'exec')\nexcept Exception: pass"
        ],
        {},
        (False,),
        "test 1 (@): RemoteError: the tests would interpret data as code (compile); rewrite them",
    ),
    "methods with the name of a method of strings": (
        "class T:\n  def format(s, x): return x\ndef f(x): return T() if x else '<{}{}>'",
        [
            "assert f(1).format(5) == 5",
            "assert f(0).format(3, 4) == '<34>'",
            "t = '{0._y}'\nclass C: _y = 3\nassert t.format(C()) == '3' and f(1)",
        ],
        {},
        (True, True, True),
        "",
    ),
    "a test case that fails": (
        F,
        ["import unittest\nclass C(unittest.TestCase):\n  def test(s): s.assertEqual(f(1), 2)"],
        {},
        (False,),
        "test 1 (@): AssertionError: AssertionError: 1 != 2",
    ),
    "tests that other statements use": (
        F,
        [
            "def test_a(): 1 / 0\nasync def test_b(): 1 / 0\n"
            "async def test_c(): assert f(1) == 2\ng = test_a, test_b"
        ],
        {},
        (False,),
        "test 1 (@): AssertionError",
    ),
    "a function that replaces itself": (
        "def f(x):\n  global f\n  f = None\n  return x",
        ["f(1)\nassert f(1) == 1"],
        {},
        (True,),
        "",
    ),
    "a value": ("f = 1", ["assert f == 1"], {}, (True,), ""),
    "an object of a class of the tests or of the program": (
        "class T(int): pass\nf = T",
        ["class U: pass\nassert isinstance(f(1), (U, int))"],
        {},
        (True,),
        "",
    ),
    "a conversion with two arguments": (
        "class T:\n  def __float__(s): return 1.5\ndef f(x): return T()",
        ["assert complex(f(1), 2) == 1.5 + 2j"],
        {},
        (True,),
        "",
    ),
    "annotations of the tests are values": (
        F,
        ["def g(x: int): pass\nassert f(g.__annotations__) == {'x': int}"],
        {},
        (True,),
        "",
    ),
    "attributes with one underscore": (
        "class T:\n  x_ = 4\n  _y = 5\ndef f(x): return T()",
        ["assert f(1).x_ == 4 and f(1)._y == 5"],
        {},
        (True,),
        "",
    ),
    "contents decide what is in an object": (
        "class T:\n  def __contains__(s, x): return True\n  def __iter__(s): yield 2\n"
        "def f(x): return T()",
        ["assert 2 in f(1) and 3 not in f(1)"],
        {},
        (True,),
        "",
    ),
    "copies of what an object holds": (
        "class T:\n  def __init__(s): s.x = [1]",
        ["import copy\nassert type(copy.copy(T().x)) is list and copy.deepcopy(T().x) == [1]"],
        {},
        (True,),
        "",
    ),
    "overridden methods of a tuple": (
        "class P(tuple):\n  count = 5\n  def index(s, x): return 7\ndef f(x): return P((x,))",
        ["p = f(1)\nassert (p.count, p.index(1), P((1,)).index(1)) == (5, 0, 7)"],
        {},
        (True,),
        "",
    ),
    "at most a MiB of text per answer": (
        "def f(x): print('x' * x)",
        [
            "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as o:\n"
            "  f(1 << 21)\n  f(2)\nassert len(o.getvalue()) == (1 << 20) + 3"
        ],
        {},
        (True,),
        "",
    ),
    "an object that contains itself": (
        "class P: pass\ndef f(x):\n  p = P()\n  p.me = p\n  return p",
        ["p = f(1)\nassert p.me is p"],
        {"setup": "class P: pass"},
        (True,),
        "",
    ),
    "an object that pretends to be an operation": (
        "class T:\n  n = 0\n  def __init__(s):\n    global t\n    t = s\n"
        "  def __eq__(s, o):\n    s.n += 1\n    return s.n not in (2, 3, 4)\n"
        "  def __hash__(s): return hash('get')\n"
        "def f(c): return c._remote_[0].ask(t, c, '_x')",
        [
            "class C: _x = 5\nT()\ntry: f(C())\n"
            "except TypeError as e: assert 'no operation' in str(e)\nelse: assert 0"
        ],
        {},
        (True,),
        "",
    ),
    "text that pretends to be a public name": (
        "class S(str):\n  def __new__(c, x):\n    global s\n    s = str.__new__(c, x)\n"
        "    return s\n  def startswith(s, x): return False\n"
        "def f(c): return c._remote_[0].ask('get', c, s)",
        [
            "class C: _x = 5\nS('_x')\ntry: f(C())\n"
            "except AttributeError as e: assert 'public' in str(e)\nelse: assert 0"
        ],
        {},
        (True,),
        "",
    ),
    "operations that an object does not offer": (
        "def f(c, name, *rest): return c._remote_[0].ask(name, c, *rest)",
        [
            "class C: _x = 5\nfor o in (('__hash__',), ('get', '_x')):\n  try: f(C(), *o)\n"
            "  except (TypeError, AttributeError): pass\n  else: assert 0"
        ],
        {},
        (True,),
        "",
    ),
    "a class of the tests is used in the program": (
        "def f(c): return c(3)",
        ["class C:\n  def __init__(s, x): s.x = x\nassert f(C).x == 3"],
        {},
        (True,),
        "",
    ),
    "a named tuple of the tests": (
        "def f(p): return p.a",
        ["from collections import namedtuple\nP = namedtuple('P', 'a')\nassert f(P(3)) == 3"],
        {},
        (True,),
        "",
    ),
    "an attribute that would change the class": (
        "class P: pass\ndef f(x):\n  p = P()\n  vars(p)['__class__'] = 5\n  return p",
        ["f(1)"],
        {"setup": "class P: pass"},
        (False,),
        "test 1 (@): RemoteError: invalid answer: __class__ is not an attribute",
    ),
    "a deep argument": (
        "def f(x): return 1",
        ["x = ()\nfor _ in range(3000): x = (x,)\nassert f(x)"],
        {},
        (True,),
        "",
    ),
    "classes that are no test cases": (
        F,
        ["class U:\n  def test_a(s): 1 / 0\n@lambda c: c()\nclass V: pass\nassert f(1)"],
        {},
        (True,),
        "",
    ),
    "functions of the standard library on objects of the program": (
        "from dataclasses import dataclass\n@dataclass\nclass P: x: int\nf = P",
        [
            "import dataclasses, unittest\nassert dataclasses.asdict(f(1)) == {'x': 1}\n"
            "unittest.main()\nassert isinstance(f, type) and not isinstance(5, str)"
        ],
        {},
        (True,),
        "",
    ),
    "a conversion within another call": (
        "class T:\n  def __int__(s): return 3\ndef f(x): return T()",
        ["assert str(int(f(1))) == '3'"],
        {},
        (True,),
        "",
    ),
    "an operator of another kind than that of the reference": (
        T,
        ["T() - 1"],
        {"reference": "class T:\n  def __lt__(s, o): pass"},
        (False,),
        f"test 1 (@): {MINUS}",
    ),
    "dicts with defaults": (
        "from collections import defaultdict\n"
        "def f(x): return defaultdict(list if x else lambda: 1)",
        ["assert f(1)['a'] == []\ntry: f(0)['a']\nexcept KeyError: pass\nelse: assert 0"],
        {},
        (True,),
        "",
    ),
    "a long number": ("def f(x): return 10**5000", ["assert f(1) == 10**5000"], {}, (True,), ""),
}
