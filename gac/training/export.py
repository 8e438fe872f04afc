"""Exports a checkpoint to a plain transformers folder, in one process.

Weights are copied layer by layer, so the process never holds the full model, regardless of the
world size of the run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import ModelCardData, create_repo, upload_folder
from huggingface_hub.errors import HTTPError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from gac.config import load
from gac.errors import CheckpointNotFound, ConfigError, RunError, import_extra, writable_folder
from gac.faults import checkpoint
from gac.models.adapters import adapter_layers, base_name, is_untied, untie
from gac.models.causal_lm import apply_training_options, load_meta_model, load_model, load_tokenizer
from gac.models.config import ModelConfig
from gac.models.pretrained import has_adapters
from gac.parallel.run_lock import run_lock
from gac.train_config import TrainConfig

FILE_SIZE = 1 << 30  # bytes
NO_SHARDING = "1000TB"  # disables sharding in save_pretrained


def export_run(
    run: Path,
    out: Path,
    step: int | Literal["best"] | None = None,
    *,
    adapters: bool = False,
    repository: str | None = None,
    gguf: bool = False,
) -> Path:
    """Export the model of a run to a folder for `from_pretrained`, as `gac export` does.

    Args:
        run: a run directory.
        out: a new or empty folder.
        step: step of the checkpoint; "best": the one with the highest evaluation accuracy; None:
            the newest intact one.
        adapters: write the adapters alone, as peft does; False: merge them into the model.
        repository: owner/name on the Hub; the folder is also uploaded to it. A new one is private.
        gguf: also write the model as one file for llama.cpp, `out`/model.gguf.

    Returns:
        The checkpoint that was read.

    Raises:
        CheckpointNotFound: the checkpoint does not exist.
        ConfigError: `adapters`, but the run trained all weights; the Hub refuses `repository`;
            `gguf`, but the model cannot be written in this format.
        FileExistsError: `out` is not empty.
        RunDirectoryError: a process trains in `run` or exports from it.
        RunError: the export is complete, but the upload failed.
        MissingExtra: `gguf`, but the package `gguf` is not installed.
    """
    if not (run / "config.yaml").is_file():
        raise CheckpointNotFound(f"RUN={str(run)!r} is not a run directory: it has no config.yaml")
    with run_lock(run):
        path = _choose(run / "checkpoints", step)
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise FileExistsError(f"OUT={str(out)!r} is not empty: choose a new folder")
        settings = load(TrainConfig, run / "config.yaml")
        config = settings.model
        if adapters and config.lora is None:
            raise ConfigError(
                f"--adapters: {run} trained all weights (model.lora is null): omit it"
            )
        if gguf:
            _check_gguf(config, adapters or has_adapters(config.path))
        writable_folder("OUT", out)
        if repository is not None:
            _create_repository(repository)
        export_checkpoint(config, path, out, adapters=adapters, gguf=gguf)
        if repository is not None:
            _write_card(settings, int(path.name.rpartition("-")[2]), out)
            _upload(out, repository)
    return path


def _check_gguf(config: ModelConfig, only_adapters: bool) -> None:
    """Fail before a long export if its result cannot be written as a GGUF file."""
    if only_adapters:
        raise ConfigError("--gguf: a GGUF file has a whole model, and only adapters are exported")
    module = import_extra("gac.models.gguf_file", "gac export --gguf")
    module.check_convertible(AutoConfig.from_pretrained(config.path), load_tokenizer(config))


def _create_repository(name: str) -> None:
    """Create a private repository on the Hub, unless it exists; fails before a long export."""
    try:
        create_repo(name, private=True, exist_ok=True)
    except (OSError, ValueError, HTTPError) as error:
        raise ConfigError(
            f"--push-to-hub {name}: {_first_line(error)}: use OWNER/NAME of a repository that you "
            "may write to, and log in with `hf auth login` or HF_TOKEN"
        ) from error


def _write_card(config: TrainConfig, step: int, folder: Path) -> None:
    """Write the model card, README.md: the base model, the method and the step."""
    base = config.model.path
    data = ModelCardData(
        base_model=None if Path(base).exists() else base,
        library_name="peft" if (folder / "adapter_config.json").exists() else "transformers",
        tags=["reinforcement-learning"],
    )
    text = f"Trained by GAC with the method `{config.method.name}`, {step} steps."
    (folder / "README.md").write_text(f"---\n{data.to_yaml()}\n---\n\n{text}\n")


def _upload(folder: Path, name: str) -> None:
    try:
        upload_folder(repo_id=name, folder_path=folder, commit_message="Export of gac")
    except (OSError, HTTPError) as error:
        raise RunError(
            f"--push-to-hub {name}: {_first_line(error)}: the export in {folder} is complete; "
            f"repeat the upload with `hf upload {name} {folder}`"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".:")


def _choose(folder: Path, step: int | Literal["best"] | None) -> Path:
    if isinstance(step, int):
        return checkpoint.find(folder, step)
    newest = checkpoint.newest_checkpoint(folder)
    if newest is None:
        raise CheckpointNotFound(f"no intact checkpoint in {folder}")
    if step is None:
        return newest
    best = checkpoint.read_progress(newest).get("best")
    if not best:
        raise CheckpointNotFound(
            f"checkpoint 'best': no checkpoint in {folder} was evaluated; give the number of a step"
        )
    return checkpoint.find(folder, best["step"])


def export_checkpoint(
    config: ModelConfig,
    path: Path,
    out: Path,
    file_size: int = FILE_SIZE,
    *,
    adapters: bool = False,
    gguf: bool = False,
) -> None:
    """Export the checkpoint at `path`, then replace `out` with the complete export.

    A kill never loses a complete `out`. Between the two renames it is at `.NAME.previous`, and the
    next export restores it.

    Args:
        config: the model that was trained.
        path: the checkpoint.
        out: the folder to write.
        file_size: approximate bytes per file of weights; peak memory is one file plus one layer.
        adapters: write only the adapters.
        gguf: also write model.gguf.
    """
    checkpoint.verify(path)
    out = out.resolve()  # "." has no name
    temporary = out.with_name(f".{out.name}.writing")
    previous = out.with_name(f".{out.name}.previous")
    if previous.exists() and not out.exists():
        previous.rename(out)
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(previous, ignore_errors=True)
    try:
        if adapters:
            _save_trained_adapters(config, path, temporary)
        elif has_adapters(config.path):
            _save_adapters(config, path, temporary)
        else:
            _save_weights(config, path, temporary, file_size)
        load_tokenizer(config).save_pretrained(temporary)
        if gguf:
            module = import_extra("gac.models.gguf_file", "gac export --gguf")
            module.write_gguf(temporary, temporary / "model.gguf")
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise RunError(
            f"could not export the model to {out} ({reason}): free some space or fix the disk, "
            f"then rerun the command; the checkpoint {path} is complete"
        ) from error
    if out.exists():
        out.rename(previous)
    temporary.rename(out)
    shutil.rmtree(previous, ignore_errors=True)


def _save_trained_adapters(config: ModelConfig, path: Path, folder: Path) -> None:
    """Write the adapters of `model.lora` alone, as peft does; only they are read."""
    model = apply_training_options(load_meta_model(config), config)
    stored = checkpoint.model_tensors(path)
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    tensors = checkpoint.read_tensors(path, {name: stored[name] for name in names})
    model.save_pretrained(folder, state_dict=tensors, save_embedding_layers=False)


def _save_adapters(config: ModelConfig, path: Path, folder: Path) -> None:
    """Export a model whose `model.path` is itself a set of adapters.

    transformers saves them, which needs the full model in memory.
    """
    model = load_model(config)
    checkpoint.load_weights(path, model)
    model.__dict__.pop("forward")  # the instance's patch cannot be pickled
    model.save_pretrained(folder)


def _save_weights(config: ModelConfig, path: Path, folder: Path, file_size: int) -> None:
    """Write weight files of about `file_size` bytes, their index, and a model's other files."""
    model, plain = apply_training_options(load_meta_model(config), config), load_meta_model(config)
    stored, base = checkpoint.model_tensors(path), _base_model(model)
    if not is_untied(plain) and (is_untied(base) or _stored_apart(base, model, path, stored)):
        untie(base)
        untie(plain)
    missing = {*plain.state_dict()} - _shared_names(plain)
    part, files, size = folder / "part", list[Path](), 0
    for tensors in _chunks(model, path, stored, file_size):
        state = {
            name: (x.to(getattr(torch, config.dtype)) if x.is_floating_point() else x).contiguous()
            for name, x in tensors.items()
            if name in plain.state_dict()
        }
        missing -= state.keys()
        size += sum(x.nbytes for x in state.values())
        # save_pretrained also converts names and layouts to those of the published model
        plain.save_pretrained(part, state_dict=state, max_shard_size=NO_SHARDING)
        files.append((part / SAFE_WEIGHTS_NAME).rename(folder / f"{len(files)}.safetensors"))
    if missing:
        raise AssertionError(f"weights were not exported: {', '.join(sorted(missing))}")
    for other_file in part.iterdir():
        other_file.rename(folder / other_file.name)
    part.rmdir()
    if len(files) == 1:
        files[0].rename(folder / SAFE_WEIGHTS_NAME)
    else:
        metadata = {"total_parameters": plain.num_parameters(), "total_size": size}
        _write_index(files, folder, metadata)


