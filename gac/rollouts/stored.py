"""Responses that are read from the data instead of sampled: fixed pairs, for DPO and IPO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gac.data import Example
from gac.data.encoding import RenderedText, chat_text, encode, plain_text
from gac.data.source import SourceRow
from gac.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .engines import Engine

FIELDS = "chosen", "rejected"


def stored_pairs(prompts: Sequence[Example], engine: Engine) -> list[Rollout]:
    """The responses `chosen` and `rejected` of each prompt's row, with the rewards 1 and 0.

    For `rollouts: {function: gac.rollouts.stored:stored_pairs, num_generations: 2}` with the
    methods `dpo` and `ipo`. Each field is a text or the messages of a conversation, of which the
    last one is the response. A response ends with the chat template's end of turn, or EOS. In an
    evaluation, responses are sampled.

    Raises:
        ValueError: a row has no such field, or each prompt does not occur twice in a row.
    """
    if engine.evaluates:
        completions = engine.generate([prompt.prompt for prompt in prompts])
        return [_rollout(*pair) for pair in zip(prompts, completions, strict=True)]
    first, second = prompts[::2], prompts[1::2]
    if [prompt.index for prompt in first] != [prompt.index for prompt in second]:
        raise ValueError("a row has two responses: set rollouts.num_generations=2")
    return [
        _rollout(prompt, _tokens(engine.tokenizer, prompt, field), reward)
        for prompt in first
        for field, reward in zip(FIELDS, (1.0, 0.0), strict=True)
    ]


def _rollout(prompt: Example, tokens: Sequence[int], reward: float | None = None) -> Rollout:
    return Rollout(prompt.prompt, tuple(tokens), [1] * len(tokens), reward=reward)


def _tokens(tokenizer: PreTrainedTokenizerBase, example: Example, field: str) -> tuple[int, ...]:
    """Token ids of a row's response after its prompt."""
    text = example.extra.get(field)
    if isinstance(text, list) and text and isinstance(text[-1], dict):
        text = text[-1].get("content")
    if not isinstance(text, str) or not text:
        raise ValueError(
            f"{example.id}: {field}={text!r:.100}: give the response as a text, or as messages"
        )
    (encoded,) = encode(tokenizer, [_rendered(tokenizer, example, field, text)])
    assert encoded.demo is not None
    return encoded.demo


def _rendered(
    tokenizer: PreTrainedTokenizerBase, example: Example, field: str, text: str
) -> RenderedText:
    """The prompt, and the response as the chat template writes it if it has written the prompt."""
    if tokenizer.chat_template:
        row, question = SourceRow(example.extra, example.id), "question"
        turn = chat_text(
            tokenizer,
            row,
            [{"role": "user", "content": question}],
            {"role": "assistant", "content": text},
            fields=("prompt", field),
        )
        if example.prompt_text.endswith(turn.prompt.rpartition(question)[2]):
            return turn._replace(prompt=example.prompt_text)
    return plain_text(tokenizer, example.prompt_text, (text,))
