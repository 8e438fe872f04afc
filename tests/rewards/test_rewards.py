"""Rewards: which completions score, which do not, and which raise an error."""

import itertools
import logging
import math
import signal
import sys
import threading
import time

import numpy
import pytest

from gac.data import Example, read_rows
from gac.errors import RunError
from gac.rewards import RewardError, RowReward, build, build_reward
from gac.rewards.answers import read_answer
from gac.rewards.base import DeadlineExceeded, time_limits
from gac.rewards.code import program_of
from gac.rewards.combine import BatchCallableReward, SumReward
from gac.rewards.text import chosen_letter


def example(answer="7", i=0, **extra):
    return Example(f"row{i}", (1,), "prompt", answer, None, extra)


def score(reward, completion, answer="7", **extra):
    return reward([completion], [example(answer, **extra)])[0]


# Rewards that the tests below refer to as "tests.rewards.test_rewards:...".


def length(completion, example, scale=1.0):
    if completion == "boom":
        raise KeyError("no such key")
    return len(completion) * scale


def odd_values(completion, example):
    return {"nan": math.nan, "inf": -math.inf, "text": "1", "numpy": numpy.float32(2)}.get(
        completion
    )


def batch_length(completions, examples, scale: float = 1.0):
    return [length(completion, None, scale) for completion in completions]


def short_batch(completions, examples):
    return [0.0]


class Doubled(RowReward):
    def __init__(self, *, factor: float = 2.0):
        self.factor = factor

    def score(self, completion, example):
        return self.factor * len(completion)


# --- exact, choice, format ------------------------------------------------------------------------


def test_exact_ignores_only_whitespace_by_default():
    reward = build_reward("exact")
    assert reward([" the  end\n", "The end"], [example("the end")] * 2) == [1.0, 0.0]
    assert score(build_reward({"name": "exact", "ignore_case": True}), "WEISS", "weiß") == 1.0
    with pytest.raises(RewardError, match="no reference answer"):
        score(reward, "x", None)


def test_exact_with_an_answer_pattern():
    reward = build_reward({"name": "exact", "answer_pattern": r"answer is (.+?)\.?$"})
    completions = "So the answer is (B).", "the answer is 7\nthe answer is 8.", "8"
    assert reward(completions, [*map(example, ("(B)", "8", "8"))]) == [1.0, 1.0, 0.0]


