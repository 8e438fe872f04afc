"""What of a completion is graded: not its reasoning, and not what a limit cut off."""

import json
from dataclasses import replace

import pytest

from gac.data import Example
from gac.rewards import build_reward
from gac.rewards.completion import THINK, Decoder, graded_text, markers_of
from gac.rollouts.scoring import score as score_rollouts
from gac.types import Rollout

ROW = Example("row", (1,), "prompt", "5", None, {"cases": [["", "5"]]})


BUILT = {}


@pytest.fixture(scope="module", autouse=True)
def closing():
    yield
    for reward in BUILT.values():
        reward.close()


def score(spec, completion, answer="5", truncated=False, prompt="prompt"):
    reward = BUILT.get(str(spec)) or BUILT.setdefault(str(spec), build_reward(spec))
    row = replace(ROW, answer=answer, truncated=truncated, prompt_text=prompt)
    [value] = reward([completion], [row])
    return value


THINKING = "<think>\nFirst guess \\boxed{7}.\n</think>\n\nThe answer is 5."


@pytest.mark.parametrize(
    ("spec", "right", "wrong"),
    [
        ("math", "5", "7"),
        ("exact", "5", "7"),
        ("choice", "C", "B"),
        ({"name": "format", "pattern": "[C5]"}, "5", "7"),
        ("code", "```python\nprint(5)\n```", "```python\nprint(7)\n```"),
    ],
    ids=["math", "exact", "choice", "format", "code"],
)
def test_only_the_text_after_the_reasoning_is_graded(spec, right, wrong):
    answer = "C" if spec == "choice" else "5"
    for begin, end in (("<think>", "</think>"), ("", "</think>")):
        assert score(spec, f"{begin}\n{wrong}\n{end}\n{right}", answer) == 1.0
        assert score(spec, f"{begin}\n{right}\n{end}\n{wrong}", answer) == 0.0
    assert score(spec, f"<think>{wrong}</think>{wrong}<think></think>{right}", answer) == 1.0
    # without an end, or with nothing after it
    assert score(spec, f"<think>\n{right}", answer) == 0.0
    assert score(spec, f"<think>\n{right}\n</think>", answer) == 0.0
    assert score(spec, f"<think>a</think>{right}<think>", answer) == 0.0
    # the prompt has begun the trace
    assert score(spec, right, answer, prompt="2 + 3\n<think>\n") == 0.0
    assert score(spec, f"{wrong}\n</think>\n{right}", answer, prompt="2 + 3<think>") == 1.0
    assert score(spec, right, answer, prompt="<think>\n\n</think>\n\n") == 1.0


def test_the_reports_of_others():
    assert score("math", THINKING) == 1.0
    assert score("math", THINKING, "7") == 0.0
    assert score("choice", "<think>the answer is (B)</think>\n**C**", "C") == 1.0
    assert score("choice", "<think>the answer is (B)</think>\n**C**", "B") == 0.0
    assert score("math", r"so \boxed{5}. Wait, no: \boxed{6") == 0.0
    assert score("math", r"so \boxed{5}. Wait, no: \boxed{6}", "6") == 1.0
    assert score("math", r"so \boxed{5}. Wait, no: \boxed{\frac{6}{1}") == 0.0
    assert score("math", "<answer>5</answer> or rather <answer>6") == 0.0


@pytest.mark.parametrize("reasoning", [["[R]", "[/R]"], ("[R]", "[/R]")])
def test_the_key_reasoning_sets_the_markers(reasoning):
    spec = {"name": "math", "reasoning": reasoning}
    assert score(spec, "[R]7[/R]5") == 1.0
    assert score(spec, "[R]5") == 0.0
    assert score({"sum": [{"reward": "exact"}], "reasoning": reasoning}, "[R]7[/R]5") == 1.0
    assert score({"name": "exact", "reasoning": False}, "<think>7</think>5") == 0.0
    assert score({"name": "exact", "reasoning": None}, "<think>7</think>5") == 1.0


@pytest.mark.parametrize("value", [True, "<think>", ["<think>"], ["", "</think>"], [1, 2]])
def test_other_values_of_the_key_are_refused(value):
    with pytest.raises(ValueError, match=r"reasoning=.*: use a list of the two texts"):
        build_reward({"name": "math", "reasoning": value})
    with pytest.raises(ValueError, match="set reasoning next to `sum`"):
        build_reward({"sum": [{"reward": {"name": "math", "reasoning": False}}]})


def test_a_pattern_that_names_a_marker_sees_the_whole_completion():
    strict = {"name": "format", "pattern": r"<think>.*<\/think>.+"}
    assert score(strict, "<think>a</think>5") == 1.0
    assert score(strict, "5") == 0.0
    exact = {"name": "exact", "answer_pattern": r"</think>\s*(\d)"}
    assert score(exact, "<think>a</think>\n5") == 1.0


# --- truncation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "completion", "answer"),
    [
        ("math", "#### 260\n#### 2", "2"),
        ("math", "The answer is 26", "26"),
        ("math", "so \\boxed{5}", "5"),
        ("math", "<answer>5</answer>", "5"),
        ("choice", "Answer: A", "A"),
        ("exact", "015", "015"),
        ("exact", "015\nand", "015"),
        ({"name": "exact", "answer_pattern": r"#(\d+)"}, "#26", "26"),
        ({"name": "format", "pattern": "[0-9]+"}, "26", None),
        ({"name": "format", "pattern": "[0-9]+", "full": False}, "26", None),
        ("code", "print(5)", None),
        ("code", "```python\nprint(5)", None),
    ],
)
def test_a_last_line_that_was_cut_off_is_no_answer(spec, completion, answer):
    assert score(spec, completion, answer) == (0.0 if completion == "015\nand" else 1.0)
    assert score(spec, completion, answer, truncated=True) == 0.0


