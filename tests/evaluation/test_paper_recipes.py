"""The paper's data sets: rows of their published schemas become prompts, and their answers score 1.

The schemas are those of the data set pages: open-r1/OpenR1-Math-220k, HuggingFaceH4/aime_2024,
math-ai/aime25, AI-MO/aimo-validation-amc, xw27/scibench and Idavidrein/gpqa.
"""

import csv
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples import openr1_math
from examples.eval import gpqa
from examples.eval.scibench import close, number
from gac.config import load
from gac.data import load_demos, load_prompts, read_rows
from gac.evaluation.config import EvalConfig
from gac.rewards import build_reward
from gac.train_config import TrainConfig
from tests.data.templates import SMOLLM2, byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def openr1_row(i: int, **changes):
    """A row of open-r1/OpenR1-Math-220k."""
    return {
        "problem": f"What is {i} + {i}?",
        "solution": f"It is {2 * i}.",
        "answer": str(2 * i),
        "problem_type": "Algebra",
        "question_type": "math-word-problem",
        "source": "olympiads",
        "uuid": f"uuid-{i}",
        "is_reasoning_complete": [False, True],
        "generations": ["<think>No", f"<think>Twice {i}.</think> It is \\boxed{{{2 * i}}}."],
        "correctness_math_verify": [True, True],
        "correctness_llama": None,
        "finish_reasons": None,
        "correctness_count": 2,
        "messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}],
        **changes,
    }


def test_openr1_gives_disjoint_demonstrations_and_prompts_that_train(tmp_path, monkeypatch):
    rows = [openr1_row(i) for i in range(30)]
    rows += [openr1_row(3), openr1_row(40, answer=""), openr1_row(41, generations=None)]
    rows += [openr1_row(42, correctness_math_verify=[False, False])]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [str(tmp_path), "--source", str(source), "--demos", "10", "--prompts", "20"]
    assert openr1_math.main(arguments) == 0
    monkeypatch.setenv("GAC_DATA", str(tmp_path))
    config = load(TrainConfig, EXAMPLES / "openr1_math.yaml")
    tokenizer = byte_tokenizer(SMOLLM2)
    prompts = load_prompts(config.data, tokenizer, demos=False)
    demos = load_demos(config.data, tokenizer)
    assert (len(prompts), len(demos)) == (20, 10)
    assert not {e.id for e in prompts} & {e.id for e in demos}
    text = tokenizer.decode(demos[0].demo)
    assert text.startswith("<think>Twice ")
    reward = build_reward(config.reward)
    try:
        responses = [f"So \\boxed{{{e.answer}}}" for e in prompts]
        assert reward(responses, prompts) == [1.0] * 20
    finally:
        reward.close()
    with pytest.raises(ValueError, match="30 usable rows"):
        openr1_math.main([*arguments[:3], "--demos", "10", "--prompts", "21"])


SIZES = {"openr1_math_1.5b": "1.5B", "openr1_math": "7B", "openr1_math_14b": "14B"}


@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_the_recipes_differ_in_the_model_only_where_memory_demands_it(name, size):
    config, base = (load(TrainConfig, EXAMPLES / f"{n}.yaml") for n in (name, "openr1_math"))
    assert config.model.path == f"Qwen/Qwen2.5-{size}-Instruct"
    assert config.data == base.data
    assert config.method == base.method
    assert (config.steps, config.demo_batch_size) == (800, 64)
    method = config.method.for_run(config.steps)
    assert (method.prior.hold, method.prior.decay) == (200, 600)  # the paper's figure 3


AIME24 = {"solution": "S", "url": "", "year": "2024"}
HUB = {  # two rows of the schema of each data set that the files load from the Hub
    "aime24": [
        {"id": 60, "problem": "P1", "answer": "204", **AIME24},
        {"id": 61, "problem": "P2", "answer": "025", **AIME24},
    ],
    "aime25": [
        {"problem": "P1", "answer": "70", "id": "0"},
        {"problem": "P2", "answer": "588", "id": "1"},
    ],
    "amc": [
        {"id": 0, "problem": "P1", "answer": 142.0, "url": ""},
        {"id": 1, "problem": "P2", "answer": 36.0, "url": ""},
    ],
}