LETTERS = {
    "the phrase": ("I think (A) or (B). The answer is (C).", "C"),
    "the phrase without brackets": ("Answer: D", "D"),
    "bold": ("**Answer:** **B**", "B"),
    "the last phrase counts": ("The answer is (A). No, the answer is (B).", "B"),
    "boxed": (r"the answer is A? no: \boxed{\text{E}}", "E"),
    "a lone letter": (" c) ", None),
    "a lone capital": ("C.", "C"),
    "the last bracketed letter": ("not (A), not (B) but (D), I am sure", "D"),
    "at the end": ("therefore B.", "B"),
    "an article is not a choice": ("the answer is a lamp", None),
    "a pronoun is not a choice": ("Answer: I think it is (B)", "B"),
    "a word is not a choice": ("Answer: Because", None),
    "a possessive is not a choice": ("Answer: A's are fine. Answer: B’s too", None),
    "an item of a list is not a choice": ("as in (b), for example", None),
    "a small letter in brackets": ("The answer is: (d), not E.", "D"),
    "the word option": ("My choice: option C, not D.", "C"),
    "a choice in dollars": ("so option is $B$, not (D)", "B"),
    "boxed in bold": (r"\boxed{ \textbf{ (d)}} The answer is (A)", "D"),
    "boxed in roman": (r"\boxed{\mathrm{B}} or (C)", "B"),
    "nothing": ("", None),
    "the word must": ("Options (A) and (C) are wrong, so the answer must be B", "B"),
    "must, then another": ("The answer must be B. (A) is wrong.", "B"),
    "boxed in bold font": (r"\boxed{\bf C}", "C"),
    "boxed in bold letters": (r"\boxed{\mathbf{C}}", "C"),
    "a formula is no choice": (r"\boxed{\frac{A}{B}}", None),
    "in parentheses of LaTeX": (r"Answer: \(C\)", "C"),
    "in quotes": ("The answer is 'C'", "C"),
    "in tags": ("<answer>C</answer>", "C"),
    "before the phrase": ("C is the correct answer. (A) is not.", "C"),
    "with its text": ("D) 12", "D"),
    "a boxed formula and an answer": (r"\boxed{E = mc^2}. Answer: D", "D"),
    "a boxed number and an answer": (r"We get \boxed{12}, so the answer is (B).", "B"),
    "square brackets": ("Answer: [A]", "A"),
    "square brackets alone": ("[B]", "B"),
    "in text of LaTeX": (r"\text{A}", "A"),
    "in text of LaTeX with dollars": (r"The answer is $\text{(A)}$.", "A"),
    "boxed with its text": (r"\boxed{\text{B. 12}}", "B"),
    "in Chinese": ("答案：C", "C"),
    "in backticks": ("`A`", "A"),
    "a sentence": ("I think the answer is B because A is too small.", "B"),
    "a correction": ("The answer is A. Wait, the answer is B.", "B"),
    "both": ("Both A and C", None),
    "both are correct": ("Both (A) and (C) are correct.", None),
    "two": ("A or B", None),
    "two after the phrase": ("The answer is (A) or (B).", None),
    "two with a comma": ("Answer: A, C", None),
    "two with a semicolon": ("Answer: A; C", None),
    "two with a slash": ("A/C", None),
    "two without anything": ("Answer: A B", None),
    "two in a box": (r"\boxed{A, C}", None),
    "two in a box in words": (r"\boxed{A \text{ and } C}", None),
    "a box that is wrong": (r"\boxed{B} is wrong", None),
    "not a box": (r"The answer is not $\boxed{B}$", None),
    "a box, then words": (r"So \boxed{B} is the answer, not (A).", "B"),
    "all of them": ("The answer could be A, B, C, or D.", None),
    "one in a line each": ("A\nB\nC\nD", None),
    "neither": ("Neither A nor B", None),
    "not": ("The answer is not A.", None),
    "one that is wrong": ("(A) is wrong.", None),
    "one with another that is wrong": ("The answer is (B), not (A).", "B"),
    "a variable": ("Answer: A = 5", None),
    "a sum in a box": (r"\boxed{A + B}", None),
}


@pytest.mark.parametrize("case", LETTERS.values(), ids=LETTERS.keys())
def test_chosen_letter(case):
    assert chosen_letter(case[0]) == case[1]


def test_choice_compares_letters_and_checks_the_gold_one():
    reward = build_reward("choice")
    assert score(reward, "The answer is (B).", "(B)", choices=["x", "y"]) == 1.0
    assert score(reward, "The answer is (B).", "A") == 0.0
    with pytest.raises(RewardError, match="'8' is not a letter"):
        score(reward, "(B)", "8")
    with pytest.raises(RewardError, match="the answer C is not one of the 2 choices"):
        score(reward, "(B)", "C", choices=["x", "y"])
    other = build_reward({"name": "choice", "choices_field": "options"})
    assert score(other, "Answer: (b).", " (b). ", choices=["x"], options=["x", "y"]) == 1.0
    with pytest.raises(RewardError, match="the answer B is not one of the 1 choices"):
        score(other, "(B)", "B", choices=["x", "y"], options=["x"])


def test_choice_agrees_with_worked_answers_whose_final_letter_is_right(data_dir):
    rows = [row.fields for row in read_rows(str(data_dir / "traces_mmlu_pro_cot.jsonl.gz"))]
    reward = build_reward("choice")
    assert [score(reward, row["solution"], row["answer"]) for row in rows] == [1.0] * 480
    other = [chr(ord("A") + (ord(row["answer"]) - ord("A") + 1) % 10) for row in rows]
    assert not any(score(reward, row["solution"], o) for row, o in zip(rows, other, strict=True))


def test_format_matches_the_whole_completion_or_a_part():
    strict = build_reward({"name": "format", "pattern": r"<think>.*</think>.+"})
    texts = "<think>a\nb</think> 7\n", "so <think>a</think> 7"
    assert strict(texts, [example(None)] * 2) == [1.0, 0.0]
    part = build_reward({"name": "format", "pattern": r"\d", "full": "no"})
    assert [score(part, text) for text in ("a7b", "ab")] == [1.0, 0.0]


