"""Wire format between processes: plain values as JSON, in frames over pipes.

Nothing here trusts the other side: any bytes decode to plain values or raise `WireError`. Pickle is
never used, because unpickling can run code.

A message is [item, node, ...]. An item is null, a boolean, a number, a string or [i], a reference
to node i. A node is [tag, content] or [tag, content, items] and refers only to nodes before it, so
values of any depth are written and read without recursion, and shared parts stay shared.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import datetime
import ipaddress
import itertools
import json
import os
import pathlib
import re
import sys
import uuid
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

FRAME_BYTES = 64 << 20
_SMALL_INT = 1 << 63  # larger integers are sent in hex: decimal conversion takes quadratic time
_DTYPE = re.compile(r"[<>|](b1|[iu][1248]|f[248]|c8|c16)")  # no pointers, no user-defined types
_DECODE_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)

Json = Any
"""Anything that `json.dumps` accepts: None, bool, int, float, str, and lists and dicts of these."""
Node = tuple[str, Json, "Sequence[Any] | None"]
"""Tag, content and the values inside, if any."""


class WireError(ValueError):
    """Bytes or JSON that `encode` could not have produced."""


class ChannelClosed(Exception):
    """The other side closed its end: it exited or was killed."""


class NotPlain(TypeError):
    """A value that cannot be sent."""

    def __init__(self, value: object) -> None:
        super().__init__(f"cannot send a value of type {type(value).__name__} between processes")


def encode(value: Any, refer: Callable[[Any], Node | None] | None = None) -> Json:
    """Encode `value` as JSON.

    Args:
        value: what to send. Without `refer`, a subclass of a plain type is sent as that type.
        refer: returns the node of a value that is not of a plain type, or None.

    Raises:
        NotPlain: not a plain value, and no node from `refer`.
        ValueError: a value that contains itself.
    """
    nodes: list[Json] = []
    finished: dict[int, tuple[Json, Any]] = {}  # keeps the values alive, so that ids stay unique
    unfinished: set[int] = set()
    frames: list[tuple[Any, str, Json, Iterable[Any], list[Json]]] = []
    while True:
        item: Json = _PENDING
        if _is_inline(value):
            item = value
        elif id(value) in finished:
            item = finished[id(value)][0]
        else:
            node = _plain_node(value) or (refer and refer(value))
            if not node:
                value = plain_base(value)
                continue
            tag, content, inside = node
            if inside is None or _all_inline(inside):
                nodes.append([tag, content] if inside is None else [tag, content, list(inside)])
                item = [len(nodes) - 1]
                finished[id(value)] = item, value
            elif id(value) in unfinished:
                raise ValueError("a value that contains itself cannot be sent")
            else:
                unfinished.add(id(value))
                frames.append((value, tag, content, iter(inside), []))
        while frames:
            owner, tag, content, rest, items = frames[-1]
            if item is not _PENDING:
                items.append(item)
                item = _PENDING
            value = next(rest, _PENDING)  # type: ignore[call-overload] # an iterator
            if value is not _PENDING:
                break
            frames.pop()
            nodes.append([tag, content, items])
            item = [len(nodes) - 1]
            finished[id(owner)] = item, owner
        else:
            return [item, *nodes]


def decode(
    message: Json, resolve: Callable[[str, Json, list[Any] | None], Any] | None = None
) -> Any:
    """Decode a `message` written by `encode`.

    Args:
        message: parsed JSON, not trusted.
        resolve: returns the value of a node with another tag; without it, such nodes are refused.

    Raises:
        WireError: `encode` could not have written `message`.
    """
    values: list[Any] = []

    def read(item: Json) -> Any:
        if isinstance(item, list):
            [index] = item
            if type(index) is not int or index < 0:
                raise TypeError("a reference must hold the number of a node, an integer >= 0")
            return values[index]
        if isinstance(item, dict):
            raise TypeError("unexpected object")
        return item

    try:
        root, *nodes = message
        for node in (message, *nodes):
            if not isinstance(node, list):
                raise TypeError(
                    "a message must be an array: the root item, then one array per node"
                )
        for node in nodes:
            tag, content, inside = node if len(node) == 3 else (*node, None)
            if not isinstance(inside, list | None):
                raise TypeError(f"the items of a {tag!r:.40} node must be an array")
            items = None if inside is None else [read(item) for item in inside]
            if tag in _READ_ITEMS and items is not None:
                values.append(_READ_ITEMS[tag](items))
            elif tag in _READ_CONTENT:
                values.append(_READ_CONTENT[tag](content))
            elif resolve is not None and isinstance(tag, str):
                values.append(resolve(tag, content, items))
            else:
                raise TypeError(f"unknown tag {tag!r:.40}")
        return read(root)
    except _DECODE_ERRORS as error:
        raise WireError(f"cannot decode a value: {type(error).__name__}: {error!s:.200}") from None


def plain_base(value: Any) -> Any:
    """The part of `value` that belongs to its plain base type; overridden methods are ignored.

    Raises:
        NotPlain: the class of `value` has no plain base type.
    """
    for kind, convert in _BASES:
        if isinstance(value, kind):
            return convert(value)
    raise NotPlain(value)


_PENDING = object()
_INLINE = frozenset({type(None), bool, int, float, str})


def _is_inline(value: Any) -> bool:
    kind = type(value)
    return kind in _INLINE and (kind is not int or -_SMALL_INT < value < _SMALL_INT)


def _all_inline(values: Sequence[Any]) -> bool:
    kinds = set(map(type, values))
    if not kinds <= _INLINE:
        return False
    if kinds == {int}:
        return bool(min(values) > -_SMALL_INT and max(values) < _SMALL_INT)
    return int not in kinds or all(map(_is_inline, values))


def _flat(value: Any) -> list[Any]:
    return list(itertools.chain.from_iterable(dict.items(value)))


def _paired(items: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(items[::2], items[1::2], strict=True))


def _is_builtin_type(value: Any) -> bool:
    return isinstance(value, type) and vars(builtins).get(value.__name__) is value


def _plain_node(value: Any) -> Node | None:
    kind = type(value)
    if kind in _ITEMS:
        return kind.__name__, None, _ITEMS[kind](value)
    if kind in _CONTENT:
        return kind.__name__, _CONTENT[kind](value), None
    if _is_builtin_type(value):
        return "type", value.__name__, None
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
        numbers = numpy.asarray(value)
        if _DTYPE.fullmatch(numbers.dtype.str):
            data = base64.b64encode(numbers.tobytes()).decode("ascii")
            tag = "array" if kind is numpy.ndarray else "scalar"
            return tag, [numbers.dtype.str, list(numbers.shape), data], None
    return None


def _read_array(content: Json) -> Any:
    dtype, shape, text = content
    if not _DTYPE.fullmatch(dtype) or not all(type(size) is int and size >= 0 for size in shape):
        raise TypeError("an array needs a known dtype and a shape")
    numpy: Any = sys.modules["numpy"]
    data = base64.b64decode(text, validate=True)
    if dtype == "|b1":
        return (numpy.frombuffer(bytearray(data), "u1") != 0).reshape(shape)
    return numpy.frombuffer(bytearray(data), dtype).reshape(shape)


def _defaultdict_items(value: Any) -> list[Any]:
    factory = value.default_factory
    return [factory if _is_builtin_type(factory) else None, *_flat(value)]


def _text(content: Json) -> str:
    if not isinstance(content, str):
        raise TypeError(f"expected text, got {type(content).__name__}")
    return content


def _read_type(name: Json) -> type:
    kind = getattr(builtins, _text(name))
    if not isinstance(kind, type):
        raise TypeError(f"{name} is not a type")
    return kind


# _ITEMS: type -> function that lists the values inside; _READ_ITEMS: type's name -> its inverse
_ITEMS: dict[type, Callable[[Any], list[Any]]] = {
    **dict.fromkeys((list, tuple, set, frozenset, deque), list),
    **dict.fromkeys((type({}.keys()), type({}.values())), list),
    **dict.fromkeys((dict, OrderedDict, Counter), _flat),
    type({}.items()): lambda view: list(itertools.chain.from_iterable(view)),
    defaultdict: _defaultdict_items,
    array: lambda value: [value.typecode, *value],
    slice: lambda value: [value.start, value.stop, value.step],
}
_READ_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "dict": lambda items: dict(_paired(items)),
    "OrderedDict": lambda items: OrderedDict(_paired(items)),
    "Counter": lambda items: Counter(dict(_paired(items))),
    "defaultdict": lambda items: defaultdict(items[0], _paired(items[1:])),
    "array": lambda items: array(items[0], items[1:]),
    "dict_keys": lambda items: dict.fromkeys(items).keys(),
    "dict_values": lambda items: dict(enumerate(items)).values(),
    "dict_items": lambda items: dict(_paired(items)).items(),
    "slice": lambda items: slice(*items),
}
# _CONTENT: type -> function that returns the content; _READ_CONTENT: type's name -> its inverse
_CONTENT: dict[type, Callable[[Any], Json]] = {
    int: hex,
    bytes: bytes.hex,
    bytearray: bytearray.hex,
    complex: lambda z: [z.real, z.imag],
    range: lambda r: list(map(hex, (r.start, r.stop, r.step))),
    Decimal: str,
    Fraction: lambda f: [hex(f.numerator), hex(f.denominator)],
    datetime.datetime: datetime.datetime.isoformat,
    datetime.date: datetime.date.isoformat,
    datetime.time: datetime.time.isoformat,
    datetime.timedelta: lambda d: [d.days, d.seconds, d.microseconds],
    uuid.UUID: str,
    pathlib.PurePosixPath: str,
    pathlib.PosixPath: str,
    **dict.fromkeys((ipaddress.IPv4Address, ipaddress.IPv6Address), str),
}
_READ_CONTENT: dict[str, Callable[[Json], Any]] = {
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": lambda parts: complex(*parts),
    "range": lambda parts: range(*(int(part, 16) for part in parts)),
    "Decimal": lambda text: Decimal(_text(text)),
    "Fraction": lambda parts: Fraction(*(int(part, 16) for part in parts)),
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": lambda parts: datetime.timedelta(*parts),
    "UUID": lambda text: uuid.UUID(_text(text)),
    "PurePosixPath": lambda text: pathlib.PurePosixPath(_text(text)),
    "PosixPath": lambda text: pathlib.Path(_text(text)),
    "IPv4Address": lambda text: ipaddress.IPv4Address(_text(text)),
    "IPv6Address": lambda text: ipaddress.IPv6Address(_text(text)),
    "type": _read_type,
    "array": _read_array,
    "scalar": lambda content: _read_array(content)[()],
}
# plain type -> conversion of an instance of a subclass
_BASES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, lambda value: int.__add__(value, 0)),
    (float, float.__float__),
    (str, lambda value: str.__str__(value)),
    (list, lambda value: list(list.__iter__(value))),
    (tuple, lambda value: tuple(tuple.__iter__(value))),
    (dict, lambda value: dict(dict.items(value))),
    (set, lambda value: set(set.__iter__(value))),
    (frozenset, lambda value: frozenset(frozenset.__iter__(value))),
    (deque, lambda value: deque(deque.__iter__(value))),
    (bytes, lambda value: bytes.__getitem__(value, slice(None))),
    (bytearray, lambda value: bytearray.__getitem__(value, slice(None))),
    (complex, lambda value: complex.__pos__(value)),
)


def parse(data: bytes) -> Json:
    """Parse JSON in UTF-8.

    Raises:
        WireError: invalid JSON.
    """
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError, MemoryError) as error:
        raise WireError(f"not JSON: {error!s:.200}") from None


class Channel:
    """Frames over two pipes: a four-byte length, then JSON."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self.ended = False
        """Whether the other side closed its end before this one did."""

    def send(self, message: Json) -> None:
        """Write one frame.

        Raises:
            ChannelClosed: the other side closed its end.
            WireError: the frame is longer than `FRAME_BYTES`.
        """
        data = json.dumps(message).encode("ascii")
        if len(data) > FRAME_BYTES:
            raise WireError(f"the message has {len(data)} bytes; the limit is {FRAME_BYTES}")
        view = memoryview(len(data).to_bytes(4, "big") + data)
        try:
            while view:
                view = view[os.write(self._writer, view) :]
        except BrokenPipeError:
            self.ended = True
            raise ChannelClosed from None

    def receive(self) -> Json:
        """Read one frame.

        Raises:
            ChannelClosed: the other side closed its end.
            WireError: not a frame.
        """
        length = int.from_bytes(self._read(4), "big")
        if length > FRAME_BYTES:
            raise WireError(f"the received message has {length} bytes; the limit is {FRAME_BYTES}")
        return parse(self._read(length))

    def close(self) -> None:
        """Close both ends; a reader on the other side gets `ChannelClosed`."""
        for end in (self._reader, self._writer):
            with contextlib.suppress(OSError):
                os.close(end)

    def _read(self, length: int) -> bytes:
        parts = []
        while length > 0:
            part = os.read(self._reader, min(length, 1 << 20))
            if not part:
                self.ended = True
                raise ChannelClosed
            parts.append(part)
            length -= len(part)
        return b"".join(parts)