def test_a_complete_line_of_a_truncated_completion_counts():
    assert score("math", "#### 260\n#### 2", "260", truncated=True) == 1.0
    assert score("choice", "Answer: A\nBecause", "A", truncated=True) == 1.0
    assert score("code", "```python\nprint(5)\n```\nThis pro", truncated=True) == 1.0


SEEN = []


def sees(completion, example):
    SEEN.append(example.truncated)
    return 1.0


def sees_all(completions, examples):
    SEEN.extend(example.truncated for example in examples)
    return [1.0] * len(completions)


@pytest.mark.parametrize(
    "spec",
    [
        f"{__name__}:sees",
        {"name": f"{__name__}:sees_all", "batch": True},
        {"name": f"{__name__}:sees", "concurrency": 1},
        {"sum": [{"reward": f"{__name__}:sees"}]},
    ],
    ids=["row by row", "batch", "concurrent", "sum"],
)
def test_every_reward_sees_whether_a_completion_was_truncated(spec, thinker):
    SEEN.clear()
    rollouts = [Rollout((1,), tuple(thinker("5").input_ids), ())] * 2
    score_rollouts(build_reward(spec), thinker, [ROW] * 2, rollouts, [False, True])
    assert sorted(SEEN) == [False, True]


# --- markers of the tokenizer ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinker():
    """A tokenizer of digits whose marks of reasoning are special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    digits = Tokenizer(models.BPE({c: i for i, c in enumerate("0123456789 ")}, []))
    digits.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=digits, eos_token="<eos>")
    tokenizer.add_special_tokens(
        {
            "additional_special_tokens": [
                AddedToken(t, special=True) for t in ("<think>", "</think>")
            ]
        }
    )
    return tokenizer


def test_special_tokens_that_mark_reasoning_stay_in_the_text(thinker):
    ids = thinker("<think>1</think>015<eos>").input_ids
    assert thinker.decode(ids, skip_special_tokens=True) == "1015"
    assert Decoder(thinker)(ids) == "<think>1</think>015"
    assert Decoder(thinker)(thinker("015<eos>").input_ids) == "015"
    assert Decoder(thinker)([]) == ""


def test_rewards_of_a_run_see_the_markers(thinker):
    rows = [replace(ROW, answer="015")] * 3
    texts = "<think>1</think>015<eos>", "<think>015<eos>", "<think>015</think>1<eos>"
    rollouts = [Rollout((1,), tuple(thinker(t).input_ids), ()) for t in texts]
    reward = build_reward("exact")
    seen, scores, _ = score_rollouts(reward, thinker, rows, rollouts, [False] * 3)
    assert seen == [text.removesuffix("<eos>") for text in texts]
    assert scores == [1.0, 0.0, 0.0]


class Fake:
    """A tokenizer with a chat template and added tokens."""

    all_special_ids = ()

    def __init__(self, template=None, added=()):
        self.chat_template, self.added_tokens_decoder = template, dict(enumerate(added))


@pytest.mark.parametrize(
    ("tokenizer", "pair"),
    [
        (Fake(), THINK[0]),
        (Fake("{{ '[THINK]' }}...[/THINK]"), ("[THINK]", "[/THINK]")),
        (Fake(added=["<seed:think>", "</seed:think>"]), ("<seed:think>", "</seed:think>")),
        (Fake(added=["<reasoning>", "</reasoning>"]), ("<reasoning>", "</reasoning>")),
        (Fake(added=["◁think▷", "◁/think▷"]), ("◁think▷", "◁/think▷")),
        (
            Fake({"default": "<|START_THINKING|><|END_THINKING|>"}),
            ("<|START_THINKING|>", "<|END_THINKING|>"),
        ),
        (
            Fake("<|begin_of_thought|> <|end_of_thought|>"),
            ("<|begin_of_thought|>", "<|end_of_thought|>"),
        ),
        (
            Fake("<|channel|>{{ channel }}<|message|>"),
            ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
        ),
    ],
)
def test_markers_of_known_tokenizers(tokenizer, pair):
    markers = markers_of(tokenizer)
    assert pair in markers
    assert graded_text(f"{pair[0]}7{pair[1]}5", ROW, markers) == "5"
    assert graded_text(f"{pair[0]}5", ROW, markers) == ""


def test_an_ordinary_template_adds_no_markers():
    template = "{% for m in messages %}<|im_start|>{{ m.role }}</tool_call>{% endfor %}"
    assert markers_of(Fake(template, ["<|im_end|>", "</s>"])) == THINK


def test_rewards_with_the_key_keep_their_markers(thinker):
    reward = build_reward({"name": "exact", "reasoning": False})
    rollouts = [Rollout((1,), tuple(thinker("<think>1</think>5").input_ids), ())]
    _, scores, _ = score_rollouts(reward, thinker, [ROW], rollouts, [False])
    assert scores == [0.0]
    assert json.dumps(reward.reasoning) == "[]"
