"""Correct programs for rows like those of LeetCode, HumanEval, MBPP and LiveCodeBench.

"=== title", the program, "----", the tests, separated by empty lines. "++++" ends the row's setup.
Each one is also run as the row's own answer.
"""

# ruff: noqa: E501 - data
from __future__ import annotations

PROGRAMS = r'''
=== two sum
class Solution:
    def twoSum(self, nums, target):
        seen = {}
        for i, n in enumerate(nums):
            if target - n in seen: return [seen[target - n], i]
            seen[n] = i
----
assert Solution().twoSum([2, 7, 11, 15], 9) == [0, 1]

assert Solution().twoSum(nums=[3, 3], target=6) == [0, 1]
=== remove duplicates in place, returns a length
class Solution:
    def removeDuplicates(self, nums):
        k = 0
        for n in nums:
            if k == 0 or nums[k - 1] != n:
                nums[k] = n
                k += 1
        return k
----
nums = [0, 0, 1, 1, 2]
k = Solution().removeDuplicates(nums)
assert k == 3 and nums[:k] == [0, 1, 2]
=== rotate a matrix in place
def rotate(m):
    m[:] = [list(r) for r in zip(*m[::-1])]
----
m = [[1, 2], [3, 4]]
rotate(m)
assert m == [[3, 1], [4, 2]]
=== sort in place and return the list
def bubble(a):
    for i in range(len(a)):
        for j in range(len(a) - 1 - i):
            if a[j] > a[j + 1]: a[j], a[j + 1] = a[j + 1], a[j]
    return a
----
a = [3, 1, 2]
assert bubble(a) == [1, 2, 3] and a == [1, 2, 3]

a = []
assert bubble(a) == []
=== pop from a list and return the item
def take(items, counts):
    item = items.pop()
    counts[item] = counts.get(item, 0) + 1
    return item
----
items, counts = [1, 2], {}
assert take(items, counts) == 2 and take(items, counts) == 1
assert items == [] and counts == {1: 1, 2: 1}
=== invert a binary tree
class Solution:
    def invertTree(self, root):
        if root: root.left, root.right = self.invertTree(root.right), self.invertTree(root.left)
        return root
----
class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right
def levels(t): return t and [t.val, levels(t.left), levels(t.right)]
++++
root = TreeNode(1, TreeNode(2), TreeNode(3))
out = Solution().invertTree(root)
assert levels(out) == [1, [3, None, None], [2, None, None]] and out is root
=== build a tree with the class of the setup
from typing import Optional
class Solution:
    def sortedArrayToBST(self, nums) -> Optional[TreeNode]:
        if not nums: return None
        m = len(nums) // 2
        return TreeNode(nums[m], self.sortedArrayToBST(nums[:m]), self.sortedArrayToBST(nums[m + 1:]))
----
class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right
def depth(t): return 1 + max(depth(t.left), depth(t.right)) if t else 0
++++
t = Solution().sortedArrayToBST([1, 2, 3, 4, 5])
assert isinstance(t, TreeNode) and t.val == 3 and depth(t) == 3 and t.left.right is None
=== reverse a linked list
class Solution:
    def reverseList(self, head):
        prev = None
        while head: head.next, prev, head = prev, head, head.next
        return prev
----
class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next
def build(v): return ListNode(v[0], build(v[1:])) if v else None
def values(n):
    out = []
    while n:
        out.append(n.val)
        n = n.next
    return out
++++
assert values(Solution().reverseList(build([1, 2, 3]))) == [3, 2, 1]

assert Solution().reverseList(None) is None
=== merge two lists with a dummy node
class Solution:
    def merge(self, a, b):
        tail = dummy = ListNode()
        while a and b:
            if a.val > b.val: a, b = b, a
            tail.next, a = a, a.next
            tail = tail.next
        tail.next = a or b
        return dummy.next
----
class ListNode:
    def __init__(self, val=0, next=None): self.val, self.next = val, next
    def __eq__(self, o): return isinstance(o, ListNode) and self.val == o.val and self.next == o.next
    def __repr__(self): return f"{self.val}->{self.next!r}"
++++
a, b = ListNode(1, ListNode(4)), ListNode(2, ListNode(3))
out = Solution().merge(a, b)
assert out == ListNode(1, ListNode(2, ListNode(3, ListNode(4)))) and repr(out) == "1->2->3->4->None"
=== cycle in a linked list
class Solution:
    def hasCycle(self, head):
        slow = fast = head
        while fast and fast.next:
            slow, fast = slow.next, fast.next.next
            if slow is fast: return True
        return False
    def ring(self, n):
        first = node = ListNode(0)
        for i in range(1, n):
            node.next = ListNode(i)
            node = node.next
        node.next = first
        return first
----
class ListNode:
    def __init__(self, val=0): self.val, self.next = val, None
++++
a, b = ListNode(1), ListNode(2)
a.next = b
assert not Solution().hasCycle(a)
b.next = a
assert Solution().hasCycle(a)

r = Solution().ring(3)
assert r.next.next.next is r and Solution().hasCycle(r)
=== a tree class in the program and in the setup
class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val = val
        self.left = left
        self.right = right
class Codec:
    def serialize(self, t): return f"({t.val}{self.serialize(t.left)}{self.serialize(t.right)})" if t else "-"
    def deserialize(self, s):
        def read():
            nonlocal i
            i += 1
            if s[i - 1] == "-": return None
            j = i
            while s[i] not in "(-)": i += 1
            node = TreeNode(int(s[j:i]))
            node.left, node.right = read(), read()
            i += 1
            return node
        i = 0
        return read()
----
class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right
++++
c = Codec()
t = TreeNode(1, TreeNode(2), TreeNode(3, TreeNode(4)))
text = c.serialize(t)
again = c.deserialize(text)
assert c.serialize(again) == text and again.right.left.val == 4 and type(again) is TreeNode
=== clone a graph
class Solution:
    def cloneGraph(self, node):
        seen = {}
        def clone(n):
            if n not in seen:
                seen[n] = Node(n.val)
                seen[n].neighbors = [clone(m) for m in n.neighbors]
            return seen[n]
        return clone(node) if node else None
----
class Node:
    def __init__(self, val=0, neighbors=None):
        self.val, self.neighbors = val, neighbors or []
++++
a, b, c = Node(1), Node(2), Node(3)
a.neighbors, b.neighbors, c.neighbors = [b, c], [a], [a]
d = Solution().cloneGraph(a)
assert d is not a and d.val == 1 and [n.val for n in d.neighbors] == [2, 3]
assert d.neighbors[0].neighbors[0] is d
=== LRU cache
from collections import OrderedDict
class LRUCache:
    def __init__(self, capacity: int):
        self.cap, self.d = capacity, OrderedDict()
    def get(self, key):
        if key not in self.d: return -1
        self.d.move_to_end(key)
        return self.d[key]
    def put(self, key, value):
        self.d[key] = value
        self.d.move_to_end(key)
        if len(self.d) > self.cap: self.d.popitem(last=False)
----
c = LRUCache(2)
c.put(1, 1); c.put(2, 2)
assert c.get(1) == 1
c.put(3, 3)
assert c.get(2) == -1 and c.get(3) == 3 and list(c.d) == [1, 3]
=== a trie with membership
class Trie:
    def __init__(self): self.words = {}
    def insert(self, w):
        n = self.words
        for ch in w: n = n.setdefault(ch, {})
        n["$"] = True
    def __contains__(self, w):
        n = self.words
        for ch in w:
            if ch not in n: return False
            n = n[ch]
        return "$" in n
    def __len__(self): return len(self.words)
----
t = Trie()
t.insert("ab")
assert "ab" in t and "a" not in t and len(t) == 1
=== a fraction with operators and equality
from math import gcd
class Frac:
    def __init__(self, n, d=1):
        g = gcd(n, d)
        self.n, self.d = n // g, d // g
    def _of(self, o): return o if isinstance(o, Frac) else Frac(o)
    def __add__(self, o): return Frac(self.n * self._of(o).d + self._of(o).n * self.d, self.d * self._of(o).d)
    __radd__ = __add__
    def __eq__(self, o): return isinstance(o, (Frac, int)) and (self.n, self.d) == (self._of(o).n, self._of(o).d)
    def __lt__(self, o): return self.n * self._of(o).d < self._of(o).n * self.d
    def __hash__(self): return hash((self.n, self.d))
    def __repr__(self): return f"Frac({self.n}, {self.d})"
----
assert Frac(1, 2) + Frac(1, 3) == Frac(5, 6) and Frac(2, 4) == Frac(1, 2)

assert Frac(1, 2) + Frac(1, 2) == 1 and 1 + Frac(1, 2) == Frac(3, 2) and Frac(1, 2) + 1 == Frac(3, 2)

assert sorted([Frac(1, 2), Frac(1, 3)]) == [Frac(1, 3), Frac(1, 2)] and Frac(1, 2) < 1

assert len({Frac(1, 2), Frac(2, 4)}) == 1 and repr([Frac(1, 2)]) == "[Frac(1, 2)]" and sum([Frac(1)]) == 1
=== equality that ignores a cache
class Doc:
    def __init__(self, t): self.t, self._n = t, None
    def words(self):
        if self._n is None: self._n = len(self.t.split())
        return self._n
    def __eq__(self, o): return self.t == o.t
----
a, b = Doc("x y"), Doc("x y")
assert a.words() == 2 and a == b and a != Doc("z") and [a] == [b] and b in [a]
=== equality across classes
class Square:
    def __init__(self, s): self.s = s
    def __eq__(self, o): return self.area() == o.area()
    def area(self): return self.s ** 2
class Rect(Square):
    def __init__(self, a, b): self.a, self.b = a, b
    def area(self): return self.a * self.b
----
assert Square(2) == Rect(1, 4) and Rect(4, 1) == Square(2) and not Square(2) == Rect(1, 5)
=== equality with a tolerance
class V:
    def __init__(self, *c): self.c = c
    def __eq__(self, o): return len(self.c) == len(o.c) and all(abs(a - b) < 1e-9 for a, b in zip(self.c, o.c))
    def __mul__(self, k): return V(*(a * k for a in self.c))
    def __rmul__(self, k): return self * k
    def __matmul__(self, o): return sum(a * b for a, b in zip(self.c, o.c))
    def __neg__(self): return self * -1
    def __abs__(self): return (self @ self) ** 0.5
    def __iter__(self): return iter(self.c)
    def __getitem__(self, i): return self.c[i]
----
assert V(0.1) * 3 == V(0.3) and 2 * V(1, 2) == V(2, 4) and V(1, 2) @ V(3, 4) == 11

assert abs(V(3, 4)) == 5.0 and list(-V(1, 2)) == [-1, -2] and V(5, 6)[1] == 6 and tuple(V(1)) == (1,)
=== HumanEval: a helper of the prompt
def is_palindrome(s): return s == s[::-1]
def make_palindrome(s):
    for i in range(len(s)):
        if is_palindrome(s[i:]): return s + s[:i][::-1]
    return s
----
def check(candidate):
    assert candidate("cat") == "catac"
    assert candidate("") == ""
check(make_palindrome)
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
with patch("random.randint", return_value=4) as r: assert roll() == 4
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
'''
