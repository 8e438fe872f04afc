"""The math reward: which answers are right, and which checks are counted."""

import threading
from types import SimpleNamespace

import pytest

from gac.errors import MissingExtra
from gac.rewards import RewardError, build_reward, mathematics
from tests.rewards.test_rewards import example, score

HANGS = r"\boxed{\sum_{n=1}^{100000000} 1/n}"  # Python loops in sympy
HOLDS_THE_GIL = r"\boxed{9^{9^{9}}}"  # a single integer power in C, which holds the GIL

EQUAL = {
    "a number": ("18", "The answer is 18."),
    "a boxed fraction": (r"\frac{1}{2}", r"so \boxed{0.5}"),
    "after ####": ("72", "Altogether 48+24 = <<48+24=72>>72 clips.\n#### 72"),
    "#### beats an earlier 'answered'": ("40", "She answered 200/5 = 40 a day.\n#### 40"),
    "#### before more talk": ("40", "a day.\n#### 40\nSo 5 workers are paid."),
    "a heading is not an answer mark": (
        "5",
        "#### Step 3: add\n$2+3$ gives \\boxed{5}.\n#### Done in 2 steps\nBye",
    ),
    "thousands": ("1,234", "It costs $1234"),
    "a unicode minus": ("-3", "the answer is −3"),
    "an escaped dollar": (r"\$18", "$18"),
    "a percentage": (r"50\%", "0.5"),
    "an interval": ("(1,2)", r"\boxed{(1,2)}"),
    "a polynomial in another order": ("x^2+1", r"\boxed{1+x^2}"),
    "an equation for the reference value": ("5", r"\boxed{x=5}"),
    "reference inside a worked solution": (r"We get $\boxed{\sqrt{2}}$.", r"$\sqrt{2}$"),
    "reference after ####": ("16-3-4=9\n#### 18", "18"),
    "a word": ("Monday", r"\boxed{\text{Monday}}"),
    **{
        f"#### {same}": (same, f"#### {same}")
        for same in (
            "x + 1",
            r"2\sqrt{3}",
            "(1, 2)",
            r"\pi",
            "1, 2, 3",
            "(3,4]",
            "east",
            "A",
            "12:30",
        )
    },
    **{
        f"#### {text}": ("18", f"#### {text}")
        for text in (
            "18.",
            "**18**",
            "18 dollars",
            "$18.",
            "18 m",
            "€18",
            "£18",
            "18°",
            "18 L",
            "Total: 18",
            "18 (eighteen)",
            "**$18**",
        )
    },
    **{
        f"#### {text}": (number, f"#### {text}")
        for number, text in {
            "0.5": "50%",
            "x+1": "**x + 1**.",
            "5": "x = 5",
            "60": "60 km/h",
        }.items()
    },
    "with a power of a unit": ("1200", "#### 1,200 cm^2"),
}
DIFFERENT = {
    "another number": ("18", "The answer is 17."),
    "the right number, then another": ("18", "18, no wait.\n#### 19"),
    "no number": ("18", "I do not know."),
    "nothing": ("18", ""),
    "an anagram": ("east", r"\boxed{seat}"),
    **{
        f"#### {text} is not {number}": (number, f"#### {text}")
        for number, text in {
            "1": "x^2 + 1",
            "2": r"2\pi",
            "3": "1,2,3",
            "4": "x > 4",
            "5": "3:5",
        }.items()
    },
    "an unbalanced box": ("18", r"\boxed{" + "{" * 500),
}


@pytest.fixture(scope="module")
def math_reward():
    reward = build_reward("math")
    yield reward
    reward.close()


@pytest.mark.parametrize("case", EQUAL.values(), ids=EQUAL.keys())
def test_math_accepts(math_reward, case):
    assert score(math_reward, case[1], case[0]) == 1.0


@pytest.mark.parametrize("case", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_math_rejects(math_reward, case):
    assert score(math_reward, case[1], case[0]) == 0.0


def test_math_answer_pattern_disables_other_matching():
    reward = build_reward({"name": "math", "answer_pattern": r"^A: (.+)$"})
    assert reward(["A: 3\nA: 7\n9 more", "7"], [example()] * 2) == [1.0, 0.0]


def test_math_gold_without_mathematics_raises(math_reward):
    with pytest.raises(RewardError, match=r"'row0'.*reference answer '\$ \$'"):
        score(math_reward, "7", "$ $")
    with pytest.raises(RewardError, match="no reference answer; set answer_field"):
        score(math_reward, "7", None)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so #### 7", "7"),
        ("#### 6\n#### x + 1 \n \n", "x + 1"),  # the last line may hold any answer
        ("#### -$1,234.5%\nbye", "-$1,234.5%"),
        ("#### 5\n#### 6 apples\n####\nbye", "5"),
        ("#### 5\n##### 6", "5"),
        ("#### 5\n####", "5"),
        ("7", None),
    ],
)
def test_the_answer_follows_the_last_marker(text, answer):
    assert mathematics.text_after_marker(text) == answer


GOLD = {" −3 ": "-3", "1+1=2\n#### 2": "2", "east": r"\text{east}", "cat": "cat", r"\$5": r"\$5"}


def test_reference_answers_are_boxed_unless_they_are_latex():
    for text, inside in GOLD.items():
        assert mathematics.reference_text(text) == f"\\boxed{{{inside}}}"
    for text in ("so $5$", r"\(5\)", r"\[5\]", r"\boxed{5}"):
        assert mathematics.reference_text(text) == text


def test_math_gives_each_row_its_own_verdict_and_counts_failures():
    reward = build_reward("math", on_error="drop")
    verdicts, pairs = ["crash", "right", "bad reference", "timeout", "wrong", "crash"], []
    reward._pool = SimpleNamespace(grade=lambda rows: pairs.extend(rows) or verdicts)
    examples = [example(answer) for answer in (None, "1", "2", "3", "4", "5", "6")]
    scores = reward([f"#### {i}" for i in range(7)], examples)
    assert scores == [None, 0.0, 1.0, None, 0.0, 0.0, 0.0] and reward.dropped == 2
    assert pairs == [(f"\\boxed{{{i}}}", f"{i}") for i in range(1, 7)]
    assert reward.counts() == {"timeouts": 1, "crashes": 2}


def test_math_rewards_with_the_same_settings_share_workers(math_reward, monkeypatch):
    assert build_reward("math")._pool is math_reward._pool
    other = build_reward({"name": "math", "timeout": 2.5, "workers": 3})._pool
    assert (other.timeout, other.workers) == (2.5, 3) and math_reward._pool.timeout == 5.0
    monkeypatch.setattr(mathematics, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'gac-kernels\[train\]'"):
        build_reward("math")


def test_math_works_in_concurrent_threads(math_reward):
    results = {}

    def work(i):
        results[i] = math_reward([f"#### {j}" for j in range(20)], [example(str(i))] * 20)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == {i: [float(j == i) for j in range(20)] for i in range(4)}


def test_hanging_checks_are_cut_off_counted_and_score_zero():
    reward = build_reward({"name": "math", "timeout": 0.5, "workers": 1})
    assert reward([HANGS, "7", HOLDS_THE_GIL, "7"], [example()] * 4) == [0.0, 1.0, 0.0, 1.0]
    assert reward.counts() == {"timeouts": 2, "crashes": 0}
    reward.close()


def test_duplicate_checks_run_once():
    reward = build_reward({"name": "math", "timeout": 0.5, "workers": 1})
    assert reward([HANGS] * 50, [example()] * 50) == [0.0] * 50
    assert reward.counts()["timeouts"] == 50  # counts rows, not checks
    reward.close()
