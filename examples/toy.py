"""A tiny model, its task and its samples: what the examples inside other trainers share."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from gac.demo import task

LENGTH = 8  # characters of an answer


class Rollout(NamedTuple):
    """One sampled answer, scored at temperature 1."""

    group: int  # of its prompt
    prompt: Tensor  # [P] token ids
    response: Tensor  # [R] token ids, the end token included
    logps: Tensor  # [R] under the policy that sampled it
    ref_logps: Tensor  # [R] under the reference
    reward: float


def write(folder: Path) -> None:
    """A random model with its tokenizer in model/, 256 weak subtractions in demos.jsonl."""
    words = task.tokenizer()
    config = task.model_config(len(words), words.pad_token_id, words.eos_token_id)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    experts = task.rows(random.Random(1), ["-"] * 256, {"-": 0.3})
    pairs = [{"prompt": row["prompt"], "completion": row["solution"]} for row in experts]
    (folder / "demos.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def prompts(seed: int, count: int) -> list[dict[str, Any]]:
    """Prompts and answers, additions and subtractions in turn."""
    return task.rows(random.Random(f"prompts:{seed}"), ["+", "-"] * (count // 2))


def reward(completion: str, answer: str) -> float:
    """Share of the answer's characters that are right."""
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / len(answer)


@torch.no_grad()
def sample(
    policy: Any, reference: Any, words: Any, rows: Sequence[dict[str, Any]], completions: int
) -> list[Rollout]:
    """`completions` answers to each prompt, as a rollout engine returns them."""
    text = [row["prompt"] for row in rows for _ in range(completions)]
    ids = words(text, return_tensors="pt")["input_ids"]  # prompts of one length
    start = ids.shape[1]
    whole = policy.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0,
        max_new_tokens=LENGTH + 1,
    )  # fmt: skip
    scored = [_logprobs(model, whole)[:, start - 1 :] for model in (policy, reference)]
    found = []
    for i, tokens in enumerate(whole[:, start:]):
        ends = (tokens == words.eos_token_id).nonzero()
        length = int(ends[0]) + 1 if len(ends) else len(tokens)
        answer = words.decode(tokens[:length], skip_special_tokens=True)
        logps, ref = (each[i, :length] for each in scored)
        score = reward(answer, rows[i // completions]["answer"])
        found.append(Rollout(i // completions, ids[i], tokens[:length], logps, ref, score))
    return found


@torch.no_grad()
def copy_weights(policy: Any, trained: Any) -> None:
    """The weights of a sharded module into the model that samples."""
    sharded = dict(trained.named_parameters())
    for name, weight in policy.named_parameters():
        weight.copy_(sharded[name].full_tensor())


def _logprobs(model: Any, ids: Tensor) -> Tensor:
    """[B, T - 1]: of each token after the first; what follows an end token is not looked at."""
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
