"""Unusual but correct programs pass: modeled on completions for MBPP, HumanEval and APPS."""

import sys

import pytest

from gac.data import Example
from gac.rewards import build_reward
from tests.sandbox import (
    honest_classes,
    honest_functions,
    honest_scripts,
    honest_tests,
    honest_types,
    honest_values,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


def functions():
    """(title, completion, tests) of the programs with tests."""
    for module in (honest_types, honest_classes, honest_functions, honest_values, honest_tests):
        for entry in module.PROGRAMS.split("\n=== ")[1:]:
            title, body = entry.split("\n", 1)
            program, tests = body.split("\n----\n")
            yield title, f"```python\n{program}\n```", tests.strip().split("\n\n")


def cases():
    """Title -> (completion, row)."""
    rows = {title: (text, {"tests": tests}) for title, text, tests in functions()}
    rows |= {f"script: {t}": (s, {"cases": [honest_scripts.SUM]}) for t, s in SCRIPTS.items()}
    rows |= {f"completion: {t}": (s, {"tests": ADD}) for t, s in COMPLETIONS.items()}
    return rows


SCRIPTS, COMPLETIONS = honest_scripts.SCRIPTS, honest_scripts.COMPLETIONS
ADD = ["assert add(2, 3) == 5", "assert add(-1, 1) == 0"]


def test_unusual_programs_pass():
    rows = cases()
    assert len(rows) >= 150
    reward = build_reward({"name": "code", "timeout": 10, "workers": 4})
    examples = [Example(t, (), "", None, None, row) for t, (_, row) in rows.items()]
    completions = [completion for completion, _ in rows.values()]
    scores = reward(completions, examples)
    failing = [case for case in zip(completions, examples, scores, strict=True) if case[2] != 1.0]
    assert {example.id: reward.explain(text, example) for text, example, _ in failing} == {}
