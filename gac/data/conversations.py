"""Splits conversation rows into prompt and demonstration, and renders prompts as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .source import SourceRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MESSAGES, COMPLETION = "messages", "completion"
Message = Mapping[str, Any]


def split_conversation(row: SourceRow, prompt_field: str, demo_field: str | None) -> SourceRow:
    """Return the row with `prompt_field` and `demo_field` filled from `messages` or `completion`.

    The last message of `messages`, if it is the assistant's, is the demonstration; the messages
    before it are the prompt. Fields that the row has are not replaced.
    """
    fields = dict(row.fields)
    if fields.get(prompt_field) is None and fields.get(MESSAGES) is not None:
        messages = check_messages(row, MESSAGES)
        answered = messages[-1]["role"] == "assistant" and len(messages) > 1
        fields[prompt_field] = messages[:-1] if answered else messages
        if answered and demo_field is not None:
            fields.setdefault(demo_field, messages[-1]["content"])
    if demo_field is not None and fields.get(demo_field) is None and COMPLETION in fields:
        fields[demo_field] = fields.get(COMPLETION)
    if demo_field is not None and isinstance(fields.get(demo_field), list):
        messages = check_messages(replace(row, fields=fields), demo_field)
        if len(messages) != 1 or messages[0]["role"] != "assistant":
            row.fail(demo_field, "expected one assistant message")
        fields[demo_field] = messages[0]["content"]
    return replace(row, fields=fields)


def check_messages(row: SourceRow, field: str) -> Sequence[Message]:
    """The field's list of messages; raises DataError unless each has a role and text."""
    messages = row.fields[field]
    if not isinstance(messages, list) or not messages:
        row.fail(field, f"expected a list of messages, found {messages!r:.60}")
    for number, message in enumerate(messages, start=1):
        valid = isinstance(message, Mapping) and isinstance(message.get("content"), str)
        if not valid or not isinstance(message.get("role"), str):
            row.fail(
                field, f"message {number} needs `role` and `content`, both text: {message!r:.60}"
            )
    return messages


def render(
    tokenizer: PreTrainedTokenizerBase, row: SourceRow, messages: Sequence[Message], field: str
) -> str:
    """The prompt of a conversation in the tokenizer's chat template."""
    if not tokenizer.chat_template:
        row.fail(
            field,
            "a conversation needs a chat template, which the tokenizer does not have: set "
            "model.tokenizer to one that does, or give the prompt as text and set data.template",
        )
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # templates raise errors of their own, e.g. for unknown roles
        row.fail(field, f"the chat template rejects it ({' '.join(str(error).split())[:200]})")
    return str(text)
