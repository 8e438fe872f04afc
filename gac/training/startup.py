"""Checks before a run starts: its folder, its inputs, and the checkpoint to resume from."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import json
import logging
import secrets
import shutil
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from gac import collectives
from gac.collectives import gather, rank, run_on_all_ranks
from gac.config import dump
from gac.data import Examples
from gac.errors import ConfigError, RunDirectoryError, RunError
from gac.evaluation.suite import Job
from gac.faults import checkpoint
from gac.imports import load_object
from gac.models.config import ModelConfig
from gac.models.pretrained import base_folder
from gac.rewards import Reward
from gac.rollouts.generation import stop_tokens
from gac.train_config import TrainConfig, teacher_of

logger = logging.getLogger(__name__)


FORMAT = 4  # checkpoint format version; incremented when older checkpoints can no longer be resumed
MICRO = ("micro_batch_size", "max_tokens_per_micro_batch")


def changeable(cls: Any, prefix: str = "") -> Iterator[str]:
    """The keys of the dataclass `cls`, with all their subkeys, that may change on resume."""
    for name, hint in typing.get_type_hints(cls).items():
        field = cls.__dataclass_fields__[name]
        if field.metadata.get("may_change"):
            yield f"{prefix}{name}"
        elif dataclasses.is_dataclass(hint):
            yield from changeable(hint, f"{prefix}{name}.")


MAY_CHANGE_ON_RESUME = {*changeable(TrainConfig)}


def find_checkpoint(config: TrainConfig, resume: bool) -> tuple[TrainConfig, Path | None]:
    """The newest checkpoint of the run, if any, and its configuration; fails early.

    A resumed run keeps its micro-batches, unless the configuration sets others.
    """
    out = Path(config.out)
    check_folder(out)
    path = checkpoint.newest_checkpoint(out / "checkpoints")
    finished, logs = (out / "result.json").is_file(), out / "metrics.jsonl"
    used = finished or (not resume and logs.is_file() and logs.stat().st_size > 0)
    if path is None and not used:
        return config, None
    if path is None or not resume:
        raise ValueError(
            f"out={str(out)!r} already holds a run: choose another directory"
            + (", or resume it" if path else "")
        )
    progress = checkpoint.read_progress(path)
    check_same_run(progress, dump(config), config.parallel.allow_world_size_change)
    if config.micro_batch_size is None and config.max_tokens_per_micro_batch is None:
        # packing excludes micro_batch_size
        keys = MICRO if config.packing is None else MICRO[1:]
        config = dataclasses.replace(config, **{key: progress["config"].get(key) for key in keys})
    return config, path


def check_folder(out: Path) -> None:
    """Raise RunDirectoryError unless rank 0 can write a file to `out` that every rank sees."""
    path = out / gather(f".probe-{secrets.token_hex(4)}")[0]

    def fault(error: Exception) -> RunDirectoryError:
        reason = getattr(error, "strerror", None) or error
        return RunDirectoryError(
            f"out={str(out)!r}: the run directory is not writable ({reason}): choose another `out`"
        )

    def write() -> None:
        if rank() == 0:
            out.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"gac")

    def read() -> None:
        if not path.exists():
            raise RunDirectoryError(
                f"out={str(out)!r}: rank {rank()} does not see rank 0's files: use a shared file "
                "system for `out`"
            )

    try:
        run_on_all_ranks(write, fault)
        run_on_all_ranks(read)
    finally:
        if rank() == 0:
            with contextlib.suppress(OSError):  # if `out` is below a file, there is nothing to do
                path.unlink()


def check_space(out: Path, model: nn.Module, checkpoints: int) -> None:
    """Raise RunError unless `checkpoints` checkpoints of model and optimizer fit on the disk."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    moments = 2 * sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    need, free = checkpoints * (weights + moments), shutil.disk_usage(out).free
    if free < need:
        raise RunError(
            f"out={str(out)!r}: {checkpoints} checkpoints of this model need {need / 1e9:.3g} GB, "
            f"but only {free / 1e9:.3g} GB are free: free some space or lower keep_checkpoints"
        )


def check_budget(tokens: int | None, longest: int, rollouts: int) -> None:
    """Raise ConfigError if a prompt's `rollouts` of `longest` tokens exceed the budget `tokens`."""
    need = longest * rollouts
    if tokens is not None and tokens < need:
        raise ConfigError(
            f"rollouts.generation_batch_tokens={tokens}: the {rollouts} rollouts of a prompt may "
            f"have {need} tokens: use {need} or more, or lower rollouts.max_completion_length or "
            "data.max_prompt_tokens"
        )


def check_same_run(progress: Mapping[str, Any], now: Mapping[str, Any], resize: bool) -> None:
    """Raise ConfigError unless a run with configuration `now` may resume from `progress`.

    resize: also allow a different number of processes.
    """
    if progress.get("format") != FORMAT:
        raise ConfigError(
            "the checkpoint in `out` was written by another version of gac: finish the run with "
            "that version, or choose another `out`"
        )
    saved_ranks, ranks = progress["ranks"], collectives.world_size()
    old, new = _leaves(progress["config"]), _leaves(now)
    # keys that differ with the method, or have no effect with one of two engines
    other = tuple(
        keys
        for name, keys in (("method.name", "method."), ("rollouts.engine", "rollouts.correction"))
        if old.get(name) != new.get(name)
    )
    differing = [
        f"{key}: {old.get(key, 'not set')!r} in the checkpoint, {new.get(key, 'not set')!r} now"
        for key in sorted({*old, *new})
        if not _may_change(key)
        and old.get(key) != new.get(key)
        and not (key.startswith(other) and key != "method.name")
    ]
    if differing:
        raise ConfigError(
            "the checkpoint in `out` has a different configuration: restore that configuration, or "
            "choose another `out`:\n  " + "\n  ".join(differing)
        )
    before, after = old.get("optim.lr"), new.get("optim.lr")
    if before != after and rank() == 0:
        logger.warning("resuming with optim.lr=%s instead of %s", after, before)
    if saved_ranks != ranks and not resize:
        raise ConfigError(
            f"parallel.allow_world_size_change=False: the checkpoint was written by {saved_ranks} "
            f"processes but {ranks} are running, which would change the results. Start "
            f"{saved_ranks} processes, or set parallel.allow_world_size_change=true"
        )