def _stored_apart(base: Any, model: nn.Module, path: Path, stored: dict[str, Tensor]) -> bool:
    """Whether a checkpoint has different weights for an embedding and a head that should be tied.

    This is the case if the original model's checkpoint had both; see `untie_if_different`.
    """
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    names = {module: f"{name}.weight" for name, module in model.named_modules()}
    both = [names[module] for module in ends if names.get(module) in stored]
    if len(both) < 2:
        return False
    embedding, head = checkpoint.read_tensors(path, {n: stored[n] for n in both}).values()
    return not torch.equal(embedding, head)


def _write_index(files: Sequence[Path], folder: Path, metadata: dict[str, int]) -> None:
    """Rename the files as transformers expects, and write the index that maps tensors to files."""
    weight_map: dict[str, str] = {}
    for number, file in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with safe_open(file, framework="pt") as weights:
            weight_map |= dict.fromkeys(weights.keys(), name)
        file.rename(folder / name)
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _chunks(
    model: Any, path: Path, stored: dict[str, Tensor], size: int
) -> Iterator[dict[str, Tensor]]:
    """Yield the checkpoint's weights, adapters merged, in chunks of about `size` bytes."""
    chunk = dict[str, Tensor]()
    for names in _units(model):
        if chunk and sum(x.nbytes for x in chunk.values()) >= size:
            yield chunk
            chunk = {}
        tensors = checkpoint.read_tensors(path, {name: stored[name] for name in names})
        chunk |= _merged(model, tensors) if hasattr(model, "get_base_model") else tensors
    yield chunk


