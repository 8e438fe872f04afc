"""Test data: programs that try to make a row look broken, or to run code through its tests.

See `test_attacks.py`.
"""

# a row that a correct program passes; its tests and setup use the program in many ways
ROW = {
    "setup": """
import collections
settings = dict(CONFIG)
start = settings["start"]
help_ = helper
""",
    "tests": [
        "assert add(start, 3) == 5",
        "from math import isclose\nassert isclose(add(0.5, 0.25), 0.75)",
        "assert [add(i, i) for i in range(3)] == [0, 2, 4]",
        "assert help_(add, 2, 3) == 5",
        "assert add(collections.Counter('a')['a'], 1) == 2",
    ],
    "answer": """
CONFIG = {"start": 2}
def add(a, b): return a + b
def helper(f, a, b): return f(a, b)
""",
}

_HELPER = "\ndef helper(f, a, b): return f(a, b)\n"
_BLAME = """
=== no names at all
x = 1
=== an empty configuration
CONFIG = {}
def add(a, b): return a + b
=== a configuration that is no dict
CONFIG = 5
def add(a, b): return a + b
=== a configuration that cannot be sent
CONFIG = {"start": object()}
def add(a, b): return a + b
=== a configuration of the wrong type
CONFIG = {"start": "x"}
def add(a, b): return a + b
=== add is missing
CONFIG = {"start": 2}
=== add is no function
CONFIG = {"start": 2}
add = 5
=== add is a module
CONFIG = {"start": 2}
import math as add
=== add raises NameError
CONFIG = {"start": 2}
def add(a, b): raise NameError("name 'start' is not defined", name="start")
=== add raises ImportError
CONFIG = {"start": 2}
def add(a, b): raise ImportError("No module named 'math'", name="math")
=== add raises ModuleNotFoundError of its own
CONFIG = {"start": 2}
class ModuleNotFoundError(ModuleNotFoundError): pass
def add(a, b): raise ModuleNotFoundError("collections")
=== add raises SyntaxError
CONFIG = {"start": 2}
def add(a, b): raise SyntaxError("the row is broken", ("<test 1>", 1, 1, "assert"))
=== add raises an error named RowError
CONFIG = {"start": 2}
class RowError(Exception): pass
def add(a, b): raise RowError("broken")
=== add raises an error named RefusedError
CONFIG = {"start": 2}
class RefusedError(Exception): pass
def add(a, b): raise RefusedError("compile")
=== add raises an error named NotPlain
CONFIG = {"start": 2}
class NotPlain(TypeError): pass
def add(a, b): raise NotPlain("cannot send")
=== add raises RecursionError
CONFIG = {"start": 2}
def add(a, b): return add(a, b)
=== add raises MemoryError
CONFIG = {"start": 2}
def add(a, b): raise MemoryError
=== add raises an exception group
CONFIG = {"start": 2}
def add(a, b): raise ExceptionGroup("x", [ImportError("math")])
=== add raises a text of half a character
CONFIG = {"start": 2}
def add(a, b): raise ValueError("\\ud800 \\x00 \\x1b[2J")
=== add raises an error without a text
CONFIG = {"start": 2}
class Mute(Exception):
    def __str__(self): raise RuntimeError
    __repr__ = __str__
def add(a, b): raise Mute
=== add returns a function of the tests
CONFIG = {"start": 2}
def add(a, b): return add
=== add returns an iterator
CONFIG = {"start": 2}
def add(a, b): return iter([5])
=== add returns half a character
CONFIG = {"start": 2}
def add(a, b): return "\\ud800"
=== add returns something huge
CONFIG = {"start": 2}
def add(a, b): return "5" * (65 << 20)
=== add returns many small things
CONFIG = {"start": 2}
def add(a, b): return [[] for _ in range(1 << 17)]
=== add prints without end
CONFIG = {"start": 2}
def add(a, b): print("x" * (8 << 20)); return 0
=== add returns a doubling structure
CONFIG = {"start": 2}
def add(a, b):
    x = []
    for _ in range(60): x = [x, x]
    return x
=== add exits
CONFIG = {"start": 2}
import os
def add(a, b): os._exit(0)
=== add kills itself
CONFIG = {"start": 2}
import os, ctypes
def add(a, b): ctypes.string_at(0)
=== add replaces its own module
CONFIG = {"start": 2}
import sys
def add(a, b): sys.modules.clear(); return 0
=== the import fails
import math_that_is_missing
=== the program is not Python
def add(a, b
=== the program is a null byte
x = "\x00"
=== the program only has a byte order mark
\ufeff
=== the program has too many brackets
x = BRACKETS
=== it removes the modules of the tests
CONFIG = {"start": 2}
import sys
sys.modules["math"] = sys.modules["collections"] = None
def add(a, b): return 0
=== it replaces the wire
CONFIG = {"start": 2}
import sys
for name, module in list(sys.modules.items()):
    if name.endswith("sandbox.solver") or name.endswith("sandbox.wire"):
        for key in ("encode", "decode", "plain_base", "NotPlain"): setattr(module, key, None)
def add(a, b): return 0
=== it replaces json
CONFIG = {"start": 2}
import json
json.dumps = lambda *a, **k: '["raise", [[0], ["error", [0, "ImportError", "x"], ["x"]]], ""]'
def add(a, b): return 0
=== it closes its pipes
CONFIG = {"start": 2}
import os
def add(a, b): os.closerange(0, 64)
=== it calls back without end
CONFIG = {"start": 2}
def add(a, b): return 0
def helper(f, a, b):
    while True: f(a, b)
=== it defines names of the tests
CONFIG = {"start": 2}
start = settings = isclose = collections = help_ = 0
def add(a, b): return 0
=== it shadows builtins
CONFIG = {"start": 2}
dict = range = isinstance = print = AssertionError = None
def add(a, b): return 0
=== it returns a class
CONFIG = {"start": 2}
class add(Exception): pass
=== it returns a metaclass
CONFIG = {"start": 2}
class M(type):
    def __eq__(cls, other): return True
    def mro(cls): return [cls, object]
class add(metaclass=M):
    def __init__(self, a, b): pass
"""
BLAME: dict[str, str] = {}
for _entry in _BLAME.split("\n=== ")[1:]:
    _title, _body = _entry.split("\n", 1)
    _body = _body.replace("BRACKETS", "(" * 300 + ")" * 300)
    BLAME[_title] = _body + ("" if "helper" in _body else _HELPER)
