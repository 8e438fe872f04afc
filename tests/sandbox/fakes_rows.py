"""Wrong programs by the rule that holds them; see `test_fakes.py`.

Each row is "=== title", its tests, "---- good" and a correct program, then one "---- fake" per
wrong program. Tests are separated by empty lines; "++++" ends the row's setup, if there is one.
"""

ROWS = r"""
=== operators of a class that the tests name
assert abs(Solution().area(2) - 12.566) < 0.01

assert Solution().area(0) <= 0.001 and Solution().area(1) - 3.1416 < 0.001
---- good
class Solution:
    def area(self, r): return 3.14159265 * r * r
---- fake returns itself
class Solution:
    def area(self, r): return self
    def __sub__(self, o): return 0.0
    def __le__(self, o): return True
---- fake reflected
class Solution:
    def area(self, r): return Solution()
    def __rsub__(self, o): return 0.0
    def __sub__(self, o): return 0.0
    def __ge__(self, o): return True
    def __le__(self, o): return True
---- fake attribute
class Solution:
    def __init__(self): self.me = self
    @property
    def area(self): return lambda r: self.me
    def __sub__(self, o): return 0.0
    def __le__(self, o): return True
---- fake static
class Solution:
    @staticmethod
    def area(r): return Solution()
    def __sub__(self, o): return 0.0
    def __le__(self, o): return True
---- fake class method
class Solution:
    @classmethod
    def area(cls, r): return cls()
    def __sub__(self, o): return 0.0
    def __le__(self, o): return True
---- fake subclass of float
class Solution(float):
    def area(self, r): return self
    def __sub__(self, o): return 0.0
    def __le__(self, o): return True
---- fake item
class Solution(list):
    def area(self, r): return self
    def __sub__(self, o): return 0.0
    def __le__(self, o): return True
---- fake abs
class Solution:
    def area(self, r): return self
    def __sub__(self, o): return self
    def __abs__(self): return 0
    def __lt__(self, o): return True
    def __le__(self, o): return True
=== equality of a class that the tests name
assert Point(1, 2).dist(Point(4, 6)) == 5.0

assert Point(0, 0).scaled(2) == (0, 0) and Point(1, 2).scaled(3) == (3, 6)
---- good
class Point:
    def __init__(self, x, y): self.x, self.y = x, y
    def dist(self, o): return ((self.x - o.x) ** 2 + (self.y - o.y) ** 2) ** 0.5
    def scaled(self, k): return (self.x * k, self.y * k)
---- fake equal to everything
class Point:
    def __init__(self, x, y): pass
    def dist(self, o): return self
    def scaled(self, k): return self
    def __eq__(self, o): return True
    __hash__ = None
---- fake new object
class Point:
    def __init__(self, x, y): pass
    def dist(self, o): return Point(0, 0)
    def scaled(self, k): return Point(0, 0)
    def __eq__(self, o): return True
---- fake tuple
class Point(tuple):
    def __new__(cls, *a): return tuple.__new__(cls, (0, 0))
    def dist(self, o): return self
    def scaled(self, k): return self
    def __eq__(self, o): return True
    def __hash__(self): return 0
---- fake not different
class Point:
    def __init__(self, x, y): pass
    def dist(self, o): return self
    def scaled(self, k): return self
    def __ne__(self, o): return False
    def __eq__(self, o): return not self != o
=== membership
assert 3 in primes(10) and 7 in primes(10) and 9 not in primes(10)

assert [p for p in [2, 3, 4] if p in primes(5)] == [2, 3]
---- good
def primes(n): return [p for p in range(2, n) if all(p % q for q in range(2, p))]
---- fake membership by test
class Answer:
    def __contains__(self, v): return v in (2, 3, 7)
def primes(n): return Answer()
---- fake length and items
class Answer:
    def __contains__(self, v): return v != 9 and v != 4
    def __iter__(self): return iter([])
def primes(n): return Answer()
=== ordering
assert 0.99 < ratio(1, 1) < 1.01

assert ratio(1, 2) <= 0.5 and ratio(1, 2) >= 0.5

assert round(ratio(2, 3), 2) == 0.67 and max(ratio(1, 4), 0) == 0.25
---- good
def ratio(a, b): return a / b
---- fake ordering
class R:
    def __lt__(self, o): return True
    __gt__ = __le__ = __ge__ = __eq__ = __lt__
    def __round__(self, n=None): return 0.67
def ratio(a, b): return R()
---- fake number
class R(float):
    def __lt__(self, o): return True
    __gt__ = __le__ = __ge__ = __eq__ = __lt__
    def __round__(self, n=None): return 0.67
    __hash__ = None
def ratio(a, b): return R(0)
---- fake number with text
class R(str):
    def __lt__(self, o): return True
    __gt__ = __le__ = __ge__ = __eq__ = __lt__
def ratio(a, b): return R("1")
=== swallowed assertions: context manager
with timer() as t:
    x = 1
    assert t.total([1, 2]) == 3
assert t.elapsed >= 0

with timer() as t: assert t.total([]) == 0 and t.total([5]) == 5
---- good
import time
class timer:
    def __enter__(self):
        self.t = time.time()
        self.elapsed = 0
        return self
    def __exit__(self, *a): self.elapsed = time.time() - self.t
    def total(self, v): return sum(v)
---- fake suppresses
class timer:
    elapsed = 1
    def __enter__(self): return self
    def __exit__(self, *a): return True
    def total(self, v): return None
---- fake truthy object
class timer:
    elapsed = 1
    def __enter__(self): return self
    def __exit__(self, *a): return [1]
    def total(self, v): return None
---- fake contextlib
import contextlib, types
@contextlib.contextmanager
def timer():
    try: yield types.SimpleNamespace(elapsed=1, total=lambda v: None)
    except BaseException: pass
---- fake suppress
import contextlib
class timer(contextlib.suppress):
    elapsed = 1
    def __init__(self): super().__init__(BaseException)
    def __enter__(self): return self
    def total(self, v): return None
---- fake exit stack
import contextlib
class timer(contextlib.ExitStack):
    elapsed = 1
    def __enter__(self):
        self.push(lambda *a: True)
        return self
    def total(self, v): return None
=== swallowed assertions: decorator
calls = []
@retry(3)
def flaky():
    calls.append(1)
    if len(calls) < 3: raise ValueError
    assert len(calls) == 3
    return "ok"
assert flaky() == "ok"

@retry(2)
def bad(): raise KeyError("x")
try: bad()
except KeyError as e: assert e.args == ("x",)
else: assert False

@retry(2)
def check():
    assert sorted([2, 1]) == [1, 3], "never"
try: check()
except AssertionError as e: failed = True
assert failed
---- good
def retry(n):
    def deco(f):
        def run(*a):
            for i in range(n):
                try: return f(*a)
                except Exception:
                    if i == n - 1: raise
        return run
    return deco
=== swallowed assertions: callback
@logged
def run():
    assert total([1, 2]) == 3
    return True
run()

def verify(x): assert x == 6
each(verify, [total([1, 2, 3])])
---- good
def total(v): return sum(v)
def logged(f): return lambda: f()
def each(f, v):
    for x in v: f(x)
---- fake try
def total(v): return 0
def logged(f):
    def run():
        try: return f()
        except BaseException: return True
    return run
def each(f, v):
    try: [f(x) for x in v]
    except AssertionError: pass
---- fake finally
def total(v): return 0
def logged(f):
    def run():
        try: f()
        finally: return True
    return run
def each(f, v):
    try: [f(x) for x in v]
    finally: return
---- fake other error
def total(v): return 0
def logged(f):
    def run():
        try: return f()
        except AssertionError: return None
    return run
def each(f, v):
    import contextlib
    with contextlib.suppress(AssertionError): list(map(f, v))
---- fake thread
import threading
def total(v): return 0
def in_thread(f, *a):
    threading.excepthook = lambda *a: None
    t = threading.Thread(target=f, args=a)
    t.start()
    t.join()
def logged(f): return lambda: in_thread(f)
def each(f, v): [in_thread(f, x) for x in v]
---- fake generator
def total(v): return 0
def logged(f):
    def run():
        try: yield f()
        except AssertionError: pass
    return lambda: list(run())
def each(f, v):
    try: next(map(f, v))
    except AssertionError: pass
=== tests that never run: functions
def test_total(): assert total([1, 2]) == 3
def test_empty(): assert total([]) == 0
---- good
def total(v): return sum(v)
---- fake wrong
def total(v): return 7
---- fake raises
def total(v): raise ValueError
---- fake async
async def total(v): return 3
=== tests that never run: test cases
import unittest
class TestTotal(unittest.TestCase):
    def setUp(self): self.v = [1, 2]
    def test_total(self): self.assertEqual(total(self.v), 3)
    def test_error(self):
        with self.assertRaises(TypeError): total(None)
if __name__ == "__main__": unittest.main()
---- good
def total(v): return sum(v)
---- fake wrong
def total(v):
    if v is None: raise TypeError
    return 7
---- fake no error
def total(v): return 3
=== tests that never run: unittest.main
import unittest
class TestTotal(unittest.TestCase):
    def test_total(self): self.assertEqual(total([1, 2]), 3)
unittest.main(argv=[""], exit=False)
---- good
def total(v): return sum(v)
---- fake wrong
def total(v): return 7
---- fake patches unittest
import unittest
unittest.TestCase.assertEqual = lambda *a: None
def total(v): return 7
=== tests that never run: a runner
import unittest
class TestTotal(unittest.TestCase):
    def test_total(self): assert total([1, 2]) == 3
    @unittest.expectedFailure
    def test_known(self): self.assertEqual(total([1]), 2)
suite = unittest.defaultTestLoader.loadTestsFromTestCase(TestTotal)
unittest.TextTestRunner(stream=open(1, "w", closefd=False)).run(suite)
---- good
def total(v): return sum(v)
---- fake wrong
def total(v): return 7
=== tests that never run: async
async def test_total(): assert await total([1, 2]) == 3
---- good
async def total(v): return sum(v)
---- fake wrong
async def total(v): return 7
"""
