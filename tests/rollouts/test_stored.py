"""`gac.rollouts.stored:stored_pairs`: fixed pairs of responses, from a file to the loss."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gac.data import load_prompts
from gac.data.config import DataConfig
from gac.errors import ConfigError, RunError
from gac.rollouts.config import RolloutConfig
from gac.rollouts.engines import Engine
from gac.rollouts.generation import SamplingParams
from gac.training.trainer import Trainer, train
from tests.data.templates import LLAMA3, MISTRAL, QWEN3, SMOLLM2, byte_tokenizer, word_tokenizer
from tests.tiny import metrics, tiny_config

FUNCTION = "gac.rollouts.stored:stored_pairs"
PAIRS = [
    {"id": "a", "prompt": "2+2=", "answer": "4", "chosen": "4 is right.", "rejected": " 5\n\n"},
    {"id": "b", "prompt": "1+2=", "answer": "3", "chosen": "\n3", "rejected": "33"},
]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def engine(tokenizer: Any) -> Engine:
    return Engine(RolloutConfig(function=FUNCTION, num_generations=2), tokenizer)


@pytest.mark.parametrize("field", ["chosen", "rejected"])
@pytest.mark.parametrize("make", [byte_tokenizer, word_tokenizer])
@pytest.mark.parametrize("template", [None, SMOLLM2, QWEN3, LLAMA3, MISTRAL])
def test_responses_have_the_tokens_of_demonstrations(tmp_path, template, make, field) -> None:
    tokenizer, path = make(template), write(tmp_path / "pairs.jsonl", PAIRS)
    examples = load_prompts(DataConfig(prompts=path, demo_field=field), tokenizer)
    rollouts = engine(tokenizer).function([x for x in examples for _ in range(2)], fake(tokenizer))
    found = rollouts[("chosen", "rejected").index(field) :: 2]
    assert [x.completion_ids for x in found] == [x.demo for x in examples]


def fake(tokenizer: Any) -> Engine:
    own = engine(tokenizer)
    own.vocab_size = len(tokenizer)
    return own


def test_messages_are_responses_too(tmp_path) -> None:
    tokenizer, messages = byte_tokenizer(SMOLLM2), [{"role": "assistant", "content": "33"}]
    path = write(tmp_path / "pairs.jsonl", [*PAIRS[1:], {**PAIRS[1], "rejected": messages}])
    examples = load_prompts(DataConfig(prompts=path, demo_field=None), tokenizer)
    rollouts = engine(tokenizer).function([x for x in examples for _ in range(2)], fake(tokenizer))
    assert rollouts[1].completion_ids == rollouts[3].completion_ids


def test_the_rewards_are_1_and_0(tmp_path) -> None:
    tokenizer, path = byte_tokenizer(), write(tmp_path / "pairs.jsonl", PAIRS)
    examples = load_prompts(DataConfig(prompts=path, demo_field=None), tokenizer)
    rollouts = engine(tokenizer).function([x for x in examples for _ in range(2)], fake(tokenizer))
    assert [x.reward for x in rollouts] == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("change", "times", "message"),
    [
        ({"rejected": None}, 2, r"a: rejected=None: give the response as a text, or as messages"),
        ({"chosen": ""}, 2, r"a: chosen='': give the response as a text, or as messages"),
        ({}, 3, r"a row has two responses: set rollouts.num_generations=2"),
        ({}, 1, r"a row has two responses: set rollouts.num_generations=2"),
    ],
)
def test_an_error_names_the_row_and_the_fix(tmp_path, change, times: int, message: str) -> None:
    path = write(tmp_path / "pairs.jsonl", [{**PAIRS[0], **change}])
    examples = load_prompts(DataConfig(prompts=path, demo_field=None), byte_tokenizer())
    own = fake(byte_tokenizer())
    with pytest.raises(RunError, match=message):
        own.function([x for x in examples for _ in range(times)], own)


ROWS = [
    {"prompt": f"{a}+{b}=", "answer": f"{a + b}", "chosen": f"{a + b}", "rejected": f"{a}"}
    for a in range(1, 4)
    for b in range(1, 4)
]


def run(task: Path, out: Path, name: str, **changes: Any) -> Any:
    write(out.parent / "pairs.jsonl", ROWS)
    return tiny_config(
        task,
        out,
        **{
            "method": name,
            "data": {"prompts": str(out.parent / "pairs.jsonl"), "demo_field": None},
            "rollouts": {
                "function": FUNCTION,
                "num_prompts": 4,
                "num_generations": 2,
                "max_completion_length": 5,
            },
            **changes,
        },
    )


def test_a_run_prefers_the_chosen_responses(task, tmp_path) -> None:
    """Before the first update, every log-ratio is 0 and the loss is log 2."""
    train(run(task, tmp_path / "run", "dpo", steps=30, eval={}))
    losses = [row["rollout_loss"] for row in metrics(tmp_path / "run")]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert max(losses[-5:]) < 0.9 * losses[0]


def test_an_evaluation_samples_its_responses(task, tmp_path) -> None:
    trainer = Trainer(run(task, tmp_path / "run", "dpo"))
    own = trainer.engine.load(trainer.policy)
    own = own.for_evaluation(SamplingParams(5, 0.0), own.function)
    examples = list(trainer.feed.prompts)
    rollouts = own.sample_rollouts(examples, 1)
    greedy = own.generate([example.prompt for example in examples])
    assert [x.completion_ids for x in rollouts] == [tuple(x) for x in greedy]


@pytest.mark.parametrize(
    ("name", "generations", "message"),
    [
        ("grpo", 2, "method 'grpo' needs responses of the policy: use dpo or ipo"),
        ("dpo", 4, "rollouts.num_generations=4: .* has two responses per prompt: use 2"),
    ],
)
def test_pairs_without_effect_are_refused(
    task, tmp_path, name: str, generations: int, message: str
) -> None:
    rollouts = {"function": FUNCTION, "num_prompts": 4, "num_generations": generations}
    with pytest.raises(ConfigError, match=message):
        run(task, tmp_path / "run", name, rollouts=rollouts)
