"""Tiny local models and datasets under the names that TRL's tests load from the hub."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
import trl

ORGANIZATION = "trl-internal-testing"
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {**MOE, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
# name on the hub: class, chat template of TRL, sizes that differ from SIZES
MODELS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2ForCausalLM", "qwen2_5", {}),
    "tiny-Qwen3ForCausalLM": ("Qwen3ForCausalLM", "qwen3", {}),
    "tiny-Qwen3MoeForCausalLM": ("Qwen3MoeForCausalLM", "qwen3", MOE),
    "tiny-LlamaForCausalLM-3.2": ("LlamaForCausalLM", "llama3_2", {}),
    "tiny-MistralForCausalLM-0.2": ("MistralForCausalLM", "qwen2_5", {}),
    "tiny-Gemma2ForCausalLM": ("Gemma2ForCausalLM", "gemma", {}),
    "tiny-CohereForCausalLM": ("CohereForCausalLM", "cohere", {}),
    "tiny-Cohere2ForCausalLM": ("Cohere2ForCausalLM", "cohere2", {"logit_scale": 1.0}),
    "tiny-Glm4MoeForCausalLM": ("Glm4MoeForCausalLM", "glm4moe", ROUTED),
    "tiny-GptOssForCausalLM": (
        "GptOssForCausalLM",
        "gptoss",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "tiny-NemotronHForCausalLM-nano": (
        "NemotronHForCausalLM",
        "nemotron_3_nano",
        {
            **ROUTED,
            "hidden_size": 16,
            "head_dim": 4,
            "layers_block_type": ["mamba", "attention", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 4,
            "mamba_n_groups": 1,
            "ssm_state_size": 16,
            "moe_shared_expert_intermediate_size": 32,
            "use_mamba_kernels": False,
        },
    ),
    "tiny-Olmo3ForCausalLM": ("Olmo3ForCausalLM", "qwen2_5", {}),
    "tiny-Lfm2ForCausalLM": (
        "Lfm2ForCausalLM",
        "lfm2",
        {"full_attn_idxs": [1], "block_multiple_of": 8},
    ),
    "tiny-Lfm2ForCausalLM-2.5": (
        "Lfm2ForCausalLM",
        "lfm2_2_5",
        {"full_attn_idxs": [1], "block_multiple_of": 8},
    ),
    "tiny-GPTNeoXForCausalLM": ("GPTNeoXForCausalLM", None, {}),
    "tiny-Qwen2ForSequenceClassification-2.5": ("Qwen2ForSequenceClassification", "qwen2_5", {}),
    "tiny-Qwen3ForSequenceClassification": ("Qwen3ForSequenceClassification", "qwen3", {}),
    "tiny-LlamaForSequenceClassification-3.2": (
        "LlamaForSequenceClassification",
        "llama3_2",
        {},
    ),
    "tiny-RemoteForCausalLM": ("LlamaForCausalLM", "llama3_2", {}),
}
SIZES = {
    "hidden_size": 8,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "num_labels": 1,
}
REMOTE_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class RemoteConfig(LlamaConfig):
    model_type = "remote"

class RemoteForCausalLM(LlamaForCausalLM):
    config_class = RemoteConfig
"""
TEXTS = (
    "Beautiful is better than ugly.",
    "Explicit is better than implicit.",
    "Simple is better than complex.",
    "Flat is better than nested.",
    "Readability counts.",
    "Errors should never pass silently.",
    "Now is better than never.",
)
TOOL = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Counts words.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "The words."}},
            "required": ["text"],
        },
    },
}
REVISION = "0" * 40
ROWS = (("train", 17), ("test", 2))  # as on the hub


def write_models(home: Path) -> None:
    """Write every model of `MODELS` and its tokenizer into the hub's cache in `home`, once."""
    if (home / "done").exists():
        return
    for name, (kind, template, sizes) in MODELS.items():
        folder = home / "hub" / f"models--{ORGANIZATION}--{name}"
        snapshot = folder / "snapshots" / REVISION
        snapshot.mkdir(parents=True, exist_ok=True)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(REVISION)
        tokenizer = make_tokenizer(template)
        config = getattr(transformers, f"{kind.split('For')[0]}Config")(
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            **(SIZES | sizes),
        )
        torch.manual_seed(0)
        model = getattr(transformers, kind)(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:  # the default scale is for wide models
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(snapshot)
        tokenizer.save_pretrained(snapshot)
        if "Remote" in name:
            write_remote_code(snapshot)
    (home / "done").touch()


def write_remote_code(snapshot: Path) -> None:
    """Let the model in `snapshot` load with trust_remote_code=True only."""
    (snapshot / "modeling_remote.py").write_text(REMOTE_CODE)
    path = snapshot / "config.json"
    config = json.loads(path.read_text()) | {
        "model_type": "remote",
        "architectures": ["RemoteForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_remote.RemoteConfig",
            "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM",
        },
    }
    path.write_text(json.dumps(config))


def make_tokenizer(template: str | None) -> Any:
    """A small byte-level BPE with the chat template that TRL ships under the name `template`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    raw.train_from_iterator([*TEXTS, "user assistant system"], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    if template is not None:
        folder = Path(trl.__file__).parent / "chat_templates"
        tokenizer.chat_template = (folder / f"{template}.jinja").read_text()
    return tokenizer


def rows(kind: str, number: int) -> Iterator[dict[str, Any]]:
    """Rows of one configuration of TRL's test data, e.g. "standard_preference"."""
    style, _, task = kind.partition("_")

    def message(role: str, text: str) -> Any:
        return [{"role": role, "content": text}] if style == "conversational" else text

    for i in range(number):
        words = TEXTS[i % len(TEXTS)].split()
        prompt = message("user", " ".join(words[:2]))
        good = message("assistant", " " + " ".join(words[2:]))
        bad = message("assistant", " " + " ".join(reversed(words)))
        yield {
            "language_modeling": {"messages": prompt + good}
            if style == "conversational"
            else {"text": prompt + good},
            "prompt_only": {"prompt": prompt},
            "prompt_completion": {"prompt": prompt, "completion": good},
            "preference": {"prompt": prompt, "chosen": good, "rejected": bad},
            "implicit_prompt_preference": {"chosen": prompt + good, "rejected": prompt + bad},
            "unpaired_preference": {"prompt": prompt, "completion": good, "label": i % 2 == 0},
        }[task]


def load_dataset(
    name: str, kind: str | None = None, split: str | None = None, streaming: bool = False, **_: Any
) -> Any:
    """Stand in for `datasets.load_dataset`."""
    extra: dict[str, Any] = {
        "zen": {},
        "harmony": {"chat_template_kwargs": {"reasoning_effort": "low"}},
        "toolcall": {"tools": json.dumps([TOOL])},
    }.get(name.removeprefix(f"{ORGANIZATION}/"))
    if extra is None or kind is None:
        pytest.skip(f"the dataset {name} is on the hub only")
    if extra:
        kind = f"conversational_{kind}"
    tables = datasets.DatasetDict(
        {
            part: datasets.Dataset.from_list([row | extra for row in rows(kind, number)])
            for part, number in ROWS
        }
    )
    if split is None:
        return tables
    part, _, limit = split.partition("[:")
    table = tables[part]
    if limit:
        table = table.select(range(int(limit.rstrip("]"))))
    return table.to_iterable_dataset() if streaming else table
