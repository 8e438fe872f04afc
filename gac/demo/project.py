"""Creates a folder with everything that a first run needs: `gac init DIR`."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

from gac.config import save_text
from gac.errors import ConfigError, writable_folder
from gac.models.source import check_files, check_source

RUN = """\
# Train with: gac train {folder}/run.yaml
# Override a key with: --set KEY=VALUE. All keys: gac train --help
# Paths are relative to the folder in which gac runs.

# All results: metrics, samples of text, checkpoints, the final model, report.html
out: {folder}/run

# A folder with a transformers model, or the name of one on the Hugging Face Hub{note}
model:
  path: {model}

# How demonstrations and rewards are combined; list: gac methods
method: constant-alarm

# One row per prompt, as JSON lines, CSV or parquet: `prompt`, the correct `answer` and, for
# demonstrations, a `solution`; or `messages`, a list of messages in the chat format. The model's
# chat template formats them if it has one (`chat: false` uses the texts as they are)
data:
  prompts: {folder}/data/train.jsonl

# A function in a file next to this one; or a built-in reward: math, exact, choice, format, code
reward: reward.py:reward

# In each step: 16 prompts with 8 sampled responses each, and 32 demonstrations
rollouts:
  num_prompts: 16
  num_generations: 8
  max_completion_length: 8
demo_batch_size: 32

steps: {steps}
optim:
  lr: {rate}

# Evaluation on held-out prompts: before training, every 10 steps and at the end
eval:
  data:
    prompts: {folder}/data/eval.jsonl
  every: 10
  max_completion_length: 8
checkpoint_every: 10
"""
REWARD = '''\
"""The reward of run.yaml. Test it with: python {folder}/reward.py"""


def reward(completion, example):
    """Return a number: how good `completion` (text) is as a response to `example`.

    `example.prompt_text` is the prompt, `example.answer` the field `answer` of the row, and
    `example.extra` has all fields of the row.
    """
    return 1.0 if completion.strip() == example.answer else 0.0


def test_reward():
    class Example:
        answer = "137"

    assert reward("137", Example) == reward(" 137\\n", Example) == 1.0
    assert reward("173", Example) == reward("", Example) == 0.0


if __name__ == "__main__":
    test_reward()
    print("the reward works")
'''


def create_project(folder: Path, model: str | None = None) -> None:
    """Write run.yaml, data, a reward with its test and, without `model`, a tiny model.

    Raises ConfigError unless `folder` is new or empty and can be written, and `model` is the
    folder of a model or may be the name of one on the Hub.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"DIR={str(folder)!r} is not empty: choose a new folder")
    if model is not None:
        check_source("--model", model, ask_hub=False)
        check_files("--model", model, "model", "give a transformers model", "config.json")
    writable_folder("DIR", folder)
    (folder / "data").mkdir()
    numbers = random.Random(0).sample([f"{i:03}" for i in range(1000)], 500)
    for name, part in (("eval", numbers[:100]), ("train", numbers[100:])):
        answers = {digits: "".join(sorted(digits)) for digits in part}
        rows = [
            {"prompt": f"sort {digits}: ", "answer": answer, "solution": answer}
            for digits, answer in answers.items()
        ]
        save_text(folder / "data" / f"{name}.jsonl", "".join(json.dumps(r) + "\n" for r in rows))
    save_text(folder / "reward.py", REWARD.replace("{folder}", str(folder)))
    tiny = model is None
    if tiny:
        _write_model(folder / "model")
    values = {
        "folder": folder,
        "model": f"{folder}/model" if tiny else model,
        "note": "\n# This one is tiny and untrained" if tiny else "",
        "steps": 30 if tiny else 100,
        "rate": "3.0e-3" if tiny else "1.0e-6",
    }
    save_text(folder / "run.yaml", RUN.format(**values))


def _write_model(folder: Path) -> None:
    """A random Qwen2 with 0.3 million parameters that reads and writes ASCII characters."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Tokenizer
    from transformers.utils.logging import disable_progress_bar

    from .task import model_config

    disable_progress_bar()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    # AutoTokenizer loads each tokenizer of a Qwen2 model as a Qwen2Tokenizer, which calls a space Ġ
    tokens = [*special.values(), *string.printable[:94], "Ġ"]
    tokenizer = Qwen2Tokenizer({token: i for i, token in enumerate(tokens)}, [], **special)
    tokenizer.save_pretrained(folder)
    config = model_config(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
