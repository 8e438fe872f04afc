"""The math reward: which answers are right, and which checks are counted."""

import threading
from types import SimpleNamespace

import pytest

from gac.errors import MissingExtra
from gac.rewards import RewardError, build_reward, mathematics
from gac.rewards.answers import read_answer
from tests.rewards.test_rewards import example, score

# A number is never compared with an expression: the reference is one.
EXPRESSION = "2^{3} - 1"
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
    **{
        f"{text} as reference and answer": (text, f"#### {text}")
        for text in (
            *("-3 dollars", "60 km/h", "1/2 cup", "1,000,000 people", "10 m^2", "12 in", "42nd"),
            *("€5", "£3.50", "6.", "about 6", "-.5", "-.25%", "-$5", "$5", "5 million", "5cm"),
            *("2xy", "ln 2", "2 pi", "√2", "no", "1.6e-19"),
        )
    },
    **{
        f"{answer} for {reference}": (reference, answer)
        for reference, answer in (
            ("7/2", "#### 3 1/2"),
            ("3.5", r"\boxed{3 1/2}"),
            ("-3½ cups", "The answer is -3.5."),
            ("1000", r"\boxed{1\,000}"),
            ("10 000", "#### 10000"),
            ("1234567.5", "#### 1\u202f234\u202f567.5"),
            ("(1, 200)", r"\boxed{(1, 200)}"),
            ("-5", "#### minus 5"),
            ("-5", "The answer is negative 5."),
            ("-5", "#### -$5"),
            ("-$5", "#### -5"),
            ("-5", "The answer is -$5"),
            ("-5", "The answer is $-5$"),
            ("-5", "#### –5"),
            ("5000000", "#### 5 million"),
            ("$1.5 billion", "1500000000"),
            ("500000", "#### 5 hundred thousand"),
            ("5 dollars", "#### 5"),
            ("0.00000025", r"\boxed{2.5\times 10^{-7}}"),
            ("1/3000", "#### 0.000333"),
            ("1/6", r"\boxed{0.1\overline{6}}"),
            ("1e6", "#### 1000000"),
            ("3", "So \\boxed{4}.\n\nWait, an error.\n\nThe answer: \\boxed{3}"),
            (r"\{3,4\}", r"$x=\boxed{3}$ or $x=\boxed{4}$"),
        )
    },
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
            "-2": "3–5",
        }.items()
    },
    **{
        f"{answer} for {reference}": (reference, answer)
        for reference, answer in (
            ("2", "#### 3 1/2"),
            ("9", "#### 3²"),  # a question repeated, as is "4*5" for 20
            ("7", r"\boxed{1=2=7}"),
            ("5", "#### 5ab"),
            ("0", r"\boxed{1\,000}"),
            ("5", "#### minus 5"),
            ("5", "The answer is -$5"),
            ("5", "#### not 5"),
            ("5", "#### 5 million"),
            ("2", "#### 2xy"),
            ("2", "#### ln 2"),
            ("no", r"\boxed{on}"),
            (r"1.6\times 10^{-19}", r"\boxed{9.1\times 10^{-31}}"),
            (r"1.6\times 10^{-19}", r"\boxed{0.0000001}"),
            ("0.00000025", "#### -0.0000001"),
            (r"e^{-20}", r"\boxed{0.0000001}"),
        )
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
        ("#### -$1,234.5%\nbye", "-1234.5%"),
        ("#### 5\n#### 6 apples\n####\nbye", "5"),
        ("#### 5\n##### 6", "5"),
        ("#### 5\n####", "5"),
    ],
)
def test_the_answer_follows_the_last_marker(text, answer):
    assert read_answer(text).value == read_answer(answer).value


def test_math_gives_each_row_its_own_verdict_and_counts_failures():
    reward = build_reward("math", on_error="drop")
    verdicts, pairs = ["crash", "right", "bad reference", "timeout", "wrong", "crash"], []
    reward._pool = SimpleNamespace(grade=lambda rows: pairs.extend(rows) or verdicts)
    examples = [example(answer) for answer in (None, "1", *(f"x+{i}" for i in range(2, 8)))]
    scores = reward(["#### 1"] * 2 + [f"#### {i}+x" for i in range(2, 8)], examples)
    assert scores == [None, 1.0, 0.0, 1.0, None, 0.0, 0.0, 0.0]
    assert reward.dropped == 2
    # numbers need no check
    assert pairs == [(f"\\boxed{{x+{i}}}", f"\\boxed{{{i}+x}}") for i in range(2, 8)]
    assert reward.counts() == {"timeouts": 1, "crashes": 2}


def test_math_rewards_with_the_same_settings_share_workers(math_reward, monkeypatch):
    assert build_reward("math")._pool is math_reward._pool
    other = build_reward({"name": "math", "timeout": 2.5, "workers": 3})._pool
    assert (other.timeout, other.workers) == (2.5, 3)
    assert math_reward._pool.timeout == 5.0
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
    completions, same = [HANGS, "7", HOLDS_THE_GIL, "7"], [example(EXPRESSION)] * 4
    assert reward(completions, same) == [0.0, 1.0, 0.0, 1.0]
    assert reward.counts() == {"timeouts": 2, "crashes": 0}
    reward.close()


def test_duplicate_checks_run_once():
    reward = build_reward({"name": "math", "timeout": 0.5, "workers": 1})
    assert reward([HANGS] * 50, [example(EXPRESSION)] * 50) == [0.0] * 50
    assert reward.counts()["timeouts"] == 50  # counts rows, not checks
    reward.close()
