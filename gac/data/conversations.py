"""Splits conversation rows into prompt and demonstration, and renders prompts as text."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

from .source import SourceRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MESSAGES, COMPLETION = "messages", "completion"
Message = Mapping[str, Any]


def split_conversation(row: SourceRow, prompt_field: str, demo_field: str | None) -> SourceRow:
    """Return the row with `prompt_field` and `demo_field` filled from `messages` or `completion`.

    The last message of `messages`, if it is the assistant's, is the demonstration; the messages
    before it are the prompt. Fields that the row has are not replaced. A demonstration that calls
    tools remains a message, which `demonstration` renders.
    """
    fields = dict(row.fields)
    if fields.get(prompt_field) is None and fields.get(MESSAGES) is not None:
        messages = check_messages(row, MESSAGES)
        answered = messages[-1]["role"] == "assistant" and len(messages) > 1
        fields[prompt_field] = messages[:-1] if answered else messages
        if answered and demo_field is not None and fields.get(demo_field) is None:
            fields[demo_field] = [messages[-1]]
    elif isinstance(fields.get(prompt_field), list):
        fields[prompt_field] = check_messages(row, prompt_field)
    if demo_field is not None and fields.get(demo_field) is None and COMPLETION in fields:
        fields[demo_field] = fields.get(COMPLETION)
    demo = fields.get(demo_field or "")
    if demo_field is not None and isinstance(demo, list) and not is_turns(demo):
        messages = check_messages(replace(row, fields=fields), demo_field)
        if len(messages) != 1 or messages[0]["role"] != "assistant":
            row.fail(demo_field, "expected one assistant message")
        message = messages[0]
        fields[demo_field] = message if calls_tools(message) else message["content"]
    return replace(row, fields=fields)


def is_turns(demo: object) -> TypeGuard[list[str]]:
    """Whether a demonstration is a list of texts, the policy's and its environment's in turns."""
    return isinstance(demo, list) and all(isinstance(text, str) for text in demo)


def demo_texts(row: SourceRow, field: str, *, required: bool) -> list[str]:
    """The texts of a demonstration: one, several turns, or none."""
    turns = row.fields.get(field)
    if not is_turns(turns):
        text = row.text(field, required=required, key="demo_field")
        return [] if text is None else [text]
    if len(turns) % 2 == 0:
        row.fail(field, f"has {len(turns)} turns: the first and the last must be the policy's")
    return [str(replace(row, fields={field: turn}).text(field)) for turn in turns]


def calls_tools(message: object) -> TypeGuard[Message]:
    """Whether `message` is an assistant's message with tool calls."""
    return isinstance(message, Mapping) and bool(message.get("tool_calls"))


def check_messages(row: SourceRow, field: str) -> list[Message]:
    """The field's messages, with text as their content; raises DataError if one is invalid."""
    messages = row.fields[field]
    if not isinstance(messages, list) or not messages:
        row.fail(field, f"expected a list of messages, found {messages!r:.60}")
    return [_plain(row, field, *numbered) for numbered in enumerate(messages, start=1)]


def _plain(row: SourceRow, field: str, number: int, message: Any) -> Message:
    """The message with its text parts joined, and the arguments of its tool calls as mappings."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        row.fail(field, f"message {number} needs a `role` and `content`: {message!r:.60}")
    content = message.get("content")
    if isinstance(content, list):
        kinds = [x.get("type") if isinstance(x, Mapping) else type(x).__name__ for x in content]
        if other := [kind for kind in kinds if kind != "text"]:
            row.fail(field, f"message {number} has a part of type {other[0]!r}: use text only")
        texts = [part.get("text") for part in content]
        content = "".join(texts) if is_turns(texts) else texts
    if content is None and calls_tools(message):
        content = ""
    if not isinstance(content, str):
        row.fail(field, f"message {number} needs `content` as text: {message!r:.60}")
    result = {**message, "content": content}
    if calls_tools(message):
        result["tool_calls"] = [_decoded(call) for call in message["tool_calls"]]
    return result


def _decoded(call: Any) -> Any:
    """A tool call as chat templates expect it: OpenAI's format has the arguments as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    with contextlib.suppress(json.JSONDecodeError):  # then the text is the best there is
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    return call


def render(
    tokenizer: PreTrainedTokenizerBase,
    row: SourceRow,
    messages: Sequence[Message],
    field: str,
    *,
    answered: bool = False,
) -> str:
    """A conversation in the tokenizer's chat template, up to the start of the next response.

    answered: the last message is the response. A system message that the template refuses becomes
    the start of the first user message. A field `tools` of the row is passed to the template.
    """
    if not tokenizer.chat_template:
        row.fail(
            field,
            "a conversation needs a chat template, which the tokenizer does not have: set "
            "model.tokenizer to one that does, or give the prompt as text and set data.template",
        )
    chat: list[Any] = [*messages]  # transformers' annotation leaves out tool calls
    options: Any = {"tools": row.fields.get("tools"), "add_generation_prompt": not answered}
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, **options))
    except Exception as error:  # templates raise errors of their own, e.g. for unknown roles
        if [message["role"] for message in messages[:2]] == ["system", "user"]:
            first, second, *rest = messages
            merged = {**second, "content": f"{first['content']}\n\n{second['content']}"}
            return render(tokenizer, row, [merged, *rest], field, answered=answered)
        row.fail(field, f"the chat template rejects it ({' '.join(str(error).split())[:200]})")


def demonstration(
    tokenizer: PreTrainedTokenizerBase,
    row: SourceRow,
    messages: Sequence[Message],
    message: Message,
    field: str,
) -> str:
    """The text that the chat template writes for the response `message`, up to its end token."""
    from gac.models.causal_lm import end_of_turn

    prompt = render(tokenizer, row, messages, field)
    text = render(tokenizer, row, [*messages, message], field, answered=True)
    if not text.startswith(prompt):
        row.fail(field, "the chat template writes the prompt differently before a tool call")
    end = str(tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer)))
    return text[len(prompt) :].strip().removesuffix(end)
