"""Fingerprints the contents of a run's inputs; the configuration holds only their names.

Data files, a reward function, a model or a tokenizer can change between a run and its resumption
while their names stay the same.
"""

from __future__ import annotations

import hashlib
import inspect
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from gac.data import Example
from gac.errors import ConfigError
from gac.models.config import ModelConfig
from gac.rewards import Reward

ENDS = 1 << 20  # bytes to read at each end of a weights file


def fingerprint(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[Sequence[Example]],
    reward: Reward,
) -> dict[str, str]:
    """Map each input to a hash of its content."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return {
        "data": _hash(_content(example) for source in sources for example in source),
        "tokenizer": _hash([repr(vocabulary).encode(), str(tokenizer.chat_template).encode()]),
        "model": _hash(_model(Path(config.path).expanduser())),
        "reward": _hash(_files(reward)),
    }


def check_fingerprint(
    saved: Mapping[str, str] | None, now: Mapping[str, str], ignore_input_changes: bool
) -> None:
    """Raise ConfigError if an input has changed, unless `ignore_input_changes`.

    saved: None in checkpoints of earlier versions.
    """
    changed = [name for name, value in (saved or {}).items() if now.get(name, value) != value]
    if changed and not ignore_input_changes:
        raise ConfigError(
            f"the {' and the '.join(changed)} changed since the checkpoint in `out` was written: "
            "restore the old content, choose another `out`, or set ignore_input_changes=true"
        )


def _content(example: Example) -> bytes:
    tokens = array("q", (*example.prompt, -1, *(example.demo or ())))
    return tokens.tobytes() + repr(example.answer).encode()


def _model(folder: Path) -> Iterator[bytes]:
    """Yield the configuration, and the name, size and both ends of each weights file."""
    for path in sorted(folder.glob("*")) if folder.is_dir() else ():
        if path.name == "config.json":
            yield path.read_bytes()
        elif path.suffix in (".safetensors", ".bin"):
            size = path.stat().st_size
            with path.open("rb") as file:
                yield f"{path.name} {size}".encode() + file.read(ENDS)
                file.seek(max(size - ENDS, 0))
                yield file.read(ENDS)


def _files(reward: Any) -> Iterator[bytes]:
    """Yield the source files of a reward's user functions, including those of nested rewards."""
    file = getattr(inspect.getmodule(getattr(reward, "_function", None)), "__file__", None)
    if file is not None:
        yield Path(file).read_bytes()
    inner = [term for term, _ in getattr(reward, "_terms", ())]
    inner += [reward.reward] if isinstance(getattr(reward, "reward", None), Reward) else []
    for part in inner:
        yield from _files(part)


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part + b"\0")
    return digest.hexdigest()[:16]
