"""The wire format: plain values survive a round trip, and hostile bytes are rejected."""

from __future__ import annotations

import collections
import enum
import json
import math
import os
from array import array as typed_array
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gac.sandbox import wire
from gac.sandbox.judge import judge
from gac.sandbox.lent import Lender
from gac.sandbox.remote import SolverClient, _checked
from gac.sandbox.solver import _content
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
    """Whether `a` and `b` are equal and have the same types at every level."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(map(equal_with_types, a, b))
    if isinstance(a, dict):
        return equal_with_types(list(a), list(b)) and equal_with_types(
            list(a.values()), list(b.values())
        )
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


SUBCLASSES = {
    "enum": (Number.ONE, 1),
    "text": (Text("five"), "five"),
    "named": (collections.namedtuple("Point", "x y")(1, 2), (1, 2)),
    "float": (type("Deaf", (float,), {"__repr__": lambda self: "0.0"})(2.5), 2.5),
    "list": (type("Stack", (list,), {"__iter__": lambda self: iter("no")})([1]), [1]),
    "dict": (type("Record", (dict,), {"items": lambda self: []})(a=1), {"a": 1}),
    "bytes": (type("Raw", (bytes,), {"hex": lambda self: "00"})(b"ab"), b"ab"),
}


@pytest.mark.parametrize("name", SUBCLASSES)
def test_subclasses_are_sent_as_their_plain_type(name):
    value, plain = SUBCLASSES[name]
    assert equal_with_types(round_trip(value), plain)


COLLECTIONS = {
    "ordered": collections.OrderedDict(b=1, a=2),
    "counter": collections.Counter("aab"),
    "default": collections.defaultdict(list, a=[1]),
    "slice": slice(1, None, 2),
}


@pytest.mark.parametrize("name", COLLECTIONS)
def test_collections_keep_their_type(name):
    value = COLLECTIONS[name]
    assert type(round_trip(value)) is type(value) and round_trip(value) == value


def test_views_of_dicts_are_sent():
    value = {"a": 1, "b": 2}
    assert round_trip(value.keys()) == value.keys()
    assert round_trip(value.items()) == value.items()
    assert list(round_trip(value.values())) == [1, 2]


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", ">i4", "i8", "f2", "f4", "f8", "c8", "c16"])
def test_arrays_keep_dtype_shape_and_data(dtype):
    value = np.array([[0, 1, 2], [3, 4, 5]]).astype(dtype)
    for array in (value, value.T, value[:0], value[0, 1]):
        result = round_trip(array)
        assert type(result) is type(array) and result.dtype == array.dtype
        assert np.array_equal(result, array) and result.shape == array.shape


@pytest.mark.parametrize("dtype", ["O", "U3", "M8[s]", "V4"])
def test_other_arrays_are_not_sent(dtype):
    with pytest.raises(NotPlain):
        encode(np.zeros(2, dtype))


def test_deep_and_shared_values_are_sent():
    deep: list = []
    for _ in range(20_000):
        deep = [deep]
    result = round_trip(deep)
    for _ in range(20_000):
        [result] = result
    assert result == []
    row = [0]
    first, second = round_trip([row, row])
    assert first is second


@pytest.mark.parametrize(
    "value",
    [object(), len, lambda: 0, iter([]), os, Text],
    ids=["object", "builtin", "function", "iterator", "module", "class"],
)
def test_other_values_are_not_sent(value):
    with pytest.raises(NotPlain, match="cannot send a value of type"):
        encode([value])
    encoded = encode([value], lambda _: ("object", 7, None))
    assert encoded == [[1], ["object", 7], ["list", None, [[0]]]]


def test_a_value_that_contains_itself_is_refused():
    loop: list = []
    loop.append((1, loop))
    with pytest.raises(ValueError, match="contains itself"):
        encode(loop)


TAGS = (
    "int float dict type object tuple set frozenset deque bytes bytearray complex range Decimal "
    "Fraction datetime date time timedelta list OrderedDict Counter defaultdict slice dict_keys "
    "dict_items array scalar class value error callback other"
)
CONTENT = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=8,
)
ITEM = st.integers(-1, 3).map(lambda i: [i]) | CONTENT
NODE = st.tuples(st.sampled_from(TAGS.split()), CONTENT, st.lists(ITEM, max_size=4)).map(list)
SHORT_NODE = st.tuples(st.sampled_from(TAGS.split()), CONTENT).map(list)
JSON = st.builds(lambda root, nodes: [root, *nodes], ITEM, st.lists(NODE | SHORT_NODE | CONTENT))


@given(JSON)
@settings(max_examples=150, deadline=None)
def test_any_json_decodes_or_raises_wire_error(message):
    try:
        value = decode(message)
    except WireError:
        return
    json.dumps(encode(value))  # plain, so that it can be encoded again


@given(st.binary() | CONTENT.map(lambda content: json.dumps(content).encode()))
@settings(max_examples=100, deadline=None)
def test_any_bytes_parse_or_raise_wire_error(data):
    try:
        expected = json.loads(data.decode())
    except ValueError:
        with pytest.raises(WireError):
            parse(data)
    else:
        assert repr(parse(data)) == repr(expected)


@pytest.mark.parametrize(
    "data",
    [b"[" * 100_000, b"1" * 10_000, b"\xff", b'{"a"', b""],
    ids=["deep", "long number", "not UTF-8", "torn", "nothing"],
)
def test_hostile_text_is_refused(data):
    with pytest.raises(WireError, match="not JSON"):
        parse(data)


HOSTILE = """
    [[0], ["object", 1]]
    [[0], ["type", "len"]]
    [[0], ["type", "__import__"]]
    [[0], ["pickle", "gASVBgAAAAAAAACMAm9zlC4="]]
    [[0], ["int", 5]]
    [[0], ["set", null, [[0]]]]
    [[1], ["list", null, []], ["set", null, [[0]]]]
    [[1], ["list", null, []], ["dict", null, [[0], 1]]]
    [[0], ["dict", null, [1]]]
    [[0], ["list", null, {}]]
    [[0], ["range", ["0", "1", "0"]]]
    [[0], ["Decimal", 1]]
    [[0], ["Fraction", ["1", "0"]]]
    [[0], ["defaultdict", null, [5]]]
    [[0], ["array", ["|O", [1], "AAAAAAAAAAA="]]]
    [[0], ["array", ["<f8", [2], "AAAAAAAAAAA="]]]
    [[0], ["array", ["|u1", [3], "AA AA"]]]
    [[0], ["array", ["<f8", [-1, -1], "AAAAAAAAAAA="]]]
    [[0], ["array", ["<f8", [true], "AAAAAAAAAAA="]]]
    [[0], ["array", ["<f8", [1e0], "AAAAAAAAAAA="]]]
    [[0], ["array", ["<f8,<f8", [1], "AAAAAAAAAAAAAAAAAAAAAA=="]]]
    [[0], ["array", ["<f8", 1, "AAAAAAAAAAA="]]]
    [[0], ["array", "<f8"]]
    [[-1], ["list", null, []]]
    [[true], ["list", null, []]]
    [[1]]
    [{}]
    []
    5
    null
    {"a": 1}
    [[0], 5]
    [[0], ["list"]]
    [[0], ["list", null, [], 1]]
    [[0], [["list"], null, []]]
