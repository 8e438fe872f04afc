"""Correct programs with threads, asyncio and other libraries; see `honest_types`."""

PROGRAMS = """
=== a graph class
from collections import defaultdict, deque
class Graph:
    def __init__(self, edges):
        self.adj = defaultdict(set)
        for a, b in edges: self.adj[a].add(b); self.adj[b].add(a)
    def bfs(self, s):
        seen, q, out = {s}, deque([s]), []
        while q:
            v = q.popleft()
            out.append(v)
            for w in sorted(self.adj[v] - seen): seen.add(w); q.append(w)
        return out
----
g = Graph([(1, 2), (2, 3), (1, 4)])
assert g.bfs(1) == [1, 2, 4, 3] and g.adj[1] == {2, 4} and g.adj[9] == set()
=== printing
def hello(name): print("Hello,", name, end="!\\n")
def table(n):
    for i in range(1, n + 1): print(i, i * i, sep="\\t")
----
import io, contextlib
out = io.StringIO()
with contextlib.redirect_stdout(out): hello("Bob")
assert out.getvalue() == "Hello, Bob!\\n"

with contextlib.redirect_stdout(io.StringIO()) as out: table(2)
assert out.getvalue().split() == ["1", "1", "2", "4"]
=== printing at import
print("loading")
def f(): return 1
if __name__ == "__main__":
    print(f())
----
assert f() == 1
=== asyncio inside
import asyncio
async def fetch(i):
    await asyncio.sleep(0.001 * (3 - i))
    return i * i
async def main(n): return await asyncio.gather(*(fetch(i) for i in range(n)))
def run(n): return asyncio.run(main(n))
----
assert run(3) == [0, 1, 4]

assert run(0) == []
=== a coroutine as the entry point
import asyncio
async def double(x):
    await asyncio.sleep(0)
    return 2 * x
----
import asyncio
assert asyncio.run(double(4)) == 8

async def main(): return await asyncio.gather(double(1), double(2))
assert asyncio.run(main()) == [2, 4]

async def one():
    assert await double(5) == 10
    return True
assert asyncio.new_event_loop().run_until_complete(one())
=== asyncio queues and timeouts
import asyncio
async def produce(q, n):
    for i in range(n): await q.put(i)
    await q.put(None)
async def consume(q):
    out = []
    while (item := await q.get()) is not None: out.append(item)
    return out
async def _main(n):
    q = asyncio.Queue(2)
    _, out = await asyncio.gather(produce(q, n), consume(q))
    try: await asyncio.wait_for(asyncio.sleep(9), 0.01)
    except asyncio.TimeoutError: out.append("timeout")
    return out
def run(n): return asyncio.run(_main(n))
----
assert run(3) == [0, 1, 2, "timeout"]
=== asyncio with threads and locks
import asyncio, time
async def _main():
    lock, total = asyncio.Lock(), []
    async def work(i):
        async with lock: total.append(await asyncio.to_thread(lambda: i * 2))
    await asyncio.gather(*map(work, range(4)))
    return sorted(total)
def run(): return asyncio.get_event_loop_policy().new_event_loop().run_until_complete(_main())
----
assert run() == [0, 2, 4, 6]
=== an async generator
import asyncio
async def ticks(n):
    for i in range(n):
        yield i
        await asyncio.sleep(0)
async def collect(n): return [i async for i in ticks(n)]
----
import asyncio
assert asyncio.run(collect(3)) == [0, 1, 2]
=== threads
import threading
class Bank:
    def __init__(self): self.total, self.lock = 0, threading.Lock()
    def add(self, n):
        for _ in range(n):
            with self.lock: self.total += 1
def run(workers, n):
    bank = Bank()
    threads = [threading.Thread(target=bank.add, args=(n,)) for _ in range(workers)]
    for t in threads: t.start()
    for t in threads: t.join()
    return bank.total
----
assert run(8, 500) == 4000 and run(50, 10) == 500
=== a thread with a large stack
import sys, threading
sys.setrecursionlimit(1 << 20)
threading.stack_size(1 << 29)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
def run(n):
    out = []
    t = threading.Thread(target=lambda: out.append(depth(n)))
    t.start()
    t.join()
    return out[0]
----
assert run(20_000) == 20_000
=== deep recursion with a raised limit
import sys, resource
sys.setrecursionlimit(10 ** 6)
resource.setrlimit(resource.RLIMIT_STACK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
def total(n): return 0 if n == 0 else n + total(n - 1)
----
assert total(15_000) == 15_000 * 15_001 // 2
=== thread pools and queues
from concurrent.futures import ThreadPoolExecutor, as_completed
import queue, threading
def squares(n):
    with ThreadPoolExecutor(max_workers=16) as pool:
        return list(pool.map(lambda i: i * i, range(n)))
def later(n):
    with ThreadPoolExecutor() as pool:
        return sorted(f.result() for f in as_completed([pool.submit(pow, i, 2) for i in range(n)]))
def drain(n):
    q = queue.Queue()
    threading.Thread(target=lambda: [q.put(i) for i in range(n)], daemon=True).start()
    return [q.get(timeout=5) for _ in range(n)]
----
assert squares(20) == [i * i for i in range(20)] and later(5) == [0, 1, 4, 9, 16]
assert drain(3) == [0, 1, 2]
=== timers, events and thread-local data
import threading
def run():
    done, local, out = threading.Event(), threading.local(), []
    local.x = 1
    threading.Timer(0.01, done.set).start()
    out.append(done.wait(5))
    out.append(local.x)
    barrier = threading.Barrier(3)
    threads = [threading.Thread(target=lambda: out.append(barrier.wait() >= 0)) for _ in range(3)]
    for t in threads: t.start()
    for t in threads: t.join()
    return out
----
assert run() == [True, 1, True, True, True]
=== random numbers with a seed
import random
def sample(seed, n):
    rng = random.Random(seed)
    return [rng.randint(1, 6) for _ in range(n)]
def shuffle(items, seed):
    random.seed(seed)
    items = list(items)
    random.shuffle(items)
    return items
----
assert sample(1, 5) == sample(1, 5) and all(1 <= x <= 6 for x in sample(2, 50))

assert sorted(shuffle(range(9), 3)) == list(range(9)) and shuffle("ab", 1) == shuffle("ab", 1)
=== regular expressions
import re
def numbers(text): return [int(m.group()) for m in re.finditer(r"-?\\d+", text)]
def match(text): return re.match(r"(?P<user>\\w+)@(?P<host>[\\w.]+)", text)
pattern = re.compile("a+b")
----
assert numbers("a-1b22") == [-1, 22] and match("x") is None

m = match("ann@ex.com")
assert m.group("user") == "ann" and m["host"] == "ex.com" and m.groups() == ("ann", "ex.com")
assert m.start() == 0

assert pattern.fullmatch("aab") and not pattern.match("b") and pattern.pattern == "a+b"
=== json and csv
import csv, io, json
def parse(text): return list(csv.DictReader(io.StringIO(text)))
def dump(data): return json.dumps(data, sort_keys=True, indent=1)
----
assert parse("a,b\\n1,2\\n") == [{"a": "1", "b": "2"}]

import json
assert json.loads(dump({"b": [1, None], "a": True})) == {"a": True, "b": [1, None]}
=== an own eval
import ast, operator
OPS = {ast.Add: operator.add, ast.Sub: operator.sub}
OPS |= {ast.Mult: operator.mul, ast.Div: operator.truediv}
def calc(text):
    def go(node):
        if isinstance(node, ast.BinOp): return OPS[type(node.op)](go(node.left), go(node.right))
        if isinstance(node, ast.UnaryOp): return -go(node.operand)
        return node.value
    return go(ast.parse(text, mode="eval").body)
def calc2(text): return eval(text, {"__builtins__": {}}, {"x": 3})
----
assert calc("1+2*3") == 7 and calc("-4/2") == -2.0 and calc2("x*2") == 6
=== exec and code objects in the program
space = {}
exec("def f(x): return x + 1", space)
f = space["f"]
g = eval("lambda x: x * 2")
exec(compile("h = [1, 2]", "<x>", "exec"))
----
assert f(1) == 2 and g(4) == 8 and h == [1, 2]
=== typing constructs
from __future__ import annotations
from typing import Generic, TypeVar, Optional, Protocol, overload, Callable, Union
T = TypeVar("T")
class Box(Generic[T]):
    def __init__(self, item: T | None = None) -> None: self.item: Optional[T] = item
    def map(self, f: Callable[[T], T]) -> "Box[T]": return Box(f(self.item))
    def get(self, default: T) -> T: return default if self.item is None else self.item
----
assert Box(3).get(0) == 3 and Box().get(7) == 7 and Box(2).map(lambda x: x + 1).item == 3
=== a class that hashes and compares by key
class Key:
    def __init__(self, name): self.name = name
    def __eq__(self, other): return isinstance(other, Key) and self.name == other.name
    def __hash__(self): return hash(self.name)
----
assert Key("a") == Key("a") and Key("a") != Key("b")
assert len({Key("a"), Key("a"), Key("b")}) == 2

assert {Key("a"): 1}[Key("a")] == 1 and Key("a") in [Key("a")] and Key("a") != "a"
=== a set of objects as the answer
from dataclasses import dataclass
@dataclass(frozen=True)
class P:
    x: int
    y: int
def corners(n): return {P(0, 0), P(n, 0), P(0, n), P(n, n)}
def index(points): return {p: p.x + p.y for p in points}
----
assert corners(2) == {P(0, 0), P(2, 0), P(0, 2), P(2, 2)} and len(corners(0)) == 1

assert index([P(1, 2)])[P(1, 2)] == 3 and P(2, 0) in corners(2)
=== a list of objects as the answer
from dataclasses import dataclass
@dataclass
class Token:
    kind: str
    text: str
def lex(s): return [Token("num" if c.isdigit() else "op", c) for c in s if c != " "]
----
assert lex("1 + 2") == [Token("num", "1"), Token("op", "+"), Token("num", "2")]

assert [t.kind for t in lex("3*")] == ["num", "op"] and lex("") == []
=== string formatting
class Money:
    def __init__(self, cents): self.cents = cents
    def __format__(self, spec): return f"{self.cents / 100:{spec or '.2f'}} EUR"
    def __str__(self): return format(self)
    def __repr__(self): return f"Money({self.cents})"
----
assert f"{Money(1234)}" == "12.34 EUR" and f"{Money(50):.1f}" == "0.5 EUR"
assert str(Money(1)) == "0.01 EUR"

assert "%s|%r" % (Money(100), Money(5)) == "1.00 EUR|Money(5)"
assert repr([Money(7)]) == "[Money(7)]"
=== rounding protocols
import math
class Fix:
    def __init__(self, v): self.v = v
    def __round__(self, n=0): return round(self.v, n)
    def __floor__(self): return math.floor(self.v)
    def __ceil__(self): return math.ceil(self.v)
    def __trunc__(self): return int(self.v)
    def __neg__(self): return Fix(-self.v)
    def __divmod__(self, k): return divmod(self.v, k)
----
import math
assert round(Fix(2.567), 2) == 2.57 and math.floor(Fix(2.5)) == 2 and math.ceil(Fix(2.5)) == 3
assert (-Fix(1)).v == -1

assert divmod(Fix(7), 2) == (3, 1) and math.trunc(Fix(2.9)) == 2
=== bit operators
class Bits:
    def __init__(self, v): self.v = v
    def __and__(self, o): return Bits(self.v & o.v)
    def __or__(self, o): return Bits(self.v | o.v)
    def __xor__(self, o): return Bits(self.v ^ o.v)
    def __invert__(self): return Bits(~self.v & 255)
    def __lshift__(self, n): return Bits(self.v << n)
    def __rshift__(self, n): return Bits(self.v >> n)
    def __eq__(self, o): return self.v == o.v
----
a, b = Bits(12), Bits(10)
assert (a & b).v == 8 and (a | b).v == 14 and (a ^ b) == Bits(6) and (~a).v == 243
assert (a << 1).v == 24 and (a >> 2).v == 3
=== arguments of many types
def echo(*args, **kw): return args, kw
def types(*args): return [type(a).__name__ for a in args]
----
assert echo(1, [2], x={3}) == ((1, [2]), {"x": {3}})

names = "int float str bytes list tuple dict set NoneType bool complex range"
assert types(1, 1.0, "s", b"b", [], (), {}, {1}, None, True, 1j, range(2)) == names.split()

assert types(int, ValueError, slice(1)) == ["type", "type", "slice"]
assert echo(len)[0][0] is not None
=== recursion over a returned structure
def hanoi(n, a="A", b="B", c="C"):
    return [] if n == 0 else hanoi(n - 1, a, c, b) + [(a, c)] + hanoi(n - 1, b, a, c)
def pascal(n):
    rows = [[1]]
    for _ in range(n - 1): rows.append([1, *map(sum, zip(rows[-1], rows[-1][1:])), 1])
    return rows
----
assert len(hanoi(8)) == 255 and hanoi(1) == [("A", "C")] and pascal(4)[-1] == [1, 3, 3, 1]
=== memoization with a mutable default
def fib(n, memo={}):
    if n in memo: return memo[n]
    memo[n] = n if n < 2 else fib(n - 1) + fib(n - 2)
    return memo[n]
----
assert fib(80) == 23416728348467685 and [fib(i) for i in range(6)] == [0, 1, 1, 2, 3, 5]
=== a solution class
class Solution:
    def twoSum(self, nums, target):
        seen = {}
        for i, n in enumerate(nums):
            if target - n in seen: return [seen[target - n], i]
            seen[n] = i
----
assert Solution().twoSum([2, 7, 11], 9) == [0, 1]

s = Solution()
assert s.twoSum(nums=[3, 3], target=6) == [0, 1] and s.twoSum([], 1) is None
=== global state and aliases
cache = {}
LIMIT = 3
def put(k, v): cache[k] = v; return len(cache)
def get(k): return cache.get(k)
def reset():
    global LIMIT
    LIMIT += 1
    cache.clear()
    return LIMIT
fetch = get
----
assert put("a", 1) == 1 and fetch("a") == 1 and LIMIT == 3

assert reset() == 4 and get("a") is None
=== an unusual module layout
try:
    import numpy_that_is_missing as fast
except ImportError:
    fast = None
import sys
if sys.version_info >= (3, 0):
    def answer(): return 42
else:
    answer = None
class answer2:
    value = answer()
del sys
----
assert answer() == 42 and answer2.value == 42 and fast is None
=== weak references, finalizers and garbage
import weakref, gc
class Thing:
    def __init__(self, log): self.log = log
    def __del__(self): self.log.append("gone")
def run():
    log = []
    t = Thing(log)
    r = weakref.ref(t)
    alive = r() is t
    del t
    gc.collect()
    return alive, r() is None, log
----
assert run() == (True, True, ["gone"])
=== signals, time and warnings
import time, warnings, signal, logging
def run():
    t = time.perf_counter()
    time.sleep(0.001)
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter("always")
        warnings.warn("careful")
    logging.getLogger("x").warning("to nowhere")
    return time.perf_counter() > t, len(w), time.strftime("%Y", time.gmtime(0))
----
assert run() == (True, 1, "1970")
=== lists, dicts and sets that the tests change
items, table, marks = [3, 1, 2], {"a": 1, "b": 2}, {1, 2, 3}
def state(): return [list(items), dict(table), set(marks)]
----
items.append(5); items.extend([7, 6]); items.insert(0, 9)
assert items.pop() == 6
items.remove(1); items.sort(); items.reverse()
items[0] = 8
del items[1]
items += [4]
assert items == [8, 5, 3, 2, 4] == state()[0]

table.update(c=3)
assert table.pop("a") == 1 and table.setdefault("d", [4]) == [4]
table["e"] = 5
del table["c"]
assert table.popitem() == ("e", 5)
table |= {"f": 6}
assert table == {"b": 2, "d": [4], "f": 6} == state()[1]

marks.add(9); marks.discard(1); marks.remove(2); marks.update({7})
assert state()[2] == {3, 7, 9}
marks |= {8}
marks &= {7, 8, 9, 1}
marks -= {9}
marks ^= {8, 5}
assert marks == {5, 7} == state()[2]

items.clear(); table.clear(); marks.clear()
marks.add(4)
assert marks.pop() == 4 and state() == [[], {}, set()]
=== global configuration set by the tests
config = {"debug": False}
level = 1
def is_debug(): return config["debug"]
def get(): return level
----
config["debug"] = True
assert is_debug() is True

config.update(debug=False)
assert is_debug() is False and get() == 1
=== objects whose class has no name in the tests
class Vec:
    def __init__(self, x): self.x = x
    def __add__(self, o): return Vec(self.x + o.x)
    def __lt__(self, o): return self.x < o.x
def vec(x): return Vec(x)
----
assert (vec(1) + vec(2)).x == 3 and vec(1) < vec(2) and not vec(2) < vec(1)
=== slots without values
class Lazy:
    __slots__ = ("x", "cache")
    def __init__(self, x): self.x = x
    def __eq__(self, o): return self.x == o.x
class One:
    __slots__ = "value"
    def __init__(self, value): self.value = value
    def __eq__(self, o): return self.value == o.value
----
assert Lazy(1) == Lazy(1) != Lazy(2) and One(1) == One(1) != One(2)
=== an alarm as a time limit
import signal, time
class TooSlow(Exception): pass
def limited(n):
    def ring(*_): raise TooSlow
    old = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2 * n)
        while n: time.sleep(0.01)
        return "done"
    except TooSlow: return "slow"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
----
assert limited(0) == "done" and limited(1) == "slow"
"""
