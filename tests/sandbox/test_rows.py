"""Whole rows: correct programs pass, and no fake does, with and without the row's own answer."""

import sys

import pytest

from gac.data import Example
from gac.rewards import build_reward

from . import (
    fakes_rows,
    fakes_rows_last,
    fakes_rows_more,
    honest_rows,
    honest_rows_last,
    honest_rows_more,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

PROGRAMS = honest_rows.PROGRAMS + honest_rows_more.PROGRAMS + honest_rows_last.PROGRAMS
ROWS = fakes_rows.ROWS + fakes_rows_more.ROWS + fakes_rows_last.ROWS
# without the row's own answer, only constructors give objects the right to operators
NEED_AN_ANSWER = {"a matrix class with factories"}


def blocks(text, mark):
    """(title, body) of each block of a data file."""
    return [entry.split("\n", 1) for entry in f"\n{text}".split(f"\n{mark} ")[1:]]


def row_of(text):
    setup, found, tests = text.rpartition("++++\n")
    return {"tests": tests.strip().split("\n\n"), **({"setup": setup} if found else {})}


@pytest.fixture(scope="module")
def grade():
    reward = build_reward(
        {
            "name": "code",
            "timeout": 5,
            "memory_mb": 256,
            "preload": ["numpy", "pytest"],
            "on_error": "drop",
            "workers": 2,
        }
    )
    yield lambda cases: reward(
        [program for program, _, _ in cases],
        [Example("row", (), "", answer, None, row) for _, row, answer in cases],
    )
    reward.close()


@pytest.mark.parametrize("with_answer", [False, True])
def test_correct_programs_pass(grade, with_answer):
    entries = [(title, *body.split("\n----\n")) for title, body in blocks(PROGRAMS, "===")]
    cases = [
        (program, row_of(rest), program if with_answer else None) for _, program, rest in entries
    ]
    titles = [title for title, _, _ in entries]
    assert len(titles) >= 60
    assert {t for t, score in zip(titles, grade(cases), strict=True) if score != 1.0} == (
        set() if with_answer else NEED_AN_ANSWER
    )


@pytest.mark.parametrize("with_answer", [False, True])
def test_no_fake_passes(grade, with_answer):
    cases, titles = [], []
    for title, body in blocks(ROWS, "==="):
        tests, rest = body.split("\n---- ", 1)
        programs = blocks(f"---- {rest}", "----")
        for name, program in programs:
            cases.append((program, row_of(tests), (programs[0][1] if with_answer else None)))
            titles.append((title, name))
    wrong = {
        k: score
        for k, score in dict(zip(titles, grade(cases), strict=True)).items()
        if score != float(k[1] == "good")
    }
    assert wrong == {}
    assert sum(name != "good" for _, name in titles) >= 90