def _may_change(key: str) -> bool:
    return any(f"{key}.".startswith(f"{name}.") for name in MAY_CHANGE_ON_RESUME)


def _leaves(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a configuration by dotted key, in the types that JSON has."""
    return dict(_flat(json.loads(json.dumps(config))))


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings, by dotted key; a folder's trailing slash does not count."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, value.rstrip("/") if isinstance(value, str) else value


def check_tokens(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase, sources: Iterable[Examples]
) -> None:
    """Raise ConfigError if a token of the data is not in the model's vocabulary."""
    size = vocabulary_size(config)
    known = (*stop_tokens(tokenizer), tokenizer.pad_token_id)
    largest = max(*known, *(source.largest for source in sources))
    if largest >= size:
        key = "model.tokenizer" if config.tokenizer else config.key
        name = config.tokenizer or config.path
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ConfigError(
            f"{key}={name!r}: the tokenizer encodes {token!r} as {largest}, but the embedding of "
            f"{config.key}={config.path!r} has only {size} rows: use the model's own tokenizer, or "
            "resize its embedding"
        )


def check_positions(config: ModelConfig, longest: int, keys: str) -> None:
    """Check that rows of `longest` tokens, limited by `keys`, fit into the model's positions.

    Raises ConfigError if the positions are learned; rotary positions beyond the trained ones only
    get a warning.
    """
    text = _text_config(config)
    positions = getattr(text, "max_position_embeddings", None)
    if (
        not isinstance(positions, int)
        or positions < 1
        or longest <= positions
        or getattr(text, "alibi", False)
    ):
        return
    message = (
        f"{config.key}={config.path!r} has {positions} positions, but a prompt with its response "
        f"may have {longest} tokens: lower {keys}"
    )
    if getattr(text, "rope_parameters", None) is None:
        raise ConfigError(message)
    logger.warning("%s, unless the model supports more than %d positions", message, positions)


def check_evaluation(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase, jobs: Mapping[str, Job]
) -> int:
    """Check the prompts of the evaluation, and their length with a response; returns the latter."""
    longest = {n: j.examples.longest(1, 0) + j.task.max_completion_length for n, j in jobs.items()}
    for name, job in jobs.items():
        check_tokens(config, tokenizer, [job.examples])
        key = f"eval.tasks.{name}" if name else "eval"
        check_positions(config, longest[name], f"{key}.max_completion_length")
    return max(longest.values(), default=0)


def vocabulary_size(config: ModelConfig) -> int:
    """Number of rows of the model's embedding."""
    size: int = _text_config(config).vocab_size
    return size


def _text_config(config: ModelConfig) -> Any:
    return AutoConfig.from_pretrained(base_folder(config.path)).get_text_config(decoder=True)


ENDS = 1 << 20  # bytes to read at each end of a weights file


def fingerprint(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    sources: Mapping[str, Examples],
    reward: Reward,
) -> dict[str, str]:
    """Map each input to a hash of its content."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    teacher = teacher_of(config).path
    code = {"rollouts.function": config.rollouts.function, "data.order": config.data.order}
    return {
        **{name: _hash([source.digest]) for name, source in sources.items()},
        "tokenizer": _hash([repr(vocabulary).encode(), str(tokenizer.chat_template).encode()]),
        "model": _hash(_model(Path(config.model.path))),
        **({"teacher": _hash(_model(Path(teacher)))} if teacher else {}),
        "reward": _hash(_files(reward)),
        **{key: _hash(_file(load_object(name, key))) for key, name in code.items() if name},
    }


def check_fingerprint(
    saved: Mapping[str, str], now: Mapping[str, str], ignore_input_changes: bool
) -> None:
    """Raise ConfigError if an input has changed, unless `ignore_input_changes`."""
    changed = [name for name, value in saved.items() if now.get(name, value) != value]
    if changed and not ignore_input_changes:
        raise ConfigError(
            f"the {' and the '.join(changed)} changed since the checkpoint in `out` was written: "
            "restore the old content, choose another `out`, or set ignore_input_changes=true"
        )


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


def _file(code: Any) -> Iterator[bytes]:
    """Yield the source file of a user's function or class."""
    file = getattr(inspect.getmodule(code), "__file__", None)
    if file is not None:
        yield Path(file).read_bytes()


def _files(reward: Any) -> Iterator[bytes]:
    """Yield the source files of a reward's user functions and classes, also in sums."""
    function = getattr(reward, "_function", None)
    if function is not None or not type(reward).__module__.startswith("gac."):
        yield from _file(function or type(reward))
    for term, _ in getattr(reward, "_terms", ()):
        yield from _files(term)


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part + b"\0")
    return digest.hexdigest()[:16]
