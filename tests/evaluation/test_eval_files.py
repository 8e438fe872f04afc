"""The evaluation configs in examples/eval: all load, and where the data is available, known answers
score 1.
"""

import json
from pathlib import Path

import pytest

from gac.config import load
from gac.data import load_prompts
from gac.evaluation.config import EvalConfig
from gac.rewards import build_reward
from tests.data.templates import SMOLLM2, byte_tokenizer

FILES = sorted((Path(__file__).resolve().parents[2] / "examples" / "eval").glob("*.yaml"))
# ending of a correct response, by reward
ENDS = {
    "math": "So it is\n#### {answer}",
    "choice": "So the answer is {answer}.",
    "exact": "So the answer is {answer}.",
}


def tasks(file: Path):
    config = load(EvalConfig, file)
    for name, task in config.tasks.items():
        reward = config.reward if task.reward is None else task.reward
        yield name, task, reward, reward if isinstance(reward, str) else reward["name"]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_the_file_loads_and_has_its_own_output_folder(file):
    config = load(EvalConfig, file)
    assert config.out == f"evals/{file.stem}"
    assert config.model.path == ""
    for _, _, reward, _ in tasks(file):
        build_reward(reward).close()


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_real_rows_score_their_own_answers(file, data_dir, monkeypatch):
    monkeypatch.setenv("GAC_DATA", str(data_dir))
    for name, task, spec, kind in tasks(file):
        source = Path(str(task.data.prompts).replace("$GAC_DATA", str(data_dir)))
        if not source.is_file():
            pytest.skip(f"dataset {source.name} is not available")
        examples = load_prompts(task.data, byte_tokenizer(SMOLLM2), demos=False)
        assert all(e.prompt_text.endswith("<|im_start|>assistant\n") for e in examples)
        assert len({e.prompt_text for e in examples}) > max(100, 0.9 * len(examples))
        if task.split_field:
            assert len({e.extra[task.split_field] for e in examples}) > 1
        sample = examples[:: max(1, len(examples) // 25)]
        if kind == "code":
            right = [  # HumanEval's solutions continue the prompt
                "```python\n"
                + (e.extra["prompt"] if "entry_point" in e.extra else "")
                + f"{e.answer}\n```"
                for e in sample
            ]
        else:
            right = [ENDS[kind].format(answer=e.answer) for e in sample]
        reward = build_reward(spec)
        try:
            assert reward(right, sample) == [1.0] * len(sample), name
            assert sum(reward(["I do not know."] * len(sample), sample)) == 0
        finally:
            reward.close()


def test_task_for_lm_eval_has_our_prompt():
    root = FILES[0].parents[2]
    text = (root / "examples" / "lm_eval" / "gac_gsm8k.yaml").read_text()
    ours = load(EvalConfig, root / "examples" / "eval" / "gsm8k.yaml").tasks["gsm8k"].data.template
    assert json.dumps(ours.replace("{prompt}", "{{prompt}}")) in text
