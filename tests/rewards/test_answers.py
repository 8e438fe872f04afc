"""One reading for references and completions: every wrapping, no number from a fragment."""

import itertools
import json
from pathlib import Path

import pytest

from gac.data import Example
from gac.rewards import build_reward
from gac.rewards.answers import read_answer
from gac.rewards.values import equal
from tests.rewards import holes

HERE = Path(__file__).parent
WRAPPERS = (
    "{}",
    "#### {}",
    r"\boxed{{{}}}",
    r"$\boxed{{{}}}$.",
    r"\boxed{{\text{{{}}}}}",
    "<answer>{}</answer>",
    "<answer>\n{}\n</answer>",
    "`{}`",
    "**{}**",
    '"{}"',
    "“{}”",
    "({})",
    "[{}]",
    "${}$",
    r"\({}\)",
    "Answer:{}",
    "**Answer:** {}",
    "答案：{}",
    "The answer is {}.",
    r"The final answer is $\boxed{{{}}}$. I hope it is correct.",
    "Let me think.\n\nSo the answer is **{}**.",
)
# Ways to write the same answer.
SAME = {
    "an integer": ("5", "5.0", "5 apples", "5.", "x = 5", "$5", "€5", "5 €", "5 m", "005", "+5"),
    "a negative number": ("-3", "−3", "minus 3", "-3 degrees", "-3.0", "-$3"),
    "a large number": (
        "150000",
        "1.5 x 10^5",
        r"1.5 \times 10^{5}",
        "150,000",
        r"1.5\cdot10^5",
        "150 000",
    ),
    "a fraction": (
        "1/2 cup",
        "1/2",
        r"\frac{1}{2}",
        r"\dfrac12",
        "0.5",
        "50%",
        r"50\%",
        "½",
        ".5 cups",
    ),
    "a mixed number": ("7/2", "3 1/2", r"3\frac{1}{2}", "3.5", r"\frac72 \text{ cups}"),
    "a percentage": ("12.5", r"12.5\%", "12.5%", "12.5 percent"),
    "a round percentage": ("20", r"20\%", "20%", "20 percent"),
    "money": ("$18.50", "18.5 dollars", r"\$18.5", "18.50", "£18.50"),
    "degrees": ("30°", r"30^\circ", r"30^{\circ}", "30 degrees", "30"),
    "an hour": ("10 AM", "10 a.m.", "10:00 AM", "10am"),
    "a time": ("12:30", "12:30 PM"),
    "a date": ("March 5", "5 March", "March 5th", "5th of March"),
    "a product with pi": (r"2\pi", "2*pi", "2π", "2 pi"),
    "a root": (r"\sqrt{2}", "√2", "sqrt(2)"),
    "a word": ("Monday", "monday", r"\text{Monday}"),
}


def verdict(reference, completion):
    """Whether `completion` is right, None if math-verify decides."""
    answer = read_answer(completion)
    return answer is not None and equal(read_answer(reference), answer)


@pytest.mark.parametrize("forms", SAME.values(), ids=SAME.keys())
def test_whatever_the_reference_is_wrapped_in_the_completion_may_be_wrapped_in(forms):
    reward = build_reward("math")
    pairs = [
        (outer.format(forms[0]), inner.format(form))
        for form in forms
        for outer, inner in [
            *((w, "{}") for w in WRAPPERS),
            *(("{}", w) for w in WRAPPERS),
            *((w, w) for w in WRAPPERS),
        ]
        # "-$3" in dollars is a formula of its own
        if not ("$" in form and "$" in inner.format("")) or "$" not in outer.format("")
    ]
    pairs += [(b, a) for a, b in pairs]
    wrong = [pair for pair in dict.fromkeys(pairs) if verdict(*pair) is False]
    assert wrong == []
    undecided = [pair for pair in dict.fromkeys(pairs) if verdict(*pair) is None][::5]
    scores = reward([c for _, c in undecided], [row(r) for r, _ in undecided])
    assert [p for p, s in zip(undecided, scores, strict=True) if s != 1] == []
    reward.close()


def row(answer, **fields):
    return Example("row", (1,), "prompt", answer, None, fields.pop("extra", {}), **fields)


def accepted(pairs):
    """The pairs of a reference and a wrong answer that are not refused without math-verify."""
    references = {r: read_answer(r) for r, _ in pairs}
    answers = [(r, text, read_answer(text)) for r, text in pairs]
    return [(r, text) for r, text, a in answers if a and equal(references[r], a) is not False]


def test_no_generated_text_passes_that_only_contains_the_reference():
    pairs = list(holes.holes())
    assert len(pairs) > 50_000
    assert accepted(pairs[::11]) == []


@pytest.mark.slow(reason="reads 61,000 texts")
@pytest.mark.full(reason="reads 61,000 texts")
def test_none_of_all_generated_texts_passes():
    assert accepted(list(holes.holes())) == []


def test_no_generated_text_passes_for_an_expression():
    reward = build_reward("math")
    pairs = list(holes.expression_holes())
    scores = reward([text for _, text in pairs], [row(r) for r, _ in pairs])
    reward.close()
    assert [pair for pair, s in zip(pairs, scores, strict=True) if s != 0] == []
    assert len(pairs) == 900


def test_a_text_passes_if_it_gives_the_reference():
    """The generator's wrappers hide nothing: what they wrap is read."""
    for r, wrapper in itertools.product(holes.REFERENCES, holes.WRAPPERS):
        for form in ("{}", "{} apples", "x = {}"):
            assert verdict(r, wrapper.format(form.format(r))), (r, wrapper, form)


@pytest.mark.parametrize(("name", "score"), [("honest", 1.0), ("hedged", 0.0)])
def test_answers_in_the_style_of_small_models(name, score):
    rows = [json.loads(line) for line in (HERE / f"answers_{name}.jsonl").open(encoding="utf-8")]
    assert len(rows) >= 200
    rewards = {}
    wrong = []
    for r in rows:
        reward = rewards.setdefault(str(r["reward"]), build_reward(r["reward"]))
        example = row(r["answer"], extra=r.get("extra", {}), truncated=r.get("truncated", False))
        if reward([r["completion"]], [example]) != [score]:
            wrong.append((r["reward"], r["answer"], r["completion"]))
    for reward in rewards.values():
        reward.close()
    assert wrong == []


def test_forms_of_expressions_in_the_style_of_competitions():
    """Right and wrong forms of each reference, in several wrappings."""
    lines = (HERE / "answer_forms.jsonl").read_text(encoding="utf-8").splitlines()
    cases = [
        (r["answer"], wrapper.replace("{}", form), score)
        for r in map(json.loads, lines)
        for score, forms in ((1.0, [r["answer"], *r["same"]]), (0.0, r["different"]))
        for form in forms
        for wrapper in ("{}", "#### {}", r"\boxed{{}}", "The answer is ${}$.")
        if not ("$" in form and "$" in wrapper)
    ]
    reward = build_reward("math")
    scores = reward([text for _, text, _ in cases], [row(r) for r, _, _ in cases])
    reward.close()
    assert [c for c, s in zip(cases, scores, strict=True) if s != c[2]] == []
    assert len(cases) > 700
