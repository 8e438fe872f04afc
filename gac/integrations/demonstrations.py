"""Tokenizes a dataset of expert answers, formatting prompts as the trainer does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gac.data.conversations import is_message, refuse_template_kwargs, split_conversation
from gac.data.encoding import RenderedText, chat_text, plain_text
from gac.data.encoding import encode as encode_texts
from gac.data.source import SourceRow, table_row
from gac.errors import require
from gac.rows import Row, count, loss_divisors
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
    """Tokenize one demonstration, with the tokens that `gac train` gives it.

    A plain-text completion ends with EOS. In a conversation, only the last message is trained on,
    which must be the assistant's; it has the tokens of the rendered conversation up to the
    template's end of the turn, because rollouts do not contain what follows.

    Args:
        row: prompt and completion (texts, or lists of messages), or messages; in a conversation,
            also `tools` and `chat_template_kwargs`.
        location: how errors refer to the row.
        tokenizer: a Hugging Face tokenizer with an EOS token.
        template: arguments of `apply_chat_template` that the row does not set.

    Returns:
        {"ids": token ids of prompt and completion, "start": length of the prompt}.

    Raises:
        ValueError: the row is empty or malformed, or its chat template does not render the prompt
            as the start of the conversation.
    """
    fields = table_row(row)
    if "completion" not in row:
        fields["prompt"], fields["completion"] = fields["messages"][:-1], fields["messages"][-1:]
    prompt, completion = fields["prompt"], fields["completion"]
    if not completion:
        raise ValueError(f"{location}: the completion {completion!r} is empty; remove the row")
    if isinstance(prompt, str) != isinstance(completion, str):
        raise ValueError(
            f"{location}: prompt is a {type(prompt).__name__}, but completion is a "
            f"{type(completion).__name__}: use texts for both, or lists of messages"
        )
    if isinstance(completion, str):
        refuse_template_kwargs(SourceRow(fields, location))
        text = plain_text(tokenizer, prompt, [completion])
    else:
        # the last message is trained on, whatever the division between prompt and completion
        whole = [*prompt, *completion]
        fields["prompt"], fields["completion"] = whole[:-1], whole[-1:]
        text = _conversation(fields, location, tokenizer, template)
    (ids,) = encode_texts(tokenizer, [text])
    if not ids.prompt:
        raise ValueError(f"{location}: the prompt {prompt!r} has no tokens; use a non-empty prompt")
    if not ids.demo or len(ids.demo) < 2:
        raise ValueError(f"{location}: the completion {completion!r} has no tokens; remove the row")
    return {"ids": [*ids.prompt, *ids.demo], "start": len(ids.prompt)}


def _conversation(
    fields: Mapping[str, Any],
    location: str,
    tokenizer: Any,
    template: Mapping[str, Any] | None,
) -> RenderedText:
    """Render a conversation whose `completion` is its last message."""
    (message,) = fields["completion"]
    if (role := message.get("role")) != "assistant":
        raise ValueError(
            f"{location}: the last message must come from the assistant, but its role is {role!r}"
        )
    if not message.get("content") and not message.get("tool_calls"):
        raise ValueError(f"{location}: the last message has no content; remove the row")
    row = split_conversation(SourceRow(fields, location), "prompt", "completion")
    demo = row.fields["completion"]
    demo = demo if is_message(demo) else [demo]
    names = "prompt", "completion"
    return chat_text(
        tokenizer, row, messages=row.fields["prompt"], demo=demo, fields=names, defaults=template
    )


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
