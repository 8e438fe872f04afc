"""Tokenizes prompts with their demonstrations, as the chat template renders them.

All trainers use this module, so that a demonstration has the same tokens in each of them: those of
the whole rendered conversation, cut after the end of the response. They begin with the prompt that
rollouts continue.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from gac.errors import DataError

from .conversations import Message, is_turns, render, template_options
from .source import SourceRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
ANCHORS = ("\n", "0", ".")  # texts after which a word may continue without a word boundary
REASONING = {"reasoning", "reasoning_content", "thinking"}  # fields of a message
SHOWN = 60  # characters of a text in an error


class RenderedText(NamedTuple):
    """The text of a prompt and of its demonstration."""

    prompt: str
    turns: tuple[str, ...] = ()
    """Texts of the demonstration, alternately the policy's and its environment's; the last one
    includes the template's end of the turn. (): no demonstration."""
    end: int | None = None
    """The token that ends the demonstration. It is appended unless the text ends with it."""
    special: bool = False
    """Whether the tokenizer adds its special tokens, e.g. BOS; a chat template writes them."""


class EncodedText(NamedTuple):
    """Token ids of a prompt and of its demonstration."""

    prompt: tuple[int, ...]
    demo: tuple[int, ...] | None
    demo_mask: tuple[bool, ...] = ()
    """Whether each token of `demo` has a loss; (): all do."""


class UnrenderableDemo(DataError):
    """The chat template does not render this response after this prompt."""


def plain_text(
    tokenizer: PreTrainedTokenizerBase, prompt: str, turns: Sequence[str] = ()
) -> RenderedText:
    """The texts of a prompt and a demonstration, which ends with EOS, without a chat template."""
    if not turns:
        return RenderedText(prompt, special=True)
    _require_eos(tokenizer)
    turns = [*turns[:-1], _without_end(turns[-1], _end_texts(tokenizer, {}).values())]
    return RenderedText(prompt, tuple(turns), tokenizer.eos_token_id, special=True)


def _require_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no EOS token, which demonstrations need at their end")


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    row: SourceRow,
    messages: Sequence[Message],
    demo: Message | Sequence[str] | None,
    fields: tuple[str, str],
    defaults: Mapping[str, Any] | None = None,
) -> RenderedText:
    """Render a prompt and its demonstration with the chat template.

    Args:
        tokenizer: a tokenizer with a chat template.
        row: the row, for errors, its `tools` and its `chat_template_kwargs`.
        messages: the prompt.
        demo: the assistant's message, or the texts of its turns; None or empty: no demonstration.
        fields: the row's fields with the prompt and the demonstration, for errors.
        defaults: arguments of the template that the row does not set.

    Raises:
        UnrenderableDemo: the prompt is not the start of the rendered conversation.
        DataError: the template rejects the messages.
    """
    options = template_options(row, defaults)
    ends = _end_texts(tokenizer, options)
    messages = [_ended_once(message, ends.values()) for message in messages]
    prompt = render(tokenizer, row, messages, fields[0], options=options)
    if not demo:
        return RenderedText(prompt)
    _require_eos(tokenizer)
    turns = list(demo) if is_turns(demo) else []
    answer: Any = {"role": "assistant", "content": "".join(turns)} if turns else demo
    answer = _ended_once(answer, ends.values())
    whole = render(tokenizer, row, [*messages, answer], fields[1], answered=True, options=options)
    if not whole.startswith(prompt):
        _fail_prefix(row, fields[1], prompt, whole)
    text, end = _cut(whole[len(prompt) :], answer["content"], ends)
    for name in REASONING & answer.keys():
        if isinstance(answer[name], str) and answer[name].strip() not in whole:
            _warn_unwritten(name)
    if len(turns) > 1:
        return RenderedText(prompt, _split_turns(row, fields[1], text, turns), end)
    return RenderedText(prompt, (text,), end)


@functools.cache  # once per run
def _warn_unwritten(name: str) -> None:
    logger.warning(
        "the chat template does not write the %s of some demonstrations, so it is not trained: "
        "put it into their content, or set model.tokenizer to one whose template writes it",
        name,
    )


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[RenderedText]) -> list[EncodedText]:
    """Tokenize the prompts, and each demonstration in the context of its prompt."""
    encoded = [iter(_tokenize(tokenizer, kind, texts)) for kind in (False, True)]
    return [_encoded(tokenizer, text, *next(encoded[text.special])) for text in texts]


def _tokenize(
    tokenizer: PreTrainedTokenizerBase, special: bool, texts: Iterable[RenderedText]
) -> Iterable[tuple[list[int], list[int]]]:
    """Token ids of each prompt, and of the prompt with the first turn of its demonstration."""
    own = [text for text in texts if text.special is special]
    both = [[x.prompt for x in own], [x.prompt + x.turns[0] for x in own if x.turns]]
    prompts, wholes = (
        tokenizer(part, add_special_tokens=special)["input_ids"] if part else [] for part in both
    )
    rest = iter(wholes)
    return [(prompt, next(rest) if x.turns else []) for x, prompt in zip(own, prompts, strict=True)]


