"""Test data: programs that try to pass without being correct; run by `test_escapes.py`."""

import re

TESTS = (
    "assert add(2, 3) == 5",
    "assert [add(i, i) for i in range(3)] == [0, 2, 4]",
    "assert abs(add(0.5, 0.25) - 0.75) < 1e-9",
    "assert all(map(lambda n: add(n, 1) == n + 1, [1, 2, 3]))",
    "import math\nassert math.isclose(add(1, 2), 3)",
)
"""Tests for a program `add`; a fake tries to pass them all without adding."""

_EVERY_PIPE = """
import os, struct
def tell(data):
    for number in range(64):
        try: os.write(number, data)
        except OSError: pass
"""
_FRAME = """
import json
def frame(message):
    data = json.dumps(message).encode()
    return struct.pack('>I', len(data)) + data
"""
_EQUAL = "def __eq__(self, other): return True\n    def __ne__(self, other): return False\n    "
_ANY = (
    "__add__ = __radd__ = __sub__ = __rsub__ = __abs__ = lambda self, *a: self\n    "
    "__lt__ = __gt__ = __le__ = __ge__ = lambda self, *a: True\n    "
    "__hash__ = lambda self: 0\n    "
    "__float__ = lambda self: 3.0\n    "
)

# name -> program. `# fools` marks programs that pass if program and tests share a process and only
# the exit status counts.
_FAKES = f"""
=== equal to everything # fools
class Same:
    {_EQUAL}{_ANY}pass
def add(a, b): return Same()
=== a number equal to everything # fools
class Same(int):
    {_EQUAL}{_ANY}pass
def add(a, b): return Same(5)
=== a text equal to everything # fools
class Same(str):
    {_EQUAL}{_ANY}pass
def add(a, b): return Same("5")
=== a list equal to everything # fools
class Same(list):
    {_EQUAL}{_ANY}pass
def add(a, b): return Same([5])
=== a class that claims to be int # fools
class Same:
    {_EQUAL}{_ANY}__class__ = int
    def __len__(self): return 2
    def __str__(self): return "10"
    def __float__(self): return 3.0
def add(a, b): return Same()
=== a metaclass equal to everything
class Meta(type):
    def __eq__(cls, other): return True
    def __hash__(cls): return 0
class Same(metaclass=Meta): pass
def add(a, b): return Same
=== exits at import # fools
import os
#END
os._exit(0)
=== calls sys.exit at import # fools
import sys
#END
sys.exit(0)
=== exits in the call # fools
import os
def add(a, b): os._exit(0)
=== raises SystemExit in the call # fools
def add(a, b): raise SystemExit(0)
=== exits from a timer # fools
import os, signal, time
signal.signal(signal.SIGALRM, lambda *a: os._exit(0))
def add(a, b): signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(5)
=== exits from a thread # fools
import os, threading, time
def add(a, b): threading.Thread(target=os._exit, args=(0,)).start(); time.sleep(5)
=== exits from excepthook # fools
import os, sys
sys.excepthook = lambda *a: os._exit(0)
def add(a, b): sys.excepthook()
=== exits when its result is freed # fools
import os
class Last:
    def __del__(self): os._exit(0)
def add(a, b): return Last()
=== keyboard interrupt in the call
def add(a, b): raise KeyboardInterrupt
=== AssertionError replaced # fools
import builtins, sys
builtins.AssertionError = type("Quiet", (SystemExit,), dict(code=0))
def add(a, b): sys.exit(0)
=== abs, all, isinstance, len replaced
import builtins
builtins.abs = lambda x: 0.0
builtins.all = builtins.isinstance = lambda *a: True
builtins.len = lambda x: 2
def add(a, b): return 5
=== isclose replaced
import math
math.isclose = lambda *a, **k: True
def add(a, b): return 5
=== a module of its own called math
class math:
    isclose = staticmethod(lambda *a: True)
def add(a, b): return 5
=== raises StopIteration
def add(a, b): raise StopIteration
=== raises GeneratorExit
def add(a, b): raise GeneratorExit
=== exits from a trace function # fools
import os, sys
sys.settrace(lambda *a: os._exit(0))
def add(a, b): return 5
=== reads the caller's constants
import sys
def add(a, b):
    frame = sys._getframe(1)
    while frame:
        for constant in frame.f_code.co_consts:
            if isinstance(constant, int): return constant
        frame = frame.f_back
=== exits if a caller mentions add # fools
import sys, os
def add(a, b):
    frame = sys._getframe(1)
    while frame:
        if "add" in frame.f_code.co_names: os._exit(0)
        frame = frame.f_back
=== searches memory for the tests # fools
import gc, os
def add(a, b):
    for thing in gc.get_objects():
        texts = [x for x in thing if isinstance(x, str)] if isinstance(thing, (tuple, list)) else []
        if any("assert add" in text for text in texts): os._exit(0)
=== reads the tests through the stack # fools
import inspect, os
def add(a, b):
    if any("add" in found.frame.f_code.co_names for found in inspect.stack(0)): os._exit(0)
=== answers before the request
{_EVERY_PIPE}{_FRAME}
for _ in range(50): tell(frame(["value", 5]))
def add(a, b): return 5
=== writes a verdict everywhere
{_EVERY_PIPE}
tell(b'{{"passed": [true, true, true, true, true, true, true], "problem": ""}}')
def add(a, b): tell(b'{{"passed": [true, true, true, true, true, true, true]}}')
=== a frame longer than memory
{_EVERY_PIPE}
def add(a, b): tell(b"\\xff" * 64)
=== a frame of brackets
{_EVERY_PIPE}
def add(a, b): tell(struct.pack(">I", 400000) + b"[" * 400000)
=== references a nonexistent object
{_EVERY_PIPE}{_FRAME}
def add(a, b): tell(frame(["value", dict(object=10**6)]))
=== reports SystemExit as an error
{_EVERY_PIPE}{_FRAME}
def add(a, b): tell(frame(["error", "SystemExit", [0], "x"]))
=== raises StopIteration, on the wire
{_EVERY_PIPE}{_FRAME}
def add(a, b): tell(frame(["error", "StopIteration", [], "x"]))
=== no value and no error
{_EVERY_PIPE}{_FRAME}
def add(a, b): tell(frame(["end"]))
=== encoder replaced
import sys
for name, module in list(sys.modules.items()):
    if name.endswith("sandbox.solver"): module.encode = lambda *a: dict(object=0)
def add(a, b): return 5
=== json.dumps replaced
import json
json.dumps = lambda *a, **k: '["value", true]'
def add(a, b): return True
=== closes everything
import os
def add(a, b): os.closerange(0, 64)
=== closes everything at once
import os
#END
os.closerange(0, 64)
=== not a number
def add(a, b): return float("nan")
=== an endless iterator
import itertools
def add(a, b): return itertools.count()
=== an endless answer
def add(a, b): return "5" * 10**8
=== prints the answer
def add(a, b): print(5)
=== returns itself
add = lambda *a: add
"""


def raw_message(message: str) -> str:
    """A program that writes `message`, JSON text, to every descriptor when `add` is called."""
    return (
        f"{_EVERY_PIPE}\ndef add(a, b):\n    data = {message.encode()!r}\n"
        "    tell(struct.pack('>I', len(data)) + data)\n"
    )


def fakes() -> dict[str, tuple[str, bool]]:
    """name -> (program, whether it fools a naive grader)"""
    programs = {}
    for entry in re.split(r"^=== ", _FAKES, flags=re.MULTILINE)[1:]:
        title, program = entry.split("\n", 1)
        name, _, mark = title.partition(" # ")
        programs[name] = program, mark == "fools"
    return programs
