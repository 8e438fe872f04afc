"""A tiny model whose completions have scheduled lengths in every trainer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast, Qwen2Config

PROMPTS, COMPLETIONS, PROMPT_TOKENS = 8, 8, 16
MAX_LENGTH = {"uniform": 96, "long-tailed": 192}
VOCABULARY = 4864


def schedule(kind: str, step: int) -> list[int]:
    """Length in tokens of each completion of a step, including the EOS token.

    uniform: all have the maximum length. long-tailed: log-normal with median 32, and one has the
    maximum length.
    """
    longest, rows = MAX_LENGTH[kind], PROMPTS * COMPLETIONS
    if kind == "uniform":
        return [longest] * rows
    rng = random.Random(step)
    lengths = [min(max(round(rng.lognormvariate(3.47, 0.8)), 4), longest) for _ in range(rows)]
    lengths[rng.randrange(rows)] = longest
    return lengths


def write(folder: Path) -> None:
    """Write a tokenizer, the configuration of a Qwen2 model with 4.2 million parameters, and
    prompts of equal length.
    """
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w2"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="w0", eos_token="w1", unk_token="w2"
    ).save_pretrained(folder)
    Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    ).save_pretrained(folder)
    rng = random.Random(0)
    rows = [
        {
            "prompt": " ".join(f"w{rng.randrange(3, VOCABULARY)}" for _ in range(PROMPT_TOKENS)),
            "answer": "w3",
        }
        for _ in range(512)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class ForceEos(LogitsProcessor):
    """Forces row i to sample lengths[i] tokens, of which only the last is EOS."""

    def __init__(self, lengths: list[int], prompt: int, end: int) -> None:
        self.lengths, self.prompt, self.end = torch.tensor(lengths), prompt, end

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        at_end = self.lengths <= ids.shape[1] - self.prompt + 1
        scores = scores.clone()
        scores[:, self.end] = -torch.inf
        scores[at_end] = -torch.inf
        scores[at_end, self.end] = 0.0
        return scores


def force(model: Any, kind: str) -> None:
    """Make `model.generate` follow the schedule, whether a step calls it once or several times."""
    original, generated, lengths = model.generate, 0, list[int]()
    rows = PROMPTS * COMPLETIONS

    def generate(*args: Any, **keywords: Any) -> Tensor:
        nonlocal generated, lengths
        ids, settings = keywords["input_ids"], keywords["generation_config"]
        if settings.return_dict_in_generate:  # a check of the model, not a step
            return original(*args, **keywords)
        before = MAX_LENGTH[kind] - settings.max_new_tokens
        prompt = ids.shape[1] - before
        if before:  # the rows that have not ended continue
            lengths = [length for length in lengths if length > before]
        else:
            count = len(ids) * (settings.num_return_sequences or 1)
            step, first = divmod(generated, rows)
            lengths = schedule(kind, step)[first : first + count]
            generated += count
        force_eos = ForceEos(lengths, prompt, end=1)
        out = original(*args, **keywords, logits_processor=LogitsProcessorList([force_eos]))
        new = out[:, prompt:]
        ended = ((new == 1).int().argmax(1) + 1).where((new == 1).any(1), MAX_LENGTH[kind] + 1)
        expected = [n if n <= new.shape[1] else MAX_LENGTH[kind] + 1 for n in lengths]
        if ended.tolist() != expected:
            raise RuntimeError(f"{kind}: responses end at {ended.tolist()}, expected {expected}")
        return out

    model.generate = generate
