"""What is graded of a completion: the text after its reasoning, without a line that was cut off."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from gac.data import Example

Markers = tuple[tuple[str, str], ...]
"""Pairs of the texts that begin and end a reasoning trace."""

THINK: Markers = (("<think>", "</think>"),)
"""The markers of any model, whatever its tokenizer says."""
# Markers that do not follow from their names: gpt-oss marks the beginning of the answer.
_CHANNELS = ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>")
# "</think>", "[/THINK]", "</seed:think>", "<|/think|>", "◁/think▷"
_SLASHED = re.compile(r"[<\[◁]\|?/[\w:]{0,20}(?:think|thought|reason)[\w:]{0,20}\|?[>\]▷]", re.I)
# "<|END_THINKING|>", "<|end_of_thought|>", "<end_of_reasoning>"
_ENDS = re.compile(r"<\|?end(?=_)[\w:]{0,20}(?:think|thought|reason)[\w:]{0,20}\|?>", re.I)


def markers_of(tokenizer: Any) -> Markers:
    """The reasoning markers in the tokenizer's added tokens and its chat template, and `THINK`."""
    template = getattr(tokenizer, "chat_template", None) or ""
    templates = [template] if isinstance(template, str) else [*template.values()]
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    text = "\n".join([*templates, *map(str, added.values())])
    found = dict(THINK)
    for end in _SLASHED.findall(text):
        found.setdefault(end.replace("/", "", 1), end)
    for end in _ENDS.findall(text):
        word = re.search("end", end, re.I)
        assert word is not None
        for start in ("start", "begin"):
            start = start.upper() if word[0].isupper() else start
            found.setdefault(end.replace(word[0], start, 1), end)
    if all(token in text for token in ("<|channel|>", "<|message|>")):
        found.setdefault(*_CHANNELS)
    return tuple(found.items())


class Decoder:
    """Decodes completions without special tokens, except those that mark reasoning.

    Attributes:
        markers: the reasoning markers of the tokenizer; see `markers_of`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self.markers = tokenizer, markers_of(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        self._special = set(tokenizer.all_special_ids)
        self._special |= {i for i, token in added.items() if getattr(token, "special", False)}
        texts = [text for pair in self.markers for text in pair]
        shown = {i for i, token in added.items() if any(str(token) in text for text in texts)}
        self._marks = self._special & shown

    def __call__(self, ids: Sequence[int]) -> str:
        """The text of a completion's token ids."""
        if not self._marks.intersection(ids):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
        shown = [i for i in ids if i in self._marks or i not in self._special]
        return str(self._tokenizer.decode(shown, skip_special_tokens=False))


def graded_text(completion: str, example: Example, markers: Markers) -> str:
    """The text after the last end of reasoning, without the last line if that was cut off.

    It is empty if a trace has no end. The prompt may have begun the trace. The beginning of a trace
    is not required: some templates put it into the prompt, and some models leave it out.
    """
    if example.truncated:
        completion = whole_lines(completion)
    end = max(
        (completion.rfind(end) + len(end) for _, end in markers if end in completion), default=0
    )
    begins = [begin for begin, _ in markers]
    prompt = "" if end else example.prompt_text.rstrip()
    if any(begin in completion[end:] or prompt.endswith(begin) for begin in begins):
        return ""
    return completion[end:]


def whole_lines(text: str) -> str:
    """The text up to the end of its last complete line."""
    return text[: text.rfind("\n") + 1]


def names_marker(pattern: str, markers: Markers) -> bool:
    """Whether a regular expression of the user names a marker, and so is about the whole text."""
    plain = pattern.replace("\\", "")
    return any(text in plain for pair in markers for text in pair)
