"""Checks before a run starts: the run directory, disk space, and the checkpoint to resume from."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from gac.errors import ConfigError, RunDirectoryError, RunError
from gac.parallel import collectives
from gac.parallel.collectives import gather, rank, run_on_all_ranks

FORMAT = 2  # checkpoint format version; incremented when older checkpoints can no longer be resumed
# keys of TrainConfig, with all their subkeys, that may change on resume; none of them changes which
# data is trained on
MAY_CHANGE_ON_RESUME = {
    "out",
    "run_name",
    "ignore_input_changes",
    "steps",
    "eval",
    "micro_batch_size",
    "max_tokens_per_micro_batch",
    "checkpoint_every",
    "keep_checkpoints",
    "report_to",
    "export",
    "guards",
    "parallel",
    "rollouts.vllm",
    "rollouts.log_samples_every",
    "rollouts.log_sample_prompts",
    "rollouts.print_samples",
}


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


def check_budget(key: str, tokens: int | None, longest: int, unit: int) -> None:
    """Raise ConfigError if `unit` rows of `longest` tokens exceed `tokens`, the value of `key`."""
    need = longest * unit
    if tokens is not None and tokens < need:
        rows = "the longest row" if unit == 1 else f"{unit} rows that stay together"
        raise ConfigError(
            f"{key}={tokens}: {rows} (prompt and response) may have {need} tokens: use {need} or "
            "more, or lower rollouts.max_completion_length, data.max_prompt_tokens or "
            "data.max_demo_tokens"
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
    saved, saved_ranks, ranks = progress["config"], progress["ranks"], collectives.world_size()
    old, new = (dict(_flat(json.loads(json.dumps(c)))) for c in (saved, now))
    differing = [
        f"{key}: {old.get(key, 'not set')!r} in the checkpoint, {new.get(key, 'not set')!r} now"
        for key in sorted({*old, *new})
        if not _may_change(key) and old.get(key) != new.get(key)
    ]
    if differing:
        raise ConfigError(
            "the checkpoint in `out` has a different configuration: restore that configuration, or "
            "choose another `out`:\n  " + "\n  ".join(differing)
        )
    if saved_ranks != ranks and not resize:
        raise ConfigError(
            f"parallel.allow_world_size_change=False: the checkpoint was written by {saved_ranks} "
            f"processes but {ranks} are running, which would change the results. Start "
            f"{saved_ranks} processes, or set parallel.allow_world_size_change=true"
        )


def _may_change(key: str) -> bool:
    return any(f"{key}.".startswith(f"{name}.") for name in MAY_CHANGE_ON_RESUME)


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings, by dotted key."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, value
