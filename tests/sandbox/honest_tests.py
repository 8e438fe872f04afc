"""Correct programs whose tests use them in unusual ways; see `honest_types`."""

PROGRAMS = """
=== dataclass helpers in the tests
from dataclasses import dataclass, field
@dataclass
class P:
    x: int
    y: int = 0
    tags: list = field(default_factory=list)
----
from dataclasses import asdict, astuple, replace, fields, is_dataclass
assert asdict(P(1)) == {"x": 1, "y": 0, "tags": []}

import dataclasses
assert dataclasses.astuple(P(1, 2)) == (1, 2, [])

from dataclasses import replace
assert replace(P(1), y=5) == P(1, 5)

from dataclasses import fields, is_dataclass
assert [f.name for f in fields(P)] == ["x", "y", "tags"] and is_dataclass(P) and is_dataclass(P(1))
=== conversions
class Roman:
    V = dict(I=1, V=5, X=10)
    def __init__(self, s): self.s = s
    def __int__(self):
        v = [self.V[c] for c in self.s]
        return sum(-a if i + 1 < len(v) and a < v[i + 1] else a for i, a in enumerate(v))
    def __float__(self): return float(int(self))
    def __index__(self): return int(self)
    def __bytes__(self): return self.s.encode()
    def __complex__(self): return complex(int(self))
    def __hash__(self): return hash(self.s)
----
assert int(Roman("XIV")) == 14

assert float(Roman("IX")) == 9.0 and str(int(Roman("IX"))) == "9"

assert bytes(Roman("IX")) == b"IX" and complex(Roman("V")) == 5

from fractions import Fraction
assert float(Fraction(1, 2)) + float(Roman("V")) == 5.5 and int("11", 2) == 3
try: int(Roman("V"), 2)
except TypeError: pass
else: assert False
=== in place, returns None
def rotate(m):
    m[:] = [list(r) for r in zip(*m[::-1])]
def move_zeroes(a):
    k = 0
    for x in a:
        if x: a[k] = x; k += 1
    for i in range(k, len(a)): a[i] = 0
def count(words, table):
    for w in words: table[w] = table.get(w, 0) + 1
def add_all(s, xs): s.update(xs)
----
m = [[1, 2], [3, 4]]
rotate(m)
assert m == [[3, 1], [4, 2]]

a = [0, 1, 0, 3]
assert move_zeroes(a) is None and a == [1, 3, 0, 0]

t = {}
count("aab", t)
count("a", table=t)
assert t == {"a": 3, "b": 1}

s = {1}
add_all(s, [2])
assert s == {1, 2}
=== in place, returns a length
def remove_duplicates(nums):
    k = 0
    for x in nums:
        if k == 0 or nums[k - 1] != x: nums[k] = x; k += 1
    return k
----
nums = [1, 1, 2]
k = remove_duplicates(nums)
assert k == 2 and nums[:k] == [1, 2]
=== in place with rows and dicts inside
def zero(m):
    rows = [i for i, r in enumerate(m) if 0 in r]
    cols = [j for j in range(len(m[0])) if any(r[j] == 0 for r in m)]
    for i, r in enumerate(m):
        for j in range(len(r)):
            if i in rows or j in cols: r[j] = 0
class Solution:
    def solve(self, board):
        for row in board:
            for i, c in enumerate(row): row[i] = c.upper()
----
row = [1, 0]
m = [[1, 1], row]
zero(m)
assert m == [[1, 0], [0, 0]] and row == [0, 0]

b = [["a"], ["b"]]
Solution().solve(b)
assert b == [["A"], ["B"]]
=== equality with other types
class Vec:
    def __init__(self, *c): self.c = c
    def __eq__(self, o): return self.c == (o.c if isinstance(o, Vec) else tuple(o))
    def __iter__(self): return iter(self.c)
----
assert Vec(1, 2) == (1, 2) and Vec(1, 2) == Vec(1, 2)
=== equality that ignores a cache
class Poly:
    def __init__(self, *c): self.c = list(c); self._cache = {}
    def __call__(self, x):
        if x not in self._cache: self._cache[x] = sum(c * x ** i for i, c in enumerate(self.c))
        return self._cache[x]
    def __eq__(self, o): return isinstance(o, Poly) and self.c == o.c
----
p = Poly(1, 2)
assert p(2) == 5 and p == Poly(1, 2) and p != Poly(1)
=== function metadata
def area(r: float, *, pi: float = 3.14) -> float:
    'Area of a circle.'
    return pi * r * r
----
assert area.__name__ == "area" and area.__doc__ == "Area of a circle."

import inspect
assert list(inspect.signature(area).parameters) == ["r", "pi"]

import typing
assert typing.get_type_hints(area, {})["return"] is float and callable(area)

assert area.__annotations__["r"] is float and area.__defaults__ is None
assert area.__kwdefaults__ == {"pi": 3.14}

import inspect
assert inspect.isfunction(area) and inspect.getdoc(area) == "Area of a circle."
assert inspect.getfullargspec(area).kwonlyargs == ["pi"]
=== kinds of functions
import abc, asyncio
def gen():
    yield 1
async def co(): return 2
async def agen():
    yield 3
class Shape(abc.ABC): area = abc.abstractmethod(lambda self: 1)
class Point(Shape): area = lambda self: 0
----
import inspect, types
assert inspect.isgeneratorfunction(gen) and inspect.isgenerator(gen())

import types
assert isinstance(gen(), types.GeneratorType)

import inspect
assert inspect.iscoroutinefunction(co) and inspect.iscoroutine(co())
assert inspect.isasyncgenfunction(agen) and inspect.isasyncgen(agen())
assert inspect.isabstract(Shape) and inspect.ismethod(Point().area)

import asyncio
assert asyncio.iscoroutinefunction(co) and asyncio.run(co()) == 2

from collections.abc import Iterator, Iterable, Generator
assert isinstance(gen(), Iterator) and isinstance(gen(), Iterable) and isinstance(gen(), Generator)

from typing import Callable
assert isinstance(gen, Callable)
=== iterating over enumerations
from enum import Enum, auto
class Color(Enum):
    RED = auto()
    GREEN = auto()
    @classmethod
    def parse(cls, s): return cls[s.upper()]
----
assert [c.name for c in Color] == ["RED", "GREEN"] and len(Color) == 2

assert Color["RED"] is Color.RED and Color(2) is Color.GREEN and Color.RED in Color

assert Color.parse("green") == Color.GREEN and Color.RED.value == 1 and Color.RED != Color.GREEN

assert {Color.RED: 1}[Color.RED] == 1 and repr(Color.RED) == "<Color.RED: 1>"
assert str(Color.RED) == "Color.RED"

assert Color.__members__["RED"] is Color.RED
=== arguments that are generators and iterators
def take(it, n): return [x for _, x in zip(range(n), it)]
def total(it): return sum(it)
def chunks(it, n):
    it = iter(it)
    while chunk := take(it, n): yield chunk
----
assert total(i for i in range(4)) == 6

assert take(iter("abc"), 2) == ["a", "b"]

assert list(chunks(range(5), 2)) == [[0, 1], [2, 3], [4]] and total(map(int, "12")) == 3

import itertools
assert take(itertools.count(5), 2) == [5, 6]

assert total(x for x in [1, 2]) == 3 and take(zip("ab", "cd"), 1) == [("a", "c")]
=== objects of the tests as arguments
def describe(x): return x.name + "!"
def length(x): return len(x)
def apply(x, *a): return x(*a)
----
class T:
    name = "t"
    def __len__(self): return 3
assert describe(T()) == "t!" and length(T()) == 3

from types import SimpleNamespace
assert describe(SimpleNamespace(name="s")) == "s!"

import math
assert apply(math.sqrt, 9) == 3 and apply(str.upper, "a") == "A" and apply(int, "5") == 5
assert apply(len, [1]) == 1

assert apply("abc".index, "b") == 1 and apply([1, 2].count, 2) == 1
=== a node class of the tests
def depth(node): return 0 if node is None else 1 + max(depth(node.left), depth(node.right))
def invert(node):
    if node: node.left, node.right = invert(node.right), invert(node.left)
    return node
----
class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right
t = TreeNode(1, TreeNode(2), TreeNode(3, TreeNode(4)))
assert depth(t) == 3

assert invert(t).left.val == 3
=== hashable objects of the tests
def distinct(items): return len(set(items))
----
class Key:
    def __init__(self, n): self.n = n
    def __eq__(self, other): return self.n == other.n
    def __hash__(self): return hash(self.n)
assert distinct([Key(1), Key(2), Key(1)]) == 2
=== IO objects
import io
def read_lines(f): return [line.rstrip() for line in f]
def write(f): f.write("hi\\n"); print("there", file=f)
def make(): return io.StringIO("a\\nb")
----
import io
assert read_lines(io.StringIO("a\\nb\\n")) == ["a", "b"]

out = io.StringIO()
write(out)
assert out.getvalue() == "hi\\nthere\\n"

assert make().read() == "a\\nb" and make().readline() == "a\\n"
=== type variables and protocols
from typing import Generic, TypeVar, Protocol, runtime_checkable, NamedTuple, TypedDict, Optional
T = TypeVar("T")
class Stack(Generic[T]):
    def __init__(self) -> None: self._items: list[T] = []
    def push(self, x: T) -> None: self._items.append(x)
    def pop(self) -> T: return self._items.pop()
    def __len__(self): return len(self._items)
@runtime_checkable
class Sized(Protocol):
    def __len__(self) -> int: ...
class Movie(TypedDict):
    name: str
def movie(n) -> Movie: return Movie(name=n)
----
s = Stack()
s.push(1); s.push("a")
assert s.pop() == "a" and len(s) == 1

assert isinstance(Stack(), Sized) and movie("x") == {"name": "x"}

s = Stack[int]()
s.push(3)
assert s.pop() == 3
=== init subclass and class getitem
class Plugin:
    plugins = []
    def __init_subclass__(cls, **kw):
        super().__init_subclass__(**kw)
        Plugin.plugins.append(cls)
    def __class_getitem__(cls, k): return f"{cls.__name__}[{k}]"
class A(Plugin): pass
class B(Plugin): pass
----
assert [p.__name__ for p in Plugin.plugins] == ["A", "B"] and Plugin["x"] == "Plugin[x]"

assert Plugin.plugins[0] is A and issubclass(B, Plugin) and A.__bases__ == (Plugin,)

assert A.__module__ and A.__qualname__ == "A" and B().__class__ is B
assert B().__class__.__name__ == "B"
=== observers with test callbacks
class Bus:
    def __init__(self): self.h = {}
    def on(self, name, f): self.h.setdefault(name, []).append(f); return self
    def emit(self, name, *a, **k): return [f(*a, **k) for f in self.h.get(name, [])]
----
seen = []
bus = Bus().on("x", seen.append).on("x", lambda v: v * 2)
assert bus.emit("x", 4) == [None, 8] and seen == [4]

def listener(a, b=1): return a + b
assert Bus().on("y", listener).emit("y", 1, b=5) == [6]
=== retry with a test function
def retry(times, kinds=(Exception,)):
    def deco(f):
        def inner(*a, **k):
            for i in range(times):
                try: return f(*a, **k)
                except kinds:
                    if i == times - 1: raise
        return inner
    return deco
----
calls = []
@retry(3)
def flaky():
    calls.append(1)
    if len(calls) < 3: raise ValueError("no")
    return "ok"
assert flaky() == "ok" and len(calls) == 3

@retry(2, (KeyError,))
def bad(): raise KeyError("k")
try: bad()
except KeyError as e: assert e.args == ("k",)
else: assert False
=== comparisons in containers
class Item:
    def __init__(self, n): self.n = n
    def __eq__(self, o): return isinstance(o, Item) and self.n == o.n
    def __hash__(self): return hash(self.n)
    def __repr__(self): return f"Item({self.n})"
def items(): return [Item(1), Item(2)]
----
assert items() == [Item(1), Item(2)] and Item(1) in items() and items().index(Item(2)) == 1

assert len({Item(1), Item(1)}) == 1 and {Item(1): "x"}[Item(1)] == "x"
assert repr(items()) == "[Item(1), Item(2)]"

assert set(items()) == {Item(2), Item(1)} and items().count(Item(1)) == 1 and Item(1) != 1
assert not Item(1) == "x"
=== UserDict, UserList, ChainMap
from collections import UserDict, UserList, ChainMap, UserString
class L(UserList):
    def total(self): return sum(self.data)
class K(UserDict):
    def __setitem__(self, k, v): super().__setitem__(k.lower(), v)
def conf(): return ChainMap({"a": 1}, {"a": 2, "b": 3})
----
l = L([1, 2])
l.append(3)
assert l.total() == 6 and list(l) == [1, 2, 3] and l[0] == 1 and len(l) == 3

k = K()
k["AB"] = 1
assert "ab" in k and k["ab"] == 1 and dict(k) == {"ab": 1} and list(k) == ["ab"]

assert conf()["a"] == 1 and conf()["b"] == 3 and dict(conf()) == {"a": 1, "b": 3}

assert L([1]) == [1] and L([1]) == L([1])
=== Mapping and Sequence from abc
from collections.abc import Mapping, MutableMapping, Sequence, MutableSequence, Set
class Odd(Set):
    def __init__(self, *xs): self.xs = xs
    def __contains__(self, x): return x in self.xs
    def __iter__(self): return iter(self.xs)
    def __len__(self): return len(self.xs)
class Reg(MutableMapping):
    def __init__(self, *a): self.d = dict(*a)
    def __getitem__(self, k): return self.d[k]
    def __setitem__(self, k, v): self.d[k] = v
    def __delitem__(self, k): del self.d[k]
    def __iter__(self): return iter(self.d)
    def __len__(self): return len(self.d)
class Seq(Sequence):
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i):
        if isinstance(i, slice): return [j * j for j in range(*i.indices(self.n))]
        if i >= self.n: raise IndexError
        return i * i
----
r = Reg({"a": 1})
r["b"] = 2
assert dict(r) == {"a": 1, "b": 2} and list(r.items()) == [("a", 1), ("b", 2)]
assert r.get("z", 0) == 0
assert r.pop("a") == 1 and "a" not in r and {**r} == {"b": 2}

s = Seq(4)
assert list(s) == [0, 1, 4, 9] and s[1:3] == [1, 4] and 4 in s and s.index(9) == 3
assert list(reversed(s)) == [9, 4, 1, 0]

from collections.abc import Mapping, Sequence
assert isinstance(Reg(), Mapping) and isinstance(Seq(1), Sequence)

assert Reg({"a": 1}) == {"a": 1}

assert Odd(1, 3) == {3, 1} and Odd(1, 3) == Odd(3, 1) != Odd(1) and Odd(1) != {3}
=== coroutines and task groups
import asyncio
async def fetch(n):
    await asyncio.sleep(0)
    return n * n
async def run(ns): return await asyncio.gather(*(fetch(n) for n in ns))
class Pool:
    async def __aenter__(self): self.open = True; return self
    async def __aexit__(self, *a): self.open = False
    def __aiter__(self): self.i = 0; return self
    async def __anext__(self):
        if self.i >= 2: raise StopAsyncIteration
        self.i += 1
        return self.i
----
import asyncio
assert asyncio.run(run([1, 2])) == [1, 4]

async def main():
    r = await asyncio.gather(fetch(2), fetch(3))
    return r
assert asyncio.run(main()) == [4, 9]

async def main():
    async with Pool() as p:
        got = [x async for x in p]
    return got, p.open
assert asyncio.run(main()) == ([1, 2], False)

loop = asyncio.new_event_loop()
assert loop.run_until_complete(fetch(5)) == 25
loop.close()
=== arrays and heaps and bisect
from array import array
import heapq, bisect
def arr(): return array("i", [1, 2, 3])
def heap(xs): h = list(xs); heapq.heapify(h); return h
def ins(a, x): b = list(a); bisect.insort(b, x); return b
----
assert list(arr()) == [1, 2, 3] and arr()[1] == 2 and len(arr()) == 3
assert arr().tolist() == [1, 2, 3]

assert heap([3, 1, 2])[0] == 1 and ins([1, 3], 2) == [1, 2, 3]

from array import array
assert arr() == array("i", [1, 2, 3])
=== simple namespace and module-like answers
from types import SimpleNamespace, MappingProxyType
import uuid, ipaddress, pathlib
def ns(): return SimpleNamespace(a=1, b=[2])
def proxy(): return MappingProxyType({"a": 1})
def path(): return pathlib.PurePosixPath("/a") / "b.txt"
def ip(): return ipaddress.ip_address("10.0.0.1")
def uid(): return uuid.UUID(int=5)
----
assert ns().a == 1 and ns().b == [2] and proxy()["a"] == 1 and len(proxy()) == 1

assert str(path()) == "/a/b.txt" and path().suffix == ".txt" and path().name == "b.txt"

assert str(ip()) == "10.0.0.1" and uid().int == 5

import pathlib
assert path() == pathlib.PurePosixPath("/a/b.txt")

import uuid, ipaddress
assert uid() == uuid.UUID(int=5) and ip() == ipaddress.ip_address("10.0.0.1")
=== globals that change
stack = []
count = 0
table = {"a": [1]}
def push(x):
    global count
    stack.append(x)
    count += 1
def reset():
    global stack
    stack = []
def nested(): table["a"].append(2)
----
assert stack == [] and count == 0
push(3)
assert stack == [3] and count == 1
reset()
assert stack == [] and count == 1

nested()
assert table == {"a": [1, 2]}

stack.append(5)
push(6)
assert stack == [5, 6] and len(stack) == 2

import copy, json, pickle
assert copy.deepcopy(table) == {"a": [1, 2]} and json.loads(json.dumps(table)) == table
"""
