"""Responses and demonstrations end as the chat template and the model's generation config say."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig

from gac.data import DataConfig, DataError, load_demos, load_prompts
from gac.data.examples import load_references
from gac.data.micro_batches import demo_row
from gac.demo.task import make_tokenizer, model_config
from gac.models.causal_lm import load_model, load_tokenizer
from gac.models.config import ModelConfig
from gac.rollouts.generation import generate
from gac.rows import collate

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "special"),
    [
        (CHATML, ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]),
        (LLAMA3, ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"]),
    ],
    ids=["ChatML", "Llama 3"],
)
def test_turns_end_as_the_template_ends_them(
    template: str, special: list[str], tmp_path: Path
) -> None:
    tokenizer = make_tokenizer("questionarwf \n")
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = template
    start = special[1], tokenizer.convert_tokens_to_ids(special[1])  # of every text, as Llama's
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{start[0]} $A", special_tokens=[start]
    )
    tokenizer.save_pretrained(tmp_path)
    turn, other = (tokenizer.convert_tokens_to_ids(name) for name in (special[0], special[-1]))
    eos = tokenizer.eos_token_id
    model_config(len(tokenizer), tokenizer.pad_token_id, eos).save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=[turn, other]).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), random_init=True)
    tokenizer = load_tokenizer(config)

    row = {"prompt": "question", "answer": "aa", "solution": "answer"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    data = {"prompts": str(tmp_path / "rows.jsonl")}
    words = tuple(tokenizer("answer", add_special_tokens=False)["input_ids"])
    for chat, end in ((True, turn), (False, eos)):
        (example,) = load_demos(DataConfig(**data, chat=chat), tokenizer)
        assert example.demo == (*words, end)

    torch.manual_seed(0)
    keywords = {"max_completion_length": 60, "temperature": 1.0, "num_generations": 200}
    completions = generate(load_model(config), tokenizer, [(words[0],)], **keywords)
    last = {completion[-1] for completion in completions if len(completion) < 60}
    assert last == {eos, turn, other}
    assert not last & {token for completion in completions for token in completion[:-1]}


def test_the_environments_turns_of_a_demonstration_have_no_loss(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("questionarwf \n")
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "question", "answer": "aa", "solution": ["to a", "writer", "no"]}')
    config = DataConfig(prompts=str(path))
    (example,) = load_demos(config, tokenizer)
    for tokens, text in ((None, "to ano<eos>"), (5, "no<eos>")):  # two of the last five are read
        row = demo_row(example, tokens)
        assert tokenizer.decode(row.ids) == "questionto awriterno<eos>"
        targets = collate([row], 0).targets
        assert tokenizer.decode(targets[targets != -100]) == text
    assert [text for _, text in load_references(config)] == ["to awriterno"]
    (dropped,) = load_prompts(replace(config, max_demo_tokens=3), tokenizer)
    assert (dropped.demo, dropped.demo_mask) == (None, ())
    with pytest.raises(DataError, match="has several turns: data.demo_template needs a single"):
        load_demos(replace(config, demo_template="{demo}"), tokenizer)
    path.write_text('{"prompt": "a", "answer": "a", "solution": ["to a", "writer"]}')
    with pytest.raises(DataError, match="has 2 turns: the first and the last must be the policy's"):
        load_demos(config, tokenizer)