# --- sums and callables ---------------------------------------------------------------------------


def test_sum_adds_weighted_terms():
    reward = build_reward(
        {
            "sum": [
                {"reward": "math", "weight": 0.9},
                {"reward": {"name": "format", "pattern": ".*!"}, "weight": -0.5},
                {"reward": {"name": f"{__name__}:length", "scale": 10}, "weight": 0.01},
                {"reward": {"sum": [{"reward": "exact"}]}},
                {"reward": {"name": "format", "pattern": "8"}, "weight": 0},
            ]
        }
    )
    graded = reward.grade(["7", "It is 7!", "8"], [example()] * 3)
    assert graded.rewards == pytest.approx([0.9 + 0.1 + 1.0, 0.9 - 0.5 + 0.8, 0.1])
    assert reward(["7", "It is 7!", "8"], [example()] * 3) == graded.rewards
    assert list(graded.terms.items()) == [
        ("math", [1, 1, 0]),
        ("format-1", [0, 1, 0]),
        (f"{__name__}:length", [10, 80, 10]),
        ("sum", [1, 0, 0]),
        ("format-2", [0, 0, 1]),
    ]
    assert reward.counts() == {"timeouts": 0, "crashes": 0}
    reward.close()
    assert build_reward("math")._pool._owner is None  # its workers have ended


def test_rewards_inside_others_are_told_and_counted():
    first, second = build_reward("exact"), build_reward("exact")
    calls = []
    first.set_step, first.close = calls.append, lambda: calls.append("first")
    second.set_step, second.close = calls.append, lambda: calls.append("second")
    first.counts, second.counts = lambda: {"a": 1, "b": 2}, lambda: {"b": 10, "c": 20}
    inner = SumReward([(first, 1.0), (second, -1.0)])
    inner.set_step(7)
    inner.close()
    assert calls == [7, 7, "first", "second"]
    assert inner.counts() == {"a": 1, "b": 12, "c": 20}


def test_row_batch_and_class_callables():
    assert score(build_reward({"name": f"{__name__}:length", "batch": "off"}), "abc") == 3.0
    batch = build_reward({"name": f"{__name__}:batch_length", "batch": True, "scale": 3})
    assert batch(["a", "bb"], [example()] * 2) == [3.0, 6.0]
    assert batch([], []) == []
    assert score(build_reward({"name": f"{__name__}:Doubled", "factor": 3}), "ab") == 6.0


def test_other_numeric_types_become_floats():
    value = score(build_reward(f"{__name__}:odd_values"), "numpy")
    assert value == 2.0
    assert type(value) is float


# --- rows that cannot be scored -------------------------------------------------------------------

UNSCORABLE = {
    "raises": (f"{__name__}:length", "boom", "KeyError: 'no such key'"),
    "raises in a thread": (
        {"name": f"{__name__}:length", "concurrency": 2},
        "boom",
        "KeyError: 'no such key'",
    ),
    "raises in a batch": (
        {"name": f"{__name__}:batch_length", "batch": True},
        "boom",
        "KeyError: 'no such key'",
    ),
    "nan": (f"{__name__}:odd_values", "nan", "expected a finite number, got nan"),
    "infinite": (
        f"{__name__}:odd_values",
        "inf",
        "expected a finite number, got -inf",
    ),
    "no number": (
        f"{__name__}:odd_values",
        "none",
        "expected a number, got NoneType None",
    ),
    "text": (f"{__name__}:odd_values", "text", "expected a number, got str '1'"),
    "a class that is not a reward": ("fractions:Fraction", "boom", "TypeError: both arguments"),
    "in a sum": (
        {"sum": [{"reward": {"sum": [{"reward": f"{__name__}:odd_values"}]}}]},
        "nan",
        f"term 'sum': term '{__name__}:odd_values': ValueError: expected a finite number, got nan",
    ),
}


@pytest.mark.parametrize("case", UNSCORABLE.values(), ids=UNSCORABLE.keys())
def test_unscorable_row_raises_with_its_id_and_completion(case):
    spec, completion, message = case
    with pytest.raises(
        RewardError, match=f"'row5': .*{message}.*; completion: '{completion}'"
    ) as e:
        build_reward(spec)([completion], [example(i=5)])
    assert (e.value.example_id, e.value.completion) == ("row5", completion)
    assert str(e.value).startswith(f"reward {e.value.reward!r} on row 'row5': ")
    # the prompt only if the reward ran out of time
    assert isinstance(e.value.__cause__, Exception)
    assert "prompt" not in str(e.value)


