"""Tokenizes a data set of expert answers, formatting prompts as the trainer does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gac.data.rows import Row, count, norms
from gac_kernels import LossSpec

COLUMNS = ({"prompt", "completion"}, {"messages"})


def check_columns(name: str, columns: Sequence[str]) -> None:
    """Raise ValueError unless these are the columns of a demonstration data set."""
    if not any(wanted <= set(columns) for wanted in COLUMNS):
        raise ValueError(
            f"{name} has the columns {sorted(columns)}: expected prompt and completion, or messages"
        )


def encode(
    row: Mapping[str, Any], place: str, tokenizer: Any, template: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Tokenize one demonstration; returns {"ids": prompt and completion, "start": length of the
    prompt}.

    A plain-text completion ends with EOS. In a conversation, the completion is the last message,
    which must be the assistant's. Anything that the chat template adds after EOS is dropped,
    because rollouts do not contain it.

    Args:
        row: prompt and completion (texts, or lists of messages), or messages.
        place: how errors refer to the row.
        tokenizer: a Hugging Face tokenizer with an EOS token.
        template: additional keyword arguments for `apply_chat_template`.

    Raises ValueError for an empty or malformed row.
    """
    if "messages" in row and "completion" not in row:
        prompt, completion = row["messages"][:-1], row["messages"][-1:]
    else:
        prompt, completion = row["prompt"], row["completion"]
    if not completion:
        raise ValueError(f"{place}: the completion {completion!r} is empty; remove the row")
    if isinstance(completion, str):
        head = list(tokenizer(prompt)["input_ids"])
        tail = list(tokenizer(completion, add_special_tokens=False)["input_ids"])
        if tail and tail[-1] != tokenizer.eos_token_id:
            tail.append(tokenizer.eos_token_id)
    else:
        head, tail = _conversation(prompt, completion, place, tokenizer, template or {})
    if not head:
        raise ValueError(f"{place}: the prompt {prompt!r} has no tokens; use a non-empty prompt")
    if not tail:
        raise ValueError(f"{place}: the completion {completion!r} has no tokens; remove the row")
    return {"ids": head + tail, "start": len(head)}


def _conversation(
    prompt: list[Any],
    completion: list[Any],
    place: str,
    tokenizer: Any,
    template: Mapping[str, Any],
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation up to the assistant's turn, and of that turn."""
    role = completion[-1].get("role")
    if role != "assistant":
        raise ValueError(f"{place}: the last message has role {role!r}, expected 'assistant'")
    if not completion[-1].get("content") and not completion[-1].get("tool_calls"):
        raise ValueError(f"{place}: the last message has no content; remove the row")
    keywords = {"tokenize": True, "return_dict": True, **template}
    head, whole = (
        list(
            tokenizer.apply_chat_template(turns, add_generation_prompt=asks, **keywords)[
                "input_ids"
            ]
        )
        for turns, asks in ((prompt, True), ([*prompt, *completion], False))
    )
    if whole[: len(head)] != head:
        raise ValueError(
            f"{place}: the chat template does not begin the whole conversation with its prompt: "
            "give prompt and completion as plain texts"
        )
    tail = whole[len(head) :]
    if tokenizer.eos_token_id in tail:
        tail = tail[: len(tail) - tail[::-1].index(tokenizer.eos_token_id)]
    return head, tail


def tokenized(
    dataset: Any, name: str, tokenizer: Any, template: Mapping[str, Any] | None = None
) -> Any:
    """Tokenize a Dataset with `encode`. `name` is how errors refer to `dataset`. Raises ValueError
    for unexpected columns and for the first invalid row.
    """
    check_columns(name, dataset.column_names)
    return dataset.map(
        _encode_numbered,
        with_indices=True,
        fn_kwargs={"name": name, "tokenizer": tokenizer, "template": template},
        remove_columns=dataset.column_names,
        desc="Tokenizing demonstrations",
    )


def _encode_numbered(
    row: Mapping[str, Any],
    index: int,
    name: str,
    tokenizer: Any,
    template: Mapping[str, Any] | None,
) -> dict[str, Any]:
    return encode(row, f"{name}[{index}]", tokenizer, template)


def read(path: str) -> Any:
    """Load a Dataset from a .jsonl or .parquet file, or from a folder written by `save_to_disk`."""
    from datasets import Dataset, load_from_disk

    kinds = {".jsonl": Dataset.from_json, ".parquet": Dataset.from_parquet}
    if not Path(path).exists():
        raise FileNotFoundError(f"demo_path={path!r} does not exist")
    if Path(path).is_dir():
        return load_from_disk(path)
    if Path(path).suffix not in kinds:
        raise ValueError(f"demo_path={path!r}: use a .jsonl or .parquet file, or a saved Dataset")
    return kinds[Path(path).suffix](path)


def row_of(encoded: Mapping[str, Any]) -> Row:
    """Convert the result of `encode` to a Row. Its advantage of 1 is the weight for SHAPED
    demonstrations.
    """
    return Row(tuple(encoded["ids"]), encoded["start"], is_demo=True, advantage=1.0)


def demo_norm(rows: Sequence[Row], spec: LossSpec, ranks: int) -> float:
    """The `demo_norm` of a step with these demonstrations when gradients are averaged over `ranks`."""
    return norms(count(rows), spec).demo / ranks


def share(rows: Sequence[Row], part: int, parts: int) -> list[Row]:
    """Every `parts`-th row, starting at index `part`."""
    return list(rows[part::parts])
