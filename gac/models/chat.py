"""The chat template of a model's tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def end_of_turn(tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> int:
    """The token with which the chat template ends the assistant's turn; EOS if there is none.

    template: another chat template than the tokenizer's.
    """
    eos: int = tokenizer.eos_token_id
    if not (template or getattr(tokenizer, "chat_template", None)):
        return eos
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False, chat_template=template))
    except Exception:  # templates raise errors of their own; `render` reports them
        return eos
    _, found, rest = text.rpartition("answer")
    after = tokenizer(rest, add_special_tokens=False)["input_ids"] if found else []
    ends = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
    return next((token for token in after if token in ends), eos)
