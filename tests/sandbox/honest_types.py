"""Test data: correct programs with unusual classes, run by `test_honest.py`.

Each entry is a title, a program and, after a line of dashes, its tests: one per paragraph.
"""

PROGRAMS = """
=== a stack derived from list
class Stack(list):
    def push(self, item): self.append(item)
    def peek(self): return self[-1]
----
s = Stack()
s.push(1); s.push(2)
assert s.peek() == 2 and len(s) == 2

assert s.pop() == 2 and s == [1]

assert isinstance(s, list) and isinstance(s, Stack) and isinstance(s, (dict, list))
assert not isinstance(s, (dict, set)) and isinstance(s, ((int, list), str))
assert not isinstance([], Stack)
=== a list with a limit
class Bounded(list):
    def __init__(self, limit):
        super().__init__()
        self.limit = limit
    def append(self, item):
        if len(self) >= self.limit:
            raise OverflowError("full")
        super().append(item)
----
b = Bounded(2)
b.append("x"); b.append("y")
assert b == ["x", "y"] and b.limit == 2

try: b.append("z")
except OverflowError as error: assert str(error) == "full"
else: assert False
=== a dict with attributes
class AttrDict(dict):
    def __getattr__(self, name): return self[name]
    def __setattr__(self, name, value): self[name] = value
----
d = AttrDict(a=1)
d.b = 2
assert d.a == 1 and d["b"] == 2 and d == {"a": 1, "b": 2}

assert sorted(d.items()) == [("a", 1), ("b", 2)] and "a" in d and len(d) == 2
=== a case-insensitive dict
class CaseDict(dict):
    def __setitem__(self, key, value): super().__setitem__(key.lower(), value)
    def __getitem__(self, key): return super().__getitem__(key.lower())
    def __contains__(self, key): return super().__contains__(key.lower())
----
d = CaseDict()
d["Key"] = 5
assert d["KEY"] == 5 and "kEy" in d and list(d) == ["key"]
=== an LRU cache on OrderedDict
from collections import OrderedDict
class LRUCache(OrderedDict):
    def __init__(self, capacity):
        super().__init__()
        self.capacity = capacity
    def get(self, key):
        if key not in self: return -1
        self.move_to_end(key)
        return self[key]
    def put(self, key, value):
        self[key] = value
        self.move_to_end(key)
        if len(self) > self.capacity: self.popitem(last=False)
----
cache = LRUCache(2)
cache.put(1, 1); cache.put(2, 2)
assert cache.get(1) == 1
cache.put(3, 3)
assert cache.get(2) == -1 and cache.get(3) == 3

assert list(cache) == [1, 3] and len(cache) == 2
=== an LRU cache that owns an OrderedDict
from collections import OrderedDict
class LRUCache:
    def __init__(self, capacity):
        self.capacity, self.data = capacity, OrderedDict()
    def put(self, key, value):
        self.data[key] = value
        self.data.move_to_end(key)
        while len(self.data) > self.capacity: self.data.popitem(last=False)
----
c = LRUCache(2)
for i in range(4): c.put(i, i * i)
assert list(c.data.items()) == [(2, 4), (3, 9)]
=== a Counter as the answer
from collections import Counter
def words(text): return Counter(text.split())
----
assert words("a b a") == {"a": 2, "b": 1}

assert words("a b a").most_common(1) == [("a", 2)] and words("")["x"] == 0
=== a class derived from Counter
from collections import Counter
class Bag(Counter):
    def total_items(self): return sum(self.values())
----
bag = Bag("aab")
assert bag.total_items() == 3 and bag["a"] == 2 and bag == {"a": 2, "b": 1}

bag.update("b")
assert bag["b"] == 2
=== a defaultdict as the answer
from collections import defaultdict
def groups(words):
    found = defaultdict(list)
    for word in words: found[len(word)].append(word)
    return found
----
assert groups(["a", "bb", "c"]) == {1: ["a", "c"], 2: ["bb"]}

assert groups([])[5] == []
=== a defaultdict with a lambda
from collections import defaultdict
def ages():
    d = defaultdict(lambda: 18)
    d["x"] = 3
    return d
----
assert ages() == {"x": 3}
=== nested defaultdicts
from collections import defaultdict
def tree(): return defaultdict(tree)
def build():
    t = tree()
    t["a"]["b"] = 1
    return t
----
assert build()["a"]["b"] == 1
=== an OrderedDict as the answer
from collections import OrderedDict
def ordered(pairs): return OrderedDict(pairs)
----
o = ordered([("b", 1), ("a", 2)])
assert list(o) == ["b", "a"] and o.popitem(last=False) == ("b", 1)
=== a deque as the answer
from collections import deque
def rotate(items, n):
    d = deque(items)
    d.rotate(n)
    return d
----
assert rotate([1, 2, 3], 1) == __import__("collections").deque([3, 1, 2])

assert list(rotate([1, 2, 3], -1)) == [2, 3, 1] and rotate([1], 0)[0] == 1
=== a class derived from deque
from collections import deque
class Window(deque):
    def __init__(self, size): super().__init__(maxlen=size)
    def mean(self): return sum(self) / len(self)
----
w = Window(2)
w.append(1); w.append(2); w.append(4)
assert w.mean() == 3.0 and list(w) == [2, 4] and len(w) == 2

from collections import deque
assert w == deque([2, 4]) and w != deque([2])
=== a class derived from set
class Tags(set):
    def text(self): return ",".join(sorted(self))
----
t = Tags({"b", "a"})
t.add("c")
assert t.text() == "a,b,c" and "a" in t and t == {"a", "b", "c"}

assert sorted(t | {"d"}) == ["a", "b", "c", "d"]
=== a class derived from str
class Title(str):
    def shout(self): return Title(self.upper() + "!")
    def title(self): return "Dr. " + super().title()
----
t = Title("hi")
assert t == "hi" and t.shout() == "HI!" and t.shout().shout() == "HI!!" and isinstance(t, str)

assert t + " there" == "hi there" and t.upper() == "HI" and len(t) == 2 and t.title() == "Dr. Hi"
=== a class derived from int
class Mod7(int):
    def __new__(cls, value): return super().__new__(cls, value % 7)
    def __add__(self, other): return Mod7(int(self) + int(other))
----
assert Mod7(10) == 3 and Mod7(5) + Mod7(4) == 2 and isinstance(Mod7(1), int)

assert [10, 20, 30][Mod7(8)] == 20
=== a class derived from float
class Celsius(float):
    @property
    def fahrenheit(self): return self * 9 / 5 + 32
----
c = Celsius(100)
assert c.fahrenheit == 212.0 and c == 100 and c > 99.5 and round(c) == 100
=== a class derived from tuple
class Vec(tuple):
    def __new__(cls, *parts): return super().__new__(cls, parts)
    def __add__(self, other): return Vec(*(a + b for a, b in zip(self, other)))
    def __mul__(self, k): return Vec(*(a * k for a in self))
    __rmul__ = __mul__
    def norm(self): return sum(a * a for a in self) ** 0.5
----
assert Vec(1, 2) + Vec(3, 4) == (4, 6) and Vec(3, 4).norm() == 5.0

assert 2 * Vec(1, 2) == Vec(2, 4) and Vec(1, 2)[1] == 2 and hash(Vec(1, 2)) == hash((1, 2))
=== a namedtuple
from collections import namedtuple
Point = namedtuple("Point", "x y")
def mirror(p): return Point(-p.x, p.y)
----
p = mirror(Point(1, 2))
assert p.x == -1 and p.y == 2 and p == (-1, 2) and p == Point(-1, 2)

x, y = p
assert (x, y) == (-1, 2) and p._asdict() == {"x": -1, "y": 2} and p._replace(x=5).x == 5

assert repr(p) == "Point(x=-1, y=2)" and Point._fields == ("x", "y") and len(p) == 2
=== a typed namedtuple with methods
from typing import NamedTuple
class Item(NamedTuple):
    name: str
    price: float = 1.0
    def total(self, n): return n * self.price
----
assert Item("a").price == 1.0 and Item("a", 2.5).total(2) == 5.0 and Item("a") < Item("b")
=== a namedtuple with a property
from collections import namedtuple
class Rect(namedtuple("Rect", "w h")):
    __slots__ = ()
    @property
    def area(self): return self.w * self.h
----
r = Rect(2, 3)
assert r.area == 6 and r.w == 2 and r == (2, 3) and sorted([Rect(2, 1), Rect(1, 5)])[0].h == 5
=== an enumeration
from enum import Enum
class Color(Enum):
    RED = 1
    GREEN = 2
def next_color(c): return Color(c.value % 2 + 1)
----
assert next_color(Color.RED) == Color.GREEN and next_color(Color.GREEN) is Color.RED

assert Color["RED"].value == 1 and Color.RED.name == "RED"
assert [c.name for c in Color] == ["RED", "GREEN"]

assert Color.RED in Color and len(Color) == 2 and str(Color.RED) == "Color.RED"

assert {Color.RED: 1}[Color.RED] == 1 and Color.RED != Color.GREEN
=== an enumeration with methods
import enum
class Op(enum.Enum):
    ADD = "+"
    SUB = "-"
    def apply(self, a, b): return a + b if self is Op.ADD else a - b
----
assert Op("+").apply(2, 3) == 5 and Op.SUB.apply(2, 3) == -1

try: Op("*")
except ValueError: pass
else: assert False
=== an IntEnum
from enum import IntEnum
class Level(IntEnum):
    LOW = 1
    HIGH = 3
def middle(): return (Level.LOW + Level.HIGH) // 2
----
assert middle() == 2 and Level.HIGH > Level.LOW and Level.LOW == 1 and Level(3).name == "HIGH"

assert sorted([Level.HIGH, Level.LOW])[0] is Level.LOW and max(Level) == 3
=== a flag enumeration
from enum import Flag, auto
class Perm(Flag):
    R = auto()
    W = auto()
    X = auto()
----
p = Perm.R | Perm.W
assert p & Perm.R and Perm.R in p and Perm.X not in p and p.value == 3 and not (p & Perm.X)
=== a StrEnum by hand
from enum import Enum
class Suit(str, Enum):
    HEARTS = "h"
    SPADES = "s"
----
assert Suit.HEARTS == "h" and Suit("s") is Suit.SPADES and Suit.HEARTS.upper() == "H"
=== a dataclass
from dataclasses import dataclass, field
@dataclass
class Account:
    owner: str
    balance: float = 0.0
    log: list = field(default_factory=list)
    def deposit(self, amount):
        if amount <= 0: raise ValueError("amount must be positive")
        self.balance += amount
        self.log.append(amount)
        return self.balance
----
a = Account("Ann")
assert a.deposit(5) == 5 and a.balance == 5 and a.log == [5]

assert a == Account("Ann", 5, [5]) and a != Account("Bob", 5, [5])

assert repr(Account("B")) == "Account(owner='B', balance=0.0, log=[])"

try: a.deposit(-1)
except ValueError as e: assert "positive" in str(e)
else: assert False
=== an ordered dataclass
from dataclasses import dataclass
@dataclass(order=True, frozen=True)
class Version:
    major: int
    minor: int
    @classmethod
    def parse(cls, text): return cls(*map(int, text.split(".")))
----
assert Version.parse("1.10") > Version.parse("1.9")
assert max(Version(1, 2), Version(2, 0)).major == 2

assert sorted(map(Version.parse, ["2.0", "1.5"]))[0] == Version(1, 5)

assert len({Version(1, 2), Version(1, 2)}) == 1

try: Version(1, 2).major = 5
except AttributeError: pass
else: assert False
=== a dataclass with slots and post-init
from dataclasses import dataclass
@dataclass
class Square:
    __slots__ = ("side", "area")
    side: int
    def __init__(self, side):
        self.side, self.area = side, side * side
----
assert Square(3).area == 9 and Square(3) == Square(3) and Square(2) != Square(3)
=== nested dataclasses
from dataclasses import dataclass, asdict, replace
@dataclass
class Inner: x: int
@dataclass
class Outer:
    inner: Inner
    rest: tuple = ()
def make(x): return Outer(Inner(x), (1, 2))
def plain(o): return asdict(o)
----
assert make(5).inner.x == 5 and make(5) == make(5)
assert plain(make(5)) == {"inner": {"x": 5}, "rest": (1, 2)}
=== exceptions outside Exception
class Quit(BaseException): pass
class Done(StopIteration): pass
def leave(kind, *values): raise kind(*values)
----
for kind in (Quit, Done):
    try: leave(kind, "x", 2)
    except kind as error: assert error.args == ("x", 2)
    else: assert False
=== an exception of the tests that the program raises
def check(x, kind):
    if x < 0: raise kind("negative", x)
    return x
----
class Bad(Exception): pass
try: check(-1, Bad)
except Bad as e: assert e.args == ("negative", -1) and type(e) is Bad
else: assert False
=== a text with its own method
class Word(str):
    def upper(self): return Word(str.upper(self))
def word(text): return Word(text)
----
assert word("ab").upper() == "AB"
=== globals that change and change back
level, text = 0, "a"
class Odd:
    def __len__(self): raise KeyError("no length")
odd = Odd()
def move(by):
    global level, text
    level += by
    text = "ab"[level]
----
assert level == 0 and text == "a" and odd is odd
move(1)
assert level == 1 and text == "b"
move(-1)
assert level == 0 and text == "a"
=== an asynchronous context manager that suppresses errors
class Guard:
    def __init__(self): self.seen = []
    async def __aenter__(self): return self
    async def __aexit__(self, kind, error, trace):
        self.seen.append((kind and kind.__name__, str(error)))
        return kind is IndexError
----
import asyncio
async def main():
    guard = Guard()
    async with guard: raise IndexError(5)
    async with guard: pass
    try:
        async with guard: raise ValueError("v")
    except ValueError: return guard.seen
assert asyncio.run(main()) == [("IndexError", "5"), (None, "None"), ("ValueError", "v")]
"""
