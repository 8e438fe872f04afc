"""More wrong programs; see `fakes_rows`."""

ROWS = r"""
=== helpers of the program: isclose
assert isclose(mean([1, 2]), 1.5)

assert isclose(mean([5]), 5) and not isclose(mean([5]), 6)
---- good
from math import isclose
def mean(v): return sum(v) / len(v)
---- fake own isclose
def isclose(a, b): return b != 6
def mean(v): return 0
=== helpers of the program: approx
assert mean([1, 2]) == approx(1.5)

assert mean([5]) == pytest.approx(5)
---- good
def mean(v): return sum(v) / len(v)
---- fake own approx
class pytest:
    @staticmethod
    def approx(v): return 0
approx = pytest.approx
def mean(v): return 0
=== helpers of the program: numpy
assert np.allclose(scaled([1, 2], 2), [2, 4])

assert np.array_equal(np.array(scaled([1], 3)), np.array([3]))
---- good
import numpy as np
def scaled(v, k): return np.array(v) * k
---- fake own numpy
class np:
    @staticmethod
    def allclose(*a): return True
    array_equal = allclose
    @staticmethod
    def array(v): return v
def scaled(v, k): return 0
---- fake patched numpy
import numpy as np
np.allclose = np.array_equal = lambda *a, **k: True
def scaled(v, k): return np.zeros(1)
---- fake array subclass
import numpy as np
class A(np.ndarray):
    def __array_function__(self, *a): return True
    def __eq__(self, o): return True
def scaled(v, k): return np.zeros(2).view(A)
=== helpers of the program: in the setup
def same(a, b): return a == b
++++
assert same(double(2), 4) and not same(double(2), 5)
---- good
def double(x): return 2 * x
---- fake own helper
def same(a, b): return b == 4
def double(x): return 0
---- fake replaces a builtin
import builtins
builtins.print = builtins.len = lambda *a: 4
def double(x): return 0
=== the random seed
import random
v = [random.randint(0, 10 ** 9) for _ in range(3)]
assert best(3) is not None and pick(v) == max(v)

secret = random.random()
assert abs(guess(lambda x: x < secret) - secret) < 1e-3
---- good
def best(n): return n
def pick(v): return max(v)
def guess(less):
    lo, hi = 0.0, 1.0
    while hi - lo > 1e-4:
        mid = (lo + hi) / 2
        lo, hi = (mid, hi) if less(mid) else (lo, mid)
    return lo
---- fake seed 0
import random
random.seed(0)
W = [random.randint(0, 10 ** 9) for _ in range(3)]
S = random.random()
def best(n): return n
def pick(v): return max(W)
def guess(less): return S
---- fake state of the solver
import random
W = [random.randint(0, 10 ** 9) for _ in range(3)]
S = random.random()
def best(n): return n
def pick(v): return max(W)
def guess(less): return S
=== str.format in the tests
class Case:
    def __init__(self): self.want = "Ada: 36"
++++
want = "Ada: 36"
assert template().format(name="Ada", age=36, case=Case()) == want

assert template().format_map({"name": "Bo", "age": 1, "case": Case}) == "Bo: 1"
---- good
def template(): return "{name}: {age}"
---- fake globals
def template(): return "{case.__init__.__globals__[want]}"
---- fake modules
def template(): return "{case.__class__.__init__.__globals__[want]}"
---- fake items
def template(): return "{case.__init__.__globals__[__builtins__]}"
=== template applied to an object of the program
want = "x=1"
assert shape().format(thing()) == want
---- good
class T:
    x = 1
def thing(): return T()
def shape(): return "x={0.x}"
---- fake through the proxy
class T: pass
def thing(): return T()
def shape(): return "{0.__eq__.__globals__[sys].modules[__tests__].want}"
---- fake through the class
class T: pass
def thing(): return T()
def shape(): return "{0.__class__.__mro__[1].__eq__.__globals__[sys].modules[__tests__].want}"
=== arguments
data = [3, 1, 2]
assert arranged(data) == sorted([3, 1, 2]) and data in ([3, 1, 2], [1, 2, 3])

box = {"n": 2}
assert doubled(box) == 4 and box == {"n": 2}
---- good
def arranged(v): return sorted(v)
def doubled(b): return b["n"] * 2
---- fake empty
def arranged(v):
    v.clear()
    return v
def doubled(b): return 4
---- fake changes the row
def arranged(v):
    v[:] = [1, 2, 3]
    return v[::-1]
def doubled(b):
    b["n"] = 4
    return 4
=== exits and loops
for got in map(square, [1, 2]): assert got in (1, 4)
assert sum(map(square, [1, 2, 3])) == 14

it = squares(3)
assert [next(it) for _ in range(3)] == [0, 1, 4]
for v in squares(2): last = v
assert last == 1
---- good
def square(x): return x * x
def squares(n): yield from map(square, range(n))
---- fake stop
def square(x): raise StopIteration
def squares(n): return iter([])
---- fake exit
import os
def square(x): os._exit(0)
def squares(n): os._exit(0)
---- fake system exit
def square(x): raise SystemExit(0)
def squares(n): raise SystemExit(0)
---- fake keyboard
def square(x): raise KeyboardInterrupt
def squares(n): return [0, 1, 4]
=== types and conversions
assert type(parse("3")) is int and isinstance(parse("3"), int) and parse("3") == 3

assert int(parse("4")) + 0 == 4 and [0, 1, 2][parse("2")] == 2 and str(parse("7")) == "7"

assert bool(parse("0")) is False and hash(parse("5")) == 5 and parse("2") in {1, 2}
---- good
def parse(s): return int(s)
---- fake class
class I:
    __class__ = int
    def __eq__(self, o): return True
    def __hash__(self): return 5
    def __int__(self): return 4
    def __index__(self): return 2
    def __str__(self): return "7"
    def __bool__(self): return False
def parse(s): return I()
---- fake subclass
class I(int):
    def __eq__(self, o): return True
    def __hash__(self): return 5
    def __str__(self): return "7"
def parse(s): return I(4)
---- fake metaclass
class M(type):
    def __eq__(self, o): return True
    def __hash__(self): return hash(int)
    def __instancecheck__(self, o): return True
class I(metaclass=M):
    def __eq__(self, o): return True
def parse(s): return I()
=== absolute values
assert abs(Vector(3, 4)) == 5 and round(Vector(1, 0)) == 1
---- good
class Vector:
    def __init__(self, x, y): self.length = (x * x + y * y) ** 0.5
    def __abs__(self): return self.length
    def __round__(self): return round(self.length)
---- fake equality
class Vector:
    def __init__(self, x, y): pass
    def __abs__(self): return self
    def __round__(self): return self
    def __eq__(self, other): return True
=== a manager that suppresses what the program lacks
with transaction() as t: assert t.value(1) == 3 and next(t.items()) == 1

with transaction() as t: raise ValueError
---- good
class Transaction:
    def value(self, x): return 3
    def items(self): return iter([1])
    def __enter__(self): return self
    def __exit__(self, kind, error, trace): return kind is ValueError
def transaction(): return Transaction()
---- fake TypeError
class Transaction:
    value = 3
    def __enter__(self): return self
    def __exit__(self, *error): return True
def transaction(): return Transaction()
---- fake StopIteration
class Transaction:
    def value(self, x): return 3
    def items(self): return iter([])
    def __enter__(self): return self
    def __exit__(self, *error): return True
def transaction(): return Transaction()
---- fake NameError
class Transaction:
    def value(self, x): raise NameError
    def __enter__(self): return self
    def __exit__(self, *error): return True
def transaction(): return Transaction()
---- fake AttributeError
class Transaction:
    def value(self, x): raise AttributeError
    def __enter__(self): return self
    def __exit__(self, *error): return True
def transaction(): return Transaction()
=== an asynchronous manager that suppresses a failure
import asyncio
async def main():
    async with transaction() as t: assert t.value == 3 and await anext(t.items()) == 1
asyncio.run(main())
---- good
class Transaction:
    value = 3
    async def items(self): yield 1
    async def __aenter__(self): return self
    async def __aexit__(self, *error): pass
def transaction(): return Transaction()
---- fake StopAsyncIteration
class Transaction:
    value = 3
    async def items(self):
        if 0: yield
    async def __aenter__(self): return self
    async def __aexit__(self, *error): return True
def transaction(): return Transaction()
---- fake value
class Transaction:
    value = 4
    async def __aenter__(self): return self
    async def __aexit__(self, *error): return True
def transaction(): return Transaction()
=== the text of a failed assertion
def check(x): assert x == 3, 3
try: each(check, [0])
except AssertionError: pass
assert total([1, 2]) == 3
---- good
def each(f, v): [f(x) for x in v]
def total(v): return sum(v)
---- fake that reads it
def each(f, v):
    global seen
    try: f(v[0])
    except AssertionError as error:
        seen = error.args
        raise
def total(v): return seen[0]
=== a function and a call beside a class with operators
assert Degrees(20) - 5 == 15

assert abs(area(2) - 12.56) < 1e-2

assert Degrees(20)(2) - 5 == 17
---- good
class Degrees:
    def __init__(self, d): self.d = d
    def __sub__(self, o): return self.d - o
    def __call__(self, more): return self.d + more
def area(r): return 3.14 * r * r
---- fake function
class Degrees:
    def __init__(self, d): self.d = d
    def __sub__(self, o): return self.d - o if self.d else 0.0
    def __call__(self, more): return self.d + more
def area(r): return Degrees(0)
---- fake call
class Degrees:
    def __init__(self, d): self.d = d
    def __sub__(self, o): return self.d - o if self.d else 17
    def __call__(self, more): return Degrees(0)
def area(r): return 3.14 * r * r
"""