@pytest.mark.parametrize(
    "spec",
    [
        f"{__name__}:length",
        {"name": f"{__name__}:batch_length", "batch": True},
        {"name": f"{__name__}:length", "concurrency": 2},
    ],
    ids=["row by row", "batch", "concurrent"],
)
def test_on_error_drop_skips_and_counts_only_that_row(spec, caplog):
    reward = build_reward(spec, on_error="drop")
    rows = [example(i=i) for i in range(4)]
    with caplog.at_level(logging.WARNING, logger="gac.rewards.base"):
        assert reward(["a", "boom", "ccc", "boom"], rows) == [1.0, None, 3.0, None]
    assert reward.dropped == 2
    [record] = caplog.records  # the first is logged, the rest are only counted
    assert "row1" in record.message
    assert build_reward({"sum": [{"reward": spec}], "on_error": "drop"})(
        ["boom", "a"], rows[:2]
    ) == [None, 1.0]


@pytest.mark.parametrize(
    ("error", "sizes"), [(DeadlineExceeded, [3]), (TimeoutError, [3, 1, 1, 1])]
)
def test_a_batch_that_fails_is_retried_row_by_row_unless_it_was_late(error, sizes):
    calls = []

    def failing(completions, examples):
        yield calls.append(len(completions))
        raise error

    reward = BatchCallableReward("failing", failing, {})
    reward.on_error = "drop"
    assert reward(["a", "b", "c"], [example()] * 3) == [None] * 3
    assert calls == sizes


def test_numbers_of_rows_must_agree():
    reward = build_reward({"name": f"{__name__}:short_batch", "batch": True}, on_error="drop")
    with pytest.raises(RunError, match="returned 1 scores for 3 completions"):
        reward(["a", "b", "c"], [example()] * 3)
    with pytest.raises(ValueError, match="completions has 2 rows, examples has 1"):
        build_reward("exact")(["a", "b"], [example()])


# --- configurations -------------------------------------------------------------------------------

