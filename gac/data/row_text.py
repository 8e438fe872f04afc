"""Turns rows into text: prompt templates, chat templates and demonstrations."""

from __future__ import annotations

import logging
import string
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gac.errors import ConfigError

from .config import DataConfig
from .conversations import Message, demo_texts, is_message, refuse_template_kwargs
from .encoding import RenderedText, chat_text, plain_text
from .source import SourceRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def row_text(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, row: SourceRow, *, required: bool
) -> RenderedText:
    """The row's prompt and demonstration as text.

    required: whether the row must have a demonstration.
    """
    demo = _demo(config, row, required=required)
    messages = _messages(config, row)
    fields = config.prompt_field, config.demo_field or ""
    if messages and config.template is not None:
        row.fail(config.prompt_field, "is a list of messages: data.template needs a text")
    if not messages:
        text = templated_prompt(config, row)
        if not uses_chat(config, tokenizer):
            _refuse_chat(config, row, demo)
            return plain_text(tokenizer, text, [] if isinstance(demo, Mapping) else demo)
        system = [] if config.system is None else [{"role": "system", "content": config.system}]
        messages = [*system, {"role": "user", "content": text}]
    return chat_text(tokenizer, row, messages=messages, demo=demo, fields=fields)


def uses_chat(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether text prompts are formatted with the tokenizer's chat template.

    If `config.chat` is None, the decision is logged, once for each tokenizer.
    """
    used, message = chat_decision(config, bool(getattr(tokenizer, "chat_template", None)))
    logged = tokenizer.__dict__.setdefault("chat_decisions", set())
    if message and message not in logged:
        logged.add(message)
        logger.info("%s", message)
    return used


def chat_decision(config: DataConfig, has_template: bool) -> tuple[bool, str]:
    """Whether text prompts are formatted with the chat template, and a message about a default.

    has_template: whether the tokenizer has a chat template.

    Raises:
        ConfigError: the configuration requires a chat template, but there is none.
    """
    if config.chat is not None:
        if config.chat and not has_template:
            raise ConfigError(
                "data.chat=true: the tokenizer has no chat template: set data.chat=false, or "
                "model.tokenizer to one that has one"
            )
        return config.chat, ""
    if not has_template:
        decision = "are used as they are: the tokenizer has no chat template"
    elif config.template is not None:
        decision = "get no chat template, because data.template is set; data.chat=true adds it"
    else:
        decision = "are formatted with the tokenizer's chat template; data.chat=false turns it off"
    return has_template and config.template is None, f"data.chat=null: text prompts {decision}"


def _refuse_chat(config: DataConfig, row: SourceRow, demo: Message | list[str]) -> None:
    """Raise an error for what acts only in a chat template."""
    if config.system is not None:
        raise ConfigError(f"data.system={config.system!r}: a text prompt needs data.chat=true")
    if is_message(demo):
        names = ", ".join(sorted({*demo} - {"role", "content"}))
        row.fail(config.demo_field or "", f"a message with {names} needs data.chat=true")
    refuse_template_kwargs(row)


def templated_prompt(config: DataConfig, row: SourceRow) -> str:
    """The prompt of a row without messages, in the template."""
    text = row.text(config.prompt_field, key="prompt_field")
    assert text is not None  # `row.text` raises if the field is missing
    if config.template is None:
        return text
    return _fill(config.template, row, {**_printable(config, row), "prompt": text})


def _messages(config: DataConfig, row: SourceRow) -> list[Any]:
    """The messages of a conversation, with the system prompt; empty for a prompt that is text."""
    messages = row.fields.get(config.prompt_field)
    if not isinstance(messages, list):
        return []
    system = config.system is not None and messages[0]["role"] != "system"
    return [*([{"role": "system", "content": config.system}] if system else []), *messages]


def _demo(config: DataConfig, row: SourceRow, *, required: bool) -> Message | list[str]:
    """The demonstration: a message, or the texts of its turns; [] if there is none."""
    if config.demo_field is None:
        return []
    if is_message(message := row.fields.get(config.demo_field)):
        if config.demo_template is not None:
            extra = ", ".join(sorted({*message} - {"role", "content"}))
            row.fail(config.demo_field, f"has {extra}: data.demo_template needs a text")
        return message
    turns = demo_texts(row, config.demo_field, required=required)
    if config.demo_template is None:
        return turns
    if len(turns) > 1:
        row.fail(config.demo_field, "has several turns: data.demo_template needs a single text")
    values = _printable(config, row)
    return [_fill(config.demo_template, row, {**values, "demo": text}) for text in turns]


def _printable(config: DataConfig, row: SourceRow) -> dict[str, Any]:
    """The row's fields for a template: choices get letters, other lists have an item per line."""
    shown = dict(row.fields)
    for name, value in row.fields.items():
        if isinstance(value, list):
            lines = [str(item) for item in value]
            if name == config.choices_field:
                if len(lines) > len(string.ascii_uppercase):
                    supported = len(string.ascii_uppercase)
                    row.fail(name, f"has {len(lines)} choices, but only {supported} are supported")
                pairs = zip(string.ascii_uppercase, lines, strict=False)
                lines = [f"({letter}) {line}" for letter, line in pairs]
            shown[name] = "\n".join(lines)
    return shown


def _fill(template: str, row: SourceRow, values: Mapping[str, Any]) -> str:
    try:
        return template.format_map({k: value for k, value in values.items() if value is not None})
    except KeyError as error:
        name = str(error.args[0])
        state = "is null" if name in values else "is missing"
        row.fail(name, f"{state}, but the template {template!r:.80} uses it")
    except (AttributeError, IndexError, ValueError) as error:  # {x.y}, {0}, {x:d}
        raise ConfigError(f"the template {template!r:.80} cannot be filled: {error}") from error
