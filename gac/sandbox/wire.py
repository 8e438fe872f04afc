"""Messages between the solver and the judge.

The solver answers in JSON, which the judge does not trust: any bytes decode to plain values or
raise one of `DECODE_ERRORS`. Pickle could run code in the judge, so it is used in the other
direction only, where everything may be seen (`client`).

A value is a list of nodes [tag, parts]. A part is null, a boolean, a number, a string, or [i],
which refers to the later node i. Values of any depth are thus written and read without recursion.
"""

from __future__ import annotations

import datetime
import ipaddress
import pathlib
import re
import sys
import uuid
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from .peer import is_builtin

DECODE_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
"""What decoding bytes that `encode` could not have produced may raise."""

Json = Any
"""Anything that `json.dumps` accepts: None, bool, int, float, str, and lists and dicts of these."""
Node = tuple[str, list[Any]]
"""Tag and parts."""


def _flat(value: Any) -> list[Any]:
    return [part for pair in dict.items(value) for part in pair]


def _dict(parts: list[Any]) -> dict[Any, Any]:
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _from_text(read: Callable[[str], Any]) -> Callable[[list[Any]], Any]:
    return lambda parts: read(str(parts[0]))


def _array_parts(value: Any) -> list[Any]:
    if not _DTYPE.fullmatch(value.dtype.str):
        raise TypeError(f"cannot send an array of {value.dtype} between processes")
    return [value.dtype.str, value.tobytes().hex(), *value.shape]


def _read_array(parts: list[Any]) -> Any:
    dtype, text, *shape = parts
    if not _DTYPE.fullmatch(dtype) or not all(type(size) is int and size >= 0 for size in shape):
        raise TypeError("an array needs a known dtype and a shape")
    numpy: Any = sys.modules["numpy"]
    is_bool = dtype == "|b1"  # another byte than 0 and 1 would be an invalid bool
    data = numpy.frombuffer(bytearray.fromhex(text), "u1" if is_bool else dtype)
    return (data != 0 if is_bool else data).reshape(shape)


def _factory(value: Any) -> Any:
    """The factory of a defaultdict. A class of the program would answer any lookup: KeyError."""
    if value is not None and not is_builtin(value):
        raise KeyError("default_factory")
    return value


