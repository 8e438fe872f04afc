"""Splits conversation rows into prompt and demonstration, and renders them with a chat template."""

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
TOOLS, TEMPLATE_KWARGS = "tools", "chat_template_kwargs"
RENDERING = {  # arguments of `apply_chat_template` that are not for the template
    "add_generation_prompt",
    "continue_final_message",
    "conversation",
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
}
Message = Mapping[str, Any]


def split_conversation(row: SourceRow, prompt_field: str, demo_field: str | None) -> SourceRow:
    """Return the row with `prompt_field` and `demo_field` filled from `messages` or `completion`.

    The last message of `messages`, if it is the assistant's, is the demonstration; the messages
    before it are the prompt. Fields that the row has are not replaced. A demonstration becomes
    text, unless its message has more than `content`, e.g. reasoning or tool calls: then it remains
    a message, which only a chat template can render.
    """
    fields = dict(row.fields)
    for name, kind in ((MESSAGES, list), (TOOLS, list), (TEMPLATE_KWARGS, dict)):
        if name in fields:
            fields[name] = _from_json(fields[name], kind)
    row = replace(row, fields=fields)
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
    if is_message(demo):
        demo = fields[demo_field or ""] = [demo]
    if demo_field is not None and isinstance(demo, list) and not is_turns(demo):
        messages = check_messages(replace(row, fields=fields), demo_field)
        if len(messages) != 1 or messages[0]["role"] != "assistant":
            row.fail(demo_field, "expected one assistant message")
        message = messages[0]
        fields[demo_field] = message["content"] if {*message} == {"role", "content"} else message
    return replace(row, fields=fields)


def _from_json(value: Any, kind: type) -> Any:
    """`value`, decoded if it is the JSON text of a `kind`, as in a CSV file."""
    if isinstance(value, str):
        with contextlib.suppress(json.JSONDecodeError):
            decoded = json.loads(value)
            return decoded if isinstance(decoded, kind) else value
    return value


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


def is_message(demo: object) -> TypeGuard[Message]:
    """Whether a demonstration is a message that only a chat template can render."""
    return isinstance(demo, Mapping) and isinstance(demo.get("role"), str)


def calls_tools(message: Message) -> bool:
    """Whether the assistant's `message` has tool calls."""
    return bool(message.get("tool_calls"))


def check_messages(row: SourceRow, field: str) -> list[Message]:
    """The field's messages, with text as their content; raises DataError if one is invalid."""
    messages = row.fields[field]
    if not isinstance(messages, list) or not messages:
        row.fail(field, f"expected a list of messages, found {messages!r:.60}")
    return [_plain(row, field, *numbered) for numbered in enumerate(messages, start=1)]


def _plain(row: SourceRow, field: str, number: int, message: Any) -> Message:
    """The message without null fields, its text parts joined, and its tool arguments as mappings.

    Without content, a message with tool calls has an empty text.
    """
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
    result = {name: value for name, value in message.items() if value is not None}
    result["content"] = content
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
    options: Mapping[str, Any] | None = None,
) -> str:
    """A conversation in the tokenizer's chat template, up to the start of the next response.

    A system message that the template refuses becomes the start of the first user message.

    answered: the last message is the response.
    options: arguments of the template, as from `template_options`.
    """
    options = dict(template_options(row) if options is None else options)
    if not (options.get("chat_template") or tokenizer.chat_template):
        row.fail(
            field,
            "a conversation needs a chat template, which the tokenizer does not have: set "
            "model.tokenizer to one that does, or give the prompt as text and set data.template",
        )
    chat: list[Any] = [*messages]  # transformers' annotation leaves out tool calls
    options["add_generation_prompt"] = not answered
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, **options))
    except Exception as error:  # templates raise errors of their own, e.g. for unknown roles
        if [message["role"] for message in messages[:2]] == ["system", "user"]:
            first, second, *rest = messages
            merged = {**second, "content": f"{first['content']}\n\n{second['content']}"}
            remaining = [merged, *rest]
            return render(tokenizer, row, remaining, field, answered=answered, options=options)
        row.fail(field, f"the chat template rejects it ({' '.join(str(error).split())[:200]})")


def template_options(row: SourceRow, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The arguments of a row's chat template: `tools`, and those of `chat_template_kwargs`.

    defaults: for all rows; the row's own values replace them.
    """
    own = row.fields.get(TEMPLATE_KWARGS)
    own = {} if own is None else own
    if not isinstance(own, Mapping):
        row.fail(TEMPLATE_KWARGS, f"expected a mapping of template arguments, found {own!r:.60}")
    if refused := sorted(RENDERING & own.keys()):
        row.fail(TEMPLATE_KWARGS, f"{refused[0]!r} is not an argument of a template: remove it")
    tools = row.fields.get(TOOLS)
    if tools is not None and not isinstance(tools, list):
        row.fail(TOOLS, f"expected a list of tools, found {tools!r:.60}")
    return {**(defaults or {}), **({TOOLS: tools} if tools is not None else {}), **own}


def refuse_template_kwargs(row: SourceRow) -> None:
    """Raise DataError for template arguments of a row that no chat template formats."""
    if row.fields.get(TEMPLATE_KWARGS) is not None:
        row.fail(
            TEMPLATE_KWARGS,
            "has no effect on a text prompt without a chat template: give the prompt as messages "
            "(in gac train, or set data.chat=true), or remove the field",
        )