BAD_SPECS = {
    "an unknown name": ("maths", "unknown reward 'maths'; did you mean 'math'? Known: math,"),
    "a name unlike any known name": ("qqq", "unknown reward 'qqq'. Known: math,"),
    "an unknown option": ({"name": "math", "time": 1}, "no option 'time'; did you mean 'timeout'?"),
    "an option unlike any known option": (
        {"name": "math", "qqq": 1},
        "has no option 'qqq'. Known: ",
    ),
    "a missing option": ("format", "reward 'format': missing a required argument: 'pattern'"),
    "no name": ({"weight": 1}, "must be a name, or a mapping"),
    "neither a name nor a mapping": (3, "must be a name, or a mapping"),
    "a number as a name": ({"name": 3}, "unknown reward 3. Known: math,"),
    "a name and a sum": ({"name": "math", "sum": []}, "must be a name, or a mapping"),
    "an option of a sum": ({"sum": [], "scale": 2}, "'sum' takes no other options, got scale"),
    "an unknown option of a class": (
        {"name": f"{__name__}:Doubled", "fctor": 2},
        "no option 'fctor'; did you mean 'factor'?",
    ),
    "a weight of text": (
        {"sum": [{"reward": "exact", "weight": "1"}]},
        "weight='1': use a finite number in each term of the sum",
    ),
    "an infinite weight": ({"sum": [{"reward": "exact", "weight": math.inf}]}, "weight=inf: use a"),
    "no row at once": (
        {"name": f"{__name__}:length", "concurrency": 0},
        "concurrency must be a whole number >= 1, got 0",
    ),
    "one and a half rows": (
        {"name": f"{__name__}:length", "concurrency": 1.5},
        "concurrency must be a whole number >= 1, got 1.5",
    ),
    "rows at once without a number": (
        {"name": f"{__name__}:length", "concurrency": True},
        "concurrency must be a whole number >= 1, got True",
    ),
    "fewer than no retries": (
        {"name": f"{__name__}:length", "retries": -1},
        "retries must be a whole number >= 0, got -1",
    ),
    "an option of text": (
        {"name": "code", "partial": "maybe"},
        "reward 'code': partial: expected true or false, got 'maybe'",
    ),
    "case of a number": ({"name": "exact", "ignore_case": 0}, "ignore_case: expected true or"),
    "a field of a list": ({"name": "code", "tests_field": ["x"]}, "tests_field: expected text, go"),
    "a field of a number": (
        {"name": "choice", "choices_field": 1.5},
        "reward 'choice': choices_field: expected text (put it in quotes), got 1.5",
    ),
    "a batch of a number": ({"name": f"{__name__}:length", "batch": 3}, "batch: expected true or"),
    "a factor of text": ({"name": f"{__name__}:Doubled", "factor": "x"}, "factor: expected a numb"),
    "a scale of text": ({"name": f"{__name__}:batch_length", "scale": "x"}, "scale: expected a nu"),
    "a key of a number": ({"name": "exact", 1: 2}, "no option 1. Known: "),
    "a key of a number in a sum": ({"sum": [], 1: 2}, "'sum' takes no other options, got 1"),
    "a list of names": ({"name": ["math"]}, "unknown reward ['math']; did you mean 'math'?"),
    "a mapping as a name": ({"name": {"a": 1}}, "unknown reward {'a': 1}. Known: math,"),
    "a sum of nothing": (
        {"sum": None},
        "sum must be a list of terms {reward: ..., weight: ...}, g",
    ),
    "a sum of a number": (
        {"sum": 3},
        "sum must be a list of terms {reward: ..., weight: ...}, got",
    ),
    "an empty sum": ({"sum": []}, "sum needs at least one term"),
    "a bare term": ({"sum": ["math"]}, "term of a sum must be"),
    "a term without a reward": ({"sum": [{"weight": 1}]}, "term of a sum must be"),
    "a misspelt term": ({"sum": [{"reward": "math", "wieght": 1}]}, "term of a sum must be"),
    "an inner on_error": (
        {"sum": [{"reward": {"name": "math", "on_error": "drop"}}]},
        "set on_error next to `sum`",
    ),
    "an unknown on_error": ({"name": "math", "on_error": "skip"}, "on_error must be one of"),
    "a missing module": ("no_such_pkg.x:f", "no module 'no_such_pkg'"),
    "a missing name": (f"{__name__}:nothing", "test_rewards has no 'nothing'"),
    "not callable": (f"{__name__}:LETTERS", "LETTERS is not callable"),
    "a broken pattern": ({"name": "format", "pattern": "("}, "not a valid regular expression"),
    "a pattern without group": ({"name": "math", "answer_pattern": "x"}, "exactly one group"),
    "two groups": ({"name": "exact", "answer_pattern": "(a)(b)"}, "exactly one group"),
    "a broken answer pattern": ({"name": "exact", "answer_pattern": "("}, "answer_pattern '(' is"),
}


@pytest.mark.parametrize("case", BAD_SPECS.values(), ids=BAD_SPECS.keys())
def test_bad_configurations_are_refused(case):
    spec, message = case
    with pytest.raises(ValueError) as error:
        build_reward(spec)
    assert message in str(error.value)


@pytest.mark.parametrize("deadline", [0, -1.0, math.inf, "5"])
def test_deadlines_are_positive_numbers(deadline):
    with pytest.raises(ValueError, match=f"deadline={deadline!r}: use .* seconds > 0, or null"):
        build_reward({"name": "exact", "deadline": deadline})
    assert build_reward({"name": "exact", "deadline": None}).deadline is None


def test_each_call_of_a_function_has_the_whole_deadline(monkeypatch):
    timers = []
    monkeypatch.setattr(signal, "setitimer", lambda timer, seconds: timers.append(seconds))
    batch = {"name": f"{__name__}:batch_length", "batch": True}
    row = {"reward": f"{__name__}:length"}
    for spec in (
        batch | {"deadline": 7},
        {"sum": [{"reward": batch}, row], "deadline": 2.5},
        batch,
    ):
        build_reward(spec)(["a", "b"], [example()] * 2)
    assert timers == [7, 0] + [2.5, 0] * 3 + [600, 0]


