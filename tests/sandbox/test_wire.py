"""The wire format: plain values survive a round trip, and hostile bytes are rejected."""

import collections
import ipaddress
import json
import math
import os
import socket
from array import array as typed_array
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gac.sandbox.judge import judge
from gac.sandbox.peer import Peer
from gac.sandbox.remote import standard
from gac.sandbox.row import JudgeSpec, compile_row
from gac.sandbox.wire import DECODE_ERRORS, decode, encode

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
    | st.sampled_from([range(3), range(9, 0, -2)])
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


def refuse(*_):
    raise TypeError("not plain")


def round_trip(value):
    return decode(json.loads(json.dumps(encode([value], refuse))), refuse)[0]


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
    assert math.isnan(round_trip(math.nan))
    assert math.copysign(1, round_trip(-0.0)) == -1
    assert equal_with_types(round_trip(10**4000), 10**4000)


TYPED = {
    "ordered": collections.OrderedDict(b=1, a=2),
    "counter": collections.Counter("aab"),
    "default": collections.defaultdict(None, a=[1]),
    "slice": slice(1, None, 2),
    "address": ipaddress.IPv4Address("10.0.0.1"),
    "long address": ipaddress.IPv6Address("::1"),
    "numbers": typed_array("i", [3, -4]),
    "no numbers": typed_array("d"),
    "fraction": Fraction(255, 16),
    "large number": 2**70,
}


@pytest.mark.parametrize("name", TYPED)
def test_values_keep_their_type(name):
    value = TYPED[name]
    assert type(round_trip(value)) is type(value)
    assert round_trip(value) == value


def test_views_of_dicts_are_sent():
    value = {"a": 1, "b": 2}
    assert round_trip(value.keys()) == value.keys()
    assert round_trip(value.items()) == value.items()
    assert list(round_trip(value.values())) == [1, 2]


@pytest.mark.parametrize(
    "dtype", ["?", "i1", "u2", ">i4", "i8", "f2", "f4", "f8", "c8", "c16", "U3", "M8[s]"]
)
def test_arrays_keep_dtype_shape_and_data(dtype):
    value = np.array([[0, 1, 2], [3, 4, 5]]).astype(dtype)
    for array in (value, value.T, value[:0], value[0, 1]):
        result = round_trip(array)
        assert type(result) is type(array)
        assert result.dtype == array.dtype
        assert np.array_equal(result, array)
        assert result.shape == array.shape


@pytest.mark.parametrize("dtype", ["O", "V4"])
def test_other_arrays_are_not_sent(dtype):
    with pytest.raises(TypeError):
        round_trip(np.zeros(2, dtype))


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


def test_other_values_are_referred_to():
    for value in (object(), len, lambda: 0, iter([]), os, collections.UserList):
        sent = [value]
        nodes = encode([value, sent, sent], lambda v: ("object", [7]))
        assert nodes == [
            ["list", [[1], [2], [3]]],
            ["object", [7]],
            ["list", [[4]]],
            ["seen", [2]],
            ["object", [7]],
        ]
        first, second, third = decode(nodes, lambda tag, parts: (tag, parts))
        assert first == ("object", [7])
        assert second is third
        assert second == [first]


def test_values_that_contain_themselves_are_sent():
    loop: list = [1]
    loop.append({"loop": loop})
    copied = round_trip(loop)
    assert copied[0] == 1
    assert copied[1]["loop"] is copied


TAGS = (
    "int float dict object tuple set frozenset deque bytes bytearray complex range Decimal "
    "Fraction datetime date time timedelta list OrderedDict Counter defaultdict slice dict_keys "
    "dict_items array ndarray scalar class live error lent seen instance coroutine other"
)
CONTENT = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=8,
)
PART = st.integers(-1, 4).map(lambda i: [i]) | CONTENT
NODE = st.tuples(st.sampled_from(TAGS.split()), st.lists(PART, max_size=4)).map(list)
JSON = st.lists(NODE, min_size=1) | st.lists(NODE | CONTENT) | CONTENT


@given(JSON)
@settings(max_examples=150, deadline=None)
def test_any_json_decodes_or_is_refused(nodes):
    try:
        values = decode(nodes, refuse)
    except DECODE_ERRORS:
        return
    encode(values, refuse)  # plain, so that it can be encoded again


HOSTILE = """
    [["list", [[1]]], ["object", [1]]]
    [["list", [[1]]], ["pickle", ["gASVBgAAAAAAAACMAm9zlC4="]]]
    [["list", [[1]]], ["set", [[2]]], ["list", []]]
    [["list", [[1]]], ["dict", [1]]]
    [["list", [[1]]], ["dict", [[2], 1]], ["list", []]]
    [["list", [[1]]], ["range", [0, 1, 0]]]
    [["list", [[1]]], ["Fraction", [1, 0]]]
    [["list", [[1]]], ["defaultdict", [5]]]
    [["list", [[1]]], ["defaultdict", [[2]]], ["class", ["program:Any"]]]
    [["list", [[1]]], ["ndarray", ["|O", "0000000000000000", 1]]]
    [["list", [[1]]], ["ndarray", ["<f8", "0000000000000000", 2]]]
    [["list", [[1]]], ["ndarray", ["|u1", "0 0", 3]]]
    [["list", [[1]]], ["ndarray", ["<f8", "0000000000000000", -1]]]
    [["list", [[1]]], ["ndarray", ["<f8", "0000000000000000", true]]]
    [["list", [[1]]], ["ndarray", ["<f8", "0000000000000000", 1, -1]]]
    [["list", [[1]]], ["ndarray", ["<f8", "0000000000000000", 1e0]]]
    [["list", [[1]]], ["ndarray", ["<f8,<f8", "00000000000000000000000000000000", 1]]]
    [["list", [[0]]]]
    [["list", [[-1]]], ["list", []]]
    [["list", [[true]]], ["list", []]]
    [["list", [[1]]]]
    [["list", [{}]]]
    [["list", {}]]
    [["list"]]
    [["list", [], 1]]
    [[["list"], []]]
    [["tuple", []]]
    []
    5
    null
    {"a": 1}
    [5]
""".strip()


