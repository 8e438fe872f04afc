"""Wire format between processes: plain values as tagged JSON, in frames over pipes.

Nothing here trusts the other side: any bytes decode to plain values or raise `WireError`. Pickle is
never used, because unpickling can run code.

JSON null, booleans, strings, arrays and moderately sized numbers represent themselves. Every other
value is an object with one key, its tag: {"tuple": [...]}, {"int": "0x..."}.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime
import json
import math
import os
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

_DECODE_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
FRAME_BYTES = 16 << 20  # small enough that a decoded frame fits in a process's memory limit
_PLAIN_INT = (
    1 << 53
)  # larger integers are rounded by other JSON parsers, and decimal conversion takes quadratic time

Json = Any
"""Anything that `json.dumps` accepts: None, bool, int, float, str, and lists and dicts of these."""


class WireError(ValueError):
    """Bytes or JSON that `encode` could not have produced."""


class ChannelClosed(Exception):
    """The other side closed its end: it exited or was killed."""


class NotPlain(TypeError):
    """A value that cannot be sent."""

    def __init__(self, value: object) -> None:
        super().__init__(f"cannot send a value of type {type(value).__name__} between processes")


def encode(value: Any, refer: Callable[[Any], int] | None = None) -> Json:
    """Encode `value` as tagged JSON; a subclass of a plain type is sent as that type.

    Args:
        value: what to send.
        refer: returns the number of an object that stays on this side (tag "object"); without it,
            such a value raises.

    Raises:
        NotPlain: not a plain value, and no `refer`.
        RecursionError: a value that contains itself.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if abs(number) < _PLAIN_INT else {"int": hex(number)}
    if isinstance(value, float):
        real = float.__float__(value)
        return real if math.isfinite(real) else {"float": float.__repr__(real)}
    if isinstance(value, list):
        return [encode(item, refer) for item in list.__iter__(value)]
    for tag, kind, write, _ in _SEQUENCES:
        if isinstance(value, kind):
            return {tag: [encode(item, refer) for item in write(value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(k, refer), encode(v, refer)] for k, v in dict.items(value)]}
    if isinstance(value, type):
        name = value.__name__
        if vars(builtins).get(name) is value:
            return {"type": name}
    for tag, kind, write, _ in _SCALARS:
        if type(value) is kind:
            return {tag: encode(write(value))}
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return encode(value.item(), refer)
    if refer is None:
        raise NotPlain(value)
    return {"object": refer(value)}


def decode(message: Json, resolve: Callable[[int], Any] | None = None) -> Any:
    """Decode a `message` written by `encode`.

    Args:
        message: parsed JSON, not trusted.
        resolve: returns the object with a given number; without it, tag "object" is refused.

    Raises:
        WireError: `encode` could not have written `message`.
    """
    try:
        return _decode(message, resolve)
    except _DECODE_ERRORS as error:
        raise WireError(f"not a value: {type(error).__name__}: {error}") from None


def _decode(message: Json, resolve: Callable[[int], Any] | None) -> Any:
    if isinstance(message, list):
        return [_decode(item, resolve) for item in message]
    if not isinstance(message, dict):
        return message
    [(tag, content)] = message.items()
    if tag == "int":
        return int(content, 16)
    if tag == "float":
        return {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}[content]
    if tag == "dict":
        return {_decode(key, resolve): _decode(value, resolve) for key, value in content}
    if tag == "type":
        kind = getattr(builtins, content)
        if not isinstance(kind, type):
            raise TypeError(f"{content} is not a type")
        return kind
    if tag == "object" and resolve is not None and type(content) is int:
        return resolve(content)
    if tag in _READ_SEQUENCE:
        if not isinstance(content, list):
            raise TypeError(f"{tag} needs an array")
        return _READ_SEQUENCE[tag](_decode(item, resolve) for item in content)
    return _READ_SCALAR[tag](_decode(content, None))


# tag, type, function to plain parts, function from plain parts
_Kind = tuple[str, Any, Callable[[Any], Any], Callable[[Any], Any]]
_SEQUENCES: tuple[_Kind, ...] = (
    ("tuple", tuple, tuple.__iter__, tuple),
    ("set", set, set.__iter__, set),
    ("frozenset", frozenset, frozenset.__iter__, frozenset),
    ("deque", deque, deque.__iter__, deque),
)
_SCALARS: tuple[_Kind, ...] = (
    ("bytes", bytes, bytes.hex, bytes.fromhex),
    ("bytearray", bytearray, bytearray.hex, bytearray.fromhex),
    ("complex", complex, lambda z: [z.real, z.imag], lambda parts: complex(*parts)),
    ("range", range, lambda r: [r.start, r.stop, r.step], lambda parts: range(*parts)),
    ("decimal", Decimal, str, lambda text: Decimal(_text(text))),
    ("fraction", Fraction, lambda f: [f.numerator, f.denominator], lambda two: Fraction(*two)),
    ("datetime", datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    ("date", datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    ("time", datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    (
        "timedelta",
        datetime.timedelta,
        lambda d: [d.days, d.seconds, d.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
)
_READ_SEQUENCE = {tag: read for tag, _, _, read in _SEQUENCES}
_READ_SCALAR = {tag: read for tag, _, _, read in _SCALARS}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {type(value).__name__}")
    return value


def parse(data: bytes) -> Json:
    """Parse JSON in UTF-8.

    Raises:
        WireError: invalid JSON, including NaN and Infinity.
    """
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class Channel:
    """Frames over two pipes: a four-byte length, then JSON."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self.ended = False
        """Whether the other side closed its end before this one did."""

    def send(self, message: Json) -> None:
        """Write one frame.

        Raises:
            Ended: the other side closed its end.
            WireError: the frame is longer than `FRAME_BYTES`.
        """
        data = json.dumps(message).encode("ascii")
        if len(data) > FRAME_BYTES:
            raise WireError(f"frame of {len(data)} bytes exceeds the limit of {FRAME_BYTES}")
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
            Ended: the other side closed its end.
            WireError: not a frame.
        """
        length = int.from_bytes(self._read(4), "big")
        if length > FRAME_BYTES:
            raise WireError(f"a frame of {length} bytes; the limit is {FRAME_BYTES}")
        return parse(self._read(length))

    def close(self) -> None:
        """Close both ends; a reader on the other side gets `Ended`."""
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
