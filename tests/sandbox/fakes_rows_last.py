"""Wrong programs that end, skip or rewrite the tests, or decide their result; see `fakes_rows`."""

# ruff: noqa: E501 - data

ROWS = r"""
=== unittest skip
import unittest
class TestTotal(unittest.TestCase):
    def test_total(self): self.assertEqual(total([1, 2]), 3)
    def test_empty(self): self.assertEqual(total([]), 0)
---- good
def total(v): return sum(v)
---- fake SkipTest
import unittest
def total(v): raise unittest.SkipTest('x')
---- fake sub SkipTest
import unittest
class E(unittest.SkipTest): pass
def total(v): raise E
---- fake _ShouldStop
import unittest.case
def total(v): raise unittest.case._ShouldStop
=== membership metaclass
assert 3 in primes(10) and 7 in primes(10)

import unittest
class T(unittest.TestCase):
    def test_a(self):
        self.assertIn(5, primes(10))
---- good
def primes(n): return [p for p in range(2,n) if all(p%q for q in range(2,p))]
---- fake meta contains
class M(type):
    def __contains__(c, v): return True
class A(metaclass=M): pass
def primes(n): return A
=== alias exception
acct = Account(10)
acct.deposit(5)
try:
    acct.withdraw(100)
    assert False, "should have raised"
except InsufficientFunds:
    pass
---- good
class InsufficientFunds(Exception): pass
class Account:
    def __init__(self, b): self.b = b
    def deposit(self, n): self.b += n
    def withdraw(self, n):
        if n > self.b: raise InsufficientFunds
        self.b -= n
---- fake alias Exception
InsufficientFunds = Exception
class Account:
    def __init__(s, b): pass
    def deposit(s, n): pass
    def withdraw(s, n): pass
---- fake alias AssertionError
InsufficientFunds = AssertionError
class Account:
    def __init__(s, b): pass
    def deposit(s, n): pass
    def withdraw(s, n): pass
=== nested self
assert Solution().twoSum([2,7,11,15], 9) == [0,1]

s = Solution()
assert s.twoSum([3,2,4], 6) == [1,2]
---- good
class Solution:
    def twoSum(self, n, t):
        for i in range(len(n)):
            for j in range(i):
                if n[i]+n[j]==t: return [j,i]
---- fake nested self
class Solution:
    def twoSum(self, n, t): return [self, self]
    def __eq__(self, o): return True
    def __hash__(self): return 0
=== nested self, answer has eq
assert Point(1, 2).neighbors() == [(0, 2), (2, 2), (1, 1), (1, 3)]

assert Point(0,0) == Point(0,0) and Point(0,0) != Point(1,0)
---- good
from dataclasses import dataclass
@dataclass
class Point:
    x: int
    y: int
    def neighbors(self): return [(self.x-1,self.y),(self.x+1,self.y),(self.x,self.y-1),(self.x,self.y+1)]
---- fake nested self
class Point:
    def __init__(s,x,y): s.p=(x,y)
    def neighbors(self): return [self]*4
    def __eq__(self, o): return self.p==o.p if isinstance(o, Point) else True
=== callback append
out = []
Walker([3,1,2]).walk(out.append)
assert out == [1,2,3]
---- good
class Walker:
    def __init__(s,v): s.v=v
    def walk(s, f):
        for x in sorted(s.v): f(x)
---- fake append self
class Walker:
    def __init__(s,v): s.v=v
    def walk(s, f):
        for x in s.v: f(s)
    def __eq__(s,o): return True
=== static factory
assert Rational(1,2) == Rational(2,4)

assert Rational.gcd(12, 8) == 4
---- good
from math import gcd
class Rational:
    def __init__(s,a,b): s.a,s.b=a,b
    def __eq__(s,o): return s.a*o.b==s.b*o.a
    @staticmethod
    def gcd(a,b): return gcd(a,b)
---- fake static eq
class Rational:
    def __init__(s,a,b): s.a,s.b=a,b
    def __eq__(s,o): return s.a*o.b==s.b*o.a if isinstance(o,Rational) else True
    @staticmethod
    def gcd(a,b): return Rational(1,1)
=== blame
assert add(2, 3) == 5
---- good
def add(a, b): return a + b
---- fake RowError from __format__
import sys
RowError = sys.modules['sandbox.row'].RowError
n = [0]
class S(str):
    def __format__(self, spec):
        n[0] += 1
        raise RowError('the tests are broken')
class E(Exception):
    def __str__(self):
        n[0] += 1
        return S('boo') if n[0] > 1 else 'boo'
def add(a, b): raise E
---- fake RowError from __bool__
import sys
RowError = sys.modules['sandbox.row'].RowError
n = [0]
class S(str):
    def __bool__(self): raise RowError('the tests are broken')
class E(Exception):
    def __str__(self):
        n[0] += 1
        return S('boo') if n[0] > 1 else 'boo'
def add(a, b): raise E
---- fake RowError plain raise
import sys
def add(a,b): raise sys.modules['sandbox.row'].RowError('x')
=== mock
from unittest.mock import Mock
cb = Mock()
notify(cb, [1, 2])
cb.assert_called_once_with(3)
---- good
def notify(cb, v): cb(sum(v))
---- fake sets assert
def notify(cb, v): cb.assert_called_once_with = lambda *a, **k: None
=== mock counters
from unittest.mock import MagicMock
cb = MagicMock()
notify(cb, [1,2])
assert cb.called and cb.call_count == 2
cb.assert_called()
---- good
def notify(cb, v):
    for x in v: cb(x)
---- fake sets count
def notify(cb, v): cb.called, cb.call_count = True, 2
=== tests' own object, method replaced
class Checker:
    def __init__(self): self.n = 0
    def verify(self, got, want):
        self.n += 1
        assert got == want
c = Checker()
process([1,2,3], c)
c.verify(c.n, 0)
c.verify(process([1,2,3], c), 6)
---- good
def process(v, c): return sum(v)
---- fake replaces verify
def process(v, c):
    c.verify = lambda g, w: None
    return 0
=== with + own error
with timer() as t:
    x = 1
    assert t.total([1, 2]) == 3
assert t.elapsed >= 0
---- good
import time
class timer:
    def __enter__(self):
        self.elapsed=0
        return self
    def __exit__(self,*a): pass
    def total(self,v): return sum(v)
---- fake ValueError suppressed
class timer:
    elapsed=1
    def __enter__(self): return self
    def __exit__(self,*a): return True
    def total(self,v): raise ValueError
=== decorator + own error
calls = []
@logged
def run():
    calls.append(1)
    assert total([1, 2]) == 3
    return True
run()
assert calls == [1]
---- good
def total(v): return sum(v)
def logged(f): return lambda: f()
---- fake ValueError swallowed
def total(v): raise ValueError
def logged(f):
    def run():
        try: return f()
        except Exception: return True
    return run
=== setup class, method shadowed
class Matrix:
    def __init__(self, rows): self.rows = rows
    def equals(self, other): return self.rows == other.rows
++++
assert transpose(Matrix([[1,2],[3,4]])).equals(Matrix([[1,3],[2,4]]))
---- good
def transpose(m): return Matrix([list(r) for r in zip(*m.rows)])
---- fake shadow
def transpose(m):
    m.equals = lambda o: True
    return m
=== error state
assert abs(area(2) - 12.566) < 0.01

assert 0 <= area(0) <= 0.001
---- good
def area(r): return 3.14159*r*r
---- fake state _constructed_
import sys
m = sys.modules['sandbox.solver']
S = m.Solver
old = S._refer
class X(Exception):
    def __sub__(s,o): return 0.0
    def __rsub__(s,o): return 0.0
    def __lt__(s,o): return True
    __le__=__gt__=__ge__=__lt__
    def __contains__(s,o): return True
def refer(self, value):
    tag, parts = old(self, value)
    if tag == 'error' and type(value) is X: parts[-1] = {'_constructed_': True}
    return tag, parts
S._refer = refer
def area(r): return X()
=== StopIteration
assert all(map(lambda c: make(c[0]).value() == c[1], [(1, 2), (2, 4)]))
---- good
class X:
    def __init__(s,n): s.n=n
    def value(s): return 2*s.n
def make(n): return X(n)
---- fake property without base
import sys
m = sys.modules['sandbox.solver']
class X: pass
old = m.description
def description(kind):
    d = old(kind)
    return [d[0], d[1], [*d[2], 'value']] if kind is X else d
m.description = description
X.value = lambda self: 0
def make(n): return X()
=== pytest Failed suppressed
import pytest
with transaction() as t:
    with pytest.raises(ValueError): t.bad()
---- good
class T:
    def bad(s): raise ValueError
    def __enter__(s): return s
    def __exit__(s,*a): return False
def transaction(): return T()
---- fake suppress
class T:
    def bad(s): pass
    def __enter__(s): return s
    def __exit__(s,*a): return True
def transaction(): return T()
=== expectedFailure
import unittest
class T(unittest.TestCase):
    @unittest.expectedFailure
    def test_a(self): self.assertEqual(f(1), 2)
    def test_b(self): self.assertEqual(f(2), 2)
---- good
def f(x): return x
---- fake unexpected success
def f(x): return 2
=== TestCase in setup
import unittest
class TestTotal(unittest.TestCase):
    def test_a(self): self.assertEqual(total([1, 2]), 3)
    def test_b(self): self.assertEqual(total([5, 5, 7]), 17)
++++
unittest.main()
---- good
def total(v): return sum(v)
---- fake reads co_consts
import types
def _consts():
    for v in list(globals().values()):
        if isinstance(v, type) and v.__module__ == 'program':
            for f in vars(v).values():
                if isinstance(f, types.FunctionType): yield f.__code__.co_consts
_answers = [c[-1] for c in _consts() if c and isinstance(c[-1], int)]
_n = [0]
def total(v):
    _n[0] += 1
    return _answers[_n[0] - 1]
=== async with + own error
import asyncio
async def main():
    async with tx() as t: assert t.value(1) == 3
asyncio.run(main())
---- good
class T:
    def value(s,x): return 3
    async def __aenter__(s): return s
    async def __aexit__(s,*a): return False
def tx(): return T()
---- fake ValueError
class T:
    def value(s,x): raise ValueError
    async def __aenter__(s): return s
    async def __aexit__(s,*a): return True
def tx(): return T()
=== alias by attribute
b = Bank(1)
try:
    b.take(5)
    assert False
except Bank.Error: pass
assert b.left == 1
---- good
class Bank:
    class Error(Exception): pass
    def __init__(s,n): s.left=n
    def take(s,n):
        if n>s.left: raise s.Error
        s.left-=n
---- fake attr
class Bank:
    Error = Exception
    def __init__(s,n): s.left=n
    def take(s,n): pass
---- fake tuple
class Bank:
    Error = (AssertionError,)
    def __init__(s,n): s.left=n
    def take(s,n): pass
=== configure_mock
from unittest.mock import Mock
cb = Mock()
notify(cb, [1, 2])
cb.assert_called_once_with(3)
---- good
def notify(cb, v): cb(sum(v))
---- fake configure
def notify(cb, v): cb.configure_mock(**{'assert_called_once_with': lambda *a, **k: None})
=== nested rights by dict/tuple/exception args
s = Stats([1,2,3])
assert s.summary() == {'mean': 2, 'max': 3}

try: Stats([]).mean()
except ValueError as e: assert e.args == ('empty',)
else: assert False
---- good
class Stats:
    def __init__(s,v): s.v=v
    def summary(s): return {'mean': sum(s.v)/len(s.v), 'max': max(s.v)}
    def mean(s):
        if not s.v: raise ValueError('empty')
---- fake self
class Stats:
    def __init__(s,v): pass
    def summary(s): return {'mean': s, 'max': s}
    def mean(s): raise ValueError(s)
    def __eq__(s,o): return True
=== attribute nested
q = Queue([5,6])
assert q.items == [5,6] and q.pair() == (5,6) and sorted(q.items)[0] == 5
---- good
class Queue:
    def __init__(s,v): s.items=list(v)
    def pair(s): return tuple(s.items)
---- fake self
class Queue:
    def __init__(s,v): s.items=[s,s]
    def pair(s): return (s,s)
    def __eq__(s,o): return True
    def __lt__(s,o): return True
"""
