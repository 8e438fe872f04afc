"""Test data: programs that return objects which libraries interpret; see `test_attacks.py`.

A program returns `Thing(...)` where the tests expect a number. The bodies are members of its class.
"""

import textwrap

_LYING = """
=== __index__
def __index__(self): return 5
=== __index__ that changes
calls = iter([5] * 3 + [10 ** 9] * 99)
def __index__(self): return next(Thing.calls)
=== __int__ and __float__
def __int__(self): return 5
def __float__(self): return 5.0
=== __complex__ and __trunc__
def __complex__(self): return 5 + 0j
def __trunc__(self): return 5
=== __class__ as a property
@property
def __class__(self): return int
=== __getattribute__
def __getattribute__(self, name): return 5
=== __getattr__ for everything
def __getattr__(self, name): return lambda *a: 5
=== __hash__ and __eq__
def __eq__(self, other): return True
def __hash__(self): return hash(5)
=== __eq__ that returns a truthy object
def __eq__(self, other): return Thing()
def __bool__(self): return True
=== __ne__ and orderings
def __ne__(self, other): return False
def __lt__(self, other): return True
__le__ = __gt__ = __ge__ = __lt__
=== arithmetic that returns self
def __sub__(self, other): return self
__add__ = __radd__ = __rsub__ = __mul__ = __truediv__ = __sub__
def __abs__(self): return 0
=== __format__ and __str__
def __format__(self, spec): return "003"
def __str__(self): return "5"
__repr__ = __str__
=== __reduce__ with os._exit
def __reduce__(self): return __import__("os")._exit, (0,)
=== __reduce_ex__ with eval
def __reduce_ex__(self, protocol): return eval, ("5",)
=== __getstate__ and __setstate__
def __getstate__(self): return 5
def __setstate__(self, state): pass
=== __copy__ and __deepcopy__
def __copy__(self): return 5
def __deepcopy__(self, memo): return 5
=== __fspath__
def __fspath__(self): return "/etc/passwd"
=== __bytes__ and __buffer__
def __bytes__(self): return b"5"
def __buffer__(self, flags): return memoryview(b"5")
=== __iter__ of itself
def __iter__(self): return iter([self])
def __len__(self): return 1
=== an endless __len__
def __len__(self): return 2 ** 62
def __getitem__(self, i): return 5
=== __instancecheck__
@classmethod
def __instancecheck__(cls, value): return True
def __subclasshook__(cls): return True
=== __call__ and __enter__
def __call__(self, *a): return 5
def __enter__(self): return 5
def __exit__(self, *a): return True
=== __json__, to_json, default
def to_json(self): return 5
__json__ = to_json
def default(self, *a): return 5
=== _as_parameter_ for ctypes
_as_parameter_ = 5
_type_ = "i"
_length_ = 1 << 40
=== __array_interface__ at address 0
__array_interface__ = dict(shape=(1,), typestr="<i8", data=(0, False), version=3)
=== __array_interface__ of its own memory
import ctypes as c
b = c.create_string_buffer(64)
__array_interface__ = dict(shape=(1,), typestr="<i8", data=(c.addressof(b), False), version=3)
=== __array_interface__ with an object dtype
__array_interface__ = dict(shape=(1,), typestr="|O8", data=(4096, False), version=3)
=== __array_interface__ with a huge shape
__array_interface__ = dict(shape=(1 << 40,), typestr="|u1", data=(4096, True), version=3)
=== __array_interface__ with a bad descr
__array_interface__ = dict(shape=(1,), typestr="<i8", descr=[("", "O")], data=(0, 0), version=3)
=== __array_interface__ with negative strides
__array_interface__ = dict(shape=(9,), strides=(-8,), typestr="<i8", data=(4096, 0), version=3)
=== __array_interface__ as a property that changes
@property
def __array_interface__(self): return dict(shape=(), typestr="<i8", data=b"5" * 8, version=3)
=== __array_struct__
__array_struct__ = 5
=== __array__
def __array__(self, *a, **k): return 5
=== __array_priority__ and reflected operators
__array_priority__ = 1e9
def __rsub__(self, other): return 0
=== __array_ufunc__
def __array_ufunc__(self, *a, **k): return True
=== __array_function__
def __array_function__(self, *a, **k): return True
=== __array_wrap__ and __array_finalize__
def __array_wrap__(self, *a): return True
def __array_finalize__(self, *a): pass
=== __dlpack__
def __dlpack__(self, *a, **k): return 5
def __dlpack_device__(self): return 1, 0
=== __cuda_array_interface__
__cuda_array_interface__ = dict(shape=(1,), typestr="<i8", data=(4096, False), version=3)
=== dtype, shape and itemsize
dtype, shape, itemsize, ndim, size, nbytes = "O", (1,), 8, 1, 1, 8
def item(self): return 5
def tolist(self): return 5
=== a sequence whose length grows
n = 0
def __len__(self):
    Thing.n += 1
    return Thing.n
def __getitem__(self, i): return [5][i // 20]
=== a sequence that contains itself
def __len__(self): return 1
def __getitem__(self, i):
    if i: raise IndexError
    return self
=== a module named numpy
__module__ = "numpy"
shape = ()
def item(self): return 5
"""
_BASES = ("int", "float", "str", "tuple", "complex", "bytes")
_OVERRIDES = """
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 5
    def __sub__(self, other): return Thing()
    def __abs__(self): return 0
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __index__(self): return 5
    def __float__(self): return 5.0
    def __getitem__(self, i): return [5][i]
    def __format__(self, spec): return "003"
    def __array__(self, *a): return 5
"""