"""Title -> program for `ROW`, none of which is correct."""

# test -> programs whose text, bytes or replacement of a builtin function it would run
INTERPRETED = {
    "assert sorted(text()) == [5]": ["def text(): return 5\ndef sorted(items): return [5]"],
    "assert eval(text()) == 5": [
        "def text(): return '5'",
        "def text(): return '__import__(\"os\")._exit(0)'",
        'def text(): return \'type("T", (), {"__eq__": lambda *a: True})()\'',
        "def text(): return '[x for x in ().__class__.__base__.__subclasses__()]'",
    ],
    "space = {}\nexec(text(), space)\nassert space['x'] == 5": [
        "def text(): return 'x = 5'",
        'def text(): return \'import sys; sys.modules["__tests__"].space = {"x": 5}; x = 5\'',
    ],
    "assert eval(compile(text(), 'x', 'eval')) == 5": ["def text(): return '5'"],
    "import ast\nassert eval(compile(ast.parse(text(), mode='eval'), 'x', 'eval')) == 5": [
        "def text(): return '5'"
    ],
    "import pickle\nassert pickle.loads(text()) == 5": [
        "def text(): return b\"cbuiltins\\neval\\n(S'5'\\ntR.\"",
        "def text(): return b'cos\\n_exit\\n(I0\\ntR.'",
        "def text(): return b'garbage'",
    ],
    "import pickle, io\nassert pickle.Unpickler(io.BytesIO(text())).load() == 5": [
        "def text(): return b\"cbuiltins\\neval\\n(S'5'\\ntR.\""
    ],
    "import marshal, types\nassert types.FunctionType(marshal.loads(text()), {})() == 5": [
        "import marshal\ndef f(): return 5\ndef text(): return marshal.dumps(f.__code__)"
    ],
    "import types\nassert (lambda: 6).__code__.replace(co_code=text()) == 5": [
        "def text(): return (lambda: 5).__code__.co_code"
    ],
    "import timeit\nassert timeit.timeit(text(), number=1) < 5": ["def text(): return '5'"],
    "import ctypes\nassert ctypes.string_at(text(), 1) == b'5'": ["def text(): return 4096"],
    "import typing\nclass T: __annotations__ = {'a': text()}\nassert typing.get_type_hints(T)": [
        "def text(): return '__import__(\"os\")._exit(0)'"
    ],
    "import dataclasses\nassert dataclasses.make_dataclass('T', [('a', text())])(5).a == 6": [
        "def text(): return '__import__(\"os\")._exit(0)'"
    ],
    "import inspect\nassert inspect.signature(text()).parameters == 5": [
        "def text(): pass\ntext.__signature__ = text.__text_signature__ = '(x=__import__(\"os\"))'"
    ],
    "import collections\nassert collections.namedtuple('T', text())(5) == 5": [
        "def text(): return 'a=__import__(\"os\")._exit(0)'"
    ],
    "assert '{0.__class__}'.format(text()) == text().format(text)": [
        "def text(): return '{0.__class__.__init__.__globals__}'"
    ],
}
