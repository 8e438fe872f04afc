"""From a data set of expert answers to rows with token ids, as the trainer writes its prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gac.data.rows import Row, count, norms
from gac_kernels import LossSpec

COLUMNS = ({"prompt", "completion"}, {"messages"})


def check_columns(name: str, columns: Sequence[str]) -> None:
    """Raise ValueError unless rows with these columns are demonstrations."""
    if not any(wanted <= set(columns) for wanted in COLUMNS):
        raise ValueError(
            f"{name} has the columns {sorted(columns)}: give prompt and completion, or messages"
        )


def encode(
    row: Mapping[str, Any], place: str, tokenizer: Any, template: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """{"ids": prompt and completion, "start": length of the prompt} of one demonstration.

    A completion of plain text ends with EOS. Of a conversation the last message is learnt, which
    must be the assistant's; what a chat template writes after EOS is not, as no rollout has it.

    Args:
        row: prompt and completion (texts, or lists of messages), or messages.
        place: what errors call the row.
        tokenizer: a Hugging Face tokenizer with an EOS token.
        template: further keywords of `apply_chat_template`.

    Raises ValueError for a row that has nothing to learn from.
    """
    if "messages" in row and "completion" not in row:
        prompt, completion = row["messages"][:-1], row["messages"][-1:]
    else:
        prompt, completion = row["prompt"], row["completion"]
    if not completion:
        raise ValueError(f"{place} has the completion {completion!r}: remove the row")
    if isinstance(completion, str):
        head = list(tokenizer(prompt)["input_ids"])
        tail = list(tokenizer(completion, add_special_tokens=False)["input_ids"])
        if tail and tail[-1] != tokenizer.eos_token_id:
            tail.append(tokenizer.eos_token_id)
    else:
        head, tail = _conversation(prompt, completion, place, tokenizer, template or {})
    if not head:
        raise ValueError(f"{place} has the prompt {prompt!r}, which is no token: give it a text")
    if not tail:
        raise ValueError(f"{place} has a completion of no tokens, {completion!r}: remove the row")
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
        raise ValueError(f"{place} ends with a message by {role!r}: the last must be assistant's")
    if not completion[-1].get("content") and not completion[-1].get("tool_calls"):
        raise ValueError(f"{place} ends with a message without content: remove the row")
    keywords = {"tokenize": True, "return_dict": True, **template}
    head, whole = (
        list(tokenizer.apply_chat_template(turns, add_generation_prompt=asks, **keywords)[
            "input_ids"
        ])
        for turns, asks in ((prompt, True), ([*prompt, *completion], False))
    )  # fmt: skip
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
    """The Dataset of `encode`'s columns; `name` is what errors call `dataset`. Raises ValueError
    for other columns than a demonstration's and for the first bad row."""
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
    """The Dataset in a .jsonl or .parquet file, or in a folder written by `save_to_disk`."""
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
    """The row of `encode`'s result; advantage 1 is what SHAPED demonstrations are weighted by."""
    return Row(tuple(encoded["ids"]), encoded["start"], is_demo=True, advantage=1.0)


def demo_norm(rows: Sequence[Row], spec: LossSpec, ranks: int) -> float:
    """The `demo_norm` of a step with these demonstrations, whose gradients `ranks` average."""
    return norms(count(rows), spec).demo / ranks


def share(rows: Sequence[Row], part: int, parts: int) -> list[Row]:
    """The rows of micro-batch and rank number `part` of `parts`: every so-many-th one."""
    return list(rows[part::parts])
