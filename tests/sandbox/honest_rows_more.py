"""More correct programs; see `honest_rows`."""

# ruff: noqa: E501 - data
PROGRAMS = r'''
=== threads in the tests
import threading
class Counter:
    def __init__(self): self.n, self.lock = 0, threading.Lock()
    def inc(self):
        with self.lock: self.n += 1
----
import threading
c = Counter()
ts = [threading.Thread(target=lambda: [c.inc() for _ in range(20)]) for _ in range(4)]
[t.start() for t in ts]; [t.join() for t in ts]
assert c.n == 80

from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(3) as pool: list(pool.map(lambda _: c.inc(), range(10)))
assert c.n == 90
=== threads in the program that use the tests' objects
from concurrent.futures import ThreadPoolExecutor
def parallel(f, items):
    with ThreadPoolExecutor(3) as pool: return list(pool.map(f, items))
----
seen = []
assert parallel(lambda x: seen.append(x) or x * x, [1, 2, 3]) == [1, 4, 9] and sorted(seen) == [1, 2, 3]
=== asyncio tasks
import asyncio
async def fetch(n):
    await asyncio.sleep(0)
    return n * 2
async def gather(ns): return await asyncio.gather(*(fetch(n) for n in ns))
----
import asyncio
async def main():
    t = asyncio.create_task(fetch(2))
    assert await asyncio.wait_for(fetch(3), 5) == 6
    assert await asyncio.gather(fetch(1), gather([1, 2])) == [2, [2, 4]]
    return await t
assert asyncio.run(main()) == 4

assert asyncio.run(gather([3])) == [6] and asyncio.run(asyncio.wait_for(fetch(1), timeout=1)) == 2
=== async context managers and generators
class Conn:
    open = False
    async def __aenter__(self):
        self.open = True
        return self
    async def __aexit__(self, *a): self.open = False
    async def rows(self):
        for i in range(3): yield i
----
import asyncio
async def main():
    async with Conn() as c:
        assert c.open
        rows = [r async for r in c.rows()]
    return rows, c.open
assert asyncio.run(main()) == ([0, 1, 2], False)
=== aware datetimes
from datetime import datetime, timedelta, timezone
def to_utc(d): return d.astimezone(timezone.utc)
def at(h): return datetime(2024, 1, 1, h, tzinfo=timezone(timedelta(hours=2)))
----
from datetime import datetime, timedelta, timezone
d = datetime(2024, 1, 1, 12, tzinfo=timezone(timedelta(hours=2), "X"))
assert to_utc(d) == datetime(2024, 1, 1, 10, tzinfo=timezone.utc) and at(2).utcoffset() == timedelta(hours=2)
=== compiled patterns and matches
import re
def find(p, s): return p.findall(s)
def first(p, s): return p.search(s)
----
import re
assert find(re.compile(r"\d+", re.M), "a1b22") == ["1", "22"]

m = first(re.compile(r"(?P<k>\w)=(\d)"), "a=1")
assert m.group("k") == "a" and m.groups() == ("a", "1") and m and m[2] == "1" and m.span() == (0, 3)
assert first(re.compile("z"), "a") is None
=== a generator of random numbers
import random
def shuffled(v, rng):
    v = list(v)
    rng.shuffle(v)
    return v
def roll(rng=random): return rng.randint(1, 6)
----
import random
assert shuffled(range(5), random.Random(3)) == shuffled(range(5), random.Random(3))
assert sorted(shuffled([1, 2], random.Random(1))) == [1, 2] and 1 <= roll() <= 6
=== StopIteration in the tests
class Countdown:
    def __init__(self, n): self.n = n
    def __iter__(self): return self
    def __next__(self):
        if self.n <= 0: raise StopIteration
        self.n -= 1
        return self.n
    def advance(self):
        if self.n <= 0: raise StopIteration("done")
        self.n -= 1
----
c = Countdown(2)
assert list(c) == [1, 0]
try: next(c)
except StopIteration: pass
else: assert False

c = Countdown(0)
try: c.advance()
except StopIteration as e: assert e.value == "done"
else: assert False
=== the cause of an exception
class ConfigError(Exception): pass
def load(s):
    try: return int(s)
    except ValueError as e: raise ConfigError("bad") from e
----
try: load("x")
except ConfigError as e: assert isinstance(e.__cause__, ValueError) and str(e) == "bad"
else: assert False
=== patched input
def ask():
    name = input("name? ")
    print("hi", name)
    return name
----
from unittest.mock import patch
with patch("builtins.input", return_value="Ada"): assert ask() == "Ada"

import builtins, io, contextlib
out = io.StringIO()
builtins.input = lambda prompt="": "Bo"
with contextlib.redirect_stdout(out): ask()
assert out.getvalue() == "hi Bo\n"
=== standard input of a function
import sys
def total(): return sum(int(line) for line in sys.stdin)
def two(): return input() + input()
----
import io, sys
sys.stdin = io.StringIO("1\n2\n")
assert total() == 3
sys.stdin = io.StringIO("a\nb\n")
assert two() == "ab"
=== mocks
def notify(users, send):
    for u in users: send(u, subject="hi")
    return len(users)
def stamp(clock): return clock.now() + 1
----
from unittest.mock import MagicMock, Mock, call
m = MagicMock()
assert notify(["a", "b"], m) == 2 and m.call_args_list == [call("a", subject="hi"), call("b", subject="hi")]
m.assert_called_with("b", subject="hi")
assert stamp(Mock(**{"now.return_value": 4})) == 5
=== a patched function of the library
import random, time
def roll(): return random.randint(1, 6)
def wait():
    time.sleep(100)
    return "done"
----
from unittest.mock import patch
with patch("random.randint", return_value=40) as r: assert roll() == 40
assert roll() <= 6
with patch("time.sleep") as s:
    assert wait() == "done"
    s.assert_called_once_with(100)
import random
with patch.object(random, "randint", lambda a, b: b): assert roll() == 6
=== doctest and other modules
import doctest, getopt, glob, configparser
def parse(args): return getopt.getopt(args, "a:b")
def double(x):
    """
    >>> double(2)
    4
    """
    return 2 * x
def read(text):
    c = configparser.ConfigParser()
    c.read_string(text)
    return {s: dict(c[s]) for s in c.sections()}
----
assert parse(["-a", "1", "x"]) == ([("-a", "1")], ["x"]) and double(3) == 6
assert read("[s]\nk = v\n") == {"s": {"k": "v"}}
=== a decorator that reads the signature
import functools, inspect
def curry(f):
    n = len(inspect.signature(f).parameters)
    def take(*a): return f(*a) if len(a) >= n else functools.partial(take, *a)
    return functools.wraps(f)(take)
def logged(f):
    @functools.wraps(f)
    def run(*a, **k):
        run.calls += 1
        return f(*a, **k)
    run.calls = 0
    return run
----
assert curry(lambda a, b, c: a + b + c)(1)(2)(3) == 6

@logged
def area(r, pi=3):
    "The area."
    return pi * r * r
assert area(2) == 12 and area(r=1, pi=2) == 2 and area.calls == 2
assert area.__name__ == "area" and area.__doc__ == "The area."
=== retry with an exception of the tests
def retry(times, on):
    def deco(f):
        def run():
            for i in range(times):
                try: return f()
                except on:
                    if i == times - 1: raise
        return run
    return deco
----
class Flaky(Exception): pass
n = []
@retry(3, Flaky)
def f():
    n.append(1)
    if len(n) < 3: raise Flaky("again")
    return len(n)
assert f() == 3

@retry(2, (KeyError, Flaky))
def g(): raise Flaky("never")
try: g()
except Flaky as e: assert e.args == ("never",)
else: assert False
=== a sentinel of the tests
def get(d, k, default=None): return d.get(k, default)
----
missing = object()
assert get({}, "a", missing) is missing and get({"a": 1}, "a", missing) == 1
=== fluent interface and identity
class Query:
    def __init__(self): self.parts = []
    def where(self, **k):
        self.parts.append(k)
        return self
    def build(self): return self.parts
class Node:
    def __init__(self, v): self.v, self.kids = v, []
    def add(self, n):
        self.kids.append(n)
        return n
----
q = Query()
assert q.where(a=1) is q and q.where(b=2).build() == [{"a": 1}, {"b": 2}]

root, kid = Node(1), Node(2)
assert root.add(kid) is kid and root.kids[0] is kid and root.kids == [kid]
=== singleton and class attributes
class Config:
    _it = None
    count = 0
    def __new__(cls):
        cls._it = cls._it or super().__new__(cls)
        cls.count += 1
        return cls._it
----
assert Config() is Config() and Config.count == 2
=== enumerations
from enum import Enum, IntEnum, auto, Flag
class Color(Enum):
    RED = 1
    GREEN = "g"
    def pretty(self): return self.name.title()
class Level(IntEnum):
    LOW = auto()
    HIGH = auto()
class P(Flag):
    R = 1
    W = 2
def paint(c): return Color(c)
----
assert paint(1) is Color.RED and Color["GREEN"].value == "g" and Color.RED.pretty() == "Red"
assert [c.name for c in Color] == ["RED", "GREEN"] and len(Color) == 2 and Color.RED in Color
assert Level.HIGH > Level.LOW and Level.LOW == 1 and sorted(Level)[0] is Level.LOW
assert (P.R | P.W) & P.W == P.W and isinstance(Color.RED, Enum) and P.R in (P.R | P.W)
=== dataclasses
from dataclasses import dataclass, field
@dataclass(order=True)
class Item:
    price: float
    name: str = field(compare=False, default="x")
@dataclass(frozen=True)
class Pt:
    x: int
    y: int = 0
----
assert Item(1) < Item(2, "a") and Item(1, "a") == Item(1, "b") and max([Item(3), Item(4)]).price == 4
assert repr(Pt(1)) == "Pt(x=1, y=0)" and {Pt(1): 2}[Pt(1, 0)] == 2 and Pt(1) == Pt(1)
from dataclasses import FrozenInstanceError, asdict
try: Pt(1).x = 2
except FrozenInstanceError: pass
else: assert False
assert asdict(Pt(2)) == {"x": 2, "y": 0}
=== named tuples and typed dicts
from collections import namedtuple
from typing import NamedTuple
Stat = namedtuple("Stat", "name count index")
class Emp(NamedTuple):
    name: str
    pay: int = 0
def stat(s): return Stat(s, len(s), 0)
def top(es): return max(es, key=lambda e: e.pay)
----
s = stat("abc")
assert s.count == 3 and s.index == 0 and s == ("abc", 3, 0) and s._replace(count=1).count == 1
a, b, c = s
assert b == 3 and top([Emp("a", 1), Emp("b", 2)]).name == "b" and Emp("z")[1] == 0
=== abstract base class in the setup
class Circle(Shape):
    def __init__(self, r): self.r = r
    def area(self): return 3 * self.r ** 2
class Bad(Shape): pass
def total(shapes): return sum(s.area() for s in shapes)
----
from abc import ABC, abstractmethod
class Shape(ABC):
    @abstractmethod
    def area(self): ...
    def describe(self): return f"{type(self).__name__}: {self.area()}"
++++
c = Circle(2)
assert isinstance(c, Shape) and issubclass(Circle, Shape) and c.describe() == "Circle: 12"
try: Bad()
except TypeError: pass
else: assert False
class Unit(Shape):
    def area(self): return 1
assert total([Unit(), Circle(1)]) == 4
=== a class hierarchy with super
class Animal:
    def __init__(self, name): self.name = name
    def speak(self): return "..."
    def __str__(self): return f"{self.name} says {self.speak()}"
class Dog(Animal):
    def speak(self): return "woof"
class Puppy(Dog):
    def speak(self): return super().speak().upper()
----
assert str(Puppy("Bo")) == "Bo says WOOF" and isinstance(Puppy("x"), Animal) and issubclass(Dog, Animal)
assert [type(a).__name__ for a in (Dog("a"), Puppy("b"))] == ["Dog", "Puppy"] and f"{Dog('a')}" == "a says woof"
=== properties and errors
class Account:
    def __init__(self, b=0): self._b = b
    @property
    def balance(self): return self._b
    @balance.setter
    def balance(self, v):
        if v < 0: raise ValueError("negative")
        self._b = v
    @classmethod
    def of(cls, v): return cls(v)
    @staticmethod
    def fee(v): return v * 0.5
----
a = Account.of(5)
a.balance += 5
assert a.balance == 10 and Account.fee(4) == 2.0
try: a.balance = -1
except ValueError as e: assert "negative" in str(e)
else: assert False
=== context managers
from contextlib import contextmanager
log = []
@contextmanager
def tag(name):
    log.append(f"<{name}>")
    try: yield name.upper()
    finally: log.append(f"</{name}>")
class Safe:
    def __enter__(self): return self
    def __exit__(self, kind, e, tb):
        self.error = e
        return kind is KeyError
----
with tag("b") as t: assert t == "B"
assert log == ["<b>", "</b>"]

s = Safe()
with s: raise KeyError("k")
assert isinstance(s.error, KeyError)
try:
    with s: 1 / 0
except ZeroDivisionError: pass
else: assert False
=== generators with send
def averager():
    total = n = 0
    avg = None
    while True:
        v = yield avg
        total += v
        n += 1
        avg = total / n
def fib():
    a, b = 0, 1
    while True:
        yield a
        a, b = b, a + b
----
g = averager()
next(g)
assert g.send(2) == 2 and g.send(4) == 3.0
g.close()

from itertools import islice
assert list(islice(fib(), 8)) == [0, 1, 1, 2, 3, 5, 8, 13]
=== closures and function tables
def make_counter():
    n = 0
    def inc(by=1):
        nonlocal n
        n += by
        return n
    return inc
def compose(*fs):
    def run(x):
        for f in reversed(fs): x = f(x)
        return x
    return run
OPS = {"add": lambda a, b: a + b, "neg": lambda a: -a}
----
c, d = make_counter(), make_counter()
assert (c(), c(5), d()) == (1, 6, 1)

assert compose(lambda x: x + 1, abs, OPS["neg"])(3) == 4 and OPS["add"](2, 3) == 5 and sorted(OPS) == ["add", "neg"]
=== callbacks and events
class Bus:
    def __init__(self): self.h = {}
    def on(self, e, f): self.h.setdefault(e, []).append(f)
    def emit(self, e, *a): return [f(*a) for f in self.h.get(e, [])]
----
bus, got = Bus(), []
bus.on("x", got.append)
bus.on("x", lambda v: v + 1)
assert bus.emit("x", 2) == [None, 3] and got == [2] and bus.emit("y") == []
=== sorting with a key of the tests
def group(items, key):
    out = {}
    for i in items: out.setdefault(key(i), []).append(i)
    return out
def by(items, key, reverse=False): return sorted(items, key=key, reverse=reverse)
----
from operator import itemgetter
assert group(["a", "bb", "cc"], len) == {1: ["a"], 2: ["bb", "cc"]}
assert by([(1, "b"), (2, "a")], itemgetter(1)) == [(2, "a"), (1, "b")]
assert by([3, 1], lambda x: x, reverse=True) == [3, 1]
'''
