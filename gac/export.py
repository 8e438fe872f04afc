"""From a checkpoint to a plain transformers folder, in one process, whatever number wrote it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from gac.config import load
from gac.errors import NoCheckpoint, writable_folder
from gac.faults import checkpoint
from gac.model import ModelConfig, export, load_model, load_tokenizer
from gac.train_config import TrainConfig


def export_run(run: Path, out: Path, step: int | Literal["best"] | None = None) -> Path:
    """Write the model of a run as a folder for `from_pretrained`: what `gac export` does.

    Adapters are merged into the model.

    Args:
        run: a run directory.
        out: a new or empty folder.
        step: which checkpoint; "best": the most accurate of the evaluated ones; None: the last
            intact one.

    Returns:
        The checkpoint that was read.

    Raises:
        NoCheckpoint: there is none.
        FileExistsError: `out` is not empty.
    """
    if not (run / "config.yaml").is_file():
        raise NoCheckpoint(f"RUN={str(run)!r} is no run directory: it has no config.yaml")
    path = _choose(run / "checkpoints", step)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"OUT={str(out)!r} is not empty: choose a new folder")
    writable_folder("OUT", out)
    export_checkpoint(load(TrainConfig, run / "config.yaml").model, path, out)
    return path


def _choose(folder: Path, step: int | Literal["best"] | None) -> Path:
    if isinstance(step, int):
        return checkpoint.at(folder, step)
    newest = checkpoint.newest(folder)
    if newest is None:
        raise NoCheckpoint(f"no intact checkpoint is in {folder}")
    if step is None:
        return newest
    best = checkpoint.read_progress(newest).get("best")
    if not best:
        raise NoCheckpoint(f"no checkpoint in {folder} was evaluated: name a step instead of best")
    return checkpoint.at(folder, best["step"])


def export_checkpoint(config: ModelConfig, path: Path, out: Path) -> None:
    """Write the model of the checkpoint at `path`; a kill leaves the old folder or the new one."""
    model = load_model(config)
    checkpoint.load_weights(path, model)
    if config.lora is not None:
        model = model.merge_and_unload()
    aside = out.with_name(f".{out.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    export(model, load_tokenizer(config), aside)
    shutil.rmtree(out, ignore_errors=True)
    aside.rename(out)
