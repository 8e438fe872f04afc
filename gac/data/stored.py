"""Keeps examples in a temporary file, so that a dataset may be larger than the memory."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import tempfile
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from gac.errors import RunError


@dataclass(frozen=True)
class Example:
    """One tokenized prompt, with the fields that its rewards need."""

    id: str
    """The row's id, or `file, line 3` if it has none."""
    prompt: tuple[int, ...]
    """Token ids of the prompt, after the template."""
    prompt_text: str
    """The text of `prompt`."""
    answer: str | None
    """The reference answer, for rewards."""
    demo: tuple[int, ...] | None
    """Token ids of the expert response, ending with EOS or the chat template's end of turn."""
    extra: Mapping[str, Any]
    """All fields of the row as read, the raw prompt included, for rewards."""
    source: str = ""
    """Name of the row's source, from `data.sources` or `data.source_field`."""
    index: int = -1
    """Position in its `Examples`."""
    demo_mask: tuple[bool, ...] = ()
    """Whether each token of `demo` has a loss; (): all do. The others are the environment's."""


class Examples(Sequence[Example]):
    """Examples in a temporary file; in memory, each takes 16 bytes.

    Attributes:
        dropped: maps each reason for dropping rows to a count.
        prompts, demos: the number of tokens of each prompt and each demonstration.
        largest: the largest token id.
        digest: a hash of the token ids and the answers.
    """

    def __init__(self, items: Iterable[Example], dropped: Mapping[str, int]) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
        self._ends = array("q", [0])
        self.prompts, self.demos, self.largest = array("i"), array("i"), -1
        content = hashlib.sha256()
        try:
            for index, item in enumerate(items):
                demo = item.demo or ()
                self.prompts.append(len(item.prompt))
                self.demos.append(len(demo))
                tokens = array("q", (*item.prompt, -1, *demo))
                self.largest = max(self.largest, *tokens)
                content.update(tokens.tobytes() + repr(item.answer).encode())
                self._file.write(pickle.dumps(replace(item, index=index)))
                self._ends.append(self._file.tell())
            self._file.flush()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise RunError(
                f"no space left in {tempfile.gettempdir()} for the tokenized rows: free some space "
                "there, or set TMPDIR to another folder"
            ) from error
        self.dropped: Mapping[str, int] = dict(dropped)  # `items` may have counted more
        self.digest = content.digest()

    def longest(self, prompts: int = 1, demos: int = 1) -> int:
        """The maximum of `prompts` * (prompt tokens) + `demos` * (demonstration tokens)."""
        lengths = zip(self.prompts, self.demos, strict=True)
        return max((prompts * prompt + demos * demo for prompt, demo in lengths), default=0)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return [self[i] for i in numbers]
        start, end = self._ends[numbers : numbers + 2]
        # unlike seek and read, also correct in forked processes, which share the file's position
        return pickle.loads(os.pread(self._file.fileno(), end - start, start))
