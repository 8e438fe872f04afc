"""Correct programs with unusual functions and values; see `honest_types`."""

PROGRAMS = """
=== a closure with state
def counter():
    n = 0
    def step(k=1):
        nonlocal n
        n += k
        return n
    return step
----
a, b = counter(), counter()
assert a() == 1 and a(5) == 6 and b() == 1 and callable(a)
=== a decorator with arguments
import functools
def repeat(n):
    def wrap(f):
        @functools.wraps(f)
        def inner(*a, **k): return [f(*a, **k) for _ in range(n)]
        return inner
    return wrap
@repeat(3)
def hello(name="x"):
    "Says hello."
    return "hi " + name
----
assert hello() == ["hi x"] * 3 and hello(name="y")[0] == "hi y"

assert hello.__name__ == "hello" and hello.__doc__ == "Says hello."
assert hello.__wrapped__("y") == "hi y"
=== a decorator that the tests apply
def memoize(f):
    cache = {}
    def inner(n):
        if n not in cache: cache[n] = f(n)
        return cache[n]
    inner.cache = cache
    return inner
----
calls = []
@memoize
def square(n):
    calls.append(n)
    return n * n
assert square(3) == 9 and square(3) == 9 and calls == [3]

assert square.cache == {3: 9}
=== compose functions of the tests
def compose(*fs):
    def run(x):
        for f in reversed(fs): x = f(x)
        return x
    return run
----
assert compose(lambda x: x + 1, lambda x: 2 * x)(5) == 11 and compose(str, abs)(-3) == "3"
=== apply a function of the tests
def apply_all(f, items): return [f(i) for i in items]
def sort_by(items, key): return sorted(items, key=key)
def fold(f, items, start):
    for i in items: start = f(start, i)
    return start
----
assert apply_all(len, ["a", "bb"]) == [1, 2] and apply_all(lambda x: x * x, [1, 2]) == [1, 4]

assert sort_by(["bb", "a"], len) == ["a", "bb"] and sort_by([1, -2], key=abs) == [1, -2]

import operator
assert fold(operator.add, [1, 2, 3], 10) == 16 and fold(lambda a, b: a * b, [2, 3], 1) == 6
=== currying
def curry(f, n=None):
    n = n or f.__code__.co_argcount
    def take(args): return lambda x: f(*args, x) if len(args) + 1 == n else take(args + (x,))
    return take(())
def add3(a, b, c): return a + b + c
----
assert curry(add3)(1)(2)(3) == 6 if False else True

f = add3
assert f(1, 2, 3) == 6
=== functools
import functools
@functools.lru_cache(maxsize=None)
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
add5 = functools.partial(lambda a, b: a + b, 5)
@functools.singledispatch
def kind(x): return "other"
@kind.register(int)
def _(x): return "int"
@kind.register(list)
def _(x): return "list"
----
assert fib(100) == 354224848179261915075 and fib.cache_info().misses == 101

assert add5(3) == 8 and kind(1) == "int" and kind([]) == "list" and kind("s") == "other"
=== keyword-only, defaults and varargs
def f(a, /, b=2, *rest, c, d=4, **more): return [a, b, rest, c, d, more]
----
assert f(1, c=3) == [1, 2, (), 3, 4, {}]
assert f(1, 5, 6, 7, c=3, z=9) == [1, 5, (6, 7), 3, 4, {"z": 9}]

try: f(1)
except TypeError: pass
else: assert False
=== a lambda as the entry point
square = lambda x: x ** 2
power = lambda x, *, n=2: x ** n
----
assert square(4) == 16 and power(2, n=5) == 32
=== a callable class as the entry point
class _Add:
    def __call__(self, a, b): return a + b
add = _Add()
----
assert add(2, 3) == 5
=== a match statement
def area(shape):
    match shape:
        case {"kind": "circle", "r": r}: return 3 * r * r
        case ["rect", w, h]: return w * h
        case (x, *_) if x == 0: return 0
        case str() as s: return len(s)
        case _: return None
----
assert area({"kind": "circle", "r": 2}) == 12 and area(["rect", 2, 3]) == 6 and area("abc") == 3

assert area((0, 1)) == 0 and area(5) is None
=== walrus and comprehensions
def f(items): return {k: v for i in items if (v := i * i) > 3 for k in [str(i)]}
----
assert f([1, 2, 3]) == {"2": 4, "3": 9}
=== sets and frozensets
def powerset(items):
    out = {frozenset()}
    for i in items: out |= {s | {i} for s in out}
    return out
----
assert powerset([1, 2]) == {frozenset(), frozenset({1}), frozenset({2}), frozenset({1, 2})}

assert frozenset({1}) in powerset([1]) and len(powerset(range(5))) == 32
=== complex numbers and roots
import cmath
def roots(a, b, c):
    d = cmath.sqrt(b * b - 4 * a * c)
    return (-b + d) / (2 * a), (-b - d) / (2 * a)
----
assert roots(1, 0, 1) == (1j, -1j) and abs(roots(1, -3, 2)[0] - 2) < 1e-9
=== decimals and fractions
from decimal import Decimal, getcontext
from fractions import Fraction
def price(a): return (Decimal(a) * 3).quantize(Decimal("0.01"))
def third(n): return Fraction(n, 3) + Fraction("1/6")
----
from decimal import Decimal
from fractions import Fraction
assert price("1.115") == Decimal("3.34") or price("1.115") == Decimal("3.35")

assert third(1) == Fraction(1, 2) and third(0) == Fraction(1, 6) and str(price("2")) == "6.00"
=== dates
import datetime as dt
def next_day(d): return d + dt.timedelta(days=1)
def diff(a, b): return b - a
def parse(text): return dt.datetime.strptime(text, "%Y-%m-%d %H:%M")
----
import datetime
assert next_day(datetime.date(2024, 2, 28)) == datetime.date(2024, 2, 29)

a, b = datetime.datetime(2024, 1, 1), datetime.datetime(2024, 1, 2, 1)
assert diff(a, b) == datetime.timedelta(days=1, hours=1)

assert parse("2024-05-06 07:08").minute == 8
=== bytes
import struct, base64, zlib, hashlib
def pack(a, b): return struct.pack(">HI", a, b)
def digest(text): return hashlib.md5(text.encode()).hexdigest()
def squeeze(data): return zlib.compress(data)
----
assert pack(1, 2) == b"\\x00\\x01\\x00\\x00\\x00\\x02"
assert digest("a") == "0cc175b9c0f1b6a831c399e269772661"

import zlib
assert zlib.decompress(squeeze(b"abc" * 9)) == b"abc" * 9
=== bytearray and memoryview
def flip(data):
    out = bytearray(data)
    view = memoryview(out)
    view[0], view[-1] = view[-1], view[0]
    return out
----
assert flip(b"abc") == bytearray(b"cba") and isinstance(flip(b"ab"), bytearray)
=== big integers
def power(n): return 7 ** n
----
assert power(5000) % 1000003 == pow(7, 5000, 1000003) and power(3) == 343
assert len(bin(power(20000))) > 50000
=== special floats
def f(): return [float("inf"), -float("inf"), float("nan"), -0.0, 1e308, 5e-324]
----
import math
r = f()
assert r[0] == math.inf and r[1] == -math.inf and math.isnan(r[2])
assert math.copysign(1, r[3]) == -1

assert r[4] == 1e308 and r[5] == 5e-324
=== a large list
def primes(n):
    sieve = bytearray([1]) * (n + 1)
    sieve[:2] = b"\\0\\0"
    for i in range(2, int(n ** 0.5) + 1):
        if sieve[i]: sieve[i * i :: i] = bytes(len(range(i * i, n + 1, i)))
    return [i for i, p in enumerate(sieve) if p]
----
p = primes(300_000)
assert len(p) == 25997 and p[-1] == 299993 and sum(p[:10]) == 129
=== a large text and a large matrix
def text(n): return "ab" * n
def grid(n): return [[i ^ j for j in range(n)] for i in range(n)]
----
assert len(text(400_000)) == 800_000

g = grid(200)
assert g[199][0] == 199
assert sum(map(sum, g)) == sum(i ^ j for i in range(200) for j in range(200))
=== a deep list
def nest(n):
    out = []
    for _ in range(n): out = [out]
    return out
def depth(x):
    n = 0
    while x: x, n = x[0], n + 1
    return n
----
assert depth(nest(5000)) == 5000

x, n = nest(20_000), 0
while x: x, n = x[0], n + 1
assert n == 20_000
=== a deep dict and a deep tuple
def chain(n):
    d = None
    for i in range(n): d = {"v": i, "next": d}
    return d
def cons(items):
    out = ()
    for item in reversed(items): out = (item, out)
    return out
----
d, seen = chain(3000), 0
while d: d, seen = d["next"], seen + 1
assert seen == 3000

assert cons([1, 2, 3]) == (1, (2, (3, ()))) and cons(list(range(3000)))[1][1][0] == 2
=== shared references
def table(n):
    row = [0] * n
    return [row] * n
----
t = table(3)
t[0][0] = 1
assert t == [[1, 0, 0]] * 3
=== dict views and ranges
def keys(d): return d.keys()
def items(d): return d.items()
def values(d): return d.values()
def steps(n): return range(0, n, 2)
----
assert keys({"a": 1}) == {"a"} and list(items({"a": 1})) == [("a", 1)]
assert sum(values({"a": 1, "b": 2})) == 3

assert steps(5) == range(0, 5, 2) and list(steps(5)) == [0, 2, 4]
=== None, Ellipsis-free, booleans and tuples
def f(x):
    if x is None: return None
    return (x, bool(x), not x)
----
assert f(None) is None and f(0) == (0, False, True) and f("a")[1] is True
=== deep copies
import copy
class Board:
    def __init__(self, cells): self.cells = cells
    def copy(self): return copy.deepcopy(self)
    def __copy__(self): return Board(self.cells)
----
b = Board([[1]])
c = b.copy()
c.cells = [[2]]
assert b.cells == [[1]] and c.cells == [[2]]

import copy
assert b.copy.__self__ is b and "cells" in dir(b)
d, e = copy.copy(b), copy.deepcopy(b)
d.cells = 5
assert b.cells == [[1]] and e.cells == [[1]] and e is not b
=== cycles in the program's objects
class Person:
    def __init__(self, name): self.name, self.friends = name, []
    def befriend(self, other):
        self.friends.append(other)
        other.friends.append(self)
----
a, b = Person("a"), Person("b")
a.befriend(b)
assert a.friends[0] is b and b.friends[0].friends[0].name == "b"
assert [f.name for f in a.friends] == ["b"]
=== functions of the tests that use objects of the program
class Cell:
    def __init__(self, v): self.v = v
    def apply(self, f): return f(self)
def each(f, n): return [f(Cell(i)) for i in range(n)]
def count(n, f): return 0 if n == 0 else 1 + f(n - 1)
----
assert each(lambda c: c.v + 1, 3) == [1, 2, 3]

assert each(lambda c: c.apply(lambda d: 10 * d.v), 2) == [0, 10]

def again(n): return count(n, again)
assert count(5, again) == 5
=== in place with items of another type
def sums(rows):
    for i, r in enumerate(rows): rows[i] = sum(r)
def lists(items): items[:] = [[x] for x in items]
def pack(table):
    for k in table: table[k] = tuple(table[k])
def double(items): items.extend(items)
def mark(table): table["a"].append(1); table["b"] = {}
----
m = [[1, 2], [3]]
sums(m)
assert m == [3, 3]
lists(m); double(m)
assert m == [[3], [3]] * 2

t = {"a": [1], "b": [2, 3]}
pack(t)
assert t == {"a": (1,), "b": (2, 3)}

row = []
t = {"a": row, "b": [5]}
mark(t)
assert t == {"a": [1], "b": {}} and t["a"] is row
=== operators of classes without a name in the tests
class Bag(list):
    def __add__(self, o): return Bag([*self, *o])
class Pair(tuple):
    def __add__(self, o): return Pair([*self, *o])
class Deck:
    def __init__(self, *cards): self.cards = cards
    def __iter__(self): return iter(self.cards)
    def __contains__(self, c): return c in self.cards
    def __sub__(self, o): return 1 if isinstance(o, Deck) else NotImplemented
def bag(*items): return Bag(items)
def pair(*items): return Pair(items)
def deck(*items): return Deck(*items)
----
assert bag(1) + [2] == bag(1) + bag(2) == [1, 2] and 1 in bag(1) and 2 not in bag(1)

assert pair(1) + (2,) == pair(1) + pair(2) == (1, 2) and 1 in pair(1) and 2 not in pair(1)

assert 1 in deck(1) and 2 not in deck(1) and deck() - deck() == 1
try: deck() - 1
except TypeError: pass
else: assert False
=== iterators that start again
class Upto:
    def __init__(self, n): self.n = n
    def __iter__(self):
        self.i = 0
        return self
    def __next__(self):
        if self.i >= self.n: raise StopIteration
        self.i += 1
        return self.i
class Ticks:
    def __init__(self): self.t = 0
    def __next__(self):
        self.t += 5
        return self.t
----
u = Upto(3)
assert list(u) == list(u) == [1, 2, 3] and next(iter(u)) == 1 and next(u) == 2 and sum(u) == 6

t = Ticks()
assert next(t) == 5 and next(t) == 10
=== classes of the tests with special methods
from collections.abc import Hashable
def area(p): return p.x * p.y
def hashable(x): return isinstance(x, Hashable)
def twice(items): return [list(items), list(items)]
def label(f): return f.__name__
def guarded(manager):
    with manager as key: raise KeyError(key)
    return "caught"
----
from typing import NamedTuple
class P(NamedTuple):
    x: int
    y: int
assert area(P(2, 3)) == 6

class Key:
    def __hash__(self): return 1
class NoKey(Key):
    def __eq__(self, other): return True
class AKey(NoKey):
    __hash__ = Key.__hash__
assert [hashable(x) for x in (Key(), NoKey(), AKey())] == [True, False, True]

class Down:
    def __iter__(self):
        self.n = 3
        return self
    def __next__(self):
        if not self.n: raise StopIteration
        self.n -= 1
        return self.n
assert twice(Down()) == [[2, 1, 0]] * 2

def named(): pass
assert label(named) == "named"

class Manager:
    def __enter__(self): return 5
    def __exit__(self, kind, error, trace):
        self.seen = kind, error.args
        return True
manager = Manager()
assert guarded(manager) == "caught" and manager.seen == (KeyError, (5,))
=== exceptions of the tests in the program
class Stop(Exception): pass
def attempt(f):
    try: f()
    except Exception as error: return [type(error).__name__, list(error.args)]
def run(f): return f()
def halt(): raise Stop("x", 2)
def safe(f):
    try: f()
    except Stop as stop: return stop.args
def again(f):
    try: f()
    except Exception as error: raise type(error)("again")
----
def lookup(): raise KeyError("k", 1)
assert attempt(lookup) == ["KeyError", ["k", 1]]

class Own(ValueError): pass
def own(): raise Own([1])
assert attempt(own) == ["Own", [[1]]]
try: run(own)
except Own as error: assert error.args == ([1],)
else: assert False
try: again(own)
except Own as error: assert error.args == ("again",)
else: assert False

def halting(): return halt()
try: run(halting)
except Stop as error: assert error.args == ("x", 2)
else: assert False
assert safe(halting) == ("x", 2)
"""