LENGTH = 40_000
PIECES = [*" \t\n`~*-#$1A\u2028", "1.\t", "#### ", "```\n", "- ~~~\n", "``` `\n", "answer "]
PIECES += [
    "a-",
    "a'",
    "1+",
    " or ",
    "not ",
    "answer is ",
    "answer:*",
    "option ",
    "\\boxed{",
    "(A) ",
    "1,",
    "{",
    "\\frac{1",
    "½\x85",
]
STARTS = [
    "",
    "```",
    "\t" * (LENGTH // 2) + "```\n",
    "- ~~~",
    "answer is",
    "\\boxed{",
    "A",
    "#### 1",
    "1 + 2",
]


@pytest.mark.parametrize("read", [program_of, chosen_letter, read_answer])
def test_reading_a_completion_takes_linear_time(read):
    for start, piece in itertools.product(STARTS, PIECES):
        # with the backtick, a fence or a letter before it does not match: every split is tried
        text = f"{start}{piece * ((LENGTH - len(start)) // len(piece))}`"
        # a slow moment of the machine does not come three times
        assert any(cpu_seconds(read, text) < 0.3 for _ in range(3)), (start[:9], piece)


def cpu_seconds(function, *arguments):
    began = time.process_time()
    function(*arguments)
    return time.process_time() - began


@pytest.mark.parametrize("name", ["exact", "math"])
def test_a_pattern_of_the_user_has_a_deadline(name):
    reward = build_reward({"name": name, "answer_pattern": "((?:a|a)*)b", "deadline": 0.2})
    with pytest.raises(RewardError, match="no result after 0.2 s"):
        reward(["a" * LENGTH], [example()])


def test_without_a_time_limit_or_in_another_thread_there_is_no_alarm():
    before = signal.getsignal(signal.SIGALRM)
    finished = []

    def run(seconds):
        with time_limits(seconds) as limit, limit:
            finished.append(signal.getsignal(signal.SIGALRM) is before)

    run(None)
    thread = threading.Thread(target=run, args=(5.0,))
    thread.start()
    thread.join(20)
    run(5.0)
    assert finished == [True, True, False]
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_file_of_rewards_runs_once_unless_it_fails(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    first, second = tmp_path / "rw_once.py", tmp_path / "other" / "rw_once.py"
    for file in (first, second):
        file.write_text("raise OSError('not yet')")
        with pytest.raises(ValueError, match="OSError: not yet"):
            build_reward(f"{file}:f")
        file.write_text("class J(list):\n    def __call__(*_): return 1.0\nf = J()\n")
    loaded = [build_reward(f"{file}:f")._function for file in (first, first, second)]
    assert loaded[0] is loaded[1] is not loaded[2]
    # the folder of the configuration is the last of the path
    monkeypatch.setattr(sys, "path", [*sys.path, str(first.parent), str(second.parent)])
    assert build_reward("rw_once.py:f")._function is loaded[2]
    monkeypatch.chdir(tmp_path)
    assert build_reward("rw_once.py:f")._function is loaded[0]
    with pytest.raises(ValueError, match="no file '.*/rw_once'"):
        build_reward(f"{tmp_path}/rw_once:f")
    (tmp_path / "rw.txt").write_text("f = print")
    with pytest.raises(ValueError, match="rw.txt' is not a Python file"):
        build_reward(f"{tmp_path}/rw.txt:f")


def test_the_help_text_lists_the_options():
    table = build.rewards_table()
    lines = table.splitlines()
    assert max(map(len, lines)) <= 100
    assert "  exact   1 if the completion equals the reference answer, else 0. White space" in table
    text = " ".join(table.split())
    assert "eeds no reference answer. Options: pattern, full. code 1 if" in text
    assert "reference answer, else 0. Options: timeout, workers, answer_pattern. exact" in text
    indents = [len(line) - len(line.lstrip()) for line in lines[1:-1]]
    assert set(indents) == {2, 10}
    assert indents.count(2) == len(build.REWARDS)


def test_a_missing_import_of_a_reward_is_not_called_a_missing_reward(tmp_path, monkeypatch):
    (tmp_path / "needy_reward.py").write_text("import absent_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="Error: No module named 'absent_dependency' .*, line 1"):
        build_reward("needy_reward:score")
    with pytest.raises(ValueError, match="no module 'absent_reward'; give its file"):
        build_reward("absent_reward:score")