@pytest.mark.parametrize("message", [json.loads(line) for line in HOSTILE.splitlines()], ids=str)
def test_hostile_values_are_refused(message):
    with pytest.raises(DECODE_ERRORS):
        decode(message, lambda tag, parts: {"class": Fraction}[tag])


# --- frames ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (b"\x00\x00\x00\x09[1", "end of file"),
        ((64 << 20).to_bytes(4, "big"), "^$"),
        (((64 << 20) + 1).to_bytes(4, "big"), "bad message length"),
    ],
    ids=["torn", "long and torn", "too long"],
)
def test_frames_keep_their_boundaries_until_one_is_invalid(written, reason):
    ours, theirs = socket.socketpair()
    sender, peer = Peer(ours.detach()), Peer(theirs.detach())
    for message in (b"call", b"", b"x" * 10_000):
        sender.channel.send_bytes(message)
        assert peer.receive() == message
    os.write(sender.channel.fileno(), written)
    sender.channel.close()
    with pytest.raises((OSError, EOFError), match=reason):
        peer.receive()


def framed(data):
    return len(data).to_bytes(4, "big") + data


def answered(kind, value, *nodes, classes=()):
    return framed(json.dumps([list(classes), [["list", [kind, "", value]], *nodes]]).encode())


CLASS = [0, "function", [], "builtins:object", "", ["__call__"]]
NAMES = answered("value", None)
NAMES += answered("value", [1], ["object", [1, 0]], classes=[CLASS])
SPEC = JudgeSpec(
    ("assert f(2) == 4", "assert list(f(3)) == [9]", "try: f(1)\nexcept Exception: pass"), all=True
)


def judged(spec, answers):
    """What `judge` returns if the solver has written all of its `answers` in advance."""
    solver, channel = socket.socketpair()
    with solver:
        solver.sendall(NAMES + answers)
        solver.shutdown(socket.SHUT_WR)
        return judge(compile_row(spec), channel.detach(), guard=False)


KINDS = st.sampled_from(["value", "raise", "ask", "other"])


HOSTILE_TEXT = [b"[" * 20_000, b"1" * 10_000, b"\xff", b'{"a"', b"", b"[[]]"]


@given(
    st.binary(max_size=60)
    | st.sampled_from(HOSTILE_TEXT).map(framed)
    | CONTENT.map(lambda m: framed(json.dumps(m).encode()))
    | st.tuples(KINDS, st.lists(NODE)).map(lambda m: answered(m[0], [1], *m[1]))
    | st.tuples(CONTENT, JSON).map(lambda m: framed(json.dumps(m).encode()))
)
@settings(max_examples=100, deadline=None)
def test_judge_gives_a_verdict_for_any_solver_output(answer):
    verdict, _ = judged(SPEC, answer)
    assert len(verdict["passed"]) == 3
    assert not all(verdict["passed"])
    json.dumps(verdict)


def test_an_error_that_would_end_a_loop_becomes_another_one():
    """The solver claims that the iteration has ended, which would skip the rest of the test."""
    tests = ("for x in iter(f, None): break", "for i in map(f, [1]): assert 0")
    verdict, ended = judged(
        JudgeSpec(tests, all=True),
        2
        * answered(
            "raise",
            [1],
            ["error", [2, "builtins:StopIteration", "no", None, [2], [3]]],
            ["list", ["no"]],
            ["dict", []],
        ),
    )
    assert verdict["passed"] == [False, False]
    assert "StopIteration: no" in verdict["problem"]
    lost = judged(JudgeSpec(("f\ntry: g\nexcept NameError: import absent",)), b"")
    assert lost[0]["passed"] == [False]
    assert (ended, lost[1]) == (False, True)


@pytest.mark.parametrize("number", [-1, 3, 1.5, "0", None])
def test_an_object_of_the_tests_is_referred_to_by_its_number_only(number):
    lender = Peer(os.open(os.devnull, os.O_RDWR))
    assert [lender.own(lender.number(value)) for value in (len, abs, len)] == [len, abs, len]
    with pytest.raises(KeyError):
        lender.own(number)


def test_only_classes_of_the_standard_library_have_a_name():
    assert standard("builtins:int") is int
    assert not any(
        map(standard, ("builtins:len", "builtins:True", "types:FunctionType", "absent:int"))
    )