def _units(model: nn.Module) -> list[list[str]]:
    """Names of the weights of each unit: a layer, a module with adapters, or any other weight.

    Tied weights appear only under their first name.
    """
    layers = getattr(model, "_no_split_modules", None) or ()
    prefixes = [
        f"{name}."
        for name, module in model.named_modules()
        if type(module).__name__ in layers or hasattr(module, "base_layer")
    ]
    units: dict[str, list[str]] = {}
    tied = _shared_names(model)
    for name in model.state_dict():
        if name not in tied:
            unit = next((prefix for prefix in prefixes if name.startswith(prefix)), name)
            units.setdefault(unit, []).append(name)
    return list(units.values())


def _shared_names(model: nn.Module) -> set[str]:
    """The names of tied weights after their first one."""
    seen: set[int] = set()
    shared = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            shared.add(name)
        seen.add(id(tensor))
    return shared


def _merged(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A unit's weights with adapters merged, under the base model's names.

    Still contains the adapters' own tensors.
    """
    model.load_state_dict(tensors, strict=False, assign=True)
    for name, layer, _ in adapter_layers(model):
        if any(tensor.startswith(f"{name}.lora_") for tensor in tensors):
            layer.merge()
    state = model.state_dict()
    merged = {base_name(name): state[name] for name in tensors}
    meta_tensors = {name: torch.empty_like(x, device="meta") for name, x in tensors.items()}
    model.load_state_dict(meta_tensors, strict=False, assign=True)
    return merged


def _base_model(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model
