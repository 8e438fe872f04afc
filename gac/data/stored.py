"""Keeps examples in a file, so that a dataset may be larger than the memory; large ones are cached.

A cache file begins with the SHA-256 of the rest: pickled examples, their index, and its position.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import hashlib
import logging
import os
import pickle
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, overload

from gac.errors import RunError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
CACHE_FROM = 1 << 20  # bytes of data files; fewer are tokenized faster than a cache is looked up
HASH, POSITION = 32, 8  # bytes


@dataclass(frozen=True)
class Example:
    """One tokenized prompt, with the fields that its rewards need."""

    id: str
    """The row's id, or its location, as `file, line 3`, if it has none."""
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
    truncated: bool = False
    """For rewards: whether a limit cut off the completion that is scored."""


class Examples(Sequence[Example]):
    """Examples in a file that `store` has written; in memory, each takes 16 bytes.

    Attributes:
        dropped: maps each reason for dropping rows to a count.
        prompts, demos: the number of tokens of each prompt and each demonstration.
        sources: the number of examples of each source.
        turns: whether a demonstration has several turns.
        largest: the largest token id.
        digest: a hash of the token ids and the answers, and one over the demonstrated rows only.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        end = os.fstat(file.fileno()).st_size - POSITION
        start = int.from_bytes(os.pread(file.fileno(), POSITION, end), "little")
        index = pickle.loads(os.pread(file.fileno(), end - start, start))
        self.prompts, self.demos, self._ends, self.sources, self.turns, *rest = index
        self.largest, self.digest, self.dropped = rest
        self._rows: Sequence[int] = range(len(self.prompts))

    def subset(self, rows: Sequence[int]) -> Examples:
        """The examples at the positions `rows`, in the same file."""
        part, own = copy.copy(self), array("q", rows)
        part._rows = array("q", (self._rows[i] for i in own))
        part.prompts, part.demos = (
            array("i", [lengths[i] for i in own]) for lengths in (self.prompts, self.demos)
        )
        whole = [*own] == [i for i, length in enumerate(self.demos) if length]
        mixed = hashlib.sha256(self.digest + own.tobytes()).digest()
        part.digest = 2 * (self.digest[HASH:] if whole else mixed)
        return part

    def longest(self, prompts: int = 1, demos: int = 1) -> int:
        """The maximum of `prompts` * (prompt tokens) + `demos` * (demonstration tokens)."""
        return max(
            (
                prompts * prompt + demos * demo
                for prompt, demo in zip(self.prompts, self.demos, strict=True)
            ),
            default=0,
        )

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return [self[i] for i in numbers]
        row = self._rows[numbers]
        start, end = self._ends[row : row + 2]
        # unlike seek and read, also correct in forked processes, which share the file's position
        example = pickle.loads(os.pread(self._file.fileno(), end - start, start))
        return replace(example, index=numbers)


def store(path: Path | None, items: Iterable[Example], dropped: Mapping[str, int]) -> Examples:
    """The examples in the cache file `path`; the first process to need them writes `items` there.

    path: None for a temporary file.
    dropped: read after `items`, which may count more.
    """
    lock = None
    if path and _is_private(path.parent):
        if cached := _open(path):
            return Examples(cached)
        lock = _lock(path)
    if not path or not lock:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the examples
        return Examples(_write(file, items, dropped, "TMPDIR", tempfile.gettempdir()))
    with lock, contextlib.ExitStack() as after:
        cached = _open(path)  # another process has written it while this one waited
        if cached is None:
            part = path.with_suffix(".part")
            after.callback(part.unlink, missing_ok=True)
            cached = _write(part.open("w+b"), items, dropped, "HF_HOME", str(path.parent))
            part.rename(path)
    return Examples(cached)


def cache_path(
    tokenizer: PreTrainedTokenizerBase, files: Sequence[Path], *options: object
) -> Path | None:
    """The cache file for the content of `files`, tokenized with `options`; None if they are small.

    Every input is part of the name: data, tokenizer, options, and the code of this package.
    """
    if sum(file.stat().st_size for file in files) < CACHE_FROM:
        return None
    import transformers
    from huggingface_hub.constants import HF_HOME

    from gac.models.chat import end_of_turn

    end = end_of_turn(tokenizer)
    named = (options, [*map(str, files)], transformers.__version__, end)
    key = hashlib.sha256(repr(named).encode())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        code, saved = sorted(Path(__file__).parent.glob("*.py")), sorted(Path(folder).rglob("*"))
        for path in (*code, *filter(Path.is_file, saved), *files):
            with path.open("rb") as file:
                key.update(hashlib.file_digest(file, "sha256").digest())
    return Path(HF_HOME) / f"gac-{os.getuid()}" / f"{key.hexdigest()}.examples"


def _open(path: Path) -> IO[bytes] | None:
    """Open a cache file; None if it does not exist, or is damaged."""
    if not path.exists():
        return None
    file = path.open("rb")
    expected = file.read(HASH)
    if hashlib.file_digest(file, "sha256").digest() == expected:
        return file
    logger.warning("%s: this cache of tokenized rows is damaged and is written again", path)
    file.close()
    return None


def _is_private(folder: Path) -> bool:
    """Create `folder` if needed; whether only this user can write to it: unpickling runs code."""
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.stat()
        if info.st_uid == os.getuid() and not info.st_mode & 0o022:
            return True
    logger.warning("tokenized rows are not cached: %s is not a folder of this user's own", folder)
    return False


def _lock(path: Path) -> IO[bytes] | None:
    """Wait for the lock on the cache file `path`, until the result is closed; None: no cache."""
    try:
        file = path.with_suffix(".lock").open("wb")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        logger.warning("tokenized rows are not cached: %s: %s", path.parent, error.strerror)
        return None
    return file


def _write(
    file: Any, items: Iterable[Example], dropped: Mapping[str, int], key: str, folder: str
) -> IO[bytes]:
    """Write the examples to `file`, which is in `folder`, chosen by the environment's `key`."""
    prompts, demos, ends, sources = array("i"), array("i"), array("q", [HASH]), Counter[str]()
    turns, largest, content, demonstrated = False, -1, hashlib.sha256(), hashlib.sha256()
    try:
        file.write(bytes(HASH))
        for item in items:
            demo = item.demo or ()
            prompts.append(len(item.prompt))
            demos.append(len(demo))
            sources[item.source] += 1
            turns = turns or bool(item.demo_mask)
            tokens = array("q", (*item.prompt, -1, *demo))
            largest = max(largest, *tokens)
            for hashed in (content, demonstrated)[: 1 + bool(demo)]:
                hashed.update(tokens.tobytes() + repr(item.answer).encode())
            file.write(pickle.dumps(item))
            ends.append(file.tell())
        digest = content.digest() + demonstrated.digest()
        index = (prompts, demos, ends, sources, turns, largest, digest, dict(dropped))
        file.write(pickle.dumps(index))
        file.write(ends[-1].to_bytes(POSITION, "little"))
        file.seek(HASH)
        content = hashlib.file_digest(file, "sha256")
        file.seek(0)
        file.write(content.digest())
        file.flush()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise RunError(
            f"no space left in {folder} for the tokenized rows: free some space there, or set "
            f"{key} to another folder"
        ) from error
    return file