@pytest.mark.parametrize(("file", "task"), [("aime", "aime24"), ("aime", "aime25"), ("amc", "amc")])
def test_competition_rows_score_their_own_answers(tmp_path, file, task):
    config = load(EvalConfig, EXAMPLES / "eval" / f"{file}.yaml")
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in HUB[task]))
    data = dataclasses.replace(config.tasks[task].data, prompts=str(path))
    examples = load_prompts(data, byte_tokenizer(SMOLLM2), demos=False)
    reward = build_reward(config.reward)
    try:
        right = [f"The answer is \\boxed{{{e.answer}}}." for e in examples]
        assert reward(right, examples) == [1.0, 1.0]
        assert reward(["\\boxed{1}"] * 2, examples) == [0.0, 0.0]
    finally:
        reward.close()


def test_scibench_rows_are_graded_with_its_tolerance(tmp_path):
    rows = [
        {"problem_text": "How fast?", "answer_latex": " 4.10", "answer_number": "4.10"},
        {"problem_text": "How much?", "answer_latex": " -47", "answer_number": " -47"},
    ]
    more = {"unit": " m/s", "source": "fund", "problemid": " 11.01", "comment": " "}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row | more) + "\n" for row in rows))
    config = load(EvalConfig, EXAMPLES / "eval" / "scibench.yaml")
    data = dataclasses.replace(config.tasks["scibench"].data, prompts=str(path))
    first, second = load_prompts(data, byte_tokenizer(SMOLLM2), demos=False)
    assert "unit of the answer is  m/s" in first.prompt_text
    assert close("So \\boxed{4.1}", first) == close("\\boxed{4.30}", first) == 1
    assert close("So \\boxed{4.4}", first) == close("4.1", first) == 0
    assert close("\\boxed{-47.0}", second) == 1
    assert close("\\boxed{47}", second) == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.2 \\times 10^{-3}", 0.0012),
        ("$3.0\\cdot10^8$", 3e8),
        ("12{,}000", 12000),
        ("1,200.5", 1200.5),
        ("−4", -4),
        ("x", None),
        ("inf", None),
    ],
)
def test_numbers_of_scibench(text, value):
    assert number(text) == value
    assert close(f"\\boxed{{{text}}}", SimpleNamespace(answer="7")) == 0


def test_gpqa_rows_are_shuffled_once_and_keep_their_answer(tmp_path):
    names = ("Question", gpqa.RIGHT, *gpqa.WRONG, "Record ID", "High-level domain")
    source, out = tmp_path / "gpqa_diamond.csv", tmp_path / "gpqa_diamond.jsonl.gz"
    with source.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for i in range(12):
            row = (f'Q{i}, "quoted"?', f"right {i}", "b", "c", "d", f"rec{i}", "Physics")
            writer.writerow(dict(zip(names, row, strict=True)))
    assert gpqa.main([str(source), str(out)]) == 0
    rows = [row.fields for row in read_rows(str(out))]
    for i, row in enumerate(rows):
        assert row["choices"]["ABCD".index(row["answer"])] == f"right {i}"
    assert len({row["answer"] for row in rows}) > 1
    config = load(EvalConfig, EXAMPLES / "eval" / "gpqa.yaml")
    data = dataclasses.replace(config.tasks["gpqa"].data, prompts=str(out))
    examples = load_prompts(data, byte_tokenizer(SMOLLM2), demos=False)
    assert "(A)" in examples[0].prompt_text
    reward = build_reward(config.reward)
    try:
        assert reward([f"The answer is ({e.answer})." for e in examples], examples) == [1.0] * 12
    finally:
        reward.close()
