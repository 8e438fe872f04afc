"""No attack on the judge, on numpy or on the wire passes, and none is blamed on the row."""

import sys

import pytest

from gac.data import Example
from gac.rewards import build_reward
from tests.sandbox import attacks_lent, attacks_objects, attacks_row, attacks_wire
from tests.sandbox.fakes import TESTS, raw_message

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

GOOD = "def add(a, b): return a + b"
NUMBER_TESTS = [
    *TESTS,
    "assert [10, 11, 12, 13, 14, 15][add(2, 3)] == 15",
    "assert list(range(add(1, 1))) == [0, 1]",
    "assert '%d' % add(1, 2) == '3'",
    "import json\nassert json.dumps({'a': add(1, 1)}) == '{\"a\": 2}'",
    "assert sorted([add(1, 1), add(0, 1)]) == [1, 2]",
    "assert {5: 'x'}[add(2, 3)] == 'x' and add(2, 3) in {5}",
    "assert isinstance(add(1, 1), int) and type(add(1, 1)) is int",
    "import math\nassert math.sqrt(add(2, 2)) == 2",
    "assert f'{add(1, 2):03d}' == '003'",
    "import copy\nassert copy.deepcopy(add(1, 2)) == 3",
    "import pickle\nassert pickle.loads(pickle.dumps(add(1, 2))) == 3",
    "import pathlib\ntry: pathlib.Path(add(1, 1))\nexcept TypeError: pass\nelse: assert False",
    "assert bytes(add(1, 1)) == b'\\0\\0' and int(add(1, 1)) == 2 and float(add(1, 1)) == 2.0",
]
ARRAY_TESTS = [
    "import numpy as np\nassert np.allclose(add(np.array([1.0]), 2), [3.0])",
    "assert np.array_equal(np.asarray(add(np.array([3]), 1)), np.array([4]))",
    "assert np.sum(add(np.arange(3), 1)) == 6 and add(np.arange(3), 1).shape == (3,)",
    "assert (add(np.array([1, 2]), 1) == np.array([2, 3])).all()",
    "np.testing.assert_array_equal(np.array(add(np.ones(2), 1)), [2, 2])",
    "assert float(np.mean(add(np.ones(2), 1))) == 2.0 and np.isclose(add(1, 2), 3)",
    "assert np.frombuffer(add(np.zeros(1), 0), dtype='f8')[0] == 0.0",
    "assert np.zeros(4)[add(np.array([1]), 1)].tolist() == [0.0]",
]


@pytest.fixture(scope="module")
def reward():
    reward = build_reward(
        {
            "name": "code",
            "timeout": 1,
            "partial": True,
            "preload": ["numpy"],
            "memory_mb": 256,
            "workers": 4,
        }
    )
    yield reward
    reward.close()


def scores(reward, row, programs):
    """Scores of `programs`, also without the row's answer; a blamed row would raise."""
    answer = row.get("answer", GOOD)
    extra = {name: value for name, value in row.items() if name != "answer"}
    known = (answer, None) if "setup" in row else (answer,)
    examples = [Example("row", (), "", text, None, extra) for text in known]
    assert reward([answer], examples[:1]) == [1.0]  # the row is good
    titles = [title for title in programs for _ in examples]
    return list(
        zip(
            titles,
            reward([programs[title] for title in titles], examples * len(programs)),
            strict=True,
        )
    )


ATTACKS = {
    "objects": ({"tests": NUMBER_TESTS}, attacks_objects.OBJECTS),
    "objects in arrays": ({"tests": ARRAY_TESTS}, attacks_objects.OBJECTS),
    "arrays": ({"tests": ARRAY_TESTS}, attacks_objects.ARRAYS_PROGRAMS),
    "messages": ({"tests": TESTS}, {m: raw_message(m) for m in attacks_wire.MESSAGES}),
    "objects of the tests": (attacks_lent.ROW, attacks_lent.LENT),
    "row": (attacks_row.ROW, attacks_row.BLAME),
}


def test_there_are_enough_attacks():
    programs = {program for _, attacks in ATTACKS.values() for program in attacks.values()}
    assert len(programs) + sum(map(len, attacks_row.INTERPRETED.values())) >= 200


@pytest.mark.parametrize("kind", ATTACKS)
def test_no_attack_passes_and_no_row_is_blamed(reward, kind):
    row, programs = ATTACKS[kind]
    assert not [title for title, score in scores(reward, row, programs) if score == 1.0]
    assert reward([GOOD], [Example("row", (), "", None, None, {"tests": TESTS})]) == [1.0]


@pytest.mark.parametrize("attacks", [attacks_row.INTERPRETED, attacks_objects.OPERATORS])
def test_programs_neither_run_in_the_judge_nor_decide_what_is_right(reward, attacks):
    pairs = [
        (program, Example("row", (), "", None, None, {"tests": [test]}))
        for test, programs in attacks.items()
        for program in programs
    ]
    assert not any(reward([program for program, _ in pairs], [example for _, example in pairs]))
