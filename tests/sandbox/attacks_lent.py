"""Attacking programs, as data: they misuse the tests' objects or what a call may change.

See `test_attacks.py`. `ask` performs any operation on any object of the tests.
"""

ROW = {
    "setup": "import io, random\nseen = []\n",
    "tests": [
        """
class Case:
    def __init__(self, a, b): self.a, self.b, self._want = a, b, a + b
    def scaled(self, k): return self.a * k
expected = 5
items = [3, 1, 2]
rng = random.SystemRandom()
case = Case(rng.randrange(10 ** 9), rng.randrange(10 ** 9))
def secret(): return case._want
assert total(case, lambda x: x, iter([1]), io.StringIO("1")) == case._want
""",
        "for n in (7, 8): assert total(Case(n, n), len, (i for i in [n]), seen) == 2 * n",
        "case = Case(2, 3)\nassert total(case, secret, map(abs, [1]), items) == expected",
        "assert isinstance(total(case, min, [], []), int)",
        "assert int(total(case, min, [], [])) == 5 and float(total(case, min, [], [])) == 5.0",
        "assert items == [3, 1, 2] and seen == [] and (case.a, case.b) == (2, 3)",
    ],
    "answer": "def total(c, f, i, s): return c.a + c.b",
}
_ASK = """
def ask(c, operation, *arguments, **keywords):
    return c._remote_[0].ask(operation, c, *arguments, **keywords)
def raw(f, number, operation, *arguments):
    solver, stand_in = f._remote_[0], Lie()
    solver.proxy_numbers[id(stand_in)] = number
    return solver.ask(operation, stand_in, *arguments)
class Lie(str):
    def __str__(self): return "a"
    def startswith(self, *a): return False
    def __eq__(self, o): return True
    def __hash__(self): return hash("get")
"""
_BODIES = """
=== a private attribute
return c._want
=== a private attribute with ask
return ask(c, "get", "_want")
=== a name that lies
return ask(c, "get", Lie("_want"))
=== an operation that lies
return ask(c, Lie("get"), "_want")
=== a name in bytes
return ask(c, "get", b"_want")
=== a name in a list
return ask(c, "get", ["_want"])
=== __dict__
return ask(c, "get", "__dict__")["_want"]
=== __class__
return ask(c, "get", "__class__").__init__.__globals__["case"]._want
=== __getattribute__
return ask(c, "__getattribute__", "_want")
=== operations of the solver
for name in ("state", "contents", "copy", "deepcopy", "find", "dir", "change"):
    try: return ask(c, name)["_want"]
    except Exception: pass
=== globals of a method
return c.scaled.__globals__["case"]._want
=== the object of a method
return c.scaled.__self__._want
=== attributes of a function
return raw(f, 1, "get", "__globals__")["case"]._want
=== calls of objects without a call
return raw(f, 0, "__call__")
=== negative and false numbers
for n in (-1, -2, False, True, None, "0", 1 << 70):
    try: return raw(f, n, "get", "_want")
    except Exception: pass
=== all numbers
for n in range(20):
    for name in ("_want", "gi_frame", "f_globals", "__self__", "__func__", "__traceback__"):
        try: return raw(f, n, "get", name)
        except Exception: pass
=== the frame of an iterator
return i.gi_frame.f_globals["case"]._want
=== attributes of an iterator
return ask(i, "get", "gi_frame").f_globals["case"]._want
=== an iterator without end
return sum(1 for _ in iter(lambda: next(i, 0), 5))
=== a format string
return "{0._want}".format(c) + "{0.__class__}".format(c)
=== attrgetter
import operator
return operator.attrgetter("_want")(c)
=== keywords
return ask(c, "get", name="_want")
=== more arguments
return ask(c, "get", "_want", 0) or ask(c, "get", "a", 0, 0)
=== another class
ask(c, "set", "__class__", int)
return 5
=== another equality
ask(c, "set", "__eq__", lambda o: True)
return c
=== changes of the case
c.a = c.b = 0
return 0
=== the traceback of an error of the tests
try: c.scaled()
except TypeError as e: return e.__traceback__.tb_next.tb_frame.f_globals["case"]._want
=== an error of the tests as the answer
try: c.scaled()
except TypeError as e: return e
=== an error of the tests, raised again
try: next(ask(i, "__next__") and iter([]))
except StopIteration as e: raise e
=== StopIteration
raise StopIteration(5)
=== the case itself
return c
=== a function of the tests as the answer
return f
=== an iterator of the tests as the answer
return i
=== an equal answer by operators
class T:
    def __radd__(self, o): return o
    def __eq__(self, o): return True
    def __int__(self): return 5
    def __float__(self): return 5.0
return T()
=== conversions to other types
class T(int):
    def __int__(self): return 5
    def __float__(self): return 5.0
    def __index__(self): return 5
return T(0)
=== a class that is an int for itself
class M(type):
    def __instancecheck__(cls, v): return True
    def __subclasscheck__(cls, v): return True
class T(metaclass=M): pass
return T()
=== changed arguments
if isinstance(s, list): s[:] = []
=== a changed argument of another type
if isinstance(s, list): s.append(c), s.append(s.append)
return None
=== a changed global
global expected, items, case, int, isinstance, Case
expected = items = case = int = isinstance = Case = 0
return 0
"""
LENT = {}
for _entry in _BODIES.split("\n=== ")[1:]:
    _title, _body = _entry.split("\n", 1)
    _lines = "\n".join(f"    {line}" for line in _body.splitlines())
    LENT[_title] = (
        f"expected, items, case = 5, [3, 1, 2], None\n{_ASK}def total(c, f, i, s):\n{_lines}\n"
    )
"""Title -> program for `ROW`; no program is correct."""