""".strip()


@pytest.mark.parametrize("message", [json.loads(line) for line in HOSTILE.splitlines()], ids=str)
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
    os.write(writer, ((64 << 20) + 1).to_bytes(4, "big"))
    with pytest.raises(WireError, match="67108865 bytes; the limit is 67108864"):
        Channel(reader, writer).receive()


def framed(data):
    return len(data).to_bytes(4, "big") + data


def answered(kind, *message):
    return framed(json.dumps([kind, list(message), ""]).encode())


FUNCTION = ["function", 0]
NAMES = answered("value", None) + answered("value", [1], FUNCTION, ["dict", None, ["f", [0]]])
SPEC = {
    "tests": ["assert f(2) == 4", "assert list(f(3)) == [9]", "try: f(1)\nexcept Exception: pass"],
    "setup": "",
    "entry_point": "",
    "reference": "",
    "all": True,
}


KINDS = st.sampled_from(["value", "raise", "callback", "other"])


@given(
    st.binary(max_size=60)
    | CONTENT.map(lambda m: framed(json.dumps(m).encode()))
    | st.tuples(KINDS, JSON).map(lambda m: answered(m[0], *m[1]))
    | st.tuples(KINDS, CONTENT).map(lambda m: framed(json.dumps([*m, ""]).encode()))
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
    verdict = judge(SPEC, Channel(reader, writer), guard=False)
    os.close(questions)
    assert len(verdict["passed"]) == 3 and not all(verdict["passed"])
    json.dumps(verdict)


def test_an_error_that_would_end_a_loop_becomes_another_one():
    """The solver claims that the iteration has ended, which would skip the rest of the test."""
    error = ["error", [2, "StopIteration", "no"], []]
    spec = {**SPEC, "tests": ["for x in iter(f, None): break", "for i in map(f, [1]): assert 0"]}
    reader, answers = os.pipe()
    questions, writer = os.pipe()
    os.write(answers, NAMES + 2 * answered("raise", [0], error))
    verdict = judge(spec, Channel(reader, writer), guard=False)
    for end in (answers, questions):
        os.close(end)
    assert verdict["passed"] == [False, False] and "RemoteError: no" in verdict["problem"]


@pytest.mark.parametrize(
    "value", [typed_array("i", [3, -4]), typed_array("d"), Fraction(255, 16), 2**70]
)
def test_numbers_in_other_bases_and_arrays_round_trip(value):
    assert round_trip(value) == value and type(round_trip(value)) is type(value)


def test_a_class_whose_bases_cannot_be_combined_gets_one_of_them():
    number, text = [1, "Number", "int", [], []], [2, "Text", "str", [], []]
    both = SolverClient(Channel(-1, -1))._class([3, "Both", "str", [number, text], []])
    assert both.__mro__[0] is both and issubclass(both, str) and not issubclass(both, int)
    assert type.__repr__(both) == "<class 'program.Both'>"


@pytest.mark.parametrize("number", [True, -1, 1.0, "0", None])
def test_an_object_of_the_tests_is_referred_to_by_its_number_only(number):
    lender = Lender()
    assert [lender[lender.keep(value)] for value in (len, abs, len)] == [len, abs, len]
    with pytest.raises(TypeError, match="must be an integer >= 0"):
        lender[number]


def test_changes_of_small_global_variables_are_noticed():
    assert _content([0] * 100) is not None and _content([0] * 101) is None
    assert _content({"x" * 6000}) is not None and _content({"x" * 6500}) is None


def test_a_frame_of_exactly_the_limit_is_received(monkeypatch) -> None:
    reader, writer = os.pipe()
    channel = Channel(reader, writer)
    monkeypatch.setattr(wire, "FRAME_BYTES", 8)
    channel.send("123456")  # and two quotes
    assert channel.receive() == "123456"
    channel.close()


@pytest.mark.parametrize("answer", [["value", 1], ["value", 1, 5], ["other", 1, ""], {}])
def test_an_answer_has_a_kind_a_value_and_what_was_printed(answer) -> None:
    with pytest.raises(WireError, match="neither a value nor an error"):
        _checked(answer)
