"""More correct programs; see `honest_rows`."""

# ruff: noqa: E501 - data
PROGRAMS = r"""
=== numbers of all kinds
from decimal import Decimal
from fractions import Fraction
import math
def half(x): return x / 2
def digits(n): return math.factorial(n)
def roots(b, c): return complex(b, c).conjugate()
----
from decimal import Decimal
from fractions import Fraction
assert half(Decimal("1.5")) == Decimal("0.75") and half(Fraction(1, 3)) == Fraction(1, 6)
assert digits(30) == 265252859812191058636308480000000 and roots(1, 2) == 1 - 2j
assert half(float("inf")) == float("inf") and str(half(3)) == "1.5" and len(str(digits(2000))) == 5736
=== stacks and queues with len, bool and iteration
class Stack:
    def __init__(self, it=()): self._d = list(it)
    def push(self, x): self._d.append(x)
    def pop(self):
        if not self._d: raise IndexError("pop from empty stack")
        return self._d.pop()
    def __len__(self): return len(self._d)
    def __bool__(self): return bool(self._d)
    def __iter__(self): return reversed(self._d)
    def __reversed__(self): return iter(self._d)
    def __getitem__(self, i): return self._d[i]
    def __delitem__(self, i): del self._d[i]
----
s = Stack([1, 2])
s.push(3)
assert len(s) == 3 and list(s) == [3, 2, 1] and list(reversed(s)) == [1, 2, 3] and s[0:2] == [1, 2]
del s[0]
assert s.pop() == 3 and s and not Stack()
try: Stack().pop()
except IndexError as e: assert str(e) == "pop from empty stack"
else: assert False
=== a subclass of dict
class Default(dict):
    def __missing__(self, k): return k * 2
class Attr(dict):
    __getattr__ = dict.__getitem__
----
d = Default(a=1)
assert d["a"] == 1 and d["z"] == "zz" and d == {"a": 1} and isinstance(d, dict) and dict(d) == {"a": 1}
assert Attr(x=3).x == 3 and list(Attr(x=3).items()) == [("x", 3)]
=== global state
total, log = 0, []
def add(n):
    global total
    total += n
    log.append(n)
    return total
----
assert add(2) == 2 and total == 2
add(3)
assert total == 5 and log == [2, 3]
=== printed output
def table(n):
    for i in range(1, n + 1): print(i, i * i, sep="\t")
----
import io
from contextlib import redirect_stdout
buf = io.StringIO()
with redirect_stdout(buf): table(2)
assert buf.getvalue() == "1\t1\n2\t4\n"
=== numpy in place
import numpy as np
def normalize(a):
    a -= a.mean()
    return a.std()
def clip(a, lo): a[a < lo] = lo
def grid(n): return np.arange(n * n).reshape(n, n)
----
import numpy as np
a = np.array([1.0, 3.0])
assert normalize(a) == 1.0 and a.tolist() == [-1.0, 1.0]
clip(a, 0)
assert np.allclose(a, [0, 1]) and grid(2).sum() == 6 and (grid(3)[1] == [3, 4, 5]).all()

assert_allclose(grid(1), 0); assert_almost_equal(grid(1), 0); assert_array_equal(grid(1), 0)
assert allclose(grid(1), 0) and numpy.allclose(grid(1), 0)
=== numpy.char and strings
import numpy as np
def upper(v): return np.char.upper(np.array(v))
----
assert upper(["a", "bc"]).tolist() == ["A", "BC"] and upper(["x"]).dtype.kind == "U"
=== tests for a runner
def total(v):
    if v is None: raise TypeError("no list")
    return sum(v)
----
import unittest
class T(unittest.TestCase):
    @classmethod
    def setUpClass(cls): cls.v = [1, 2]
    def test_sum(self):
        for v, s in (([], 0), (self.v, 3)):
            with self.subTest(v=v): self.assertEqual(total(v), s)
    def test_error(self):
        with self.assertRaisesRegex(TypeError, "no"): total(None)
if __name__ == "__main__":
    unittest.main(argv=["x"], exit=False)

def test_plain(): assert total([5]) == 5
def test_default(v=(1, 1)): assert total(v) == 2
=== a matrix class with factories
class Matrix:
    def __init__(self, rows): self.rows = rows
    @classmethod
    def identity(cls, n): return cls([[int(i == j) for j in range(n)] for i in range(n)])
    def __mul__(self, o):
        if isinstance(o, (int, float)): return Matrix([[v * o for v in r] for r in self.rows])
        return Matrix([[sum(a * b for a, b in zip(r, c)) for c in zip(*o.rows)] for r in self.rows])
    def __eq__(self, o): return self.rows == o.rows
    def __getitem__(self, ij): return self.rows[ij[0]][ij[1]]
----
m = Matrix([[1, 2], [3, 4]])
assert m * Matrix.identity(2) == m and (m * 2).rows == [[2, 4], [6, 8]] and m[1, 0] == 3

assert (Matrix.identity(2) * 3).rows == [[3, 0], [0, 3]]
=== deep recursion
import sys
sys.setrecursionlimit(20000)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
def nested(n): return [nested(n - 1)] if n else []
----
assert depth(9000) == 9000

x = nested(3000)
for _ in range(3000): [x] = x
assert x == []
=== shared and mutable results
def grid(n): return [[0] * n] * n
class Box:
    def __init__(self): self.items, self.tags = [], {"a": set()}
----
g = grid(2)
g[0][0] = 1
assert g == [[1, 0], [1, 0]]

b = Box()
b.items.append(1)
b.tags["b"] = 2
assert b.items == [1] and b.tags == {"a": set(), "b": 2}
=== match statement
from dataclasses import dataclass
@dataclass
class Op:
    kind: str
    args: tuple = ()
def run(o):
    match o:
        case {"op": "add", "a": a, "b": b}: return a + b
        case [x, *rest]: return x, rest
        case str() as s: return s[::-1]
        case _: return None
def parse(s): return Op(s, (1, 2))
----
assert run({"op": "add", "a": 1, "b": 2}) == 3 and run([1, 2]) == (1, [2]) and run("ab") == "ba" and run(5) is None
match parse("x"):
    case Op(kind="x", args=(a, b)): assert (a, b) == (1, 2)
    case _: assert False
match parse("y"):
    case Op("y", args): assert args == (1, 2)
    case _: assert False
=== objects of the tests that the program changes
def promote(people):
    for p in people:
        if p.age > 30: p.title = "senior"
    return [p for p in people if p.title == "senior"]
def describe(p): return f"{p.name} ({p.age})" if hasattr(p, "name") else "?"
----
class Person:
    title = "junior"
    def __init__(self, name, age): self.name, self.age = name, age
a, b = Person("A", 40), Person("B", 20)
out = promote([a, b])
assert out == [a] and out[0] is a and a.title == "senior" and b.title == "junior"
assert describe(a) == "A (40)" and describe(3) == "?"
=== exceptions with fields and groups
class HttpError(Exception):
    def __init__(self, code, msg):
        super().__init__(msg)
        self.code = code
def get(u):
    if not u: raise HttpError(404, "no url")
    if u == "x": raise ExceptionGroup("many", [ValueError(1), KeyError("k")])
    return u
import json
def parse(s): return json.loads(s)
----
try: get("")
except HttpError as e: assert e.code == 404 and str(e) == "no url"
else: assert False
try: get("x")
except* KeyError as g: assert len(g.exceptions) == 1
except* ValueError: pass
import json
try: parse("{")
except json.JSONDecodeError as e: assert e.pos == 1
else: assert False
=== copies
import copy
class Deck:
    def __init__(self, cards): self.cards = cards
    def __copy__(self): return Deck(self.cards)
    def __eq__(self, o): return self.cards == o.cards
----
import copy
a = Deck([[1]])
b, c = copy.copy(a), copy.deepcopy(a)
a.cards.append(2)
assert b.cards == [[1], 2] and c.cards == [[1]] and a == b and a != c
=== lru_cache and its statistics
from functools import lru_cache
@lru_cache(maxsize=None)
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
----
assert fib(80) == 23416728348467685 and fib.cache_info().misses == 81
fib.cache_clear()
assert fib(10) == 55
=== a function for re.sub
def double(m): return str(int(m.group(0)) * 2)
----
import re
assert re.sub(r"\d+", double, "a1b22") == "a2b44"
=== containers of the library
from collections import UserDict, UserList
class Registry(UserDict): pass
def registry(): return Registry(a=1)
def names(): return UserList([1, 2])
----
assert registry() == {"a": 1} and names() == [1, 2]
=== subclasses of data in the tests
def total(xs): return sum(xs)
def shout(s): return s.upper() + "!"
def kind(x): return isinstance(x, int)
----
import enum
class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2
class Name(str): pass
assert total([Level.LOW, Level.HIGH]) == 3 and shout(Name("a")) == "A!" and kind(Level.LOW)
=== operators on what other operators give
class N:
    def __init__(self, v): self.v = v
    def __neg__(self): return N(-self.v)
    def __pos__(self): return N(abs(self.v))
    def __invert__(self): return N(~self.v)
    def __enter__(self): return N(2 * self.v)
    def __exit__(self, *error): pass
    def __sub__(self, o): return N(self.v - o)
    def __eq__(self, o): return self.v == o
----
assert -N(3) - 1 == -4 and +N(-3) - 1 == 2 and ~N(3) - 1 == -5

with N(3) as n: assert n - 1 == 5
=== a class decorator that adds comparisons
def comparable(cls):
    cls.__eq__ = lambda a, b: a.v == getattr(b, "v", b)
    cls.__lt__ = lambda a, b: a.v < getattr(b, "v", b)
    return cls
@comparable
class Box:
    def __init__(self, v): self.v = v
----
assert Box(3) == 3 and Box(2) < 3 and not Box(3) < 3
=== names with underscores
class Span:
    def __init__(self, a, b): self.from_, self.to = a, b
def span(): return Span(1, 2)
----
assert span().from_ == 1 and span.__qualname__ == "span"
=== objects of the library that the tests lend
def write(f): f.write(b"ab")
def drain(q):
    q.put(3)
    return [q.get(), q.get()]
def finish(event): event.set()
def add(f): return f(2), f.__name__
----
import io
out = io.BytesIO()
write(out)
assert out.getvalue() == b"ab"

import queue
q = queue.Queue()
q.put(1)
assert drain(q) == [1, 3] and q.empty()

import queue
q = queue.SimpleQueue()
q.put(1)
assert drain(q) == [1, 3] and q.empty()

import threading
event = threading.Event()
finish(event)
assert event.is_set()

import functools
seen = []
def note(k, v): seen.append(v); return k + v
assert add(functools.partial(note, 1)) == (3, "partial") and seen == [2]
=== other containers in place
def grow(d): d.append(3)
def turn(d): d.rotate(1)
def flip(data): data.reverse()
def deepen(d): d[0].append(3)
----
from collections import deque
d = deque([1, 2])
grow(d)
assert d == deque([1, 2, 3])
turn(d)
assert list(d) == [3, 1, 2]

rows = deque([[1]])
row = rows[0]
deepen(rows)
assert row == [1, 3]

data = bytearray(b"ab")
flip(data)
assert data == bytearray(b"ba")
=== paths and NotImplemented
import pathlib
def path(): return pathlib.Path("/a/b")
def nothing(): return NotImplemented
----
import pathlib
assert path() == pathlib.Path("/a/b") and nothing() is NotImplemented
=== slots of the setup
def push(head, v): return Node(v, head)
def values(n): return [n.val, *values(n.next)] if n else []
----
class Node:
    __slots__ = ("val", "next")
    def __init__(self, val, next=None): self.val, self.next = val, next
++++
n = push(Node(1), 2)
assert n.val == 2 and n.next.val == 1 and n.next.next is None

assert values(Node(1, Node(2))) == [1, 2]
=== a template of the program
def between(): return "{} and {}"
----
assert between().format(1, 2) == "1 and 2"
=== a list of the setup
def fill(n):
    bag = Bag(range(n))
    bag.label = "b"
    return bag
----
class Bag(list): pass
++++
assert fill(2) == [0, 1] and fill(0).label == "b" and isinstance(fill(1), list)
=== an exception derived from one of the library
import json
class BadFile(json.JSONDecodeError): pass
def parse(text): raise BadFile("bad", text, 1)
----
import json
try: parse("ab")
except json.JSONDecodeError as error: assert error.pos == 1 and type(error).__name__ == "BadFile"
else: assert False
=== builtin functions under another name
to_set = set
to_number = int
----
assert to_set([1, 1]) == {1}

assert to_number('5') == 5 and to_number('-7') == -7
=== a class as a condition
class Foo: x = 1
----
assert Foo and callable(Foo) and Foo().x == 1
"""
