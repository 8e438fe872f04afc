"""A tiny model, its task, and sampling from it; shared by the examples for other trainers."""

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

LENGTH = 8  # characters per answer


class Rollout(NamedTuple):
    """One sampled answer, scored at temperature 1."""

    group: int  # index of the prompt
    prompt: Tensor  # [P] token ids
    response: Tensor  # [R] token ids, including the EOS token
    logps: Tensor  # [R] under the sampling policy
    ref_logps: Tensor  # [R] under the reference
    reward: float


def write(folder: Path) -> None:
    """Write a random model with its tokenizer (model/) and 256 demonstrations (demos.jsonl).

    The demonstrations are subtractions, some of which are wrong.
    """
    tokenizer = task.make_tokenizer()
    config = task.model_config(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    problems = task.rows(random.Random(1), ["-"] * 256, {"-": 0.3})
    pairs = [{"prompt": row["prompt"], "completion": row["solution"]} for row in problems]
    (folder / "demos.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def prompts(seed: int, count: int) -> list[dict[str, Any]]:
    """Prompts and answers, alternating additions and subtractions."""
    return task.rows(random.Random(f"prompts:{seed}"), ["+", "-"] * (count // 2))


def reward(completion: str, answer: str) -> float:
    """Fraction of the answer's characters that are correct."""
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / len(answer)


@torch.no_grad()
def sample(
    policy: Any, reference: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], completions: int
) -> list[Rollout]:
    """Sample `completions` answers per prompt, as a rollout engine would."""
    text = [row["prompt"] for row in rows for _ in range(completions)]
    ids = tokenizer(text, return_tensors="pt")["input_ids"]  # all prompts have the same length
    start = ids.shape[1]
    sequences = policy.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        max_new_tokens=LENGTH + 1,
    )
    logps, ref_logps = (_logprobs(m, sequences)[:, start - 1 :] for m in (policy, reference))
    rollouts = []
    for i, tokens in enumerate(sequences[:, start:]):
        ends = (tokens == tokenizer.eos_token_id).nonzero()
        length = int(ends[0]) + 1 if len(ends) else len(tokens)
        answer = tokenizer.decode(tokens[:length], skip_special_tokens=True)
        rollouts.append(
            Rollout(
                group=i // completions,
                prompt=ids[i],
                response=tokens[:length],
                logps=logps[i, :length],
                ref_logps=ref_logps[i, :length],
                reward=reward(answer, rows[i // completions]["answer"]),
            )
        )
    return rollouts


@torch.no_grad()
def copy_weights(policy: Any, trained: Any) -> None:
    """Copy the weights of a sharded module into the sampling model."""
    sharded = dict(trained.named_parameters())
    for name, weight in policy.named_parameters():
        weight.copy_(sharded[name].full_tensor())


def _logprobs(model: Any, ids: Tensor) -> Tensor:
    """Log-probs [B, T - 1] of all tokens after the first; those after an EOS token are not used."""
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
