"""The wire format: plain values survive a round trip, and hostile bytes are rejected."""

from __future__ import annotations

import collections
import enum
import json
import math
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gac.sandbox.judge import judge
from gac.sandbox.wire import Channel, ChannelClosed, NotPlain, WireError, decode, encode, parse

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**40), max_value=10**40)
    | st.floats(allow_nan=False)
    | st.text()
    | st.characters(categories=["Cs"])
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.datetimes()
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.sampled_from([int, float, str, dict, ValueError, range(3), range(9, 0, -2)])
)
KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(collections.deque)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
        | st.dictionaries(KEYS, inner)
    ),
    max_leaves=20,
)


def round_trip(value):
    return decode(parse(json.dumps(encode(value)).encode()))


def equal_with_types(a, b):
    """Equal, and of the same types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(map(equal_with_types, a, b))
    if isinstance(a, dict):
        return equal_with_types(list(a), list(b)) and equal_with_types(list(a.values()), list(b.values()))
    return a == b


@given(VALUES)
@settings(max_examples=100, deadline=None)
def test_plain_values_round_trip(value):
    assert equal_with_types(round_trip(value), value)


def test_round_trip_of_nan_negative_zero_and_types():
    assert math.isnan(round_trip(float("nan")))
    assert math.copysign(1, round_trip(-0.0)) == -1
    assert equal_with_types(
        round_trip(10**5000), 10**5000
    )  # beyond the digit limit for converting text to int
    assert equal_with_types(round_trip([True, 1, 1.0]), [True, 1, 1.0])


class Number(enum.IntEnum):
    ONE = 1


class Text(str):
    def __eq__(self, other):
        return True

    __hash__ = str.__hash__


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Number.ONE, 1),
        (Text("five"), "five"),
        (collections.OrderedDict(a=1), {"a": 1}),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (collections.defaultdict(list, a=[1]), {"a": [1]}),
        (collections.namedtuple("Point", "x y")(1, 2), (1, 2)),
        (type("Deaf", (float,), {"__repr__": lambda self: "0.0"})(2.5), 2.5),
    ],
    ids=["enum", "text", "ordered", "counter", "default", "named", "float"],
)
def test_subclasses_are_sent_as_their_plain_type(value, plain):
    assert equal_with_types(round_trip(value), plain)


@pytest.mark.parametrize(
    "value",
    [object(), len, lambda: 0, iter([]), os, Text],
    ids=["object", "builtin", "function", "iterator", "module", "class"],
)
def test_other_values_are_not_sent(value):
    with pytest.raises(NotPlain, match="does not cross between processes"):
        encode([value])
    assert encode([value], lambda _: 7) == [{"object": 7}]


def test_a_value_that_contains_itself_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(RecursionError):
        encode(loop)


TAGS = (
    "int float dict type object tuple set frozenset deque bytes bytearray complex range decimal "
    "fraction datetime date time timedelta other"
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(TAGS.split()),
            inner,
            max_size=2,
        )
    ),
    max_leaves=10,
)


@given(JSON)
@settings(max_examples=150, deadline=None)
def test_any_json_decodes_or_raises_wire_error(message):
    try:
        value = decode(message)
    except WireError:
        return
    json.dumps(encode(value))  # plain, so it can be encoded again


@given(st.binary())
@settings(max_examples=100, deadline=None)
def test_any_bytes_parse_or_raise_wire_error(data):
    try:
        parse(data)
    except WireError:
        return
    json.loads(data)


@pytest.mark.parametrize(
    "data",
    [b"[" * 100_000, b"1" * 10_000, b"NaN", b"\xff", b'{"a"', b""],
    ids=["deep", "long number", "NaN", "not UTF-8", "torn", "nothing"],
)
def test_hostile_text_is_refused(data):
    with pytest.raises(WireError, match="not JSON"):
        parse(data)


@pytest.mark.parametrize(
    "message",
    [
        {"object": 1},
        {"type": "len"},
        {"type": "__import__"},
        {"pickle": "gASVBgAAAAAAAACMAm9zlC4="},
        {"int": 5},
        {"set": [[]]},
        {"dict": [[[], 1]]},
        {"range": [0, 1, 0]},
        {"decimal": 1},
        {"fraction": [1, 0]},
        {},
        {"tuple": [], "list": []},
    ],
    ids=str,
)
def test_hostile_values_are_refused(message):
    with pytest.raises(WireError):
        decode(message)


# --- frames ---------------------------------------------------------------------------------------


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield reader, writer
    for end in (reader, writer):
        try:
            os.close(end)
        except OSError:
            continue


def test_frame_boundaries_are_preserved(pipe):
    channel = Channel(*pipe)
    for message in (["call", 1], [], "x" * 10_000):
        channel.send(message)
        assert channel.receive() == message


def test_closed_pipe_raises_ended(pipe):
    reader, writer = pipe
    os.write(writer, b"\x00\x00\x00\x09[1")
    os.close(writer)
    with pytest.raises(ChannelClosed):
        Channel(reader, writer).receive()


def test_oversized_frame_is_rejected_without_reading(pipe):
    reader, writer = pipe
    os.write(writer, b"\xff\xff\xff\xff")
    with pytest.raises(WireError, match="4294967295 bytes"):
        Channel(reader, writer).receive()


def framed(data):
    return len(data).to_bytes(4, "big") + data


NAMES = framed(json.dumps(["value", None]).encode()) + framed(
    json.dumps(["value", {"dict": [["f", {"object": 0}]]}]).encode()
)
SPEC = {
    "tests": ["assert f(2) == 4", "assert list(f(3)) == [9]", "try: f(1)\nexcept Exception: pass"],
    "setup": "",
    "entry_point": "",
    "reference": "",
    "all": True,
}


@given(
    st.binary(max_size=60)
    | JSON.map(lambda m: framed(json.dumps(m).encode()))
    | JSON.map(lambda m: framed(json.dumps(["value", m]).encode()))
    | st.tuples(JSON, JSON, JSON).map(lambda m: framed(json.dumps(["error", *m]).encode()))
)
@settings(max_examples=100, deadline=None)
def test_judge_gives_a_verdict_for_any_solver_output(answer):
    """The solver's messages are written in advance: it loads, defines `f`, gives one answer and
    exits.
    """
    reader, answers = os.pipe()
    questions, writer = os.pipe()
    os.write(answers, NAMES + answer)
    os.close(answers)
    verdict = judge(SPEC, Channel(reader, writer))
    os.close(questions)
    assert len(verdict["passed"]) == 3 and not all(verdict["passed"])
    json.dumps(verdict)
