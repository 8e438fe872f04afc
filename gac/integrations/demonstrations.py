"""Tokenizes a dataset of expert answers, formatting prompts as the trainer does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gac.data.rows import Row, count, loss_divisors
from gac.errors import require
from gac_kernels import LossSpec

COLUMNS = ({"prompt", "completion"}, {"messages"})


def check_columns(name: str, columns: Sequence[str]) -> None:
    """Raise ValueError unless these are the columns of a demonstration dataset."""
    if not any(required <= set(columns) for required in COLUMNS):
        raise ValueError(
            f"{name} has the columns {sorted(columns)}: expected prompt and completion, or messages"
        )


def encode(
    row: Mapping[str, Any], location: str, tokenizer: Any, template: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Tokenize one demonstration.

    A plain-text completion ends with EOS. In a conversation, only the last message is trained on,
    which must be the assistant's. Anything that the chat template adds after EOS is dropped,
    because rollouts do not contain it.

    Args:
        row: prompt and completion (texts, or lists of messages), or messages.
        location: how errors refer to the row.
        tokenizer: a Hugging Face tokenizer with an EOS token.
        template: additional keyword arguments for `apply_chat_template`.

    Returns:
        {"ids": token ids of prompt and completion, "start": length of the prompt}.

    Raises:
        ValueError: the row is empty or malformed.
    """
    if "completion" not in row:
        prompt, completion = row["messages"][:-1], row["messages"][-1:]
    else:
        prompt, completion = row["prompt"], row["completion"]
    if not completion:
        raise ValueError(f"{location}: the completion {completion!r} is empty; remove the row")
    if isinstance(prompt, str) != isinstance(completion, str):
        raise ValueError(
            f"{location}: prompt is a {type(prompt).__name__}, but completion is a "
            f"{type(completion).__name__}: use texts for both, or lists of messages"
        )
    if isinstance(completion, str):
        prompt_ids = list(tokenizer(prompt)["input_ids"])
        target_ids = list(tokenizer(completion, add_special_tokens=False)["input_ids"])
        if target_ids and target_ids[-1] != tokenizer.eos_token_id:
            target_ids.append(tokenizer.eos_token_id)
    else:
        prompt_ids, target_ids = _conversation(
            [*prompt, *completion], location, tokenizer, template or {}
        )
    if not prompt_ids:
        raise ValueError(f"{location}: the prompt {prompt!r} has no tokens; use a non-empty prompt")
    if not target_ids:
        raise ValueError(f"{location}: the completion {completion!r} has no tokens; remove the row")
    return {"ids": prompt_ids + target_ids, "start": len(prompt_ids)}


def _conversation(
    messages: list[Any], location: str, tokenizer: Any, template: Mapping[str, Any]
) -> tuple[list[int], list[int]]:
    """Tokenize a conversation: return the ids before the last assistant message, and its ids."""
    role = messages[-1].get("role")
    if role != "assistant":
        raise ValueError(
            f"{location}: the last message must come from the assistant, but its role is {role!r}"
        )
    if not messages[-1].get("content") and not messages[-1].get("tool_calls"):
        raise ValueError(f"{location}: the last message has no content; remove the row")
    keywords = {"tokenize": True, "return_dict": True, **template}

    def token_ids(messages: list[Any], *, add_prompt: bool) -> list[int]:
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_prompt, **keywords
        )
        return list(encoded["input_ids"])

    prompt_ids = token_ids(messages[:-1], add_prompt=True)
    all_ids = token_ids(messages, add_prompt=False)
    if all_ids[: len(prompt_ids)] != prompt_ids:
        raise ValueError(
            f"{location}: the chat template formats the prompt differently alone and with "
            "the completion; use a plain-text prompt and completion"
        )
    target_ids = all_ids[len(prompt_ids) :]
    if tokenizer.eos_token_id in target_ids:
        target_ids = target_ids[: len(target_ids) - target_ids[::-1].index(tokenizer.eos_token_id)]
    return prompt_ids, target_ids


def tokenized(
    dataset: Any,
    name: str,
    tokenizer: Any,
    template: Mapping[str, Any] | None = None,
    env_tools: Mapping[Any, list[Any]] | None = None,
) -> Any:
    """Tokenize a Dataset with `encode`.

    Args:
        dataset: rows with prompt and completion, or messages.
        name: how errors refer to the dataset.
        tokenizer: a Hugging Face tokenizer with an EOS token.
        template: additional keyword arguments for `apply_chat_template`.
        env_tools: the tools of each environment, if the column `environment` selects one.

    Raises:
        ValueError: unexpected columns, or an invalid row (the first one is named).
    """
    check_columns(name, dataset.column_names)
    return dataset.map(
        _encode_numbered,
        with_indices=True,
        fn_kwargs={
            "name": name,
            "tokenizer": tokenizer,
            "template": template,
            "env_tools": env_tools,
        },
        remove_columns=dataset.column_names,
        desc="Tokenizing demonstrations",
    )


def _encode_numbered(
    row: Mapping[str, Any],
    index: int,
    name: str,
    tokenizer: Any,
    template: Mapping[str, Any] | None,
    env_tools: Mapping[Any, list[Any]] | None,
) -> dict[str, Any]:
    if env_tools is not None:
        key, chosen = f"{name}[{index}]: environment", row.get("environment")
        require(chosen in env_tools, key, chosen, f"one of {list(env_tools)}")
        template = {**(template or {}), "tools": env_tools[chosen] or None}
    return encode(row, f"{name}[{index}]", tokenizer, template)


def read(path: str) -> Any:
    """Load a Dataset from a .jsonl or .parquet file, or from a folder written by `save_to_disk`."""
    from datasets import Dataset, load_from_disk

    readers = {".jsonl": Dataset.from_json, ".parquet": Dataset.from_parquet}
    if not Path(path).exists():
        raise FileNotFoundError(f"demo_path={path!r} does not exist; use the path of a dataset")
    if Path(path).is_dir():
        return load_from_disk(path)
    if Path(path).suffix not in readers:
        raise ValueError(f"demo_path={path!r}: use a .jsonl or .parquet file, or a saved Dataset")
    return readers[Path(path).suffix](path)


def row_of(encoded: Mapping[str, Any]) -> Row:
    """Convert the result of `encode` to a Row with advantage 1, which DemoWeight.SHAPED needs."""
    return Row(tuple(encoded["ids"]), encoded["start"], is_demo=True, advantage=1.0)


def demo_norm(rows: Sequence[Row], spec: LossSpec, ranks: int) -> float:
    """Divisor of the loss of a step's demonstrations; gradients are later averaged over `ranks`."""
    return loss_divisors(count(rows), spec).demo / ranks
