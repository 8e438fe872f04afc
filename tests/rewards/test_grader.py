"""The math reward checked against the dataset's labels, on real model answers and reference
solutions.

The dataset has 4,220 solutions to GSM8K test problems by four models, labeled correct or incorrect.
The reward agrees with every label (4,220 of 4,220, math-verify 0.9), so there are no disagreements
to list. Nine of these solutions have no answer line (most are truncated); all nine are correctly
rejected. All 7,033 GSM8K reference solutions are accepted for their own answer, and none for that
answer plus one. (Without the rule for `####`, eleven of the first 3,000 are refused: math-verify
then prefers earlier phrases such as "answered 200", or percentages.)
"""

import re

import pytest

from gac.data import Example, read_rows
from gac.rewards import build_reward

WHOLE = "grades a whole data set"
every = pytest.mark.parametrize(
    "every",
    [
        19,  # the rows are those of four models in turn
        pytest.param(1, marks=[pytest.mark.slow(reason=WHOLE), pytest.mark.full(reason=WHOLE)]),
    ],
)


def load(path, every):
    rows = [row.fields for row in read_rows(str(path))][::every]
    return rows, [Example(row["id"], (1,), row["prompt"], row["answer"], None, {}) for row in rows]


@pytest.fixture
def reward():
    reward = build_reward("math")
    yield reward
    reward.close()


@every
def test_agreement_with_labelled_model_solutions(data_dir, reward, every):
    rows, examples = load(data_dir / "gsm8k_model_solutions.jsonl.gz", every)
    scores = reward([row["solution"] for row in rows], examples)
    wrong = [r["id"] for r, s in zip(rows, scores, strict=True) if s != float(r["correct"])]
    assert len(rows) == -(-4220 // every)
    assert sum(scores) > 1200 // every
    assert 1 - len(wrong) / len(rows) >= 0.995, f"{len(wrong)} disagreements: {wrong}"
    assert reward.counts() == {"timeouts": 0, "crashes": 0}


@every
def test_agreement_without_the_answer_line(data_dir, reward, every):
    """The solutions end with "A: 18", which is removed: the last sentence has to give the answer.

    Of all 4,220, 23 disagree: 17 whose last sentence gives another number, several or none, and 6
    whose calculation is right and whose answer line is not.
    """
    rows, examples = load(data_dir / "gsm8k_model_solutions.jsonl.gz", every)
    texts = [re.sub(r"\nA: .*\Z", "", row["solution"].strip()) for row in rows]
    scores = reward(texts, examples)
    right = sum(s == float(r["correct"]) for r, s in zip(rows, scores, strict=True))
    assert right / len(rows) >= 0.99


@every
@pytest.mark.parametrize("name", ["gsm8k_train", "gsm8k_test"])
def test_reference_solutions_match_only_their_own_answer(data_dir, reward, name, every):
    rows, examples = load(data_dir / f"{name}.jsonl.gz", every)
    solutions = [row["solution"] for row in rows]
    scores = reward(solutions, examples)
    assert [r["id"] for r, s in zip(rows, scores, strict=True) if s != 1] == []
    others = [
        Example(e.id, e.prompt, e.prompt_text, str(float(e.answer.replace(",", "")) + 1), None, {})
        for e in examples
    ]
    scores = reward(solutions, others)
    assert [r["id"] for r, s in zip(rows, scores, strict=True) if s != 0] == []
