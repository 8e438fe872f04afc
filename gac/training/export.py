"""Exports a checkpoint to a plain transformers folder, in one process, however many wrote it.

Weights are copied layer by layer, so the process never holds the full model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from gac.config import load
from gac.errors import NoCheckpoint, writable_folder
from gac.faults import checkpoint
from gac.models.causal_lm import ModelConfig, adapted, hollow_model, load_model, load_tokenizer
from gac.models.weights import on_adapters
from gac.training.run_config import TrainConfig

SHARD = 1 << 30  # bytes
WHOLE = 1 << 62  # bytes; disables sharding in save_pretrained


def export_run(run: Path, out: Path, step: int | Literal["best"] | None = None) -> Path:
    """Export the model of a run to a folder for `from_pretrained`, as `gac export` does.

    Adapters are merged into the model.

    Args:
        run: a run directory.
        out: a new or empty folder.
        step: step of the checkpoint; "best": the one with the highest evaluation accuracy; None:
            the newest intact one.

    Returns:
        The checkpoint that was read.

    Raises:
        NoCheckpoint: there is no such checkpoint.
        FileExistsError: `out` is not empty.
    """
    if not (run / "config.yaml").is_file():
        raise NoCheckpoint(f"RUN={str(run)!r} is not a run directory: it has no config.yaml")
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
        raise NoCheckpoint(f"no intact checkpoint in {folder}")
    if step is None:
        return newest
    best = checkpoint.read_progress(newest).get("best")
    if not best:
        raise NoCheckpoint(f"no checkpoint in {folder} was evaluated: give a step instead of best")
    return checkpoint.at(folder, best["step"])


def export_checkpoint(config: ModelConfig, path: Path, out: Path, shard: int = SHARD) -> None:
    """Export the checkpoint at `path`, through a temporary folder that replaces `out` once it is
    complete.

    shard: approximate bytes per file of weights; peak memory is one file plus one layer.
    """
    aside = out.with_name(f".{out.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    if on_adapters(config.path):
        _save_adapters(config, path, aside)
    else:
        _save_weights(config, path, aside, shard)
    load_tokenizer(config).save_pretrained(aside)
    shutil.rmtree(out, ignore_errors=True)
    aside.rename(out)


def _save_adapters(config: ModelConfig, path: Path, folder: Path) -> None:
    """If `model.path` is itself a set of adapters, let transformers save them; this needs the full
    model in memory.
    """
    model = load_model(config)
    checkpoint.load_weights(path, model)
    model.__dict__.pop("forward")  # the instance's patch cannot be pickled
    model.save_pretrained(folder)


def _save_weights(config: ModelConfig, path: Path, folder: Path, shard: int) -> None:
    """Write weight files of about `shard` bytes, their index, and the other files of a model."""
    plain, size = hollow_model(config), 0
    wanted = plain.state_dict().keys()
    part, files = folder / "part", list[Path]()
    for tensors in _shards(config, path, shard):
        kept = {name: x.contiguous() for name, x in tensors.items() if name in wanted}
        size += sum(x.nbytes for x in kept.values())
        # save_pretrained also converts names and layouts to those of the published model
        plain.save_pretrained(part, state_dict=kept, max_shard_size=WHOLE)
        files.append((part / SAFE_WEIGHTS_NAME).rename(folder / f"{len(files)}.safetensors"))
    for beside in part.iterdir():
        beside.rename(folder / beside.name)
    part.rmdir()
    if len(files) == 1:
        files[0].rename(folder / SAFE_WEIGHTS_NAME)
    else:
        _index(files, folder, {"total_parameters": plain.num_parameters(), "total_size": size})


def _index(files: Sequence[Path], folder: Path, about: dict[str, int]) -> None:
    """Rename the files as transformers expects, and write the index from tensor to file."""
    where: dict[str, str] = {}
    for number, file in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with safe_open(file, framework="pt") as found:
            where |= dict.fromkeys(found.keys(), name)
        file.rename(folder / name)
    index = {"metadata": about, "weight_map": dict(sorted(where.items()))}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _shards(config: ModelConfig, path: Path, shard: int) -> Iterator[dict[str, Tensor]]:
    """Yield the checkpoint's weights, adapters merged, in chunks of about `shard` bytes."""
    model = adapted(hollow_model(config), config)
    there, found = checkpoint.model_tensors(path), dict[str, Tensor]()
    for names in _units(model):
        if found and sum(x.nbytes for x in found.values()) >= shard:
            yield found
            found = {}
        tensors = checkpoint.read_tensors(path, {name: there[name] for name in names})
        found |= tensors if config.lora is None else _merged(model, tensors)
    yield found


def _units(model: nn.Module) -> list[list[str]]:
    """Names of weights that stay together: those of a layer or of a module with adapters; any other
    alone. Tied weights appear only under their first name.
    """
    layers = getattr(model, "_no_split_modules", None) or ()
    together = [
        f"{name}."
        for name, module in model.named_modules()
        if type(module).__name__ in layers or hasattr(module, "base_layer")
    ]
    units: dict[str, list[str]] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            unit = next((prefix for prefix in together if name.startswith(prefix)), name)
            units.setdefault(unit, []).append(name)
    return list(units.values())


def _merged(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A unit's weights with adapters merged, under the base model's names; the adapters' own
    tensors are included too.
    """
    model.load_state_dict(tensors, strict=False, assign=True)
    adapters = {name.rpartition(".base_layer.")[0] for name in tensors if ".base_layer." in name}
    for name in adapters:
        module: Any = model.get_submodule(name)
        module.merge()
    state = model.state_dict()
    merged = {_plain(name): state[name] for name in tensors}
    away = {name: torch.empty_like(x, device="meta") for name, x in tensors.items()}
    model.load_state_dict(away, strict=False, assign=True)
    return merged


def _plain(name: str) -> str:
    """Map peft's name of a weight to the model's own."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")
