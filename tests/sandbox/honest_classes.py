"""Correct programs with data structures and class features; see `honest_types`."""

PROGRAMS = """
=== a fraction class with operators
from math import gcd
class Frac:
    def __init__(self, n, d=1):
        g = gcd(n, d) * (1 if d > 0 else -1)
        self.n, self.d = n // g, d // g
    def __add__(self, o): return Frac(self.n * o.d + o.n * self.d, self.d * o.d)
    def __sub__(self, o): return self + (-o)
    def __neg__(self): return Frac(-self.n, self.d)
    def __mul__(self, o): return Frac(self.n * o.n, self.d * o.d)
    def __truediv__(self, o): return Frac(self.n * o.d, self.d * o.n)
    def __eq__(self, o): return (self.n, self.d) == (o.n, o.d)
    def __lt__(self, o): return self.n * o.d < o.n * self.d
    def __abs__(self): return Frac(abs(self.n), self.d)
    def __repr__(self): return f"{self.n}/{self.d}"
----
assert Frac(1, 2) + Frac(1, 3) == Frac(5, 6) and Frac(2, 4) == Frac(1, 2)

assert Frac(1, 2) - Frac(1, 2) == Frac(0) and repr(Frac(1, 2) / Frac(3, 4)) == "2/3"

assert Frac(1, 3) < Frac(1, 2) and abs(Frac(-1, 2)) == Frac(1, 2) and str(-Frac(1, 2)) == "-1/2"
=== a matrix with @ and item access
class Matrix:
    def __init__(self, rows): self.rows = [list(r) for r in rows]
    def __matmul__(self, o):
        return Matrix([[sum(a * b for a, b in zip(r, c)) for c in zip(*o.rows)] for r in self.rows])
    def __getitem__(self, at):
        return self.rows[at[0]][at[1]] if isinstance(at, tuple) else self.rows[at]
    def __setitem__(self, at, v): self.rows[at[0]][at[1]] = v
    def __eq__(self, o): return self.rows == o.rows
    @property
    def T(self): return Matrix(zip(*self.rows))
----
m = Matrix([[1, 2], [3, 4]])
assert (m @ Matrix([[1, 0], [0, 1]])) == m and m[1, 0] == 3 and m[0] == [1, 2]

m[0, 0] = 9
assert m.rows == [[9, 2], [3, 4]] and m.T.rows == [[9, 3], [2, 4]]
=== a polynomial with call and reflected operators
class Poly:
    def __init__(self, *c): self.c = list(c)
    def __call__(self, x): return sum(c * x ** i for i, c in enumerate(self.c))
    def __add__(self, k): return Poly(self.c[0] + k, *self.c[1:])
    __radd__ = __add__
    def __pow__(self, n): return [self.c, n]
    def __getitem__(self, i): return self.c[i]
    def __len__(self): return len(self.c)
----
p = Poly(1, 0, 2)
assert p(3) == 19 and (5 + p).c == [6, 0, 2] and (p + 1)(0) == 2 and len(p) == 3 and p[-1] == 2

assert list(p) == [1, 0, 2] and p ** 2 == [[1, 0, 2], 2] and p[1:] == [0, 2]
=== in-place operators
class Total:
    def __init__(self): self.items = []
    def __iadd__(self, item):
        self.items.append(item)
        return self
    def __len__(self): return len(self.items)
    def __bool__(self): return bool(self.items)
----
t = Total()
assert not t
t += 5
t += 6
assert t and len(t) == 2 and t.items == [5, 6]
=== a context manager
class Timer:
    def __init__(self): self.events = []
    def __enter__(self):
        self.events.append("enter")
        return self
    def __exit__(self, kind, error, trace):
        self.events.append(kind.__name__ if kind else None)
        return kind is ZeroDivisionError and str(error) == "division by zero"
----
with Timer() as t:
    t.events.append("body")
assert t.events == ["enter", "body", None]

with t:
    1 / 0
assert t.events[-1] == "ZeroDivisionError"

try:
    with t: raise KeyError("x")
except KeyError: pass
else: assert False
=== a generator-based context manager
from contextlib import contextmanager
log = []
@contextmanager
def tag(name):
    log.append("<" + name)
    yield name.upper()
    log.append(name + ">")
def events(): return log
----
with tag("b") as name:
    assert name == "B"
assert events() == ["<b", "b>"]
=== a generator
def fib():
    a, b = 0, 1
    while True:
        yield a
        a, b = b, a + b
----
g = fib()
assert [next(g) for _ in range(7)] == [0, 1, 1, 2, 3, 5, 8]

import itertools
assert list(itertools.islice(fib(), 5)) == [0, 1, 1, 2, 3]

for value in fib():
    if value > 50: break
assert value == 55
=== a finite generator with send and close
def average():
    total, count, value = 0, 0, None
    while True:
        value = yield value
        total, count = total + value, count + 1
        value = total / count
----
a = average()
next(a)
assert a.send(10) == 10 and a.send(20) == 15

a.close()
=== generator expressions, map, filter, zip
def squares(n): return (i * i for i in range(n))
def evens(items): return filter(lambda i: i % 2 == 0, items)
def pairs(a, b): return zip(a, b)
def doubled(items): return map(lambda i: 2 * i, items)
----
assert list(squares(4)) == [0, 1, 4, 9] and sum(squares(3)) == 5 and max(squares(3)) == 4

assert list(evens([1, 2, 4])) == [2, 4] and dict(pairs("ab", [1, 2])) == {"a": 1, "b": 2}

assert sorted(doubled([3, 1])) == [2, 6] and tuple(doubled([])) == ()
=== yield from
def flatten(items):
    for item in items:
        if isinstance(item, (list, tuple)): yield from flatten(item)
        else: yield item
----
assert list(flatten([1, [2, (3, [4])], 5])) == [1, 2, 3, 4, 5]
assert "".join(flatten(["a", ["b"]])) == "ab"
=== an iterator class
class Countdown:
    def __init__(self, n): self.n = n
    def __iter__(self): return self
    def __next__(self):
        if self.n <= 0: raise StopIteration
        self.n -= 1
        return self.n + 1
----
assert list(Countdown(3)) == [3, 2, 1]

c = Countdown(2)
assert next(c) == 2 and next(c) == 1 and next(c, "end") == "end"

try: next(c)
except StopIteration: pass
else: assert False
=== an iterable class
class Range2:
    def __init__(self, n): self.n = n
    def __iter__(self):
        for i in range(self.n): yield 2 * i
    def __reversed__(self): return reversed(list(self))
    def __contains__(self, x): return x % 2 == 0 and 0 <= x < 2 * self.n
    def __len__(self): return self.n
----
r = Range2(3)
assert list(r) == [0, 2, 4] and list(reversed(r)) == [4, 2, 0] and 4 in r and 3 not in r
assert len(r) == 3

a, b, c = r
assert (a, b, c) == (0, 2, 4) and sum(r) == 6 and [*r, 9] == [0, 2, 4, 9]
=== the old sequence protocol
class Squares:
    def __getitem__(self, i):
        if i >= 4: raise IndexError(i)
        return i * i
----
assert list(Squares()) == [0, 1, 4, 9] and 9 in Squares()
=== an exception class with attributes
class InsufficientFunds(Exception):
    def __init__(self, need, have):
        super().__init__(f"need {need}, have {have}")
        self.need, self.have = need, have
class Wallet:
    def __init__(self, have): self.have = have
    def pay(self, need):
        if need > self.have: raise InsufficientFunds(need, self.have)
        self.have -= need
----
w = Wallet(5)
try: w.pay(7)
except InsufficientFunds as error:
    assert error.need == 7 and error.have == 5 and str(error) == "need 7, have 5"
else: assert False

w.pay(5)
assert w.have == 0
=== exception hierarchies
class BankError(Exception): pass
class LimitError(BankError, ValueError): pass
def draw(n):
    if n > 10: raise LimitError("too much", n)
    if n < 0: raise BankError
    return n
----
for kind in (LimitError, BankError, ValueError, Exception):
    try: draw(11)
    except kind as e: assert e.args == ("too much", 11)
    else: assert False

try: draw(-1)
except LimitError: assert False
except BankError: pass

assert issubclass(LimitError, BankError) and draw(3) == 3
=== builtin exceptions
def pick(kind):
    if kind == 0: return [][1]
    if kind == 1: return {}["k"]
    if kind == 2: return 1 / 0
    if kind == 3: return int("x")
    if kind == 4: return None.x
    if kind == 5: raise NotImplementedError("later")
    if kind == 6: return undefined_name
    if kind == 7: assert False, "no"
----
kinds = [IndexError, KeyError, ZeroDivisionError, ValueError, AttributeError]
kinds += [NotImplementedError, NameError, AssertionError]
for number, kind in enumerate(kinds):
    try: pick(number)
    except kind: pass
    else: assert False, number
=== an exception with a cause
class ParseError(ValueError): pass
def parse(text):
    try: return int(text)
    except ValueError as e: raise ParseError(f"bad {text!r}") from e
----
try: parse("x")
except ParseError as e:
    e.add_note("seen")
    assert "bad 'x'" in str(e) and isinstance(e, ValueError) and e.__notes__ == ["seen"]
else: assert False
=== exceptions as values
def attempt(f, *args):
    try: return f(*args)
    except Exception as e: return e
----
e = attempt(int, "z")
assert isinstance(e, ValueError) and "invalid literal" in str(e)

assert attempt(int, "7") == 7
=== a linked list
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
def build(items):
    head = None
    for item in reversed(items): head = Node(item, head)
    return head
def reverse(head):
    last = None
    while head: head.next, last, head = last, head, head.next
    return last
----
n = reverse(build([1, 2, 3]))
items = []
while n:
    items.append(n.value)
    n = n.next
assert items == [3, 2, 1]

a = Node(1); b = Node(2, a)
assert b.next is a and b.next == a and a.next is None and a != b
=== a binary search tree
class Tree:
    def __init__(self): self.root, self.size = None, 0
    def insert(self, key):
        if self.root is None: self.root = [key, None, None]
        else:
            at = self.root
            while True:
                side = 1 if key < at[0] else 2
                if at[side] is None:
                    at[side] = [key, None, None]
                    break
                at = at[side]
        self.size += 1
        return self
    def __iter__(self):
        def walk(node):
            if node:
                yield from walk(node[1])
                yield node[0]
                yield from walk(node[2])
        return walk(self.root)
    def __len__(self): return self.size
----
t = Tree().insert(3).insert(1).insert(2)
assert list(t) == [1, 2, 3] and len(t) == 3 and 2 in t and min(t) == 1
=== a trie with nested dicts
class Trie:
    def __init__(self): self.root = {}
    def insert(self, word):
        node = self.root
        for c in word: node = node.setdefault(c, {})
        node["$"] = True
    def search(self, word):
        node = self.root
        for c in word:
            if c not in node: return False
            node = node[c]
        return "$" in node
----
t = Trie()
t.insert("apple")
assert t.search("apple") and not t.search("app") and t.search("x") is False
=== a union-find
class DSU:
    def __init__(self, n): self.p = list(range(n))
    def find(self, x):
        while self.p[x] != x:
            self.p[x] = self.p[self.p[x]]
            x = self.p[x]
        return x
    def union(self, a, b):
        a, b = self.find(a), self.find(b)
        self.p[a] = b
        return a != b
----
d = DSU(4)
assert d.union(0, 1) and not d.union(1, 0) and d.find(0) == d.find(1) != d.find(2)
=== a heap of custom objects
import heapq
class Task:
    def __init__(self, priority, name): self.priority, self.name = priority, name
    def __lt__(self, other): return self.priority < other.priority
def order(tasks):
    heap = list(tasks)
    heapq.heapify(heap)
    return [heapq.heappop(heap).name for _ in range(len(heap))]
----
assert order([Task(2, "b"), Task(1, "a")]) == ["a", "b"] and Task(1, "") < Task(2, "")

assert [t.name for t in sorted([Task(3, "c"), Task(1, "a")])] == ["a", "c"]

assert min(Task(5, "x"), Task(4, "y")).name == "y"
=== total ordering
from functools import total_ordering
@total_ordering
class Card:
    RANKS = "23456789TJQKA"
    def __init__(self, text): self.rank, self.suit = text
    def __eq__(self, o): return self.rank == o.rank and self.suit == o.suit
    def __lt__(self, o): return self.RANKS.index(self.rank) < self.RANKS.index(o.rank)
----
assert Card("2h") < Card("Ah") and Card("Kd") >= Card("Qd") and Card("2h") == Card("2h")

assert max(map(Card, ["3h", "Ks", "9d"])).suit == "s" and Card.RANKS[0] == "2"
=== properties and setters
class Temp:
    def __init__(self, c): self._c = c
    @property
    def f(self): return self._c * 1.8 + 32
    @f.setter
    def f(self, value): self._c = (value - 32) / 1.8
    @f.deleter
    def f(self): self._c = 0
----
t = Temp(100)
assert t.f == 212
t.f = 32
assert t._c == 0 and hasattr(t, "f") and not hasattr(t, "g") and getattr(t, "g", 5) == 5

t.f = 50
assert t._c == 10
del t.f
assert t._c == 0
=== class attributes, static and class methods
class Counter2:
    made = 0
    def __init__(self): Counter2.made += 1
    @staticmethod
    def double(x): return 2 * x
    @classmethod
    def create(cls, n): return [cls() for _ in range(n)]
----
assert Counter2.made == 0 and Counter2.double(4) == 8

objects = Counter2.create(3)
assert Counter2.made == 3 and len(objects) == 3
assert all(isinstance(o, Counter2) for o in objects)

Counter2.made = 10
Counter2()
assert Counter2.made == 11 and Counter2.__name__ == "Counter2"
=== abstract classes and inheritance
from abc import ABC, abstractmethod
import math
class Shape(ABC):
    @abstractmethod
    def area(self): ...
    def __lt__(self, o): return self.area() < o.area()
class Circle(Shape):
    def __init__(self, r): self.r = r
    def area(self): return math.pi * self.r ** 2
class Rect(Shape):
    def __init__(self, w, h): self.w, self.h = w, h
    def area(self): return self.w * self.h
----
assert abs(Circle(1).area() - 3.14159) < 1e-4 and isinstance(Rect(1, 2), Shape)
assert issubclass(Circle, Shape)

try: Shape()
except TypeError: pass
else: assert False

assert type(min(Circle(1), Rect(1, 1))) is Rect and type(Rect(1, 1)).__name__ == "Rect"
=== multiple inheritance and super
class A:
    def who(self): return ["A"]
class B(A):
    def who(self): return ["B"] + super().who()
class C(A):
    def who(self): return ["C"] + super().who()
class D(B, C):
    def who(self): return ["D"] + super().who()
----
assert D().who() == ["D", "B", "C", "A"] and isinstance(D(), A) and isinstance(D(), C)
assert not isinstance(B(), C)
=== a metaclass and a registry
class Meta(type):
    registry = {}
    def __new__(mcs, name, bases, ns):
        cls = super().__new__(mcs, name, bases, ns)
        mcs.registry[name] = cls
        return cls
class Base(metaclass=Meta): pass
class Child(Base):
    def hello(self): return "hi"
def make(name): return Meta.registry[name]()
----
assert make("Child").hello() == "hi" and isinstance(make("Child"), Base)
=== a singleton
class Config:
    _instance = None
    def __new__(cls):
        if cls._instance is None:
            cls._instance = super().__new__(cls)
            cls._instance.values = {}
        return cls._instance
----
a, b = Config(), Config()
assert a is b
a.values["k"] = 1
assert a == b
=== __getattr__ and __slots__
class Proxy:
    __slots__ = ("target",)
    def __init__(self, target): self.target = target
    def __getattr__(self, name): return getattr(self.target, name)
----
p = Proxy([3, 1, 2])
p.sort()
assert p.target == [1, 2, 3] and p.count(1) == 1
=== descriptors
class Positive:
    def __set_name__(self, owner, name): self.name = "_" + name
    def __get__(self, obj, owner=None): return self if obj is None else getattr(obj, self.name)
    def __set__(self, obj, value):
        if value < 0: raise ValueError("negative")
        setattr(obj, self.name, value)
class Order:
    count = Positive()
    def __init__(self, count): self.count = count
----
o = Order(3)
o.count = 5
assert o.count == 5

try: o.count = -1
except ValueError as e: assert e.args == ("negative",)
else: assert False
"""