def _encoded(
    tokenizer: PreTrainedTokenizerBase, text: RenderedText, prompt: list[int], whole: list[int]
) -> EncodedText:
    """The tokens of `text`; `whole` are those of the prompt with the first turn."""
    if not text.turns:
        return EncodedText(tuple(prompt), None)
    before, ids, turns = text.prompt, list(prompt), []
    for i, turn in enumerate(text.turns):
        if i > 0:
            whole = tokenizer(before + turn, add_special_tokens=text.special)["input_ids"]
        if whole[: len(ids)] == ids:
            tokens = whole[len(ids) :]
        else:  # a token would span the end of the prompt, which rollouts continue
            tokens = _continuation(tokenizer, turn, ids, whole)
        turns.append(tokens)
        ids, before = ids + tokens, before + turn
    if turns[-1][-1:] != [text.end]:
        assert text.end is not None
        turns[-1].append(text.end)
    own = [i % 2 == 0 for i, tokens in enumerate(turns) for _ in tokens]
    demo = tuple(itertools.chain(*turns))
    return EncodedText(tuple(prompt), demo, () if all(own) else tuple(own))


def _continuation(
    tokenizer: PreTrainedTokenizerBase, text: str, before: list[int], whole: list[int]
) -> list[int]:
    """Token ids of `text` after the ids `before`, where the ids of both texts are `whole`.

    Some tokenizers put a word boundary before the first word of a text. It does not belong here,
    and is absent if the word follows one of the ANCHORS.
    """

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    expected, alone = decode(whole), tokenizer(text, add_special_tokens=False)["input_ids"]
    for anchor in ("", tokenizer.eos_token, *ANCHORS):
        first, both = (
            tokenizer(x, add_special_tokens=False)["input_ids"] if x else []
            for x in (anchor, f"{anchor}{text}")
        )
        ids = both[len(first) :]
        if both[: len(first)] == first and decode(before + ids) == expected:
            return ids
    return alone


def _end_texts(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> Mapping[int, str]:
    """The tokens that may end a response, with their texts; first, that of the chat template."""
    stops = tuple(getattr(tokenizer, "model_stops", None) or ())
    known = repr(getattr(tokenizer, "chat_template", None)), tokenizer.eos_token_id, stops
    return _known_ends(tokenizer, options.get("chat_template"), known)


@functools.lru_cache(maxsize=16)  # the same for all rows; finding them needs a rendering
def _known_ends(
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    known: tuple[str, int | None, tuple[int, ...]],
) -> Mapping[int, str]:
    from gac.models.chat import end_of_turn

    _, eos, stops = known
    ends = [end_of_turn(tokenizer, template), eos, *stops]
    return {end: str(tokenizer.convert_ids_to_tokens(end)) for end in ends if end is not None}


def _ended_once(message: Message, ends: Iterable[str]) -> Message:
    """The message without end tokens at the end of its content; the template writes its own."""
    content = message.get("content")
    if message["role"] != "assistant" or not isinstance(content, str):
        return message
    return {**message, "content": _without_end(content, ends)}


def _without_end(text: str, ends: Iterable[str]) -> str:
    """`text` without end tokens at its end."""
    while True:
        bare = text.rstrip()
        end = next((end for end in ends if bare.endswith(end)), None)
        if end is None:
            return text
        text = bare.removesuffix(end)


def _cut(text: str, content: str, ends: Mapping[int, str]) -> tuple[str, int]:
    """Cut a rendered response after its end token, which is also returned.

    Rollouts do not contain what a template writes after it. If the template writes no end token,
    the text is not cut.
    """
    last = max(text.rfind(end) for end in ends.values())
    body = _without_end(text[: max(last, 0)], ends.values())
    # an end token inside of the content is not the template's
    if last < 0 or (content in text and content not in body):
        return text, next(iter(ends))
    at, token = min(
        (text.find(end, len(body)), token)
        for token, end in ends.items()
        if text.find(end, len(body)) >= 0
    )
    return text[: at + len(ends[token])], token


def _split_turns(row: SourceRow, field: str, text: str, turns: list[str]) -> tuple[str, ...]:
    """Split a rendered response into `turns`; the first and last include the template's."""
    joined = "".join(turns)
    bare = joined.strip()  # as some templates strip the content
    at, first = text.find(bare), turns[0].lstrip()
    if at < 0:
        row.fail(field, "the chat template changes the text of its turns: use data.chat=false")
    middle = "".join([first, *turns[1:-1]])
    return (text[:at] + first, *turns[1:-1], text[at + len(middle) :])


def _fail_prefix(row: SourceRow, field: str, prompt: str, whole: str) -> NoReturn:
    """Raise UnrenderableDemo: the rendered conversation does not start with the prompt."""
    pairs = enumerate(zip(prompt, whole, strict=False))
    common = next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(whole)))
    start = max(common - SHOWN // 3, 0)
    raise UnrenderableDemo(
        row.problem(
            field,
            "the chat template writes the prompt differently before this response: alone, it "
            f"continues with {prompt[start:][:SHOWN]!r}, and in the conversation with "
            f"{whole[start:][:SHOWN]!r}: write the response as the template expects it (e.g. its "
            "reasoning as reasoning_content), or set model.tokenizer to one with another template",
        )
    )