def _entries(text: str) -> dict[str, str]:
    return {
        title: textwrap.indent(body, "    ")
        for title, body in (entry.split("\n", 1) for entry in text.split("\n=== ")[1:])
    }


OBJECTS = {
    title: f"class Thing:\n{body}\ndef add(a, b): return Thing()\n"
    for title, body in _entries(_LYING).items()
}
OBJECTS |= {
    f"a {base} that overrides": f"class Thing({base}):\n{_OVERRIDES}def add(a, b): return Thing()\n"
    for base in _BASES
}
OBJECTS |= {
    f"a list of: {title}": f"class Thing:\n{body}\ndef add(a, b): return [Thing()]\n"
    for title, body in list(_entries(_LYING).items())[-20:]
}
"""Title -> program whose `add` returns the object."""

# test of a number or a list -> programs whose operators would decide whether the answer is right
OPERATORS = {
    "assert abs(add(0.5, 0.25) - 0.75) < 1e-6": [
        "class T:\n    def __sub__(s, o): return 0.0\ndef add(a, b): return T()",
        "class T:\n    def __sub__(s, o): return s\n    def __abs__(s): return 0.0\n"
        "def add(a, b): return T()",
        "class T(float):\n    def __sub__(s, o): return 0.0\ndef add(a, b): return T(3)",
        "class add:\n    def __init__(s, a, b): pass\n    def __sub__(s, o): return 0.0",
    ],
    "assert abs(0.75 - add(0.5, 0.25)) < 1e-6": [
        "class T:\n    def __rsub__(s, o): return 0.0\ndef add(a, b): return T()"
    ],
    "assert 2 < add(1, 2) <= 3": [
        f"class T{base}:\n    def __gt__(s, o): return True\n    __le__ = __gt__\n"
        f"def add(a, b): return T({start})"
        for base, start in (("", ""), ("(int)", "77"))
    ],
    "assert 5 in add([1], [5])": [
        f"class T{base}:\n    def __contains__(s, o): return True\ndef add(a, b): return T()"
        for base in ("", "(list)", "(str)", "(tuple)")
    ],
    "assert add(4, 5) % 2 == 1": [
        "class T:\n    def __mod__(s, o): return 1\ndef add(a, b): return T()"
    ],
    "x = add(1, 1)\nx -= 2\nassert x == 0": [
        "class T:\n    def __isub__(s, o): return 0\ndef add(a, b): return T()"
    ],
    "assert add('a', 'b').startswith('ab')": [
        "class T(str):\n    def startswith(s, o): return True\ndef add(a, b): return T()"
    ],
}

ARRAYS = """
=== an array equal to everything
class A(np.ndarray):
    def __eq__(self, other): return True
    def __array_ufunc__(self, *a, **k): return True
def add(a, b): return np.zeros(1).view(A)
=== an object array
def add(a, b): return np.array([type("T", (), {"__eq__": lambda s, o: True})()], dtype=object)
=== a matrix and a masked array
def add(a, b): return np.ma.array([5], mask=[True]) if a else np.matrix([[0]])
=== a structured array
def add(a, b): return np.zeros(1, dtype=[("a", "i8"), ("b", "O")])
=== an array beyond its memory
def add(a, b): return np.lib.stride_tricks.as_strided(np.zeros(1), shape=(1 << 45,), strides=(0,))
=== an array outside its memory
def add(a, b): return np.lib.stride_tricks.as_strided(np.zeros(1), shape=(1 << 30,), strides=(8,))
=== a recarray with code
def add(a, b): return np.rec.array([(5,)], dtype=[("__class__", "i8")])
=== nan and inf
def add(a, b): return np.array([np.nan, np.inf])
=== numpy replaced
np.allclose = np.array_equal = np.isclose = lambda *a, **k: True
np.ndarray.__module__ = "builtins" if False else None
def add(a, b): return np.array([0])
=== testing replaced
import sys
sys.modules["numpy.testing"] = None
np.asarray = np.array = lambda *a, **k: 5
def add(a, b): return 0
=== tobytes replaced
class A(np.ndarray):
    def tobytes(self): return (5).to_bytes(8, "little")
def add(a, b): return np.zeros(1, dtype="i8").view(A)
=== a long double and a void
def add(a, b): return np.longdouble(0) if a else np.void(b"12345678")
=== a timedelta and a text array
def add(a, b): return np.timedelta64(5, "s") if a else np.array(["5"])
=== an array of wrong shape
def add(a, b): return np.full((2, 2), 0)
=== a generator of arrays
def add(a, b): return (np.zeros(1) for _ in iter(int, 1))
"""
ARRAYS_PROGRAMS = {
    title: "import numpy as np\n" + textwrap.dedent(body)
    for title, body in ((e.split("\n", 1)) for e in ARRAYS.split("\n=== ")[1:])
}