_INLINE = frozenset({type(None), bool, int, float, str})
# no pointers, no user-defined types
_DTYPE = re.compile(r"[<>|](b1|[iu][1248]|f[248]|c8|c16|[mM]8\[\w+\]|[US]\d{1,6})")
# tag -> type, its parts, and the inverse
_TYPES: dict[str, tuple[type, Callable[[Any], list[Any]], Callable[[list[Any]], Any]]] = {
    **{kind.__name__: (kind, list, kind) for kind in (list, tuple, set, frozenset, deque)},
    "dict": (dict, _flat, _dict),
    "OrderedDict": (OrderedDict, _flat, lambda parts: OrderedDict(_dict(parts))),
    "Counter": (Counter, _flat, lambda parts: Counter(_dict(parts))),
    "defaultdict": (
        defaultdict,
        lambda d: [d.default_factory if is_builtin(d.default_factory) else None, *_flat(d)],
        lambda parts: defaultdict(_factory(parts[0]), _dict(parts[1:])),
    ),
    "dict_keys": (type({}.keys()), list, lambda parts: dict.fromkeys(parts).keys()),
    "dict_values": (type({}.values()), list, lambda parts: dict(enumerate(parts)).values()),
    "dict_items": (
        type({}.items()),
        lambda items: [part for pair in items for part in pair],
        lambda parts: _dict(parts).items(),
    ),
    "array": (array, lambda a: [a.typecode, *a], lambda parts: array(parts[0], parts[1:])),
    "slice": (slice, lambda s: [s.start, s.stop, s.step], lambda parts: slice(*parts)),
    "range": (range, lambda r: [r.start, r.stop, r.step], lambda parts: range(*parts)),
    "complex": (complex, lambda z: [z.real, z.imag], lambda parts: complex(*parts)),
    **{
        kind.__name__: (kind, lambda b: [b.hex()], _from_text(kind.fromhex))
        for kind in (bytes, bytearray)
    },
    "Fraction": (Fraction, lambda f: [f.numerator, f.denominator], lambda parts: Fraction(*parts)),
    "timedelta": (
        datetime.timedelta,
        lambda d: [d.days, d.seconds, d.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
    **{
        kind.__name__: (kind, lambda d: [d.isoformat()], _from_text(kind.fromisoformat))
        for kind in (datetime.datetime, datetime.date, datetime.time)
    },
    **{
        kind.__name__: (kind, lambda v: [str(v)], _from_text(kind))
        for kind in (
            Decimal,
            uuid.UUID,
            pathlib.PurePosixPath,
            pathlib.PosixPath,
            ipaddress.IPv4Address,
            ipaddress.IPv6Address,
        )
    },
    "NotImplementedType": (type(NotImplemented), lambda _: [], lambda _: NotImplemented),
    "ndarray": (type(NotImplemented), _array_parts, _read_array),
    "scalar": (type(NotImplemented), _array_parts, lambda parts: _read_array(parts)[()]),
}
Shells = dict[str, tuple[Callable[[list[Any]], Any], Callable[[Any, list[Any]], None]]]
"""Tag -> how to make an empty value and how to fill it, both from the parts, for values that
several others, or itself, may contain. To make one, only the first part is known.
"""
_SHELLS: Shells = {
    "list": (lambda _: [], list.extend),
    "dict": (lambda _: {}, lambda value, parts: value.update(_dict(parts))),
    "set": (lambda _: set(), set.update),
}
_TAGS = {kind: tag for tag, (kind, _, _) in reversed(_TYPES.items())}


def _tag(value: Any) -> str | None:
    """The tag of a plain value, or None."""
    kind = type(value)
    if kind in _TAGS:
        return _TAGS[kind]
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray | numpy.generic):
        return None
    return "scalar" if isinstance(value, numpy.generic) else "ndarray"


def encode(items: list[Any], refer: Callable[[Any], Node]) -> Json:
    """Encode a list of values.

    Args:
        items: what to send.
        refer: returns the node of a value that is not plain. Lists, dicts, sets and nodes with the
            tag "instance" are sent once, and may contain themselves.
    """
    nodes: list[Json] = []
    queue: list[Any] = [items]
    sent: dict[int, int] = {}
    for number, value in enumerate(queue):  # grows
        tag = _tag(value)
        if id(value) in sent:
            nodes.append(["seen", [sent[id(value)]]])
            continue
        tag, parts = (tag, _TYPES[tag][1](value)) if tag else refer(value)
        if tag in _SHELLS or tag == "instance":
            sent[id(value)] = number
        if not set(map(type, parts)) <= _INLINE:
            for index, part in enumerate(parts):
                if type(part) not in _INLINE:
                    parts[index] = [len(queue)]
                    queue.append(part)
        nodes.append([tag, parts])
    return nodes


def decode(
    nodes: Json, resolve: Callable[[str, list[Any]], Any], more: Shells | None = None
) -> list[Any]:
    """Decode the result of `encode`, which is not trusted.

    Args:
        nodes: parsed JSON.
        resolve: returns the value of a node that is not plain.
        more: other values that several may contain.

    Raises one of `DECODE_ERRORS` if `encode` could not have written `nodes`.
    """
    shells = _SHELLS | (more or {})
    values = [shells[tag][0](parts[:1]) if tag in shells else None for tag, parts in nodes]
    for number in reversed(range(len(nodes))):
        tag, parts = nodes[number]
        parts = [_part(part, number, values) for part in parts[:]]  # a dict has no slices
        if tag in shells:
            shells[tag][1](values[number], parts)
        elif tag == "seen":
            values[number] = values[parts[0]]
        else:
            values[number] = _TYPES[tag][2](parts) if tag in _TYPES else resolve(tag, parts)
    if type(values[0]) is not list:
        raise TypeError("not a list")
    return values[0]


def _part(part: Json, number: int, values: list[Any]) -> Any:
    if type(part) in _INLINE:
        return part
    [index] = part
    if type(index) is not int or index <= number:
        raise TypeError("a reference must hold the number of a later node")
    return values[index]
